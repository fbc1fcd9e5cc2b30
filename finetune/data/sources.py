"""Sources of examples: table files with their columns, and a held-out validation split where none is distributed."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from finetune.config import TaskDataConfig
from finetune.data.examples import Example, Prediction
from finetune.data.hub_datasets import HubColumns
from finetune.data.row_errors import RowErrors
from finetune.data.table_reader import (
    KINDS,
    Fields,
    get_class_index,
    get_number,
    get_text,
    has_columns,
    is_hub_split,
    read_rows,
)
from xlpre.common.errors import InputError
from xlpre.text.hub import HF_PREFIX, is_hf_dataset
from xlpre.text.readers import COMPRESSED_SUFFIXES

TRAIN, HELD_OUT = "train", "held_out"
RESERVED_NAMES = (TRAIN, HELD_OUT, "metrics")  # metrics.jsonl is in the same folder as SPLIT.jsonl
SUFFIXES = (*COMPRESSED_SUFFIXES, *KINDS, ".json", ".run")  # endings that are not part of the name of a split


class Source(Protocol):
    """Source of the examples of a task. Its attributes and methods are those of the same name in Task (tasks/base.py)."""

    dev_splits: tuple[str, ...]
    test_splits: tuple[str, ...]
    text_columns: tuple[str, ...]
    label_columns: tuple[str, ...]

    def data_settings(self) -> dict[str, Any]:
        """Return the `data` settings that rebuild the task, as in `Task.data_settings`."""

    def read_split(self, split: str) -> list[Example]:
        """Return the examples of a split, as in `Task.read_split`."""

    def parse_example(self, fields: Fields, location: str, default_id: str = "") -> Example:
        """Build the example from the fields of one line, as in `Task.parse_example`."""

    def write_submission(self, folder: Path, predictions: Mapping[str, list[Prediction]]) -> list[Path]:
        """Write official prediction files, as in `Task.write_submission`."""


@dataclass(frozen=True)
class Columns:
    """Columns of a table.

    Attributes:
        texts: names of the one or two columns with texts.
        label: name of the column with the label.
        label_names: names of the classes; empty if the label is a number.
        names: names of all columns, if training and dev files have no header line; otherwise empty.
        aliases: maps column names that only some of the files use to the usual names.
        is_damaged: True if the official files have incomplete rows. Labelled rows with missing columns are skipped, and one of two
            texts may be empty.
        hub: columns of the Hub dataset.
    """

    texts: tuple[str, ...]
    label: str
    label_names: Sequence[str] = ()
    names: tuple[str, ...] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)
    is_damaged: bool = False
    hub: HubColumns = HubColumns()


class TableSource:
    """Source that reads one example from each row of a table.

    Args:
        columns: columns of the tables.
        train: training files.
        dev: dev files by split name. If it is empty, a fraction of the training examples is held out.
        test: test files by split name.
        data: settings.

    Attributes:
        has_test_labels: True if the test files have labels.
        label_remedy: what to do about an unknown label.
    """

    has_test_labels = False
    label_remedy = "Correct it."

    def __init__(
        self,
        columns: Columns,
        train: Sequence[Path],
        dev: Mapping[str, Path],
        test: Mapping[str, Path],
        data: TaskDataConfig,
    ) -> None:
        self.columns, self.text_columns, self._data = columns, columns.texts, data
        renamed = {**columns.aliases, **columns.hub.names}
        self.label_columns = (columns.label, *(name for name, usual in renamed.items() if usual == columns.label))
        self._train, self._files = train, {**dev, **test}
        self._holds_out = not dev
        self.dev_splits, self.test_splits = tuple(dev) or (HELD_OUT,), tuple(test)

    def data_settings(self) -> dict[str, Any]:
        """Return the settings needed to read a row."""
        return {"max_seq_len": self._data.max_seq_len}

    def read_split(self, split: str) -> list[Example]:
        """Read the examples of a split.

        Raises:
            InputError: a file is missing or invalid.
            InvalidRowsError: rows are invalid. The message names file and line.
        """
        if split in (TRAIN, HELD_OUT):
            if not self._train:
                raise InputError("data.train=null is invalid: fine-tuning needs training files. Set data.train=[FILE].")
            errors = RowErrors()
            examples: list[Example] = []
            for path in self._train:
                examples += self._read_file(path, True, errors, first_row=len(examples))
            errors.raise_if_any()
            if self._holds_out:
                examples = select_split(examples, self._data.val_fraction, split, str(self._train[0]))
        else:
            path = self._files[split]
            labeled = split in self.dev_splits or self.has_test_labels
            errors = RowErrors()
            examples = list(self._read_file(path, labeled, errors))
            errors.raise_if_any()
            is_regression = not self.columns.label_names
            if not labeled and is_regression and all(example.label in (None, -1) for example in examples):
                examples = [replace(example, label=None) for example in examples]  # all labels are -1: they are hidden
        if not examples:
            file = self._files[split] if split in self._files else self._train[0]
            raise InputError(f"{file} contains no example. Choose another file.")
        return examples

    def parse_example(self, fields: Fields, location: str, default_id: str = "", labeled: bool = False) -> Example:
        """Build the example of a row.

        Args:
            fields: columns of the row.
            location: file and line, for error messages.
            default_id: id of the example if the row has no column `index` or `id`.
            labeled: True to require a label. Only rows without a label may have an empty text.

        Raises:
            InputError: a column is missing, empty or invalid.
        """
        columns = self.columns
        if columns.aliases:
            fields = {columns.aliases.get(name, name): value for name, value in fields.items()}
        label: int | float | None = None
        if labeled or not self._is_hidden_label(fields.get(columns.label)):
            if columns.label_names:
                label = get_class_index(fields, columns.label, columns.label_names, location, self.label_remedy)
            else:
                label = get_number(fields, columns.label, location)
        example_id = next((str(fields[key]) for key in ("index", "id") if fields.get(key) is not None), default_id)
        return Example(example_id, self._texts(fields, location, allow_empty=label is None), label, location)

    def write_submission(self, folder: Path, predictions: Mapping[str, list[Prediction]]) -> list[Path]:
        """Write nothing: these tables have no official format."""
        return []

    def _is_hidden_label(self, label: Any) -> bool:
        """Return True if `label` stands for a hidden label in test files."""
        label_names = self.columns.label_names
        return (
            label is None
            or label != label
            or str(label).strip() == ""
            or bool(label_names and label in (-1, "-1") and not {"-1", str(label)} & {*label_names})
        )

    def _texts(self, fields: Fields, location: str, allow_empty: bool) -> tuple[str, ...]:
        columns = self.columns.texts
        allow_empty = allow_empty or (self.columns.is_damaged and len(columns) > 1)
        return tuple(get_text(fields, column, location, allow_empty) for column in columns)

    def _read_file(self, path: Path, labeled: bool, errors: RowErrors, first_row: int = 0) -> Iterator[Example]:
        """Yield the examples of a file. Examples without an id get the number of their row, from `first_row` on."""
        columns = self.columns
        names = columns.names
        if names and not labeled and has_columns(path, columns.texts):
            names = ()  # this file has a header line
        rows = read_rows(path, names, columns.is_damaged and labeled, errors)
        for row, (location, fields) in enumerate(rows, first_row):
            example = None
            with errors.collect(location, is_first=row == first_row):
                if is_hub_split(path):
                    fields = columns.hub.to_file_fields(fields, columns.label, location)
                example = self.parse_example(fields, location, str(row), labeled)
            if example:
                yield example


def select_split(examples: Sequence[Example], val_fraction: float, split: str, file: str) -> list[Example]:
    """Return the training or the held-out part of the training examples.

    A hash of the text decides, so that equal texts are in the same part.

    Args:
        examples: all training examples.
        val_fraction: fraction to hold out.
        split: TRAIN or HELD_OUT.
        file: training file, for error messages.

    Raises:
        InputError: no example is left for `split`.
    """
    texts = ("\t".join(example.texts).encode() for example in examples)
    hashes = [int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") for text in texts]
    is_held_out = [value < val_fraction * 2**64 for value in hashes]
    selected = [
        example for example, held_out in zip(examples, is_held_out, strict=True) if held_out == (split == HELD_OUT)
    ]
    if not selected:
        part, change = ("none", "Raise") if split == HELD_OUT else ("all", "Lower")
        raise InputError(
            f"data.val_fraction={val_fraction} is invalid: it holds out {part} of the {len(examples)} examples in {file}, "
            f"but training and validation need at least one each. {change} it."
        )
    return selected


def find_folder(data: TaskDataConfig, name: str) -> Path:
    """Return the subfolder `name` of `data.dir` if it exists, otherwise `data.dir`."""
    subfolder = Path(data.root) / name
    return subfolder if subfolder.is_dir() else Path(data.root)


def check_data_dir(data: TaskDataConfig, task: str, contents: str) -> None:
    """Check that `data.dir` is set, and is a folder or a Hub dataset.

    Args:
        data: settings.
        task: name of the task, for error messages.
        contents: file that the folder must contain, for error messages.

    Raises:
        InputError: `data.dir` is not set, or is not a folder.
    """
    if not data.dir:
        raise InputError(
            f"data.dir=null is invalid: task={task} needs the folder of its files. Set data.dir to the folder that contains {contents}."
        )
    if not (is_hf_dataset(data.dir) or Path(data.dir).is_dir()):
        raise InputError(
            f"data.dir={data.dir} is invalid: there is no such folder. Set data.dir to the folder that contains {contents}."
        )


def split_name(file: str) -> str:
    """Return the split name for a file: the file name without known suffixes. For hf:NAME:SPLIT, it is NAME-SPLIT."""
    if is_hub_split(file):
        return re.sub("[/:]+", "-", file.removeprefix(HF_PREFIX)).strip("-.")
    path = Path(file)
    while path.suffix in SUFFIXES:
        path = path.with_suffix("")
    return path.name


def resolve_file(folder: str | Path, file: str) -> Path:
    """Return the path of a file in a folder. hf:NAME:SPLIT is not in a folder and stays as it is."""
    return Path(file) if is_hub_split(file) else Path(folder) / file


def files_by_split(folder: Path, files: Sequence[str], others: Mapping[str, Path] | None = None) -> dict[str, Path]:
    """Return files by the name of their split.

    Args:
        folder: folder of the files.
        files: file names, or hf:NAME:SPLIT.
        others: files by split name whose names must not be used again.

    Raises:
        InputError: two splits have the same name, or a name is reserved.
    """
    taken, paths = dict(others or {}), dict[str, Path]()
    for file in files:
        path, name = resolve_file(folder, file), split_name(file)
        if name in RESERVED_NAMES:
            raise InputError(
                f"{path} is invalid: the split name {name} is reserved. Give the file another name than {', '.join(RESERVED_NAMES)}."
            )
        if name in taken:
            raise InputError(
                f"{path} is invalid: {taken[name]} has the same split name {name}, so both would write predictions "
                "to the same file. Rename one of the files."
            )
        taken[name] = paths[name] = path
    return paths
