"""JSON Lines files of a run. Each line is an object with the `step` at which it was written."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from xlpre.common.errors import InputError
from xlpre.common.files import write_text
from xlpre.text.json_objects import parse_object

Record = dict[str, Any]


def read_records(path: Path) -> list[Record]:
    """Read all lines; a missing file has none. A last line without a line break is ignored: the process was killed while writing it.

    Raises:
        InputError: a line is damaged.
    """
    return [_parse(line, f"{location} (remove this line)") for location, line in _split_lines(path)]


def rewrite_records(
    path: Path, keep: Callable[[Record], bool], serialize: Callable[[Mapping[str, Any]], str], *new_records: Record
) -> None:
    """Rewrite a file with the lines that pass `keep`, followed by `new_records`.

    A damaged line does not stop a run: it is moved to `FILE.damaged`, and a warning is printed.
    """
    kept = []
    for location, line in _split_lines(path):
        try:
            record = _parse(line, location)
        except ValueError as error:
            damaged = path.with_name(f"{path.name}.damaged")
            with open(damaged, "ab") as file:
                file.write(line + b"\n")
            print(f"warning: {error}. The line was moved to {damaged}; the run continues without it.", flush=True)
            continue
        if keep(record):
            kept.append(record)
    write_text(path, "".join(serialize(record) + "\n" for record in [*kept, *new_records]))


def _split_lines(path: Path) -> list[tuple[str, bytes]]:
    """Return the lines of a file, each with its location for messages."""
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    return [(f"{path}, line {number}", line) for number, line in enumerate(lines, 1)]


def _parse(line: bytes, location: str) -> Record:
    try:
        record = parse_object(line.decode(), location)
    except UnicodeDecodeError as error:
        raise InputError(f"{location}: it is not UTF-8 (byte {error.start})") from None
    if type(record.get("step")) is not int:
        raise InputError(f"{location}: it has no integer `step`")
    return record
