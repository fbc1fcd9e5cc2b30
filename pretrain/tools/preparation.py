"""Vocabulary and token store of a pretraining run: reuse the existing ones, or make them."""

from __future__ import annotations

import dataclasses
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from tqdm import tqdm

from pretrain.config import PretrainConfig
from pretrain.trainer.config_warnings import ignored_vocab_size, small_validation_text_warning
from xlpre.common.errors import InputError
from xlpre.common.messages import as_yaml
from xlpre.config.cli import NO_EXPLICIT_KEYS, ExplicitKeys
from xlpre.data.store import META, TokenStore, is_nothing, is_store
from xlpre.data.store_builder import build_store
from xlpre.text.corpus import TextConfig, read_documents, sample_lines, source_files
from xlpre.text.load_tokenizer import tokenizer_from_config
from xlpre.text.sentencepiece_tokenizer import SentencePieceTokenizer
from xlpre.text.tokenizer import Tokenizer
from xlpre.text.tokenizer_training import check_training_record, train_tokenizer, upgrade_note, write_training_record

SAMPLE_CHARS = 1_000_000  # characters of text that are checked for unknown characters
MAX_UNKNOWN = 0.01  # fraction of unknown characters above which a warning is printed


def make_tokenizer(config: PretrainConfig) -> Tokenizer:
    """Return the vocabulary `tokenizer.path`; train and save it if there is no such file.

    Raises:
        InputError: the existing vocabulary has another size or character coverage, or was trained on another text.
    """
    path, kind = Path(config.tokenizer.path), config.tokenizer.kind
    if path.exists():
        tokenizer = tokenizer_from_config(config.tokenizer)
        existing = {}
        if isinstance(tokenizer, SentencePieceTokenizer):
            existing = {"vocab_size": len(tokenizer), "character_coverage": tokenizer.character_coverage}
        for key, value in existing.items():
            if value != (configured := getattr(config.tokenizer, key)):
                raise InputError(
                    f"tokenizer.{key}={configured} is invalid: {path} was trained with tokenizer.{key}={value}. "
                    f"Set tokenizer.{key}={value} or another tokenizer.path, or delete the file."
                )
        if kind != "bytes":
            check_training_record(path, tokenizer, config.text, config.tokenizer)
        print(f"{path}: exists already, {len(tokenizer):,} pieces")
        _print_note(upgrade_note(path, tokenizer))
        return tokenizer
    _check_writable(path)
    start = time.monotonic()
    if kind != "bytes":
        sources = " ".join(config.text.sources)
        pieces = f"{config.tokenizer.vocab_size:,} {'pieces' if kind == 'sentencepiece' else kind}"
        limit = "up to " if kind != "sentencepiece" else ""
        print(f"{path}: training a vocabulary of {limit}{pieces} on {sources} ...", flush=True)
    tokenizer = train_tokenizer(read_documents(config.text), config.tokenizer)
    tokenizer.save(path)
    if kind != "bytes":
        write_training_record(path, tokenizer, config.text, config.tokenizer)
    print(f"{path}: {len(tokenizer):,} pieces in {time.monotonic() - start:.0f} s")
    return tokenizer


