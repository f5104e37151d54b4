"""Replies from servers: thousands of requests in flight over several of them, each sent again until it is answered or beyond hope.

One loop decides what is sent where; a request in flight is a task. A request goes to the server with the fewest in flight. A failed one
waits (exponential back-off, full jitter) and goes out again; a server that has no room is left alone as long as it asks; one that keeps
failing gets nothing until it answers a trial request. Nothing is kept here: each reply is handed over as it comes.

Cost: some 1.5 ms of processor time a short request (benchmarks/reply_server.py), so one core drives 600 replies a second and more.
"""

import asyncio
import heapq
import importlib.util
import resource
import sys
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from data_prep.prompts import Messages, Unusable
from data_prep.reply_endpoint import FAILURES, Busy, Endpoint, RefusedByServer, back_off
from data_prep.reply_wire import Answer, Asking, NoAnswer
from data_prep.sampler import Request
from eyas.config import RepliesConfig
from eyas.errors import EyasError
from eyas.progress import Task

TICK_S = 1.0
SPARE_FILES = 64


def _settle_absence(package: str) -> None:
    """httpcore tries to import it at every lock, and where it is missing searches all folders again: a quarter of a request's cost."""
    if package not in sys.modules and importlib.util.find_spec(package) is None:
        sys.modules[package] = None  # type: ignore[assignment]


@dataclass
class _Waiting:
    request: Request
    tries: int = 0


@dataclass(frozen=True)
class Chats:
    """Chats whose ids a server must render as they are here; ``options`` are the chat template's arguments."""

    samples: list[tuple[Messages, list[int]]]
    options: dict[str, Any]


def answer_by_server(
    requests: Sequence[Request],
    urls: Sequence[str],
    asking: Asking,
    chats: Chats,
    config: RepliesConfig,
    take: Callable[[Request, Answer | Unusable], None],
    task: Task,
) -> None:
    """Have the servers at ``urls`` answer ``requests``.

    ``take`` gets each request once, with its reply or with why there will be none, in whatever order they end; what it raises ends the run.
    ``task`` shows how far it is. Uses ``concurrency``, ``timeout_s``, ``retries`` and ``give_up_s`` of ``config``.

    Raises EyasError when no server answers at the start or for ``give_up_s``, when one has another chat template or too small a context, or
    refuses every request.
    """
    if not requests:
        return
    _allow_open_files(config.concurrency + SPARE_FILES)
    _settle_absence("sniffio")
    endpoints = [Endpoint(url, config.concurrency, config.timeout_s) for url in urls]
    asyncio.run(_Run(requests, endpoints, asking, chats, config, take, task).whole())


