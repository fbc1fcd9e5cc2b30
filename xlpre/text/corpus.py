"""Documents from files, from datasets by name, from docstrings; alone or as a mixture. The one door to `datasets`.

A document is a list of lines, a line is text with single spaces: a paragraph or a sentence, as `text.lines` says. What is large is cut
into units that can be read side by side.
"""

from __future__ import annotations

import dataclasses
import glob
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from xlpre.text.docstrings import docstrings
from xlpre.text.files import PACKED, Meter, json_rows, kind_of, parquet_rows, read_lines, row_groups

Document = list[str]
Lines = Literal["paragraphs", "sentences"]
LONGEST_DOCUMENT = 16_000_000  # characters; what is longer is cut
UNIT_BYTES = 64 << 20
SMALL_BYTES = 1 << 18  # units below it are read TOGETHER by one worker: each shard costs syncs of the disk
TOGETHER = 100
SAVED = ("dataset_dict.json", "state.json")  # what `datasets` puts beside what it saves to disk


@dataclass(frozen=True)
class TextConfig:
    """Where the text comes from.

    Attributes:
        source: `docstrings`; a glob of .txt, .jsonl or .parquet files (.txt and .jsonl also .gz or .zst); or `hf:NAME[/CONFIG]`
            for a dataset of the Hugging Face hub, `hf:./FOLDER` for one on disk, files or what `save_to_disk` wrote.
        mixture: several sources instead, each with how often its documents are taken for training: 2 is twice, 0.5 every
            second one, as `{"wiki/*.txt.gz": 2, "hf:owner/data": 0.5}`.
        column: the field of a jsonl, parquet or hub row that holds the text.
        rows: whether a row of a jsonl, parquet or hub source is a whole document, or one line of text (as in a .txt file,
            where an empty line ends a document).
        lines: what a line of text is. `paragraphs`: <eop> follows it, and the ends of its sentences are found. `sentences`: one
            sentence, after which nothing is put, as BERT and the released XLNet read their files.
        split: the split of a hub dataset.
        limit_mb: stop after so many million characters of each source; null reads everything.
        deduplicate: leave out documents whose text was there before, to the letter.
        held_out: the share of documents kept out of training, to measure on. Chosen by a hash of the document.
        workers: processes that encode; 0 is one for each core.
    """

    source: str = "docstrings"
    mixture: dict[str, float] = field(default_factory=dict)
    column: str = "text"
    rows: Literal["documents", "lines"] = "documents"
    lines: Lines = "paragraphs"
    split: str = "train"
    limit_mb: float | None = None
    deduplicate: bool = False
    held_out: float = 0.01
    workers: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.held_out < 0.5:
            raise ValueError(
                f"text.held_out ({self.held_out}) is the share of documents to measure on: above 0, below 0.5"
            )
        if self.limit_mb is not None and self.limit_mb <= 0:
            raise ValueError(f"text.limit_mb ({self.limit_mb}) must be positive, or null to read everything")
        if self.workers < 0:
            raise ValueError(f"text.workers ({self.workers}) must be at least 0, which is one for each core")
        for source, weight in self.mixture.items():
            if weight <= 0:
                raise ValueError(f"text.mixture: {source!r} is taken {weight} times; the number must be positive")

    @property
    def sources(self) -> dict[str, float]:
        """The sources and how often each is taken."""
        return self.mixture or {self.source: 1.0}


@dataclass(frozen=True)
class Unit:
    """A part of the text that can be read by itself.

    Attributes:
        source: `docstrings`, `hf:...`, or a file.
        weight: how often its documents are taken for training.
        begin, end: of a plain file, the bytes; of a parquet file, the row groups; of a dataset, which share of how many.
        n_bytes: its size; 0 if nobody knows.
        changed: when its file was changed last, in nanoseconds.
    """

    source: str
    weight: float
    begin: int = 0
    end: int | None = None
    n_bytes: int = 0
    changed: int = 0


def units_of(config: TextConfig) -> list[list[Unit]]:
    """What can be read side by side: each unit alone, small ones together, or, where a limit counts through them, all of a source.

    Their order depends on nothing but the text and `config`.

    Raises:
        ValueError: a glob that matches nothing, a file of an unknown kind, a dataset that cannot be loaded.
    """
    found = [units for item in config.sources.items() if (units := _units_of_source(*item, config))]
    return found if config.limit_mb is not None else [group for units in found for group in _small_ones_together(units)]


def _small_ones_together(units: list[Unit]) -> Iterator[list[Unit]]:
    """Neighbours that are small in groups, by their number, so that a file that grows moves no other into another group."""
    group: list[Unit] = []
    for unit in units:
        small = unit.n_bytes < SMALL_BYTES and not unit.source.startswith("hf:")  # whose size may be unknown
        if group and (not small or len(group) == TOGETHER):
            yield group
            group = []
        group.append(unit)
        if not small:
            yield group
            group = []
    if group:
        yield group


