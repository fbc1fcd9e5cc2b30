"""Pack text into a token store.

python pretrain/prepare.py --config configs/pretrain/quickstart.yaml text.source='wiki/*.txt.gz'
"""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

from tqdm import tqdm

from pretrain.config import PretrainConfig
from xlpre.common.cli_main import run_main
from xlpre.config.cli import from_command_line
from xlpre.config.loader import from_mapping
from xlpre.data.store import META, TokenStore, is_nothing, is_store
from xlpre.data.store_builder import build_store
from xlpre.text.corpus import TextConfig, files, sample_of
from xlpre.text.tokenizer import Tokenizer

SAMPLE = 1_000_000  # characters, of which it is seen whether the vocabulary is of this text
UNKNOWN = 0.01  # share of unknown characters from which on it is not


def make_store(config: PretrainConfig) -> TokenStore:
    """The store of `config`: the one that is there, or a new one.

    Raises:
        ValueError: the one that is there was made from another text or with another vocabulary, or is something else.
    """
    path = Path(config.data.store_dir)
    if not is_nothing(path) and not is_store(path):
        raise ValueError(f"data.store_dir={path} is there already and is no token store; choose another data.store_dir")
    tokenizer = Tokenizer.named_in(config.tokenizer)
    if not is_nothing(path):
        store = TokenStore(path)
        store.check_vocabulary(tokenizer, f"tokenizer.path={config.tokenizer.path}")
        _check_source(store, config.text)
        print(f"{path}: there already, {_counts(store)}")
        return store
    _warn_of_unknown(config, tokenizer)
    started = time.monotonic()
    with _Progress(sum(files(config.text).values())) as progress:
        store = build_store(path, config.text, tokenizer, progress.show)
    print(f"{path}: {_counts(store)} in {time.monotonic() - started:.0f} s")
    return store


def _warn_of_unknown(config: PretrainConfig, tokenizer: Tokenizer) -> None:
    """Say so if the vocabulary is not of this text."""
    try:
        sample = sample_of(config.text, SAMPLE)
    except ValueError:
        return  # told once the rest is encoded
    if (share := tokenizer.unknown(sample)) > UNKNOWN:
        print(
            f"warning: {share:.0%} of the characters of this text (of a sample of it) have no piece in tokenizer.path="
            f"{config.tokenizer.path} and will be <unk>; learn a vocabulary from it with pretrain/train_tokenizer.py and another "
            "tokenizer.path",
            flush=True,
        )


def _check_source(store: TokenStore, text: TextConfig) -> None:
    way_out = "name another data.store_dir, or delete the folder"
    made = dataclasses.asdict(from_mapping(TextConfig, store.meta["source"], str(store.path / META)))
    for key, wanted in dataclasses.asdict(text).items():
        if key != "workers" and (was := made[key]) != wanted:
            was, wanted = ("null" if value is None else value for value in (was, wanted))
            raise ValueError(
                f"data.store_dir={store.path} was made with text.{key}={was}, not {wanted}; set text.{key}={was}, or {way_out}"
            )
    if (now := files(text)) != (was := store.meta["files"]):
        odd = sorted(set(now.items()) ^ set(was.items()))[0][0]
        raise ValueError(f"data.store_dir={store.path} was made before {odd} was added, removed or changed; {way_out}")


class _Progress:
    """A bar over the bytes of the sources, with the megabytes of text encoded a second."""

    def __init__(self, n_bytes: int) -> None:
        tqdm.monitor_interval = 0  # its thread would be a second one beside what is forked
        self._bar = tqdm(total=n_bytes or None, unit="B", unit_scale=True, desc="encoding", disable=None)
        self._started, self._text = time.monotonic(), 0

    def show(self, source: int, text: int) -> None:
        """Bytes of sources read, characters encoded, since the last call."""
        self._text += text
        self._bar.set_postfix_str(
            f"{self._text / 1e6 / (time.monotonic() - self._started):.1f} MB/s of text", refresh=False
        )
        self._bar.update(source)

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()


def _counts(store: TokenStore) -> str:
    meta = store.meta
    return f"{meta['train_n_tokens']:,} tokens to train on, {meta['held_out_n_tokens']:,} held out"


def main() -> None:
    """The command."""
    make_store(from_command_line(PretrainConfig, __doc__ or ""))


if __name__ == "__main__":
    run_main(main)
