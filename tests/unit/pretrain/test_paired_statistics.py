"""Differences between rows of an ablation: intervals cover the true difference, and seeds are compared in pairs."""

import math

import numpy as np
import pytest

from pretrain.tools.paired_statistics import bootstrap_interval, paired_difference, smallest_detectable, t_quantile


@pytest.mark.parametrize(
    ("p", "df", "expected"),
    [
        (0.975, 1, 12.7062),
        (0.975, 2, 4.3027),
        (0.975, 4, 2.7764),
        (0.8, 9, 0.8834),
        (0.5, 3, 0.0),
    ],  # of a printed table
)
def test_quantiles_of_students_distribution(p, df, expected):
    assert t_quantile(p, df) == pytest.approx(expected, abs=2e-3)


@pytest.mark.parametrize("n", [2, 3, 5, 10])
def test_intervals_cover_the_true_mean_about_as_often_as_they_claim(n):
    rng, covered = np.random.default_rng(0), []
    for _ in range(300):
        low, high = bootstrap_interval(rng.normal(0.3, 1.0, n).tolist())
        covered.append(low <= 0.3 <= high)
    assert 0.9 <= np.mean(covered) <= 0.99


def test_a_difference_is_detected_as_often_as_the_smallest_detectable_one_claims():
    rng, n = np.random.default_rng(0), 5
    typical = np.median([smallest_detectable(rng.normal(0, 1, n).tolist()) for _ in range(300)])
    detected = [bootstrap_interval(rng.normal(typical, 1, n).tolist())[0] > 0 for _ in range(300)]
    assert 0.65 <= np.mean(detected) <= 0.95


def test_seeds_are_compared_in_pairs():
    base, row = {1: 5.0, 2: 6.0, 3: 7.0, 4: 1.0}, {3: 7.1, 1: 5.1, 2: 6.1, 9: 0.0}
    difference = paired_difference(row, base)
    assert difference.n_pairs == 3 and difference.mean == pytest.approx(0.1)
    assert [difference.low, difference.high] == pytest.approx([0.1, 0.1]) and not difference.is_noise
    assert paired_difference({1: 5.0, 2: 7.0}, {1: 6.0, 2: 6.0}).is_noise
    assert paired_difference({8: 5.0}, base) is None


def test_a_single_pair_or_an_infinite_loss_has_no_interval():
    single, infinite = paired_difference({1: 5.0}, {1: 4.0}), paired_difference({1: math.inf, 2: 1.0}, {1: 4.0, 2: 1.0})
    assert single.mean == 1 and not single.has_interval and not single.is_noise
    assert not infinite.has_interval
    assert single.to_json() == {
        "n_pairs": 1,
        "mean": 1.0,
        "low": None,
        "high": None,
        "detectable": None,
        "of_finetuning": False,
    }
