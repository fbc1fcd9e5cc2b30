"""Official corpora of text classification: IMDB's folders, and the CSV files of Zhang, Zhao and LeCun (2015); or the
datasets of the same content, where `data.dir` is hf: and a name.

None has examples to measure on: a part of the training examples is held out (`data.val_fraction`), and the test examples, whose labels are
there, are measured once, at the end.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune.config import TaskDataConfig
from finetune.data.examples import Example
from finetune.data.hub_datasets import HubColumns, split_path
from finetune.data.sources import HELD_OUT, TRAIN, Columns, TableSource, check_folder, find_folder, part_of
from finetune.data.table_reader import Fields, text_of
from finetune.tasks.base import Task
from finetune.tasks.sequence import ClassificationTask
from xlpre.model.pooling import Summary
from xlpre.text.hub import is_dataset


@dataclass(frozen=True)
class Corpus:
    """How a corpus of CSV files is distributed: no line of names, the class from 1 on first, then the texts."""

    folder: str
    n_classes: int
    texts: tuple[str, ...]
    names: tuple[str, ...] = ()  # of the classes, where they have any
    escapes: tuple[tuple[str, str], ...] = ()  # what is written in its texts, and what is meant, in turn


IN_REVIEWS = (("\\n", "\n"), ('\\"', '"'))
IN_NEWS = (("\\$", "$"), ("\\", " "))  # a backslash is the end of a line
CORPORA = {
    "yelp-2": Corpus("yelp_review_polarity_csv", 2, ("text",), escapes=IN_REVIEWS),
    "yelp-5": Corpus("yelp_review_full_csv", 5, ("text",), escapes=IN_REVIEWS),
    "ag-news": Corpus(
        "ag_news_csv", 4, ("title", "description"), ("World", "Sports", "Business", "Sci/Tech"), escapes=IN_NEWS
    ),
    "dbpedia": Corpus("dbpedia_csv", 14, ("title", "content")),
    "amazon-2": Corpus("amazon_review_polarity_csv", 2, ("title", "text"), escapes=IN_REVIEWS),
    "amazon-5": Corpus("amazon_review_full_csv", 5, ("title", "text"), escapes=IN_REVIEWS),
}
SENTIMENTS = ("neg", "pos")


class CorpusSource(TableSource):
    """train.csv and test.csv of a corpus; its texts are read one after another, as one."""

    tests_are_labelled = True

    def __init__(self, name: str, data: TaskDataConfig) -> None:
        corpus = CORPORA[name]
        self._name, self._corpus, folder = name, corpus, find_folder(data, corpus.folder)
        names = ("label", *corpus.texts)
        labels = [str(number + 1) for number in range(corpus.n_classes)]
        dataset = HubColumns(dict.fromkeys(("text", "content"), corpus.texts[-1]), labels)
        columns = Columns(corpus.texts, "label", labels, names, dataset=dataset)
        super().__init__(columns, *_parts(data, folder / "train.csv", folder / "test.csv"), data)

    def read_split(self, split: str) -> list[Example]:
        """See TableSource."""
        check_folder(self._data, self._name, f"{self._corpus.folder}/train.csv")
        return super().read_split(split)

    def _texts(self, fields: Fields, place: str, may_be_empty: bool) -> tuple[str, ...]:
        """One text; a title may be empty, all of them only where nothing is known of them."""
        *titles, text = self._corpus.texts
        fields = {**dict.fromkeys(titles, ""), **fields}  # datasets have some title in the text
        found = [text_of(fields, name, place, may_be_empty=True) for name in (*titles, text)]
        if not (any(found) or may_be_empty):
            raise ValueError(f"{place}: all of {', '.join(self._corpus.texts)} are empty; remove the row")
        joined = " ".join(one for one in found if one)
        for written, meant in self._corpus.escapes:
            joined = joined.replace(written, meant)
        return (joined,)


class ImdbSource(TableSource):
    """aclImdb/{train,test}/{neg,pos}/*.txt, a review each."""

    def __init__(self, data: TaskDataConfig) -> None:
        self._folder = find_folder(data, "aclImdb")
        columns = Columns(("text",), "label", SENTIMENTS, dataset=HubColumns(labels=SENTIMENTS))
        super().__init__(columns, *_parts(data, self._folder / "train", self._folder / "test"), data)

    def _texts(self, fields: Fields, place: str, may_be_empty: bool) -> tuple[str, ...]:
        """The text, without marks of line ends."""
        return tuple(text.replace("<br />", " ") for text in super()._texts(fields, place, may_be_empty))

    def read_split(self, split: str) -> list[Example]:
        """See TableSource."""
        check_folder(self._data, "imdb", "aclImdb/train/pos")
        if is_dataset(self._data.root):
            return super().read_split(split)
        part = split if split in self.test_splits else TRAIN
        found = []
        for label in SENTIMENTS:
            files = sorted((self._folder / part / label).glob("*.txt"))
            if not files:
                raise ValueError(
                    f"{self._folder / part / label}: holds no .txt file; data.dir should hold aclImdb as distributed"
                )
            for path in files:
                fields = {"id": path.stem, "text": _review(path), "label": label}
                found.append(self.parse_example(fields, str(path), labelled=True))
        return (
            part_of(found, self._data.val_fraction, split, str(self._folder)) if split in (TRAIN, HELD_OUT) else found
        )


def _parts(data: TaskDataConfig, train: Path, test: Path) -> tuple[list[Path], dict[str, Path], dict[str, Path]]:
    """Training, dev and test files; of a dataset its splits."""
    if is_dataset(data.root):
        return [split_path(data.root, TRAIN)], {}, {"test": split_path(data.root, "test")}
    return [train], {}, {"test": test} if test.exists() else {}


def _review(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 ({error.reason} at byte {error.start})") from None


def build_corpus(name: str, data: TaskDataConfig, summary: Summary) -> Task:
    """`imdb`, or a corpus of `CORPORA`."""
    source: Any = ImdbSource(data) if name == "imdb" else CorpusSource(name, data)
    names = CORPORA[name].names if name in CORPORA else ()
    return ClassificationTask(name, source, data, summary, labels=names or source.columns.labels)
