"""Questions about a paragraph, from SQuAD's files as distributed (Rajpurkar et al. 2016, 2018), or the rows of a dataset.

{"data": [{"title", "paragraphs": [{"context", "qas": [{"id", "question", "answers": [{"text", "answer_start"}], "is_impossible"}]}]}]}
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from finetune.data.examples import Example
from finetune.data.table_reader import Fields, is_split, read_rows, text_of, value_of
from xlpre.text.json_objects import parse_object
from xlpre.text.readers import ByteCounter, read_lines

Answer = tuple[int, str]  # its first character in the context, and its text


def read_squad(path: Path, answerable: bool, labelled: bool) -> list[Example]:
    """The questions of a file; each Example has (context, question) as texts, and a tuple of Answers as answer.

    Args:
        path: a .json file, also .gz; or a question a row, in .jsonl, .parquet or hf:NAME[/CONFIG]:SPLIT of a dataset that
            `datasets` finds.
        answerable: every question has an answer (SQuAD 1.1).
        labelled: the truth is there. Otherwise a list of answers that is empty may hide it: it is true where any question has an answer.

    Raises:
        ValueError: what is wrong with it, with file and question.
    """
    in_rows = is_split(path) or {".jsonl", ".parquet"} & {*path.suffixes}
    rows = list(read_rows(path) if in_rows else read_questions(path))
    found = [question_of(fields, place, answerable, labelled) for place, fields in rows]
    if not (labelled or answerable) and any(example.label for example in found):
        found = [
            dataclasses.replace(example, label=()) if "answers" in fields and not example.label else example
            for example, (_, fields) in zip(found, rows, strict=True)
        ]
    if not found:
        raise ValueError(f"{path}: holds no question")
    name, count = Counter(example.id for example in found).most_common(1)[0]
    if count > 1:
        raise ValueError(
            f"{path}: {count} questions have the id {name!r}; answers are told apart by it, rename all but one"
        )
    return found


def question_of(fields: Fields, place: str, answerable: bool, labelled: bool = False) -> Example:
    """A question from its fields: context, question, and perhaps id, answers, is_impossible.

    Raises:
        ValueError: a field is missing, or an answer is not where it says.
    """
    context, question = text_of(fields, "context", place), text_of(fields, "question", place)
    answer = None
    if labelled or "answers" in fields:
        answer = _answers(value_of(fields, "answers", place), context, place)
        impossible = fields.get("is_impossible", False)
        if not isinstance(impossible, bool):
            raise ValueError(f"{place}: 'is_impossible' is {impossible!r}; it must be true or false")
        if answer and impossible:
            raise ValueError(f"{place}: is_impossible is true, and there are answers; remove one of them")
        if answerable and not answer and labelled:
            raise ValueError(
                f"{place}: has no answer, which is for task=squad/2.0; of squad/1.1 every question has one"
            )
        if not (answer or labelled or (impossible and not answerable)):
            answer = None  # where the truth is hidden, there are no answers either
    name = fields.get("id", place)
    if not isinstance(name, (str, int)):
        raise ValueError(f"{place}: the id {name!r} must be a text")
    return Example(str(name), (context, question), answer, place)


def read_questions(path: Path) -> Iterator[tuple[str, Fields]]:
    """Place and fields of each question of a .json file, also .gz, as distributed.

    Raises:
        ValueError: it is none.
    """
    if not path.is_file():
        raise ValueError(
            f"{path}: there is no such file; data.dir should hold SQuAD's files, or set data.train, data.dev"
        )
    content = parse_object("".join(line for _, line in read_lines(path, ByteCounter())), str(path))
    for number, article in enumerate(_list(content, "data", str(path)), 1):
        place = f"{path}, article {number}"
        for count, paragraph in enumerate(_list(article, "paragraphs", place), 1):
            place = f"{path}, article {number}, paragraph {count}"
            context = value_of(paragraph, "context", place)
            for nth, question in enumerate(_list(paragraph, "qas", place), 1):
                name = value_of(question, "id", f"{place}, question {nth}")
                yield f"{path}, question {name}", {**question, "context": context}


def _list(fields: Any, name: str, place: str) -> Sequence[Mapping[str, Any]]:
    found = value_of(fields, name, place)
    if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
        raise ValueError(f"{place}: {name!r} must be a list of objects")
    return found


def _answers(answers: Any, context: str, place: str) -> tuple[Answer, ...]:
    """A list of objects, as in the files, or an object of lists, as `datasets` has them."""
    if isinstance(answers, dict):
        texts, begins = value_of(answers, "text", place), value_of(answers, "answer_start", place)
        if not isinstance(texts, list) or not isinstance(begins, list) or len(texts) != len(begins):
            raise ValueError(f"{place}: 'text' and 'answer_start' of 'answers' must be two lists of one length")
        answers = [{"text": text, "answer_start": begin} for text, begin in zip(texts, begins, strict=True)]
    if not isinstance(answers, list) or not all(isinstance(one, dict) for one in answers):
        raise ValueError(f"{place}: 'answers' must be a list of objects with text and answer_start")
    return tuple(_answer(one, context, place) for one in answers)


def _answer(answer: Fields, context: str, place: str) -> Answer:
    text, begin = text_of(answer, "text", place), value_of(answer, "answer_start", place)
    if not isinstance(begin, int) or isinstance(begin, bool):
        raise ValueError(f"{place}: answer_start {begin!r} must be a whole number, the answer's first character")
    if begin < 0 or context[begin : begin + len(text)] != text:
        at = context[begin : begin + len(text)] if begin >= 0 else ""
        known = context.find(text)
        way_out = f"it stands at {known} first" if known >= 0 else "it is nowhere in the context; remove the question"
        raise ValueError(
            f"{place}: the answer {text!r} must stand at its answer_start {begin!r}, where {at!r} is; {way_out}"
        )
    spaces = len(text) - len(text.lstrip())
    return begin + spaces, text.strip()
