import itertools

import numpy as np
import pytest

from finetune.metrics.classification import (
    accuracy,
    calibration,
    chance_threshold,
    confusion,
    f1,
    matthews,
    pearson,
    spearman,
)


def of(*counts):
    """Truth and answers with so many true positives, false negatives, false positives, true negatives."""
    pairs = [(1, 1)] * counts[0] + [(1, 0)] * counts[1] + [(0, 1)] * counts[2] + [(0, 0)] * counts[3]
    return tuple(np.array(pairs).T)


def test_f1_and_accuracy_by_hand():
    truth, answers = of(6, 2, 1, 3)
    assert accuracy(truth, answers) == 9 / 12
    assert f1(truth, answers) == pytest.approx(2 * (6 / 7) * (6 / 8) / (6 / 7 + 6 / 8))


def test_matthews_of_two_classes_is_the_formula_of_four_counts():
    tp, fn, fp, tn = 6, 2, 1, 3
    expected = (tp * tn - fp * fn) / np.sqrt((tp + fp) * (tp + fn) * (tn + fp) * (tn + fn))
    assert matthews(*of(tp, fn, fp, tn)) == pytest.approx(expected)


def test_matthews_of_many_classes_is_the_correlation_of_their_indicators():
    rng = np.random.default_rng(0)
    truth, answers = rng.integers(0, 4, (2, 200))
    answers[:80] = truth[:80]
    x, y = (np.eye(4)[which] - np.eye(4)[which].mean(0) for which in (truth, answers))
    assert matthews(truth, answers) == pytest.approx((x * y).sum() / np.sqrt((x * x).sum() * (y * y).sum()))


def test_correlations():
    rng = np.random.default_rng(0)
    x = rng.normal(size=50)
    y = x + rng.normal(size=50)
    assert pearson(x, y) == pytest.approx(np.corrcoef(x, y)[0, 1])
    assert spearman(x, np.exp(x)) == pytest.approx(1)
    # with ties: 1 - 6 sum d^2 / n(n^2 - 1) does not hold, the correlation of mean ranks does
    assert spearman(np.array([1.0, 2, 2, 3]), np.array([5.0, 1, 2, 9])) == pytest.approx(
        np.corrcoef([1, 2.5, 2.5, 4], [3, 1, 2, 4])[0, 1]
    )


def test_correlation_of_large_numbers_in_32_bits_loses_no_digits():
    x, y = np.random.default_rng(0).normal(size=(2, 2000)) + 2000
    x, y = x.astype(np.float32), y.astype(np.float32)
    assert pearson(x, y) == pytest.approx(np.corrcoef(x.astype(float), y.astype(float))[0, 1], abs=1e-12)


@pytest.mark.parametrize("score", [f1, matthews, pearson, spearman])
def test_answers_that_are_all_the_same_score_nothing(score):
    assert score(np.array([0, 1, 0, 1]), np.zeros(4, int)) == 0


@pytest.mark.parametrize("n", [1, 10, 37, 64, 1500])
def test_of_numbers_that_are_all_the_same_nothing_correlates(n):
    for truth, answers in itertools.product((0.1, 0.3, 2.4, 1e6 + 0.1), (0.1, 0.3, 1 / 3)):
        assert pearson(np.full(n, truth), np.full(n, answers)) == 0  # though their means are rounded
        assert spearman(np.full(n, truth), np.full(n, answers)) == 0


def test_confusion_counts_pairs():
    truth, answers = np.array([0, 0, 1, 2]), np.array([0, 2, 1, 1])
    assert confusion(truth, answers).tolist() == [[1, 0, 1], [0, 1, 0], [0, 1, 0]]
    assert confusion(truth, answers, 4).shape == (4, 4)


def test_calibration_error_is_the_mean_distance_of_confidence_and_truth():
    right = np.array([True, True, False, False])
    confidence = np.array([0.95, 0.91, 0.93, 0.55])
    sure, correct, count, error = calibration(right, confidence)
    assert count.tolist() == [0, 0, 0, 0, 0, 1, 0, 0, 0, 3]
    assert sure[9] == pytest.approx(0.93) and correct[9] == pytest.approx(2 / 3) and np.isnan(sure[0])
    assert error == pytest.approx((3 * abs(0.93 - 2 / 3) + 0.55) / 4)
    assert calibration(np.array([True]), np.array([1.0]))[3] == 0  # the last bin holds 1


def test_few_answers_by_lot_exceed_the_level_of_chance():
    rng = np.random.default_rng(0)
    truth = (rng.random(300) < 0.6).astype(int)
    level = chance_threshold("accuracy", truth)
    assert accuracy(truth, np.ones(300, int)) < level < 0.7
    drawn = [matthews(truth, rng.integers(0, 2, 300)) for _ in itertools.repeat(None, 400)]
    assert np.mean(np.array(drawn) > chance_threshold("matthews", truth)) < 0.05
