"""Replays follow served steps exactly, and a misreading is named only when the steps demand it."""

from collections.abc import Sequence

import pytest
import torch

from eval.engine import Engine
from eval.replay import Case, Misreading, Reading, Replay, Served, diagnose, misreadings
from eval.served_states import FromTarget
from eyas.drafter import Drafter
from eyas.folder import DrafterFolder
from eyas.target import Target
from tests.eval.tiny import tiny_drafter, tiny_target

LAYERS = (1, 2, 3)
STEPS = 3


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    """Of so few tokens that a random drafter is often right."""
    return tiny_target(tmp_path_factory.mktemp("target"), vocab_size=12)


@pytest.fixture
def drafter(target: Target) -> Drafter:
    return tiny_drafter(target, 8)


def cases(target: Target, layers: tuple[int, ...], noise: float = 0.0) -> list[Case]:
    """Requests to the embedded engine that feeds the drafter ``layers``, its fc off by ``noise``; with the states of all layers."""
    drafter = tiny_drafter(target, 8)
    fc = drafter.fc.weight.data
    fc += noise * fc.std() * torch.randn(fc.shape, generator=torch.Generator().manual_seed(1))
    engine = Engine(target, {"drafter": DrafterFolder(drafter, layers, [], {})}, torch.float32, 128, STEPS)
    served = []
    for seed in range(4):
        prompt = torch.randint(1, 12, (5 + seed,), generator=torch.Generator().manual_seed(seed)).tolist()
        generation = engine.generate(prompt, 60, drafter="drafter", stop_ids=())
        served.append(Served(prompt, generation.output_ids, generation.accepted[:-1]))
    return FromTarget(target, torch.float32, torch.device("cpu")).follow(served, range(5)).cases


def right(replay: Replay, reading: Reading, served: Sequence[Case]) -> int:
    return sum(one == other for case in served for one, other in zip(case.accepted, replay.accepted(reading, case), strict=True))


def test_a_replay_accepts_what_the_engine_accepted_step_by_step(target: Target, drafter: Drafter) -> None:
    served = cases(target, LAYERS)
    steps = sum(len(case.accepted) for case in served)
    assert {count for case in served for count in case.accepted} == {0, 1, 2, 3}
    replay = Replay(drafter, STEPS, 128)
    assert right(replay, replay.reading(LAYERS), served) == steps
    assert right(replay, replay.reading((3, 2, 1)), served) < steps - 20


def test_d2t_can_be_taken_for_three_things(drafter: Drafter) -> None:
    replay, ids = Replay(drafter, STEPS, 128), drafter.draft_ids_D.tolist()
    assert replay.draft_ids("offsets").tolist() == ids
    assert replay.draft_ids("lost").tolist() == list(range(8))
    assert replay.draft_ids("absolute").tolist() == [token + row if token + row < 12 else 0 for row, token in enumerate(ids)]


def diagnosed(target: Target, drafter: Drafter, served: list[Case]) -> list[Misreading]:
    replay = Replay(drafter, STEPS, 128)
    supposed = replay.reading(LAYERS)
    return list(diagnose(replay, served, supposed, misreadings(supposed, (1, 2, 4), range(5)), 0.9).culprits)


def test_steps_that_differ_now_and_then_name_nothing(target: Target, drafter: Drafter) -> None:
    """As rounding makes them differ."""
    served = cases(target, LAYERS, noise=0.05)
    replay = Replay(drafter, STEPS, 128)
    assert 0.8 < right(replay, replay.reading(LAYERS), served) / sum(len(case.accepted) for case in served) < 0.99
    assert diagnosed(target, drafter, served) == []


def test_a_misreading_is_found_among_steps_that_differ_now_and_then(target: Target, drafter: Drafter) -> None:
    (culprit,) = diagnosed(target, drafter, cases(target, (2, 3, 4), noise=0.05))
    assert culprit.told == "it is fed hidden_states[2, 3, 4] instead of [1, 2, 3]"


def test_a_drafter_of_a_lost_rope_scaling_and_theta_can_be_misread_in_both() -> None:
    supposed = Reading(LAYERS, "offsets", 50000.0, (("factor", 4.0), ("rope_type", "linear")))
    told = {one.told: one.change(supposed) for one in misreadings(supposed, LAYERS, range(5)) if one.kind == "rope"}
    assert told["rope scaling is lost"] == Reading(LAYERS, "offsets", 50000.0, None)
    assert told["rope theta is 10000 instead of 50000, as where a config has none"] == Reading(LAYERS, "offsets", 10000.0, None)


def test_layers_whose_states_are_not_there_are_not_tried() -> None:
    supposed = Reading(LAYERS, "offsets", 10000.0, None)
    kinds = [one.kind for one in misreadings(supposed, LAYERS, LAYERS)]
    assert sorted(kinds) == ["d2t"] * 2 + ["fc"] * 5
