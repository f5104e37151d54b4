"""Runs of the toy engine for the tests of launcher and watcher: configs, real commands in other processes, and who is left afterwards."""

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import yaml

from eval.processes import MARK, environment_of, processes
from eval.starts import Start, recorded
from eyas.config import Config
from eyas.files import write_json

T = TypeVar("T")
ROOT = Path(__file__).parents[2]
TOY = Path(__file__).parent / "toy_engine"
LIMIT_S = 10.0
"""A fact must be told within so many seconds."""


class ToyRun:
    """One run's folder, served by the toy engine."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.target = folder / "target"
        self.target.mkdir()
        write_json(self.target / "config.json", {"model_type": "llama"})
        (self.target / "model.safetensors").write_bytes(b"")
        self.path = folder / "config.yaml"

    def config(self, toy: str, variables: dict[str, str] | None = None, **engine: object) -> Config:
        """The run's config, also as a file, for a toy that fails in the way that ``toy`` names."""
        profile = self.folder / "profile.yaml"
        profile.write_text(yaml.safe_dump({"PYTHONPATH": str(TOY), "TOY": toy, "NCCL_ALGO": "Ring"} | (variables or {})))
        values = {
            "output": str(self.folder / "out"),
            "target": {"model": str(self.target)},
            "prep": {"sources": [{"source": "none.jsonl"}]},
            "drafter": {"init": "hub:owner/starter"},
            "engine": {"kind": "sglang", "environment": str(profile)} | engine,
        }
        self.path.write_text(yaml.safe_dump(values))
        return Config.model_validate(values)

    @property
    def servers(self) -> Path:
        return self.folder / "out" / "servers"

    def start(self, variant: str = "none") -> Start:
        """The recorded start; waits for it."""
        return wait_for(lambda: recorded(self.servers).get(variant))

    def eyas(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """A command on this run, in a process of its own."""
        command = [sys.executable, "-m", "eyas", *arguments, "-c", str(self.path)]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)

    def background(self, *arguments: str) -> "subprocess.Popen[str]":
        """The same, not waited for."""
        command = [sys.executable, "-m", "eyas", *arguments, "-c", str(self.path)]
        return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def left(self) -> list[int]:
        """Processes, keepers too, of servers of this run."""
        marks = {start.mark for start in recorded(self.servers).values()}
        return [process.pid for process in processes() if not process.dead and environment_of(process.pid).get(MARK) in marks]


def wait_for(what: Callable[[], T | None], limit_s: float = 30.0) -> T:
    """Ask until there is an answer."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        if (found := what()) is not None and found is not False:
            return found
        time.sleep(0.02)
    raise AssertionError(f"nothing within {limit_s} s")
