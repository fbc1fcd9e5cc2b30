"""Documents from files, from datasets by name, from docstrings; alone or as a mixture.

What is large is cut into units that can be read side by side.
"""

from __future__ import annotations

import dataclasses
import glob
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from xlpre.text.docstrings import docstrings
from xlpre.text.document import Document, LineType, RowType, from_lines, from_rows
from xlpre.text.hub import files_of, is_dataset, rows_of, streamed
from xlpre.text.readers import PACKED, ByteCounter, json_rows, kind_of, parquet_rows, read_lines, row_groups

UNIT_BYTES = 64 << 20
SMALL_BYTES = 1 << 18  # units below it are read TOGETHER by one worker: each shard costs syncs of the disk
TOGETHER = 100


@dataclass(frozen=True)
class TextConfig:
    """Where the text comes from.

    Attributes:
        source: `docstrings`; a glob of .txt, .jsonl or .parquet files (.txt and .jsonl also .gz or .zst); or `hf:NAME[/CONFIG]`
            for a dataset of the Hugging Face hub, `hf:./FOLDER` for one on disk, files or what `save_to_disk` wrote.
        mixture: several sources instead, each with how often its documents are taken for training: 2 is twice, 0.5 every
            second one, as `{"wiki/*.txt.gz": 2, "hf:owner/data": 0.5}`.
        column: the field of a jsonl, parquet or hub row that holds the text.
        row_type: whether a row of a jsonl, parquet or hub source is a whole document, or one line of text (as in a .txt file,
            where an empty line ends a document).
        line_type: what a line of text is. `paragraphs`: <eop> follows it, and the ends of its sentences are found. `sentences`: one
            sentence, after which nothing is put, as BERT and the released XLNet read their files.
        split: the split of a hub dataset.
        max_chars: stop after so many characters of each source; null reads everything.
        deduplicate: leave out documents whose text was there before, to the letter.
        val_fraction: the share of documents kept out of training, to measure on. Chosen by a hash of the document.
        num_processes: processes that encode; 0 is one for each core.
    """

    source: str = "docstrings"
    mixture: dict[str, float] = field(default_factory=dict)
    column: str = "text"
    row_type: RowType = "documents"
    line_type: LineType = "paragraphs"
    split: str = "train"
    max_chars: int | None = None
    deduplicate: bool = False
    val_fraction: float = 0.01
    num_processes: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.val_fraction < 0.5:
            raise ValueError(
                f"text.val_fraction ({self.val_fraction}) is the share of documents to measure on: above 0, below 0.5"
            )
        if self.max_chars is not None and self.max_chars <= 0:
            raise ValueError(f"text.max_chars ({self.max_chars}) must be positive, or null to read everything")
        if self.num_processes < 0:
            raise ValueError(
                f"text.num_processes ({self.num_processes}) must be at least 0, which is one for each core"
            )
        for source, weight in self.mixture.items():
            if weight <= 0:
                raise ValueError(f"text.mixture: {source!r} is taken {weight} times; the number must be positive")

    @property
    def sources(self) -> dict[str, float]:
        """The sources and how often each is taken."""
        return self.mixture or {self.source: 1.0}


@dataclass(frozen=True)
class ReadUnit:
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


def units_of(config: TextConfig) -> list[list[ReadUnit]]:
    """What can be read side by side: each unit alone, small ones together, or, where a limit counts through them, all of a source.

    Their order depends on nothing but the text and `config`.

    Raises:
        ValueError: a glob that matches nothing, a file of an unknown kind, a dataset that cannot be loaded.
    """
    found = [units for item in config.sources.items() if (units := _units_of_source(*item, config))]
    return (
        found if config.max_chars is not None else [group for units in found for group in _small_ones_together(units)]
    )


def _small_ones_together(units: list[ReadUnit]) -> Iterator[list[ReadUnit]]:
    """Neighbours that are small in groups, by their number, so that a file that grows moves no other into another group."""
    group: list[ReadUnit] = []
    for unit in units:
        small = unit.n_bytes < SMALL_BYTES and not is_dataset(unit.source)  # whose size may be unknown
        if group and (not small or len(group) == TOGETHER):
            yield group
            group = []
        group.append(unit)
        if not small:
            yield group
            group = []
    if group:
        yield group


