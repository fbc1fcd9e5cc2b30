"""GLUE tasks, from their files as distributed (Wang et al. 2018), and the submission to gluebenchmark.com.

Source: columns from the files themselves; order of the labels from zihangdai/xlnet run_classifier.py.
"""

from __future__ import annotations

import dataclasses
import zipfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from finetune.config import TaskDataConfig
from finetune.data.examples import Example, Prediction
from finetune.data.hub_datasets import HubColumns, split_path
from finetune.data.row_errors import RowErrors
from finetune.data.sources import (
    TRAIN,
    Columns,
    TableSource,
    check_data_dir,
    files_by_split,
    find_folder,
    resolve_file,
    split_name,
)
from finetune.tasks.base import Task
from finetune.tasks.regression import RegressionTask
from finetune.tasks.sequence import ClassificationTask
from xlpre.common.errors import InputError
from xlpre.common.files import atomic_write, write_text
from xlpre.model.pooling import Pooling
from xlpre.text.hub import is_hf_dataset

NLI = ("contradiction", "entailment", "neutral")
ENTAILMENT = ("entailment", "not_entailment")
BINARY = ("0", "1")
PAIR = ("sentence1", "sentence2")
STS_B_BOUNDS = (0.0, 5.0)  # smallest and largest similarity


@dataclass(frozen=True)
class GlueLayout:
    """Files of a GLUE task as distributed, and its Hub dataset.

    Attributes:
        folder: name of the folder with the files.
        columns: columns of the files.
        metrics: official metrics; the first one selects the best weights.
        dev: files to evaluate on.
        test: maps files to predict to their names in a submission.
        hub_config: configuration of the Hub dataset nyu-mll/glue. Its splits are named like the files, with `validation` for `dev`.
    """

    folder: str
    columns: Columns
    metrics: tuple[str, ...] = ("accuracy",)
    dev: tuple[str, ...] = ("dev.tsv",)
    test: Mapping[str, str] = field(default_factory=dict)
    hub_config: str = ""


def _layout(
    folder: str,
    texts: tuple[str, ...],
    label: str,
    label_names: tuple[str, ...],
    *metrics: str,
    hub_texts: tuple[str, ...] = (),
    **column_options: Any,
) -> GlueLayout:
    """Return the layout of a task with one dev and one test file.

    Args:
        folder: see GlueLayout.
        texts: see Columns.
        label: see Columns.
        label_names: see Columns.
        metrics: see GlueLayout; accuracy by default.
        hub_texts: names of the text columns in the Hub dataset, if they differ from `texts`.
        column_options: other fields of Columns.
    """
    hub = HubColumns({**dict(zip(hub_texts, texts, strict=False)), "label": label, "idx": "index"}, label_names)
    columns = Columns(texts, label, label_names, hub=hub, **column_options)
    hub_config = folder.replace("-", "").lower()
    return GlueLayout(
        folder, columns, metrics or ("accuracy",), test={"test.tsv": f"{folder}.tsv"}, hub_config=hub_config
    )


# AX may be in one of two folders: the script that downloads GLUE names it `diagnostic`
DIAGNOSTIC = {"../AX/diagnostic.tsv": "AX.tsv", "../diagnostic/diagnostic.tsv": "AX.tsv"}
NLI_HUB = HubColumns(
    {"premise": "sentence1", "hypothesis": "sentence2", "label": "gold_label", "idx": "index"},
    ("entailment", "neutral", "contradiction"),
)
MNLI = GlueLayout(
    "MNLI",
    Columns(PAIR, "gold_label", NLI, hub=NLI_HUB),
    dev=("dev_matched.tsv", "dev_mismatched.tsv"),
    test={"test_matched.tsv": "MNLI-m.tsv", "test_mismatched.tsv": "MNLI-mm.tsv", **DIAGNOSTIC},
    hub_config="mnli",
)
FULL_DIAGNOSTIC = {"Premise": "sentence1", "Hypothesis": "sentence2", "Label": "gold_label"}
GLUE_LAYOUTS = {
    "glue/cola": _layout(
        "CoLA", ("sentence",), "label", BINARY, "matthews", names=("source", "label", "star", "sentence")
    ),
    "glue/sst-2": _layout("SST-2", ("sentence",), "label", BINARY),
    "glue/mrpc": dataclasses.replace(
        _layout("MRPC", ("#1 String", "#2 String"), "Quality", BINARY, "accuracy", "f1", hub_texts=PAIR),
        test={"test.tsv": "MRPC.tsv", "msr_paraphrase_test.txt": "MRPC.tsv"},  # the second is the original file
    ),
    "glue/qqp": _layout("QQP", ("question1", "question2"), "is_duplicate", BINARY, "accuracy", "f1", is_damaged=True),
    "glue/sts-b": _layout("STS-B", PAIR, "score", (), "pearson", "spearman"),
    "glue/mnli": MNLI,
    "glue/qnli": _layout("QNLI", ("question", "sentence"), "label", ENTAILMENT),
    "glue/rte": _layout("RTE", PAIR, "label", ENTAILMENT),
    "glue/wnli": _layout("WNLI", PAIR, "label", BINARY),
    "glue/ax": dataclasses.replace(  # the training examples are those of MNLI
        MNLI,
        columns=dataclasses.replace(MNLI.columns, aliases=FULL_DIAGNOSTIC),
        metrics=("matthews", "accuracy"),
        dev=("dev_matched.tsv",),
        test=DIAGNOSTIC,
    ),
}
SUBMISSION_ROWS = {  # number of predictions in each file of a submission
    "AX.tsv": 1104,
    "CoLA.tsv": 1063,
    "MNLI-m.tsv": 9796,
    "MNLI-mm.tsv": 9847,
    "MRPC.tsv": 1725,
    "QNLI.tsv": 5463,
    "QQP.tsv": 390965,
    "RTE.tsv": 3000,
    "SST-2.tsv": 1821,
    "STS-B.tsv": 1379,
    "WNLI.tsv": 146,
}


