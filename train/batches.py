"""Packed micro-batches: which rows go together, on which rank, in which optimiser step, and their loading ahead of the training.

An epoch visits every row once in an order given by (seed, epoch). An optimiser step takes the next rows of that order, as many as fit
into world x accumulation micro-batches of ``budget`` tokens, so a position in the data is a row number whatever the world size: a resumed
run with more or fewer processes neither loses nor repeats a row. Within a step the longest rows are dealt first, each to the emptiest
micro-batch, which keeps ranks within about one short row of each other; 2 processes x 1 micro-batch and 1 process x 2 take the same rows.
What packing costs: a micro-batch is filled to ``budget`` less about half a row.
"""

import itertools
import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from eyas.distribution import TopLogProbs, join
from eyas.states import StateRow, StateSpec, StateStore


@dataclass(frozen=True)
class Batch:
    """Rows packed without padding: N tokens of B rows.

    ids_N int64; positions_N int64, counted from 0 in each row; supervised_N bool; aux_NA and final_NH as read from the store;
    starts_B1 int64 [B + 1], where each row begins, and N at the end; keys of the B rows. Where the store has the target's top
    log-probabilities in place of final states, they are ``top`` and final_NH is [N, 0].
    """

    ids_N: Tensor
    positions_N: Tensor
    supervised_N: Tensor
    aux_NA: Tensor
    final_NH: Tensor
    starts_B1: Tensor
    keys: tuple[str, ...]
    top: TopLogProbs | None = None

    @property
    def tokens(self) -> int:
        """Packed tokens N."""
        return self.ids_N.shape[0]

    def to(self, device: torch.device, dtype: torch.dtype | None = None) -> "Batch":
        """The same batch on ``device``, its states in ``dtype`` (cast there); from pinned memory the copy does not block."""
        moved = self._map(lambda tensor: tensor.to(device, non_blocking=True))
        return replace(moved, aux_NA=moved.aux_NA.to(dtype), final_NH=moved.final_NH.to(dtype)) if dtype else moved

    def pin(self) -> "Batch":
        """The same batch in page-locked memory."""
        return self._map(Tensor.pin_memory)

    def _map(self, change: Callable[[Tensor], Tensor]) -> "Batch":
        changed: dict[str, Any] = {name: change(value) for name, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **changed, top=self.top and self.top.map(change))


def pack(rows: Sequence[StateRow]) -> Batch:
    """Concatenate rows (at least one) to a batch."""
    lengths = [row.ids_T.shape[0] for row in rows]
    return Batch(
        ids_N=torch.cat([row.ids_T for row in rows]),
        positions_N=torch.cat([torch.arange(length) for length in lengths]),
        supervised_N=torch.cat([row.supervised_T for row in rows]),
        aux_NA=torch.cat([row.aux_TA for row in rows]),
        final_NH=torch.cat([row.final_TH for row in rows]),
        starts_B1=torch.tensor([0, *lengths]).cumsum(0),
        keys=tuple(row.key for row in rows),
        top=join(tops) if (tops := [row.top for row in rows if row.top is not None]) else None,
    )


def blank(spec: StateSpec) -> Batch:
    """One token that supervises nothing: what a process without rows computes on, so that the others need not wait for it."""
    return Batch(
        ids_N=torch.zeros(1, dtype=torch.int64),
        positions_N=torch.zeros(1, dtype=torch.int64),
        supervised_N=torch.zeros(1, dtype=torch.bool),
        aux_NA=torch.zeros(1, len(spec.layers) * spec.hidden_size, dtype=torch.bfloat16),
        final_NH=torch.zeros(1, spec.final_width, dtype=torch.bfloat16),
        starts_B1=torch.tensor([0, 1]),
        keys=("",),
        top=None if spec.top_logprobs is None else _blank_top(spec.top_logprobs),
    )


def _blank_top(k: int) -> TopLogProbs:
    return TopLogProbs(torch.zeros(1, k, dtype=torch.int32), torch.zeros(1, k, dtype=torch.float16), torch.zeros(1), torch.zeros(1))


@dataclass(frozen=True)
class Position:
    """A place in the data: the epoch, and how many rows of its order are used up."""

    epoch: int = 0
    row: int = 0


@dataclass(frozen=True)
class PlannedStep:
    """One optimiser step: ``micro_batches[round][rank]`` are row numbers of the store (a rank can go empty); ``after`` is where it ends."""

    micro_batches: tuple[tuple[tuple[int, ...], ...], ...]
    after: Position

    def of_rank(self, rank: int) -> list[tuple[int, ...]]:
        """The micro-batches of one rank, in order; all ranks have the same number of them."""
        return [ranks[rank] for ranks in self.micro_batches]