def _units_of_source(source: str, weight: float, config: TextConfig) -> list[Unit]:
    if source == "docstrings":
        return [Unit(source, weight)]
    if source.startswith("hf:"):
        n_shares = _hub(source, config.split).num_shards
        states = [path.stat() for path in _on_disk(source)]
        changed = max((state.st_mtime_ns for state in states), default=0)
        n_bytes = sum(state.st_size for state in states) // n_shares
        return [Unit(source, weight, i, n_shares, n_bytes, changed) for i in range(n_shares)]
    return [unit for path in _matching(source) for unit in _units_of_file(path, weight, config)]


def files(config: TextConfig) -> dict[str, int]:
    """The files that the sources' globs name, and those of datasets on disk, with their bytes."""
    named = [source for source in config.sources if source != "docstrings"]
    found = [_on_disk(source) if source.startswith("hf:") else _matching(source) for source in named]
    return {str(path): path.stat().st_size for paths in found for path in paths}


def documents(config: TextConfig) -> Iterator[Document]:
    """The documents of all sources, one after another.

    Yields:
        Non-empty documents of non-empty lines.

    Raises:
        ValueError: a file that cannot be read (named, with its line or byte), no text at all.
    """
    document = None
    for units in units_of(config):
        for document in documents_of(units, config, Meter()):
            yield document
    if document is None:
        raise ValueError(no_text(config))