def _check_writable(path: Path) -> None:
    """Raise InputError, before a vocabulary is trained, if it cannot be saved as `path`."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise InputError(
            f"tokenizer.path={path} is invalid: the folder {path.parent} cannot be written ({error.strerror}). Set another path."
        ) from None


def make_store(config: PretrainConfig, explicit_keys: ExplicitKeys = NO_EXPLICIT_KEYS) -> TokenStore:
    """Return the token store `data.store_dir`; build it if there is no such folder.

    Args:
        config: settings of the run.
        explicit_keys: keys that the user set, see `ignored_vocab_size`.

    Raises:
        InputError: the folder is not a token store, or was built from another text or with another vocabulary.
    """
    path = Path(config.data.store_dir)
    if not is_nothing(path) and not is_store(path):
        raise InputError(
            f"data.store_dir={path} is invalid: the folder exists and is not a token store. Set another data.store_dir."
        )
    tokenizer = tokenizer_from_config(config.tokenizer)
    if note := ignored_vocab_size(config, len(tokenizer), explicit_keys):
        print(note, flush=True)
    if not is_nothing(path):
        store = TokenStore(path)
        store.check_vocabulary(tokenizer, f"tokenizer.path={config.tokenizer.path}")
        files = source_files(config.text)
        _check_source(store, config.text, files)
        print(f"{path}: exists already, {_token_counts(store)}")
        _print_note(store.upgrade_note)
        _print_note(_newer_text_note(store, files))
        return store
    _warn_of_unknown_characters(config, tokenizer)
    print(f"{path}: tokenizing {' '.join(config.text.sources)} ...", flush=True)
    start = time.monotonic()
    with _ProgressBar(sum(source_files(config.text).values())) as progress:
        store = build_store(path, config.text, tokenizer, progress.update)
    print(f"{path}: {_token_counts(store)} in {time.monotonic() - start:.0f} s")
    if warning := small_validation_text_warning(config, store):
        print(warning, flush=True)
    return store


def _print_note(note: str) -> None:
    if note:
        print(f"note: {note}", flush=True)


def _warn_of_unknown_characters(config: PretrainConfig, tokenizer: Tokenizer) -> None:
    """Warn if the vocabulary does not cover the characters of the text."""
    try:
        sample = sample_lines(config.text, SAMPLE_CHARS)
    except InputError:
        return  # raised again, with a better message, when the text is encoded
    if (unknown := tokenizer.unknown_fraction(sample)) > MAX_UNKNOWN:
        remedy = "train a vocabulary on this text with pretrain/train_tokenizer.py and another tokenizer.path"
        if tokenizer.kind != "sentencepiece":
            remedy += ", or with a lower tokenizer.min_count or a higher tokenizer.vocab_size"
        print(
            f"warning: {unknown:.0%} of the characters in a sample of this text have no piece in tokenizer.path="
            f"{config.tokenizer.path} and will be <unk>; {remedy}",
            flush=True,
        )


def _check_source(store: TokenStore, text: TextConfig, files: Mapping[str, int]) -> None:
    """Raise InputError if `store` was built with other `text` settings or other `files`."""
    remedy = "set another data.store_dir, or delete the folder"
    built = dataclasses.asdict(store.text_config)
    for key, configured in dataclasses.asdict(text).items():
        if key == "num_processes" or built[key] == configured:
            continue
        current, earlier = f"text.{key}={as_yaml(configured)}", f"text.{key}={as_yaml(built[key])}"
        if key in ("source", "mixture"):
            if store.text_config.sources == text.sources:  # a mixture replaces the source
                continue
            current, earlier = _sources(text), _sources(store.text_config)
        raise InputError(
            f"{current} is invalid: data.store_dir={store.path} was built with {earlier}. Set {earlier}; or {remedy}."
        )
    if changed := sorted(set(files.items()) ^ set(store.meta["files"].items())):
        raise InputError(
            f"data.store_dir={store.path} is invalid: {changed[0][0]} was added, removed or changed after the store was built. "
            f"{remedy.capitalize()}."
        )


def _sources(text: TextConfig) -> str:
    """Return the setting that names the sources, as KEY=VALUE."""
    return f"{text.source_key}={as_yaml(text.mixture or text.source)}"


def _newer_text_note(store: TokenStore, files: Mapping[str, int]) -> str:
    """Return a note if one of the files, of unchanged size, was modified after `store` was built; else an empty string."""
    built = (store.path / META).stat().st_mtime
    newer = next((name for name in files if Path(name).stat().st_mtime > built), None)
    if newer is None:
        return ""
    return f"{newer} was modified after {store.path} was built. If its text has changed, delete the folder."


class _ProgressBar:
    """Progress bar over the bytes of the sources, with the encoding speed in MB of text per second."""

    def __init__(self, n_bytes: int) -> None:
        tqdm.monitor_interval = 0  # no monitor thread: processes are forked while the bar is shown
        self._bar = tqdm(total=n_bytes or None, unit="B", unit_scale=True, desc="tokenizing", disable=None)
        self._start, self._n_chars = time.monotonic(), 0

    def update(self, n_bytes: int, n_chars: int) -> None:
        """Add the bytes read and the characters encoded since the last call."""
        self._n_chars += n_chars
        speed = self._n_chars / 1e6 / (time.monotonic() - self._start)
        self._bar.set_postfix_str(f"{speed:.1f} MB/s of text", refresh=False)
        self._bar.update(n_bytes)

    def __enter__(self) -> _ProgressBar:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()


def _token_counts(store: TokenStore) -> str:
    meta = store.meta
    return f"{meta['train_n_tokens']:,} training tokens, {meta['val_n_tokens']:,} validation tokens"
