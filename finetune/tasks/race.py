"""RACE: questions about a passage, four options each (Lai et al. 2017), from the folder as distributed.

    RACE/{train,dev,test}/{middle,high}/N.txt      one JSON object: article, questions, options, answers, id

Source of the layout of rows: zihangdai/xlnet run_race.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from finetune.config import TaskDataConfig
from finetune.data.examples import Example, Prediction
from finetune.data.hub_datasets import split_path
from finetune.data.sources import check_folder, find_folder
from finetune.data.table_reader import Fields, read_rows, value_of
from finetune.tasks.base import Task
from finetune.tasks.sequence import ChoiceTask
from xlpre.model.pooling import Summary
from xlpre.text.hub import is_dataset
from xlpre.text.json_objects import parse_object
from xlpre.text.readers import ByteCounter, read_lines

OPTIONS = ("A", "B", "C", "D")
LEVELS = {"race": ("middle", "high"), "race/middle": ("middle",), "race/high": ("high",)}


class RaceSource:
    """Passages with their questions, from the folder, or the dataset ehovy/race, where `data.dir` is hf: and its name, or a copy's.

    Args:
        name: of the task, which says which levels are read.
        data: the settings.
    """

    dev_splits: tuple[str, ...] = ("dev",)
    text_columns: tuple[str, ...] = ()

    def __init__(self, name: str, data: TaskDataConfig) -> None:
        self._name, self._data = name, data
        self._folder, self._by_name = find_folder(data, "RACE"), is_dataset(data.root)
        self.test_splits: tuple[str, ...] = ("test",) if self._by_name or (self._folder / "test").is_dir() else ()

    def data_settings(self) -> dict[str, Any]:
        """What reading a question needs."""
        return {"max_seq_len": self._data.max_seq_len, "max_option_len": self._data.max_option_len}

    def read_split(self, split: str) -> list[Example]:
        """The questions of a split, level by level, in the order of the numbers of their files."""
        check_folder(self._data, self._name, "RACE/train/middle (unpack RACE.tar.gz there)")
        found: list[Example] = []
        for level in LEVELS[self._name]:
            if self._by_name:
                found += self._rows(split, level)
                continue
            files = sorted((self._folder / split / level).glob("*.txt"), key=_number)
            if not files:
                raise ValueError(
                    f"{self._folder / split / level}: holds no .txt file; data.dir should hold RACE as distributed"
                )
            for path in files:
                found += self._questions(path, level)
        if not found:
            raise ValueError(f"{self._folder / split}: holds no question of {' or '.join(LEVELS[self._name])}")
        return found

    def parse_example(self, fields: Fields, place: str) -> Example:
        """A question from a line: article, question, options and perhaps answer."""
        article, question, options = (value_of(fields, name, place) for name in ("article", "question", "options"))
        return _example(str(fields.get("id", place)), article, question, options, fields.get("answer"), place)

    def write_submission(self, folder: Path, predictions: Mapping[str, list[Prediction]]) -> list[Path]:
        """There is no official format: the answers are in the files."""
        return []

    def _rows(self, split: str, level: str) -> Iterator[Example]:
        """The questions of a split of the dataset, which has one a row and calls the files by level and number."""
        numbers: Counter[str] = Counter()
        for place, fields in read_rows(split_path(self._data.root, split, level)):
            file = Path(str(value_of(fields, "example_id", place))).stem.removeprefix(level)
            article, question, options, answer = (
                value_of(fields, name, place) for name in ("article", "question", "options", "answer")
            )
            yield _example(f"{level}/{file}/{numbers[file]}", article, question, options, answer, place, level)
            numbers[file] += 1

    def _questions(self, path: Path, level: str) -> list[Example]:
        fields = parse_object("".join(line for _, line in read_lines(path, ByteCounter())), str(path))
        article, questions, options, answers = (
            value_of(fields, name, str(path)) for name in ("article", "questions", "options", "answers")
        )
        if not all(isinstance(one, list) for one in (questions, options, answers)):
            raise ValueError(f"{path}: questions, options and answers must be lists")
        if not len(questions) == len(options) == len(answers):
            raise ValueError(
                f"{path}: {len(questions)} questions, {len(options)} lists of options and {len(answers)} answers must be equally many"
            )
        return [
            _example(
                f"{level}/{path.stem}/{number}", article, *one, place=f"{path}, question {number + 1}", group=level
            )
            for number, one in enumerate(zip(questions, options, answers, strict=True))
        ]


def build_race(name: str, data: TaskDataConfig, summary: Summary) -> Task:
    """`race`, or one of its levels."""
    source = RaceSource(name, data)
    return ChoiceTask(name, source, data, summary, labels=OPTIONS, max_option_len=data.max_option_len)


def with_option(question: str, option: str) -> str:
    """The question with an option in its blank, or after it."""
    return question.replace("_", option) if "_" in question else f"{question} {option}"


def _example(name: str, article: Any, question: Any, options: Any, answer: Any, place: str, group: str = "") -> Example:
    if not isinstance(options, list) or len(options) != len(OPTIONS):
        raise ValueError(f"{place}: {options!r} must be {len(OPTIONS)} options")
    if not all(isinstance(text, str) for text in (article, question, *options)):
        raise ValueError(f"{place}: article, question and options must be texts")
    if answer is not None and answer not in OPTIONS:
        raise ValueError(f"{place}: the answer {answer!r} is none of {', '.join(OPTIONS)}")
    if answer is not None and not article.strip():
        raise ValueError(f"{place}: the article is empty; fill it in, or remove the question")
    texts = (article, *(with_option(question, option) for option in options))
    return Example(name, texts, None if answer is None else OPTIONS.index(answer), place, group)


def _number(path: Path) -> tuple[int, str]:
    return (int(path.stem) if path.stem.isdigit() else -1, path.stem)
