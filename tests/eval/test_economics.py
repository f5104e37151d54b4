import math
from io import StringIO

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from eval.economics import CycleCost, best, break_even, chain_length, plan, plan_table, predict, required_rate
from eyas.errors import EyasError


def text_of(result):
    console = Console(file=StringIO(), width=100)
    console.print(plan_table(result))
    return console.file.getvalue()


def test_30_ms_against_82_tokens_a_second_break_even_at_2_466_tokens_a_cycle():
    result = plan(82.2, 30)
    assert result.length == pytest.approx(2.466, abs=5e-4)
    assert result.conditional[2] == pytest.approx(0.810, abs=5e-4)
    assert result.conditional[3] == pytest.approx(0.682, abs=5e-4)


def test_150_tokens_a_second_need_4_5_tokens_which_2_or_3_drafts_cannot_bring():
    result = plan(82.2, 30, 150)
    assert result.length == pytest.approx(4.5)
    assert result.conditional[2] is None
    assert result.conditional[3] is None
    assert [round(result.conditional[drafts], 3) for drafts in (4, 5, 7)] == [0.947, 0.883, 0.826]
    assert result.endless == pytest.approx(0.778, abs=5e-4)


@given(st.floats(1.0, 8.0), st.integers(1, 12))
def test_the_required_rate_brings_exactly_the_required_length(length, drafts):
    rate = required_rate(length, drafts)
    if length > drafts + 1:
        assert rate is None
    else:
        assert chain_length([rate], drafts) == pytest.approx(length, rel=1e-9)


def test_a_cycle_as_cheap_as_a_baseline_step_pays_with_any_acceptance():
    result = plan(100, 10)
    assert result.conditional[2] == 0
    assert result.endless == 0


@pytest.mark.parametrize(
    "values",
    [(-82.2, 30), (0, 30), (math.nan, 30), (math.inf, 30), (82.2, -1), (82.2, 0), (82.2, math.nan), (82.2, 30, -5), (82.2, 30, math.nan)],
)
def test_what_is_no_positive_number_is_refused(values):
    with pytest.raises(EyasError, match="must be a positive number"):
        plan(*values)


def test_a_cycle_given_in_seconds_is_refused_with_its_milliseconds():
    with pytest.raises(EyasError, match=r"if you meant 0\.03 seconds, give 30$"):
        plan(82.2, 0.03)


def test_a_cycle_given_in_microseconds_is_refused_with_its_milliseconds():
    with pytest.raises(EyasError, match=r"30 seconds a cycle.*microseconds, give 30$"):
        plan(82.2, 30_000)


def test_absurd_rates_are_refused():
    with pytest.raises(EyasError, match="no plausible number"):
        plan(1e9, 30)
    with pytest.raises(EyasError, match="want-tps"):
        plan(82.2, 30, 1e9)


def test_the_table_for_the_terminal_tells_numbers_and_impossibility():
    text = text_of(plan(82.2, 30, 150))
    for part in ("2.466", "4.500", "impossible (at most 4 tokens a cycle)", "0.947", "0.778"):
        assert part in text


COST = CycleCost(steps=3, baseline_ms=21.0, single_ms=20.0, verify_ms=26.0, extend_ms=4.0, draft_ms=1.0, overhead_ms=0.5)


def test_the_cost_model_gives_back_the_measured_cycle():
    assert COST.cycle(3) == pytest.approx(26 + 4 + 2 * 1 + 0.5)


def test_forwards_scale_along_the_line_through_one_position_and_the_measured_ones():
    assert COST.verify(1) == pytest.approx(20)
    assert COST.verify(8) == pytest.approx(34)
    assert COST.cycle(7) == pytest.approx(34 + 8 + 6 * 1 + 0.5)


def test_noise_never_makes_longer_forwards_cheaper():
    assert CycleCost(3, 21, 20, 19.0, 4, 1, 0.5).verify(8) == pytest.approx(19)


def test_conditional_rates_beyond_the_measured_ones_carry_the_last_on():
    assert chain_length([0.6, 0.5], 4) == pytest.approx(1 + 0.6 + 0.3 + 0.15 + 0.075)


def test_a_prediction_breaks_even_where_its_rate_is_the_baselines():
    for prediction in predict(COST, [0.5], range(1, 9)):
        assert prediction.tokens_per_second / (1000 / COST.baseline_ms) == pytest.approx(prediction.length / prediction.break_even)
        assert prediction.extrapolated == (prediction.steps > 3)


def test_the_best_number_of_drafts_is_small_at_low_acceptance_and_large_at_high():
    low, high = (best(predict(COST, [rate], range(1, 9))).steps for rate in (0.2, 0.95))
    assert low == 1
    assert high == 8


def test_break_even_is_cycle_time_times_baseline_rate():
    assert break_even(30, 82.2) == pytest.approx(2.466)
