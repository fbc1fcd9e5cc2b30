"""Files of a run that have a JSON object in each line, with the `step` that it was written at."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from xlpre.common.files import write_text
from xlpre.text.json_objects import parse_object

Line = dict[str, Any]


def read_lines(path: Path) -> list[Line]:
    """The lines; none if there is no file. A last line cut short by a kill is left out.

    Raises:
        ValueError: another line is damaged.
    """
    return [_parse(line, f"{place} (take the line out)") for place, line in _placed(path)]


def rewrite(path: Path, keep: Callable[[int], bool], as_text: Callable[[Mapping[str, Any]], str], *more: Line) -> None:
    """Write the file anew, with the lines whose step is one to `keep` and `more` after them; a run goes on with one that is damaged.

    Lines that cannot be read are said, and put beside the file.
    """
    kept = []
    for place, line in _placed(path):
        try:
            read = _parse(line, place)
        except ValueError as error:
            beside = path.with_name(f"{path.name}.damaged")
            with open(beside, "ab") as file:
                file.write(line + b"\n")
            print(f"warning: {error}; the line is in {beside} now, and the run goes on without it", flush=True)
            continue
        if keep(read["step"]):
            kept.append(read)
    write_text(path, "".join(as_text(line) + "\n" for line in [*kept, *more]))


def _placed(path: Path) -> list[tuple[str, bytes]]:
    """Each line, with where it is in words."""
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    return [(f"{path}, line {number}", line) for number, line in enumerate(lines, 1)]


def _parse(line: bytes, place: str) -> Line:
    try:
        found = parse_object(line.decode(), place)
    except UnicodeDecodeError as error:
        raise ValueError(f"{place}: not UTF-8 (byte {error.start})") from None
    if type(found.get("step")) is not int:
        raise ValueError(f"{place}: it says no step")
    return found