def _allow_open_files(needed: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < needed:
        if hard != resource.RLIM_INFINITY and hard < needed:
            raise EyasError(f"prep.replies.concurrency needs {needed} open files, this system allows {hard}: lower it, or see `ulimit -Hn`")
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


class _Run:
    def __init__(
        self,
        requests: Sequence[Request],
        endpoints: list[Endpoint],
        asking: Asking,
        chats: Chats,
        config: RepliesConfig,
        take: Callable[[Request, Answer | Unusable], None],
        task: Task,
    ) -> None:
        self._endpoints, self._asking, self._chats, self._config = endpoints, asking, chats, config
        self._hand_over, self._task = take, task
        self._first = requests[0]
        self._longest = max(len(request.prompt_ids) + request.max_new_tokens for request in requests)
        self._ready = deque(_Waiting(request) for request in requests)
        self._later: list[tuple[float, int, _Waiting]] = []
        self._number = count()
        self._in_flight = 0
        self._tasks: set[asyncio.Task[Callable[[float], None]]] = set()
        self._ended: deque[asyncio.Task[Callable[[float], None]]] = deque()
        self._wake = asyncio.Event()
        self._opening: set[Endpoint] = set()
        self._silent_since: float | None = None
        self._replies = self._finished = self._tokens = 0
        self._said: set[str] = set()
        self._start = time.monotonic()

    async def whole(self) -> None:
        """Open the servers, then send until every request has been handed over."""
        try:
            await self._open_all()
            while self._ready or self._later or self._in_flight:
                now = time.monotonic()
                while self._later and self._later[0][0] <= now:
                    self._ready.append(heapq.heappop(self._later)[2])
                self._send(now)
                self._reopen(now)
                self._require_life(now)
                await self._turn(now)
        finally:
            await self._hang_up()

    async def _hang_up(self) -> None:
        """Close every connection: servers drop what they were generating for us."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(endpoint.close() for endpoint in self._endpoints))

    async def _open_all(self) -> None:
        faults = await asyncio.gather(*(self._open(endpoint) for endpoint in self._endpoints))
        if all(faults):
            told = "; ".join(f"{endpoint.url}: {fault}" for endpoint, fault in zip(self._endpoints, faults, strict=True))
            raise EyasError(f"no reply server answers ({told}): start one, or correct prep.replies.servers")
        for endpoint, fault in zip(self._endpoints, faults, strict=True):
            if fault:
                endpoint.failed(fault)
                self._take_out(endpoint, time.monotonic())

    async def _open(self, endpoint: Endpoint) -> NoAnswer | None:
        """Open a server and compare templates; returns why it does not answer."""
        try:
            await endpoint.open(self._first, self._longest, self._asking)
            if unknown := await endpoint.require_template(self._chats.samples, self._chats.options, self._asking):
                self._say_once(f"{endpoint.url}: cannot compare chat templates, {unknown}; replies are made from our own rendering")
        except NoAnswer as fault:
            endpoint.up = False
            return fault
        except EyasError as error:
            raise EyasError(f"{endpoint.url}: {error}") from None
        return None

    def _send(self, now: float) -> None:
        while self._ready and self._in_flight < self._config.concurrency:
            with_room = [endpoint for endpoint in self._endpoints if endpoint.has_room(now)]
            if not with_room:
                return
            endpoint = min(with_room, key=lambda endpoint: endpoint.in_flight)
            endpoint.in_flight += 1
            self._in_flight += 1
            self._spawn(self._ask(endpoint, self._ready.popleft()))

    def _spawn(self, work: Coroutine[Any, Any, Callable[[float], None]]) -> None:
        """Run ``work`` as a task; what it returns is called in the loop, with the time."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._end)

    def _end(self, task: "asyncio.Task[Callable[[float], None]]") -> None:
        self._ended.append(task)
        self._wake.set()

    async def _ask(self, endpoint: Endpoint, waiting: _Waiting) -> Callable[[float], None]:
        outcome: Answer | NoAnswer | Unusable
        try:
            outcome = await endpoint.ask(waiting.request, self._asking)
        except (NoAnswer, Unusable) as fault:
            outcome = fault
        except EyasError as error:
            raise EyasError(f"{endpoint.url}: {error}") from None
        return lambda now: self._take(endpoint, waiting, outcome, now)

    def _take(self, endpoint: Endpoint, waiting: _Waiting, outcome: Answer | NoAnswer | Unusable, now: float) -> None:
        """What one request came to."""
        endpoint.in_flight -= 1
        self._in_flight -= 1
        if isinstance(outcome, Busy):
            endpoint.refused(outcome, now)
            if endpoint.in_flight:  # no fault of this request: it goes out again when there is room
                self._ready.append(waiting)
            else:
                self._again(endpoint, waiting, outcome, now)
        elif isinstance(outcome, NoAnswer):
            endpoint.failed(outcome)
            self._again(endpoint, waiting, outcome, now)
        else:
            endpoint.replied()
            if isinstance(outcome, Unusable):
                self._leave(endpoint, waiting.request, outcome, outcome.detail if isinstance(outcome, RefusedByServer) else str(outcome))
            else:
                self._keep(endpoint, waiting.request, outcome)
        if endpoint.up and endpoint.failures >= FAILURES:
            self._take_out(endpoint, now)
        elif not endpoint.up and not endpoint.failures:  # what was still in flight came through
            endpoint.up = True
            self._silent_since = None

    def _again(self, endpoint: Endpoint, waiting: _Waiting, fault: NoAnswer, now: float) -> None:
        """Send a failed request once more, later; or never, after ``retries`` times."""
        waiting.tries += 1
        if waiting.tries > self._config.retries:
            self._leave(endpoint, waiting.request, Unusable(fault.reason), str(fault))
        else:
            heapq.heappush(self._later, (now + back_off(waiting.tries), next(self._number), waiting))

    def _keep(self, endpoint: Endpoint, request: Request, answer: Answer) -> None:
        if answer.by_text:
            self._say_once(
                f"{endpoint.url} gives no token ids: its text is tokenised again, and what does not come back as so many tokens is left out"
            )
        self._hand_over(request, answer)
        self._replies += 1
        self._finished += answer.finish_reason == "stop"
        self._tokens += len(answer.ids)
        self._task.advance(note=self._note())

    def _leave(self, endpoint: Endpoint, request: Request, reason: Unusable, detail: str) -> None:
        self._say_once(f"{endpoint.url}: a prompt is left unanswered, {detail}", key=str(reason))
        self._hand_over(request, reason)
        self._task.advance(note=self._note())

    def _take_out(self, endpoint: Endpoint, now: float) -> None:
        endpoint.take_out(now)
        self._task.print(f"{endpoint.url} is taken out until it answers again: {endpoint.fault}")
        if not any(endpoint.up for endpoint in self._endpoints):
            self._silent_since = now

    def _reopen(self, now: float) -> None:
        for endpoint in self._endpoints:
            if not endpoint.up and endpoint not in self._opening and now >= endpoint.open_at:
                self._opening.add(endpoint)
                self._spawn(self._try_open(endpoint))

    async def _try_open(self, endpoint: Endpoint) -> Callable[[float], None]:
        fault = await self._open(endpoint)

        def opened(now: float) -> None:
            self._opening.discard(endpoint)
            if fault is None:
                self._silent_since = None
                self._task.print(f"{endpoint.url} answers again")
            else:
                endpoint.failed(fault)
                endpoint.take_out(now)

        return opened

    def _require_life(self, now: float) -> None:
        if self._silent_since is not None and now - self._silent_since > self._config.give_up_s:
            told = "; ".join(f"{endpoint.url}: {endpoint.fault}" for endpoint in self._endpoints)
            raise EyasError(
                f"no reply server has answered for {self._config.give_up_s:g} s ({told}); the replies that came are kept: "
                "start the servers again, and the same command goes on"
            )

    async def _turn(self, now: float) -> None:
        """Wait until something happened or is due, and deal with it."""
        due = [at for at, *_ in self._later[:1]]
        due += [endpoint.resume_at if endpoint.up else endpoint.open_at for endpoint in self._endpoints]
        wait = min([TICK_S, *(at - now for at in due if at > now)])
        try:
            async with asyncio.timeout(wait):
                await self._wake.wait()
        except TimeoutError:
            self._task.advance(0, note=self._note())
        self._wake.clear()
        now = time.monotonic()
        while self._ended:
            task = self._ended.popleft()
            self._tasks.discard(task)
            task.result()(now)

    def _note(self) -> str:
        rate = self._tokens / max(time.monotonic() - self._start, 1e-9)
        up = sum(endpoint.up for endpoint in self._endpoints)
        finished = f", {self._finished / self._replies:.0%} finished" if self._replies else ""
        return f"{rate:,.0f} tok/s{finished}, {self._in_flight} in flight, {up}/{len(self._endpoints)} servers"

    def _say_once(self, text: str, key: str | None = None) -> None:
        if (key or text) not in self._said:
            self._said.add(key or text)
            self._task.print(text)
