import numpy as np
import pytest
from sklearn.metrics import ndcg_score

from finetune.metrics.ranking import expected_reciprocal_rank, ndcg, reciprocal_rank


def test_ndcg_equals_values_computed_by_hand():
    assert ndcg([1, 0, 2], [2, 1, 0], 20) == pytest.approx((1 + 2 / 2) / (2 + 1 / np.log2(3)))
    assert ndcg([1, 0, 2], [2, 1, 0], 2) == pytest.approx(1 / (2 + 1 / np.log2(3)))
    assert ndcg([2, 1], [2, 1, 1], 20) == pytest.approx((2 + 1 / np.log2(3)) / (2 + 1 / np.log2(3) + 1 / 2))
    assert ndcg([3, 2, 1, 0], [0, 1, 2, 3], 20) == 1 and ndcg([0], [0], 20) == 0


def test_reciprocal_rank_equals_values_computed_by_hand():
    assert [reciprocal_rank(grades) for grades in ([0, 0, 1], [2, 1], [0, 0])] == [1 / 3, 1.0, 0.0]


def test_expected_reciprocal_rank_equals_values_computed_by_hand():
    assert expected_reciprocal_rank([4], 20) == 15 / 16
    assert expected_reciprocal_rank([0, 1, 3], 20) == pytest.approx(1 / 16 / 2 + 15 / 16 * 7 / 16 / 3)
    assert expected_reciprocal_rank([0, 1, 3], 2) == 1 / 16 / 2
    assert expected_reciprocal_rank([7, 0], 20) == expected_reciprocal_rank([4], 20)  # a grade above 4 counts as 4


def test_ndcg_equals_scikit_learn():
    rng = np.random.default_rng(0)
    for _ in range(20):
        grades, scores = rng.integers(0, 4, 50), rng.random(50)
        result = ndcg(grades[np.argsort(-scores)].tolist(), grades.tolist(), 20)
        assert result == pytest.approx(ndcg_score([grades], [scores], k=20))
