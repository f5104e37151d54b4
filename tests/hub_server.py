"""A hub of one repository on this machine, for the unmodified huggingface_hub client; it records what is asked of it.

The client reads ``HF_ENDPOINT`` when it is imported, so a test asks from a process of its own (``environment``).
"""

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

from tests.http_server import running

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(ThreadingHTTPServer):
    """Serves ``folder`` as the repository ``name`` at one commit, whatever the revision.

    ``fetched`` are the files whose bytes left, ``begun`` those of which only a range was asked.
    """

    daemon_threads = True

    def __init__(self, folder: Path, name: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder, self.name = folder, name
        self.requests: list[str] = []
        self.fetched: list[str] = []
        self.begun: list[str] = []

    def environment(self, cache: Path) -> dict[str, str]:
        """Variables of a process whose client shall ask here and keep what it gets in ``cache``."""
        own = {"HF_ENDPOINT": f"http://127.0.0.1:{self.server_address[1]}", "HF_HOME": str(cache), "HF_HUB_DISABLE_TELEMETRY": "1"}
        offline = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
        return {key: value for key, value in os.environ.items() if key not in offline} | own


@contextmanager
def hub(folder: Path, name: str) -> Iterator[Hub]:
    """The hub in a thread, for as long as it is needed."""
    with running(Hub(folder, name)) as server:
        yield server


class _Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def log_message(self, format: str, *arguments: object) -> None:
        """Say nothing."""

    def _answer(self, with_body: bool) -> None:
        path = unquote(urlsplit(self.path).path)
        self.server.requests.append(f"{self.command} {path}")
        api, files = f"/api/models/{self.server.name}", f"/{self.server.name}/resolve/"
        if path.startswith(f"{api}/tree/"):
            self._send(json.dumps([self._entry(file) for file in self._files()]).encode(), {}, with_body)
        elif path == api or path.startswith(f"{api}/revision/"):
            siblings = [{"rfilename": self._name(file)} for file in self._files()]
            self._send(json.dumps({"id": self.server.name, "sha": COMMIT, "siblings": siblings}).encode(), {}, with_body)
        elif path.startswith(files) and (file := self.server.folder / path.removeprefix(files).partition("/")[2]).is_file():
            self._send_file(file, with_body)
        else:
            self._send(b"no such thing", {"X-Error-Code": "EntryNotFound"}, with_body, 404)

    def _send_file(self, file: Path, with_body: bool) -> None:
        content, asked = file.read_bytes(), self.headers.get("Range", "")
        ranged = asked.startswith("bytes=0-")
        if with_body:
            (self.server.begun if ranged else self.server.fetched).append(self._name(file))
        part = content[: int(asked.removeprefix("bytes=0-")) + 1] if ranged else content
        self._send(part, {"ETag": f'"{hashlib.sha256(content).hexdigest()}"'}, with_body, 206 if ranged else 200)

    def _files(self) -> list[Path]:
        return sorted(path for path in self.server.folder.rglob("*") if path.is_file())

    def _name(self, file: Path) -> str:
        return file.relative_to(self.server.folder).as_posix()

    def _entry(self, file: Path) -> dict[str, object]:
        oid = hashlib.sha1(self._name(file).encode()).hexdigest()
        return {"type": "file", "path": self._name(file), "size": file.stat().st_size, "oid": oid}

    def _send(self, content: bytes, headers: dict[str, str], with_body: bool, status: int = 200) -> None:
        self.send_response(status)
        for name, value in {"X-Repo-Commit": COMMIT, "Content-Length": str(len(content)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if with_body:
            self.wfile.write(content)
