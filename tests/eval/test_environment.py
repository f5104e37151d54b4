"""Environment profiles: read exactly, and proven in real processes."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from eval.environment import Difference, profile, prove
from eval.processes import read_process
from eyas.errors import EyasError

WAITING = "import sys; print('up', flush=True); sys.stdin.read()"


def test_values_are_what_the_file_writes(tmp_path: Path) -> None:
    (tmp_path / "env.yaml").write_text("A: 16777216\nB: on\nC: 010\nD: 'x y'\nE: ''\nF: 1:30\n")
    assert profile(tmp_path / "env.yaml") == {"A": "16777216", "B": "on", "C": "010", "D": "x y", "E": "", "F": "1:30"}
    assert profile(None) == {}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("A: [1, 2]", "line 1: A must be a string or a number"),
        ("A: 1\nB: {x: 1}", "line 2: B must be a string or a number"),
        ("A:", "A has no value; write '' for an empty one"),
        ("A: 1\nA: 2", "line 2: A is there twice"),
        ("a-b: 1", "line 1: not the name of a variable"),
        ("- A", "is not a mapping"),
        ("", "is not a mapping"),
        ("A: 'x", "is not valid YAML"),
    ],
)
def test_what_is_no_environment_is_refused(tmp_path: Path, text: str, told: str) -> None:
    (tmp_path / "env.yaml").write_text(text)
    with pytest.raises(EyasError, match=told):
        profile(tmp_path / "env.yaml")


def test_a_profile_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(EyasError, match=r"nowhere\.yaml does not exist"):
        profile(tmp_path / "nowhere.yaml")


@pytest.fixture
def workers() -> Iterator[list["subprocess.Popen[str]"]]:
    """Three processes: as wanted, with another value, and with none."""
    environments: list[dict[str, str]] = [{"NCCL_ALGO": "Ring", "NCCL_PROTO": "LL"}, {"NCCL_ALGO": "Tree", "NCCL_PROTO": "LL"}, {}]
    started = [
        subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", WAITING],
            env={"PATH": os.defpath} | environment if environment else {},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for environment in environments
    ]
    for worker in started:
        assert worker.stdout is not None
        assert worker.stdout.readline() == "up\n"
    yield started
    for worker in started:
        worker.communicate()


def test_every_process_is_looked_into_and_those_that_differ_are_named(workers: list["subprocess.Popen[str]"]) -> None:
    members = [process for worker in workers if (process := read_process(worker.pid))]
    wanted, (right, other, bare) = {"NCCL_ALGO": "Ring", "NCCL_PROTO": "LL"}, members
    proof = prove(wanted, members)
    assert proof.proven == [right.pid]
    assert proof.differences == [Difference("NCCL_ALGO", "Ring", "Tree", other.pid, other.name)]
    assert proof.unreadable == [bare.pid]
    assert proof.lines() == [
        f"NCCL_ALGO=Ring: process {other.pid} ({other.name}) has Tree",
        f"NCCL_ALGO, NCCL_PROTO: not proven in process {bare.pid}, whose environment cannot be read",
        "NCCL_ALGO, NCCL_PROTO: proven in 1 processes of the server",
    ]


def test_a_variable_that_is_missing_is_said_to_be_so(workers: list["subprocess.Popen[str]"]) -> None:
    members = [process for worker in workers[:1] if (process := read_process(worker.pid))]
    (difference,) = prove({"NCCL_NTHREADS": "512"}, members).differences
    assert difference.found is None
    assert str(difference).endswith("does not have it")


def test_without_a_profile_there_is_nothing_to_say(workers: list["subprocess.Popen[str]"]) -> None:
    proof = prove({}, [process for worker in workers if (process := read_process(worker.pid))])
    assert (proof.proven, proof.differences, proof.unreadable, proof.lines()) == ([], [], [], [])
