"""Document ranking from TREC files: every candidate is read with its query and scored independently.

The XLNet paper reranks the 100 best documents of a first retrieval on ClueWeb09-B. It feeds frozen word embeddings to a
kernel-pooling network. Here the whole model is trained to classify single pairs as relevant or not (Nogueira and Cho 2019).
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
from finetune.data.long_text import require_truncation
from finetune.data.row_errors import RowErrors
from finetune.data.sources import TRAIN, files_by_split, resolve_file
from finetune.data.table_reader import Fields, get_text
from finetune.data.trec import Grades, read_candidates, read_qrels, read_texts, sort_documents, write_run
from finetune.metrics.chance import expected_random_ndcg
from finetune.metrics.ranking import expected_reciprocal_rank, ndcg, reciprocal_rank
from finetune.tasks.base import Task
from finetune.tasks.sequence import SequenceTask
from xlpre.common.errors import InputError
from xlpre.model.config import ModelConfig
from xlpre.model.pooling import Pooling
from xlpre.model.task_heads import RegressionHead

CUTOFF = 20  # number of top documents that count in NDCG and ERR (expected reciprocal rank)


class RankingSource:
    """Candidate documents of queries, from TREC run files.

    An example is a query and one document. Its label is the relevance grade, its `group` the query id, and its `id` the document id.

    Args:
        data: settings; `train`, `dev` and `test` are run files.
    """

    text_columns: tuple[str, ...] = ("query", "document")
    label_columns: tuple[str, ...] = ()

    def __init__(self, data: TaskDataConfig) -> None:
        self._data, folder = data, Path(data.root)
        dev = files_by_split(folder, data.dev or ())
        test = files_by_split(folder, data.test or (), dev)
        self.dev_splits, self.test_splits = tuple(dev), tuple(test)
        self._files = {**dev, **test}

    def data_settings(self) -> dict[str, Any]:
        """Return the settings needed to read a pair."""
        return {"max_seq_len": self._data.max_seq_len}

    @cached_property
    def grades(self) -> Grades:
        """Relevance grades of all files in `data.qrels`."""
        return read_qrels(self._paths("qrels"))

    def read_split(self, split: str) -> list[Example]:
        """Read the candidates of a split. If some documents of a query have been judged, its other documents have grade 0.

        Raises:
            InputError: a file or a setting is missing, or no training or dev candidate is relevant.
            InvalidRowsError: lines are invalid. The message names file and line.
        """
        if split == TRAIN:
            self._paths("dev")  # raises if it is not set: no dev split is distributed
        files = self._paths("train") if split == TRAIN else [self._files[split]]
        candidates = [candidate for file in files for candidate in read_candidates(file)]
        queries = read_texts(self._paths("queries"), {query for query, _, _ in candidates})
        documents = read_texts(self._paths("documents"), {document for _, document, _ in candidates})
        examples, errors = [], RowErrors()
        for query, document, location in candidates:
            problems = [
                f"id {text_id!r} is not in data.{key}. Add its text, or remove the line."
                for key, text_id, texts in (("queries", query, queries), ("documents", document, documents))
                if text_id not in texts
            ]
            if query not in self.grades and split not in self.test_splits:
                problems.append(f"query {query!r} has no judgment in data.qrels. Remove it from this file.")
            if problems:
                errors.add(location, problems[0])
                continue
            grade = self.grades[query].get(document, 0) if query in self.grades else None
            examples.append(Example(document, (queries[query], documents[document]), grade, location, query))
        errors.raise_if_any()
        if split not in self.test_splits and not any(example.label for example in examples):
            raise InputError(
                f"{files[0]}: no candidate has a grade above 0 in data.qrels. Check that both files use the same ids."
            )
        return examples

    def parse_example(self, fields: Fields, location: str, default_id: str = "") -> Example:
        """Build the example of a pair from the fields `query` and `document`."""
        texts = tuple(get_text(fields, column, location, allow_empty=True) for column in self.text_columns)
        return Example(str(default_id if fields.get("id") is None else fields["id"]), texts, None, location)

    def write_submission(self, folder: Path, predictions: Mapping[str, list[Prediction]]) -> list[Path]:
        """Write a run file for each split."""
        paths = []
        for split, scores in predictions.items():
            paths.append(folder / f"{split}.run")
            write_run(paths[-1], ((score["query"], score["id"], score["prediction"]) for score in scores))
        return paths

    def _paths(self, key: str) -> list[Path]:
        files = getattr(self._data, key)
        if not files:
            raise InputError(
                f"data.{key}={'null' if files is None else files} is invalid: task=rank needs it. Set data.{key}=[FILE]."
            )
        return [resolve_file(self._data.root, file) for file in files]


class RankingTask(SequenceTask):
    """Ranking of documents by a score, trained to classify pairs as relevant (grade above 0) or not. See SequenceTask."""

    head_kind = "regression"
    source: RankingSource

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        require_truncation(self.data, self.name)

    def build_head(self, config: ModelConfig) -> nn.Module:
        """Return a head that predicts one score."""
        return RegressionHead(config, self.pooling)

    def compute_losses(self, head: nn.Module, hidden: Tensor, batch: PaddedBatch) -> Tensor:
        """Return the binary cross-entropy of relevance, in nats."""
        logits = cast(RegressionHead, head)(hidden, batch.padding_mask).float()
        return F.binary_cross_entropy_with_logits(logits, batch.labels["label"], reduction="none")

    def compute_metrics(self, split: Split, outputs: Outputs) -> dict[str, float]:
        """Return NDCG, expected reciprocal rank and mean reciprocal rank, averaged over queries."""
        documents: dict[str, list[tuple[str, float]]] = {}
        for example, score in zip(split.examples, self.predict_values(outputs), strict=True):
            documents.setdefault(example.group, []).append((example.id, float(score)))
        metrics = []
        for query, scores in documents.items():
            judged = self.source.grades[query]
            grades = [judged.get(document, 0) for document, _ in sort_documents(scores)]
            metrics.append(
                (
                    ndcg(grades, list(judged.values()), CUTOFF),
                    expected_reciprocal_rank(grades, CUTOFF),
                    reciprocal_rank(grades),
                )
            )
        return dict(zip(self.metric_names, np.mean(metrics, 0).tolist(), strict=True))

    def chance_threshold(self, split: Split) -> float:
        """Return the expected NDCG of random orders plus two standard deviations of its mean over queries."""
        grades: dict[str, list[int]] = {}
        for example in split.examples:
            grades.setdefault(example.group, []).append(example.label)
        moments = [
            expected_random_ndcg(query_grades, [*self.source.grades[query].values()], CUTOFF)
            for query, query_grades in grades.items()
        ]
        means, variances = zip(*moments, strict=True)
        return min(float(np.mean(means) + 2 * np.sqrt(np.sum(variances)) / len(moments)), 1.0)

    def predict_values(self, outputs: Outputs) -> np.ndarray:
        """Return the scores (N,) float64, rounded as in the run files. See SequenceTask."""
        return outputs["logits"].astype(float).round(6)

    def to_predictions(self, split: Split, outputs: Outputs) -> list[Prediction]:
        """Return the score of each candidate; `id` is the id of the document."""
        return [
            {"id": example.id, **({"query": example.group} if example.group else {}), "prediction": float(score)}
            for example, score in zip(split.examples, self.predict_values(outputs), strict=True)
        ]

    def _labels(self, example: Example) -> dict[str, Any]:
        return {} if example.label is None else {"label": np.float32(example.label > 0)}


def build_ranking(name: str, data: TaskDataConfig, pooling: Pooling) -> Task:
    """Build `rank`. NDCG@20 selects the best weights; ERR@20 and MRR are reported."""
    return RankingTask(name, RankingSource(data), data, pooling, (f"ndcg@{CUTOFF}", f"err@{CUTOFF}", "mrr"))
