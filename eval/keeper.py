"""The process that keeps a server: parent of its main process, leader of its session, and witness of its end.

    python -m eval.keeper        one line of JSON on stdin: {"folder", "start", "ends_with_owner"}

Whoever watches the server may come and go, be killed, or sit in another terminal: the keeper stays, writes start.json as the server
begins and exit.json when it has ended (an exit code can only be had by the parent), and ends what the server leaves behind. With
``ends_with_owner`` the server also ends when the keeper's stdin closes, which happens however its owner ends.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

from eval.processes import began, boot_id
from eval.starts import End, Start, write_end, write_start

# Signals to the whole group are meant for the server. A handler, unlike SIG_IGN, is not inherited by the server.
_NOT_MINE = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


def main() -> int:
    """Keep one server from its beginning to its end."""
    order = json.loads(sys.stdin.buffer.readline() or "null")
    if order is None:  # the owner ended before it said what to do
        return 0
    for number in _NOT_MINE:
        signal.signal(number, lambda *_: None)
    folder = Path(order["folder"])
    start = replace(Start(**order["start"]), session=os.getpid(), session_began=began(os.getpid()), boot=boot_id())
    try:
        # Only the keeper holds the other end of its stdin. The embedded server ends when that closes: even a killed keeper leaves none.
        environment = os.environ | ({} if start.contained else start.environment)
        server = subprocess.Popen(start.command, stdin=subprocess.PIPE, env=environment)
    except OSError as error:
        write_end(folder, End(None, error=f"{start.command[0]}: {error.strerror or error}"))
        return 1
    write_start(folder, replace(start, pid=server.pid, pid_began=began(server.pid)))
    if order["ends_with_owner"]:
        threading.Thread(target=_end_with_owner, args=(start,), daemon=True).start()
    code = server.wait()
    write_end(folder, End(code) if code >= 0 else End(None, _name(-code)))
    start.family().end()
    return 0


def _end_with_owner(start: Start) -> None:
    while os.read(sys.stdin.fileno(), 4096):
        pass
    start.family().end()


def _name(number: int) -> str:
    with contextlib.suppress(ValueError):
        return signal.Signals(number).name
    return f"signal {number}"


if __name__ == "__main__":
    sys.exit(main())
