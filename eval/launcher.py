"""Starting and ending servers: the embedded engine, SGLang or vLLM, each by its own interpreter or container, one server a run at a time.

    with serving(config, drafters, variant) as url: ...      for the length of a block; however that ends, no process is left
    with capturing(config, flags, variables) as url: ...     the same, for a server that captures hidden states
    eyas serve / eyas wait / eyas stop                       a server that stays until it is stopped, from whichever terminal

Every server has a keeper (``eval.keeper``) that outlives whoever started or watches it. A server of ``serving`` ends with the process that
started it, also when that is killed: the keeper sees to it. A server of ``eyas serve`` does not: `eyas wait` finds it again.
"""

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from eval import gpu_memory
from eval.clients import BASELINE
from eval.command import JOB, Addition, Launch, is_loopback, launch, model_path
from eval.environment import profile
from eval.processes import MARK, STOP_S, Family, began, command_of, free_port, is_alive, listeners, oom_kills, require_free
from eval.starts import EMBEDDED, Start, forget, note_stop, read_end, read_start, recorded
from eval.watcher import LOOK_S, Watch, wait_until_ready
from eyas.config import Config, Flags
from eyas.errors import EyasError
from eyas.files import FileLock, read_object, write_json
from eyas.progress import Status
from eyas.weights import weight_files

CAPTURE = "capture"
"""Variant of a server without a drafter that captures hidden states."""
_SPAWN_S = 120.0
_CONTAINER_STOP_S = 60.0
"""A container's command passes the polite signal on; killed, it would leave the container behind."""
_AFTER_S = 1.0


@dataclass(frozen=True)
class _Running:
    """A server and the folder of its record; its keeper, if this process started it."""

    folder: Path
    start: Start
    keeper: "subprocess.Popen[bytes] | None" = None

    @property
    def name(self) -> str:
        return f"server {self.start.variant}"


@contextmanager
def serving(config: Config, drafters: dict[str, str], variant: str | None = None) -> Iterator[str]:
    """Run a server for the length of the block; yield its URL once it has generated a token.

    Args:
        config: engine and target sections decide.
        drafters: name -> folder or hub id.
        variant: SGLang and vLLM: "none" for the baseline, or the drafter to speculate with. The embedded engine serves all of them at once;
            there it is the one for requests that name none, by default the first.

    Raises EyasError, with the likely cause, when it cannot be started or dies, be it within the block. Its log is
    ``<output>/servers/<variant>/server.log``.
    """
    with _lent(config, _begin(config, drafters, variant, port=None, owned=True)) as url:
        yield url


@contextmanager
def capturing(config: Config, flags: Flags, environment: dict[str, str]) -> Iterator[str]:
    """As ``serving``, without a drafter and with more flags and variables: a server that captures hidden states. It is named "capture"."""
    with _lent(config, _begin(config, {}, CAPTURE, port=None, owned=True, addition=Addition(flags, environment))) as url:
        yield url


@contextmanager
def _lent(config: Config, running: _Running) -> Iterator[str]:
    """Wait until the server is ready, lend it to the block, end it."""
    try:
        with Status() as status, Watch(running.folder, running.start) as watch:
            wait_until_ready(watch, status, running.name, config.engine.stuck_limit_s)
            _tell_proof(status, watch)
        try:
            yield running.start.url
        except EyasError as error:
            if died := _death(running):
                raise EyasError(f"{error}; {died}") from error
            raise
    finally:
        _stop(running)


