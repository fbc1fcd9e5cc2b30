"""The tasks of GLUE, from their files as distributed (Wang et al. 2018), and what is submitted to gluebenchmark.com.

Source of the columns: the files themselves; of the order of labels: zihangdai/xlnet run_classifier.py.
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
from finetune.data.examples import Prediction
from finetune.data.hub_datasets import HubColumns, split_path
from finetune.data.sources import TRAIN, Columns, TableSource, by_split, check_folder, file_in, find_folder, split_name
from finetune.tasks.base import Task
from finetune.tasks.regression import RegressionTask
from finetune.tasks.sequence import ClassificationTask
from xlpre.common.files import atomic_write, write_text
from xlpre.model.pooling import Summary
from xlpre.text.hub import is_dataset

NLI = ("contradiction", "entailment", "neutral")
ENTAILMENT = ("entailment", "not_entailment")
BINARY = ("0", "1")
PAIR = ("sentence1", "sentence2")
STS_B = (0.0, 5.0)  # the scale of its scores


@dataclass(frozen=True)
class Layout:
    """How a task is distributed.

    Attributes:
        folder: its name.
        columns: of its files.
        scores: the official ones; the first decides.
        dev: files to measure on.
        test: files to predict, and their names in a submission.
        config: its name in the dataset nyu-mll/glue, whose splits are called as the files are, but `validation` for `dev`.
    """

    folder: str
    columns: Columns
    scores: tuple[str, ...] = ("accuracy",)
    dev: tuple[str, ...] = ("dev.tsv",)
    test: Mapping[str, str] = field(default_factory=dict)
    config: str = ""


def _layout(
    folder: str,
    texts: tuple[str, ...],
    label: str,
    labels: tuple[str, ...],
    *scores: str,
    named: tuple[str, ...] = (),
    **more: Any,
) -> Layout:
    """Of a task whose texts are `named` otherwise in the dataset, if that is given."""
    dataset = HubColumns({**dict(zip(named, texts, strict=False)), "label": label, "idx": "index"}, labels)
    columns = Columns(texts, label, labels, dataset=dataset, **more)
    config = folder.replace("-", "").lower()
    return Layout(folder, columns, scores or ("accuracy",), test={"test.tsv": f"{folder}.tsv"}, config=config)


# the script that downloads GLUE calls its folder `diagnostic`
DIAGNOSTIC = {"../AX/diagnostic.tsv": "AX.tsv", "../diagnostic/diagnostic.tsv": "AX.tsv"}
NLI_DATASET = HubColumns(
    {"premise": "sentence1", "hypothesis": "sentence2", "label": "gold_label", "idx": "index"},
    ("entailment", "neutral", "contradiction"),
)
MNLI = Layout(
    "MNLI",
    Columns(PAIR, "gold_label", NLI, dataset=NLI_DATASET),
    dev=("dev_matched.tsv", "dev_mismatched.tsv"),
    test={"test_matched.tsv": "MNLI-m.tsv", "test_mismatched.tsv": "MNLI-mm.tsv", **DIAGNOSTIC},
    config="mnli",
)
FULL_DIAGNOSTIC = {"Premise": "sentence1", "Hypothesis": "sentence2", "Label": "gold_label"}
LAYOUTS = {
    "glue/cola": _layout(
        "CoLA", ("sentence",), "label", BINARY, "matthews", names=("source", "label", "star", "sentence")
    ),
    "glue/sst-2": _layout("SST-2", ("sentence",), "label", BINARY),
    "glue/mrpc": _layout("MRPC", ("#1 String", "#2 String"), "Quality", BINARY, "accuracy", "f1", named=PAIR),
    "glue/qqp": _layout("QQP", ("question1", "question2"), "is_duplicate", BINARY, "accuracy", "f1", damaged=True),
    "glue/sts-b": _layout("STS-B", PAIR, "score", (), "pearson", "spearman"),
    "glue/mnli": MNLI,
    "glue/qnli": _layout("QNLI", ("question", "sentence"), "label", ENTAILMENT),
    "glue/rte": _layout("RTE", PAIR, "label", ENTAILMENT),
    "glue/wnli": _layout("WNLI", PAIR, "label", BINARY),
    "glue/ax": dataclasses.replace(  # trained on MNLI
        MNLI,
        columns=dataclasses.replace(MNLI.columns, aliases=FULL_DIAGNOSTIC),
        scores=("matthews", "accuracy"),
        dev=("dev_matched.tsv",),
        test=DIAGNOSTIC,
    ),
}
N_ROWS = {  # of the test files, and so of a submission
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
    """The files of a task, or the splits of nyu-mll/glue, where `data.dir` is hf: and its name, or that of a copy.

    Args:
        name: of the task.
        data: the settings; its files win over those of the layout.
    """

    def __init__(self, name: str, data: TaskDataConfig) -> None:
        layout = LAYOUTS[name]
        self._name, by_name = name, is_dataset(data.root)
        folder = Path() if by_name else find_folder(data, layout.folder)
        there: dict[str, str] = {}  # by their name in a submission: one has two places
        for file, submitted in layout.test.items():
            if by_name or (folder / file).exists():
                there.setdefault(submitted, file)
        self._submitted = {split_name(file): submitted for file, submitted in layout.test.items()}
        train = [file_in(folder, file) for file in data.train or ["train.tsv"]]
        dev = by_split(folder, data.dev or layout.dev)
        test = by_split(folder, data.test or list(there.values()), dev)
        if by_name:
            train = train if data.train else [split_path(data.root, TRAIN, layout.config)]
            dev = dev if data.dev else {split: _named(data.root, layout, split) for split in dev}
            test = test if data.test else {split: _named(data.root, layout, split) for split in test}
        super().__init__(layout.columns, train, dev, test, data)

    def read_split(self, split: str) -> Any:
        """See TableSource."""
        check_folder(self._data, self._name, f"{LAYOUTS[self._name].folder}/train.tsv")
        found = super().read_split(split)
        if split in self._submitted:
            name, count = Counter(example.id for example in found).most_common(1)[0]
            if count > 1:
                raise ValueError(
                    f"{self._files[split]}: {count} rows have the index {name}; what is submitted needs each once"
                )
        if not self.columns.labels:
            low, high = STS_B
            for example in found:
                if example.label is not None and not low <= example.label <= high:
                    raise ValueError(
                        f"{example.location}: the score {example.label:g} is not between {low:g} and {high:g}"
                    )
        return found

    def write_submission(self, folder: Path, predictions: Mapping[str, list[Prediction]]) -> list[Path]:
        """A file of `index`, `prediction` for each test file, and all of them in submission.zip."""
        written = []
        for split in self.test_splits:
            path = folder / self._submitted.get(split, f"{split}.tsv")
            rows = (f"{one['id']}\t{one['prediction']}\n" for one in predictions[split])
            write_text(path, "".join(["index\tprediction\n", *rows]))
            written.append(path)
        if written:
            zip_files(written, folder / "submission.zip")
            written.append(folder / "submission.zip")
        return written


def _named(dataset: str, layout: Layout, split: str) -> Path:
    """A split of GLUE's in the dataset."""
    return split_path(dataset, "test", "ax") if split == "diagnostic" else split_path(dataset, split, layout.config)


def zip_files(files: list[Path], path: Path) -> None:
    """Write a zip of `files`, without their folders."""
    with atomic_write(path) as partial, zipfile.ZipFile(partial, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in sorted(files, key=lambda file: file.name):
            archive.write(file, file.name)


def build_glue(name: str, data: TaskDataConfig, summary: Summary) -> Task:
    """A task of `LAYOUTS`."""
    source, layout = GlueSource(name, data), LAYOUTS[name]
    if layout.columns.labels:
        return ClassificationTask(name, source, data, summary, layout.scores, labels=layout.columns.labels)
    return RegressionTask(name, source, data, summary, layout.scores, bounds=STS_B)
