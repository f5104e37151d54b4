"""Requests as the embedded engine serves them on the real model, and what the offline walk makes of the same text."""

import random
from dataclasses import dataclass
from pathlib import Path

import torch

from data_prep.prompts import load_source
from data_prep.template import prompt_ids
from eval.engine import Engine, Generation
from eyas.acceptance import Cycle
from eyas.config import SourceConfig, TargetConfig
from eyas.folder import read_drafter
from eyas.target import open_target
from tests.offline_walk import walk_offline

STARTER = Path(__file__).parents[2] / "checkpoints" / "starter-smollm2"
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
