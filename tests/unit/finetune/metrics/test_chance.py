import itertools

import numpy as np
import pytest

from finetune.metrics.chance import chance_threshold, expected_random_ndcg
from finetune.metrics.classification import accuracy, matthews
from finetune.metrics.ranking import ndcg


def test_few_random_predictions_exceed_the_chance_threshold():
    rng = np.random.default_rng(0)
    labels = (rng.random(300) < 0.6).astype(int)
    threshold = chance_threshold("accuracy", labels)
    assert accuracy(labels, np.ones(300, int)) < threshold < 0.7
    correlations = [matthews(labels, rng.integers(0, 2, 300)) for _ in range(400)]
    assert np.mean(np.array(correlations) > chance_threshold("matthews", labels)) < 0.05


@pytest.mark.parametrize(
    ("grades", "judged_grades", "k"),
    [([3, 0, 1, 0, 2], [3, 3, 2, 1], 3), ([0, 1], [1], 20), ([2], [2, 1], 20), ([0, 0], [0], 2)],
)
def test_expected_random_ndcg_is_that_of_all_orders(grades, judged_grades, k):
    values = [ndcg(order, judged_grades, k) for order in itertools.permutations(grades)]
    assert expected_random_ndcg(grades, judged_grades, k) == pytest.approx((np.mean(values), np.var(values)))