def _units_of_source(source: str, weight: float, config: TextConfig) -> list[ReadUnit]:
    if source == "docstrings":
        return [ReadUnit(source, weight)]
    if is_dataset(source):
        n_shares = streamed(source, config.split).num_shards
        states = [path.stat() for path in files_of(source)]
        changed = max((state.st_mtime_ns for state in states), default=0)
        n_bytes = sum(state.st_size for state in states) // n_shares
        return [ReadUnit(source, weight, i, n_shares, n_bytes, changed) for i in range(n_shares)]
    return [unit for path in _matching(source) for unit in _units_of_file(path, weight, config)]


def files(config: TextConfig) -> dict[str, int]:
    """The files that the sources' globs name, and those of datasets on disk, with their bytes."""
    named = [source for source in config.sources if source != "docstrings"]
    found = [files_of(source) if is_dataset(source) else _matching(source) for source in named]
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
        for document in documents_of(units, config, ByteCounter()):
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
        for document in documents_of(group, config, ByteCounter()):
            lines += document
            size += sum(map(len, document))
            if size >= characters / len(groups):
                break
    return lines


def documents_of(units: Sequence[ReadUnit], config: TextConfig, meter: ByteCounter) -> Iterator[Document]:
    """The documents of `units` one after another, `max_chars` of them; `meter` is told how much was read."""
    limit = float("inf") if config.max_chars is None else config.max_chars
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


def _matching(pattern: str) -> list[Path]:
    paths = [Path(pattern)] if Path(pattern).is_file() else sorted(map(Path, glob.glob(pattern, recursive=True)))
    if not paths:
        raise ValueError(
            f"text.source={pattern!r} matches no file; give a glob such as 'wiki/*.txt.gz', 'docstrings', or hf:NAME/CONFIG"
        )
    for path in paths:
        kind_of(path)
    return paths


def _units_of_file(path: Path, weight: float, config: TextConfig) -> Iterator[ReadUnit]:
    kind, state = kind_of(path), path.stat()
    whole = ReadUnit(str(path), weight, n_bytes=state.st_size, changed=state.st_mtime_ns)
    if kind == ".parquet":
        sizes = row_groups(path)
        for i, size in enumerate(sizes if config.row_type == "documents" else []):
            yield dataclasses.replace(whole, begin=i, end=i + 1, n_bytes=size)
        if config.row_type == "lines":
            yield dataclasses.replace(whole, n_bytes=sum(sizes))
    elif path.suffix in PACKED or (kind == ".jsonl" and config.row_type == "lines"):
        yield whole
    else:
        for begin in range(0, max(state.st_size, 1), UNIT_BYTES):
            end = min(begin + UNIT_BYTES, state.st_size)
            yield dataclasses.replace(whole, begin=begin, end=end, n_bytes=end - begin)


def _read(unit: ReadUnit, config: TextConfig, meter: ByteCounter) -> Iterator[Document]:
    if unit.source == "docstrings":
        return docstrings()
    if is_dataset(unit.source):
        share = streamed(unit.source, config.split).shard(num_shards=unit.end, index=unit.begin)
        share_of = f" of share {unit.begin + 1} of {unit.end}" if unit.end != 1 else ""
        rows = enumerate(rows_of(share, f"text.source={unit.source!r}"), 1)
        named = ((f"{unit.source}, row {number}{share_of}", row) for number, row in rows)
        return from_rows(named, config.column, config.row_type)
    path = Path(unit.source)
    kind = kind_of(path)
    if kind == ".txt":
        return from_lines(read_lines(path, meter, unit.begin), unit.begin, unit.end)
    if kind == ".jsonl":
        return from_rows(json_rows(path, meter, unit.begin, unit.end), config.column, config.row_type)
    return from_rows(parquet_rows(path, meter, config.column, unit.begin, unit.end), config.column, config.row_type)