def serve(config: Config, drafters: dict[str, str], variant: str | None, port: int | None, detach: bool, stop_on_interrupt: bool) -> None:
    """Start a server that stays, and watch it until it ends or somebody interrupts.

    Args:
        config: engine and target sections decide.
        drafters: name -> folder or hub id.
        variant: as in ``serving``.
        port: instead of engine.port; 0 takes a free one.
        detach: return as soon as it is started.
        stop_on_interrupt: Ctrl-C or SIGTERM ends the server; else it goes on.

    Raises EyasError when it cannot be started, dies, or shows no sign of life for engine.stuck_limit_s; KeyboardInterrupt when it was
    interrupted and stopped before it was ready. A lost terminal or ``kill -9`` detaches.
    """
    running = _begin(config, drafters, variant, port, owned=False)
    start = running.start
    if detach:
        print(f"{running.name} begins on {start.url} (process {start.pid}); `eyas wait` watches it, `eyas stop` ends it")
        return
    ready = False
    try:
        with _as_interrupt(signal.SIGTERM), Status() as status, Watch(running.folder, start) as watch:
            wait_until_ready(watch, status, running.name, config.engine.stuck_limit_s)
            ready = True
            status.close()
            _tell_proof(status, watch)
            print(f"serving {config.target.model} on {start.url} with {_served(config, drafters, start.variant)}", flush=True)
            _stand_by(watch, status)
    except KeyboardInterrupt:
        if not stop_on_interrupt:
            print(f"{running.name} goes on on {start.url}; `eyas wait` watches it, `eyas stop` ends it", file=sys.stderr)
            return
        print(f"{running.name} is being stopped", file=sys.stderr)
        _stop(running)
        if not ready:
            raise KeyboardInterrupt("the server was stopped before it was ready") from None
    except EyasError:
        _stop(running)
        raise


def dry_run(config: Config, drafters: dict[str, str], variant: str | None, port: int | None) -> str:
    """What ``serve`` would run: environment and command to paste into a shell."""
    _, default, drafter = _names(config, drafters, variant)
    port = config.engine.port if port is None else port
    return launch(config, default, drafter, port or free_port(config.engine.host)).paste()


def wait(config: Config, variant: str | None) -> str:
    """Watch a server that was started earlier, by whomever, until it is ready; return its URL. An interrupt leaves it alone.

    Raises EyasError when there is none, it dies, or shows no sign of life for engine.stuck_limit_s; the server is not ended then.
    """
    starts = recorded(config.folder("servers"))
    alive = [name for name in starts if starts[name].alive()]
    latest = max(starts, key=lambda name: starts[name].begun_at, default=None)
    name = variant or (alive[0] if alive else latest)
    if name is None or name not in starts:
        raise EyasError(f"no server{f' {name}' if name else ''} of this run was ever started: `eyas serve` starts one")
    folder, start = config.folder("servers") / name, starts[name]
    with Status() as status, Watch(folder, start) as watch:
        if name not in alive:
            raise EyasError(watch.death() if read_end(folder) else f"server {name} is gone: `eyas serve` starts another")
        wait_until_ready(watch, status, f"server {start.variant}", config.engine.stuck_limit_s)
        _tell_proof(status, watch)
    return start.url


def stop(config: Config, variant: str | None) -> list[str]:
    """End this run's servers, or that of one variant, and return when their processes are gone and their GPU memory is free.

    Returns the names of those ended. Raises EyasError when something cannot be ended.
    """
    ended = []
    for name, start in recorded(config.folder("servers")).items():
        if variant in (None, name) and start.alive():
            _stop(_Running(config.folder("servers") / name, start))
            ended.append(name)
    return ended


def _begin(
    config: Config, drafters: dict[str, str], variant: str | None, port: int | None, owned: bool, addition: Addition | None = None
) -> _Running:
    """Check what can be checked, then start a server under a keeper."""
    name, default, drafter = (CAPTURE, CAPTURE, None) if addition else _names(config, drafters, variant)
    folder = config.folder("servers") / name
    port = config.engine.port if port is None else port
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise EyasError(f"cannot write {folder}: {error.strerror or error}") from error
    lock = FileLock(folder.parent / "lock", "another server of this run is being started at this moment")
    try:
        _require_alone(config)
        if port:
            require_free(config.engine.host, port)
        prepared = launch(config, default, drafter, port or free_port(config.engine.host), addition)
        _require_files(config, prepared, drafter)
        _tell_holders()
        if config.engine.kind == "embedded":
            _write_job(config, folder, drafters, default, prepared)
        return _spawn(config, folder, default, prepared, owned)
    finally:
        lock.release()


def _names(config: Config, drafters: dict[str, str], variant: str | None) -> tuple[str, str, str | None]:
    """Folder name, variant, and the drafter that the engine is started with."""
    if config.engine.kind == "embedded":
        return EMBEDDED, variant or next(iter(drafters), BASELINE), None
    if variant is None:
        raise ValueError(f"{config.engine.kind} serves one variant: name it")
    if variant != BASELINE and variant not in drafters:
        raise EyasError(f"no drafter {variant!r} in this run; there are {', '.join([BASELINE, *drafters])}")
    return variant, variant, drafters.get(variant)


