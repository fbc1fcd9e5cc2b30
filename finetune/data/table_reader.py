"""Rows of TSV, CSV and JSONL files as fields by name, each with its place; what is wrong is named with file and line."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from xlpre.text.hub import hub_rows, is_dataset
from xlpre.text.json_objects import parse_object
from xlpre.text.readers import LONGEST_LINE, PACKED, ByteCounter, parquet_rows, read_lines

Fields = Mapping[str, Any]
KINDS = (".tsv", ".txt", ".csv", ".jsonl", ".parquet")
LARGEST = 3.4e38  # of a number in 32 bits


def read_rows(path: Path, names: Sequence[str] = (), spare_cut: bool = False) -> Iterator[tuple[str, Fields]]:
    """Place and fields of each row.

    Args:
        path: a .tsv or .txt file (a tab between columns, no quotes), a .csv file (quotes as spreadsheets write them) or a .jsonl file,
            also .gz; a .parquet file; or hf:NAME[/CONFIG]:SPLIT, of a dataset that `datasets` finds.
        names: of the columns, for a file whose first line is a row; else the first line has them.
        spare_cut: pass over rows with too few columns, which some official files have, instead of refusing them.

    Raises:
        ValueError: no such file, of another kind, or a row that is not as the first line says.
    """
    if is_split(path):
        name, _, split = str(path).rpartition(":")
        yield from ((f"{path}, row {number}", row) for number, row in enumerate(hub_rows(name, split), 1))
        return
    kind = next((suffix for suffix in reversed(path.suffixes) if suffix not in PACKED), "")
    if path.is_dir():
        raise ValueError(
            f"{path} is a folder; name a file in it, or hf:{path}:SPLIT for a dataset that `datasets` saved there"
        )
    if kind not in KINDS:
        raise ValueError(
            f"{path} is of kind {kind or 'unknown'!r}; it must be a .tsv, .txt, .csv, .jsonl or .parquet file (or .gz of one)"
        )
    if not path.is_file():
        raise ValueError(f"{path}: there is no such file{_nearby(path)}")
    if kind in (".jsonl", ".parquet"):
        yield from _objects(path) if kind == ".jsonl" else parquet_rows(path, ByteCounter(), None, 0, None)
        return
    rows = _comma_separated(path) if kind == ".csv" else _tab_separated(path)
    if not names:
        line, names = next(rows, (1, []))
        if not names:
            raise ValueError(f"{path}: empty; the first line must have the names of the columns")
        if kind == ".csv" and len(names) == 1 and ";" in names[0]:
            raise ValueError(
                f"{path}, line {line}: its columns are apart by ';', as some spreadsheets write them; write it with commas"
            )
        if twice := [name for name, count in Counter(names).items() if count > 1]:
            raise ValueError(f"{path}, line {line}: two columns are called {twice[0]!r}; rename one")
    for line, values in rows:
        if len(values) != len(names):
            if spare_cut and len(values) < len(names):
                continue
            raise ValueError(
                f"{path}, line {line}: has {len(values)} columns, not the {len(names)} of {', '.join(names)}"
            )
        yield f"{path}, line {line}", dict(zip(names, values, strict=True))


def is_split(path: Path | str) -> bool:
    """Whether a file is none, but hf:NAME:SPLIT.

    Raises:
        ValueError: it is, and names no split.
    """
    if not is_dataset(str(path)):
        return False
    if str(path).count(":") < 2:
        raise ValueError(f"{path}: name its split, as in {path}:train")
    return True


def text_of(fields: Fields, name: str, place: str, may_be_empty: bool = False) -> str:
    """The text in a column.

    Raises:
        ValueError: there is no such column, or no text in it.
    """
    value = value_of(fields, name, place)
    if not isinstance(value, str):
        raise ValueError(f"{place}: {name!r} is {value!r}, where a text is needed")
    if not value.strip() and not may_be_empty:
        raise ValueError(f"{place}: the text in {name!r} is empty; fill it in, or remove the row")
    return value


def value_of(fields: Fields, name: str, place: str) -> Any:
    """What is in a column.

    Raises:
        ValueError: there is no such column.
    """
    if name not in fields:
        raise ValueError(f"{place}: there is no column {name!r}; there are {', '.join(map(str, fields)) or 'none'}")
    return fields[name]


def class_of(fields: Fields, name: str, labels: Sequence[str], place: str) -> int:
    """The number of the label in a column.

    Raises:
        ValueError: there is no such column, or a label that is none of `labels`.
    """
    label = label_of(fields, name, place)
    if label not in labels and (as_written := str(fields[name])) in labels:  # 1.0 in data.labels
        label = as_written
    if label not in labels:
        shown = ", ".join(labels[:20]) + (", ..." if len(labels) > 20 else "")
        quotes = "; YAML reads yes and no without quotes as True and False" if {"True", "False"} & {*labels} else ""
        raise ValueError(f"{place}: the label {label!r} in {name!r} is none of {shown}{quotes}")
    return labels.index(label)


def label_of(fields: Fields, name: str, place: str) -> str:
    """The label in a column: a text without spaces around it, or a number, of which 1.0 is 1.

    Raises:
        ValueError: there is no such column, or no label in it.
    """
    value = value_of(fields, name, place)
    if value is None or value != value or (isinstance(value, str) and not value.strip()):  # tables have NaN for nothing
        raise ValueError(f"{place}: the label in {name!r} is empty; fill it in, or remove the row")
    if not isinstance(value, (str, int, float)):
        raise ValueError(f"{place}: {name!r} is {value!r}, where a label is needed, a word or a number")
    whole = isinstance(value, float) and value.is_integer()
    return str(int(value) if whole else value).strip()


def number_of(fields: Fields, name: str, place: str) -> float:
    """The number in a column.

    Raises:
        ValueError: there is no such column, or no finite number in it.
    """
    value = value_of(fields, name, place)
    try:
        number = float("nan") if "_" in str(value) else float(value)  # which Python would pass over
    except (TypeError, ValueError, OverflowError):
        number = float("nan")
    if not abs(number) <= LARGEST:
        raise ValueError(f"{place}: {_shown(value)} in {name!r} is no number, or one that 32 bits cannot hold")
    return number


def _tab_separated(path: Path) -> Iterator[tuple[int, list[str]]]:
    for line, (_, text) in enumerate(read_lines(path, ByteCounter()), 1):
        if row := text.rstrip("\r\n"):
            yield line, row.split("\t")


def _comma_separated(path: Path) -> Iterator[tuple[int, list[str]]]:
    csv.field_size_limit(LONGEST_LINE)
    rows = csv.reader((text for _, text in read_lines(path, ByteCounter())), strict=True)
    line = 1
    while True:
        try:
            values = next(rows)
        except StopIteration:
            return
        except csv.Error as error:
            raise ValueError(f"{path}, line {line}: not CSV ({error})") from None
        if values:
            yield line, values
        line = rows.line_num + 1


def _objects(path: Path) -> Iterator[tuple[str, Fields]]:
    for line, (_, text) in enumerate(read_lines(path, ByteCounter()), 1):
        if text.strip():
            place = f"{path}, line {line}"
            yield place, parse_object(text, place)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 60 else text[:60] + "..."


def _nearby(path: Path) -> str:
    """What there is instead."""
    if not path.parent.is_dir():
        return f", nor its folder {path.parent}"
    there = sorted(file.name for file in path.parent.iterdir() if file.is_file())[:12]
    return f"; in {path.parent} there are {', '.join(there)}" if there else f", and {path.parent} holds no files"
