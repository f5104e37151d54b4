"""Hidden states through a serving engine: its workers write them into the store, this side sends the rows and proves what came out.

``prep.states.backend: sglang | vllm``; the engine section tells how the server is started, without a drafter. It runs while something is
left to capture, and one server does for all sets. Rows go out longest first (one that is too long shows at once), many at a time, and in
rounds: at the end of each the store is flushed and a sample of its rows is sent again alone, into a store beside it. What was captured
under load must be what the server computes for the row alone, and lm_head of its last final state must give the server's own next token
with its probability. A row counts when a sidecar names it, so whoever is killed, the next run sends what is missing.
"""

import asyncio
import secrets
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

import httpx
import torch
from torch import Tensor, nn

from data_prep.capture_hf import LOGIT_TOLERANCE, MB, STATE_TOLERANCE, CaptureReport, relative_error, sampled
from data_prep.capture_request import RESERVED, Next, StartServer
from data_prep.capture_sglang import SglangCapture
from data_prep.capture_vllm import VllmCapture
from data_prep.engine_plugin.orders import STATUS, CaptureJob, CaptureStatus, FlushOrder, RowOrder, read_status, run_lengths
from data_prep.rows import Quarantined, Row
from eyas.config import Config
from eyas.errors import EyasError
from eyas.files import FileLock
from eyas.manifest import begin
from eyas.progress import Task
from eyas.state_index import resume
from eyas.states import StateRow, StateSpec, StateStore
from eyas.target import Target

CaptureClient = SglangCapture | VllmCapture
CLIENTS: dict[str, type[CaptureClient]] = {"sglang": SglangCapture, "vllm": VllmCapture}

UNDER_WAY_ROWS, UNDER_WAY_TOKENS = 256, 2**18  # enough that no batch of the server lacks rows, and none waits for minutes
FIRST_ROUND, ROUND_TOKENS = 16, 2_000_000  # a fault of the whole shows after the few rows of the first round
ANSWER_S = 1800.0
LOOK_S, REMIND_S, WRITTEN_S = 0.05, 5.0, 900.0
# One step of the store's own rounding, which comes on top of what two forwards may differ by.
ROUNDING = {"bfloat16": 2**-8, "fp8": 2**-3}


class ServedCapture:
    """Captures rows through a server that is started when the first row is missing; use as a context manager, which ends it.

    ``start`` runs the server. Raises EyasError where the configured engine cannot do it.
    """

    def __init__(self, config: Config, target: Target, start: StartServer) -> None:
        self._config, self._target, self._start = config, target, start
        self._client = CLIENTS[config.prep.states.backend]
        self._stack = ExitStack()
        self._job: CaptureJob | None = None
        self._url = ""

    def __call__(self, rows: Sequence[Row], folder: Path, spec: StateSpec, name: str) -> CaptureReport:
        """Store the states of ``rows`` that ``folder`` does not have yet; ``name`` is for the progress line.

        Raises EyasError when a row is too long for the server, the server dies, the states fail their proof, or the store has other rows.
        """
        begin(folder, "states", spec.to_json(), {})
        report = CaptureReport(by=self._client.name)
        lock = FileLock(folder / ".server.lock", f"another process captures into {folder}")
        try:
            stored = {key for sidecar in resume(folder, spec, f"states-{self._client.name}_").values() for key in sidecar.keys}
            if foreign := stored - {row.key for row in rows}:
                raise EyasError(f"{folder} holds {len(foreign)} rows that the replies do not have; remove it to capture anew")
            missing = sorted((row for row in rows if row.key not in stored), key=lambda row: (-len(row.tokens.ids), row.key))
            if missing:
                self._require_fitting(missing[0])
                self._fill(folder, spec, name, missing, _tokens(rows), report)
        finally:
            lock.release()
        return report

    def _fill(self, folder: Path, spec: StateSpec, name: str, missing: list[Row], total: int, report: CaptureReport) -> None:
        job = self._serve(folder.parent, spec)
        with Task(f"capture ({name})", total=total, unit="tokens", done=total - _tokens(missing)) as task:
            asyncio.run(self._capture(missing, job, folder.name, report, task))
            report.seconds = report.tokens / task.rate() if report.tokens else 0.0

    def _require_fitting(self, longest: Row) -> None:
        tokens, context = len(longest.tokens.ids), self._config.engine.context
        if tokens + RESERVED > context:
            raise EyasError(
                f"row {longest.key[:12]} has {tokens} tokens, a server with engine.context {context} takes {context - RESERVED}: "
                "raise that, or lower prep.max_length"
            )

    def _serve(self, root: Path, spec: StateSpec) -> CaptureJob:
        """Have a server that captures ``spec``: the one that runs, or another."""
        states = self._config.prep.states
        job = CaptureJob(root.absolute(), spec, states.shard_mb * MB)
        if job != self._job:
            self._job = None
            self._stack.close()
            (job.root / STATUS).unlink(missing_ok=True)
            needs = self._client.needs(self._target, job, self._config.engine.version)
            self._url = self._stack.enter_context(self._start(needs.flags, needs.environment))
            self._job = job
        return job

    async def _capture(self, missing: Sequence[Row], job: CaptureJob, store: str, report: CaptureReport, task: Task) -> None:
        limits = httpx.Limits(max_connections=UNDER_WAY_ROWS, max_keepalive_connections=UNDER_WAY_ROWS)
        # no proxy from the environment may stand between us and the server on this machine
        async with httpx.AsyncClient(base_url=self._url, timeout=ANSWER_S, limits=limits, trust_env=False) as http:
            client = self._client(http)
            report.by = f"{client.name} {await client.checked_version(self._target, job, self._config.engine.version)}"
            await _Run(self._config, self._target, job, client, store, report, task).whole(missing)

    def __enter__(self) -> "ServedCapture":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stack.__exit__(kind, error, trace)


