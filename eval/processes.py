"""The processes of a server, read from Linux's /proc: who belongs to it, whether they move, which environment they began with, who has a
port, and how all of them end.

A process belongs to a server when it is in the server's session, or when its environment holds the server's mark: a child that opened a
session of its own, or runs in a container, carries the mark along. Without /proc (macOS) ps tells who is in the server's process group.
"""

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from eyas.errors import EyasError

MARK = "EYAS_SERVER"
"""The environment variable that holds a server's mark."""

TICKS_A_SECOND = os.sysconf("SC_CLK_TCK")
STOP_S = 10.0
"""Seconds between the polite signal and the one that cannot be ignored."""
GONE_S = 30.0
"""Seconds that killed processes get: one that waits for a disk or a driver ends only when that answers."""
_LOOK_S = 0.05
_PROC = Path("/proc")
_LISTENING = "0A"


@dataclass(frozen=True)
class Process:
    """A process. ``started`` is in ticks since the machine's boot (0 without /proc): with the pid it names a process for good."""

    pid: int
    name: str
    state: str
    """R running, S sleeping, D waiting for a device, T stopped, Z dead and not yet collected by its parent."""
    parent: int
    session: int
    cpu_ticks: int
    started: int

    @property
    def stopped(self) -> bool:
        """Halted by SIGSTOP or a debugger."""
        return self.state in "Tt"

    @property
    def dead(self) -> bool:
        """Ended; only its entry is left."""
        return self.state in "ZX"


def processes() -> list[Process]:
    """Every process of the machine."""
    if not _PROC.is_dir():
        return _by_ps()
    found = []
    for entry in os.scandir(_PROC):
        if entry.name.isdigit() and (process := read_process(int(entry.name))):
            found.append(process)
    return found


def read_process(pid: int) -> Process | None:
    """One process, or None when it is not there."""
    if not _PROC.is_dir():
        return next((process for process in _by_ps() if process.pid == pid), None)
    try:
        text = (_PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    name, _, rest = text.partition("(")[2].rpartition(")")  # a name may hold brackets and spaces
    fields = rest.split()
    return Process(
        pid=pid,
        name=name,
        state=fields[0],
        parent=int(fields[1]),
        session=int(fields[3]),
        cpu_ticks=int(fields[11]) + int(fields[12]),
        started=int(fields[19]),
    )


def _by_ps() -> list[Process]:
    """Where there is no /proc. Not every ps tells sessions: the process group, which the keeper leads too, stands for it."""
    columns = "pid=,ppid=,pgid=,state=,time=,comm="
    lines = subprocess.run(["ps", "-A", "-o", columns], capture_output=True, text=True, check=True).stdout.splitlines()
    rows = [fields for line in lines if len(fields := line.split(maxsplit=5)) == 6]
    return [
        Process(int(pid), name, state[0], int(parent), int(group), round(_seconds(used) * TICKS_A_SECOND), 0)
        for pid, parent, group, state, used, name in rows
    ]


def _seconds(used: str) -> float:
    """CPU time as ps writes it: [[days-]hours:]minutes:seconds, with or without hundredths."""
    days, _, clock = used.rpartition("-")
    seconds = 0.0
    for part in clock.split(":"):
        seconds = 60 * seconds + float(part)
    return seconds + 86400 * int(days or 0)


@dataclass(frozen=True)
class Activity:
    """What a server's processes have used so far, summed up."""

    cpu_s: float
    io_bytes: int
    """Bytes through read and write calls, and bytes that came from or went to a disk (memory-mapped weights are among these)."""


class Family:
    """All processes of one server, the keeper that leads their session aside.

    Args:
        session: the session's id, which is its keeper's pid.
        began: when the keeper began, in ticks since boot. It tells the session from a later one of the same number.
        mark: the server's value of the environment variable ``MARK``.
    """

    def __init__(self, session: int, began: int, mark: str) -> None:
        self.session, self.began = session, began
        self._wanted = f"{MARK}={mark}".encode()
        self._marked: dict[tuple[int, int], bool] = {}

    def members(self) -> list[Process]:
        """Those that live, and those dead that their parent has not yet collected."""
        everybody = processes()
        leader = next((process for process in everybody if process.pid == self.session), None)
        ours = leader is None or leader.started == self.began
        return [
            process
            for process in everybody
            if process.pid != self.session
            and process.started >= self.began
            and ((ours and process.session == self.session) or self._is_marked(process))
        ]

    def living(self) -> list[Process]:
        """Those that live."""
        return [process for process in self.members() if not process.dead]

    def alive(self) -> bool:
        """Whether anything of the server lives."""
        return bool(self.living())

    def _is_marked(self, process: Process) -> bool:
        key = (process.pid, process.started)
        if key not in self._marked:
            values = _environ(process.pid)
            if not values:  # just forked, gone, or somebody else's: ask again next time
                return False
            self._marked[key] = self._wanted in values
        return self._marked[key]

    def end(self, grace_s: float = STOP_S) -> None:
        """End every member: SIGTERM, and SIGKILL for what lives ``grace_s`` later; returns when all are gone.

        The keeper is no member and ends by itself once they are. Raises EyasError, naming them, when some cannot be ended.
        """
        start = time.monotonic()
        told: set[int] = set()
        while living := self.living():
            now = time.monotonic() - start
            if now > grace_s + GONE_S:
                names = ", ".join(f"{process.pid} ({process.name}, state {process.state})" for process in living)
                raise EyasError(f"cannot end process {names}: it waits for a device or a driver, or belongs to somebody else")
            for process in living:
                if now > grace_s:
                    _signal(process.pid, signal.SIGKILL)
                elif process.pid not in told:
                    told.add(process.pid)
                    _signal(process.pid, signal.SIGTERM)
                    _signal(process.pid, signal.SIGCONT)  # a stopped process hears nothing but SIGKILL
            time.sleep(_LOOK_S)


def activity(members: Iterable[Process]) -> Activity:
    """What ``members`` have used since each of them began."""
    members = list(members)
    return Activity(sum(process.cpu_ticks for process in members) / TICKS_A_SECOND, sum(_io_bytes(process.pid) for process in members))


def is_alive(pid: int, began: int) -> bool:
    """Whether the process ``pid`` that began at ``began`` lives."""
    process = read_process(pid)
    return process is not None and not process.dead and process.started == began


def began(pid: int) -> int:
    """When a process began, in ticks since boot; 0 when it is not there, and without /proc."""
    process = read_process(pid)
    return process.started if process else 0


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def _io_bytes(pid: int) -> int:
    try:
        lines = (_PROC / str(pid) / "io").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    values = dict(line.split(": ") for line in lines if ": " in line)
    return sum(int(values.get(name, 0)) for name in ("rchar", "wchar", "read_bytes", "write_bytes"))


def _environ(pid: int) -> list[bytes]:
    try:
        return [value for value in (_PROC / str(pid) / "environ").read_bytes().split(b"\0") if value]
    except OSError:
        return []


def environment_of(pid: int) -> dict[str, str]:
    """The environment a process was started with (/proc/PID/environ).

    What it sets in itself afterwards does not show there, what it hands to its children shows in theirs. Empty when it cannot be read:
    it is gone, or another user's, or has written its title over it (as the Python package setproctitle does, unless SPT_NOENV is set).
    """
    pairs = (value.decode(errors="replace").partition("=") for value in _environ(pid))
    return {name: value for name, equals, value in pairs if equals}


def command_of(pid: int) -> str:
    """A process's command line, shortened to what identifies it."""
    try:
        words = (_PROC / str(pid) / "cmdline").read_bytes().split(b"\0")
    except OSError:
        return "gone"
    text = " ".join(word.decode(errors="replace") for word in words if word)
    return text if len(text) <= 80 else text[:77] + "..."


def boot_id() -> str:
    """What tells this boot of this machine from every other; empty where the system does not say."""
    try:
        return (_PROC / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def oom_kills() -> int | None:
    """How many processes the kernel has ended for lack of memory since boot; None where it does not count them."""
    try:
        lines = (_PROC / "vmstat").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), None)


