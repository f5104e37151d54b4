"""DESIGN's central promise, on the real model: what the offline walk says is what a greedy server does, cycle by cycle."""

import random
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from data_prep.prompts import load_source
from data_prep.template import prompt_ids
from eval.engine import Engine, Generation
from eyas.acceptance import Cycle
from eyas.config import SourceConfig, TargetConfig
from eyas.folder import read_drafter
from eyas.target import open_target
from tests.offline_walk import walk_offline

STARTER = Path(__file__).parents[1] / "checkpoints" / "starter-smollm2"
STEPS = 3
TOKENS = 3000


@dataclass(frozen=True)
class Served:
    """Requests as the engine served them, greedily, and what the offline walk makes of the same text."""

    speculative: list[Generation]
    baseline: list[Generation]
    walks: list[list[Cycle]]


def serve(folder: Path, dtype: torch.dtype, with_baseline: bool) -> Served:
    """At least 3,000 tokens on prompts of two families."""
    target = open_target(TargetConfig(model=str(folder)))
    tokenizer = target.tokenizer()
    engine = Engine(target, {"starter": read_drafter(str(STARTER))}, dtype, 1024, STEPS)
    prompts = load_source(SourceConfig(source="package:evals", families=["group:contracts", "group:radio"], limit=80), seed=3)
    random.Random(0).shuffle(prompts)
    speculative, baseline = [], []
    while sum(len(generation.output_ids) for generation in speculative) < TOKENS:
        ids = prompt_ids(tokenizer, prompts.pop().messages)
        speculative.append(engine.generate(ids, 160, drafter="starter"))
        if with_baseline:
            baseline.append(engine.generate(ids, 160))
    texts = [(generation.prompt_ids, generation.output_ids) for generation in speculative]
    return Served(speculative, baseline, list(walk_offline(target, STARTER, texts, dtype, STEPS)))


@pytest.fixture(scope="module")
def exact(smollm2: Path) -> Served:
    """In float32, where nothing may differ."""
    return serve(smollm2, torch.float32, with_baseline=True)


def test_speculative_output_equals_the_baseline_token_for_token(exact: Served):
    assert [generation.output_ids for generation in exact.speculative] == [generation.output_ids for generation in exact.baseline]


def test_every_request_walks_offline_as_it_was_served(exact: Served):
    """Same verify count, same accepted counts cycle by cycle; the last cycle, which the end cuts off, aside."""
    for cycles, generation in zip(exact.walks, exact.speculative, strict=True):
        assert len(cycles) == generation.verify_ct
        assert [cycle.accepted for cycle in cycles[:-1]] == generation.accepted[:-1]
    # the promise would be empty if drafts never, or always, stood
    accepted = [count for generation in exact.speculative for count in generation.accepted[:-1]]
    assert len(accepted) > 500
    assert 0.1 < sum(accepted) / len(accepted) < STEPS - 0.1


def test_in_bfloat16_the_acceptance_length_is_the_offline_one_within_a_hundredth(smollm2: Path):
    served = serve(smollm2, torch.bfloat16, with_baseline=False)
    tokens = sum(len(generation.output_ids) - 1 for generation in served.speculative)
    steps = sum(generation.verify_ct for generation in served.speculative)
    offline = sum(cycle.emitted for cycles in served.walks for cycle in cycles) / sum(map(len, served.walks))
    assert offline == pytest.approx(tokens / steps, rel=0.01)
