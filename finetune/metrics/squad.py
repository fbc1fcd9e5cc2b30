"""SQuAD metrics: exact match, word F1, and the best threshold to predict "no answer".

Source: the rules of evaluate-v1.1.py and evaluate-v2.0.py (rajpurkar.github.io/SQuAD-explorer).
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence

import numpy as np

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_DELETE_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize_words(text: str) -> list[str]:
    """Return the words of a text in lower case, without ASCII punctuation and articles."""
    return _ARTICLES.sub(" ", text.lower().translate(_DELETE_PUNCTUATION)).split()


def exact_match(prediction: str, label: str) -> float:
    """Return 1 if both texts have the same words, otherwise 0."""
    return float(normalize_words(prediction) == normalize_words(label))


def f1(prediction: str, label: str, empty_matches: bool) -> float:
    """Return the F1 score of the words of a prediction.

    Args:
        prediction: predicted text.
        label: true text.
        empty_matches: True if two texts without words match, as in SQuAD 2.0. In SQuAD 1.1 they do not.
    """
    predicted, expected = normalize_words(prediction), normalize_words(label)
    if empty_matches and not (predicted and expected):
        return float(predicted == expected)
    n_common = sum((Counter(predicted) & Counter(expected)).values())
    return 2 * n_common / (len(predicted) + len(expected)) if n_common else 0.0


def score_prediction(prediction: str, labels: Sequence[str], always_answerable: bool) -> tuple[float, float]:
    """Return the exact match and the F1 score, each for its best matching label.

    Args:
        prediction: predicted text; empty for "no answer".
        labels: all true texts; empty if the question has no answer.
        always_answerable: True if every question has an answer (SQuAD 1.1). Otherwise labels without words are ignored.
    """
    if not always_answerable:
        labels = [label for label in labels if normalize_words(label)] or [""]
    return (
        max(exact_match(prediction, label) for label in labels),
        max(f1(prediction, label, not always_answerable) for label in labels),
    )


def best_null_threshold(
    scores: np.ndarray, is_predicted: np.ndarray, has_answer: np.ndarray, null_log_odds: np.ndarray
) -> tuple[float, float]:
    """Find the threshold with the best mean score, if "no answer" is predicted where `null_log_odds` exceed the threshold.

    Args:
        scores: (N,) score of each predicted text.
        is_predicted: (N,) bool, False if the predicted text is empty.
        has_answer: (N,) bool, False if the question has no answer.
        null_log_odds: (N,) log-odds that there is no answer.

    Returns:
        The best mean score, computed as in the official script, which may separate questions of equal log-odds.
        The best threshold that does not separate them. It is the midpoint between the highest log-odds of an answered question and
        the next higher log-odds, so that rounding does not matter. The official script returns the highest log-odds of an answered
        question instead, or 0 if no question is answered.
    """
    order = np.argsort(null_log_odds, kind="stable")
    gains = np.where(has_answer, scores, -is_predicted.astype(float))[order]
    totals = np.concatenate([[0.0], np.cumsum(gains)]) + (~has_answer).sum()
    ordered = null_log_odds[order]
    is_between = np.concatenate([[True], np.diff(ordered) > 0, [True]])  # no threshold separates equal log-odds
    best = int(np.where(is_between, totals, -np.inf).argmax())
    edges = np.concatenate([[ordered[0] - 2], ordered, [ordered[-1] + 2]])
    return float(totals.max() / len(scores)), float(edges[best : best + 2].mean())
