"""Text classification corpora: IMDB, and the CSV corpora of Zhang, Zhao and LeCun (2015), from their files or from Hub datasets.

No dev split is distributed, so the fraction `data.val_fraction` of the training examples is held out. The test examples have labels;
the selected weights are evaluated on them once, at the end.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune.config import TaskDataConfig
from finetune.data.examples import Example
from finetune.data.hub_datasets import HubColumns, split_path
from finetune.data.sources import (
    HELD_OUT,
    TRAIN,
    Columns,
    TableSource,
    check_data_dir,
    find_folder,
    select_split,
)
from finetune.data.table_reader import Fields, get_text
from finetune.tasks.base import Task
from finetune.tasks.sequence import ClassificationTask
from xlpre.common.errors import InputError
from xlpre.model.pooling import Pooling
from xlpre.text.hub import is_hf_dataset


@dataclass(frozen=True)
class CsvCorpus:
    """Files of a corpus as distributed: CSV without a header line. The first column is the class, counted from 1.

    Attributes:
        folder: name of the folder with the files.
        n_classes: number of classes.
        texts: names of the text columns.
        label_names: names of the classes; empty if the classes are numbers.
        escapes: escape sequences in the texts and their replacements, applied in order.
    """

    folder: str
    n_classes: int
    texts: tuple[str, ...]
    label_names: tuple[str, ...] = ()
    escapes: tuple[tuple[str, str], ...] = ()


REVIEW_ESCAPES = (("\\n", "\n"), ('\\"', '"'))
NEWS_ESCAPES = (("\\$", "$"), ("\\", " "))  # a backslash stands for a line break
CSV_CORPORA = {
    "yelp-2": CsvCorpus("yelp_review_polarity_csv", 2, ("text",), escapes=REVIEW_ESCAPES),
    "yelp-5": CsvCorpus("yelp_review_full_csv", 5, ("text",), escapes=REVIEW_ESCAPES),
    "ag-news": CsvCorpus(
        "ag_news_csv", 4, ("title", "description"), ("World", "Sports", "Business", "Sci/Tech"), escapes=NEWS_ESCAPES
    ),
    "dbpedia": CsvCorpus("dbpedia_csv", 14, ("title", "content")),
    "amazon-2": CsvCorpus("amazon_review_polarity_csv", 2, ("title", "text"), escapes=REVIEW_ESCAPES),
    "amazon-5": CsvCorpus("amazon_review_full_csv", 5, ("title", "text"), escapes=REVIEW_ESCAPES),
}
SENTIMENTS = ("neg", "pos")


class CsvCorpusSource(TableSource):
    """Examples from train.csv and test.csv of a corpus. The text columns of a row are concatenated.

    Args:
        name: key of CSV_CORPORA.
        data: settings.
    """

    has_test_labels = True

    def __init__(self, name: str, data: TaskDataConfig) -> None:
        corpus = CSV_CORPORA[name]
        self._name, self._corpus, folder = name, corpus, find_folder(data, corpus.folder)
        names = ("label", *corpus.texts)
        classes = [str(index + 1) for index in range(corpus.n_classes)]
        hub = HubColumns(dict.fromkeys(("text", "content"), corpus.texts[-1]), classes)
        columns = Columns(corpus.texts, "label", classes, names, hub=hub)
        super().__init__(columns, *_split_paths(data, folder / "train.csv", folder / "test.csv"), data)

    def read_split(self, split: str) -> list[Example]:
        """Read the examples of a split."""
        check_data_dir(self._data, self._name, f"{self._corpus.folder}/train.csv")
        return super().read_split(split)

    def _texts(self, fields: Fields, location: str, allow_empty: bool) -> tuple[str, ...]:
        """Concatenate the text columns. At least one must contain text, unless `allow_empty` is set."""
        *titles, text = self._corpus.texts
        fields = {
            **dict.fromkeys(titles, ""),
            **fields,
        }  # some Hub datasets have no column for the title: it is in the text
        texts = [get_text(fields, column, location, allow_empty=True) for column in (*titles, text)]
        if not (any(texts) or allow_empty):
            raise InputError(f"{location}: the columns {', '.join(self._corpus.texts)} are empty. Remove the row.")
        joined = " ".join(text for text in texts if text)
        for escape, replacement in self._corpus.escapes:
            joined = joined.replace(escape, replacement)
        return (joined,)


class ImdbSource(TableSource):
    """Reviews in aclImdb/{train,test}/{neg,pos}/*.txt, one per file."""

    def __init__(self, data: TaskDataConfig) -> None:
        self._folder = find_folder(data, "aclImdb")
        columns = Columns(("text",), "label", SENTIMENTS, hub=HubColumns(label_names=SENTIMENTS))
        super().__init__(columns, *_split_paths(data, self._folder / "train", self._folder / "test"), data)

    def _texts(self, fields: Fields, location: str, allow_empty: bool) -> tuple[str, ...]:
        """Return the text without HTML line breaks."""
        return tuple(text.replace("<br />", " ") for text in super()._texts(fields, location, allow_empty))

    def read_split(self, split: str) -> list[Example]:
        """Read the reviews of a split."""
        check_data_dir(self._data, "imdb", "aclImdb/train/pos")
        if is_hf_dataset(self._data.root):
            return super().read_split(split)
        folder = self._folder / (split if split in self.test_splits else TRAIN)
        examples = []
        for label in SENTIMENTS:
            files = sorted((folder / label).glob("*.txt"))
            if not files:
                raise InputError(
                    f"{folder / label} contains no .txt file. Set data.dir to the aclImdb folder as distributed."
                )
            for path in files:
                fields = {"id": path.stem, "text": _read_review(path), "label": label}
                examples.append(self.parse_example(fields, str(path), labeled=True))
        if split in (TRAIN, HELD_OUT):
            return select_split(examples, self._data.val_fraction, split, str(self._folder))
        return examples


def build_corpus(name: str, data: TaskDataConfig, pooling: Pooling) -> Task:
    """Build `imdb`, or a task of CSV_CORPORA."""
    source: Any = ImdbSource(data) if name == "imdb" else CsvCorpusSource(name, data)
    label_names = CSV_CORPORA[name].label_names if name in CSV_CORPORA else ()
    return ClassificationTask(name, source, data, pooling, label_names=label_names or source.columns.label_names)


def _split_paths(data: TaskDataConfig, train: Path, test: Path) -> tuple[list[Path], dict[str, Path], dict[str, Path]]:
    """Return the training, dev and test files, or the paths of these splits in a Hub dataset."""
    if is_hf_dataset(data.root):
        return [split_path(data.root, TRAIN)], {}, {"test": split_path(data.root, "test")}
    return [train], {}, {"test": test} if test.exists() else {}


def _read_review(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{path}: not UTF-8 ({error.reason} at byte {error.start}). Convert the file to UTF-8."
        ) from None
