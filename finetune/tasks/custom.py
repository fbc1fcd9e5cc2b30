"""Classification and regression on your own files: .tsv, .csv, .jsonl or .parquet, with one or two text columns and a label column."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from finetune.config import TaskDataConfig
from finetune.data.examples import Example
from finetune.data.row_errors import RowErrors
from finetune.data.sources import TRAIN, Columns, TableSource, files_by_split, resolve_file
from finetune.data.table_reader import get_label_name, read_rows
from finetune.tasks.base import Task
from finetune.tasks.regression import RegressionTask
from finetune.tasks.sequence import ClassificationTask
from xlpre.common.errors import InputError
from xlpre.model.pooling import Pooling


class CustomSource(TableSource):
    """Files whose columns are named in the settings."""

    label_remedy = "Correct it, or add it to data.labels."

    def data_settings(self) -> dict[str, Any]:
        """Return the settings needed to read a row, including the column names."""
        columns = self.columns
        names = {"text": list(columns.texts), "label": columns.label, "labels": list(columns.label_names) or None}
        return {**super().data_settings(), **names}


def build_classification(name: str, data: TaskDataConfig, pooling: Pooling) -> Task:
    """Build `classify`. Accuracy selects the best weights; Matthews' correlation is reported."""
    label_names = [label.strip() for label in data.labels or ()] or read_label_names(
        [resolve_file(data.root, file) for file in data.train or ()], data.label
    )
    if data.labels and len({*label_names}) < max(len(label_names), 2):
        raise InputError(
            f"data.labels=[{', '.join(label_names)}] is invalid: it must contain two or more labels, each once. "
            "Correct it, or leave it out."
        )
    source = _build_source(name, data, label_names)
    return ClassificationTask(name, source, data, pooling, ("accuracy", "matthews"), label_names=label_names)


def build_regression(name: str, data: TaskDataConfig, pooling: Pooling) -> Task:
    """Build the task `regress`, which predicts a number from text.

    Pearson's correlation selects the best weights; Spearman's is reported, too.
    """
    source = _build_source(name, data, ())
    label_scale = data.label_scale or (compute_label_scale(source.read_split(TRAIN)) if data.train else ())
    return RegressionTask(name, source, data, pooling, ("pearson", "spearman"), label_scale=label_scale)


def compute_label_scale(examples: Sequence[Example]) -> tuple[float, float]:
    """Return mean and standard deviation of the labels. The standard deviation is replaced by 1 if all labels are equal."""
    labels = np.array([example.label for example in examples])
    return float(labels.mean()), float(labels.std()) or 1.0


def read_label_names(files: Sequence[Path], column: str) -> list[str]:
    """Return the labels in training files, sorted by value if all are integers, otherwise alphabetically.

    Raises:
        InputError: the column is missing, has fewer than two labels, or one that settings cannot hold.
    """
    names, errors = set[str](), RowErrors()
    for path in files:
        for row, (location, fields) in enumerate(read_rows(path, errors=errors)):
            with errors.collect(location, is_first=row == 0):
                names.add(get_label_name(fields, column, location))
    if reserved := [name for name in sorted(names) if name == "???" or "${" in name or name.startswith("~/")]:
        raise InputError(
            f"{files[0]}: label {reserved[0]!r} in column {column!r} is invalid: ???, ${{ and ~/ have a meaning in settings, which contain "
            "the labels. Rename the label."
        )
    if len(names) < 2:
        errors.raise_if_any()  # if there are two labels, `read_split` reports these errors, with all others
    if files and not names:
        raise InputError(f"{files[0]} contains no example. Choose another file.")
    if files and len(names) < 2:
        raise InputError(
            f"{files[0]}: column {column!r} has only the label {', '.join(names)!r}, but two are needed. "
            "Add examples of another label."
        )
    if all(re.fullmatch("-?[0-9]+", name) for name in names):
        return sorted(names, key=lambda name: (int(name), name))  # 1 and 01 are different labels
    return sorted(names)


def _build_source(name: str, data: TaskDataConfig, label_names: Sequence[str]) -> TableSource:
    texts = tuple(data.text or ())
    if not 1 <= len(texts) <= 2 or len({*texts}) < len(texts):
        shown = "null" if data.text is None else f"[{', '.join(data.text)}]"
        raise InputError(
            f"data.text={shown} is invalid: task={name} needs the names of one or two different text columns. Set data.text=[COLUMN]."
        )
    folder = Path(data.root)
    train = [resolve_file(folder, file) for file in data.train or ()]
    dev = files_by_split(folder, data.dev or ())
    columns = Columns(texts, data.label, label_names)
    return CustomSource(columns, train, dev, files_by_split(folder, data.test or (), dev), data)