class _Run:
    """The capture of one store's missing rows."""

    def __init__(
        self, config: Config, target: Target, job: CaptureJob, client: CaptureClient, store: str, report: CaptureReport, task: Task
    ) -> None:
        self._target, self._job, self._client, self._store = target, job, client, store
        self._share, self._dtype = config.prep.states.recheck, getattr(torch, config.engine.dtype)
        self._report, self._task = report, task
        self._head_VH: Tensor | None = None

    async def whole(self, missing: Sequence[Row]) -> None:
        """Send all rows, round by round."""
        await self._flush(self._store)  # a server without the plug-in, or one that cannot capture, shows before the first row
        for number, rows in enumerate(rounds(missing)):
            await self._send(rows)
            status = await self._flush(self._store)
            stored = StateStore(self._job.root / self._store, incomplete=True)
            places = {key: place for place, key in enumerate(stored.keys)}
            refused = set(status.not_finite.get(self._store, ()))
            self._report.quarantined += [
                Quarantined(row.prompt_key, row.category, "states not finite") for row in rows if row.key in refused
            ]
            finite = [row for row in rows if row.key not in refused]
            if lost := [row for row in finite if row.key not in places]:
                raise EyasError(
                    f"{len(lost)} of {len(rows)} rows were answered but are not in {stored.folder}: the server was restarted meanwhile, "
                    "or writes elsewhere; the same command sends them again"
                )
            chosen = [row for row in finite if sampled(row.key, self._share)]
            await self._prove(chosen or finite[: number == 0], stored, places)

    async def _send(self, rows: Sequence[Row]) -> None:
        window = Window(UNDER_WAY_ROWS, UNDER_WAY_TOKENS)

        async def one(row: Row) -> None:
            try:
                await self._row(row, self._store)
            finally:
                await window.leave(len(row.tokens.ids))
            self._report.tokens += len(row.tokens.ids)
            self._task.advance(len(row.tokens.ids))

        try:
            async with asyncio.TaskGroup() as group:
                for row in rows:
                    await window.enter(len(row.tokens.ids))
                    group.create_task(one(row))
        except* EyasError as faults:
            raise faults.exceptions[0] from None

    async def _row(self, row: Row, store: str, logprob: bool = False) -> Next:
        order = RowOrder(store, row.key, row.category, run_lengths(row.tokens.supervised))
        answer = await self._client.send(row.tokens.ids, order, logprob)
        if not answer.taken:
            self._require_no_fault()
        return answer

    async def _flush(self, store: str) -> CaptureStatus:
        """Return once all rows that were answered are on the disk."""
        order, begun, reminded = FlushOrder(store, secrets.token_hex(8)), time.monotonic(), 0.0
        while time.monotonic() - begun < WRITTEN_S:
            if time.monotonic() - reminded > REMIND_S:  # a server that is gone shows when it is asked
                await self._client.send([self._target.shape.eos_ids[0]], order)
                reminded = time.monotonic()
            self._require_no_fault()
            status = read_status(self._job.root)
            if status is not None and status.flushed.get(store) == order.ticket:
                return status
            await asyncio.sleep(LOOK_S)
        raise EyasError(
            f"the server has written nothing into {self._job.root} for {WRITTEN_S:.0f} s: it must be able to, at this very path"
        )

    def _require_no_fault(self) -> None:
        status = read_status(self._job.root)
        if status is not None and status.fault is not None:
            raise EyasError(f"the server cannot capture: {status.fault}")

    async def _prove(self, rows: Sequence[Row], stored: StateStore, places: dict[str, int]) -> None:
        """Compare rows with what the server computes for each of them alone. Raises EyasError naming what differs and by how much."""
        if not rows:
            return
        store = f"{self._store}.recheck"
        folder = self._job.root / store
        shutil.rmtree(folder, ignore_errors=True)
        begin(folder, "states", self._job.spec.to_json(), {})
        said = {row.key: await self._row(row, store, logprob=True) for row in rows}
        await self._flush(store)
        alone = StateStore(folder, incomplete=True)
        for place, key in enumerate(alone.keys):
            await asyncio.to_thread(self._compare, stored.read(places[key]), alone.read(place), said[key])
            self._report.rechecked += 1
        if lost := said.keys() - set(alone.keys):
            raise EyasError(f"row {min(lost)[:12]} has finite states in a batch and other ones alone")
        shutil.rmtree(folder)

    def _compare(self, batched: StateRow, alone: StateRow, said: Next) -> None:
        spec = self._job.spec
        tolerance = STATE_TOLERANCE[self._dtype] + ROUNDING[spec.dtype]
        names = [f"hidden_states[{layer}]" for layer in spec.layers] + ["the final state"]
        pairs = zip(
            names,
            [*batched.aux_TA.split(spec.hidden_size, dim=-1), batched.final_TH],
            [*alone.aux_TA.split(spec.hidden_size, dim=-1), alone.final_TH],
            strict=True,
        )
        for name, batched_TH, alone_TH in pairs:
            error = relative_error(batched_TH, alone_TH)
            self._report.worst_state = max(self._report.worst_state, error)
            if not error <= tolerance:
                raise EyasError(f"row {alone.key[:12]}: {name} captured under load differs from the row alone by {error:.2g} of its norm")
        if self._head_VH is None:
            self._head_VH = self._target.lm_head(torch.bfloat16)
        assert said.token is not None
        assert said.logprob is not None
        logits_V = nn.functional.linear(alone.final_TH[-1], self._head_VH).float()
        behind = float(logits_V.max() - logits_V[said.token])
        error = max(behind, abs(float(logits_V.log_softmax(-1)[said.token]) - said.logprob)) / float(logits_V.abs().max())
        self._report.worst_logit = max(self._report.worst_logit, error)
        if not error <= LOGIT_TOLERANCE[torch.bfloat16] + ROUNDING[spec.dtype]:
            raise EyasError(
                f"row {alone.key[:12]}: lm_head of its last final state differs from the server's own next token by {error:.2g} of the "
                "largest logit: training could not rebuild this target's distribution from its final state"
            )


