"""Read and write TREC's file formats: relevance judgments (qrels), runs (lists of scored documents for each query), and texts."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path

from finetune.data.row_errors import RowErrors
from finetune.data.table_reader import get_number, get_text, get_value, read_rows
from xlpre.common.errors import InputError
from xlpre.common.files import write_text
from xlpre.text.readers import read_lines

Grades = dict[str, dict[str, int]]  # relevance grades by query id and document id
RUN_TAG = "xlpre"


def read_qrels(files: Sequence[Path]) -> Grades:
    """Read relevance grades from lines `QUERY 0 DOCUMENT GRADE`. A grade below 0 (junk, in some collections) counts as 0.

    Raises:
        InputError: a line is invalid, or a document is judged twice for a query.
    """
    grades, errors = Grades(), RowErrors()
    for location, (query, _, document, grade) in _read_columns(files, ("QUERY", "0", "DOCUMENT", "GRADE"), errors):
        if not re.fullmatch("-?[0-9]{1,6}", grade):
            errors.add(
                location, f"grade {grade[:20]!r} is invalid: it must be an integer of at most six digits. Correct it."
            )
        elif document in grades.setdefault(query, {}):
            errors.add(location, f"document {document!r} is judged twice for query {query!r}. Remove one line.")
        else:
            grades[query][document] = max(int(grade), 0)
    errors.raise_if_any()
    return grades


def read_candidates(file: Path) -> list[tuple[str, str, str]]:
    """Read the candidates of a run file, whose lines are `QUERY Q0 DOCUMENT RANK SCORE TAG`.

    Returns:
        Query id, document id and location of each line.

    Raises:
        InputError: a line is invalid, a document occurs twice for a query, or the file is empty.
    """
    columns = ("QUERY", "Q0", "DOCUMENT", "RANK", "SCORE", "TAG")
    locations, errors = dict[tuple[str, str], str](), RowErrors()
    for location, (query, _, document, *numbers) in _read_columns([file], columns, errors):
        with errors.collect(location):
            for name, value in zip(("rank", "score"), numbers, strict=False):
                get_number({name: value}, name, location)
            if (query, document) in locations:
                raise InputError(f"document {document!r} is a candidate twice for query {query!r}. Remove one line.")
            locations[query, document] = location
    errors.raise_if_any()
    if not locations:
        raise InputError(f"{file} contains no candidate. Choose another file.")
    return [(*pair, location) for pair, location in locations.items()]


def read_texts(files: Sequence[Path], ids: Collection[str]) -> dict[str, str]:
    """Read texts by id, from .tsv and .csv files with two columns and no header line, or from `id` and `text` of .jsonl files.

    Args:
        files: files of texts.
        ids: ids of the texts to return.

    Raises:
        InputError: a line is invalid, or an id occurs twice.
    """
    texts, errors = dict[str, str](), RowErrors()
    for file in files:
        for location, fields in read_rows(file, ("id", "text"), errors=errors):
            with errors.collect(location):
                text_id = str(get_value(fields, "id", location))
                if text_id in texts:
                    raise InputError(f"id {text_id!r} occurs twice. Remove one line.")
                if text_id in ids:
                    texts[text_id] = get_text(fields, "text", location)
    errors.raise_if_any()
    return texts


def sort_documents(scores: Iterable[tuple[str, float]]) -> list[tuple[str, float]]:
    """Sort documents and their scores, best first. Ties are broken by id, in reverse order, as in trec_eval."""
    return sorted(scores, key=lambda pair: (pair[1], pair[0]), reverse=True)


def write_run(path: Path, scores: Iterable[tuple[str, str, float]]) -> None:
    """Write query ids, document ids and scores as a run file: query by query, best document first."""
    by_query: dict[str, list[tuple[str, float]]] = {}
    for query, document, score in scores:
        by_query.setdefault(query, []).append((document, score))
    lines = (
        f"{query} Q0 {document} {rank} {score:.6f} {RUN_TAG}\n"
        for query, documents in by_query.items()
        for rank, (document, score) in enumerate(sort_documents(documents), 1)
    )
    write_text(path, "".join(lines))


def _read_columns(files: Sequence[Path], columns: Sequence[str], errors: RowErrors) -> Iterator[tuple[str, list[str]]]:
    for file in files:
        if not file.is_file():
            raise InputError(f"{file}: no such file. Correct the path.")
        for number, (_, text) in enumerate(read_lines(file), 1):
            if values := text.split():
                location = f"{file}, line {number}"
                if len(values) == len(columns):
                    yield location, values
                else:
                    errors.add(
                        location,
                        f"the line has {len(values)} columns instead of {len(columns)} ({' '.join(columns)}). Correct it.",
                    )
