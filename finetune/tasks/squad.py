"""SQuAD 1.1 and 2.0: questions about a paragraph (Rajpurkar et al. 2016, 2018). The answer is a span; in 2.0, it may be missing.

Input: {train,dev}-v1.1.json or {train,dev}-v2.0.json as distributed, also as .gz, or the rows of a Hub dataset. Form of the files:

    {"data": [{"title", "paragraphs": [{"context", "qas": [{"id", "question", "answers": [{"text", "answer_start"}], "is_impossible"}]}]}]}

Output for the official evaluation scripts:

    SPLIT.predictions.json   {id: text}, the submission; the text is empty for "no answer"
    SPLIT.spans.json         {id: text}, 2.0 only: the best span even for "no answer", for evaluate-v2.0.py with --na-prob-file
    SPLIT.null_odds.json     {id: log-odds that there is no answer}, 2.0 only
    SPLIT.nbest.json         {id: list of the best spans with their probabilities}
"""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from finetune.config import TaskDataConfig
from finetune.data.examples import Example, Prediction
from finetune.data.hub_datasets import split_path
from finetune.data.long_text import require_truncation
from finetune.data.row_errors import RowErrors
from finetune.data.sources import TRAIN, check_data_dir, files_by_split, resolve_file
from finetune.data.table_reader import Fields, get_text, get_value, is_hub_split, kind_of, read_rows
from finetune.tasks.base import Task
from finetune.tasks.span import SpanTask
from xlpre.common.errors import InputError
from xlpre.common.files import write_text
from xlpre.model.pooling import Pooling
from xlpre.text.hub import is_hf_dataset
from xlpre.text.json_objects import parse_object
from xlpre.text.readers import read_parts

SQUAD_VERSIONS = {"squad/1.1": "v1.1", "squad/2.0": "v2.0"}
TextSpan = tuple[int, str]  # index of its first character in the context, and its text


class SquadTask(SpanTask):
    """The task of one version of SQuAD: reads its files and writes its submission. See SpanTask.

    Args:
        name: key of SQUAD_VERSIONS.
        data: settings.
    """

    def __init__(self, name: str, data: TaskDataConfig) -> None:
        require_truncation(data, name)
        super().__init__(name, data, always_answerable=name == "squad/1.1")
        folder = Path() if is_hf_dataset(data.root) else Path(data.root)
        self._train = [resolve_file(folder, file) for file in data.train or ()] or [
            _official_file(data.root, "train", name)
        ]
        dev = files_by_split(folder, data.dev or ()) or {
            f"dev-{SQUAD_VERSIONS[name]}": _official_file(data.root, "dev", name)
        }
        test = files_by_split(folder, data.test or (), dev)
        self._files, self.dev_splits, self.test_splits = {**dev, **test}, tuple(dev), tuple(test)

    def read_split(self, split: str) -> list[Example]:
        """Read the questions of a split."""
        if not (self._data.train and self._data.dev):
            version = SQUAD_VERSIONS[self.name]
            check_data_dir(self._data, self.name, f"train-{version}.json and dev-{version}.json")
        files = self._train if split == TRAIN else [self._files[split]]
        labeled = split not in self.test_splits
        return [example for path in files for example in read_squad(path, self.always_answerable, labeled)]

    def parse_example(self, fields: Mapping[str, Any], location: str, default_id: str = "") -> Example:
        """Build the example of a question from the fields context and question, and optionally id and answers."""
        return parse_question(fields, location, self.always_answerable, default_id=default_id)

    def write_submission(self, folder: Path, predictions: Mapping[str, list[Prediction]]) -> list[Path]:
        """Write the files for the official scripts, for every split."""
        return [
            path
            for split, split_predictions in predictions.items()
            for path in self._write_split(folder, split, split_predictions)
        ]

    def _write_split(self, folder: Path, split: str, predictions: list[Prediction]) -> list[Path]:
        contents = {
            "predictions": {prediction["id"]: prediction["prediction"] for prediction in predictions},
            "nbest": {prediction["id"]: prediction["nbest"] for prediction in predictions},
        }
        if not self.always_answerable:
            contents["spans"] = {prediction["id"]: prediction["nbest"][0]["text"] for prediction in predictions}
            contents["null_odds"] = {prediction["id"]: prediction["null_log_odds"] for prediction in predictions}
        paths = []
        for name, content in contents.items():
            paths.append(folder / f"{split}.{name}.json")
            write_text(paths[-1], json.dumps(content, ensure_ascii=False))
        return paths


