"""Servers begin, are found again and end as asked; whatever ends, no process is left. The toy engine takes SGLang's place."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

import eval.launcher
from eval.launcher import serving, wait
from eval.processes import is_alive
from eval.starts import HISTORY, read_end, read_start
from eyas.errors import EyasError
from eyas.files import write_json
from tests.eval.toy_servers import LIMIT_S, ROOT, ToyRun, wait_for

DRAFTERS = {"starter": "hub:owner/starter"}


def gone(toy: ToyRun) -> None:
    """Nothing of the run's servers is left, within the time in which it must be."""
    wait_for(lambda: not toy.left(), LIMIT_S + 5)


def one_line(ended: "subprocess.CompletedProcess[str]", code: int = 1) -> str:
    """What a command said when it failed."""
    assert ended.returncode == code, ended.stdout + ended.stderr
    (line,) = [line for line in ended.stderr.splitlines() if line.startswith("eyas: ")]
    return line


def owner_of(toy: ToyRun, how: str) -> "subprocess.Popen[str]":
    """A process that holds a server of the run and says when it is up."""
    toy.config(how)
    script = (
        "import sys, time\nfrom pathlib import Path\nfrom eval.launcher import serving\nfrom eyas.config import load_config\n"
        f"with serving(load_config(Path({str(toy.path)!r})), {{}}, 'none'):\n    print('up', flush=True)\n    time.sleep(300)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    return process


class TestServing:
    """A server for the length of a block."""

    def test_it_is_up_in_the_block_and_gone_after_it(self, toy: ToyRun, capsys: pytest.CaptureFixture[str]) -> None:
        with serving(toy.config("ready"), DRAFTERS, "starter") as url:
            assert httpx.get(f"{url}/health_generate", trust_env=False).status_code == 200
            start = toy.start("starter")
            assert (start.url, start.kind, start.variant, start.owner) == (url, "sglang", "starter", os.getpid())
            assert "--speculative-draft-model-path" in start.command
            assert is_alive(start.session, start.session_began)
        assert toy.left() == []
        assert sorted(path.name for path in (toy.servers / "starter").iterdir()) == [
            "exit.json", "ready.json", "server.log", "start.json", "stop.json",
        ]  # fmt: skip
        assert read_end(toy.servers / "starter").signal == "SIGTERM"
        assert (toy.servers / HISTORY).exists()
        assert "NCCL_ALGO, PYTHONPATH, TOY: proven in 2 processes" in capsys.readouterr().err

    def test_children_that_do_not_listen_or_left_are_gone_too(self, toy: ToyRun, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(eval.launcher, "STOP_S", 0.5)
        with serving(toy.config("stubborn"), {}, "none"):
            assert len(toy.left()) == 5  # keeper, server, worker, and two that ignore SIGTERM
        assert toy.left() == []

    def test_an_error_in_the_block_tells_that_the_server_died(self, toy: ToyRun) -> None:
        told = r"closed the connection; the server died \(killed by SIGKILL\): .*; its log is .*/none/server\.log"

        def ask() -> None:
            os.kill(toy.start().pid, signal.SIGKILL)
            raise EyasError("closed the connection")

        with pytest.raises(EyasError, match=told), serving(toy.config("ready"), {}, "none"):
            ask()
        assert toy.left() == []

    def test_an_error_of_a_living_server_is_left_as_it_is(self, toy: ToyRun) -> None:
        with pytest.raises(EyasError, match=r"^bad answer$"), serving(toy.config("ready"), {}, "none"):
            raise EyasError("bad answer")
        assert toy.left() == []

    @pytest.mark.parametrize(
        ("how", "told"),
        [
            ("memory", r"while loading \(exit code 1\): RuntimeError: CUDA out of memory.*; likely cause: out of GPU memory: "),
            ("shard", r"\(exit code 1\): FileNotFoundError: .*00002-of-00002.*; likely cause: missing or broken file: "),
            ("port", r"\(exit code 1\): OSError: \[Errno 98\].*; likely cause: port taken: choose another engine.port"),
        ],
    )
    def test_a_server_that_dies_while_loading_is_an_error_with_its_cause(self, toy: ToyRun, how: str, told: str) -> None:
        with pytest.raises(EyasError, match=told), serving(toy.config(how), {}, "none"):
            pass
        assert toy.left() == []

    def test_a_flag_the_engine_does_not_know_is_a_bad_flag(self, toy: ToyRun, capsys: pytest.CaptureFixture[str]) -> None:
        told = r"\(exit code 2\): launch_server\.py: error: unrecognized arguments: --no-such-flag 1; likely cause: bad flag: "
        with pytest.raises(EyasError, match=told), serving(toy.config("ready", flags={"no-such-flag": 1}), {}, "none"):
            pass
        assert "  | launch_server.py: error: unrecognized arguments: --no-such-flag 1" in capsys.readouterr().err

    def test_a_server_without_sign_of_life_is_given_up_when_asked(self, toy: ToyRun) -> None:
        told = r"given up, engine.stuck_limit_s is 0.5: weights.*STUCK"
        with pytest.raises(EyasError, match=told), serving(toy.config("hang", stuck_limit_s=0.5), {}, "none"):
            pass
        assert toy.left() == []

    def test_a_killed_owner_leaves_nothing(self, toy: ToyRun) -> None:
        owner = owner_of(toy, "ready")
        owner.kill()
        owner.communicate()
        gone(toy)

    def test_what_a_killed_owner_and_a_killed_keeper_left_is_stopped_before_the_next_start(
        self, toy: ToyRun, capsys: pytest.CaptureFixture[str]
    ) -> None:
        owner = owner_of(toy, "ready")
        before = toy.start()
        os.kill(before.session, signal.SIGKILL)
        owner.kill()
        owner.communicate()
        assert before.alive()
        with serving(toy.config("ready"), {}, "none"):
            assert not before.alive()
        assert "server none was left over by a process that was killed: it is stopped first" in capsys.readouterr().err

    def test_a_run_has_one_server_at_a_time(self, toy: ToyRun) -> None:
        config = toy.config("ready")
        with serving(config, DRAFTERS, "none") as url:
            for variant in ("none", "starter"):
                told = rf"server none of this run lives, since 20.* on {url} \(process \d+\): `eyas wait` watches it, `eyas stop` ends it"
                with pytest.raises(EyasError, match=told), serving(config, DRAFTERS, variant):
                    pass
            assert httpx.get(f"{url}/health_generate", trust_env=False).status_code == 200

    def test_the_log_before_is_kept(self, toy: ToyRun) -> None:
        for _ in range(2):
            with serving(toy.config("ready"), {}, "none"):
                pass
        first, second = ((toy.servers / "none" / name).read_text() for name in ("server.log.1", "server.log"))
        assert "fired up" in first
        assert "fired up" in second

    def test_gpu_memory_is_seen_free_before_it_is_over(
        self, toy: ToyRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with serving(toy.config("ready"), {}, "none"):
            held, program = toy.folder / "held", toy.folder / "nvidia-smi"
            held.write_text(f"{toy.start().pid}, 70001\n")
            # in nvidia-smi's place: the first answer still shows the server
            program.write_text(f"#!/bin/sh\ncat {held}\n: > {held}\n")
            program.chmod(0o755)
            monkeypatch.setenv("PATH", f"{toy.folder}{os.pathsep}{os.environ['PATH']}")
        assert held.read_text() == ""
        held.write_text(f"{os.getpid()}, 70001\n")
        with serving(toy.config("ready"), {}, "none"):
            pass
        assert re.search(rf"before the start: process {os.getpid()} \(.*python.*\) holds 70001 MiB", capsys.readouterr().err)

    def test_a_container_gets_its_environment_and_is_ended_though_it_left_the_session(
        self, toy: ToyRun, capsys: pytest.CaptureFixture[str]
    ) -> None:
        python3 = toy.folder / "python3"
        python3.symlink_to(sys.executable)
        variables = {"PATH": f"{toy.folder}{os.pathsep}{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
        # setsid stands in for a container's runtime: what it starts is in no session of ours
        config = toy.config("ready", variables, container=["setsid", "--wait"])
        with serving(config, {}, "none"):
            start = toy.start()
            assert start.command[:3] == ["setsid", "--wait", "env"]
            assert len([pid for pid in toy.left() if os.getsid(pid) != start.session]) == 2
        assert toy.left() == []
        assert "proven in 2 processes" in capsys.readouterr().err


class TestBefore:
    """What is refused before anything is started."""

    @pytest.fixture(autouse=True)
    def _nothing_started(self, toy: ToyRun):
        yield
        assert not list(toy.servers.glob("*/start.json"))

    def test_a_missing_shard_is_named(self, toy: ToyRun) -> None:
        write_json(toy.target / "model.safetensors.index.json", {"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}})
        with (
            pytest.raises(EyasError, match=r"target lacks 1 of its 2 shards, the first is model-2\.safetensors"),
            serving(toy.config("ready"), {}, "none"),
        ):
            pass

    @pytest.mark.parametrize(
        ("engine", "told"),
        [
            ({"python": "/nowhere/python"}, "engine.python: there is no program /nowhere/python"),
            ({"container": ["no-such-docker", "run"]}, "engine.container: there is no program no-such-docker"),
            ({"flags": {"port": 1}}, "eyas sets port itself"),
            ({"environment": "/nowhere.yaml"}, "engine.environment: /nowhere.yaml does not exist"),
        ],
    )
    def test_what_the_engine_section_gets_wrong(self, toy: ToyRun, engine: dict[str, object], told: str) -> None:
        with pytest.raises(EyasError, match=told), serving(toy.config("ready", **engine), {}, "none"):
            pass

    def test_folders_that_are_not_there(self, toy: ToyRun) -> None:
        config = toy.config("ready")
        cases = {
            "drafter folder /nowhere/x does not exist$": {"d": "/nowhere/x"},
            r"drafter folder .*/out/export does not exist: run `eyas export` first": {"d": str(toy.folder / "out" / "export")},
            "no drafter 'd' in this run; there are none, other": {"other": "x/y"},
        }
        for told, drafters in cases.items():
            with pytest.raises(EyasError, match=told), serving(config, drafters, "d"):
                pass
        shutil.rmtree(toy.target)
        with pytest.raises(EyasError, match=r"target\.model: folder .*/target does not exist"), serving(config, {}, "none"):
            pass

    def test_a_drafter_shorter_than_the_context(self, toy: ToyRun) -> None:
        drafter = toy.folder / "drafter"
        drafter.mkdir()
        write_json(drafter / "config.json", {"max_position_embeddings": 2048})
        (drafter / "model.safetensors").write_bytes(b"")
        told = "has max_position_embeddings 2048, engine.context is 4096"
        with pytest.raises(EyasError, match=told), serving(toy.config("ready"), {"d": str(drafter)}, "d"):
            pass

    def test_a_taken_port_is_named_with_who_has_it(self, toy: ToyRun) -> None:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            port = taken.getsockname()[1]
            told = rf"cannot listen on 127.0.0.1:{port}: Address already in use by process {os.getpid()} \("
            with pytest.raises(EyasError, match=told), serving(toy.config("ready", port=port), {}, "none"):
                pass

    def test_one_variant_must_be_named(self, toy: ToyRun) -> None:
        with pytest.raises(ValueError, match="sglang serves one variant"), serving(toy.config("ready"), {}):
            pass


class TestCommands:
    """`eyas serve`, `eyas wait` and `eyas stop` from several terminals."""

    def test_a_server_outlives_its_killed_watcher_is_found_again_and_stopped(self, toy: ToyRun) -> None:
        toy.config("slow")
        watcher = toy.background("serve", "--variant", "none")
        start = toy.start()
        watcher.kill()
        watcher.communicate()
        toy_again = toy.background("wait")
        assert "lives, since" in one_line(toy.eyas("serve", "--variant", "none"))
        assert start.alive()
        toy_again.send_signal(signal.SIGINT)
        assert toy_again.wait(LIMIT_S) == 130
        assert start.alive()
        stopped = toy.eyas("stop")
        assert (stopped.returncode, stopped.stdout) == (0, "server none has ended\n")
        assert toy.left() == []
        assert toy.eyas("stop").stdout == "no server of this run was running\n"
        assert "the server was stopped on request (killed by SIGTERM)" in one_line(toy.eyas("wait"))

    def test_a_detached_start_is_waited_for(self, toy: ToyRun) -> None:
        toy.config("ready")
        began = toy.eyas("serve", "--variant", "none", "--detach")
        start = toy.start()
        assert began.stdout == f"server none begins on {start.url} (process {start.pid}); `eyas wait` watches it, `eyas stop` ends it\n"
        ready = toy.eyas("wait")
        assert (ready.returncode, ready.stdout) == (0, f"{start.url}\n")
        assert httpx.get(f"{start.url}/health_generate", trust_env=False).status_code == 200
        assert toy.eyas("wait", "--variant", "none").stdout == f"{start.url}\n"

    def test_an_interrupt_stops_the_server_or_detaches_as_asked(self, toy: ToyRun) -> None:
        toy.config("ready")
        for option, number, alive in (("stop", signal.SIGTERM, False), ("detach", signal.SIGINT, True)):
            command = toy.background("serve", "--variant", "none", "--on-interrupt", option)
            assert command.stdout is not None
            said = ""
            while not said.startswith("serving "):
                said = command.stdout.readline()
                assert said
            start = toy.start()
            assert said == f"serving {toy.target} on {start.url} with no drafter\n"
            command.send_signal(number)
            assert command.wait(LIMIT_S) == 0
            assert start.alive() == alive
            assert bool(toy.left()) == alive

    def test_an_interrupt_before_it_is_ready_has_its_own_exit_code(self, toy: ToyRun) -> None:
        toy.config("slow")
        command = toy.background("serve", "--variant", "none")
        toy.start()
        command.send_signal(signal.SIGINT)
        said, _ = command.communicate(timeout=LIMIT_S)
        assert command.returncode == 130, said
        assert toy.left() == []

    def test_a_server_that_dies_later_is_an_error(self, toy: ToyRun) -> None:
        toy.config("ready")
        command = toy.background("serve", "--variant", "none")
        assert command.stdout is not None
        while not command.stdout.readline().startswith("serving "):
            pass
        os.kill(toy.start().pid, signal.SIGKILL)
        said, _ = command.communicate(timeout=LIMIT_S)
        assert command.returncode == 1
        assert "eyas: the server died (killed by SIGKILL)" in said
        assert toy.left() == []

    def test_waiting_for_nothing_is_an_error(self, toy: ToyRun) -> None:
        toy.config("ready")
        assert "no server of this run was ever started" in one_line(toy.eyas("wait"))
        with pytest.raises(EyasError, match="no server other of this run"):
            wait(toy.config("ready"), "other")

    def test_a_dry_run_prints_and_starts_nothing(self, toy: ToyRun) -> None:
        toy.config("ready")
        printed = toy.eyas("serve", "--variant", "starter", "--port", "31000", "--dry-run").stdout
        assert "NCCL_ALGO=Ring" in printed
        assert "  --port 31000 \\\n" in printed
        assert "  --speculative-draft-model-path owner/starter \\\n" in printed
        assert not toy.servers.exists()


def test_a_record_of_another_version_is_said_to_be_so(toy: ToyRun) -> None:
    folder = toy.servers / "none"
    folder.mkdir(parents=True)
    write_json(folder / "start.json", {"new": 1})
    with pytest.raises(EyasError, match=r"start\.json was written by another version of eyas"):
        wait(toy.config("ready"), None)
    (folder / "start.json").unlink()


def test_an_interrupt_while_it_is_being_started_leaves_nothing(toy: ToyRun, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(folder: Path) -> None:
        wait_for(lambda: read_start(folder))
        raise KeyboardInterrupt

    config = toy.config("ready")
    monkeypatch.setattr("eval.launcher.read_start", interrupt)
    with pytest.raises(KeyboardInterrupt), serving(config, {}, "none"):
        pass
    assert toy.left() == []


def test_an_output_that_cannot_be_written_is_named(toy: ToyRun) -> None:
    (toy.folder / "out").write_text("in the way")
    with pytest.raises(EyasError, match=r"cannot write .*/out/servers/none: Not a directory"), serving(toy.config("ready"), {}, "none"):
        pass


def test_a_server_that_cannot_be_kept_is_not_started(toy: ToyRun, monkeypatch: pytest.MonkeyPatch) -> None:
    config = toy.config("ready", python=sys.executable)
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    with pytest.raises(EyasError, match="cannot start the server: its keeper died"), serving(config, {}, "none"):
        pass
    assert toy.left() == []
