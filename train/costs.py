"""What a training step computes: its multiply-adds, from the drafter's shape and what its micro-batch holds.

Follows ``train.ttt``, ``train.attention`` and ``train.loss`` product by product; benchmarks/plan.py holds it against the clock.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from eyas.drafter import DrafterShape
from eyas.folder import tensor_contract
from train.batches import Batch
from train.ttt import Chains


@dataclass(frozen=True)
class Work:
    """What a micro-batch holds: packed tokens, counted pairs of each TTT step, positions whose next token some pair predicts, mean number
    of step-0 keys that a pair sees, tokens of the longest row; top log-probabilities of the target at each token, None where its final
    states are there instead.
    """

    tokens: float
    counted_J: tuple[float, ...]
    labels: float
    context: float
    longest: float
    top: int | None = None

    @property
    def pairs(self) -> float:
        """Counted pairs of all steps."""
        return sum(self.counted_J)

    @property
    def chain_keys(self) -> float:
        """Keys of their own that all pairs together see: j each."""
        return sum(j * counted for j, counted in enumerate(self.counted_J))


def work_of(batch: Batch, chains: Chains) -> Work:
    """What ``batch`` holds."""
    seen = torch.cat([batch.positions_N[t_M] + 1 for t_M in chains.t_by_step]).double()
    counted_J = tuple(float(len(t_M)) for t_M in chains.t_by_step)
    labels, longest = len(chains.label_P().unique()), int(batch.starts_B1.diff().max())
    top = None if batch.top is None else batch.top.index_NK.shape[1]
    return Work(batch.tokens, counted_J, labels, float(seen.mean()) if len(seen) else 0.0, longest, top)


def planned_work(
    tokens: float,
    reply_tokens: float,
    reply_share: float,
    draftable: float,
    steps: int,
    longest: float | None = None,
    top: int | None = None,
) -> Work:
    """What ``tokens`` packed tokens hold when every row is a prompt and one reply of ``reply_tokens``.

    A reply of n tokens has n - 1 - j chains of step j, each counted when its j + 1 predicted tokens are in the draft vocabulary
    (``draftable``, taken as independent). ``longest`` is the longest row to be prepared for; None: they are all alike.
    """
    row = reply_tokens / reply_share
    rows = tokens / row
    counted_J = tuple(rows * max(reply_tokens - 1 - j, 0) * draftable ** (j + 1) for j in range(steps))
    context = row - reply_tokens / 2
    return Work(tokens, counted_J, rows * max(reply_tokens - 1, 0), context, min(longest or row, tokens), top)


@dataclass(frozen=True)
class Part:
    """A named share of a cost (multiply-adds or bytes), and how it comes about."""

    what: str
    amount: float
    how: str


def parameters(shape: DrafterShape) -> int:
    """Trained numbers: everything in an export but the vocabulary's index."""
    return sum(math.prod(size) for name, size in tensor_contract(shape).items() if name not in ("d2t", "t2d"))


def multiply_adds(shape: DrafterShape, work: Work) -> list[Part]:
    """Multiply-adds of forward and backward pass. A product costs one for the forward pass, one for each gradient it passes on."""
    h, wide = shape.hidden_size, 2 * shape.hidden_size
    queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    pairs, later = work.pairs, work.pairs - work.counted_J[0]
    return [
        Part("fc", 2 * work.tokens * shape.num_aux * h * h, "2 x tokens x aux width x hidden: the aux states need no gradient"),
        Part("k_proj, v_proj", 3 * (work.tokens + later) * wide * 2 * keys, "3 x (tokens + pairs of steps j >= 1) x 2 hidden x 2 keys"),
        Part("q_proj, o_proj", 3 * pairs * (wide * queries + queries * h), "3 x pairs x (2 hidden + hidden) x queries"),
        Part("MLP", 3 * pairs * 3 * h * shape.intermediate_size, "3 x pairs x 3 hidden x intermediate"),
        Part("lm_head", 3 * pairs * h * shape.draft_vocab_size, "3 x pairs x hidden x draft vocabulary"),
        _target_head(shape, work),
        Part(
            "attention", 7 * (pairs * work.context + work.chain_keys) * queries, "7 x pairs x keys x queries: 2 forward, 5 backward (flash)"
        ),
    ]


def _target_head(shape: DrafterShape, work: Work) -> Part:
    if work.top is not None:
        return Part("target's lm_head", 0, "none: its log-probabilities are stored")
    products = work.labels * shape.hidden_size * shape.draft_vocab_size
    return Part("target's lm_head", products, "labels x hidden x draft vocabulary: frozen, forward only")


def per_pair(shape: DrafterShape) -> int:
    """Multiply-adds of one forward pass of a pair of step j >= 1, attention scores aside: all matrices but fc."""
    return parameters(shape) - shape.num_aux * shape.hidden_size**2 - 4 * shape.hidden_size


def total(parts: Sequence[Part]) -> float:
    """Sum of the amounts."""
    return sum(part.amount for part in parts)
