"""Rows of TSV, CSV, JSONL and Parquet files and of Hub datasets, and typed access to their columns.

Every row has a location (file and line), which error messages name.
"""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from finetune.data.row_errors import MissingColumnError, RowErrors
from xlpre.common.errors import InputError
from xlpre.common.messages import counted
from xlpre.text.hub import is_hf_dataset, read_hf_rows
from xlpre.text.json_objects import parse_object
from xlpre.text.readers import COMPRESSED_SUFFIXES, MAX_LINE_BYTES, parquet_rows, read_lines

Fields = Mapping[str, Any]  # columns of a row by name
KINDS = (".tsv", ".txt", ".csv", ".jsonl", ".parquet")
MAX_FLOAT32 = 3.4e38


class TableRow(dict[str, Any]):
    """Columns of a row by name, with the location of the header line that names them."""

    __slots__ = ("header",)

    def __init__(self, header: str, columns: Mapping[str, Any]) -> None:
        super().__init__(columns)
        self.header = header


def read_rows(
    path: Path, names: Sequence[str] = (), skip_short_rows: bool = False, errors: RowErrors | None = None
) -> Iterator[tuple[str, Fields]]:
    """Read a table.

    Args:
        path: a .tsv or .txt file (columns separated by tabs, no quotes), a .csv file (quotes as in spreadsheets) or a .jsonl file,
            each also as .gz; a .parquet file; or hf:NAME[/CONFIG]:SPLIT for a dataset that `datasets` loads.
        names: column names, for a file without a header line.
        skip_short_rows: skip rows with too few columns, which some official files have, instead of raising.
        errors: collects the errors of invalid rows, which are not yielded. None: the first error is raised.

    Yields:
        Location and columns of each row.

    Raises:
        InputError: the file is missing or of another kind, or a row does not have the columns of the header.
    """
    if is_hub_split(path):
        name, _, split = str(path).rpartition(":")
        yield from ((f"{path}, row {number}", row) for number, row in enumerate(read_hf_rows(name, split), 1))
        return
    kind = kind_of(path)
    if path.is_dir():
        raise InputError(
            f"{path} is a folder. Name a file in it, or hf:{path}:SPLIT for a dataset that `datasets` saved there."
        )
    if kind not in KINDS:
        raise InputError(
            f"{path} is of kind {kind or 'unknown'!r}: it must be a .tsv, .txt, .csv, .jsonl or .parquet file, or a .gz of one. Convert it."
        )
    if not path.is_file():
        raise InputError(f"{path}: no such file{_list_siblings(path)}.")
    if kind in (".jsonl", ".parquet"):
        yield from _read_jsonl(path, errors) if kind == ".jsonl" else parquet_rows(path)
        return
    rows = _read_csv(path) if kind == ".csv" else _read_tsv(path)
    header = str(path)
    if not names:
        line, names = next(rows, (1, []))
        if not names:
            raise InputError(f"{path} is empty: the first line must contain the column names.")
        header = f"{path}, line {line}"
        if kind == ".csv" and len(names) == 1 and ";" in names[0]:
            raise InputError(
                f"{path}, line {line}: columns are separated by ';' instead of ','. Save the file with commas."
            )
        if duplicates := [name for name, count in Counter(names).items() if count > 1]:
            raise InputError(f"{path}, line {line}: two columns have the name {duplicates[0]!r}. Rename one.")
    for line, values in rows:
        if len(values) != len(names):
            if skip_short_rows and len(values) < len(names):
                continue
            location, problem = (
                f"{path}, line {line}",
                f"the row has {counted(len(values), 'column')} instead of {len(names)} ({', '.join(names)})",
            )
            if errors is None:
                raise InputError(f"{location}: {problem}. Correct the row.")
            errors.add(location, f"{problem}. Correct the row.")
            continue
        yield f"{path}, line {line}", TableRow(header, dict(zip(names, values, strict=True)))


def is_hub_split(path: Path | str) -> bool:
    """Return True if the path names a split of a Hub dataset, as in hf:NAME:SPLIT.

    Raises:
        InputError: the path names a dataset without a split.
    """
    if not is_hf_dataset(str(path)):
        return False
    if str(path).count(":") < 2:
        raise InputError(f"{path} is invalid: it names no split. Add one, as in {path}:train.")
    return True


def has_columns(path: Path, columns: Sequence[str]) -> bool:
    """Return True if the first line of a .tsv or .csv file names these columns. Files of other kinds always name theirs."""
    kind = kind_of(path)
    if is_hub_split(path) or not path.is_file() or kind not in (".tsv", ".txt", ".csv"):
        return True
    _, names = next(_read_csv(path) if kind == ".csv" else _read_tsv(path), (1, []))
    return {*columns} <= {*names}


