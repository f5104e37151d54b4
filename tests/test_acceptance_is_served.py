"""DESIGN's central promise, on the real model: what the offline walk says is what a greedy server does, cycle by cycle."""

import random
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from data_prep.capture_hf import Probe
from data_prep.prompts import load_source
from data_prep.rows import Row
from data_prep.template import Tokens, prompt_ids, reply_row
from eval.engine import Engine, Generation
from eyas.acceptance import Cycle, walk
from eyas.attention_hf import NAME
from eyas.config import SourceConfig, TargetConfig
from eyas.folder import read_drafter
from eyas.states import StateRow
from eyas.target import Target, open_target
from train.batches import pack
from train.ttt import TrainingTimeTest, evaluate_hits

STARTER = Path(__file__).parents[1] / "checkpoints" / "starter-smollm2"
STEPS = 3
TOKENS = 3000


@dataclass(frozen=True)
class Served:
    """The same prompts with and without speculation."""

    target: Target
    speculative: list[Generation]
    baseline: list[Generation]


@pytest.fixture(scope="module")
def served(smollm2: Path) -> Served:
    """At least 3,000 greedy tokens in float32, prompts of two families."""
    target = open_target(TargetConfig(model=str(smollm2)))
    tokenizer = target.tokenizer()
    engine = Engine(target, {"starter": read_drafter(str(STARTER))}, torch.float32, 1024, STEPS)
    prompts = load_source(SourceConfig(source="package:evals", families=["group:contracts", "group:radio"], limit=60), seed=3)
    random.Random(0).shuffle(prompts)
    speculative, baseline = [], []
    while sum(len(generation.output_ids) for generation in speculative) < TOKENS:
        ids = prompt_ids(tokenizer, prompts.pop().messages)
        speculative.append(engine.generate(ids, 160, drafter="starter"))
        baseline.append(engine.generate(ids, 160))
    return Served(target, speculative, baseline)


def test_speculative_output_equals_the_baseline_token_for_token(served: Served):
    assert [generation.output_ids for generation in served.speculative] == [generation.output_ids for generation in served.baseline]


def test_every_request_walks_offline_as_it_was_served(served: Served):
    walks = _offline(served)
    whole = 0
    for cycles, generation in zip(walks, served.speculative, strict=True):
        assert len(cycles) == generation.verify_ct
        assert [cycle.accepted for cycle in cycles[:-1]] == generation.accepted[:-1]
        whole += len(cycles) - 1
    # the promise would be empty if drafts never, or always, stood
    accepted = sum(sum(generation.accepted[:-1]) for generation in served.speculative)
    assert whole > 500
    assert 0.1 < accepted / whole < STEPS - 0.1


def _offline(served: Served) -> list[list[Cycle]]:
    """Capture the states of each request's text, and walk over it with the drafter alone."""
    folder = read_drafter(str(STARTER))
    drafter, target = folder.drafter, served.target
    drafter.set_embedding(target.embedding(torch.float32))
    head_DH = target.lm_head(torch.float32)[drafter.draft_ids_D]
    test = TrainingTimeTest(drafter, head_DH, STEPS, 1.0)
    model = target.load_model(torch.float32, torch.device("cpu"), NAME)
    walks = []
    with Probe(model, folder.layers or ()) as probe:
        for generation in served.speculative:
            tokens = reply_row(generation.prompt_ids, generation.output_ids)
            aux_1TA, final_1TH = probe([_row(tokens)], target.shape.pad_id)
            row = StateRow("", "", torch.tensor(tokens.ids), torch.tensor(tokens.supervised), aux_1TA[0].clone(), final_1TH[0].clone())
            (reply,) = evaluate_hits(test, pack([row])).replies
            walks.append(walk(reply.hits_MJ, reply.chain_t_M))
    return walks


def _row(tokens: Tokens) -> Row:
    return Row(key="", prompt_key="", category="", tokens=tokens)
