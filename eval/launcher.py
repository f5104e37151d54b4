"""A server as a child process: started in a process group of its own, waited for while it lives, gone when the block ends."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from eyas.config import Config
from eyas.errors import EyasError
from eyas.files import read_json, write_json
from eyas.progress import PLAIN_EVERY_S

POLL_S = 0.1
LOAD_LIMIT_S = 1800.0
STOP_S = 10.0


@contextmanager
def serving(config: Config, drafters: dict[str, str]) -> Iterator[str]:
    """Run the embedded server with ``drafters`` (name -> folder or hub id) in a subprocess; yield its URL once it has generated a token.

    Its output goes to ``<output>/server.log``. Raises EyasError with the last line of that log when the server dies while loading.
    However the block ends, no process of the server's group is left; if this process is killed, the server ends by itself.
    """
    log = config.output / "server.log"
    with tempfile.TemporaryDirectory(prefix="eyas-") as scratch:
        ready, job = Path(scratch) / "ready.json", Path(scratch) / "job.json"
        write_json(job, {"config": config.model_dump(mode="json"), "drafters": drafters, "ready_file": str(ready)})
        process = _start([sys.executable, "-m", "eval.server", str(job)], log)
        try:
            yield _wait(process, ready, config.engine.host, log)
        finally:
            _stop(process)


def _start(command: list[str], log: Path) -> subprocess.Popen[bytes]:
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as output:
            return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
    except OSError as error:
        raise EyasError(f"cannot start the server: {error.strerror or error}") from error


def _wait(process: subprocess.Popen[bytes], ready: Path, host: str, log: Path) -> str:
    start = said = time.monotonic()
    while True:
        if process.poll() is not None:
            raise EyasError(f"the server died while loading (exit code {process.returncode}): {_last_line(log)}; its log is {log}")
        if ready.exists():
            url = f"http://{host}:{read_json(ready)['port']}"
            if _answers(url):
                return url
        now = time.monotonic()
        if now - start > LOAD_LIMIT_S:
            raise EyasError(f"the server is alive but has not answered in {LOAD_LIMIT_S / 60:.0f} minutes; its log is {log}")
        if now - said > PLAIN_EVERY_S:
            said = now
            print(f"server: loading, alive for {now - start:.0f} s", file=sys.stderr)
        time.sleep(POLL_S)


def _answers(url: str) -> bool:
    try:
        with httpx.Client(trust_env=False, timeout=60) as client:
            return client.get(f"{url}/health_generate").status_code == 200
    except httpx.TransportError:
        return False


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End the whole process group, politely first."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            continue
    process.wait()
    if process.stdin is not None:
        process.stdin.close()


def _last_line(log: Path) -> str:
    lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else "it wrote nothing"
