"""What to measure next and what never, on points with known costs: a baseline step of 10 ms, and 4 + 2 ms for each further draft on top."""

import re

import pytest
import torch

from eval.cost_model import Setting
from eval.exploration import Exploration
from eval.sweep_points import Point
from eyas.acceptance import walk
from tests.eval.points import baseline, chain, paired, request

RATES = [0.8, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1]
CHAINS = [Setting(steps, 1, steps + 1) for steps in (1, 2, 3, 5, 7)]
TREES = [Setting(2, 2, 4), Setting(3, 2, 6), Setting(5, 4, 16)]


def cycle_s(steps):
    return (10 + 4 + 2 * (steps - 1)) / 1000


def known(*steps, rates=RATES, cost=cycle_s):
    """An exploration that has measured chains of so many steps."""
    points = [baseline(100.0), *(chain("result", rates[:count], cost(count)) for count in steps)]
    return Exploration.of(paired(points), 10.0)


def test_the_longest_chain_comes_first_then_the_shortest_then_the_most_promising():
    assert known().next(CHAINS) == Setting(7, 1, 8)
    assert known(7).next(CHAINS[:4]) == Setting(1, 1, 2)
    seen = known(7, 1)
    expected = {setting: seen.forecast(setting).speedup for setting in CHAINS[1:4]}
    assert seen.next(CHAINS[1:4]) == max(expected, key=expected.get) == Setting(2, 1, 3)


def test_trees_follow_the_chains_the_largest_first():
    assert known(7, 1).next([*CHAINS[1:4], *TREES]) == TREES[2]
    seen = Exploration.of([*known(7, 1).points, *paired([baseline(100.0), chain("result", RATES[:5], 0.03, setting=TREES[2])])], 10.0)
    assert seen.next([*CHAINS[1:4], *TREES[:2]]) == TREES[0]


def test_a_setting_nobody_can_foretell_is_measured_before_those_that_are_foretold():
    assert known(1, 2, 3).next([Setting(4, 1, 5)]) == Setting(4, 1, 5)
    assert known(1, 5).next([CHAINS[1], Setting(7, 1, 8)]) == Setting(7, 1, 8)


def test_a_shorter_chain_is_foretold_from_a_longer_one():
    forecast = known(7, 1).forecast(Setting(3, 1, 4))
    assert forecast.cycle == pytest.approx(1.8, rel=0.001)
    assert forecast.length == pytest.approx(1 + 0.8 + 0.48 + 0.24, rel=0.01)
    assert forecast.speedup == pytest.approx(2.52 / 1.8, rel=0.01)
    assert not forecast.at_most
    assert known(1, 2).forecast(Setting(3, 1, 4)) is None  # nothing longer was measured
    assert known(7).forecast(Setting(3, 1, 4)) is None  # one point does not tell what a draft costs


def test_the_nearest_longer_chain_is_what_tells():
    other = [0.5, 0.5, 0.5]
    points = [baseline(100.0), chain("result", RATES, cycle_s(7)), chain("result", other, cycle_s(3))]
    assert Exploration.of(paired(points), 10.0).forecast(Setting(2, 1, 3)).length == pytest.approx(1.75, rel=0.01)


def test_a_measured_setting_is_foretold_from_the_others_alone():
    points = [baseline(100.0), *(chain("result", RATES[:count], cycle_s(count)) for count in (7, 1)), chain("result", [0.1, 0.1, 0.1], 0.5)]
    assert Exploration.of(paired(points), 10.0).forecast(Setting(3, 1, 4)).length == pytest.approx(2.52, rel=0.01)


def test_the_foretold_length_is_that_of_the_walk_a_server_makes():
    """A real text with hits that depend on the position: walked with 6 steps, does the histogram foretell the walk with 3?"""
    generator = torch.Generator().manual_seed(0)
    samples, shorter = [], [0, 0]
    for number in range(6):
        hits_MJ = torch.rand(1500, 6, generator=generator) < torch.tensor([0.7, 0.6, 0.55, 0.5, 0.5, 0.4])
        positions_M = torch.arange(1500)
        cycles = walk(hits_MJ, positions_M)
        histogram = [sum(cycle.accepted == accepted for cycle in cycles) for accepted in range(7)]
        samples.append(request(f"p{number}", "result", sum(cycle.emitted for cycle in cycles), 1.0, histogram))
        short = walk(hits_MJ, positions_M, steps=3)
        shorter = [shorter[0] + sum(cycle.emitted for cycle in short), shorter[1] + len(short)]
    point = Point("result", Setting(6, 1, 7), None, 1, "x", 9.0, None, samples)
    foretold = paired([baseline(100.0), point])[0].length_at(Setting(3, 1, 4))
    assert foretold.value == pytest.approx(shorter[0] / shorter[1], rel=0.02)
    assert foretold.low < shorter[0] / shorter[1] < foretold.high