def free_port(host: str) -> int:
    """A port that nobody has at this moment."""
    with socket.socket(_family(host), socket.SOCK_STREAM) as listener:
        listener.bind((host, 0))
        return int(listener.getsockname()[1])


def require_free(host: str, port: int) -> None:
    """Raise EyasError when ``port`` cannot be listened on, naming who has it where the system tells."""
    try:
        with socket.socket(_family(host), socket.SOCK_STREAM) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, port))
    except (OSError, OverflowError) as error:
        holder = next((f" by process {pid} ({command_of(pid)})" for pid in sorted(listeners(port))), "")
        reason = getattr(error, "strerror", None) or error
        advice = "choose another engine.port, or 0 for a free one"
        raise EyasError(f"cannot listen on {host}:{port}: {reason}{holder}; {advice}") from None


def _family(host: str) -> int:
    try:
        return socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][0]
    except OSError as error:
        raise EyasError(f"engine.host {host}: {error.strerror or error}") from None


def listeners(port: int) -> set[int]:
    """Pids of the processes that listen on a TCP port, as far as they may be looked into."""
    sockets = {f"socket:[{inode}]" for inode in _listening_inodes(port)}
    return {process.pid for process in processes() if sockets and sockets & _open_files(process.pid)}


def _listening_inodes(port: int) -> set[str]:
    inodes = set()
    for table in ("tcp", "tcp6"):
        try:
            lines = (_PROC / "net" / table).read_text(encoding="ascii").splitlines()[1:]
        except OSError:
            continue
        for fields in map(str.split, lines):
            if fields[3] == _LISTENING and int(fields[1].rpartition(":")[2], 16) == port:
                inodes.add(fields[9])
    return inodes


def _open_files(pid: int) -> set[str]:
    folder = _PROC / str(pid) / "fd"
    found = set()
    with contextlib.suppress(OSError):
        for descriptor in os.listdir(folder):
            with contextlib.suppress(OSError):
                found.add(os.readlink(folder / descriptor))  # noqa: PTH115 - the link's text is the answer, no path
    return found
