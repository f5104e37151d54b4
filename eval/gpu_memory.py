"""GPU memory as nvidia-smi tells it: whether it moves while a server loads, and whether it is free again after a server ended.

Nothing is known where there is no nvidia-smi, or where it does not answer.
"""

import shutil
import subprocess
import time
from collections.abc import Iterable

from eyas.errors import EyasError

ANSWER_S = 10.0
FREE_S = 60.0
_LOOK_S = 0.5


def memory_in_use() -> int | None:
    """MiB in use on all GPUs together."""
    rows = _ask("--query-gpu=memory.used")
    return None if rows is None else sum(_number(row[0]) for row in rows)


def holders() -> dict[int, int]:
    """Pid -> MiB of each process that holds GPU memory. Inside a container nvidia-smi may see none."""
    found: dict[int, int] = {}
    for row in _ask("--query-compute-apps=pid,used_memory") or []:
        if len(row) == 2 and row[0].isdigit():  # else a remark
            found[int(row[0])] = found.get(int(row[0]), 0) + _number(row[1])
    return found


def wait_until_free(pids: Iterable[int], limit_s: float = FREE_S) -> None:
    """Return when none of ``pids`` holds GPU memory any more. Raises EyasError, naming them, when that takes longer than ``limit_s``."""
    ended, deadline = set(pids), time.monotonic() + limit_s
    while held := {pid: used for pid, used in holders().items() if pid in ended}:
        if time.monotonic() > deadline:
            told = ", ".join(f"process {pid} {used} MiB" for pid, used in held.items())
            raise EyasError(f"the server has ended, but nvidia-smi still shows its GPU memory: {told}")
        time.sleep(_LOOK_S)


def _ask(query: str) -> list[list[str]] | None:
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    try:
        answer = subprocess.run(
            [program, query, "--format=csv,noheader,nounits"], capture_output=True, text=True, timeout=ANSWER_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return [[word.strip() for word in line.split(",")] for line in answer.stdout.splitlines() if line.strip()]


def _number(text: str) -> int:
    return int(text) if text.isdigit() else 0  # "[N/A]" on some boards