def _require_alone(config: Config) -> None:
    """Two servers of a run would share GPUs and disturb each other's measurements."""
    for name, start in recorded(config.folder("servers")).items():
        if not start.alive():
            continue
        # The keeper ends a server with its owner; it may be about to, or may have been killed with it.
        if start.owner is not None and not is_alive(start.owner, start.owner_began):
            print(f"server {name} was left over by a process that was killed: it is stopped first", file=sys.stderr)
            _stop(_Running(config.folder("servers") / name, start))
            continue
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(start.begun_at))
        advice = "`eyas wait` watches it, `eyas stop` ends it"
        raise EyasError(f"server {name} of this run lives, since {since}, on {start.url} (process {start.pid}): {advice}")


def _require_files(config: Config, prepared: Launch, drafter: str | None) -> None:
    """What an engine would find out after minutes, or not at all: no such interpreter, no such folder, a shard that is missing."""
    program = prepared.words()[0]
    if shutil.which(program) is None:
        key = "engine.container" if prepared.container else "engine.python"
        raise EyasError(f"{key}: there is no program {program}")
    if prepared.container or config.engine.kind == "embedded":
        return  # a container sees other folders; the embedded server reads them at once, and says what it misses
    model = Path(model_path(config)).expanduser()
    if model.is_dir():
        _require_whole(model, "target")
    elif _is_path(str(model)):
        raise EyasError(f"target.model: folder {model} does not exist")
    if drafter is not None and not drafter.startswith("hub:"):
        folder = Path(drafter)
        if folder.is_dir():
            _require_whole(folder, "drafter")
            _require_positions(folder, config)
        elif _is_path(drafter) or folder == config.folder("export"):
            advice = ": run `eyas export` first" if folder == config.folder("export") else ""
            raise EyasError(f"drafter folder {folder} does not exist{advice}")


def _require_whole(folder: Path, what: str) -> None:
    if not (folder / "config.json").is_file():
        raise EyasError(f"{what} folder {folder} has no config.json")
    weight_files(folder)


def _require_positions(folder: Path, config: Config) -> None:
    """SGLang refuses a context beyond the drafter's positions, after the target is loaded."""
    positions = read_object(folder / "config.json").get("max_position_embeddings")
    if config.engine.kind == "sglang" and isinstance(positions, int) and positions < config.engine.context:
        told = f"has max_position_embeddings {positions}, engine.context is {config.engine.context}"
        raise EyasError(f"drafter {folder} {told}: `eyas export` raises the one, or lower the other")


def _is_path(name: str) -> bool:
    """Whether it can only be meant as a folder: a hub id has one slash and no leading dot or slash."""
    return name.startswith((".", "/", "~")) or name.count("/") != 1


def _tell_holders() -> None:
    """Whoever has GPU memory now may be why a server finds too little, minutes later."""
    for pid, used in gpu_memory.holders().items():
        print(f"before the start: process {pid} ({command_of(pid)}) holds {used} MiB of GPU memory", file=sys.stderr)


def _write_job(config: Config, folder: Path, drafters: dict[str, str], default: str, prepared: Launch) -> None:
    engine = config.engine.model_dump(mode="json") | {"port": int(prepared.url.rpartition(":")[2])}
    write_json(folder / JOB, {"config": config.model_dump(mode="json") | {"engine": engine}, "drafters": drafters, "default": default})


def _spawn(config: Config, folder: Path, variant: str, prepared: Launch, owned: bool) -> _Running:
    """Start the keeper and have it start the server; return when that is recorded."""
    if not is_loopback(config.engine.host):
        host = config.engine.host
        print(f"engine.host {host}: other machines can reach this server, and it asks nobody for a password", file=sys.stderr)
    mark = {MARK: secrets.token_hex(8)}
    start = Start(
        mark=mark[MARK],
        variant=variant,
        kind=prepared.kind,
        model=config.target.model,
        command=prepared.words(mark),
        environment=prepared.environment,
        proven={name: prepared.environment[name] for name in profile(config.engine.environment)},
        url=prepared.url,
        contained=bool(prepared.container),
        owner=os.getpid() if owned else None,
        owner_began=began(os.getpid()),
        oom_kills=oom_kills(),
        begun_at=time.time(),
    )
    log = folder / "server.log"
    try:
        forget(folder)
        with log.open("wb") as output:
            keeper = subprocess.Popen(
                [sys.executable, "-m", "eval.keeper"],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=os.environ | mark,
                start_new_session=True,
            )
    except OSError as error:
        raise EyasError(f"cannot start the server: {error.strerror or error}") from error
    try:
        return _Running(folder, _told(keeper, folder, start, owned), keeper)
    except BaseException:  # an interrupt, too, must leave nothing behind
        keeper.kill()
        Family(keeper.pid, 0, start.mark).end()
        keeper.wait()
        raise


