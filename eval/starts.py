"""Starts of servers on disk: what was started, whether it became ready, how it ended, and how long earlier starts took.

    <output>/servers/<variant>/start.json     written by the keeper as the server begins
                               server.log     what the server prints
                               ready.json     once it has generated a token: seconds by phase, environments proven
                               stop.json      before it is stopped on request
                               exit.json      written by the keeper when the server has ended
    <output>/servers/history.jsonl            a row for every start that became ready

So anybody can attach to a start at any time, and learn how it ended, also when whoever started it was killed.
"""

import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import urlsplit

from eval.processes import Family, boot_id, is_alive
from eyas.errors import EyasError
from eyas.files import JsonlAppender, read_jsonl, read_object, write_json

EMBEDDED = "embedded"
"""Folder name of the embedded engine's server, which holds all drafters."""
HISTORY = "history.jsonl"
_RECENT = 5


@dataclass(frozen=True)
class Start:
    """A server that was started."""

    mark: str
    """Random; the server's processes carry it in their environment."""
    variant: str
    kind: str
    """Engine: embedded, sglang or vllm."""
    model: str
    command: list[str]
    environment: dict[str, str]
    """Variables set for the server on top of what eyas itself was started with."""
    proven: dict[str, str]
    """Those of them that every process of the server must have (the environment profile)."""
    url: str
    contained: bool
    """It runs in a container, where its processes and ports may be out of sight."""
    owner: int | None
    """Pid of the process whose end is the server's end; None for a server that stays."""
    owner_began: int
    oom_kills: int | None
    """The machine's count of processes ended for lack of memory, before."""
    begun_at: float
    """Seconds since the epoch."""
    session: int = 0
    """Pid of the keeper, which leads the server's session and process group."""
    session_began: int = 0
    """When the keeper began, in ticks since boot."""
    pid: int = 0
    """The server's main process."""
    pid_began: int = 0
    boot: str = ""

    @property
    def port(self) -> int:
        """Where it listens."""
        return urlsplit(self.url).port or 0

    def family(self) -> Family:
        """The server's processes."""
        return Family(self.session, self.session_began, self.mark)

    def alive(self) -> bool:
        """Whether anything of it lives on this machine, be it the keeper that is about to write down its end."""
        return self.boot == boot_id() and (self.family().alive() or is_alive(self.session, self.session_began))


@dataclass(frozen=True)
class End:
    """How a server's main process ended."""

    code: int | None
    """Exit code; None after a signal."""
    signal: str | None = None
    """Name of the signal that ended it."""
    error: str | None = None
    """Why it could not be started at all."""
    at: float = field(default_factory=time.time)


def read_start(folder: Path) -> Start | None:
    """The start recorded in ``folder``, or None. Raises EyasError when the file is none of ours."""
    return _read(folder / "start.json", Start)


def read_end(folder: Path) -> End | None:
    """How the server of ``folder`` ended, or None while it lives."""
    return _read(folder / "exit.json", End)


def write_start(folder: Path, start: Start) -> None:
    """Record a start."""
    write_json(folder / "start.json", asdict(start))


def write_end(folder: Path, end: End) -> None:
    """Record an end."""
    write_json(folder / "exit.json", asdict(end))


def note_stop(folder: Path) -> None:
    """Note that the end to come was asked for."""
    write_json(folder / "stop.json", {"at": time.time()})


def forget(folder: Path) -> None:
    """Make room for another start; the log of this one is kept as ``server.log.1``."""
    for name in ("start.json", "ready.json", "stop.json", "exit.json"):
        (folder / name).unlink(missing_ok=True)
    if (folder / "server.log").exists():
        (folder / "server.log").replace(folder / "server.log.1")


def _read(path: Path, kind: type) -> Any:
    if not path.exists():
        return None
    try:
        return kind(**read_object(path))
    except TypeError:
        raise EyasError(f"{path} was written by another version of eyas: end its server and remove the file") from None


def recorded(servers: Path) -> dict[str, Start]:
    """Every start recorded in a run's folder ``servers``: name of its folder -> the latest."""
    folders = sorted(path.parent for path in servers.glob("*/start.json"))
    starts = {folder.name: read_start(folder) for folder in folders}
    return {name: start for name, start in starts.items() if start is not None}


def record_ready(folder: Path, start: Start, phases: dict[str, float], proof: dict[str, Any]) -> None:
    """Note that a server became ready, once, whoever of several watchers sees it first.

    Args:
        folder: the start's.
        start: the start.
        phases: name -> seconds, in the order in which they came.
        proof: what became of the environment profile in the server's processes.
    """
    try:
        (folder / "ready.json").open("x").close()
    except FileExistsError:
        return
    write_json(folder / "ready.json", {"seconds": sum(phases.values()), "phases": phases, "environment": proof})
    with JsonlAppender(folder.parent / HISTORY) as history:
        history.append({"engine": start.kind, "model": start.model, "variant": start.variant, "begun_at": start.begun_at, "phases": phases})


def expected_phases(folder: Path, start: Start) -> dict[str, float]:
    """Seconds by phase that a start like this one took before: medians of the latest, the same variant's if there are any.

    Empty when this engine was never ready with this model in this run.
    """
    path = folder.parent / HISTORY
    rows = [row for _, row in read_jsonl(path)] if path.exists() else []
    rows = [row for row in rows if (row.get("engine"), row.get("model")) == (start.kind, start.model)]
    same = [row for row in rows if row.get("variant") == start.variant] or rows
    latest = [row["phases"] for row in same[-_RECENT:]]
    return {name: median(phases.get(name, 0.0) for phases in latest) for name in (latest[-1] if latest else {})}