class Window:
    """Lets so many rows and tokens under way at a time, and one row of any length."""

    def __init__(self, rows: int, tokens: int) -> None:
        self._rows, self._tokens = rows, tokens
        self._under_way_rows = self._under_way_tokens = 0
        self._changed = asyncio.Condition()

    async def enter(self, tokens: int) -> None:
        """Wait until there is room for a row of ``tokens``."""
        async with self._changed:
            await self._changed.wait_for(
                lambda: not self._under_way_rows or (self._under_way_rows < self._rows and self._under_way_tokens + tokens <= self._tokens)
            )
            self._under_way_rows += 1
            self._under_way_tokens += tokens

    async def leave(self, tokens: int) -> None:
        """Make room."""
        async with self._changed:
            self._under_way_rows -= 1
            self._under_way_tokens -= tokens
            self._changed.notify_all()


def rounds(rows: Sequence[Row]) -> Iterator[list[Row]]:
    """Rows in rounds, in their order: a few at first, then so many that their tokens just exceed ROUND_TOKENS."""
    part: list[Row] = []
    tokens = 0
    first = True
    for row in rows:
        part.append(row)
        tokens += len(row.tokens.ids)
        if tokens >= ROUND_TOKENS or (first and len(part) == FIRST_ROUND):
            yield part
            part, tokens, first = [], 0, False
    if part:
        yield part


def _tokens(rows: Sequence[Row]) -> int:
    return sum(len(row.tokens.ids) for row in rows)