def _told(keeper: "subprocess.Popen[bytes]", folder: Path, start: Start, owned: bool) -> Start:
    """Give the keeper its order and wait until it has recorded the start."""
    order = {"folder": str(folder), "start": asdict(start), "ends_with_owner": owned}
    assert keeper.stdin is not None
    try:
        keeper.stdin.write(json.dumps(order).encode() + b"\n")
        keeper.stdin.flush()
    except BrokenPipeError:
        pass  # it died at once; what it said is in the log
    deadline = time.monotonic() + _SPAWN_S
    while time.monotonic() < deadline:
        if begun := read_start(folder):
            return begun
        if keeper.poll() is not None and not (folder / "start.json").exists():
            end = read_end(folder)
            raise EyasError(f"cannot start the server: {end.error if end else 'its keeper died'}; its log is {folder / 'server.log'}")
        time.sleep(LOOK_S / 10)
    raise EyasError(f"cannot start the server: its keeper has not answered for {_SPAWN_S:.0f} s; its log is {folder / 'server.log'}")


def _stop(running: _Running) -> None:
    """End every process of a server, its keeper last, and see its GPU memory free and its port given back."""
    start, family = running.start, running.start.family()
    if read_end(running.folder) is None:
        note_stop(running.folder)
    pids = {process.pid for process in family.living()}
    family.end(_CONTAINER_STOP_S if start.contained else STOP_S)
    _end_keeper(running)
    gpu_memory.wait_until_free(pids)
    if start.contained and (left := listeners(start.port)):
        raise EyasError(
            f"the command of engine.container has ended, but process {min(left)} still answers at {start.url}: stop the container"
        )


def _end_keeper(running: _Running) -> None:
    """It ends by itself when the server has; it only has to write that down."""
    start, deadline = running.start, time.monotonic() + _AFTER_S
    if running.keeper is not None:
        if running.keeper.stdin is not None:
            running.keeper.stdin.close()
        try:
            running.keeper.wait(STOP_S)
        except subprocess.TimeoutExpired:
            running.keeper.kill()
            running.keeper.wait()
    while is_alive(start.session, start.session_began):
        if time.monotonic() > deadline:
            os.kill(start.session, signal.SIGKILL)
            return
        time.sleep(LOOK_S / 10)


def _death(running: _Running) -> str | None:
    """How the server died, if it did: a client notices before the keeper has written it down."""
    with Watch(running.folder, running.start) as watch:
        watch.was_ready = True
        deadline = time.monotonic() + _AFTER_S
        while time.monotonic() < deadline:
            if read_end(running.folder) is not None:
                return watch.death()
            time.sleep(LOOK_S / 10)
    return None


def _stand_by(watch: Watch, status: Status) -> None:
    """Watch a ready server until it dies, which is an error."""
    before = "ready"
    while True:
        sight = watch.look()
        if sight.state == "dead":
            for line in watch.last_lines():
                status.print(f"  | {line}")
            raise EyasError(sight.note)
        if sight.state != before:
            before = sight.state
            status.print(sight.line())
        time.sleep(1.0)


def _tell_proof(status: Status, watch: Watch) -> None:
    for line in watch.proof.lines() if watch.proof else ():
        status.print(line)


def _served(config: Config, drafters: dict[str, str], variant: str) -> str:
    if config.engine.kind == "embedded":
        return ", ".join(drafters) or "no drafter"
    return "no drafter" if variant == BASELINE else f"{variant} ({drafters[variant]})"


@contextmanager
def _as_interrupt(number: signal.Signals) -> Iterator[None]:
    """Within the block the signal is a KeyboardInterrupt."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(number, interrupt)
    try:
        yield
    finally:
        signal.signal(number, before)
