"""Confidence intervals for ratios of sums, by bootstrap over prompts.

Tokens of one reply are not independent, prompts are: so a resample draws whole prompts, and a rate is always a sum over a sum
(never a mean of per-prompt rates, in which a short reply would weigh as much as a long one). A paired quantity (speed-up,
difference between two drafters) resamples the prompt with both of its measurements, so what a prompt adds to both cancels.

Intervals are BCa (Efron 1987, bias-corrected and accelerated): plain percentiles of a skewed ratio are too short at 48 prompts.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from eyas.errors import EyasError

Floats = NDArray[np.float64]
Statistic = Callable[[Floats], Floats]
"""Sums of the columns, shape [..., C], to the quantity, shape [...]; NaN where it is undefined."""


@dataclass(frozen=True)
class Interval:
    """A measured value with its confidence interval; ``low`` and ``high`` are None where the data cannot tell (one prompt)."""

    value: float | None
    low: float | None
    high: float | None
    count: int
    """Prompts behind it."""

    def excludes(self, value: float) -> bool:
        """True when the interval exists and ``value`` lies outside it."""
        return self.low is not None and self.high is not None and not self.low <= value <= self.high


def bootstrap(columns: Sequence[Sequence[float]], statistic: Statistic, resamples: int, seed: int, level: float = 0.95) -> Interval:
    """BCa interval of a statistic of column sums; every column has one entry per prompt, in the same order.

    Raises EyasError when the columns differ in length.
    """
    lengths = {len(column) for column in columns}
    if len(lengths) != 1:
        raise EyasError(f"paired measurements need the same prompts on both sides, got columns of {sorted(lengths)} prompts")
    table_NC = np.array(columns, dtype=np.float64).T
    count = len(table_NC)
    if not count:
        return Interval(None, None, None, 0)
    total_C = table_NC.sum(axis=0)
    value = float(statistic(total_C))
    if not np.isfinite(value):
        return Interval(None, None, None, count)
    if count == 1:
        return Interval(value, None, None, count)
    generator = np.random.default_rng(seed)
    weights_BN = generator.multinomial(count, np.full(count, 1 / count), size=resamples)
    drawn_B = statistic(weights_BN @ table_NC)
    drawn_B = drawn_B[np.isfinite(drawn_B)]
    left_out_N = statistic(total_C - table_NC)
    if not len(drawn_B) or not np.isfinite(left_out_N).all():
        return Interval(value, None, None, count)
    low, high = _bca(value, drawn_B, left_out_N, level)
    return Interval(value, low, high, count)


def _bca(value: float, drawn_B: Floats, left_out_N: Floats, level: float) -> tuple[float, float]:
    if np.ptp(drawn_B) == 0:
        return float(drawn_B[0]), float(drawn_B[0])
    normal = NormalDist()
    # Ties count half, as for a statistic that takes few values; kept off 0 and 1, where the bias would be infinite.
    below = (np.sum(drawn_B < value) + 0.5 * np.sum(drawn_B == value)) / len(drawn_B)
    bias = normal.inv_cdf(float(np.clip(below, 1 / (2 * len(drawn_B)), 1 - 1 / (2 * len(drawn_B)))))
    deviation_N = left_out_N.mean() - left_out_N
    square = float(np.sum(deviation_N**2))
    acceleration = float(np.sum(deviation_N**3)) / (6 * square**1.5) if square > 0 else 0.0
    ends = []
    for tail in ((1 - level) / 2, (1 + level) / 2):
        shifted = bias + normal.inv_cdf(tail)
        ends.append(normal.cdf(bias + shifted / (1 - acceleration * shifted)))
    low, high = np.quantile(drawn_B, ends)
    return float(low), float(high)


def ratio(numerator: Sequence[float], denominator: Sequence[float], resamples: int, seed: int) -> Interval:
    """Sum over sum, e.g. tokens per verify step or tokens per second."""
    return bootstrap([numerator, denominator], lambda sums: quotient(sums[..., 0], sums[..., 1]), resamples, seed)


def paired_difference(
    numerator: Sequence[float],
    denominator: Sequence[float],
    numerator_of: Sequence[float],
    denominator_of: Sequence[float],
    resamples: int,
    seed: int,
) -> Interval:
    """First ratio of sums minus the second, on the same prompts in the same order."""

    def difference(sums: Floats) -> Floats:
        return quotient(sums[..., 0], sums[..., 1]) - quotient(sums[..., 2], sums[..., 3])

    return bootstrap([numerator, denominator, numerator_of, denominator_of], difference, resamples, seed)


def paired_quotient(
    numerator: Sequence[float],
    denominator: Sequence[float],
    numerator_of: Sequence[float],
    denominator_of: Sequence[float],
    resamples: int,
    seed: int,
) -> Interval:
    """First ratio of sums over the second (a speed-up), on the same prompts in the same order."""

    def over(sums: Floats) -> Floats:
        return quotient(quotient(sums[..., 0], sums[..., 1]), quotient(sums[..., 2], sums[..., 3]))

    return bootstrap([numerator, denominator, numerator_of, denominator_of], over, resamples, seed)


def quotient(numerator: Floats, denominator: Floats) -> Floats:
    """Elementwise division, NaN where the denominator is 0."""
    numerator, denominator = np.asarray(numerator, dtype=np.float64), np.asarray(denominator, dtype=np.float64)
    return np.divide(numerator, denominator, out=np.full(np.broadcast(numerator, denominator).shape, np.nan), where=denominator != 0)
