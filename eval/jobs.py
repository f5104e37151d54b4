"""Requests on their way through the engine: one decodes at a time in a thread of its own, the others wait in line."""

import asyncio
import threading
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from eval.engine import Engine, Generation


class Cancelled(Exception):
    """Ends the decoding of a request that nobody waits for any more."""


@dataclass(frozen=True)
class Ask:
    """Arguments of ``Engine.generate``."""

    prompt_ids: list[int]
    max_new_tokens: int
    temperature: float
    seed: int
    drafter: str | None
    stop_ids: Sequence[int] | None


class Job:
    """One request: awaited as a whole (``result``) or in pieces (``pieces``). ``cancel`` ends it, at the latest after one cycle."""

    def __init__(self, ask: Ask, streamed: bool) -> None:
        self.ask = ask
        self.id = uuid.uuid4().hex
        self.received = time.perf_counter()
        self._streamed = streamed
        self._loop = asyncio.get_running_loop()
        self._pieces: asyncio.Queue[list[int] | None] = asyncio.Queue()
        self._result: asyncio.Future[Generation] = self._loop.create_future()
        self._cancelled = threading.Event()

    def cancel(self) -> None:
        """Stop decoding; harmless on a finished job."""
        self._cancelled.set()

    @property
    def latency_s(self) -> float:
        """Seconds since the request was received."""
        return time.perf_counter() - self.received

    async def result(self) -> Generation:
        """The finished reply; raises what the engine raised, Cancelled for a cancelled job."""
        return await asyncio.shield(self._result)

    async def pieces(self) -> AsyncIterator[list[int]]:
        """Tokens as each cycle brings them; ends when the job does, however that is: ``result`` tells."""
        while (piece := await self._pieces.get()) is not None:
            yield piece

    def run(self, engine: Engine, finished: Callable[["Job"], None]) -> None:
        """Decode, in the decoding thread; ``finished`` is called in the event loop before anybody sees the result."""
        result: Generation | BaseException
        try:
            self._check()
            ask = self.ask
            result = engine.generate(
                ask.prompt_ids, ask.max_new_tokens, ask.temperature, ask.seed, ask.drafter, self._on_tokens, ask.stop_ids
            )
        except BaseException as error:  # noqa: BLE001 - carried to the one who waits for the result
            result = error
        self._loop.call_soon_threadsafe(self._finish, result, finished)

    def _on_tokens(self, new: list[int]) -> None:
        self._check()
        if self._streamed:
            self._loop.call_soon_threadsafe(self._pieces.put_nowait, new)

    def _check(self) -> None:
        if self._cancelled.is_set():
            raise Cancelled

    def _finish(self, result: Generation | BaseException, finished: Callable[["Job"], None]) -> None:
        finished(self)
        if isinstance(result, BaseException):
            self._result.set_exception(result)
            self._result.exception()  # a job that nobody awaits any more is no fault to be logged
        else:
            self._result.set_result(result)
        self._pieces.put_nowait(None)


class DecodingThread:
    """The line of jobs before one engine."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="decode")
        self._jobs: set[Job] = set()

    @property
    def busy(self) -> bool:
        """True while a job runs or waits."""
        return bool(self._jobs)

    def submit(self, ask: Ask, streamed: bool = False) -> Job:
        """Put a request into the line."""
        job = Job(ask, streamed)
        self._jobs.add(job)
        self._thread.submit(job.run, self.engine, self._jobs.discard)
        return job

    def cancel_all(self) -> None:
        """Cancel what runs and waits."""
        for job in self._jobs:
            job.cancel()

    def close(self) -> None:
        """End the thread; jobs must have been cancelled before."""
        self._thread.shutdown(wait=True)
