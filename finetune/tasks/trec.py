"""TREC's files: judgements (qrels), runs (candidates and answers), and the texts that they name."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path

from finetune.data.table_reader import number_of, read_rows, text_of, value_of
from xlpre.common.files import write_text
from xlpre.text.readers import ByteCounter, read_lines

Grades = dict[str, dict[str, int]]  # by query, then by document
TAG = "xlpre"


def read_qrels(files: Sequence[Path]) -> Grades:
    """Grades of documents, from lines `QUERY 0 DOCUMENT GRADE`; one below 0 (junk, in some collections) counts as 0.

    Raises:
        ValueError: a line that is none, or a document that is judged twice.
    """
    found: Grades = {}
    for place, (query, _, document, grade) in _lines(files, ("QUERY", "0", "DOCUMENT", "GRADE")):
        if not re.fullmatch("-?[0-9]{1,6}", grade):
            raise ValueError(f"{place}: the grade {grade[:20]!r} is no whole number of at most six digits")
        if document in found.setdefault(query, {}):
            raise ValueError(f"{place}: document {document!r} is judged twice for query {query!r}")
        found[query][document] = max(int(grade), 0)
    return found


def read_candidates(file: Path) -> list[tuple[str, str, str]]:
    """Query, document and place of each line `QUERY Q0 DOCUMENT RANK SCORE TAG` of a run.

    Raises:
        ValueError: a line that is none, a document that is there twice, or no line.
    """
    found: dict[tuple[str, str], str] = {}
    for place, (query, _, document, *rest) in _lines([file], ("QUERY", "Q0", "DOCUMENT", "RANK", "SCORE", "TAG")):
        for name, value in zip(("rank", "score"), rest, strict=False):
            number_of({name: value}, name, place)
        if (query, document) in found:
            raise ValueError(f"{place}: document {document!r} is a candidate twice for query {query!r}")
        found[query, document] = place
    if not found:
        raise ValueError(f"{file}: holds no candidate")
    return [(*both, place) for both, place in found.items()]


def read_texts(files: Sequence[Path], wanted: Collection[str]) -> dict[str, str]:
    """Texts by id, of those that are wanted: from .tsv and .csv files of two columns without their names, or `id` and `text` of .jsonl.

    Raises:
        ValueError: what is wrong with a line, or an id that is there twice.
    """
    found: dict[str, str] = {}
    for file in files:
        for place, fields in read_rows(file, ("id", "text")):
            name = str(value_of(fields, "id", place))
            if name in found:
                raise ValueError(f"{place}: the id {name!r} is there twice")
            if name in wanted:
                found[name] = text_of(fields, "text", place)
    return found


def in_order(scored: Iterable[tuple[str, float]]) -> list[tuple[str, float]]:
    """Documents with their scores, best first; of equal ones the later name first, as trec_eval has it."""
    return sorted(scored, key=lambda one: (one[1], one[0]), reverse=True)


def write_run(path: Path, answers: Iterable[tuple[str, str, float]]) -> None:
    """Write query, document and score as a run: query by query, best first."""
    by_query: dict[str, list[tuple[str, float]]] = {}
    for query, document, score in answers:
        by_query.setdefault(query, []).append((document, score))
    lines = (
        f"{query} Q0 {document} {place} {score:.6f} {TAG}\n"
        for query, scored in by_query.items()
        for place, (document, score) in enumerate(in_order(scored), 1)
    )
    write_text(path, "".join(lines))


def _lines(files: Sequence[Path], columns: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    for file in files:
        if not file.is_file():
            raise ValueError(f"{file}: there is no such file")
        for number, (_, text) in enumerate(read_lines(file, ByteCounter()), 1):
            if values := text.split():
                if len(values) != len(columns):
                    raise ValueError(f"{file}, line {number}: has {len(values)} columns, not {' '.join(columns)}")
                yield f"{file}, line {number}", values
