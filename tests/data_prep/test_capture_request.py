"""One request to a server that has no room, refuses, or sends nonsense."""

import asyncio
import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest

from data_prep import capture_request
from data_prep.capture_request import TRIES, exchange
from eyas.errors import EyasError
from tests.http_server import running


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Answers what ``said`` holds, in turn, the last one for ever; ``asked`` counts."""
    monkeypatch.setattr(capture_request, "BACK_OFF_S", 0.001)

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            status, text = self.server.said[min(self.server.asked, len(self.server.said) - 1)]
            self.server.asked += 1
            self.send_response(status)
            self.end_headers()
            self.wfile.write(text.encode())

    with running(ThreadingHTTPServer(("127.0.0.1", 0), Handler)) as made:
        made.asked = 0
        yield made


def ask(server: Any, *said: tuple[int, str]) -> dict[str, Any]:
    server.said = said

    async def once() -> dict[str, Any]:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.server_address[1]}", trust_env=False) as http:
            return await exchange(http, "POST", "/generate", {"input_ids": [1]})

    return asyncio.run(once())


def test_a_server_without_room_is_asked_again(server: Any):
    assert ask(server, (503, ""), (429, "busy"), (200, '{"a": 1}')) == {"a": 1}
    assert server.asked == 3


def test_a_server_that_stays_without_room_is_given_up(server: Any):
    with pytest.raises(EyasError, match="it answers 503"):
        ask(server, (503, ""))
    assert server.asked == TRIES


@pytest.mark.parametrize("said", [json.dumps({"error": {"message": "Too long.\nmore"}}), json.dumps({"message": "Too long."}), "Too long."])
def test_a_refusal_is_told_in_the_servers_words_and_not_repeated(server: Any, said: str):
    with pytest.raises(EyasError, match=r"/generate answered 400: Too long\.$"):
        ask(server, (400, said))
    assert server.asked == 1


@pytest.mark.parametrize("said", ["[1]", "<html>", ""])
def test_what_is_no_object_is_told(server: Any, said: str):
    with pytest.raises(EyasError, match="expected a JSON object"):
        ask(server, (200, said))
