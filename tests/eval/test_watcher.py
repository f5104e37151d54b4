"""A start is seen for what it is: real processes that load, compute in silence, hang, are stopped, or die."""

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from eval.launcher import serve
from eval.starts import HISTORY, Start
from eval.watcher import QUIET_S, Sight, Watch
from tests.eval.toy_servers import LIMIT_S, ToyRun, wait_for
from tests.http_server import running


@contextmanager
def watched(toy: ToyRun, how: str) -> Iterator[tuple[Watch, Start]]:
    """A toy that was started and is being watched."""
    serve(toy.config(how), {}, "none", None, detach=True, stop_on_interrupt=True)
    start = toy.start()
    with Watch(toy.servers / "none", start) as watch:
        yield watch, start


def until(watch: Watch, fact: Callable[[Sight], bool], limit_s: float = LIMIT_S) -> Sight:
    """Look until a sight is as wanted."""
    return wait_for(lambda: sight if fact(sight := watch.look()) else None, limit_s)


def loading(watch: Watch) -> Sight:
    """Look until its weights are being loaded."""
    return until(watch, lambda sight: sight.phase == "weights", 30.0)


def test_weights_are_counted(toy: ToyRun) -> None:
    with watched(toy, "slow") as (watch, _):
        sight = until(watch, lambda sight: (sight.done or 0) >= 2, 30.0)
    assert (sight.state, sight.phase, sight.total) == ("loading", "weights", 30)
    assert (sight.left_s, sight.share) == (None, None)
    assert sight.line().startswith(f"weights {sight.done} of 30, 0:")


def test_earlier_starts_tell_how_long_it_still_takes(toy: ToyRun) -> None:
    toy.servers.mkdir(parents=True)
    phases = {"begin": 1.0, "process groups": 0.0, "weights": 300.0, "memory pool": 10.0, "warm-up": 20.0, "first token": 1.0}
    row = {"engine": "sglang", "model": str(toy.target), "variant": "none", "begun_at": 0.0, "phases": phases}
    longer = {"phases": phases | {"weights": 5000.0}}
    others = [row | longer | {"variant": "starter"}, row | longer | {"model": "another"}]
    (toy.servers / HISTORY).write_text("".join(json.dumps(line) + "\n" for line in (row, *others)))
    with watched(toy, "hang") as (watch, _):
        sight = loading(watch)
    assert sight.left_s == pytest.approx(331.0, abs=5.0)
    assert sight.share == pytest.approx(sight.elapsed_s / (sight.elapsed_s + sight.left_s))
    assert ", about 0:05:" in sight.line()


def test_silent_work_is_alive_and_never_stuck(toy: ToyRun) -> None:
    with watched(toy, "spin") as (watch, _):
        loading(watch)
        silent = until(watch, lambda sight: sight.state == "silent")
        assert "CPU" in silent.note
        assert "silent for" in silent.line()
        end = time.monotonic() + QUIET_S
        while time.monotonic() < end:
            sight = watch.look()
            assert sight.state == "silent", sight.line()
            time.sleep(0.2)
        assert sight.silent_s > silent.silent_s


def test_a_hanging_server_is_stuck(toy: ToyRun) -> None:
    with watched(toy, "hang") as (watch, _):
        loading(watch)
        stuck = until(watch, lambda sight: sight.state == "stuck")
    assert "no output, no CPU, no IO" in stuck.note
    assert "STUCK" in stuck.line()


def test_gpu_memory_that_changes_is_a_sign_of_life(toy: ToyRun, monkeypatch: pytest.MonkeyPatch) -> None:
    program, count = toy.folder / "nvidia-smi", toy.folder / "count"
    # in nvidia-smi's place: 100 MiB more at every look
    program.write_text(f"#!/bin/sh\necho x >> {count}\nexpr $(wc -l < {count}) '*' 100\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{toy.folder}{os.pathsep}{os.environ['PATH']}")
    with watched(toy, "hang") as (watch, _):
        loading(watch)
        silent = until(watch, lambda sight: sight.state == "silent")
        assert "GPU memory +" in silent.note
        program.write_text("#!/bin/sh\necho 70000\n")
        stuck = until(watch, lambda sight: sight.state == "stuck")
    assert "no GPU memory that changes" in stuck.note


def test_a_stopped_server_is_stuck_and_named_and_goes_on_when_it_is_let(toy: ToyRun) -> None:
    with watched(toy, "slow") as (watch, start):
        loading(watch)
        os.kill(start.pid, signal.SIGSTOP)
        stuck = until(watch, lambda sight: sight.state == "stuck")
        assert f"stopped by a signal: process {start.pid} (" in stuck.note
        assert f"`kill -CONT {start.pid}`" in stuck.note
        os.kill(start.pid, signal.SIGCONT)
        assert until(watch, lambda sight: sight.state == "loading").note == ""


