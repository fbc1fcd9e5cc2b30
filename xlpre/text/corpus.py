"""Documents from files, from datasets by name, from the docstrings of the installed packages. The one door to `datasets`.

A document is a list of lines, a line is text with single spaces: a paragraph or a sentence, as `text.lines` says.
"""

from __future__ import annotations

import glob
import gzip
import json
import re
import sysconfig
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import IO, Literal, cast

Document = list[str]
Lines = Literal["paragraphs", "sentences"]


@dataclass(frozen=True)
class TextConfig:
    """Where the text comes from.

    Attributes:
        source: `docstrings`; a glob of .txt, .jsonl or .parquet files (.txt and .jsonl also .gz); or `hf:NAME[/CONFIG]`
            for a dataset of the Hugging Face hub, `hf:./FOLDER` for one on disk.
        column: the field of a jsonl, parquet or hub row that holds the text.
        rows: whether a row of a jsonl, parquet or hub source is a whole document, or one line of text (as in a .txt file,
            where an empty line ends a document).
        lines: what a line of text is. `paragraphs`: <eop> follows it, and the ends of its sentences are found. `sentences`: one
            sentence, after which nothing is put, as BERT and the released XLNet read their files.
        split: the split of a hub dataset.
        limit_mb: stop after so many million characters; null reads everything.
        held_out: the share of documents kept out of training, to measure on. Chosen by a hash of the document.
    """

    source: str = "docstrings"
    column: str = "text"
    rows: Literal["documents", "lines"] = "documents"
    lines: Lines = "paragraphs"
    split: str = "train"
    limit_mb: float | None = None
    held_out: float = 0.01

    def __post_init__(self) -> None:
        if not 0 < self.held_out < 0.5:
            raise ValueError(
                f"text.held_out ({self.held_out}) is the share of documents to measure on: above 0, below 0.5"
            )
        if self.limit_mb is not None and self.limit_mb <= 0:
            raise ValueError(f"text.limit_mb ({self.limit_mb}) must be positive, or null to read everything")


def documents(config: TextConfig) -> Iterator[Document]:
    """The documents of `config.source`, in a fixed order.

    Yields:
        Non-empty documents of non-empty lines.

    Raises:
        ValueError: a glob that matches nothing, a file that cannot be read (named, with its line), no text at all.
    """
    if config.source == "docstrings":
        found: Iterable[Document] = _docstrings()
    elif config.source.startswith("hf:"):
        found = _from_rows(_hub_rows(config), config)
    else:
        found = chain.from_iterable(_from_file(path, config) for path in _matching(config.source))
    limit = float("inf") if config.limit_mb is None else config.limit_mb * 1e6
    characters = 0
    for document in found:
        if characters >= limit:
            return
        characters += sum(map(len, document))
        yield document
    if not characters:
        raise ValueError(f"text.source={config.source!r} holds no text at all; name one that does")


def files(config: TextConfig) -> dict[str, int]:
    """The files that the source's glob names, with their bytes; none for a source that is not a glob."""
    if config.source == "docstrings" or config.source.startswith("hf:"):
        return {}
    return {str(path): path.stat().st_size for path in _matching(config.source)}


def _matching(pattern: str) -> list[Path]:
    paths = sorted(Path(name) for name in glob.glob(pattern, recursive=True))
    if not paths:
        raise ValueError(
            f"text.source={pattern!r} matches no file; give a glob such as 'wiki/*.txt.gz', 'docstrings', or hf:NAME/CONFIG"
        )
    return paths


def _from_file(path: Path, config: TextConfig) -> Iterator[Document]:
    kind = next((suffix for suffix in reversed(path.suffixes) if suffix != ".gz"), "")
    if path.is_dir() or kind not in (".txt", ".jsonl", ".parquet"):
        if path.is_dir():
            raise ValueError(f"text.source: {path} is a folder; name the files in it, as '{path}/*.txt'")
        raise ValueError(
            f"text.source: {path} is of kind {kind or 'unknown'!r}; it must be a .txt, .jsonl or .parquet file (.gz for the first two)"
        )
    if kind == ".txt":
        yield from _split_at_empty_lines(_lines(path))
    else:
        yield from _from_rows(
            _json_rows(path) if kind == ".jsonl" else _parquet_rows(path, config.column), config, path
        )


def _lines(path: Path) -> Iterator[str]:
    """Lines of a text file, unpacked; what cannot be read raises ValueError with the file and the line."""
    number = 0
    try:
        with _open(path) as file:
            for number, line in enumerate(file, 1):
                yield line.decode("utf-8-sig" if number == 1 else "utf-8")  # some editors put a mark first
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path}, line {number}: not UTF-8 ({error.reason} at byte {error.start} of the line); convert or remove it"
        ) from None
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{path}, after line {number}: cannot be read: {error or type(error).__name__}") from None


def _open(path: Path) -> IO[bytes]:
    return cast(IO[bytes], gzip.open(path)) if path.suffix == ".gz" else open(path, "rb")


