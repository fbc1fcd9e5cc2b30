"""What answers in words are worth: exact match, F1 of words, and the best threshold for giving none; by the rules of SQuAD's scorers.

Source: the rules of evaluate-v1.1.py and evaluate-v2.0.py (rajpurkar.github.io/SQuAD-explorer).
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence

import numpy as np

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_WITHOUT_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize_words(text: str) -> list[str]:
    """Words in lower case, without ASCII punctuation and articles."""
    return _ARTICLES.sub(" ", text.lower().translate(_WITHOUT_PUNCTUATION)).split()


def exact(answer: str, truth: str) -> float:
    """1 if the words are the same."""
    return float(normalize_words(answer) == normalize_words(truth))


def f1(answer: str, truth: str, empty_counts: bool) -> float:
    """Harmonic mean of precision and recall of words; with `empty_counts`, two without words agree (2.0), else they do not (1.1)."""
    found, wanted = normalize_words(answer), normalize_words(truth)
    if empty_counts and not (found and wanted):
        return float(found == wanted)
    common = sum((Counter(found) & Counter(wanted)).values())
    return 2 * common / (len(found) + len(wanted)) if common else 0.0


def score_prediction(answer: str, truths: Sequence[str], answerable: bool) -> tuple[float, float]:
    """Exact match and F1 with the truth that each fits best.

    Args:
        answer: empty: that there is none.
        truths: all that are right; none: there is no answer.
        answerable: every question has one (1.1). Else truths without words do not count.
    """
    if not answerable:
        truths = [truth for truth in truths if normalize_words(truth)] or [""]
    return max(exact(answer, truth) for truth in truths), max(f1(answer, truth, not answerable) for truth in truths)


def best_threshold(
    scores: np.ndarray, answered: np.ndarray, answerable: np.ndarray, odds: np.ndarray
) -> tuple[float, float]:
    """The best score if no answer is given where the odds that there is none are above a threshold, and that threshold.

    Args:
        scores: (N,) of the answers.
        answered: (N,) bool, whether they have any text.
        answerable: (N,) bool, whether there is an answer.
        odds: (N,) of there being none; in any unit that rises with them.

    Returns:
        The mean score, as the official scorer has it, who also cuts between questions of equal odds; and the best threshold: in the
        middle between the highest odds at which an answer is given and the next, so that rounding decides nothing (the official one is
        the former, and 0 where giving no answer at all is best, as its odds are probabilities).
    """
    order = np.argsort(odds, kind="stable")
    gains = np.where(answerable, scores, -answered.astype(float))[order]
    totals = np.concatenate([[0.0], np.cumsum(gains)]) + (~answerable).sum()
    rising = odds[order]
    between = np.concatenate([[True], np.diff(rising) > 0, [True]])  # a threshold cannot stand between equal odds
    best = int(np.where(between, totals, -np.inf).argmax())
    edges = np.concatenate([[rising[0] - 2], rising, [rising[-1] + 2]])
    return float(totals.max() / len(scores)), float(edges[best : best + 2].mean())
