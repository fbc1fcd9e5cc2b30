"""Metrics of a ranked list of documents: NDCG, expected reciprocal rank and reciprocal rank, as in TREC's tools.

`ranked_grades` are the relevance grades of a query's documents in predicted order, best first. A grade above 0 is relevant.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def ndcg(ranked_grades: Sequence[int], judged_grades: Sequence[int], k: int) -> float:
    """Return the normalized discounted cumulative gain of the first k documents. The gain is the grade, as in trec_eval.

    Args:
        ranked_grades: grades of the ranked documents.
        judged_grades: grades of all documents that were judged for the query, which give the ideal order.
        k: number of top documents that count.

    Source: Jarvelin and Kekalainen 2002.
    """
    ideal = dcg(sorted(judged_grades, reverse=True), k)
    return dcg(ranked_grades, k) / ideal if ideal else 0.0


def dcg(ranked_grades: Sequence[int], k: int) -> float:
    """Return the discounted cumulative gain of the first k documents."""
    return float(sum(grade / np.log2(index + 2) for index, grade in enumerate(ranked_grades[:k])))


def expected_reciprocal_rank(ranked_grades: Sequence[int], k: int) -> float:
    """Return the expectation of 1 / (rank of the document at which a reader stops), over the first k documents.

    The reader stops at a document of grade g with probability (2^g - 1) / 2^4, where grades above 4 count as 4, as in TREC's
    gdeval.

    Source: Chapelle et al. 2009.
    """
    total, p_reading = 0.0, 1.0
    for rank, grade in enumerate(ranked_grades[:k], 1):
        p_satisfied = (2 ** min(grade, 4) - 1) / 16
        total += p_reading * p_satisfied / rank
        p_reading *= 1 - p_satisfied
    return total


def reciprocal_rank(ranked_grades: Sequence[int]) -> float:
    """Return the reciprocal rank of the first relevant document, or 0 if there is none."""
    return next((1 / rank for rank, grade in enumerate(ranked_grades, 1) if grade > 0), 0.0)