def test_hopeless_against_the_baseline_says_why():
    seen = known(7, 1, 3, rates=[0.3] * 7)
    reason = seen.hopeless(Setting(5, 1, 6), margin=0.03)
    found = re.fullmatch(r"at most (.*) x the baseline: a cycle costs (.*) baseline steps, the acceptance length is at most (.*)", reason)
    over, cycle, length = map(float, found.groups())
    assert cycle == 2.2
    assert 1.43 < length < 1.52  # 1.427 in the mean, and prompts differ
    assert over == pytest.approx(length / cycle, abs=0.01)


def test_hopeless_against_the_best_says_which_one_that_is():
    seen = known(7, 1, 3, rates=[0.9, 0.8, 0.8, 0.2, 0.1, 0.1, 0.1])
    assert seen.best.setting == Setting(3, 1, 4)
    # 3.32 tokens in cycles of 2.2 against 3.20 in cycles of 1.8, and nearly so on every prompt
    assert re.fullmatch(r"at most 0\.8[5-7] x its best so far, 3 steps", seen.hopeless(Setting(5, 1, 6), margin=0.03))
    assert seen.hopeless(Setting(2, 1, 3), margin=0.15) is None
    assert seen.hopeless(Setting(5, 1, 6), margin=0.5) is None


def test_nothing_is_hopeless_before_the_fit_has_an_error():
    assert known(7, 1, rates=[0.01] * 7).hopeless(Setting(3, 1, 4), margin=0.03) is None
    assert known(7, 1, 2, rates=[0.01] * 7).hopeless(Setting(3, 1, 4), margin=0.03) is not None


def test_a_fit_that_errs_widens_what_is_thought_possible():
    """The cycle of 2 steps costs 30 % less than the line through 1 and 7: 3 steps may be cheaper than fitted too."""
    rates = [0.3] * 7
    straight, bent = (
        known(7, 1, 2, rates=rates),
        known(7, 1, 2, rates=rates, cost=lambda steps: cycle_s(steps) * (0.7 if steps == 2 else 1)),
    )
    assert straight.hopeless(Setting(3, 1, 4), margin=0.1) is not None
    assert bent.hopeless(Setting(3, 1, 4), margin=0.1) is None


def test_a_tree_is_foretold_as_at_most_what_a_larger_one_brings():
    large = Setting(5, 4, 16)
    trees = [Setting(5, 4, 8), Setting(3, 4, 16), Setting(5, 2, 16), Setting(2, 2, 4)]
    points = [baseline(100.0), *(chain("result", RATES[:count], cycle_s(count)) for count in (7, 1))]
    points += [chain("result", [0.9] * tree.steps, 0.02 + 0.001 * tree.tokens, setting=tree) for tree in [large, *trees[:3]]]
    seen = Exploration.of(paired(points), 10.0)
    forecast = seen.forecast(trees[3])
    assert forecast.at_most
    assert forecast.length == pytest.approx(1 + 0.9 + 0.81, rel=0.02)
    assert seen.forecast(Setting(5, 8, 32)) is None


def test_a_machine_that_slows_down_bends_neither_rate_nor_fit():
    """Everything takes twice as long from the second server start on, the baseline too."""
    points = []
    for start, (steps, slower) in enumerate([(7, 1), (1, 2), (3, 1.5)]):
        points += [baseline(100.0 / slower, start), chain("result", RATES[:steps], slower * cycle_s(steps), start)]
    seen = Exploration.of(paired(points), 10.0)
    assert [point.cycle for point in seen.points] == pytest.approx([2.6, 1.4, 1.8], rel=0.001)
    assert seen.model.worst < 0.001
    assert seen.points[2].speedup().value == pytest.approx(2.52 / 1.8, rel=0.01)


def test_without_a_baseline_of_its_own_a_point_takes_the_nearest_on_both_sides():
    points = [
        baseline(50.0, 1),
        baseline(80.0, 2),
        chain("result", RATES[:1], 0.02, 3),
        chain("result", RATES[:2], 0.02, 4),
        baseline(120.0, 5),
    ]
    near = 2 / (1 / 80 + 1 / 120)
    assert [1000 / point.baseline_ms for point in paired(points)] == pytest.approx([near, near], rel=0.001)
    assert paired([chain("result", RATES[:1], 0.02, 3)]) == []


def test_what_the_ends_of_replies_cut_off_is_expected_to_be_cut_off_again():
    """Short replies: 10 cycles of 3 steps accept all drafts, but of their 40 tokens 36 are kept."""
    point = Point(
        "result", Setting(3, 1, 4), None, 1, "x", 9.0, None, [request(f"p{n}", "result", 36, 1.0, [0, 0, 0, 10]) for n in range(6)]
    )
    (seen,) = paired([baseline(100.0), point])
    assert seen.length().value == pytest.approx(3.6)
    assert seen.length_at(Setting(1, 1, 2)).value == pytest.approx(2 * 0.9)
