"""RACE: questions about a passage with four options (Lai et al. 2017), from the folder as distributed.

    RACE/{train,dev,test}/{middle,high}/N.txt      one JSON object: article, questions, options, answers, id

Source: layout of the rows from zihangdai/xlnet run_race.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from finetune.config import TaskDataConfig
from finetune.data.examples import Example, Prediction
from finetune.data.hub_datasets import split_path
from finetune.data.sources import check_data_dir, find_folder
from finetune.data.table_reader import Fields, get_value, read_rows
from finetune.tasks.base import Task
from finetune.tasks.sequence import ChoiceTask
from xlpre.common.errors import InputError
from xlpre.model.pooling import Pooling
from xlpre.text.hub import is_hf_dataset
from xlpre.text.json_objects import parse_object
from xlpre.text.readers import read_lines

OPTIONS = ("A", "B", "C", "D")
RACE_LEVELS = {"race": ("middle", "high"), "race/middle": ("middle",), "race/high": ("high",)}


class RaceSource:
    """Questions from the files of RACE, or from the Hub dataset ehovy/race (or a copy of it) if `data.dir` is hf:NAME.

    Args:
        name: key of RACE_LEVELS.
        data: settings.
    """

    dev_splits: tuple[str, ...] = ("dev",)
    text_columns: tuple[str, ...] = ()
    label_columns: tuple[str, ...] = ("answer",)

    def __init__(self, name: str, data: TaskDataConfig) -> None:
        self._name, self._data = name, data
        self._folder, self._is_hub = find_folder(data, "RACE"), is_hf_dataset(data.root)
        has_test = self._is_hub or (self._folder / "test").is_dir()
        self.test_splits: tuple[str, ...] = ("test",) if has_test else ()

    def data_settings(self) -> dict[str, Any]:
        """Return the settings needed to read a question."""
        return {"max_seq_len": self._data.max_seq_len, "max_option_len": self._data.max_option_len}

    def read_split(self, split: str) -> list[Example]:
        """Read the questions of a split, level by level, in the order of the file numbers."""
        check_data_dir(self._data, self._name, "RACE/train/middle (unpack RACE.tar.gz there)")
        examples: list[Example] = []
        for level in RACE_LEVELS[self._name]:
            if self._is_hub:
                examples += self._read_hub_split(split, level)
                continue
            files = sorted((self._folder / split / level).glob("*.txt"), key=_file_number)
            if not files:
                raise InputError(
                    f"{self._folder / split / level} contains no .txt file. Set data.dir to the folder of RACE as distributed."
                )
            for path in files:
                examples += self._read_file(path, level)
        if not examples:
            raise InputError(
                f"{self._folder / split} contains no question of level {' or '.join(RACE_LEVELS[self._name])}. "
                "Set data.dir to the folder of RACE as distributed."
            )
        if split != "test" and (missing := next((example for example in examples if example.label is None), None)):
            raise InputError(f"{missing.location}: the answer is missing. Add it, or remove the question.")
        return examples

    def parse_example(self, fields: Fields, location: str, default_id: str = "") -> Example:
        """Build the example of a question from the fields article, question and options, and optionally answer."""
        article, question, options = (get_value(fields, name, location) for name in ("article", "question", "options"))
        return _build_example(
            str(default_id if fields.get("id") is None else fields["id"]),
            article,
            question,
            options,
            fields.get("answer"),
            location,
        )

    def write_submission(self, folder: Path, predictions: Mapping[str, list[Prediction]]) -> list[Path]:
        """Write nothing: there is no official format, as the test files contain the labels."""
        return []

    def _read_hub_split(self, split: str, level: str) -> Iterator[Example]:
        """Read a split of the Hub dataset, which has one row per question. Example ids have the same form as for files."""
        n_questions: Counter[str] = Counter()
        for location, fields in read_rows(split_path(self._data.root, split, level)):
            file = Path(str(get_value(fields, "example_id", location))).stem.removeprefix(level)
            article, question, options, answer = (
                get_value(fields, name, location) for name in ("article", "question", "options", "answer")
            )
            example_id = f"{level}/{file}/{n_questions[file]}"
            yield _build_example(example_id, article, question, options, answer, location, level)
            n_questions[file] += 1

    def _read_file(self, path: Path, level: str) -> list[Example]:
        """Read the questions about one passage."""
        fields = parse_object("".join(line for _, line in read_lines(path)), str(path), is_line=False)
        article, questions, options, answers = (
            get_value(fields, name, str(path)) for name in ("article", "questions", "options", "answers")
        )
        if not all(isinstance(values, list) for values in (questions, options, answers)):
            raise InputError(f"{path} is invalid: questions, options and answers must be lists. Correct the file.")
        if not len(questions) == len(options) == len(answers):
            raise InputError(
                f"{path} is invalid: it has {len(questions)} questions, {len(options)} lists of options and {len(answers)} answers, which "
                "must be equal numbers. Correct the file."
            )
        return [
            _build_example(
                f"{level}/{path.stem}/{index}",
                article,
                *question,
                location=f"{path}, question {index + 1}",
                group=level,
            )
            for index, question in enumerate(zip(questions, options, answers, strict=True))
        ]


def build_race(name: str, data: TaskDataConfig, pooling: Pooling) -> Task:
    """Build `race`, or one of its levels."""
    source = RaceSource(name, data)
    return ChoiceTask(name, source, data, pooling, label_names=OPTIONS, max_option_len=data.max_option_len)


def insert_option(question: str, option: str) -> str:
    """Return the question with its blanks (_) replaced by the option, or followed by the option if it has no blank."""
    return question.replace("_", option) if "_" in question else f"{question} {option}"


def _build_example(
    example_id: str, article: Any, question: Any, options: Any, answer: Any, location: str, group: str = ""
) -> Example:
    """Check the fields of a question and build its example.

    Raises:
        InputError: a field is invalid.
    """
    if not isinstance(options, list) or len(options) != len(OPTIONS):
        raise InputError(
            f"{location}: options={options!r} is invalid: there must be {len(OPTIONS)} options. Correct them."
        )
    if not all(isinstance(text, str) for text in (article, question, *options)):
        raise InputError(f"{location}: article, question and options must be texts. Correct them.")
    if answer is not None and answer not in OPTIONS:
        raise InputError(
            f"{location}: answer={answer!r} is invalid: it must be one of {', '.join(OPTIONS)}. Correct it."
        )
    if answer is not None and not article.strip():
        raise InputError(f"{location}: the article is empty. Fill it in, or remove the question.")
    texts = (article, *(insert_option(question, option) for option in options))
    return Example(example_id, texts, None if answer is None else OPTIONS.index(answer), location, group)


def _file_number(path: Path) -> tuple[int, str]:
    return (int(path.stem) if path.stem.isdigit() else -1, path.stem)
