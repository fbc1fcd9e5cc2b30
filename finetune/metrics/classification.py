"""Scores of answers against the truth, as the tasks' official measures define them. All are better when higher.

Where a ratio has nothing below the line (one class predicted throughout, answers all alike) it counts as 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

Score = Callable[[np.ndarray, np.ndarray], float]
BINS = 10  # of confidence


def accuracy(truth: np.ndarray, answers: np.ndarray) -> float:
    """The share that is right."""
    return float((truth == answers).mean())


def f1(truth: np.ndarray, answers: np.ndarray) -> float:
    """Harmonic mean of precision and recall of class 1."""
    right = float(((truth == 1) & (answers == 1)).sum())
    return _ratio(2 * right, float((truth == 1).sum() + (answers == 1).sum()))


def matthews(truth: np.ndarray, answers: np.ndarray) -> float:
    """Matthews' correlation coefficient, of any number of classes (Gorodkin 2004, R_K)."""
    counts = confusion(truth, answers).astype(float)
    n, right = counts.sum(), np.trace(counts)
    of_truth, of_answers = counts.sum(1), counts.sum(0)
    above = right * n - of_truth @ of_answers
    return _ratio(float(above), float(np.sqrt((n**2 - of_truth @ of_truth) * (n**2 - of_answers @ of_answers))))


def pearson(truth: np.ndarray, answers: np.ndarray) -> float:
    """Correlation of the values, in float64."""
    if not (np.ptp(truth) and np.ptp(answers)):  # the mean of equal values is rounded, and the rest would correlate
        return 0.0
    x, y = (values - values.mean() for values in (truth.astype(float), answers.astype(float)))
    return _ratio(float(x @ y), float(np.sqrt((x @ x) * (y @ y))))


def spearman(truth: np.ndarray, answers: np.ndarray) -> float:
    """Correlation of the ranks; those that tie share the mean of theirs."""
    return pearson(_ranks(truth), _ranks(answers))


METRICS: dict[str, Score] = {
    "accuracy": accuracy,
    "f1": f1,
    "matthews": matthews,
    "pearson": pearson,
    "spearman": spearman,
}


def confusion(truth: np.ndarray, answers: np.ndarray, n_classes: int | None = None) -> np.ndarray:
    """(C, C) int64: how often class i was answered by j."""
    C = n_classes or int(max(truth.max(), answers.max())) + 1
    return np.bincount(truth * C + answers, minlength=C * C).reshape(C, C)


def calibration(right: np.ndarray, confidence: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, float]:
    """How often answers are right that the model is so sure of (Guo et al. 2017).

    Args:
        right: (N,) bool.
        confidence: (N,) the probability that each answer was given.

    Returns:
        Of each of the ten bins of confidence: mean confidence, share that is right (both nan where it is empty), and count;
        and the expected calibration error, the mean distance of the two.
    """
    of_bin = np.minimum((confidence * BINS).astype(int), BINS - 1)
    count = np.bincount(of_bin, minlength=BINS)
    with np.errstate(invalid="ignore"):
        sure = np.bincount(of_bin, confidence, BINS) / count
        correct = np.bincount(of_bin, right, BINS) / count
    return sure, correct, count, float(np.nansum(np.abs(sure - correct) * count) / len(right))


def ndcg(grades: Sequence[int], judged: Sequence[int], cut: int) -> float:
    """Normalised discounted cumulative gain (Jarvelin and Kekalainen 2002); gains are grades, as in trec_eval.

    Args:
        grades: of a query's documents in the order they are answered.
        judged: grades of all that were judged for it, which decide what is best.
        cut: documents that count.
    """
    return _ratio(_gain(grades, cut), _gain(sorted(judged, reverse=True), cut))


def expected_random_ndcg(grades: Sequence[int], judged: Sequence[int], cut: int) -> tuple[float, float]:
    """Mean and variance of `ndcg` over all orders of the documents.

    A gain is a sum of products, grade times weight of the place; mean and variance over all ways to pair them are known (Hoeffding 1951).
    """
    n, best = len(grades), _gain(sorted(judged, reverse=True), cut)
    if not best:
        return 0.0, 0.0
    weights = np.zeros(n)
    weights[:cut] = 1 / np.log2(np.arange(min(n, cut)) + 2)
    mean, variance = np.mean(grades) * weights.sum(), np.var(grades) * weights.var() * n**2 / max(n - 1, 1)
    return float(mean / best), float(variance / best**2)


def expected_reciprocal_rank(grades: Sequence[int], cut: int) -> float:
    """One over the place at which a reader stops, expected (Chapelle et al. 2009), as in TREC's gdeval: a document of grade g is enough
    with probability (2^g - 1) / 2^4, a grade above 4 counts as 4.

    Args:
        grades: of a query's documents in the order they are answered.
        cut: documents that count.
    """
    found, reading = 0.0, 1.0
    for place, grade in enumerate(grades[:cut], 1):
        enough = (2 ** min(grade, 4) - 1) / 16
        found += reading * enough / place
        reading *= 1 - enough
    return found


def reciprocal_rank(grades: Sequence[int]) -> float:
    """One over the place of the first document that is relevant; 0 if none is."""
    return next((1 / place for place, grade in enumerate(grades, 1) if grade > 0), 0.0)


def chance_threshold(score: str, truth: np.ndarray) -> float:
    """What a score must exceed to say that anything was learned.

    It is what the best answer that is always the same gets, and two standard errors, so that of forty answers drawn by lot one
    exceeds it. For correlations that is 0 and 2 / sqrt(N); f1 and accuracy are shares.
    """
    if score in ("matthews", "pearson", "spearman"):
        return 2 / np.sqrt(len(truth))
    constants = [METRICS[score](truth, np.full_like(truth, label)) for label in np.unique(truth)]
    p = max(constants)
    return float(min(p + 2 * np.sqrt(p * (1 - p) / len(truth)), 1.0))


def _ranks(values: np.ndarray) -> np.ndarray:
    _, group, count = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(count)
    return (last - (count - 1) / 2)[group]


def _gain(grades: Sequence[int], cut: int) -> float:
    return float(sum(grade / np.log2(place + 2) for place, grade in enumerate(grades[:cut])))


def _ratio(above: float, below: float) -> float:
    return above / below if below else 0.0
