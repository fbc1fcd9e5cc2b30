"""Metrics of predictions against labels: accuracy, F1, correlations and calibration. Higher is better, except for calibration.

A ratio with a denominator of 0, such as F1 without any positive, is 0.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

Metric = Callable[[np.ndarray, np.ndarray], float]
N_BINS = 10  # intervals of confidence, equally wide


def accuracy(labels: np.ndarray, predictions: np.ndarray) -> float:
    """Return the fraction of correct predictions."""
    return float((labels == predictions).mean())


def f1(labels: np.ndarray, predictions: np.ndarray) -> float:
    """Return the F1 score of class 1."""
    true_positives = float(((labels == 1) & (predictions == 1)).sum())
    return _ratio(2 * true_positives, float((labels == 1).sum() + (predictions == 1).sum()))


def matthews(labels: np.ndarray, predictions: np.ndarray) -> float:
    """Return Matthews' correlation coefficient for any number of classes.

    Source: Gorodkin 2004, R_K.
    """
    counts = confusion_matrix(labels, predictions).astype(float)
    n, n_correct = counts.sum(), np.trace(counts)
    label_counts, prediction_counts = counts.sum(1), counts.sum(0)
    covariance = n_correct * n - label_counts @ prediction_counts
    variances = (n**2 - label_counts @ label_counts) * (n**2 - prediction_counts @ prediction_counts)
    return _ratio(float(covariance), float(np.sqrt(variances)))


def pearson(labels: np.ndarray, predictions: np.ndarray) -> float:
    """Return Pearson's correlation, computed in float64."""
    if not (np.ptp(labels) and np.ptp(predictions)):  # for equal values, rounding errors would look correlated
        return 0.0
    x, y = (values - values.mean() for values in (labels.astype(float), predictions.astype(float)))
    return _ratio(float(x @ y), float(np.sqrt((x @ x) * (y @ y))))


def spearman(labels: np.ndarray, predictions: np.ndarray) -> float:
    """Return Spearman's rank correlation; ties share their mean rank."""
    return pearson(_mean_ranks(labels), _mean_ranks(predictions))


METRICS: dict[str, Metric] = {
    "accuracy": accuracy,
    "f1": f1,
    "matthews": matthews,
    "pearson": pearson,
    "spearman": spearman,
}


def confusion_matrix(labels: np.ndarray, predictions: np.ndarray, n_classes: int | None = None) -> np.ndarray:
    """Count predictions by class.

    Args:
        labels: (N,) class indices.
        predictions: (N,) class indices.
        n_classes: number of classes C. None: the largest index plus one.

    Returns:
        (C, C) int64; entry (i, j) is the number of examples of class i that were predicted as class j.
    """
    C = n_classes or int(max(labels.max(), predictions.max())) + 1
    return np.bincount(labels * C + predictions, minlength=C * C).reshape(C, C)


def calibration(is_correct: np.ndarray, confidence: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, float]:
    """Compare confidence and accuracy in N_BINS bins of confidence.

    Args:
        is_correct: (N,) bool.
        confidence: (N,) probability of each prediction.

    Returns:
        For each bin: the mean confidence (nan if the bin is empty), the accuracy (likewise), and the number of predictions. Then
        the expected calibration error: the mean over all predictions of the difference between confidence and accuracy in their bin.

    Source: Guo et al. 2017.
    """
    bins = np.minimum((confidence * N_BINS).astype(int), N_BINS - 1)
    counts = np.bincount(bins, minlength=N_BINS)
    with np.errstate(invalid="ignore"):
        mean_confidence = np.bincount(bins, confidence, N_BINS) / counts
        bin_accuracy = np.bincount(bins, is_correct, N_BINS) / counts
    error = float(np.nansum(np.abs(mean_confidence - bin_accuracy) * counts) / len(is_correct))
    return mean_confidence, bin_accuracy, counts, error


def _mean_ranks(values: np.ndarray) -> np.ndarray:
    _, group, count = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(count)
    return (last - (count - 1) / 2)[group]


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else 0.0
