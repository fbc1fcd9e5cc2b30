"""Documents from the lines of text files and the rows of tables.

A document is a list of lines without repeated spaces. The lines of a verbatim document are parts of a text, with all its white space.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import Any, Literal

from xlpre.common.errors import InputError

Document = list[str]
LineType = Literal["paragraphs", "sentences", "verbatim"]
RowType = Literal["documents", "lines"]
LINE_END = re.compile(r"\r\n|\n|\r")  # str.splitlines also splits at form feeds and some other characters
MAX_DOCUMENT_CHARS = 16_000_000  # longer documents are split


def documents_from_lines(lines: Iterable[tuple[int, str]], begin: int, end: int | None) -> Iterator[Document]:
    """Yield the documents in a part of a file. Empty lines separate documents.

    A part that starts inside a file begins with the document after its first empty line. A document that extends beyond the end of the
    part is read completely.

    Args:
        lines: lines with the offset of their first byte, from the first line that starts at or after `begin`.
        begin: first byte of the part.
        end: byte after the last byte of the part. None: the end of the file.
    """
    in_document = begin == 0
    last = float("inf") if end is None else end

    def lines_of_part() -> Iterator[str]:
        nonlocal in_document
        for offset, line in lines:
            if line.strip():
                if in_document:
                    yield line
                elif offset >= last:
                    return
            else:
                if offset >= last:
                    return
                in_document = True
                yield line

    return _split_at_empty_lines(lines_of_part())


def documents_from_parts(parts: Iterable[str], n_chars: int) -> Iterator[Document]:
    """Yield verbatim documents of about `n_chars` characters from the consecutive parts of a text."""
    document: Document = []
    size = 0
    for part in parts:
        document.append(part)
        size += len(part)
        if size >= n_chars:
            yield document
            document, size = [], 0
    if document:
        yield document


def first_characters(document: Document, n_chars: int) -> Document:
    """Return the first `n_chars` characters of a verbatim document."""
    starts = accumulate(map(len, document), initial=0)
    return [part[: n_chars - start] for part, start in zip(document, starts, strict=False) if start < n_chars]


def documents_from_rows(
    rows: Iterable[tuple[str, dict[str, Any]]], column: str, row_type: RowType
) -> Iterator[Document]:
    """Yield the documents in the rows of a table.

    Args:
        rows: (location for error messages, row) for each row.
        column: name of the field that holds the text.
        row_type: whether a row is a document or a line of text.

    Raises:
        InputError: a row has no text.
    """
    texts = _column(rows, column)
    if row_type == "lines":
        yield from _split_at_empty_lines(texts)
        return
    for text in texts:
        yield from _split_at_empty_lines(line for line in LINE_END.split(text) if line.strip())


def _column(rows: Iterable[tuple[str, dict[str, Any]]], column: str) -> Iterator[str]:
    for location, row in rows:
        if not row:
            raise InputError(f"{location} is empty. Remove the row.")
        if column not in row:
            raise InputError(
                f"text.column={column} is invalid: {location} has no such field. Set text.column (evaluate.py: --column) to one of "
                f"{', '.join(row)}."
            )
        if not isinstance(row[column], str):
            others = ", ".join(key for key in row if key != column)
            raise InputError(
                f"{location}: {column!r} must be text, not {json.dumps(row[column], default=str)[:60]}. Remove the row"
                + (f", or set text.column to one of {others}." if others else ".")
            )
        if "\0" in row[column]:
            raise InputError(f"{location}: there is a zero character in {column!r}. Check that the field is text.")
        yield row[column]


def _split_at_empty_lines(lines: Iterable[str]) -> Iterator[Document]:
    document: Document = []
    n_chars = 0
    for line in lines:
        clean = line.strip()
        if "  " in clean or not clean.isprintable():  # rare, and several times slower
            clean = " ".join(clean.split())
        if clean:
            document.append(clean)
            n_chars += len(clean)
        if document and (not clean or n_chars >= MAX_DOCUMENT_CHARS):
            yield document
            document, n_chars = [], 0
    if document:
        yield document
