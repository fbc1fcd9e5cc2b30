"""Statistics of paired differences between two groups of runs: bootstrap intervals and the smallest detectable difference."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist

import numpy as np

CONFIDENCE = 0.95
POWER = 0.8  # probability to detect the smallest detectable difference
N_RESAMPLES = 10_000
NORMAL_QUANTILE = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)


@dataclass(frozen=True)
class Difference:
    """Mean difference from the base over the seeds that both have.

    Attributes:
        n_pairs: number of these seeds.
        mean: mean of the differences.
        low: lower end of the confidence interval; nan with one pair.
        high: upper end of the confidence interval; nan with one pair.
        detectable: smallest true difference whose interval excludes 0 with a probability of POWER; nan with one pair.
        of_finetuning: True if the seeds are those of the fine-tuning of one pretrained model.
    """

    n_pairs: int
    mean: float
    low: float
    high: float
    detectable: float
    of_finetuning: bool = False

    def to_json(self) -> dict[str, float | int | None]:
        """Return the fields as JSON values; None for nan and infinite values."""
        return {name: value if math.isfinite(value) else None for name, value in dataclasses.asdict(self).items()}

    @property
    def has_interval(self) -> bool:
        """True if there are at least two pairs, and all values are finite."""
        return math.isfinite(self.low) and math.isfinite(self.high)

    @property
    def is_noise(self) -> bool:
        """True if the interval contains 0."""
        return self.has_interval and self.low <= 0 <= self.high


def paired_difference(values: Mapping[int, float], base: Mapping[int, float]) -> Difference | None:
    """Compare values with those of the base by seed; None if they have no seed in common."""
    pairs = [values[seed] - base[seed] for seed in values if seed in base]
    if not pairs:
        return None
    mean = float(np.mean(pairs))
    if len(pairs) == 1 or not math.isfinite(mean):
        return Difference(len(pairs), mean, math.nan, math.nan, math.nan)
    return Difference(len(pairs), mean, *bootstrap_interval(pairs), smallest_detectable(pairs))


def bootstrap_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return a confidence interval of the mean of at least two values.

    For two values, it is the interval of the t-test. For more, it is the percentile bootstrap interval, whose distances to the mean are
    multiplied by t * sqrt(n / (n - 1)) / z. For normal values, this corrects the too small spread of resamples of few values (t and z are
    quantiles of Student's t and the normal distribution).

    Source: Hesterberg, What Teachers Should Know About the Bootstrap, 2015, section 5.3, which corrects the percentiles instead of the
    distances. With 3 values, corrected percentiles are still the smallest and the largest value.
    """
    array, n = np.asarray(values, float), len(values)
    if n == 2:  # resamples have three different means only
        half = t_quantile((1 + CONFIDENCE) / 2, 1) * array.std(ddof=1) / math.sqrt(n)
        return float(array.mean() - half), float(array.mean() + half)
    rng = np.random.default_rng(0)
    means = array[rng.integers(n, size=(N_RESAMPLES, n))].mean(1)
    tail = (1 - CONFIDENCE) / 2
    widening = t_quantile(1 - tail, n - 1) * math.sqrt(n / (n - 1)) / NORMAL_QUANTILE
    low, high = array.mean() + widening * (np.quantile(means, [tail, 1 - tail]) - array.mean())
    return float(low), float(high)


def smallest_detectable(values: Sequence[float]) -> float:
    """Return the smallest true mean that a paired t-test of as many values with the same spread detects with a probability of POWER.

    Approximation with quantiles of Student's t distribution: (t of (1 + CONFIDENCE) / 2, plus t of POWER) standard errors. With two or
    three values, `bootstrap_interval` finds it a little less often.
    """
    n = len(values)
    quantiles = t_quantile((1 + CONFIDENCE) / 2, n - 1) + t_quantile(POWER, n - 1)
    return float(quantiles * np.std(values, ddof=1) / math.sqrt(n))


@cache
def t_quantile(p: float, df: int) -> float:
    """Return the quantile `p` of Student's t distribution with `df` degrees of freedom.

    With t = sqrt(df) * tan(a), the angle a has a density proportional to cos(a)^(df - 1), which is integrated numerically.
    """
    angles = np.linspace(-math.pi / 2, math.pi / 2, 100_001)
    density = np.cos(angles).clip(0) ** (df - 1)
    cumulative = np.concatenate([[0.0], np.cumsum(density[1:] + density[:-1])])
    return float(math.sqrt(df) * math.tan(np.interp(p, cumulative / cumulative[-1], angles)))
