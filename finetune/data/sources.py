"""Where a task's examples come from: files, their columns, and what is held out where nothing was distributed to measure on."""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from finetune.config import TaskDataConfig
from finetune.data.examples import Example, Prediction
from finetune.data.hub_datasets import HubColumns
from finetune.data.table_reader import KINDS, Fields, class_of, is_split, number_of, read_rows, text_of
from xlpre.text.hub import PREFIX, is_dataset
from xlpre.text.readers import PACKED

TRAIN, HELD_OUT = "train", "held_out"
RESERVED = (TRAIN, HELD_OUT, "metrics")  # metrics.jsonl stands beside the answers to dev splits
ENDINGS = (*PACKED, *KINDS, ".json", ".run")


class Source(Protocol):
    """What a task is read from; see Task. `texts` are its `columns`."""

    dev_splits: tuple[str, ...]
    test_splits: tuple[str, ...]
    text_columns: tuple[str, ...]

    def data_settings(self) -> dict[str, Any]:
        """See Task."""

    def read_split(self, split: str) -> list[Example]:
        """See Task."""

    def parse_example(self, fields: Fields, place: str) -> Example:
        """See Task."""

    def write_submission(self, folder: Path, predictions: Mapping[str, list[Prediction]]) -> list[Path]:
        """See Task."""


@dataclass(frozen=True)
class Columns:
    """What stands where in a row.

    Attributes:
        texts: columns with the text, or the two texts.
        label: column with the truth.
        labels: what it can be; empty: a number.
        names: of the columns of training and dev files that have no line of names.
        aliases: other names that a column has in some files.
        damaged: rows that are cut are passed over where the truth is known, and one of two texts may be empty.
        dataset: how rows are read by name.
    """

    texts: tuple[str, ...]
    label: str
    labels: Sequence[str] = ()
    names: tuple[str, ...] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)
    damaged: bool = False
    dataset: HubColumns = HubColumns()


class TableSource:
    """Examples in rows of files.

    Args:
        columns: of the rows.
        train: files of training examples.
        dev: files by the name of their split; none: a part of the training examples is held out.
        test: files by the name of their split.
        data: the settings.

    Attributes:
        tests_are_labelled: the truth is in the test files, too.
    """

    tests_are_labelled = False

    def __init__(
        self,
        columns: Columns,
        train: Sequence[Path],
        dev: Mapping[str, Path],
        test: Mapping[str, Path],
        data: TaskDataConfig,
    ) -> None:
        self.columns, self.text_columns, self._data = columns, columns.texts, data
        self._train, self._files = train, {**dev, **test}
        self._holds_out = not dev
        self.dev_splits, self.test_splits = tuple(dev) or (HELD_OUT,), tuple(test)

    def data_settings(self) -> dict[str, Any]:
        """What reading a line needs."""
        return {"max_seq_len": self._data.max_seq_len}

    def read_split(self, split: str) -> list[Example]:
        """The examples of a split.

        Raises:
            ValueError: what is wrong with a file, with file and line.
        """
        if split in (TRAIN, HELD_OUT):
            if not self._train:
                raise ValueError("there are no training files; name them with data.train=[FILE]")
            found = [example for path in self._train for example in self._rows(path, labelled=True)]
            if self._holds_out:
                found = part_of(found, self._data.val_fraction, split, str(self._train[0]))
        else:
            path = self._files[split]
            labelled = split in self.dev_splits or self.tests_are_labelled
            found = list(self._rows(path, labelled))
            if not (labelled or self.columns.labels) and all(example.label in (None, -1) for example in found):
                found = [replace(example, label=None) for example in found]  # -1 throughout is how truth is hidden
        if not found:
            raise ValueError(f"{self._files.get(split, self._train[0])}: holds no example")
        return found

    def parse_example(self, fields: Fields, place: str, labelled: bool = False, number: int = 0) -> Example:
        """An example of one row; a text of which nothing is known may be empty.

        Raises:
            ValueError: a field is missing, empty or unknown.
        """
        columns = self.columns
        fields = {columns.aliases.get(name, name): value for name, value in fields.items()}
        answer: int | float | None = None
        if labelled or not self._says_nothing(fields.get(columns.label)):
            of = (fields, columns.label)
            answer = class_of(*of, columns.labels, place) if columns.labels else number_of(*of, place)
        name = next((str(fields[key]) for key in ("index", "id") if key in fields), str(number))
        return Example(name, self._texts(fields, place, may_be_empty=answer is None), answer, place)

    def write_submission(self, folder: Path, predictions: Mapping[str, list[Prediction]]) -> list[Path]:
        """There is no official format."""
        return []

    def _says_nothing(self, truth: Any) -> bool:
        """Whether that is how files with examples to predict leave the truth open."""
        labels = self.columns.labels
        return (
            truth is None
            or truth != truth
            or str(truth).strip() == ""
            or bool(labels and truth in (-1, "-1") and not {"-1", str(truth)} & {*labels})
        )

    def _texts(self, fields: Fields, place: str, may_be_empty: bool) -> tuple[str, ...]:
        names = self.columns.texts
        may_be_empty = may_be_empty or (self.columns.damaged and len(names) > 1)
        return tuple(text_of(fields, name, place, may_be_empty) for name in names)

    def _rows(self, path: Path, labelled: bool) -> Iterator[Example]:
        names = self.columns.names if labelled else ()
        of = self.columns
        for number, (place, fields) in enumerate(read_rows(path, names, of.damaged and labelled)):
            row = of.dataset.as_in_files(fields, of.label, place) if is_split(path) else fields
            yield self.parse_example(row, place, labelled, number)


