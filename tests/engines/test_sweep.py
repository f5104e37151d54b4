"""SGLang pretends acceptance lengths for `eyas sweep --simulate`: a chain and a tree, between two baseline servers."""

import json
from pathlib import Path
from typing import Any

import pytest

from data_prep.template import prompt_ids
from eval.cost_model import Setting
from eval.sweep import sweep
from eval.sweep_points import read_points
from eyas.config import Config
from eyas.target import Target
from tests.engines.served import SGLANG, STARTER, need

pytestmark = need(SGLANG)
TOKENS = 48


@pytest.fixture
def config(sglang: dict[str, Any], target: Target, chats: list[list[dict[str, str]]], tmp_path: Path) -> Config:
    """A run whose held-out prompts lie ready."""
    rows = [
        {"key": f"chat-{number}", "category": "chat", "messages": messages, "prompt_ids": prompt_ids(target.tokenizer(), messages)}
        for number, messages in enumerate(chats[:3])
    ]
    (tmp_path / "replies").mkdir()
    (tmp_path / "replies" / "greedy.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Config.model_validate(
        {
            "output": tmp_path,
            "target": {"model": "package:smollm2", "device": "cpu"},
            "prep": {"sources": [{"source": "none.jsonl"}]},
            "drafter": {"init": str(STARTER)},
            "engine": {"dtype": "float32", "context": 1024} | sglang,
            "sweep": {
                "steps": [2],
                "topk": [1, 2],
                "draft_tokens": [4],
                "prompts": 3,
                "max_new_tokens": TOKENS,
                "simulated_lengths": [2.5],
            },
        }
    )


def test_sglang_accepts_as_many_tokens_as_it_is_told_to(config: Config):
    result = sweep(config, simulate=True)
    points = read_points(config.folder("sweep"))
    assert [(point.variant, point.setting) for point in points] == [
        ("none", None),
        ("starter", Setting(2, 1, 3)),
        ("starter", Setting(2, 2, 4)),
        ("none", None),
    ]
    for found in result.simulations:
        (point,) = found.points
        assert point.length == pytest.approx(2.5, abs=0.25)  # two or three tokens a cycle, by chance
        assert found.break_even == pytest.approx(point.length / point.speedup)
    for point in points[1:3]:
        histograms = [sample.histogram for sample in point.samples]
        assert {accepted for histogram in histograms for accepted, cycles in enumerate(histogram) if cycles} == {1, 2}
