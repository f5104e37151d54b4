"""A real HTTP server that answers prompts of token ids at once, in SGLang's or vLLM's words, and goes wrong on demand.

python -m tests.data_prep.reply_engine        serves until it is ended, having printed its URL
"""

import asyncio
import json
import random
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

STOP = 9


def reply_to(prompt_ids: list[int], limit: int, stop: int = STOP) -> list[int]:
    """Some ids that follow from the prompt, the end token behind them where there is room."""
    chooser = random.Random(str(prompt_ids))
    return ([chooser.randrange(10, 200) for _ in range(chooser.randrange(1, 12))] + [stop])[:limit]


@dataclass
class ReplyEngine:
    """``fault`` is called with the ids of each prompt that is to be answered in full and returns what goes wrong: a status, or one of drop,
    cut, stall, garbled, foreign, abort, filter; None for nothing.

    ``headers`` go with a status, ``alter`` changes what a reply says, ``missing`` are paths that are not there; nothing is answered before
    ``hold`` requests were there at a time. What was asked is in ``bodies``.
    """

    owner: str = "sglang"
    fault: Callable[[list[int]], int | str | None] = lambda ids: None
    headers: dict[str, str] = field(default_factory=dict)
    reply: Callable[[list[int], int], list[int]] = reply_to
    stop: int = STOP
    alter: Callable[[dict[str, Any]], object] = lambda said: None
    missing: tuple[str, ...] = ()
    render: Callable[[dict[str, Any]], list[int]] | None = None
    text_of: Callable[[list[int]], str] | None = None
    delay_s: float = 0.0
    hold: int = 0
    context: int = 4096
    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    answered: Counter[str] = field(default_factory=Counter)
    in_flight: int = 0
    most_in_flight: int = 0

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the requests of one connection."""
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                path = head.split(b" ", 2)[1].decode()
                length = next((int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")), 0)
                body = json.loads(await reader.readexactly(length)) if length else {}
                self.in_flight += 1
                self.most_in_flight = max(self.most_in_flight, self.in_flight)
                try:
                    going_on = await self._answer(path, body, writer)
                finally:
                    self.in_flight -= 1
                if not going_on:
                    break
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    async def _answer(self, path: str, body: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
        if path == "/v1/models":
            model = {"id": "tiny", "object": "model", "owned_by": self.owner, "max_model_len": self.context}
            return await self._write(writer, 200, {"object": "list", "data": [model]})
        if path in self.missing:
            return await self._write(writer, 404, {"detail": "Not Found"})
        if path == "/tokenize" and self.render is not None:
            return await self._write(writer, 200, {"tokens": self.render(body)})
        if path == "/v1/chat/completions" and self.render is not None:
            return await self._write(writer, 200, {"usage": {"prompt_tokens": len(self.render(body))}})
        if path not in ("/generate", "/v1/completions"):
            return await self._write(writer, 404, {"detail": "Not Found"})
        ids = body["input_ids"] if path == "/generate" else body["prompt"]
        limit = body["sampling_params"]["max_new_tokens"] if path == "/generate" else body["max_tokens"]
        trial = limit == 1
        if not trial:
            self.bodies.append(body)
            await asyncio.sleep(self.delay_s)
            while self.most_in_flight < self.hold:
                await asyncio.sleep(0.05)
        fault = None if trial else self.fault(ids)
        if isinstance(fault, int):
            return await self._write(writer, fault, {"error": {"message": f"this is {fault}"}}, self.headers)
        if fault == "drop":
            return False
        if fault == "stall":
            await asyncio.sleep(60)
        if fault == "garbled":
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n{not json")
            return True
        if fault == "foreign":
            return await self._write(writer, 200, {"choices": [{"finish_reason": "stop"}], "meta_info": {"finish_reason": "?"}})
        if fault in ("abort", "filter"):
            reason = {"abort": "abort", "filter": "content_filter"}[fault]
            return await self._write(writer, 200, self._said(path, ids, [], reason))
        reply = self.reply(ids, limit)
        said = self._said(path, ids, reply, "stop" if reply[-1] == self.stop else "length")
        if not trial:
            self.alter(said)
        if fault == "cut":
            text = json.dumps(said).encode()
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(text) + text[: len(text) // 2])
            return False
        if not trial:
            self.answered[str(ids)] += 1
        return await self._write(writer, 200, said)

    def _said(self, path: str, ids: list[int], reply: list[int], reason: str) -> dict[str, Any]:
        if path == "/generate":
            return {"text": "", "output_ids": reply, "meta_info": {"finish_reason": {"type": reason}, "prompt_tokens": len(ids)}}
        choice = {"text": "", "finish_reason": reason, "stop_reason": None, "token_ids": reply, "prompt_token_ids": ids}
        if self.text_of is not None:
            choice = {"text": self.text_of(reply), "finish_reason": reason}
        return {"choices": [choice], "usage": {"prompt_tokens": len(ids), "completion_tokens": len(reply)}}

    async def _write(self, writer: asyncio.StreamWriter, status: int, value: Any, headers: dict[str, str] | None = None) -> bool:
        text = json.dumps(value).encode()
        more = "".join(f"{name}: {said}\r\n" for name, said in (headers or {}).items())
        writer.write(f"HTTP/1.1 {status} so\r\ncontent-length: {len(text)}\r\n{more}\r\n".encode() + text)
        await writer.drain()
        return True


@contextmanager
def serving(engine: ReplyEngine, port: int = 0) -> Iterator[ReplyEngine]:
    """Let ``engine`` answer in a thread; leaving closes its port and every connection, as a process that dies does."""
    ready = threading.Event()
    stops: list[Callable[[], object]] = []

    async def serve() -> None:
        stop, loop = asyncio.Event(), asyncio.get_running_loop()
        stops.append(lambda: loop.call_soon_threadsafe(stop.set))
        server = await asyncio.start_server(engine.connected, "127.0.0.1", port, backlog=2048)
        engine.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        ready.set()
        await stop.wait()
        server.close()

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    assert ready.wait(30)
    try:
        yield engine
    finally:
        stops[0]()
        thread.join()


if __name__ == "__main__":
    with serving(ReplyEngine(owner=sys.argv[1])) as served:
        print(served.url, flush=True)
        threading.Event().wait()
