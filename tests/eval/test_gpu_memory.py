"""GPU memory as nvidia-smi tells it. A script takes nvidia-smi's place: its answers have the form of the real one's."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from eval.gpu_memory import holders, memory_in_use, wait_until_free
from eyas.errors import EyasError


@pytest.fixture
def nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Put a program of that name, which runs the given lines of shell, first on the path."""
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")

    def write(lines: str) -> None:
        program = tmp_path / "nvidia-smi"
        program.write_text(f"#!/bin/sh\n{lines}\n")
        program.chmod(0o755)

    return write


def test_memory_is_summed_over_gpus(nvidia_smi: Callable[[str], None]) -> None:
    nvidia_smi('[ "$1" = --query-gpu=memory.used ] && printf "70001\\n42\\n"')
    assert memory_in_use() == 70043


def test_a_process_is_summed_over_gpus(nvidia_smi: Callable[[str], None]) -> None:
    nvidia_smi('[ "$1" = --query-compute-apps=pid,used_memory ] && printf "11, 70001\\n11, 4\\n12, [N/A]\\nNo permission\\n[N/A], 5\\n"')
    assert holders() == {11: 70005, 12: 0}


def test_memory_is_waited_for(nvidia_smi: Callable[[str], None], tmp_path: Path) -> None:
    nvidia_smi(f"cat {tmp_path}/held; echo 99, 5; : > {tmp_path}/held")  # the second look finds it free
    (tmp_path / "held").write_text("11, 70001\n")
    wait_until_free([11, 12], limit_s=20)
    assert (tmp_path / "held").read_text() == ""


def test_memory_that_stays_is_an_error(nvidia_smi: Callable[[str], None]) -> None:
    nvidia_smi('printf "11, 70001\\n"')
    with pytest.raises(EyasError, match="still shows its GPU memory: process 11 70001 MiB"):
        wait_until_free([11], limit_s=0)


@pytest.mark.parametrize("answer", ["echo 'NVIDIA-SMI has failed'; exit 9", None])
def test_without_an_answer_nothing_is_known(nvidia_smi: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, answer: str | None) -> None:
    if answer:
        nvidia_smi(answer)
    else:
        monkeypatch.setenv("PATH", "")
    assert memory_in_use() is None
    assert holders() == {}
    wait_until_free([1])
