"""A small real HTTP server with SGLang's routes, for the tests of the client, the bench and the report."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from eval.starts import recorded
from eyas.config import Config
from tests.eval.toy_servers import ToyRun
from tests.http_server import running

DRAFTS = 3


class ToyServer(ThreadingHTTPServer):
    """Replies are a function of the prompt; each drafter accepts a fixed pattern of drafts. ``log`` holds what was asked, in order."""

    daemon_threads = True

    def __init__(self, accepts: dict[str, list[int]] | None = None, info: dict[str, Any] | None = None) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.accepts = {"starter": [0, 1], "result": [2, 1, 3]} if accepts is None else accepts
        self.info = {"eyas": {"drafters": list(self.accepts)}, "max_running_requests": 1} if info is None else info
        self.log: list[tuple[str, Any]] = []
        self.incremental = False
        self.break_after: int | None = None  # requests until the server fails
        self.failure = "500"
        self.extra_template_tokens = 0
        self.busy = 0  # so many flushes are refused
        self.together: threading.Barrier | None = None  # no reply goes out before so many requests are in flight

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def cycles(self, drafter: str | None, tokens: int) -> list[int]:
        """Accepted drafts of each cycle of a reply of ``tokens`` tokens, the last one untrimmed."""
        if drafter is None or not self.accepts[drafter]:
            return []
        pattern, found, emitted = self.accepts[drafter], [], 1
        while emitted < tokens:
            found.append(pattern[len(found) % len(pattern)])
            emitted += found[-1] + 1
        return found

    @staticmethod
    def reply(prompt_ids: list[int], tokens: int) -> list[int]:
        if prompt_ids[0] == 666:
            return [7] * tokens
        return [(prompt_ids[-1] * 31 + 17 * i * i + i) % 49000 for i in range(tokens)]


class Handler(BaseHTTPRequestHandler):
    server: ToyServer
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *arguments: Any) -> None:
        pass

    def do_GET(self) -> None:
        self.server.log.append((self.path, None))
        if self.path == "/health_generate":
            self._json(200, {})
        elif self.path == "/server_info":
            self._json(200, self.server.info)
        else:
            self._json(404, {"detail": "Not Found"})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"] or 0)) or b"{}")
        self.server.log.append((self.path, body))
        if self.path == "/flush_cache":
            self.server.busy -= 1
            self._json(400 if self.server.busy >= 0 else 200, {"message": "Flush cache failed."})
        elif self.path == "/v1/chat/completions":
            self._chat(body)
        elif self.path in ("/tokenize", "/detokenize"):
            self._json(404, {"detail": "Not Found"})
        else:
            self._generate(body)

    def _json(self, status: int, value: Any) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _drafter(self, body: dict[str, Any]) -> str | None:
        name = body.get("speculative") or next(iter(self.server.accepts), "none")
        return None if name == "none" else name

    def _meta(self, drafter: str | None, prompt_tokens: int, tokens: int, total: int) -> dict[str, Any]:
        meta: dict[str, Any] = {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": tokens,
            "cached_tokens": 0,
            "finish_reason": {"type": "length", "length": total} if tokens == total else None,
        }
        cycles = self.server.cycles(drafter, tokens)
        if cycles:
            meta |= {
                "spec_verify_ct": len(cycles),
                "spec_accept_length": tokens / len(cycles),
                "spec_num_correct_drafts": sum(cycles),
                "spec_num_proposed_drafts": DRAFTS * len(cycles),
                "spec_correct_drafts_histogram": [cycles.count(accepted) for accepted in range(DRAFTS + 1)],
            }
        part = {"verify": len(cycles), "extend": max(len(cycles) - 1, 0), "draft": 2 * len(cycles)} if cycles else {"decode": tokens - 1}
        meta["eyas"] = {"seconds": {name: 1e-5 * count for name, count in part.items()}, "counts": part}
        return meta

    def _chat(self, body: dict[str, Any]) -> None:
        prompt = sum(len(message["content"]) for message in body["messages"]) + self.server.extra_template_tokens
        meta = self._meta(self._drafter(body), prompt, body["max_tokens"], body["max_tokens"])
        choice = {"index": 0, "message": {"role": "assistant", "content": "hi"}, "finish_reason": "length", "meta_info": meta}
        self._json(200, {"choices": [choice], "usage": {"prompt_tokens": prompt, "completion_tokens": body["max_tokens"]}})

    def _generate(self, body: dict[str, Any]) -> None:
        if self.server.break_after is not None:
            self.server.break_after -= 1
            if self.server.break_after < 0 and self.server.failure == "500":
                self._json(500, {"error": {"message": "CUDA error: out of memory\nTraceback ..."}})
                return
        if self.server.together is not None:
            self.server.together.wait(timeout=10)
        prompt, total, drafter = body["input_ids"], body["sampling_params"]["max_new_tokens"], self._drafter(body)
        ids = self.server.reply(prompt, total)
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        sent = 0
        for emitted in [1, *(accepted + 1 for accepted in self.server.cycles(drafter, total) or [0] * (total - 1))]:
            if self.server.break_after is not None and self.server.break_after < 0 and sent > 2:
                self.close_connection = True
                return  # dies in the middle of a reply
            end = min(sent + emitted, total)
            piece = {"text": "", "output_ids": ids[sent if self.server.incremental else 0 : end]}
            self._event(piece | {"meta_info": self._meta(drafter, len(prompt), end, total)})
            sent = end
        self.wfile.write(b"data: [DONE]\n\n")
        self.close_connection = True

    def _event(self, value: Any) -> None:
        self.wfile.write(b"data: " + json.dumps(value).encode() + b"\n\n")
        self.wfile.flush()


@pytest.fixture
def toy_server() -> Iterator[ToyServer]:
    """Switches per request between no speculation and two drafters, as the embedded server does."""
    with running(ToyServer()) as server:
        yield server


@pytest.fixture
def plain_servers() -> Iterator[tuple[ToyServer, ToyServer]]:
    """Two servers with one behaviour each, as SGLang: without speculation, and with the drafter of folder 'drafters/result'."""
    plain = ToyServer(accepts={}, info={"speculative_algorithm": None, "max_running_requests": 256})
    info = {"speculative_algorithm": "EAGLE3", "speculative_draft_model_path": "drafters/result", "max_running_requests": 48}
    drafting = ToyServer(accepts={"result": [2, 1, 3]}, info=info)
    with running(plain), running(drafting):
        yield plain, drafting


class ToyEngine:
    """Stands for SGLang behind ``eval.launcher.serving``: a server of one behaviour for each start; ``starts`` holds what was asked for."""

    def __init__(self) -> None:
        self.patterns: dict[str, list[int]] = {"starter": [0, 1], "result": [2, 1, 3]}
        self.starts: list[tuple[str | None, dict[str, Any]]] = []
        self.servers: list[ToyServer] = []
        self.break_start: int | None = None  # this start's server fails
        self.break_after = 2  # after so many requests
        self.together: int | None = None  # of all starts but the first, which is the trial

    @contextmanager
    def serving(self, config: Config, drafters: dict[str, str], variant: str | None = None) -> Iterator[str]:
        self.starts.append((variant, dict(config.engine.flags)))
        info: dict[str, Any] = {"version": "0.5.23", "speculative_algorithm": None, "max_running_requests": 2048, "port": 1}
        info |= {name.replace("-", "_"): value for name, value in config.engine.flags.items()}
        accepts = {}
        if variant not in (None, "none"):
            accepts = {variant: self.patterns[variant]}
            info |= {"speculative_algorithm": "EAGLE3", "speculative_draft_model_path": drafters[variant]}
            info |= {"max_running_requests": 48, "disable_overlap_schedule": True, "port": 2}
        server = ToyServer(accepts, info)
        if self.break_start == len(self.starts):
            server.break_after = self.break_after
        if self.together and len(self.starts) > 1:
            server.together = threading.Barrier(self.together)
        self.servers.append(server)
        with running(server):
            yield server.url


@pytest.fixture
def toy_engine(monkeypatch: pytest.MonkeyPatch) -> ToyEngine:
    engine = ToyEngine()
    monkeypatch.setattr("eval.launcher.serving", engine.serving)
    return engine


@pytest.fixture
def toy(tmp_path: Path) -> Iterator[ToyRun]:
    """A run whose servers are gone when the test ends, whatever it did."""
    run = ToyRun(tmp_path)
    yield run
    for start in recorded(run.servers).values():
        start.family().end(0.5)
