"""SGLang and vLLM themselves answer prompts for training: eight in flight, greedily, in float32, the ids are those of transformers."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from data_prep.prompts import load_source, split_prompts
from data_prep.replies import SETS, write_replies
from data_prep.template import prompt_ids
from eval.clients import BASELINE
from eval.launcher import serving
from eyas.config import Config, SourceConfig
from eyas.files import read_jsonl
from eyas.target import Target
from tests.engines.served import SGLANG, VLLM, VLLM_ENGINE, need

PROMPTS, HELDOUT, TOKENS = 24, 4, 16


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two dozen real prompts, every second one with a system turn before it."""
    prompts = load_source(SourceConfig(source="package:evals", families=["group:contracts", "group:radio"], limit=80), seed=3)
    random.Random(0).shuffle(prompts)
    path = tmp_path_factory.mktemp("source") / "prompts.jsonl"
    system = [{"role": "system", "content": "Answer in one sentence."}]
    chats = [prompt.messages if number % 2 else system + prompt.messages[-1:] for number, prompt in enumerate(prompts[:PROMPTS])]
    path.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in chats))
    return path


@pytest.fixture(scope="module")
def expected(target: Target, source: Path) -> dict[tuple[int, ...], list[int]]:
    """Reply ids by prompt ids."""
    model, tokenizer = target.load_model(torch.float32, "cpu"), target.tokenizer()
    found = {}
    for _, row in read_jsonl(source):
        ids = prompt_ids(tokenizer, row["messages"])
        with torch.inference_mode():
            found[tuple(ids)] = model.generate(torch.tensor([ids]), max_new_tokens=TOKENS, do_sample=False)[0, len(ids) :].tolist()
    return found


@pytest.mark.parametrize("kind", [pytest.param("sglang", marks=need(SGLANG)), pytest.param("vllm", marks=need(VLLM))])
def test_greedy_replies_of_a_server_are_the_ids_that_transformers_gives(
    kind: str, sglang: dict[str, Any], source: Path, expected: dict[tuple[int, ...], list[int]], target: Target, tmp_path: Path
) -> None:
    replies = {"mode": "server", "temperatures": [0.0], "max_new_tokens": TOKENS, "concurrency": 8}
    heldout = {"prompts": HELDOUT, "near_duplicate": 1.0}
    config = Config.model_validate(
        {
            "output": tmp_path / "run",
            "target": {"model": "package:smollm2", "device": "cpu"},
            "prep": {"sources": [{"source": str(source)}], "heldout": heldout, "replies": replies, "max_length": 1000},
            "drafter": {"init": "scratch"},
            "engine": {"dtype": "float32", "context": 1024, **(sglang if kind == "sglang" else VLLM_ENGINE)},
        }
    )
    with serving(config, {}, BASELINE) as url:
        folder = write_replies(
            config, target, split_prompts(config.prep, config.seed), lambda: pytest.fail("model loaded"), servers=lambda: [url]
        )
    told = {name: [record for _, record in read_jsonl(folder / f"{name}.jsonl")] for name in SETS}
    greedy = {tuple(record["prompt_ids"]): record["reply_ids"] for name in ("train", "greedy") for record in told[name]}
    assert greedy == expected
    for record in (record for name in SETS for record in told[name]):
        ended = record["reply_ids"][-1] in target.shape.eos_ids
        assert (record["finished"], record["finish_reason"]) == ((True, "stop") if ended else (False, "length"))
    # the promise would be half empty if none, or all, ended by themselves
    assert {record["finish_reason"] for records in told.values() for record in records} == {"stop", "length"}
    assert len(told["sampled"]) == HELDOUT
