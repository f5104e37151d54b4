"""Rows on their way from a worker to the disk: a thread writes them as shards, behind a queue of bounded size.

One worker of an engine has one outbox, the only writer of its name. What is wrong stops nobody here: it is noted and said in STATUS, and
whoever sends the requests ends the capture.
"""

import secrets
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

import torch

from data_prep.engine_plugin.host_copy import HostCopy
from data_prep.engine_plugin.orders import STATUS, CaptureJob, CaptureStatus, FlushOrder, RowOrder, from_run_lengths
from eyas.errors import EyasError
from eyas.files import write_json
from eyas.state_row import NotFinite, StateRow
from eyas.state_shards import ShardWriter

WAITING_BYTES = 4 * 2**30
"""States that may wait in host memory; beyond, ``put`` waits for the disk, and with it the engine."""


@dataclass(frozen=True)
class Parcel:
    """A whole row: its order, its tokens, and its aux and final states, a pair of [T, A] and [T, H] for every chunk of the prefill."""

    order: RowOrder
    ids: Sequence[int]
    chunks: list[tuple[HostCopy, HostCopy]]

    @property
    def bytes(self) -> int:
        """Host memory that it holds."""
        return sum(aux.bytes + final.bytes for aux, final in self.chunks)

    @property
    def tokens(self) -> int:
        """Tokens whose states it has."""
        return sum(len(final) for _, final in self.chunks)

    def row(self) -> StateRow:
        """The row as stores take it, the states waited for."""
        aux, final = (torch.cat([copy.values() for copy in copies]) for copies in zip(*self.chunks, strict=True))
        order = self.order
        return StateRow(order.key, order.category, torch.tensor(self.ids), torch.tensor(from_run_lengths(order.runs)), aux, final)


@dataclass
class _Store:
    writer: ShardWriter
    not_finite: list[str] = field(default_factory=list)
    ticket: str = ""


class Outbox:
    """Takes rows from the engine's thread and writes them in its own.

    ``name``: the engine's; with a random mark behind it no other writer, living or dead, has the same: nothing there is looked at.
    """

    def __init__(self, job: CaptureJob, name: str) -> None:
        self._job, self._writer = job, f"{name}_{secrets.token_hex(4)}"
        self._stores: dict[str, _Store] = {}
        self._queue: deque[Parcel | FlushOrder] = deque()
        self._bytes = 0
        self._changed = threading.Condition()
        self.fault: str | None = None
        threading.Thread(target=self._work, name="eyas-outbox", daemon=True).start()

    def put(self, parcel: Parcel | FlushOrder) -> None:
        """Take a row, or the order to flush; waits while too much is waiting already."""
        size = parcel.bytes if isinstance(parcel, Parcel) else 0
        with self._changed:
            self._changed.wait_for(lambda: not self._bytes or self._bytes + size <= WAITING_BYTES)
            self._queue.append(parcel)
            self._bytes += size
            self._changed.notify_all()

    def fail(self, reason: str) -> None:
        """Note the first fault and say it; rows are dropped from now on."""
        if self.fault is None:
            self.fault = reason
            print(f"eyas: capture: {reason}", flush=True)
            self._say()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue)
                parcel = self._queue.popleft()
            try:
                if self.fault is None:
                    self._take(parcel)
            except (EyasError, ValueError) as error:
                self.fail(str(error))
            except Exception as error:  # noqa: BLE001 - whatever it is, whoever waits for the flush must hear of it
                self.fail(f"{type(error).__name__}: {error}")
            if isinstance(parcel, Parcel):
                with self._changed:
                    self._bytes -= parcel.bytes
                    self._changed.notify_all()

    def _take(self, parcel: Parcel | FlushOrder) -> None:
        name = parcel.store if isinstance(parcel, FlushOrder) else parcel.order.store
        job = self._job
        store = self._stores.get(name)
        if store is None:
            store = self._stores[name] = _Store(ShardWriter(job.root / name, job.spec, job.shard_bytes, self._writer, 0))
        if isinstance(parcel, FlushOrder):
            store.writer.flush()
            store.ticket = parcel.ticket
            self._say()
            return
        try:
            store.writer.add(parcel.row())
        except NotFinite as error:
            store.not_finite.append(error.key)

    def _say(self) -> None:
        stores = dict(self._stores)
        status = CaptureStatus(
            {name: store.ticket for name, store in stores.items()}, {name: store.not_finite for name, store in stores.items()}, self.fault
        )
        try:
            write_json(self._job.root / STATUS, asdict(status))
        except EyasError as error:
            print(f"eyas: capture: {error}", flush=True)
