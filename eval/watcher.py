"""Watching a server start: where it is, whether it lives, how long it still takes, and why it died.

A look tells these states apart, each within ten seconds of the fact:

| state | what is seen |
|---|---|
| loading | it writes to its log |
| silent | nothing in the log for a while, but its processes use CPU, read or write, or its GPU memory changes |
| stuck | no log, no CPU, no IO, no GPU memory that changes; or all of its processes are stopped |
| dead | its main process has ended |
| ready | it has generated a token (that it lists its models proves nothing) |

There is no number of attempts after which a living server is given up; ``engine.stuck_limit_s`` gives up one that shows no sign of life.
"""

import re
import shutil
import socket
import threading
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal
from urllib.parse import urlsplit

from eval import gpu_memory
from eval.causes import exit_text, last_error, likely_cause
from eval.clients import Client
from eval.environment import Proof, prove
from eval.phases import Phases
from eval.processes import Activity, Process, activity, is_alive, listeners, oom_kills
from eval.starts import Start, expected_phases, read_end, record_ready
from eyas.errors import EyasError
from eyas.progress import Status, clock

State = Literal["loading", "silent", "stuck", "dead", "ready"]

LOOK_S = 0.2
QUIET_S = 5.0
"""Seconds without a line in the log from which a server counts as silent."""
_STILL_S = 4.0
"""Seconds without movement from which a silent server counts as stuck; movement itself is measured over ``_WINDOW_S``."""
_WINDOW_S = 2.0
_SHARE = 9.0
"""A look reads /proc for all processes of the machine; rest so many times as long."""
_CPU_MOVES = 0.01
"""Share of one core: a process that only waits uses less."""
_IO_MOVES = 1 << 16
_GPU_MOVES = 16
"""MiB."""
_TAIL = 400
_LAST_LINES = 12
_EXIT_S = 3.0
"""The keeper writes down an end at once; after this long there is no keeper."""
_PROBE_S = 60.0
_PROBE_AGAIN_S = 0.25
_GPU_EVERY_S = 2.0
# Our own asking must not count as the server's talking.
_ACCESS = re.compile(r'(?:[\[(][^\])]*[\])] )?INFO:\s+\S+ - "(?:GET|POST) ')


@dataclass(frozen=True)
class Sight:
    """What one look saw. Seconds are since the start unless named otherwise."""

    state: State
    elapsed_s: float
    phase: str
    done: int | None
    total: int | None
    left_s: float | None
    """How long it still takes, if earlier starts tell."""
    share: float | None
    silent_s: float
    """Seconds since the last line of the log."""
    still_s: float
    """Seconds since the last sign of life of any kind."""
    note: str

    def line(self) -> str:
        """For people."""
        counted = f"{self.phase} {self.done} of {self.total}" if self.total else self.phase
        told = f"{counted}, {clock(self.elapsed_s)} so far"
        if self.left_s is not None and self.share is not None:
            told += f", {self.share:.0%}, about {clock(self.left_s)} left"
        if self.state == "silent":
            told += f"; silent for {self.silent_s:.0f} s but alive"
        if self.state == "stuck":
            told += f"; STUCK, no sign of life for {self.still_s:.0f} s"
        return f"{told}: {self.note}" if self.note else told


@dataclass(frozen=True)
class _Sample:
    at: float
    activity: Activity
    gpu_mib: int | None
    pids: frozenset[int]


