"""Real processes: who belongs to a server, and how all of them end."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import eval.processes
from eval.processes import (
    MARK,
    Family,
    _seconds,
    activity,
    began,
    command_of,
    environment_of,
    free_port,
    is_alive,
    listeners,
    read_process,
    require_free,
)
from eyas.errors import EyasError
from tests.eval.toy_servers import wait_for

# Leads a session as a keeper does; its children: one ordinary, one deaf to SIGTERM, one deaf that left the session.
LEADER = """
import subprocess, sys
deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
plain = "import time; print('up', flush=True); time.sleep(600)"
for code, leaves in ((plain, False), (deaf, False), (deaf, True)):
    child = subprocess.Popen([sys.executable, "-I", "-S", "-c", code], stdout=subprocess.PIPE, start_new_session=leaves)
    child.stdout.readline()
    print(child.pid, flush=True)
for line in sys.stdin:
    pass
"""


class Started:
    """The leader, its children and the family that is to hold them."""

    def __init__(self) -> None:
        self.leader = subprocess.Popen(
            [sys.executable, "-c", LEADER],
            env=os.environ | {MARK: "m1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self.leader.stdout is not None
        self.plain, self.deaf, self.away = (int(self.leader.stdout.readline()) for _ in range(3))
        self.family = Family(self.leader.pid, began(self.leader.pid), "m1")

    @property
    def children(self) -> set[int]:
        return {self.plain, self.deaf, self.away}


@pytest.fixture
def started() -> Iterator[Started]:
    found = Started()
    yield found
    for pid in found.children:
        if (process := read_process(pid)) and process.started >= found.family.began:
            os.kill(pid, signal.SIGKILL)
    found.leader.kill()
    found.leader.communicate()


def living(family: Family) -> set[int]:
    return {process.pid for process in family.living()}


def test_a_family_is_the_session_and_who_left_it_without_the_keeper(started: Started) -> None:
    assert living(started.family) == started.children


def test_a_later_session_of_the_same_number_is_not_taken_for_it(started: Started) -> None:
    other = Family(started.leader.pid, began(started.leader.pid) - 1, "m2")
    assert living(other) == set()
    assert not other.alive()


def test_those_that_do_not_listen_are_ended_too(started: Started) -> None:
    started.family.end(grace_s=0.3)
    assert not started.family.alive()
    assert all(process is None or process.dead for process in map(read_process, started.children))
    assert started.leader.poll() is None  # the keeper ends by itself


def test_those_that_listen_are_asked_first_even_when_they_are_stopped() -> None:
    told = "import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(7)); print('up', flush=True); signal.pause()"
    script = (
        f"import subprocess, sys; child = subprocess.Popen([sys.executable, '-c', {told!r}], stdout=subprocess.PIPE); "
        "child.stdout.readline(); print(child.pid, flush=True); print(child.wait(), flush=True)"
    )
    leader = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert leader.stdout is not None
    child = int(leader.stdout.readline())
    os.kill(child, signal.SIGSTOP)
    wait_for(lambda: (process := read_process(child)) is not None and process.stopped)
    Family(leader.pid, began(leader.pid), "none").end()
    assert leader.stdout.readline() == "7\n"
    leader.communicate()


def test_a_zombie_does_not_live(started: Started) -> None:
    os.kill(started.plain, signal.SIGKILL)
    wait_for(lambda: (process := read_process(started.plain)) is not None and process.dead)
    assert living(started.family) == started.children - {started.plain}
    assert {process.pid for process in started.family.members()} == started.children
    assert not is_alive(started.plain, began(started.plain))


def test_without_proc_the_process_group_is_found_and_ended(started: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eval.processes, "_PROC", Path("/nowhere"))
    family = Family(started.leader.pid, began(started.leader.pid), "m1")
    assert living(family) == {started.plain, started.deaf}  # who left it is out of sight
    me = read_process(os.getpid())
    assert me is not None
    assert (me.parent, me.session, me.dead) == (os.getppid(), os.getpgrp(), False)
    assert activity([me]).cpu_s >= 0.0
    family.end(grace_s=0.3)
    assert not family.alive()
    assert not is_alive(started.deaf, 0)
    assert is_alive(started.leader.pid, 0)


@pytest.mark.parametrize(("used", "seconds"), [("00:00:07", 7.0), ("1:02.50", 62.5), ("2-01:00:00", 176400.0), ("12:34:56", 45296.0)])
def test_the_time_that_ps_writes_is_read(used: str, seconds: float) -> None:
    assert _seconds(used) == seconds


def test_a_process_is_named_by_its_beginning_too() -> None:
    assert is_alive(os.getpid(), began(os.getpid()))
    assert not is_alive(os.getpid(), began(os.getpid()) - 1)


def test_work_shows_and_waiting_does_not() -> None:
    me = read_process(os.getpid())
    assert me is not None
    before = activity([me])
    with open(os.devnull, "wb") as sink:  # noqa: PTH123
        sink.write(bytes(1 << 20))
    after = activity([me])
    assert after.io_bytes - before.io_bytes >= 1 << 20


def test_the_environment_is_the_one_of_the_start() -> None:
    script = "import os; os.environ['A'] = 'later'; print('up', flush=True); input()"
    process = subprocess.Popen(
        [sys.executable, "-c", script], env={"A": "at start", "PATH": os.defpath}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    process.stdout.readline()
    assert environment_of(process.pid)["A"] == "at start"
    assert "os.environ" in command_of(process.pid)
    process.communicate("\n")


def test_a_taken_port_is_refused_with_who_has_it() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert listeners(port) == {os.getpid()}
        with pytest.raises(
            EyasError, match=rf"cannot listen on 127.0.0.1:{port}: Address already in use by process {os.getpid()} \(.*python"
        ):
            require_free("127.0.0.1", port)
    require_free("127.0.0.1", port)


def test_a_free_port_is_free() -> None:
    require_free("127.0.0.1", free_port("127.0.0.1"))


@pytest.mark.parametrize(("host", "port", "told"), [("256.1.1.1", 0, "engine.host 256.1.1.1"), ("127.0.0.1", 70000, "cannot listen on")])
def test_what_is_no_address_is_refused(host: str, port: int, told: str) -> None:
    with pytest.raises(EyasError, match=told):
        require_free(host, port)
