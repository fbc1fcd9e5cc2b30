"""Files of one's own: any .tsv, .csv or .jsonl file with columns of text and one with a label or a number."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from finetune.config import TaskDataConfig
from finetune.data.examples import Example
from finetune.data.sources import TRAIN, Columns, TableSource, by_split, file_in
from finetune.data.table_reader import label_of, read_rows
from finetune.tasks.base import Task
from finetune.tasks.regression import RegressionTask
from finetune.tasks.sequence import ClassificationTask
from xlpre.model.pooling import Summary


def build_classification(name: str, data: TaskDataConfig, summary: Summary) -> Task:
    """`classify`: accuracy decides, and Matthews' correlation is told."""
    labels = [label.strip() for label in data.labels or ()] or read_label_names(
        [file_in(data.root, file) for file in data.train or ()], data.label
    )
    if data.labels and len({*labels}) < max(len(labels), 2):
        raise ValueError(f"data.labels ({', '.join(labels)}) must be two labels or more, each once")
    source = _source(name, data, labels)
    return ClassificationTask(name, source, data, summary, ("accuracy", "matthews"), labels=labels)


def build_regression(name: str, data: TaskDataConfig, summary: Summary) -> Task:
    """`regress`: Pearson's correlation decides, Spearman's is told."""
    source = _source(name, data, ())
    scale = data.label_scale or (scale_of(source.read_split(TRAIN)) if data.train else ())
    return RegressionTask(name, source, data, summary, ("pearson", "spearman"), scale=scale)


def scale_of(examples: Sequence[Example]) -> tuple[float, float]:
    """Mean and standard deviation of the truth, 1 where it is all the same."""
    truth = np.array([example.label for example in examples])
    return float(truth.mean()), float(truth.std()) or 1.0


def read_label_names(files: Sequence[Path], column: str) -> list[str]:
    """The labels in the training files, in the order of numbers if they are, else of the alphabet.

    Raises:
        ValueError: there is no such column, or fewer than two labels.
    """
    found = {label_of(fields, column, place) for path in files for place, fields in read_rows(path)}
    if files and not found:
        raise ValueError(f"{files[0]}: holds no example")
    if files and len(found) < 2:
        raise ValueError(f"{files[0]}: {column!r} holds the label {', '.join(found)!r} only; at least two are needed")
    if all(re.fullmatch("-?[0-9]+", label) for label in found):
        return sorted(found, key=lambda label: (int(label), label))  # 1 and 01 are two
    return sorted(found)


class OwnSource(TableSource):
    """Files whose columns the settings name."""

    def data_settings(self) -> dict[str, Any]:
        """The columns, too."""
        columns = self.columns
        named = {"text": list(columns.texts), "label": columns.label, "labels": list(columns.labels) or None}
        return {**super().data_settings(), **named}


def _source(name: str, data: TaskDataConfig, labels: Sequence[str]) -> TableSource:
    texts = tuple(data.text or ())
    if not 1 <= len(texts) <= 2 or len({*texts}) < len(texts):
        raise ValueError(f"task={name} needs data.text: [COLUMN] with the text, or two columns; it is {data.text}")
    folder = Path(data.root)
    train, dev = [file_in(folder, file) for file in data.train or ()], by_split(folder, data.dev or ())
    columns = Columns(texts, data.label, labels)
    return OwnSource(columns, train, dev, by_split(folder, data.test or (), dev), data)
