"""Documents by how well they answer a query, from TREC's files; each candidate is read with its query and scored by itself.

Published for XLNet on ClueWeb09-B: the 100 best documents of a first retrieval are put into a new order. The paper fed frozen word
embeddings to a kernel-pooling network; here the whole model is trained on single pairs, relevant or not (Nogueira and Cho 2019).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import numpy as np
from torch import Tensor, nn
from torch.nn import functional as F

from finetune.config import TaskDataConfig
from finetune.data.batching import PaddedBatch
from finetune.data.examples import Example, Outputs, Prediction, Split
from finetune.data.long_text import check_checksum
from finetune.data.sources import TRAIN, by_split, file_in
from finetune.data.table_reader import Fields, text_of
from finetune.metrics.classification import expected_random_ndcg, expected_reciprocal_rank, ndcg, reciprocal_rank
from finetune.tasks.base import Task
from finetune.tasks.sequence import SequenceTask
from finetune.tasks.trec import Grades, in_order, read_candidates, read_qrels, read_texts, write_run
from xlpre.model.config import ModelConfig
from xlpre.model.heads import RegressionHead
from xlpre.model.pooling import Summary

CUT = 20  # of NDCG and ERR


class RankingSource:
    """Candidates (runs), one example each, with the texts of query and document and the grade.

    Args:
        data: the settings: `train`, `dev`, `test` are runs.
    """

    text_columns: tuple[str, ...] = ("query", "document")

    def __init__(self, data: TaskDataConfig) -> None:
        self._data, folder = data, Path(data.root)
        dev = by_split(folder, data.dev or ())
        test = by_split(folder, data.test or (), dev)
        self.dev_splits, self.test_splits = tuple(dev), tuple(test)
        self._files = {**dev, **test}

    def data_settings(self) -> dict[str, Any]:
        """What reading a line needs."""
        return {"max_seq_len": self._data.max_seq_len}

    @cached_property
    def grades(self) -> Grades:
        """Of all that was judged."""
        return read_qrels(self._paths("qrels"))

    def read_split(self, split: str) -> list[Example]:
        """The candidates of a split; what was not judged, of a query that was, is not relevant.

        Raises:
            ValueError: what is wrong with a file, with file and line; no truth where it is needed.
        """
        if split == TRAIN:
            self._paths("dev")  # there is nothing official to measure on
        files = self._paths("train") if split == TRAIN else [self._files[split]]
        candidates = [one for file in files for one in read_candidates(file)]
        queries = read_texts(self._paths("queries"), {query for query, _, _ in candidates})
        documents = read_texts(self._paths("documents"), {document for _, document, _ in candidates})
        found = []
        for query, document, place in candidates:
            for kind, name, texts in (("queries", query, queries), ("documents", document, documents)):
                if name not in texts:
                    raise ValueError(f"{place}: {name!r} is in none of data.{kind}")
            if query not in self.grades and split not in self.test_splits:
                raise ValueError(f"{place}: data.qrels judges nothing for query {query!r}; remove it from this file")
            grade = self.grades[query].get(document, 0) if query in self.grades else None
            found.append(Example(document, (queries[query], documents[document]), grade, place, query))
        if split not in self.test_splits and not any(example.label for example in found):
            raise ValueError(
                f"{files[0]}: data.qrels grades none of its candidates above 0; see that both write ids alike"
            )
        return found

    def parse_example(self, fields: Fields, place: str) -> Example:
        """A pair from the fields `query` and `document` of a line."""
        texts = tuple(text_of(fields, name, place, may_be_empty=True) for name in self.text_columns)
        return Example(str(fields.get("id", place)), texts, None, place)

    def write_submission(self, folder: Path, predictions: Mapping[str, list[Prediction]]) -> list[Path]:
        """A run for each split."""
        written = []
        for split, answers in predictions.items():
            written.append(folder / f"{split}.run")
            write_run(written[-1], ((one["query"], one["id"], one["prediction"]) for one in answers))
        return written

    def _paths(self, key: str) -> list[Path]:
        files = getattr(self._data, key)
        if not files:
            raise ValueError(f"task=rank is read from data.{key}=[FILE], and there is none")
        return [file_in(self._data.root, file) for file in files]


class RankingTask(SequenceTask):
    """A score for each candidate, learned from whether it is relevant (graded above 0); see OneVectorTask."""

    head_kind = "regression"
    source: RankingSource

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        check_checksum(self.data, self.name)

    def build_head(self, shape: ModelConfig) -> nn.Module:
        """A new head."""
        return RegressionHead(shape, self.summary)

    def compute_losses(self, head: nn.Module, hidden: Tensor, part: PaddedBatch) -> Tensor:
        """Cross entropy of being relevant, in nats."""
        logits = cast(RegressionHead, head)(hidden, part.padding_mask).float()
        return F.binary_cross_entropy_with_logits(logits, part.labels["label"], reduction="none")

    def compute_metrics(self, split: Split, outputs: Outputs) -> dict[str, float]:
        """Means over queries."""
        return self._means(split, self.predict_values(outputs))

    def chance_threshold(self, split: Split) -> float:
        """The mean NDCG of orders drawn by lot, and two of their standard deviations."""
        candidates: dict[str, list[int]] = {}
        for example in split.examples:
            candidates.setdefault(example.group, []).append(example.label)
        by_lot = [
            expected_random_ndcg(grades, [*self.source.grades[query].values()], CUT)
            for query, grades in candidates.items()
        ]
        means, variances = zip(*by_lot, strict=True)
        return min(float(np.mean(means) + 2 * np.sqrt(np.sum(variances)) / len(by_lot)), 1.0)

    def predict_values(self, outputs: Outputs) -> np.ndarray:
        """(N,) scores, as they are written."""
        return outputs["logits"].astype(float).round(6)

    def to_predictions(self, split: Split, outputs: Outputs) -> list[Prediction]:
        """The score of each candidate; `id` is the document's."""
        return [
            {"id": example.id, "query": example.group, "prediction": float(score)}
            for example, score in zip(split.examples, self.predict_values(outputs), strict=True)
        ]

    def _answers(self, example: Example) -> dict[str, Any]:
        return {} if example.label is None else {"label": np.float32(example.label > 0)}

    def _means(self, split: Split, answers: np.ndarray) -> dict[str, float]:
        scored: dict[str, list[tuple[str, float]]] = {}
        for example, answer in zip(split.examples, answers, strict=True):
            scored.setdefault(example.group, []).append((example.id, float(answer)))
        found = []
        for query, documents in scored.items():
            judged = self.source.grades[query]
            grades = [judged.get(document, 0) for document, _ in in_order(documents)]
            gain = ndcg(grades, list(judged.values()), CUT)
            found.append((gain, expected_reciprocal_rank(grades, CUT), reciprocal_rank(grades)))
        return dict(zip(self.metric_names, np.mean(found, 0).tolist(), strict=True))


def build_ranking(name: str, data: TaskDataConfig, summary: Summary) -> Task:
    """`rank`: NDCG@20 decides; the expected and the mean reciprocal rank are told."""
    return RankingTask(name, RankingSource(data), data, summary, (f"ndcg@{CUT}", f"err@{CUT}", "mrr"))
