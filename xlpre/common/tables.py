"""Tables for people and for programs: rows, each a mapping, as Markdown and as CSV, of the same keys, and as lines of JSON."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from xlpre.common.files import write_text


def as_markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """A line for each row, under the keys of the first."""
    cells = [[str(cell).replace("|", "\\|") for cell in line] for line in (rows[0], *(row.values() for row in rows))]
    lines = [cells[0], ["---"] * len(rows[0]), *cells[1:]]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def as_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """The same for a program."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def as_json_lines(rows: Iterable[Mapping[str, Any]]) -> str:
    """A JSON object for each row, in a line of its own."""
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def write_table(rows: Sequence[Mapping[str, Any]], folder: Path, name: str = "table") -> None:
    """`name`.md and `name`.csv."""
    write_text(folder / f"{name}.md", as_markdown(rows))
    write_text(folder / f"{name}.csv", as_csv(rows))
