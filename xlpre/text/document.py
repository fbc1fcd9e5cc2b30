"""A document is a list of lines, a line is text with single spaces: how lines of files and rows become documents."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any, Literal

Document = list[str]
LineType = Literal["paragraphs", "sentences"]  # what a line of a document is
RowType = Literal["documents", "lines"]  # what a row of a source is
LONGEST_DOCUMENT = 16_000_000  # characters; what is longer is cut


def from_lines(lines: Iterable[tuple[int, str]], begin: int, end: int | None) -> Iterator[Document]:
    """Documents between empty lines, of a stretch of a file; one that begins inside has those after an empty line of its own.

    Args:
        lines: with the offsets of their first bytes, from the first that starts at or after `begin`.
        begin: the stretch's first byte,
        end: and the one after its last; None: the file's end.
    """
    inside = begin == 0
    last = float("inf") if end is None else end

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


def from_rows(rows: Iterable[tuple[str, dict[str, Any]]], column: str, each: RowType) -> Iterator[Document]:
    """Documents of rows, given after their places for messages, whose text is in `column`; `each` says what a row is.

    Raises:
        ValueError: a row without text.
    """
    texts = _column(rows, column)
    if each == "lines":
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