def build_squad(name: str, data: TaskDataConfig, pooling: Pooling) -> Task:
    """Build `squad/1.1` or `squad/2.0`."""
    if pooling != "last":
        raise InputError(f"model.pooling={pooling} is invalid with task={name}: its head does not pool. Leave it out.")
    return SquadTask(name, data)


def read_squad(path: Path, always_answerable: bool, labeled: bool) -> list[Example]:
    """Read the questions of a file. See SpanTask for their texts and labels.

    Args:
        path: a .json file as distributed, also as .gz; or one question per row, in .jsonl, .parquet, or hf:NAME[/CONFIG]:SPLIT for
            a dataset that `datasets` loads.
        always_answerable: True if every question has an answer (SQuAD 1.1).
        labeled: True if the file contains the true answers. False if they may be hidden: then an empty list of answers means "no
            answer" only if another question in the file has an answer.

    Raises:
        InputError: the file is missing or invalid.
        InvalidRowsError: questions are invalid. The message names file and question.
    """
    has_rows = is_hub_split(path) or kind_of(path) in (".jsonl", ".parquet")
    errors = RowErrors()
    questions = list(read_rows(path, errors=errors) if has_rows else read_questions(path))
    examples = []
    for row, (location, fields) in enumerate(questions):
        with errors.collect(location, is_first=row == 0):
            examples.append(parse_question(fields, location, always_answerable, labeled, str(row)))
    errors.raise_if_any()
    if not (labeled or always_answerable) and any(example.label for example in examples):
        examples = [
            dataclasses.replace(example, label=()) if "answers" in fields and not example.label else example
            for example, (_, fields) in zip(examples, questions, strict=True)
        ]
    if not examples:
        raise InputError(f"{path} contains no question. Choose another file.")
    example_id, count = Counter(example.id for example in examples).most_common(1)[0]
    if count > 1:
        raise InputError(
            f"{path}: {count} questions have the id {example_id!r}. Make ids unique, as predictions use them."
        )
    return examples


def parse_question(
    fields: Fields, location: str, always_answerable: bool, labeled: bool = False, default_id: str = ""
) -> Example:
    """Build the example of a question from the fields context and question, and optionally id, answers and is_impossible.

    Args:
        fields: values by name.
        location: file and question, for error messages.
        always_answerable: True if every question has an answer (SQuAD 1.1).
        labeled: True if the fields must contain the true answers.
        default_id: id of the question if the fields contain none.

    Raises:
        InputError: a field is missing or invalid, or an answer is not at its position.
    """
    context, question = get_text(fields, "context", location), get_text(fields, "question", location)
    spans = None
    if labeled or "answers" in fields:
        spans = _parse_answers(get_value(fields, "answers", location), context, location)
        impossible = fields.get("is_impossible", False)
        if not isinstance(impossible, bool):
            raise InputError(
                f"{location}: is_impossible={impossible!r} is invalid: it must be true or false. Correct it."
            )
        if spans and impossible:
            raise InputError(
                f"{location}: is_impossible=true is invalid: the question has answers. Set it to false, or remove the answers."
            )
        if labeled and not (spans or always_answerable) and fields.get("is_impossible") is False:
            raise InputError(
                f"{location}: is_impossible=false is invalid: the question has no answers. Set it to true, or add an answer."
            )
        if always_answerable and not spans and labeled:
            raise InputError(
                f"{location}: the question has no answer, but in squad/1.1 every question must have one. Set task=squad/2.0."
            )
        if not (spans or labeled or (impossible and not always_answerable)):
            spans = None  # an empty list means hidden answers
    example_id = default_id if fields.get("id") is None else fields["id"]
    if not isinstance(example_id, (str, int)):
        raise InputError(f"{location}: id {example_id!r} is invalid: it must be a text. Write it as a string.")
    return Example(str(example_id), (context, question), spans, location)