def epoch_order(rows: int, seed: int, epoch: int) -> list[int]:
    """The order of the rows in an epoch."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    return torch.randperm(rows, generator=generator).tolist()


def plan_epoch(lengths: Sequence[int], seed: int, start: Position, budget: int, world: int, accumulation: int) -> list[PlannedStep]:
    """Plan the optimiser steps of epoch ``start.epoch`` from row ``start.row`` of its order on.

    lengths: tokens of every row of the store. budget: tokens of a micro-batch; a longer row gets one for itself.
    """
    order = epoch_order(len(lengths), seed, start.epoch)
    steps, first = [], start.row
    while first < len(order):
        bins = _take(order, first, lengths, budget, world * accumulation)
        rows = sorted((row for rows in bins for row in rows), key=lambda row: (-lengths[row], row))
        first += len(rows)
        after = Position(start.epoch, first) if first < len(order) else Position(start.epoch + 1, 0)
        steps.append(PlannedStep(_deal(_balance(rows, lengths, budget, world, accumulation) or bins, lengths, world), after))
    return steps


def _take(order: Sequence[int], first: int, lengths: Sequence[int], budget: int, bins: int) -> list[list[int]]:
    """Put rows of ``order`` one by one into the emptiest of ``bins`` micro-batches until one fits nowhere."""
    taken: list[list[int]] = [[] for _ in range(bins)]
    loads = [0] * bins
    for row in itertools.islice(order, first, None):
        emptiest = min(range(bins), key=loads.__getitem__)
        if loads[emptiest] and loads[emptiest] + lengths[row] > budget:
            break
        taken[emptiest].append(row)
        loads[emptiest] += lengths[row]
    return taken


def _balance(rows: Sequence[int], lengths: Sequence[int], budget: int, world: int, accumulation: int) -> list[list[int]] | None:
    """Deal rows, longest first, to the emptiest micro-batch; in as few rounds as fit, None when no number of rounds does."""
    for rounds in range(1, accumulation + 1):
        bins: list[list[int]] = [[] for _ in range(rounds * world)]
        loads = [0] * len(bins)
        for row in rows:
            emptiest = min(range(len(bins)), key=loads.__getitem__)
            bins[emptiest].append(row)
            loads[emptiest] += lengths[row]
        if all(load <= budget or len(bin) == 1 for bin, load in zip(bins, loads, strict=True)):
            return bins
    return None


def _deal(bins: Sequence[Sequence[int]], lengths: Sequence[int], world: int) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Hand the micro-batches to the ranks, the fullest first, back and forth, so that each rank gets about the same."""
    by_load = sorted(bins, key=lambda rows: -sum(lengths[row] for row in rows))
    rounds = [by_load[first : first + world] for first in range(0, len(by_load), world)]
    return tuple(tuple(tuple(rows) for rows in (reversed(group) if number % 2 else group)) for number, group in enumerate(rounds))


def fill(lengths: Sequence[int], budget: int) -> list[tuple[int, ...]]:
    """Micro-batches over all rows, longest first, for measuring: no order to keep and no steps."""
    filled: list[tuple[int, ...]] = []
    current: list[int] = []
    load = 0
    for row in sorted(range(len(lengths)), key=lambda row: (-lengths[row], row)):
        if current and load + lengths[row] > budget:
            filled.append(tuple(current))
            current, load = [], 0
        current.append(row)
        load += lengths[row]
    return [*filled, tuple(current)] if current else filled


class Prefetch:
    """Packed batches of the given rows, read in their own thread, at most ``ahead`` of them waiting.

    Iterate it once, inside ``with``. An empty tuple of rows gives ``blank``. An error in the thread is raised where its batch is due.
    """

    def __init__(self, store: StateStore, rows: Iterable[tuple[int, ...]], ahead: int = 4, pin: bool = False) -> None:
        self._store, self._rows, self._pin = store, rows, pin
        self._queue: queue.Queue[Batch | BaseException] = queue.Queue(maxsize=ahead)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="prefetch", daemon=True)

    def __enter__(self) -> "Prefetch":
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stop.set()
        self._thread.join()

    def __iter__(self) -> Iterator[Batch]:
        while True:
            item = self._queue.get()
            if isinstance(item, _End):
                return
            if isinstance(item, BaseException):
                raise item
            yield item

    def _work(self) -> None:
        try:
            for rows in self._rows:
                batch = pack([self._store.read(row) for row in rows]) if rows else blank(self._store.spec)
                if not self._put(batch.pin() if self._pin else batch):
                    return
            self._put(_End())
        except BaseException as error:  # noqa: BLE001 - handed over to the thread that iterates
            self._put(error)

    def _put(self, item: Batch | BaseException) -> bool:
        while not self._stop.is_set():
            try:
                self._queue.put(item, timeout=0.1)
            except queue.Full:
                continue
            return True
        return False


class _End(Exception):
    """All rows were read."""