def sample_of(config: TextConfig, characters: int) -> list[str]:
    """Lines of the text, about so many characters: the beginnings of its units, of a hundred of them where there are more."""
    groups = units_of(config)
    groups = groups[:: -(-len(groups) // 100)]
    lines: list[str] = []
    for group in groups:
        size = 0
        for document in documents_of(group, config, Meter()):
            lines += document
            size += sum(map(len, document))
            if size >= characters / len(groups):
                break
    return lines


def documents_of(units: Sequence[Unit], config: TextConfig, meter: Meter) -> Iterator[Document]:
    """The documents of `units` one after another, `limit_mb` of them; `meter` is told how much was read."""
    limit = float("inf") if config.limit_mb is None else config.limit_mb * 1e6
    characters = 0
    for unit in units:
        for document in _read(unit, config, meter):
            if characters >= limit:
                return
            characters += sum(map(len, document))
            yield document


def no_text(config: TextConfig) -> str:
    """The message for a corpus without a word."""
    thinned = (
        " (or text.mixture takes too little of it)" if any(weight < 1 for weight in config.sources.values()) else ""
    )
    return f"text.source={' '.join(config.sources)!r} holds no text at all{thinned}; name one that does"


def _on_disk(source: str) -> list[Path]:
    """The files of the dataset `hf:./FOLDER`; none of one that is not on disk."""
    return sorted(path for path in Path(source.removeprefix("hf:")).rglob("*") if path.is_file())


def _matching(pattern: str) -> list[Path]:
    paths = [Path(pattern)] if Path(pattern).is_file() else sorted(map(Path, glob.glob(pattern, recursive=True)))
    if not paths:
        raise ValueError(
            f"text.source={pattern!r} matches no file; give a glob such as 'wiki/*.txt.gz', 'docstrings', or hf:NAME/CONFIG"
        )
    for path in paths:
        kind_of(path)
    return paths


def _units_of_file(path: Path, weight: float, config: TextConfig) -> Iterator[Unit]:
    kind, state = kind_of(path), path.stat()
    whole = Unit(str(path), weight, n_bytes=state.st_size, changed=state.st_mtime_ns)
    if kind == ".parquet":
        sizes = row_groups(path)
        for i, size in enumerate(sizes if config.rows == "documents" else []):
            yield dataclasses.replace(whole, begin=i, end=i + 1, n_bytes=size)
        if config.rows == "lines":
            yield dataclasses.replace(whole, n_bytes=sum(sizes))
    elif path.suffix in PACKED or (kind == ".jsonl" and config.rows == "lines"):
        yield whole
    else:
        for begin in range(0, max(state.st_size, 1), UNIT_BYTES):
            end = min(begin + UNIT_BYTES, state.st_size)
            yield dataclasses.replace(whole, begin=begin, end=end, n_bytes=end - begin)


def _read(unit: Unit, config: TextConfig, meter: Meter) -> Iterator[Document]:
    if unit.source == "docstrings":
        return docstrings()
    if unit.source.startswith("hf:"):
        share = _hub(unit.source, config.split).shard(num_shards=unit.end, index=unit.begin)
        rows = enumerate(_hub_rows(share, f"text.source={unit.source!r}"), 1)
        share_of = f" of share {unit.begin + 1} of {unit.end}" if unit.end != 1 else ""
        return _from_rows(((f"{unit.source}, row {number}{share_of}", row) for number, row in rows), config)
    path = Path(unit.source)
    kind = kind_of(path)
    if kind == ".txt":
        return _from_lines(read_lines(path, meter, unit.begin), unit)
    if kind == ".jsonl":
        return _from_rows(json_rows(path, meter, unit.begin, unit.end), config)
    return _from_rows(parquet_rows(path, meter, config.column, unit.begin, unit.end), config)


def _from_lines(lines: Iterable[tuple[int, str]], unit: Unit) -> Iterator[Document]:
    """Documents between empty lines. A unit that begins inside a file has those after an empty line of its own stretch."""
    inside = unit.begin == 0
    last = float("inf") if unit.end is None else unit.end

    def own() -> Iterator[str]:
        nonlocal inside
        for offset, line in lines:
            if line.strip():
                if inside:
                    yield line
                elif offset >= last:
                    return
            else:
                if offset >= last:
                    return
                inside = True
                yield line

    return _split_at_empty_lines(own())


def hub_rows(source: str, split: str) -> Iterator[dict[str, Any]]:
    """Rows of a split of the dataset `hf:NAME[/CONFIG]`, in their order.

    Raises:
        ValueError: it cannot be loaded, or not be read to its end.
    """
    return _hub_rows(_hub(source, split, ""), repr(source))


def _hub(source: str, split: str, key: str = "text.source=") -> Any:
    """The streamed split that `source` names."""
    import datasets

    name = source.removeprefix("hf:")
    head, _, tail = name.rpartition("/")
    try:
        if any((Path(name) / file).is_file() for file in SAVED):
            return _saved(name, split)
        try:
            return datasets.load_dataset(name, None, split=split, streaming=True)
        except datasets.exceptions.DatasetNotFoundError:
            if not head or name.startswith((".", "/")):
                raise
            return datasets.load_dataset(head, tail, split=split, streaming=True)  # "owner/data", "data/config"
    except (ValueError, OSError, datasets.exceptions.DatasetsError) as error:
        raise ValueError(f"{key}{source!r} could not be loaded: {' '.join(str(error).split())}") from None


def _saved(folder: str, split: str) -> Any:
    """The split, or all if there are none, of what `save_to_disk` wrote."""
    import datasets

    found = datasets.load_from_disk(folder)
    if isinstance(found, dict):
        if split not in found:
            raise ValueError(f"Bad split: {split}. Available splits: {list(found)}")
        found = found[split]
    return found.to_iterable_dataset(num_shards=max(1, len(found.cache_files)))


def _hub_rows(share: Any, origin: str) -> Iterator[dict[str, Any]]:
    number = 0
    rows = iter(share)
    while True:
        try:
            row = next(rows)
        except StopIteration:
            return
        except Exception as error:  # noqa: BLE001 - whatever a network or a codec makes of it
            raise ValueError(
                f"{origin}, after row {number}: cannot be read: {' '.join(str(error).split())}; run again to go on"
            ) from None
        number += 1
        yield row


def _from_rows(rows: Iterable[tuple[str, dict[str, Any]]], config: TextConfig) -> Iterator[Document]:
    texts = _column(rows, config.column)
    if config.rows == "lines":
        yield from _split_at_empty_lines(texts)
        return
    for text in texts:
        yield from _split_at_empty_lines(line for line in text.splitlines() if line.strip())


def _column(rows: Iterable[tuple[str, dict[str, Any]]], column: str) -> Iterator[str]:
    for place, row in rows:
        if column not in row:
            raise ValueError(f"{place}: has no field {column!r}; set text.column to one of {', '.join(row)}")
        if not isinstance(row[column], str):
            others = ", ".join(key for key in row if key != column)
            raise ValueError(
                f"{place}: {column!r} is {json.dumps(row[column], default=str)[:60]}, where text is needed; remove the row"
                + (f", or set text.column to one of {others}" if others else "")
            )
        yield row[column]


def _split_at_empty_lines(lines: Iterable[str]) -> Iterator[Document]:
    document: Document = []
    characters = 0
    for line in lines:
        clean = line.strip()
        if "  " in clean or not clean.isprintable():  # seldom, and several times slower
            clean = " ".join(clean.split())
        if clean:
            document.append(clean)
            characters += len(clean)
        if document and (not clean or characters >= LONGEST_DOCUMENT):
            yield document
            document, characters = [], 0
    if document:
        yield document
