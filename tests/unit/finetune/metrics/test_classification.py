import itertools

import numpy as np
import pytest

from finetune.metrics.classification import accuracy, calibration, confusion_matrix, f1, matthews, pearson, spearman


def from_counts(true_positives, false_negatives, false_positives, true_negatives):
    """Return labels and predictions with these counts."""
    pairs = [(1, 1)] * true_positives + [(1, 0)] * false_negatives
    pairs += [(0, 1)] * false_positives + [(0, 0)] * true_negatives
    return tuple(np.array(pairs).T)


def test_f1_and_accuracy_equal_values_computed_by_hand():
    labels, predictions = from_counts(6, 2, 1, 3)
    assert accuracy(labels, predictions) == 9 / 12
    assert f1(labels, predictions) == pytest.approx(2 * (6 / 7) * (6 / 8) / (6 / 7 + 6 / 8))


def test_matthews_of_two_classes_is_the_formula_of_four_counts():
    tp, fn, fp, tn = 6, 2, 1, 3
    expected = (tp * tn - fp * fn) / np.sqrt((tp + fp) * (tp + fn) * (tn + fp) * (tn + fn))
    assert matthews(*from_counts(tp, fn, fp, tn)) == pytest.approx(expected)


def test_matthews_of_many_classes_is_the_correlation_of_their_indicators():
    rng = np.random.default_rng(0)
    labels, predictions = rng.integers(0, 4, (2, 200))
    predictions[:80] = labels[:80]
    x, y = (np.eye(4)[classes] - np.eye(4)[classes].mean(0) for classes in (labels, predictions))
    assert matthews(labels, predictions) == pytest.approx((x * y).sum() / np.sqrt((x * x).sum() * (y * y).sum()))


def test_correlations_equal_numpy_and_ties_share_their_mean_rank():
    rng = np.random.default_rng(0)
    x = rng.normal(size=50)
    y = x + rng.normal(size=50)
    assert pearson(x, y) == pytest.approx(np.corrcoef(x, y)[0, 1])
    assert spearman(x, np.exp(x)) == pytest.approx(1)
    # with ties, 1 - 6 sum d^2 / n(n^2 - 1) does not hold; the correlation of mean ranks does
    assert spearman(np.array([1.0, 2, 2, 3]), np.array([5.0, 1, 2, 9])) == pytest.approx(
        np.corrcoef([1, 2.5, 2.5, 4], [3, 1, 2, 4])[0, 1]
    )


def test_correlation_of_large_float32_numbers_loses_no_digits():
    x, y = np.random.default_rng(0).normal(size=(2, 2000)) + 2000
    x, y = x.astype(np.float32), y.astype(np.float32)
    assert pearson(x, y) == pytest.approx(np.corrcoef(x.astype(float), y.astype(float))[0, 1], abs=1e-12)


@pytest.mark.parametrize("metric", [f1, matthews, pearson, spearman])
def test_constant_predictions_score_0(metric):
    assert metric(np.array([0, 1, 0, 1]), np.zeros(4, int)) == 0


@pytest.mark.parametrize("n", [1, 10, 37, 64, 1500])
def test_constant_numbers_do_not_correlate(n):
    for label, prediction in itertools.product((0.1, 0.3, 2.4, 1e6 + 0.1), (0.1, 0.3, 1 / 3)):
        assert pearson(np.full(n, label), np.full(n, prediction)) == 0  # although their means are rounded
        assert spearman(np.full(n, label), np.full(n, prediction)) == 0


def test_a_confusion_matrix_counts_pairs():
    labels, predictions = np.array([0, 0, 1, 2]), np.array([0, 2, 1, 1])
    assert confusion_matrix(labels, predictions).tolist() == [[1, 0, 1], [0, 1, 0], [0, 1, 0]]
    assert confusion_matrix(labels, predictions, 4).shape == (4, 4)


def test_calibration_error_is_the_mean_distance_of_confidence_and_accuracy():
    is_correct = np.array([True, True, False, False])
    confidence = np.array([0.95, 0.91, 0.93, 0.55])
    mean_confidence, bin_accuracy, counts, error = calibration(is_correct, confidence)
    assert counts.tolist() == [0, 0, 0, 0, 0, 1, 0, 0, 0, 3]
    assert mean_confidence[9] == pytest.approx(0.93) and bin_accuracy[9] == pytest.approx(2 / 3)
    assert np.isnan(mean_confidence[0])
    assert error == pytest.approx((3 * abs(0.93 - 2 / 3) + 0.55) / 4)
    assert calibration(np.array([True]), np.array([1.0]))[3] == 0  # the last bin includes 1