class Watch:
    """Eyes on one start. Look often (every ``LOOK_S``); close it, or use it as a context manager.

    Args:
        folder: where the start is recorded.
        start: the start.
    """

    def __init__(self, folder: Path, start: Start) -> None:
        self.start, self.log = start, folder / "server.log"
        self._folder = folder
        self._family = start.family()
        self._phases = Phases(start.kind, start.begun_at)
        self._expected = expected_phases(folder, start)
        self._tail: deque[str] = deque(maxlen=_TAIL)
        self._read, self._part = 0, ""
        self._heard, self._moved = self._last_words(), time.time()
        self._read_log(live=False)
        self._samples: deque[_Sample] = deque()
        self._probe = _Probe(start)
        self._gpu = _GpuMemory()
        self._gone_at: float | None = None
        self.was_ready = False
        self.proof: Proof | None = None

    def __enter__(self) -> "Watch":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Look no more; the server goes on."""
        self._probe.end()
        self._gpu.end()

    def look(self) -> Sight:
        """Look once."""
        now = time.time()
        self._read_log(live=True)
        living = self._family.living()
        if self._has_ended():
            return self._sight("dead", now, self.death())
        if not self.was_ready and (note := self._becomes_ready(living, now)):
            return self._sight("loading", now, note)
        speed = self._movement(living, now)
        halted = [process for process in living if process.stopped]
        if halted and len(halted) == len(living):
            return self._sight("stuck", now, _stopped(halted))
        if self.was_ready:
            return self._sight("ready", now, "")
        if now - self._heard < QUIET_S:
            return self._sight("loading", now, _stopped(halted))
        if now - self._moved < _STILL_S:
            return self._sight("silent", now, "; ".join(filter(None, (speed, _stopped(halted)))))
        return self._sight("stuck", now, "; ".join(filter(None, (_nothing(self._gpu.known), _stopped(halted) or _waiting(living)))))

    def last_lines(self) -> list[str]:
        """The end of the log."""
        return list(self._tail)[-_LAST_LINES:]

    def death(self) -> str:
        """How and probably why the server ended, in one line."""
        end, before, now = read_end(self._folder), self.start.oom_kills, oom_kills()
        if (self._folder / "stop.json").exists():
            return f"the server was stopped on request ({exit_text(end)}); its log is {self.log}"
        kills = None if before is None or now is None else now - before
        cause = likely_cause(end, self._tail, self._phases.name, kills)
        when = "" if self.was_ready or (self._folder / "ready.json").exists() else " while loading"
        told = f"the server died{when} ({exit_text(end)}): {last_error(self._tail) or 'it wrote nothing'}"
        return f"{told}; likely cause: {cause}; its log is {self.log}" if cause else f"{told}; its log is {self.log}"

    def _sight(self, state: State, now: float, note: str) -> Sight:
        elapsed, left = now - self.start.begun_at, None if state == "ready" else self._left(now)
        return Sight(
            state=state,
            elapsed_s=elapsed,
            phase=self._phases.name,
            done=self._phases.done,
            total=self._phases.total,
            left_s=left,
            share=None if left is None else elapsed / max(elapsed + left, 1e-9),
            silent_s=now - self._heard,
            still_s=now - max(self._heard, self._moved),
            note=note,
        )

    def _left(self, now: float) -> float | None:
        """Seconds to go: what this phase and those behind it took before, this one by its own count where it counts."""
        phase, names = self._phases, list(self._expected)
        if phase.name not in names:
            return None
        spent = now - phase.since
        if phase.done and phase.total:
            here = spent * (phase.total - phase.done) / phase.done
        else:
            here = max(0.0, self._expected[phase.name] - phase.seconds(now)[phase.name])
        return here + sum(self._expected[name] for name in names[names.index(phase.name) + 1 :])

    def _last_words(self) -> float:
        try:
            return self.log.stat().st_mtime
        except OSError:
            return self.start.begun_at

    def _read_log(self, live: bool) -> None:
        try:
            with self.log.open("rb") as file:
                file.seek(self._read)
                data = file.read()
        except OSError:
            return
        self._read += len(data)
        *lines, self._part = re.split(r"[\r\n]+", self._part + data.decode(errors="replace"))  # bars return to the line's beginning
        for line in filter(str.strip, lines):
            self._tail.append(line)
        for line in [*lines, self._part]:
            self._phases.read(line, time.time() if live else None)
        if live and any(line.strip() and not _ACCESS.match(line) for line in [*lines, self._part if data else ""]):
            self._heard = time.time()

    def _has_ended(self) -> bool:
        """The end of the main process is written down, or it is gone and nobody is left to do so."""
        if read_end(self._folder) is not None:
            return True
        if is_alive(self.start.pid, self.start.pid_began):
            return False
        self._gone_at = self._gone_at or time.monotonic()
        return not is_alive(self.start.session, self.start.session_began) and time.monotonic() - self._gone_at > _EXIT_S

    def _becomes_ready(self, living: list[Process], now: float) -> str:
        """Note the first token, and prove the environment. Returns what speaks against a token that came."""
        if not self._probe.answered:
            return ""
        others = listeners(self.start.port) if not self.start.contained else set()
        if others and not others & {process.pid for process in living}:
            return f"{self.start.url} is answered by process {min(others)}, which is none of this server's"
        self.was_ready = True
        # A container's processes are in no session of ours; what is in it is the command that runs the container.
        inside = [process for process in living if not self.start.contained or process.session != self.start.session]
        self.proof = prove(self.start.proven, inside)
        record_ready(self._folder, self.start, self._phases.seconds(now), self.proof.record())
        return ""

    def _movement(self, living: list[Process], now: float) -> str:
        """What its processes have done within ``_WINDOW_S``, in words; notes when they last did anything."""
        pids = frozenset(process.pid for process in living)
        self._samples.append(_Sample(now, activity(living), self._gpu.used, pids))
        while len(self._samples) > 2 and now - self._samples[1].at >= _WINDOW_S:
            self._samples.popleft()
        then, here = self._samples[0], self._samples[-1]
        seconds = max(here.at - then.at, LOOK_S)
        cpu, io = abs(here.activity.cpu_s - then.activity.cpu_s) / seconds, abs(here.activity.io_bytes - then.activity.io_bytes)
        gpu = 0 if here.gpu_mib is None or then.gpu_mib is None else here.gpu_mib - then.gpu_mib
        if cpu >= _CPU_MOVES or io >= _IO_MOVES or abs(gpu) >= _GPU_MOVES or here.pids != then.pids:
            self._moved = now
        told = [f"CPU {cpu:.0%}", f"IO {io / seconds / 1e6:.1f} MB/s", *([f"GPU memory {gpu:+d} MiB"] if gpu else [])]
        return ", ".join(told)


def wait_until_ready(watch: Watch, status: Status, name: str, stuck_limit_s: float | None) -> Sight:
    """Look and tell until the server is ready.

    Raises EyasError when it dies, with the likely cause, or shows no sign of life for ``stuck_limit_s``. Ending it is the caller's.
    """
    while True:
        before = time.monotonic()
        sight = watch.look()
        if sight.state == "ready":
            return sight
        if sight.state == "dead":
            for line in watch.last_lines():
                status.print(f"  | {line}")
            raise EyasError(sight.note)
        status.show(f"{name}: {sight.line()}", f"{sight.phase} {sight.state == 'stuck'}")
        if stuck_limit_s is not None and sight.state == "stuck" and sight.still_s > stuck_limit_s:
            raise EyasError(f"the server is given up, engine.stuck_limit_s is {stuck_limit_s:g}: {sight.line()}; its log is {watch.log}")
        time.sleep(max(LOOK_S, _SHARE * (time.monotonic() - before)))


def _stopped(processes: list[Process]) -> str:
    if not processes:
        return ""
    named = ", ".join(f"{process.pid} ({process.name})" for process in processes)
    pids = " ".join(str(process.pid) for process in processes)
    return f"stopped by a signal: process {named}; `kill -CONT {pids}` lets it go on"


def _waiting(processes: list[Process]) -> str:
    waiting = [f"{process.pid} ({process.name})" for process in processes if process.state == "D"]
    return f"process {', '.join(waiting)} waits for a disk or a device" if waiting else ""


def _nothing(gpu_known: bool) -> str:
    return "no output, no CPU, no IO, no GPU memory that changes" if gpu_known else "no output, no CPU, no IO"


class _Probe:
    """Asks for a token from a thread of its own: an answer can take its time."""

    def __init__(self, start: Start) -> None:
        self.answered = False
        self._start = start
        self._over = threading.Event()
        threading.Thread(target=self._run, name="probe", daemon=True).start()

    def end(self) -> None:
        self._over.set()

    def _run(self) -> None:
        while not self._over.is_set():
            try:
                _generate_one(self._start)
            except (EyasError, OSError):
                self._over.wait(_PROBE_AGAIN_S)
            else:
                self.answered = True
                return


def _generate_one(start: Start) -> None:
    host = urlsplit(start.url).hostname or ""
    socket.create_connection((host, start.port), timeout=5.0).close()  # cheap, and fails most of the time
    if start.kind == "vllm":
        from eval.client_vllm import VllmClient

        with VllmClient(start.url, _PROBE_S) as vllm:
            vllm.ready()
    else:
        with Client(start.url, _PROBE_S) as client:
            client.ready()


class _GpuMemory:
    """Samples the GPU memory in use from a thread of its own: nvidia-smi takes a second on a busy machine."""

    def __init__(self) -> None:
        self.used: int | None = None
        self.known = shutil.which("nvidia-smi") is not None
        self._over = threading.Event()
        if self.known:
            threading.Thread(target=self._run, name="gpu memory", daemon=True).start()

    def end(self) -> None:
        self._over.set()

    def _run(self) -> None:
        while not self._over.is_set():
            self.used = gpu_memory.memory_in_use()
            self._over.wait(_GPU_EVERY_S)
