"""Tables as Markdown, plain text, CSV and JSON lines. A table is a sequence of rows, which are mappings with the same keys."""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from xlpre.common.files import write_text


def to_markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a Markdown table whose header is the keys of the first row."""
    cells = [[str(cell).replace("|", "\\|") for cell in line] for line in (rows[0], *(row.values() for row in rows))]
    lines = [cells[0], ["---"] * len(rows[0]), *cells[1:]]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def to_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a table for a terminal. Its header is the keys of the first row. The first column is left-aligned, others right-aligned."""
    lines = [[str(cell) for cell in line] for line in (rows[0], *(row.values() for row in rows))]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if i else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    )


def to_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the rows as CSV whose header is the keys of the first row."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def to_jsonl(rows: Iterable[Mapping[str, Any]]) -> str:
    """Return the rows as JSON objects, one per line."""
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def print_json(record: Mapping[str, Any]) -> None:
    """Print a JSON object in one line. If standard output is not UTF-8, other characters than ASCII are escaped as in JSON."""
    print(json.dumps(record, ensure_ascii=not str(sys.stdout.encoding).lower().startswith("utf")))


def write_table(rows: Sequence[Mapping[str, Any]], folder: Path) -> None:
    """Write table.md and table.csv into `folder`."""
    write_text(folder / "table.md", to_markdown(rows))
    write_text(folder / "table.csv", to_csv(rows))
