"""Training of a vocabulary of any kind, and the record of the text on which it was trained.

The record of NAME.model is NAME.model.json. It holds the settings on which a vocabulary depends, the version of SentencePiece, and
the names and sizes of the text files, without their folders, which can be moved. A vocabulary without a record is accepted for any text.
A vocabulary of bytes depends on no text, and has no record.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from xlpre.common.errors import InputError
from xlpre.common.files import write_text
from xlpre.common.messages import as_yaml
from xlpre.text.corpus import TextConfig, source_files, split_range
from xlpre.text.document import Document
from xlpre.text.preprocess import Preprocess, clean_text
from xlpre.text.sentencepiece_tokenizer import MAX_SENTENCE_BYTES, SENTENCEPIECE_VERSION, SentencePieceTokenizer
from xlpre.text.special_tokens import WORD_BOUNDARY
from xlpre.text.table_tokenizer import train_table
from xlpre.text.tokenizer import Tokenizer, TokenizerConfig

RECORD_FORMAT = 2
RECORDED_TEXT_SETTINGS = ("column", "row_type", "split", "max_chars")
RECORDED_SETTINGS = {
    "sentencepiece": ("train_chars", "preprocess"),
    "characters": ("vocab_size", "min_count"),
    "words": ("vocab_size", "min_count"),
}


def train_tokenizer(documents: Iterable[Document], config: TokenizerConfig) -> Tokenizer:
    """Train a vocabulary of the kind `config.kind`.

    A SentencePiece vocabulary is trained on lines that are sampled evenly from all documents; a table counts all of them.

    Raises:
        InputError: the text has no visible characters, or does not allow a vocabulary with these settings.
    """
    if config.kind != "sentencepiece":
        return train_table(documents, config)
    return SentencePieceTokenizer.train(training_lines(documents, config.train_chars, config.preprocess), config)


def training_lines(documents: Iterable[Document], n_chars: int, preprocess: Preprocess) -> Iterator[str]:
    """Return cleaned lines with about `n_chars` characters in total; long lines are split.

    Raises:
        InputError: the text has no visible characters.
    """
    lines = [clean_text(line, preprocess) for line in _sample_evenly(documents, n_chars)]
    if not any(_is_visible(character) for line in lines for character in line):
        raise InputError(
            "the text has no visible characters, so no vocabulary can be trained on it. Check text.source."
        )
    return (part for line in lines for part in split_long_line(line))


def split_long_line(line: str) -> Iterator[str]:
    """Yield the parts of a line that is too long for SentencePiece, split before spaces where possible; else the line."""
    if len(line.encode()) <= MAX_SENTENCE_BYTES:
        yield line
        return
    start, max_chars = 0, MAX_SENTENCE_BYTES // 4  # a character has at most 4 bytes
    while len(line) - start > max_chars:
        space = line.rfind(" ", start + 1, start + max_chars)
        end = space if space > 0 else start + max_chars
        yield line[start:end]
        start = end
    yield line[start:]


def record_path(path: Path) -> Path:
    """Return the path of the training record of the vocabulary `path`."""
    return path.with_name(f"{path.name}.json")


def write_training_record(path: Path, tokenizer: Tokenizer, text: TextConfig, config: TokenizerConfig) -> None:
    """Write the training record of `tokenizer`, which was trained on `text` and saved as `path`."""
    identity = {"format": RECORD_FORMAT, "sha256": tokenizer.sha256, "sentencepiece": tokenizer.library_version}
    write_text(record_path(path), json.dumps({**identity, **_training_record(text, config)}, indent=1))


def check_training_record(path: Path, tokenizer: Tokenizer, text: TextConfig, config: TokenizerConfig) -> None:
    """Raise InputError if the training record of `tokenizer`, saved as `path`, does not match `text` and `config`.

    A record that another version of xlpre wrote is refused too.
    """
    recorded = _read_record(path)
    if recorded.get("sha256") != tokenizer.sha256:  # there is no record, or it belongs to another vocabulary
        return
    if recorded.get("format") != RECORD_FORMAT:
        raise InputError(
            f"tokenizer.path={path} is invalid: another version of xlpre wrote its training record {record_path(path)}. Delete the record "
            "to use the vocabulary anyway, or delete both files to train it again."
        )
    expected = _training_record(text, config)
    changed = next((key for key in expected if key in recorded and recorded[key] != expected[key]), None)
    if changed is None:
        return
    if changed == "sources":
        before, now = (Counter(map(tuple, record[changed])) for record in (recorded, expected))
        differences = {"missing": before - now, "new": now - before}
        parts = [f"{word}: {_describe_sources(sorted(part, key=str))}" for word, part in differences.items() if part]
        difference = f"on other text than text.source={' '.join(text.sources)} ({'; '.join(parts)})"
    else:
        difference = f"with {changed}={as_yaml(recorded[changed])}, not {as_yaml(expected[changed])}"
    raise InputError(
        f"tokenizer.path={path} is invalid: it was trained {difference}. Set another tokenizer.path, delete the file to train it "
        f"again, or delete {record_path(path)} to use it anyway."
    )


def upgrade_note(path: Path, tokenizer: Tokenizer) -> str:
    """Return a warning if another version of SentencePiece trained `tokenizer`, saved as `path`; else an empty string."""
    record = _read_record(path)
    version = record.get("sentencepiece", SENTENCEPIECE_VERSION)
    if version in ("", SENTENCEPIECE_VERSION) or record.get("sha256") != tokenizer.sha256:
        return ""
    return (
        f"{path} was trained with sentencepiece {version}; the installed {SENTENCEPIECE_VERSION} would train another vocabulary, and may "
        "encode a few tokens in a million differently."
    )


def _sample_evenly(documents: Iterable[Document], n_chars: int) -> list[str]:
    """Return the lines of every n-th document, where n is the smallest power of two that gives at most `n_chars` characters.

    A document with more than 1/64 of `n_chars` characters counts as several, so that it does not make up the whole sample.
    """
    sampled: list[tuple[int, Document]] = []
    size, stride = 0, 1
    for number, document in enumerate(_split_long_documents(documents, max(n_chars // 64, 1))):
        if number % stride:
            continue
        sampled.append((number, document))
        size += sum(map(len, document))
        while size > n_chars and len(sampled) > 1:
            stride *= 2
            sampled = [(n, d) for n, d in sampled if n % stride == 0]
            size = sum(len(line) for _, d in sampled for line in d)
    return [line for _, document in sampled for line in document]


def _split_long_documents(documents: Iterable[Document], max_chars: int) -> Iterator[Document]:
    for document in documents:
        if sum(map(len, document)) <= max_chars:
            yield document
            continue
        part: list[str] = []
        size = 0
        for line in document:
            for start in range(0, len(line), max_chars):
                piece = line[start : start + max_chars]
                if part and size + len(piece) > max_chars:
                    yield part
                    part, size = [], 0
                part.append(piece)
                size += len(piece)
        yield part


def _is_visible(character: str) -> bool:
    return character not in (" ", WORD_BOUNDARY) and character.isprintable()


def _training_record(text: TextConfig, config: TokenizerConfig) -> dict[str, Any]:
    """Return the settings and files that a vocabulary depends on, as JSON values. A source without files is recorded by its name."""
    sources: list[list[Any]] = []
    for source in text.sources:
        files = source_files(text, [source])
        byte_range = source.removeprefix(split_range(source)[0]) if text.line_type == "verbatim" else ""
        sources += [[Path(name).name + byte_range, size] for name, size in files.items()] or [[source, None]]
    is_table = config.kind != "sentencepiece"
    return {
        "sources": sorted(sources, key=str),
        **{f"text.{key}": getattr(text, key) for key in (*RECORDED_TEXT_SETTINGS, *["line_type"] * is_table)},
        **{f"tokenizer.{key}": getattr(config, key) for key in RECORDED_SETTINGS[config.kind]},
    }


def _read_record(path: Path) -> dict[str, Any]:
    """Return the training record of the vocabulary `path`, or an empty dict if there is no valid record."""
    try:
        record = json.loads(record_path(path).read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def _describe_sources(sources: list[tuple[str, int | None]]) -> str:
    name, size = sources[0]
    size_text = "" if size is None else f" ({size:,} bytes)"
    n_others = len(sources) - 1
    return f"{name}{size_text}" + (f" and {n_others} more" if n_others else "")
