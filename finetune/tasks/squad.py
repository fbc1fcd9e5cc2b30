"""SQuAD 1.1 and 2.0: questions about a paragraph, answered by a stretch of it, or by nothing (2.0).

    {train,dev}-v1.1.json or {train,dev}-v2.0.json, also .gz

The official scorers read what is written:

    SPLIT.answers.json      {id: text}, what is handed in; the text is empty where there is no answer
    SPLIT.spans.json        {id: text}, of 2.0: always a text, for evaluate-v2.0.py with --na-prob-file
    SPLIT.null_odds.json    {id: log-odds that there is no answer}, of 2.0
    SPLIT.best.json         {id: the best answers with their probabilities}
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from finetune.config import TaskDataConfig
from finetune.data.examples import Example, Prediction
from finetune.data.hub_datasets import split_path
from finetune.data.long_text import check_checksum
from finetune.data.sources import TRAIN, by_split, check_folder, file_in
from finetune.tasks.base import Task
from finetune.tasks.span import SpanTask
from finetune.tasks.squad_files import question_of, read_squad
from xlpre.common.files import write_text
from xlpre.model.pooling import Summary
from xlpre.text.hub import is_dataset

VERSIONS = {"squad/1.1": "v1.1", "squad/2.0": "v2.0"}


class SquadTask(SpanTask):
    """One of the VERSIONS; for the rest see SpanTask."""

    def __init__(self, name: str, data: TaskDataConfig) -> None:
        check_checksum(data, name)
        super().__init__(name, data, answerable=name == "squad/1.1")
        folder = Path() if is_dataset(data.root) else Path(data.root)
        self._train = [file_in(folder, file) for file in data.train or ()] or [_official(data.root, "train", name)]
        dev = by_split(folder, data.dev or ()) or {f"dev-{VERSIONS[name]}": _official(data.root, "dev", name)}
        test = by_split(folder, data.test or (), dev)
        self._files, self.dev_splits, self.test_splits = {**dev, **test}, tuple(dev), tuple(test)

    def read_split(self, split: str) -> list[Example]:
        """See Task."""
        if not (self._data.train and self._data.dev):
            check_folder(self._data, self.name, f"train-{VERSIONS[self.name]}.json and dev-{VERSIONS[self.name]}.json")
        files = self._train if split == TRAIN else [self._files[split]]
        return [
            example for path in files for example in read_squad(path, self.answerable, labelled=split not in self.test_splits)
        ]

    def parse_example(self, fields: Mapping[str, Any], place: str) -> Example:
        """A question from a line: context, question and perhaps id and answers."""
        return question_of(fields, place, self.answerable)

    def write_submission(self, folder: Path, predictions: Mapping[str, list[Prediction]]) -> list[Path]:
        """The files that the module names, of every split."""
        return [path for split, of_split in predictions.items() for path in self._write(folder, split, of_split)]

    def _write(self, folder: Path, split: str, predictions: list[Prediction]) -> list[Path]:
        contents = {
            "answers": {one["id"]: one["prediction"] for one in predictions},
            "best": {one["id"]: one["best"] for one in predictions},
        }
        if not self.answerable:
            contents["spans"] = {one["id"]: one["best"][0]["text"] for one in predictions}
            contents["null_odds"] = {one["id"]: one["null_log_odds"] for one in predictions}
        written = []
        for name, content in contents.items():
            written.append(folder / f"{split}.{name}.json")
            write_text(written[-1], json.dumps(content, ensure_ascii=False))
        return written


def build_squad(name: str, data: TaskDataConfig, summary: Summary) -> Task:
    """`squad/1.1` or `squad/2.0`; `summary` is of tasks that read a row by one vector."""
    return SquadTask(name, data)


def _official(folder: str, part: str, name: str) -> Path:
    """The file as distributed, packed if only that is there; or the split of a dataset."""
    if is_dataset(folder):
        return split_path(folder, part)
    path = Path(folder) / f"{part}-{VERSIONS[name]}.json"
    packed = path.with_name(f"{path.name}.gz")
    return packed if packed.is_file() and not path.is_file() else path
