"""Chance thresholds: values that a metric must exceed to show that a model has learned anything."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from finetune.metrics.classification import METRICS
from finetune.metrics.ranking import dcg


def chance_threshold(metric: str, labels: np.ndarray) -> float:
    """Return the metric of the best constant prediction plus two standard errors. About 1 of 40 random predictors exceeds it.

    For correlations, return 2 / sqrt(N). For accuracy and F1, the standard error is that of a fraction of N examples.

    Args:
        metric: key of METRICS.
        labels: (N,) labels.
    """
    if metric in ("matthews", "pearson", "spearman"):
        return min(2 / float(np.sqrt(len(labels))), 1.0)
    p = max(METRICS[metric](labels, np.full_like(labels, label)) for label in np.unique(labels))
    return float(min(p + 2 * np.sqrt(p * (1 - p) / len(labels)), 1.0))


def expected_random_ndcg(grades: Sequence[int], judged_grades: Sequence[int], k: int) -> tuple[float, float]:
    """Return mean and variance of `ndcg` over all orders of the documents of a query.

    DCG is a sum over ranks of grade times rank weight. Its mean and variance over all orders are known in closed form.

    Args:
        grades: grades of the documents, in any order.
        judged_grades: grades of all documents that were judged for the query.
        k: number of top documents that count.

    Source: Hoeffding 1951.
    """
    n, ideal = len(grades), dcg(sorted(judged_grades, reverse=True), k)
    if not ideal:
        return 0.0, 0.0
    weights = np.zeros(n)
    weights[:k] = 1 / np.log2(np.arange(min(n, k)) + 2)
    mean, variance = np.mean(grades) * weights.sum(), np.var(grades) * weights.var() * n**2 / max(n - 1, 1)
    return float(mean / ideal), float(variance / ideal**2)