def test_a_server_stopped_with_all_its_workers_is_stuck_at_once(toy: ToyRun) -> None:
    with watched(toy, "slow") as (watch, start):
        loading(watch)
        for process in start.family().living():
            os.kill(process.pid, signal.SIGSTOP)
        until(watch, lambda sight: sight.state == "stuck", QUIET_S)


def test_a_killed_server_is_dead_and_nothing_is_left(toy: ToyRun) -> None:
    with watched(toy, "slow") as (watch, start):
        loading(watch)
        os.kill(start.pid, signal.SIGKILL)
        dead = until(watch, lambda sight: sight.state == "dead")
    assert dead.note.startswith("the server died while loading (killed by SIGKILL): ")
    assert "likely cause: killed from outside: somebody sent SIGKILL" in dead.note
    assert dead.note.endswith(f"its log is {toy.servers / 'none' / 'server.log'}")
    wait_for(lambda: not toy.left(), LIMIT_S)


def test_a_server_killed_with_its_keeper_is_dead_too(toy: ToyRun) -> None:
    with watched(toy, "slow") as (watch, start):
        loading(watch)
        os.kill(start.session, signal.SIGKILL)
        assert watch.look().state == "loading"  # it does not need its keeper
        for process in start.family().living():
            os.kill(process.pid, signal.SIGKILL)
        dead = until(watch, lambda sight: sight.state == "dead")
    assert "(no exit code, its keeper was killed too)" in dead.note


def test_a_generated_token_is_ready_and_the_environment_is_proven(toy: ToyRun) -> None:
    with watched(toy, "ready") as (watch, start):
        until(watch, lambda sight: sight.state == "ready", 30.0)
        assert watch.proof is not None
        assert sorted(watch.proof.proven) == sorted(process.pid for process in start.family().living())
        assert len(watch.proof.proven) == 2
        assert watch.proof.differences == []
        os.kill(start.pid, signal.SIGKILL)
        assert until(watch, lambda sight: sight.state == "dead").note.startswith("the server died (killed by SIGKILL): ")


def test_a_variable_that_the_engine_overwrites_is_named(toy: ToyRun) -> None:
    with watched(toy, "overwrite") as (watch, start):
        until(watch, lambda sight: sight.state == "ready", 30.0)
        assert watch.proof is not None
        assert watch.proof.proven == [start.pid]  # what it changed in itself does not show
        (difference,) = watch.proof.differences
    assert (difference.variable, difference.wanted, difference.found) == ("NCCL_ALGO", "Ring", "Tree")
    assert difference.pid != start.pid


def test_whoever_comes_later_sees_the_same_and_writes_nothing_twice(toy: ToyRun) -> None:
    with watched(toy, "ready") as (watch, start):
        until(watch, lambda sight: sight.state == "ready", 30.0)
        history = (toy.servers / HISTORY).read_text()
        (row,) = [json.loads(line) for line in history.splitlines()]
        with Watch(toy.servers / "none", start) as again:
            until(again, lambda sight: sight.state == "ready")
        assert (toy.servers / HISTORY).read_text() == history
    assert (row["engine"], row["model"], row["variant"]) == ("sglang", str(toy.target), "none")
    assert list(row["phases"]) == ["begin", "process groups", "weights", "memory pool", "warm-up", "first token"]


class Stranger(BaseHTTPRequestHandler):
    """Answers everything."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *arguments: object) -> None:
        pass


def test_another_server_on_the_port_does_not_make_it_ready(toy: ToyRun) -> None:
    with watched(toy, "slow") as (watch, start), running(ThreadingHTTPServer(("127.0.0.1", start.port), Stranger)):
        sight = until(watch, lambda sight: "none of this server's" in sight.note)
    assert sight.state == "loading"
    assert f"{start.url} is answered by process {os.getpid()}" in sight.note


def test_a_line_tells_it_in_words() -> None:
    sight = Sight("silent", 63.0, "weights", 12, 64, 200.0, 0.24, 42.4, 1.0, "CPU 101%, IO 210.0 MB/s")
    assert sight.line() == ("weights 12 of 64, 0:01:03 so far, 24%, about 0:03:20 left; silent for 42 s but alive: CPU 101%, IO 210.0 MB/s")
    assert Sight("loading", 3.0, "begin", None, None, None, None, 0.0, 0.0, "").line() == "begin, 0:00:03 so far"