def get_text(fields: Fields, column: str, location: str, allow_empty: bool = False) -> str:
    """Return the text in a column.

    Raises:
        InputError: the column is missing, not a text, or empty.
    """
    value = get_value(fields, column, location)
    if not isinstance(value, str):
        raise InputError(f"{location}: column {column!r} is {value!r}, which is not a text. Write it as a string.")
    if not value.strip() and not allow_empty:
        raise InputError(f"{location}: the text in column {column!r} is empty. Fill it in, or remove the row.")
    return value


def get_value(fields: Fields, column: str, location: str) -> Any:
    """Return the value in a column.

    Raises:
        InputError: the column is missing.
    """
    if column not in fields:
        location = fields.header if isinstance(fields, TableRow) else location
        raise MissingColumnError(
            f"{location}: there is no column {column!r}. Columns: {', '.join(map(str, fields)) or 'none'}."
        )
    return fields[column]


def get_class_index(
    fields: Fields, column: str, label_names: Sequence[str], location: str, remedy: str = "Correct it."
) -> int:
    """Return the index of the label in a column. `remedy` is the last sentence of the message about an unknown label.

    Raises:
        InputError: the column is missing, or its label is not in `label_names`.
    """
    label = get_label_name(fields, column, location)
    if label not in label_names and (as_written := str(fields[column])) in label_names:  # data.labels may contain 1.0
        label = as_written
    if label not in label_names:
        known = ", ".join(name[:60] for name in label_names[:10]) + (", ..." if len(label_names) > 10 else "")
        hint = " YAML reads yes and no without quotes as True and False." if {"True", "False"} & {*label_names} else ""
        raise InputError(
            f"{location}: label {_shorten(label)} in column {column!r} is invalid: labels are {known}. {remedy}{hint}"
        )
    return label_names.index(label)


def get_label_name(fields: Fields, column: str, location: str) -> str:
    """Return the label in a column as text, without surrounding spaces. The number 1.0 gives the same label as 1.

    Raises:
        InputError: the column is missing, empty, or not a text or number.
    """
    value = get_value(fields, column, location)
    if value is None or value != value or (isinstance(value, str) and not value.strip()):  # tables have NaN when empty
        raise InputError(f"{location}: the label in column {column!r} is empty. Fill it in, or remove the row.")
    if not isinstance(value, (str, int, float)):
        raise InputError(f"{location}: column {column!r} is {value!r}, which is not a label. Write a word or a number.")
    is_integer = isinstance(value, float) and value.is_integer()
    return str(int(value) if is_integer else value).strip()


def get_number(fields: Fields, column: str, location: str) -> float:
    """Return the number in a column.

    Raises:
        InputError: the column is missing, or its value is not a finite float32 number.
    """
    value = get_value(fields, column, location)
    try:
        number = float("nan") if "_" in str(value) else float(value)  # Python accepts 1_000
    except (TypeError, ValueError, OverflowError):
        number = float("nan")
    if not abs(number) <= MAX_FLOAT32:
        raise InputError(
            f"{location}: {_shorten(value)} in column {column!r} is not a number, or exceeds float32. Correct it, or remove the row."
        )
    return number


def kind_of(path: Path) -> str:
    """Return the suffix of a file without that of its compression."""
    return next((suffix for suffix in reversed(path.suffixes) if suffix not in COMPRESSED_SUFFIXES), "")


def _read_tsv(path: Path) -> Iterator[tuple[int, list[str]]]:
    for line, (_, text) in enumerate(read_lines(path), 1):
        if row := text.rstrip("\r\n"):
            yield line, row.split("\t")


def _read_csv(path: Path) -> Iterator[tuple[int, list[str]]]:
    csv.field_size_limit(MAX_LINE_BYTES)
    rows = csv.reader((text for _, text in read_lines(path)), strict=True)
    line = 1
    while True:
        try:
            values = next(rows)
        except StopIteration:
            return
        except csv.Error as error:
            raise InputError(f"{path}, line {line}: not CSV ({error}). Correct the quotes of this row.") from None
        if values:
            yield line, values
        line = rows.line_num + 1


def _read_jsonl(path: Path, errors: RowErrors | None) -> Iterator[tuple[str, Fields]]:
    for line, (_, text) in enumerate(read_lines(path), 1):
        if text.strip():
            location = f"{path}, line {line}"
            try:
                fields = parse_object(text, location)
            except InputError as error:
                if errors is None:
                    raise
                errors.add(location, str(error))
                continue
            yield location, fields


def _shorten(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 60 else text[:60] + "..."


def _list_siblings(path: Path) -> str:
    """Describe the other files in the folder of a missing file."""
    if not path.parent.is_dir():
        return f", and no folder {path.parent}"
    names = sorted(file.name for file in path.parent.iterdir() if file.is_file())
    listed = ", ".join(names[:12]) + (", ..." if len(names) > 12 else "")
    return f". Files in {path.parent}: {listed}" if names else f". {path.parent} contains no files"