def part_of(examples: Sequence[Example], share: float, split: str, origin: str) -> list[Example]:
    """The training examples, or those held out of them: chosen by a hash of the text, so that none is on both sides.

    Raises:
        ValueError: too few in `origin` to be shared out.
    """
    held_out = [zlib.crc32("\t".join(example.texts).encode()) < share * 2**32 for example in examples]
    found = [example for example, held in zip(examples, held_out, strict=True) if held == (split == HELD_OUT)]
    if not found:
        raise ValueError(
            f"{origin}: data.val_fraction={share} of its {len(examples)} examples are "
            + ("none; raise it, or name data.dev" if split == HELD_OUT else "all; lower it, or name data.dev")
        )
    return found


def find_folder(data: TaskDataConfig, name: str) -> Path:
    """The folder called `name` in `data.dir`, or that itself."""
    inside = Path(data.root) / name
    return inside if inside.is_dir() else Path(data.root)


def check_folder(data: TaskDataConfig, task: str, contains: str) -> None:
    """Raise ValueError if there is no `data.dir`, which may be a dataset's name; `contains` says what it should hold."""
    if not data.dir:
        raise ValueError(f"task={task} is read from its folder: set data.dir to the one that holds {contains}")
    if not (is_dataset(data.dir) or Path(data.dir).is_dir()):
        raise ValueError(f"data.dir={data.dir}: there is no such folder; it should hold {contains}")


def split_name(file: str) -> str:
    """The name of the split in a file: its own, without known endings; of hf:NAME:SPLIT all of it."""
    if is_split(file):
        return re.sub("[/:]+", "-", file.removeprefix(PREFIX)).strip("-.")
    path = Path(file)
    while path.suffix in ENDINGS:
        path = path.with_suffix("")
    return path.name


def file_in(folder: str | Path, file: str) -> Path:
    """A file of a folder; hf:NAME:SPLIT is in none."""
    return Path(file) if is_split(file) else Path(folder) / file


def by_split(folder: Path, files: Sequence[str], taken: Mapping[str, Path] | None = None) -> dict[str, Path]:
    """Files by the name of their split.

    Raises:
        ValueError: two of the same name, or a name of those `taken`.
    """
    others, found = dict(taken or {}), dict[str, Path]()
    for file in files:
        path, name = file_in(folder, file), split_name(file)
        if name in RESERVED:
            raise ValueError(f"{path} is called {name}, as something else in a run's folder is; rename it")
        if name in others:
            raise ValueError(
                f"{path} and {others[name]} are both called {name}, by which scores and predictions are told apart; rename one"
            )
        others[name] = found[name] = path
    return found
