"""Launcher and watcher on SGLang and vLLM themselves: phases of their logs, the environment in their workers, their deaths."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from eval.environment import profile
from eval.launcher import serve, stop
from eval.processes import command_of, processes
from eval.starts import Start, recorded
from eval.watcher import Sight, Watch
from eyas.config import Config
from tests.engines.served import ROOT, SGLANG, STARTER, VLLM, VLLM_ENGINE, need
from tests.eval.toy_servers import LIMIT_S, wait_for

NCCL = profile(ROOT / "configs" / "env" / "nccl-pcie.yaml")
START_S = 420.0
(needs_sglang, LONG), (needs_vllm, _) = need(SGLANG), need(VLLM)
pytestmark = LONG


def configured(folder: Path, engine: dict[str, Any]) -> Config:
    """A run with this engine section, and the NCCL profile of the 8-GPU node besides its own environment."""
    path = folder / "profile.yaml"
    path.write_text(yaml.safe_dump(NCCL | profile(Path(engine["environment"]))))
    return Config.model_validate(
        {
            "output": folder / "run",
            "target": {"model": "package:smollm2"},
            "prep": {"sources": [{"source": "none.jsonl"}]},
            "drafter": {"init": "scratch"},
            "engine": {"dtype": "float32", "context": 1024} | engine | {"environment": path},
        }
    )


@dataclass
class Seen:
    """A start that is being watched, and the phases seen of it."""

    watch: Watch
    start: Start
    phases: list[str] = field(default_factory=list)

    def until(self, fact: Callable[[Sight], bool], limit_s: float) -> Sight:
        """Look until a sight is as wanted."""

        def look() -> Sight | None:
            sight = self.watch.look()
            if sight.phase not in self.phases[-1:]:
                self.phases.append(sight.phase)
            assert fact(sight) or sight.state != "dead", sight.note
            return sight if fact(sight) else None

        return wait_for(look, limit_s)


@contextmanager
def started(config: Config, variant: str) -> Iterator[Seen]:
    """Start a server that stays; it is gone in the end."""
    serve(config, {"starter": str(STARTER)}, variant, None, detach=True, stop_on_interrupt=True)
    start = recorded(config.folder("servers"))[variant]
    try:
        with Watch(config.folder("servers") / variant, start) as watch:
            yield Seen(watch, start)
    finally:
        stop(config, None)
    assert [process for process in processes() if process.session == start.session and not process.dead] == []
    assert start.family().living() == []


def require_proven(seen: Seen, titles: set[str]) -> None:
    """Every process, those too that changed their title, has the NCCL variables."""
    proof = seen.watch.proof
    assert proof is not None
    assert (proof.differences, proof.unreadable) == ([], [])
    assert NCCL.keys() <= set(proof.variables)
    living = seen.start.family().living()
    assert set(proof.proven) >= {process.pid for process in living}
    commands = [command_of(process.pid) for process in living]
    assert all(any(command.startswith(title) for command in commands) for title in titles), commands


@needs_sglang
def test_sglang_is_followed_to_its_first_token_proven_and_seen_when_it_is_stopped(tmp_path: Path, sglang: dict[str, Any]) -> None:
    with started(configured(tmp_path, sglang), "starter") as seen:
        ready = seen.until(lambda sight: sight.state == "ready", START_S)
        order = [name for name in seen.phases if name != "first token"]
        assert [name for name in order if name in ("begin", "process groups", "weights", "drafter weights", "warm-up")] == [
            "begin", "process groups", "weights", "drafter weights", "warm-up",
        ]  # fmt: skip
        assert "memory pool" in order
        assert ready.phase == "first token"
        require_proven(seen, {"sglang::scheduler", "sglang::detokenizer"})
        for number, state in ((signal.SIGSTOP, "stuck"), (signal.SIGCONT, "ready")):
            for process in seen.start.family().living():
                os.kill(process.pid, number)
            seen.until(lambda sight, state=state: sight.state == state, LIMIT_S)


@needs_sglang
def test_a_killed_worker_of_sglang_is_a_death_with_its_cause(tmp_path: Path, sglang: dict[str, Any]) -> None:
    with started(configured(tmp_path, sglang), "none") as seen:
        seen.until(lambda sight: sight.phase in ("process groups", "weights"), START_S)
        # what a scheduler forks to ask the machine something bears its name for a moment
        worker = min(process.pid for process in seen.start.family().living() if command_of(process.pid).startswith("sglang::scheduler"))
        os.kill(worker, signal.SIGKILL)
        dead = seen.until(lambda sight: sight.state == "dead", LIMIT_S + 10.0)  # SGLang itself looks every five seconds
    assert "likely cause: killed from outside: somebody sent SIGKILL" in dead.note


@needs_vllm
def test_vllm_is_followed_to_its_first_token_and_proven(tmp_path: Path) -> None:
    with started(configured(tmp_path, VLLM_ENGINE), "starter") as seen:
        ready = seen.until(lambda sight: sight.state == "ready", START_S)
        assert [name for name in seen.phases if name in ("begin", "process groups", "weights", "warm-up")] == [
            "begin", "process groups", "weights", "warm-up",
        ]  # fmt: skip
        assert ready.phase == "first token"
        require_proven(seen, {"VLLM::EngineCore", "VLLM::Worker"})


@needs_vllm
def test_a_flag_that_vllm_does_not_know_is_a_bad_flag(tmp_path: Path) -> None:
    with started(configured(tmp_path, VLLM_ENGINE | {"flags": {"no-such-flag": True}}), "none") as seen:
        dead = seen.until(lambda sight: sight.state == "dead", START_S)
    assert "(exit code 2): " in dead.note
    assert "unrecognized arguments: --no-such-flag; likely cause: bad flag: " in dead.note
