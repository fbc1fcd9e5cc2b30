"""Documents of a corpus: text files, Hugging Face datasets, docstrings, or a mixture of them.

The corpus is divided into units (files, parts of files or parts of datasets), which processes read in parallel.
"""

from __future__ import annotations

import dataclasses
import glob
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

from xlpre.common.errors import InputError, check_minimum
from xlpre.text.docstring_corpus import read_docstrings
from xlpre.text.document import (
    MAX_DOCUMENT_CHARS,
    Document,
    LineType,
    RowType,
    documents_from_lines,
    documents_from_parts,
    documents_from_rows,
    first_characters,
)
from xlpre.text.hub import dataset_files, is_hf_dataset, iterate_rows, open_stream
from xlpre.text.readers import (
    COMPRESSED_SUFFIXES,
    ByteCounter,
    file_kind,
    json_rows,
    parquet_rows,
    read_lines,
    read_parts,
    row_group_sizes,
)

VAL_KEY = "text.val_source"
UNIT_BYTES = 64 << 20
SMALL_UNIT_BYTES = 1 << 18  # smaller units are grouped, because each group costs several disk flushes
MAX_GROUP_UNITS = 100
MAX_SAMPLED_GROUPS = 100


@dataclass(frozen=True)
class TextConfig:
    """Text of the corpus.

    Attributes:
        source: `docstrings` for the docstrings of the installed Python packages; a glob of .txt, .jsonl or .parquet files (.txt and
            .jsonl also .gz or .zst); `hf:[OWNER/]NAME[/CONFIG]` for a dataset of the Hugging Face
            hub; `hf:./FOLDER` for a dataset on disk.
        mixture: several sources instead of `source`, each with a weight, as in `{"wiki/*.txt.gz": 2, "hf:owner/data": 0.5}`. The weight
            is the number of times that training sees each document in an epoch: 2 is twice, and 0.5 is half of the documents. On the
            command line, `text.source` and `text.mixture` replace both settings of the file. A vocabulary is trained without weights.
        column: field of a jsonl, parquet or hub row that holds the text.
        row_type: content of a jsonl, parquet or hub row. `documents`: a whole document. `lines`: one line of text, with an empty line
            at the end of a document, as in a .txt file.
        line_type: content of a line of text. `paragraphs`: a line is a paragraph. `<eop>` follows it, and sentence ends are detected in it.
            `sentences`: a line is one sentence, without `<eop>`, as in the input files of BERT and the released XLNet. `verbatim`: files
            of any name are one continuous text each, in which empty lines, spaces and line ends are kept and no `<eod>` is added, as in
            language-modeling benchmarks. `FILE[BEGIN:END]` is a range of its bytes, as in `enwik8.gz[0:90000000]`. It needs a
            vocabulary of bytes, characters or words, and `val_source`.
        split: split of a hub dataset.
        max_chars: number of characters after which reading a source stops: at the end of a document, or with
            `line_type=verbatim` exactly there. null: no limit.
        deduplicate: drop documents whose text is identical to that of an earlier document, and training documents that are also in
            `val_source`.
        val_fraction: fraction of the documents for validation. They are selected by a hash of their text.
        val_source: source of the validation text, used instead of `val_fraction`. It must not overlap `source`. null: none.
        num_processes: number of processes that encode the text. null: one per core.
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
    val_source: str | None = None
    num_processes: int | None = None

    def __post_init__(self) -> None:
        if not 0 < self.val_fraction < 0.5:
            raise InputError(
                f"text.val_fraction={self.val_fraction} is invalid: it must be above 0 and below 0.5. Set 0.01, for example."
            )
        check_minimum("text.max_chars", self.max_chars, 1, "Set null to read everything.")
        check_minimum("text.num_processes", self.num_processes, 1, "Set null for one per core.")
        for source, weight in self.mixture.items():
            if weight <= 0:
                raise InputError(
                    f"text.mixture={{{source!r}: {weight}}} is invalid: weights must be positive. Remove the source to leave it out."
                )

    @property
    def sources(self) -> dict[str, float]:
        """The weight of each source: the number of times that training sees each of its documents."""
        return self.mixture or {self.source: 1.0}

    @property
    def source_key(self) -> str:
        """The setting that names the sources, for error messages."""
        return "text.mixture" if self.mixture else "text.source"


@dataclass(frozen=True)
class ReadUnit:
    """A part of the corpus that can be read on its own.

    Attributes:
        source: `docstrings`, `hf:...`, or a file.
        weight: number of times that training sees each document.
        begin: first byte of a plain file, first row group of a parquet file, or index of the shard of a dataset.
        end: byte or row group after the last one of the unit, or number of shards of the dataset. None: the end of the file.
        n_bytes: size of the unit in bytes; 0 if unknown.
        modified_ns: time of the last change of the file, in nanoseconds.
    """

    source: str
    weight: float
    begin: int = 0
    end: int | None = None
    n_bytes: int = 0
    modified_ns: int = 0


def list_units(config: TextConfig, key: str | None = None) -> list[list[ReadUnit]]:
    """Return groups of units that can be read in parallel. The units of a group are read one after another.

    A large unit forms its own group; small units share groups. With `max_chars`, which limits a whole source, all units of a source form
    one group. The order depends only on the text and `config`.

    Args:
        config: text settings.
        key: setting or argument that names the sources, for error messages. None: `config.source_key`.

    Raises:
        InputError: a glob matches no file, a file is of an unknown kind, or a dataset cannot be loaded.
    """
    key = key or config.source_key
    by_source = [units for item in config.sources.items() if (units := _units_of_source(*item, config, key))]
    if config.max_chars is not None:
        return by_source
    return [group for units in by_source for group in _group_small_units(units)]


def list_val_units(config: TextConfig) -> list[list[ReadUnit]]:
    """Return groups of units of the validation text, as `list_units` does; none if it is a fraction of the documents."""
    return list_units(validation_text(config), VAL_KEY) if config.val_source is not None else []


def check_disjoint(units: Sequence[ReadUnit], val_units: Sequence[ReadUnit]) -> None:
    """Raise InputError if training text and validation text (`val_source`) have a part of a file or dataset in common."""
    by_source: dict[str, list[ReadUnit]] = {}
    for unit in val_units:
        by_source.setdefault(os.path.realpath(unit.source), []).append(unit)
    for unit in units if by_source else []:
        for other in by_source.get(os.path.realpath(unit.source), []):
            ends = [float("inf") if end is None else end for end in (unit.end, other.end)]
            if unit.begin < ends[1] and other.begin < ends[0]:
                raise InputError(
                    f"text.val_source is invalid: {other.source} is part of text.source too, so training would read validation text. "
                    "Name text for validation that text.source does not match."
                )


def validation_text(config: TextConfig) -> TextConfig:
    """Return settings whose source is the validation source of `config`."""
    return dataclasses.replace(config, source=config.val_source or "", mixture={})


def source_files(config: TextConfig, sources: Iterable[str] | None = None) -> dict[str, int]:
    """Return the sizes in bytes of the files of `sources`, by path, including datasets on disk. Default: all, with the validation text."""
    keys = dict.fromkeys(config.sources if sources is None else sources, config.source_key)
    if sources is None and config.val_source is not None:
        keys.setdefault(config.val_source, VAL_KEY)
    keys.pop("docstrings", None)
    paths = [
        dataset_files(source) if is_hf_dataset(source) else _matching_files(source, config, key)
        for source, key in keys.items()
    ]
    return {str(path): path.stat().st_size for files in paths for path in files}


def read_documents(config: TextConfig, key: str | None = None) -> Iterator[Document]:
    """Yield the documents of all sources in order. Documents and their lines are not empty.

    Args:
        config: text settings.
        key: see `list_units`.

    Raises:
        InputError: a file cannot be read, or the sources contain no text.
    """
    document = None
    for units in list_units(config, key):
        for document in read_units(units, config):
            yield document
    if document is None:
        raise InputError(empty_text_message(config, key))


def read_units(units: Sequence[ReadUnit], config: TextConfig, counter: ByteCounter | None = None) -> Iterator[Document]:
    """Yield the documents of `units` in order, until they have `config.max_chars` characters.

    Args:
        units: units to read.
        config: text settings.
        counter: counts the bytes read.
    """
    limit = float("inf") if config.max_chars is None else config.max_chars
    n_chars = 0
    for unit in units:
        for document in _read_unit(unit, config, counter):
            if n_chars >= limit:
                return
            if config.line_type == "verbatim" and config.max_chars is not None:
                document = first_characters(document, config.max_chars - n_chars)
            n_chars += sum(map(len, document))
            yield document


def sample_lines(config: TextConfig, n_chars: int) -> list[str]:
    """Return lines with about `n_chars` characters in total, from the beginnings of up to 100 groups of units."""
    groups = list_units(config)
    if not groups:  # all files are empty
        return []
    groups = groups[:: -(-len(groups) // MAX_SAMPLED_GROUPS)]
    share = -(-n_chars // len(groups))
    # max_chars also divides a verbatim text into documents of this size
    limited = dataclasses.replace(config, max_chars=min(share, config.max_chars or share))
    lines: list[str] = []
    for group in groups:
        size = 0
        for line in chain.from_iterable(read_units(group, limited)):
            if size >= share:
                break
            lines.append(line[: share - size])
            size += len(line)
    return lines


def empty_text_message(config: TextConfig, key: str | None = None) -> str:
    """Return the error message for a corpus without text. `key`: see `list_units`."""
    has_small_weight = any(weight < 1 for weight in config.sources.values())
    reason = "holds no text" + (", or text.mixture takes too little of it" if has_small_weight else "")
    return f"{key or config.source_key}={' '.join(config.sources)} is invalid: it {reason}. Name a source with text."


def _group_small_units(units: list[ReadUnit]) -> Iterator[list[ReadUnit]]:
    """Yield consecutive small units in groups, and other units alone.

    A group has a maximum number of units, not of bytes, so that a growing file does not move other files to another group.
    """
    group: list[ReadUnit] = []
    for unit in units:
        is_small = unit.n_bytes < SMALL_UNIT_BYTES and not is_hf_dataset(
            unit.source
        )  # a dataset may be of unknown size
        if group and (not is_small or len(group) == MAX_GROUP_UNITS):
            yield group
            group = []
        group.append(unit)
        if not is_small:
            yield group
            group = []
    if group:
        yield group


def _units_of_source(source: str, weight: float, config: TextConfig, key: str) -> list[ReadUnit]:
    if config.line_type == "verbatim" and (source == "docstrings" or is_hf_dataset(source)):
        raise InputError(
            f"{key}={source} is invalid: text.line_type=verbatim reads text files. Name files, or set text.line_type=paragraphs."
        )
    if source == "docstrings":
        return [ReadUnit(source, weight)]
    if is_hf_dataset(source):
        n_shards = open_stream(source, config.split, f"{key}=").num_shards
        stats = [path.stat() for path in dataset_files(source)]
        modified_ns = max((stat.st_mtime_ns for stat in stats), default=0)
        n_bytes = sum(stat.st_size for stat in stats) // n_shards
        return [ReadUnit(source, weight, i, n_shards, n_bytes, modified_ns) for i in range(n_shards)]
    if config.line_type == "verbatim":
        _, begin, end = split_range(source, key)
        return [_verbatim_unit(path, weight, begin, end) for path in _matching_files(source, config, key)]
    return [unit for path in _matching_files(source, config, key) for unit in _units_of_file(path, weight, config)]


def _verbatim_unit(path: Path, weight: float, begin: int, end: int | None) -> ReadUnit:
    stat = path.stat()
    n_bytes = stat.st_size if path.suffix in COMPRESSED_SUFFIXES else (end or stat.st_size) - begin
    return ReadUnit(str(path), weight, begin, end, max(n_bytes, 0), stat.st_mtime_ns)


def split_range(source: str, key: str = "text.source") -> tuple[str, int, int | None]:
    """Return the glob, the first byte, and the byte after the last one, of a source such as `enwik8[0:90000000]`."""
    match = re.fullmatch(r"(.+)\[(\d*):(\d*)\]", source)
    if not match:
        return source, 0, None
    begin, end = int(match[2] or 0), int(match[3]) if match[3] else None
    if end is not None and end <= begin:
        raise InputError(f"{key}={source} is invalid: the range has no bytes. Set its end above {begin}.")
    return match[1], begin, end


def _units_of_file(path: Path, weight: float, config: TextConfig) -> Iterator[ReadUnit]:
    kind, stat = file_kind(path), path.stat()
    file = ReadUnit(str(path), weight, n_bytes=stat.st_size, modified_ns=stat.st_mtime_ns)
    if kind == ".parquet":
        sizes = row_group_sizes(path)
        for i, size in enumerate(sizes if config.row_type == "documents" else []):
            yield dataclasses.replace(file, begin=i, end=i + 1, n_bytes=size)
        if config.row_type == "lines":
            yield dataclasses.replace(file, n_bytes=sum(sizes))
    elif path.suffix in COMPRESSED_SUFFIXES or (kind == ".jsonl" and config.row_type == "lines"):
        yield file
    else:
        for begin in range(0, max(stat.st_size, 1), UNIT_BYTES):
            end = min(begin + UNIT_BYTES, stat.st_size)
            yield dataclasses.replace(file, begin=begin, end=end, n_bytes=end - begin)


def source_exists(source: str) -> bool:
    """Return False if `source` names files, and none of them exists. Datasets on the Hugging Face Hub are not looked up."""
    path, _, _ = split_range(source)
    found = Path(path).exists() or bool(glob.glob(path, recursive=True))
    return found or source == "docstrings" or is_hf_dataset(source)


def _matching_files(pattern: str, config: TextConfig, key: str) -> list[Path]:
    is_verbatim = config.line_type == "verbatim"
    if is_verbatim:
        pattern, _, _ = split_range(pattern, key)
    paths = [Path(pattern)] if Path(pattern).is_file() else sorted(map(Path, glob.glob(pattern, recursive=True)))
    if not paths:
        remedy = "Set a glob such as 'wiki/*.txt.gz', docstrings, or hf:OWNER/NAME."
        if not is_verbatim and split_range(pattern)[0] != pattern:
            remedy = "A range of bytes needs text.line_type=verbatim."
        elif is_verbatim and "[" in pattern:
            remedy = "Write a range of bytes as FILE[BEGIN:END], with numbers from 0 on."
        elif "," in pattern:
            remedy = "For several sources, set text.mixture (docs/data.md)."
        raise InputError(f"{key}={pattern} is invalid: no file matches it. {remedy}")
    unique: dict[str, Path] = {}
    for path in paths:
        unique.setdefault(os.path.realpath(path), path)  # `**` also follows links to folders
    for path in unique.values():
        file_kind(path, key, any_name=is_verbatim)
    return list(unique.values())


def _read_unit(unit: ReadUnit, config: TextConfig, counter: ByteCounter | None) -> Iterator[Document]:
    if config.line_type == "verbatim":
        limit = MAX_DOCUMENT_CHARS if config.max_chars is None else min(config.max_chars, MAX_DOCUMENT_CHARS)
        return documents_from_parts(read_parts(Path(unit.source), counter, unit.begin, unit.end), limit)
    if unit.source == "docstrings":
        return read_docstrings()
    if is_hf_dataset(unit.source):
        shard = open_stream(unit.source, config.split).shard(num_shards=unit.end, index=unit.begin)
        shard_name = f" of shard {unit.begin + 1} of {unit.end}" if unit.end != 1 else ""
        rows = enumerate(iterate_rows(shard, repr(unit.source)), 1)
        located_rows = ((f"{unit.source}, row {number}{shard_name}", row) for number, row in rows)
        return documents_from_rows(located_rows, config.column, config.row_type)
    path = Path(unit.source)
    kind = file_kind(path)
    if kind == ".txt":
        return documents_from_lines(read_lines(path, counter, unit.begin), unit.begin, unit.end)
    if kind == ".jsonl":
        json_objects = json_rows(path, counter, unit.begin, unit.end)
        return documents_from_rows(json_objects, config.column, config.row_type)
    parquet_objects = parquet_rows(path, config.column, counter, unit.begin, unit.end)
    return documents_from_rows(parquet_objects, config.column, config.row_type)
