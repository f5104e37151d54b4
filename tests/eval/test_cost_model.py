import itertools

import numpy as np
import pytest
from scipy.optimize import nnls

from eval.cost_model import BRANCH, FIRST_DRAFT, FORWARD, FURTHER_DRAFT, ONCE, TOKEN, Observation, Setting, fit, non_negative_least_squares

CHAINS = [Setting(steps, 1, steps + 1) for steps in (1, 2, 3, 5)]
TREES = [Setting(2, 2, 5), Setting(3, 4, 8), Setting(3, 4, 16), Setting(5, 8, 32)]
COSTS = np.array([0.4, 0.15, 0.05, 0.02])


def observed(settings, costs=COSTS, noise=0.0):
    generator = np.random.default_rng(0)
    return [Observation(s, float((1 + costs @ s.terms()) * (1 + noise * generator.standard_normal()))) for s in settings]


@pytest.mark.parametrize("seed", range(40))
def test_the_least_squares_are_scipys(seed):
    generator = np.random.default_rng(seed)
    rows, columns = generator.integers(1, 7), generator.integers(1, 5)
    matrix, wanted = generator.normal(size=(rows, columns)), generator.normal(size=rows)
    ours, (theirs, residual) = non_negative_least_squares(matrix, wanted), nnls(matrix, wanted)
    assert (ours >= 0).all()
    assert np.linalg.norm(matrix @ ours - wanted) == pytest.approx(residual, abs=1e-9)
    assert matrix @ ours == pytest.approx(matrix @ theirs, abs=1e-6)


def test_chains_and_trees_give_every_cost_back():
    model = fit(observed([*CHAINS, *TREES]), baseline_ms=10.0)
    assert [model.cost(term) for term in (ONCE, FORWARD, TOKEN, BRANCH)] == pytest.approx(list(COSTS))
    assert model.cycle(Setting(4, 2, 12)) == pytest.approx(1 + 0.4 + 3 * 0.15 + 11 * 0.05 + 3 * 0.02)
    assert model.verify(16) == pytest.approx(1 + 15 * 0.05)
    assert model.worst == pytest.approx(0, abs=1e-9)


def test_chains_alone_tell_sums_and_no_more():
    model = fit(observed(CHAINS), baseline_ms=10.0)
    assert model.cost(FIRST_DRAFT) == pytest.approx(0.45)
    assert model.cost(FURTHER_DRAFT) == pytest.approx(0.20)
    assert [model.cost(term) for term in (ONCE, FORWARD, TOKEN, BRANCH)] == [None] * 4
    assert model.verify(4) is None
    assert model.cycle(Setting(7, 1, 8)) == pytest.approx(1.45 + 6 * 0.20)
    assert model.cycle(TREES[0]) is None


def test_one_point_tells_its_own_cycle_only():
    model = fit(observed(CHAINS[2:3]), baseline_ms=10.0)
    assert model.cycle(CHAINS[2]) == pytest.approx(1.85)
    assert [model.cycle(setting) for setting in (*CHAINS[:2], *TREES)] == [None] * 6
    assert model.worst is None


def test_no_cost_is_negative_even_where_noise_says_so():
    falling = [Observation(CHAINS[0], 1.6), Observation(CHAINS[1], 1.5), Observation(CHAINS[3], 1.4)]
    model = fit(falling, baseline_ms=10.0)
    assert (model.coefficients >= 0).all()
    assert model.cost(FURTHER_DRAFT) == pytest.approx(0)
    assert 1.4 < model.cycle(CHAINS[0]) < 1.6


def test_the_error_is_shown_as_soon_as_there_is_one():
    bent = [Observation(CHAINS[0], 1.45), Observation(CHAINS[1], 1.65), Observation(CHAINS[3], 3.0)]
    assert fit(bent[:2], 10.0).worst is None
    model = fit(bent, 10.0)
    assert model.worst == max(abs(residual) for residual in model.residuals())
    assert 0.05 < model.worst < 0.2


def test_relative_errors_are_what_is_minimised():
    """An absolute fit would follow the long cycle; the short ones, where the best settings are, must not pay for it."""
    seen = np.array([1.5, 1.7, 9.0])
    model = fit([Observation(Setting(steps, 1, steps + 1), cycle) for steps, cycle in zip((1, 2, 16), seen, strict=True)], 10.0)
    rows = np.array([[1, 0], [1, 1], [1, 15]], dtype=float)
    first, further = np.linalg.lstsq(rows / seen[:, None], (seen - 1) / seen, rcond=None)[0]
    assert [model.cost(FIRST_DRAFT), model.cost(FURTHER_DRAFT)] == pytest.approx([first, further])
    absolute = np.linalg.lstsq(rows, seen - 1, rcond=None)[0]
    assert abs(model.cycle(Setting(1, 1, 2)) - 1.5) < abs(1 + absolute[0] - 1.5)


def test_noise_of_a_percent_leaves_costs_and_error_of_that_size():
    model = fit(observed([*CHAINS, *TREES], noise=0.01), baseline_ms=10.0)
    assert model.cost(TOKEN) == pytest.approx(0.05, abs=0.01)
    assert 0.001 < model.worst < 0.03


def test_a_tree_has_no_more_tokens_than_its_branches_give():
    assert Setting(1, 4, 5).possible
    assert not Setting(1, 4, 6).possible
    assert Setting(2, 3, 13).possible  # 3 + 9 drafts and the token before them
    assert not Setting(2, 3, 14).possible
    assert Setting(3, 1, 4).possible
    assert not Setting(3, 1, 5).possible


def test_a_larger_one_covers_a_smaller_one_of_its_kind():
    assert Setting(5, 1, 6).covers(Setting(2, 1, 3))
    assert not Setting(2, 1, 3).covers(Setting(5, 1, 6))
    assert Setting(5, 4, 16).covers(Setting(3, 2, 8))
    assert not Setting(5, 4, 16).covers(Setting(3, 8, 8))
    assert not any(tree.covers(chain) or chain.covers(tree) for tree, chain in itertools.product(TREES, CHAINS))


def test_settings_have_names():
    assert [str(setting) for setting in (CHAINS[0], CHAINS[2], TREES[1])] == ["1 step", "3 steps", "3 steps, top-k 4, 8 tokens"]
