import numpy as np
import pytest
import scipy.stats

from eyas.errors import EyasError
from eyas.statistics import Interval, bootstrap, paired_difference, paired_quotient, ratio


def test_a_ratio_is_the_sum_over_the_sum_not_the_mean_of_ratios():
    assert ratio([1, 30], [1, 10], 200, 0).value == pytest.approx(31 / 11)


def test_the_interval_agrees_with_scipys_bca_bootstrap():
    generator = np.random.default_rng(1)
    tokens = generator.gamma(2, 20, 40)
    cycles = tokens / generator.uniform(1.2, 2.5, 40)
    ours = ratio(tokens, cycles, 20_000, 0)
    theirs = scipy.stats.bootstrap(
        (tokens, cycles), lambda n, d, axis: n.sum(axis) / d.sum(axis), paired=True, vectorized=True, n_resamples=20_000, rng=2
    ).confidence_interval
    width = theirs.high - theirs.low
    assert ours.low == pytest.approx(theirs.low, abs=0.03 * width)
    assert ours.high == pytest.approx(theirs.high, abs=0.03 * width)


def test_a_95_percent_interval_covers_the_truth_in_about_95_percent_of_experiments():
    generator = np.random.default_rng(5)
    covered = 0
    for experiment in range(400):
        cycles = generator.integers(20, 120, 48)
        rate = generator.normal(1.6, 0.3, 48)  # prompts differ: a bootstrap over cycles would be far too sure
        interval = ratio(np.maximum(rate, 1) * cycles, cycles, 400, experiment)
        covered += interval.low <= TRUTH <= interval.high
    assert 0.915 <= covered / 400 <= 0.98


TRUTH = 1.6 + 0.3 * (scipy.stats.norm.pdf(2) - 2 * (1 - scipy.stats.norm.cdf(2)))  # mean of max(N(1.6, 0.3), 1)


def test_pairing_removes_what_a_prompt_adds_to_both_sides():
    generator = np.random.default_rng(2)
    easy = generator.normal(2.0, 0.5, 48)
    cycles = np.full(48, 50.0)
    starter, result = easy * cycles, (easy + 0.1 + generator.normal(0, 0.02, 48)) * cycles
    paired = paired_difference(result, cycles, starter, cycles, 1000, 0)
    assert paired.value == pytest.approx(0.1, abs=0.02)
    assert paired.excludes(0)
    alone = ratio(result, cycles, 1000, 0)
    assert paired.high - paired.low < 0.2 * (alone.high - alone.low)


def test_a_drafter_that_is_no_better_has_an_interval_with_0_inside():
    generator = np.random.default_rng(3)
    cycles = np.full(48, 50.0)
    one, other = (generator.normal(2.0, 0.5, 48) * cycles for _ in range(2))
    assert not paired_difference(one, cycles, other, cycles, 1000, 0).excludes(0)


def test_a_speedup_is_the_quotient_of_two_rates_on_the_same_prompts():
    speedup = paired_quotient([100, 50], [2, 1], [100, 50], [4, 2], 200, 0)
    assert (speedup.value, speedup.low, speedup.high) == (2, 2, 2)


def test_one_prompt_has_a_value_but_no_interval():
    assert ratio([3], [2], 200, 0) == Interval(1.5, None, None, 1)


def test_nothing_measured_has_no_value():
    assert ratio([], [], 200, 0) == Interval(None, None, None, 0)
    assert ratio([0, 0], [0, 0], 200, 0).value is None


def test_the_same_seed_gives_the_same_interval():
    assert ratio([3, 5, 9], [2, 2, 5], 200, 7) == ratio([3, 5, 9], [2, 2, 5], 200, 7)


def test_columns_of_different_prompts_are_refused():
    with pytest.raises(EyasError, match="same prompts"):
        bootstrap([[1, 2], [1]], lambda sums: sums[..., 0], 200, 0)
