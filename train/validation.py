"""Held-out rows during training: the exact acceptance walk, by category and context length, and the loss beside it.

Checkpoints are chosen by acceptance length, never by loss: the one falls long after the other has stopped to rise.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from eyas.acceptance import Acceptance, Cycle, context_bucket, walk
from eyas.errors import EyasError
from eyas.states import StateStore
from train.batches import Prefetch, fill
from train.ttt import TrainingTimeTest, evaluate_hits


@dataclass(frozen=True)
class HeldOut:
    """One held-out set: acceptance over all of it, by category, by context length, and the mean loss of each counted step."""

    overall: Acceptance
    by_category: dict[str, Acceptance]
    by_context: dict[str, Acceptance]
    loss_J: tuple[float | None, ...]

    def as_json(self) -> dict[str, Any]:
        """All of it by name."""
        return {
            **self.overall.as_json(),
            "loss_J": self.loss_J,
            "by_category": {name: part.as_json() for name, part in self.by_category.items()},
            "by_context": {name: part.as_json() for name, part in self.by_context.items()},
        }


@dataclass(frozen=True)
class Measurement:
    """The held-out sets 'greedy' and 'sampled' at one point of the training."""

    sets: dict[str, HeldOut]

    @property
    def length(self) -> float:
        """What checkpoints are chosen by: the mean of the sets' acceptance lengths."""
        lengths = [held_out.overall.length for held_out in self.sets.values()]
        return sum(length for length in lengths if length is not None) / len(lengths)

    def as_json(self) -> dict[str, Any]:
        """For log.jsonl."""
        return {"acceptance_length": self.length, **{name: held_out.as_json() for name, held_out in self.sets.items()}}


def measure(
    test: TrainingTimeTest,
    store: StateStore,
    budget: int,
    device: torch.device,
    rank: int = 0,
    world: int = 1,
    reduce: Callable[[Tensor], Tensor] = lambda sums: sums,
) -> HeldOut:
    """Walk over every reply of ``store`` with ``test.steps`` drafts a verify step.

    The processes share the batches out; ``reduce`` adds a float64 vector over them. Raises EyasError when no reply has two tokens.
    """
    categories = sorted(set(store.categories))
    contexts = _buckets(max(store.lengths, default=0))
    names = ["all", *(f"category {name}" for name in categories), *(f"context {name}" for name in contexts)]
    cycles_by_name: dict[str, list[Cycle]] = {name: [] for name in names}
    loss_J = torch.zeros(test.steps, dtype=torch.float64)
    counted_J = torch.zeros(test.steps, dtype=torch.float64)
    category_of = dict(zip(store.keys, store.categories, strict=True))
    with Prefetch(store, fill(store.lengths, budget)[rank::world], pin=device.type == "cuda") as batches:
        for batch in batches:
            evaluation = evaluate_hits(test, batch.to(device, test.target_head_DH.dtype))
            loss_J += evaluation.sums.loss_J.cpu()
            counted_J += evaluation.sums.counted_J.cpu()
            for reply in evaluation.replies:
                cycles = walk(reply.hits_MJ, reply.chain_t_M)
                cycles_by_name["all"] += cycles
                cycles_by_name[f"category {category_of[batch.keys[reply.row]]}"] += cycles
                for cycle in cycles:
                    cycles_by_name[f"context {context_bucket(cycle.context)}"].append(cycle)
    numbers = [Acceptance.of(cycles, test.steps).numbers() for cycles in cycles_by_name.values()]
    sums = torch.cat([torch.tensor(numbers, dtype=torch.float64).flatten(), loss_J, counted_J])
    totals = reduce(sums.to(device)).cpu()
    return _held_out(totals, names, test.steps, store)


def _held_out(totals: Tensor, names: Sequence[str], steps: int, store: StateStore) -> HeldOut:
    counts, loss_J, counted_J = totals.split([len(totals) - 2 * steps, steps, steps])
    table = counts.long().view(len(names), -1).tolist()
    parts = {name: Acceptance.from_numbers(row) for name, row in zip(names, table, strict=True)}
    if not parts["all"].cycles:
        raise EyasError(f"{store.folder}: no held-out reply has two supervised tokens, there is nothing to measure")
    by = {
        kind: {name.removeprefix(f"{kind} "): part for name, part in parts.items() if name.startswith(f"{kind} ") and part.cycles}
        for kind in ("category", "context")
    }
    losses = tuple(loss / counted if counted else None for loss, counted in zip(loss_J.tolist(), counted_J.tolist(), strict=True))
    return HeldOut(parts["all"], by["category"], by["context"], losses)


def _buckets(longest: int) -> list[str]:
    """Every context bucket up to ``longest`` tokens, in order."""
    return list(dict.fromkeys(context_bucket(1 << power) for power in range(max(longest, 1).bit_length())))