class GlueSource(TableSource):
    """Examples from the files of a GLUE task, or from the Hub dataset nyu-mll/glue (or a copy of it) if `data.dir` is hf:NAME.

    Args:
        name: key of GLUE_LAYOUTS.
        data: settings. `train`, `dev` and `test` replace the files of the layout.
    """

    def __init__(self, name: str, data: TaskDataConfig) -> None:
        layout = GLUE_LAYOUTS[name]
        self._name, is_hub = name, is_hf_dataset(data.root)
        folder = Path() if is_hub else find_folder(data, layout.folder)
        test_files: dict[str, str] = {}  # maps names in a submission to files; AX has two possible files
        for file, submitted in layout.test.items():
            if is_hub or (folder / file).exists():
                test_files.setdefault(submitted, file)
        self._submission_names = {split_name(file): submitted for file, submitted in layout.test.items()}
        train = [resolve_file(folder, file) for file in data.train or ["train.tsv"]]
        dev = files_by_split(folder, data.dev or layout.dev)
        test = files_by_split(folder, data.test or list(test_files.values()), dev)
        if is_hub:
            train = train if data.train else [split_path(data.root, TRAIN, layout.hub_config)]
            dev = dev if data.dev else {split: _hub_split(data.root, layout, split) for split in dev}
            test = test if data.test else {split: _hub_split(data.root, layout, split) for split in test}
        super().__init__(layout.columns, train, dev, test, data)

    def read_split(self, split: str) -> list[Example]:
        """Read the examples of a split. Check that indices are unique and similarities are within their bounds."""
        check_data_dir(self._data, self._name, f"{GLUE_LAYOUTS[self._name].folder}/train.tsv")
        examples = super().read_split(split)
        if split in self._submission_names:
            index, count = Counter(example.id for example in examples).most_common(1)[0]
            if count > 1:
                raise InputError(
                    f"{self._files[split]}: {count} rows have the index {index}, but a submission needs it once. Remove the other rows."
                )
        if not self.columns.label_names:
            low, high = STS_B_BOUNDS
            errors = RowErrors()
            for example in examples:
                if example.label is not None and not low <= example.label <= high:
                    problem = (
                        f"score {example.label:g} is invalid: it must be between {low:g} and {high:g}. Correct it."
                    )
                    errors.add(example.location, problem)
            errors.raise_if_any()
        return examples

    def write_submission(self, folder: Path, predictions: Mapping[str, list[Prediction]]) -> list[Path]:
        """Write a table with the columns `index` and `prediction` for each test file, and submission.zip with all tables."""
        paths = []
        for split in self.test_splits:
            path = folder / self._submission_names.get(split, f"{split}.tsv")
            rows = (f"{prediction['id']}\t{prediction['prediction']}\n" for prediction in predictions[split])
            write_text(path, "".join(["index\tprediction\n", *rows]))
            paths.append(path)
        if paths:
            zip_files(paths, folder / "submission.zip")
            paths.append(folder / "submission.zip")
        return paths


def build_glue(name: str, data: TaskDataConfig, pooling: Pooling) -> Task:
    """Build a task of GLUE_LAYOUTS."""
    source, layout = GlueSource(name, data), GLUE_LAYOUTS[name]
    if layout.columns.label_names:
        return ClassificationTask(name, source, data, pooling, layout.metrics, label_names=layout.columns.label_names)
    return RegressionTask(name, source, data, pooling, layout.metrics, bounds=STS_B_BOUNDS)


def zip_files(files: list[Path], path: Path) -> None:
    """Write a zip file of `files`, without their folders."""
    with atomic_write(path) as partial, zipfile.ZipFile(partial, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in sorted(files, key=lambda file: file.name):
            archive.write(file, file.name)


def _hub_split(dataset: str, layout: GlueLayout, split: str) -> Path:
    """Return the path of a split in the Hub dataset."""
    return split_path(dataset, "test", "ax") if split == "diagnostic" else split_path(dataset, split, layout.hub_config)