def read_questions(path: Path) -> Iterator[tuple[str, Fields]]:
    """Read a .json file as distributed, also as .gz.

    Yields:
        Location and fields of each question, with its context.

    Raises:
        InputError: the file is missing or invalid.
    """
    if not path.is_file():
        raise InputError(
            f"{path}: no such file. Set data.dir to the folder of SQuAD's files, or set data.train and data.dev."
        )
    text = "".join(read_parts(path))  # not by line: the whole file may be one long line
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InputError(f"{path}: not UTF-8. Convert it: iconv -f LATIN1 -t UTF-8 {path} > NEW") from None
    content = parse_object(text.removeprefix("\ufeff"), str(path), is_line=False)
    for n_article, article in enumerate(_get_objects(content, "data", str(path)), 1):
        article_location = f"{path}, article {n_article}"
        for n_paragraph, paragraph in enumerate(_get_objects(article, "paragraphs", article_location), 1):
            location = f"{article_location}, paragraph {n_paragraph}"
            context = get_value(paragraph, "context", location)
            for n_question, question in enumerate(_get_objects(paragraph, "qas", location), 1):
                question_id = get_value(question, "id", f"{location}, question {n_question}")
                yield f"{path}, question {question_id}", {**question, "context": context}


def _official_file(folder: str, part: str, name: str) -> Path:
    """Return the path of an official file, or of its .gz if only the .gz exists. For a Hub dataset, return the path of the split."""
    if is_hf_dataset(folder):
        return split_path(folder, part)
    path = Path(folder) / f"{part}-{SQUAD_VERSIONS[name]}.json"
    compressed = path.with_name(f"{path.name}.gz")
    return compressed if compressed.is_file() and not path.is_file() else path


def _get_objects(fields: Any, name: str, location: str) -> Sequence[Mapping[str, Any]]:
    objects = get_value(fields, name, location)
    if not isinstance(objects, list) or not all(isinstance(item, dict) for item in objects):
        raise InputError(f"{location}: {name!r} is invalid: it must be a list of objects. Correct the file.")
    return objects


def _parse_answers(answers: Any, context: str, location: str) -> tuple[TextSpan, ...]:
    """Parse `answers`: a list of objects, as in the files, or an object of lists, as in `datasets`."""
    if isinstance(answers, dict):
        texts, starts = get_value(answers, "text", location), get_value(answers, "answer_start", location)
        if not isinstance(texts, list) or not isinstance(starts, list) or len(texts) != len(starts):
            raise InputError(
                f"{location}: 'answers' is invalid: 'text' and 'answer_start' must be two lists of the same length. Correct them."
            )
        answers = [{"text": text, "answer_start": start} for text, start in zip(texts, starts, strict=True)]
    if not isinstance(answers, list) or not all(isinstance(item, dict) for item in answers):
        raise InputError(
            f"{location}: 'answers' is invalid: it must be a list of objects with text and answer_start. Correct it."
        )
    return tuple(_parse_answer(item, context, location) for item in answers)


def _parse_answer(answer: Fields, context: str, location: str) -> TextSpan:
    text, start = get_text(answer, "text", location), get_value(answer, "answer_start", location)
    if not isinstance(start, int) or isinstance(start, bool):
        raise InputError(
            f"{location}: answer_start={start!r} is invalid: it must be an integer, the index of the first character of the answer."
        )
    if start < 0 or context[start : start + len(text)] != text:
        actual = context[start : start + len(text)] if start >= 0 else ""
        first = context.find(text)
        remedy = f"The answer is at {first}" if first >= 0 else "It is not in the context: remove the question"
        raise InputError(
            f"{location}: answer_start={start!r} is invalid: the context has {actual!r} there instead of the answer {text!r}. {remedy}."
        )
    n_spaces = len(text) - len(text.lstrip())
    return start + n_spaces, text.strip()
