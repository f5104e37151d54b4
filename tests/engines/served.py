"""A real engine's server for the length of a test run: started, asked, ended. What it told is what the tests look at."""

import os
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from eval.clients import BASELINE, Counts, Reply, connect
from eval.launcher import serving
from eyas.acceptance import Cycle
from eyas.config import Config

ROOT = Path(__file__).parents[2]
SGLANG, VLLM = (ROOT / ".engines" / name / "bin" / "python" for name in ("sglang", "vllm"))
VLLM_ENGINE: dict[str, Any] = {
    "kind": "vllm",
    "python": str(VLLM),
    "environment": str(Path(__file__).parent / "vllm-cpu.yaml"),
    "flags": {"enforce-eager": True},
}
"""The engine section of a config: vLLM as it is served on a CPU."""
STAND_IN = Path(__file__).parent / "sglang_cpu"
STARTER = ROOT / "checkpoints" / "starter-smollm2"
STEPS = 3
Text = tuple[list[int], list[int]]
"""Ids of a prompt and of its reply."""


@dataclass(frozen=True)
class Served:
    """What one server told about itself, its replies to the prompts in order, and its reply to a chat."""

    info: dict[str, Any]
    replies: list[Reply]
    chat: Reply

    @property
    def counts(self) -> list[Counts]:
        return [reply.counts for reply in self.replies if reply.counts is not None]

    @property
    def ids(self) -> list[list[int]]:
        return [list(reply.output_ids) for reply in self.replies]

    @property
    def length(self) -> float:
        """Tokens emitted per verify step."""
        return sum(reply.completion_tokens - 1 for reply in self.replies) / sum(counts.verify_ct for counts in self.counts)


def need(python: Path) -> list[pytest.MarkDecorator]:
    """Marks for tests that an engine's interpreter must be there for. `make test-engines` has no excuse: there they fail without it."""
    excused = os.environ.get("EYAS_ENGINES") != "required" and not python.exists()
    return [pytest.mark.skipif(excused, reason=f"{python} is not there: make engines"), pytest.mark.timeout(900)]


def serve(
    engine: dict[str, Any], output: Path, drafter: Path | None, texts: Sequence[Text], chat: list[dict[str, str]], at_once: int = 1
) -> Served:
    """Start a server as ``engine`` says, with a drafter or none, let it answer, and end it.

    It gets the prompts of ``texts``, ``at_once`` at a time, for as many tokens as their replies have, then the chat. Alone, each request
    meets an empty prefix cache.
    """
    config = Config.model_validate(
        {
            "output": output,
            "target": {"model": "package:smollm2", "device": "cpu"},
            "prep": {"sources": [{"source": "none.jsonl"}]},
            "drafter": {"init": "scratch"},
            "engine": {"dtype": "float32", "context": 1024, "draft_steps": STEPS} | engine,
        }
    )
    drafters = {} if drafter is None else {"drafter": str(drafter)}
    with serving(config, drafters, next(iter(drafters), BASELINE)) as url, connect(url) as client, ThreadPoolExecutor(at_once) as pool:

        def ask(text: Text) -> Reply:
            prompt, reply = text
            if at_once == 1:
                client.flush_cache()
            return client.generate(prompt, len(reply), 0.0, 0)

        replies = list(pool.map(ask, texts))
        return Served(client.server_info(), replies, client.chat(chat, len(texts[0][1]), 0.0))


def require_walked(served: Served, walks: Sequence[Sequence[Cycle]]) -> None:
    """Every request took the verify steps that the walk foretells, accepted as many drafts in each; in the last, which the end cuts off,
    at least those that the text shows."""
    for counts, cycles in zip(served.counts, walks, strict=True):
        *whole, last = (cycle.accepted for cycle in cycles)
        left = Counter(dict(enumerate(counts.histogram)))
        left.subtract(Counter(whole))
        assert counts.verify_ct == len(cycles)
        assert min(left.values()) == 0
        assert [accepted >= last for accepted in left.elements()] == [True]
        assert counts.correct == sum(accepted * times for accepted, times in enumerate(counts.histogram))
        assert counts.proposed == STEPS * counts.verify_ct


def accepted_shares(served: Served) -> list[float]:
    """Share of verify steps that accept draft 1, 2, ... of a chain or of a way down a tree."""
    times = [sum(numbers) for numbers in zip(*(counts.histogram for counts in served.counts), strict=True)]
    return [sum(times[draft:]) / sum(times) for draft in range(1, STEPS + 1)]