def _json_rows(path: Path) -> Iterator[dict]:
    for number, line in enumerate(_lines(path), 1):
        if line.strip():
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(
                    f"{path}, line {number}: not JSON ({error.msg}); one object a line is needed"
                ) from None
            if not isinstance(row, dict):
                raise ValueError(f"{path}, line {number}: a JSON object is needed, not a {type(row).__name__}")
            yield row


def _parquet_rows(path: Path, column: str) -> Iterator[dict]:
    import pyarrow
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path)
        if column not in file.schema_arrow.names:
            raise ValueError(
                f"{path}: has no column {column!r}; set text.column to one of {', '.join(file.schema_arrow.names)}"
            )
        for batch in file.iter_batches(columns=[column]):
            yield from batch.to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{path}: cannot be read as parquet: {str(error).splitlines()[0]}") from None


def _hub_rows(config: TextConfig) -> Iterator[dict]:
    import datasets

    def load(path: str, part: str | None) -> Iterator[dict]:
        return iter(datasets.load_dataset(path, part, split=config.split, streaming=True))

    name = config.source.removeprefix("hf:")
    head, _, tail = name.rpartition("/")
    try:
        try:
            return load(name, None)
        except datasets.exceptions.DatasetNotFoundError:
            if not head or name.startswith((".", "/")):
                raise
            return load(head, tail)  # "owner/data" and "data/config" look alike
    except (ValueError, OSError, datasets.exceptions.DatasetsError) as error:
        raise ValueError(f"text.source={config.source!r} could not be loaded: {' '.join(str(error).split())}") from None


def _from_rows(rows: Iterable[dict], config: TextConfig, path: Path | None = None) -> Iterator[Document]:
    texts = _column(rows, config.column, path or config.source)
    if config.rows == "lines":
        yield from _split_at_empty_lines(texts)
        return
    for text in texts:
        if document := _clean(text.splitlines()):
            yield document


def _column(rows: Iterable[dict], column: str, origin: object) -> Iterator[str]:
    for number, row in enumerate(rows, 1):
        if column not in row:
            raise ValueError(
                f"{origin}, row {number}: has no field {column!r}; set text.column to one of {', '.join(row)}"
            )
        if not isinstance(row[column], str):
            raise ValueError(f"{origin}, row {number}: {column!r} is a {type(row[column]).__name__}, text is needed")
        yield row[column]


def _split_at_empty_lines(lines: Iterable[str]) -> Iterator[Document]:
    document: list[str] = []
    for line in lines:
        if line.strip():
            document.append(line)
        elif document:
            yield _clean(document)
            document = []
    if document:
        yield _clean(document)


def _clean(lines: Iterable[str]) -> Document:
    return [clean for line in lines if (clean := " ".join(line.split()))]


def _docstrings() -> Iterator[Document]:
    """One document a Python module of the standard library and the installed packages: its docstrings, as prose.

    Packages take turns, so that a bounded read sees many of them; a paragraph is taken where it first stands.
    """
    roots = {Path(sysconfig.get_path(kind)) for kind in ("stdlib", "purelib", "platlib")}
    packages = {entry for root in roots for entry in root.iterdir() if entry.is_dir() or entry.suffix == ".py"}
    queues = [_modules(entry) for entry in sorted(packages - roots, key=lambda entry: entry.name)]
    seen: set[int] = set()
    while queues:
        for queue in list(queues):
            module = next(queue, None)
            if module is None:
                queues.remove(queue)
                continue
            document = [p for text in _texts(module) for p in _prose(text)]
            fresh = [p for p in document if hash(p) not in seen]
            seen.update(map(hash, fresh))
            if sum(map(len, fresh)) > 200:
                yield list(dict.fromkeys(fresh))


def _modules(entry: Path) -> Iterator[Path]:
    found = [entry] if entry.is_file() else sorted(entry.rglob("*.py"))
    skipped = {"tests", "test", "site-packages", "_vendor", "idlelib", "lib2to3"}
    return (path for path in found if not skipped.intersection(path.parts[len(entry.parts) - 1 :]))


# a string that opens a file (after comments) or a block; parsing the file would be exact and far slower
_DOCSTRING = re.compile(r'''(?:\A(?:\s|#[^\n]*\n)*|:[ \t]*\n\s*)[rRuU]?("""|\'\'\')(.*?)\1''', re.DOTALL)


def _texts(module: Path) -> Iterator[str]:
    try:
        source = module.read_text("utf-8")
    except (OSError, UnicodeDecodeError):
        return  # another encoding, or gone: nothing is owed to this source
    for match in _DOCSTRING.finditer(source):
        yield match[2]


def _prose(docstring: str) -> Iterator[str]:
    """The paragraphs of a docstring that read as English: words, not signatures, tables or sessions."""
    for block in re.split(r"\n\s*\n", docstring):
        text = " ".join(block.split())
        letters = sum(character.isalpha() or character == " " for character in text)
        code = ">>>" in text or "::" in text or "====" in text or "----" in text
        if not code and len(text) > 60 and text.count(" ") >= 8 and letters > 0.85 * len(text):
            yield text
