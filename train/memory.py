"""What training holds in memory, from the drafter's shape and what a micro-batch holds.

Follows ``train.ttt``, ``train.attention`` and ``train.loss`` tensor by tensor; who changes what those keep changes it here
(tests/train/test_memory.py measures a real step, benchmarks/plan.py several).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from eyas.drafter import DrafterShape
from eyas.sheet import terms
from train.attention import BLOCK_QUERIES
from train.costs import Part, Work, parameters, total
from train.loss import LABELS_PER_BLOCK, LABELS_PER_SLICE

FP32 = 4
GIB = 2**30
BATCH_STEP = 256
TOKEN = 17  # id, position, whether it is supervised


@dataclass(frozen=True)
class Ranks:
    """How training is spread: processes, bytes of a number in the compute dtype, kind of device, FSDP2 instead of DDP."""

    count: int = 1
    compute: int = 2
    device: Literal["cuda", "cpu"] = "cuda"
    sharded: bool = False

    @property
    def norm(self) -> int:
        """Bytes that an RMSNorm keeps of each number: CUDA's kernel its float32 input, PyTorch's composite also the normed one."""
        return FP32 if self.device == "cuda" else 2 * FP32

    @property
    def casts(self) -> bool:
        """Whether matrices are cast from their float32 masters."""
        return self.compute < FP32


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank. ``held`` stays between steps, ``kept`` from forward to backward pass; of ``phases`` the largest counts."""

    held: list[Part]
    kept: list[Part]
    phases: list[Part]

    @property
    def peak(self) -> float:
        """The most that is there at any time."""
        return total(self.held) + self.worst.amount

    @property
    def worst(self) -> Part:
        """The phase that needs most."""
        return max(self.phases, key=lambda part: part.amount)


def memory(shape: DrafterShape, work: Work, ranks: Ranks) -> Memory:
    """Memory of one rank for a micro-batch of ``work``; the libraries' own (some hundred MB a process) and fragmentation left out.

    FSDP2 shards masters, gradients and moments; the drafter being one layer, its casts are gathered whole.
    """
    held, kept = _held(shape, work, ranks), _kept(shape, work, ranks)
    weights = ranks.compute * _matrices(shape)
    casts, all_kept = weights * ranks.casts, total(kept)
    # alone, gradients live from the backward pass to the update; with others they are held, in the buckets that are exchanged
    alone = (FP32 * parameters(shape) if ranks.casts else weights) if ranks.count == 1 else casts
    normed = ranks.norm * work.pairs * shape.hidden_size
    phases = [
        _phase("loss", {"casts": casts, "kept": all_kept, **_loss(shape, work, ranks)}),
        _phase("backward, final norm", {"casts": casts, "kept": all_kept, **_final_norm(shape, work, ranks)}),
        _phase(
            "backward, last step",
            {"casts": casts, "kept less final norm": all_kept - normed, "weights' gradients": weights, **_last_step(shape, work, ranks)},
        ),
        _phase("backward, end", {"casts": casts, "kept by tokens": kept[0].amount + kept[1].amount, "weights' gradients": alone}),
    ]
    return Memory(held, kept, phases)


def _phase(what: str, summands: Mapping[str, float]) -> Part:
    return Part(what, sum(summands.values()), terms({name: amount / GIB for name, amount in summands.items()}))


def traffic(shape: DrafterShape, work: Work, ranks: Ranks) -> list[Part]:
    """Bytes that a step reads and writes beside its products: what is too little arithmetic to be counted in operations.

    A rough count of the passes over each tensor (a pass reads it or writes it), good enough because products outweigh it.
    """
    c, scores = ranks.compute, shape.num_heads * work.pairs * work.context
    logits = work.pairs * shape.draft_vocab_size
    return [
        Part("kept states", 6 * total(_kept(shape, work, ranks)), "6 x kept: written, read, and the same for their gradients, twice read"),
        Part("attention scores", (100 + 13 * c) * scores, f"pairs x keys x heads x (25 passes in float32, 13 in {c} B)"),
        Part(
            "logits",
            (52 + 5 * c) * logits + 20 * work.labels * shape.draft_vocab_size * (work.top is None),
            f"pairs x draft vocabulary x (13 passes of 4 B, 5 of {c} B)",
        ),
        Part("weights", (32 + 5 * c) * parameters(shape), f"parameters x (8 passes of 4 B: update, norm, scaling; 5 of {c} B)"),
    ]


def largest_batch(shape: DrafterShape, ranks: Ranks, room: float, work: Callable[[int], Work], most: int = 2**22) -> int:
    """Largest number of packed tokens, a multiple of 256, whose peak stays within ``room`` bytes; 0 when none does."""
    low, high = 0, most // BATCH_STEP
    while low < high:
        middle = (low + high + 1) // 2
        if memory(shape, work(BATCH_STEP * middle), ranks).peak <= room:
            low = middle
        else:
            high = middle - 1
    return BATCH_STEP * low


def _matrices(shape: DrafterShape) -> int:
    """Trained numbers in matrices but lm_head's."""
    return parameters(shape) - 4 * shape.hidden_size - shape.draft_vocab_size * shape.hidden_size


def _held(shape: DrafterShape, work: Work, ranks: Ranks) -> list[Part]:
    own = parameters(shape) / (ranks.count if ranks.sharded else 1)
    share = f" / {ranks.count} ranks" if ranks.sharded else ""
    c, h = ranks.compute, shape.hidden_size
    return [
        Part("masters", FP32 * own, f"parameters x 4 B{share}"),
        Part("AdamW moments", 2 * FP32 * own, f"parameters x 2 x 4 B{share}"),
        Part(
            "gradients", FP32 * own * (ranks.count > 1), f"parameters x 4 B{share}" if ranks.count > 1 else "one process: only while needed"
        ),
        Part("embedding", c * shape.vocab_size * h, f"vocabulary x hidden x {c} B, frozen"),
        Part("target's lm_head", c * shape.draft_vocab_size * h * (work.top is None), f"draft vocabulary x hidden x {c} B, frozen"),
        Part("rotary table", FP32 * shape.max_position * 2 * shape.head_dim, "positions x 2 x head size x 4 B"),
    ]


def _kept(shape: DrafterShape, work: Work, ranks: Ranks) -> list[Part]:
    """What the backward pass needs of the forward pass: inputs of products, of norms (in float32), of SwiGLU, of attention."""
    c, h, d = ranks.compute, shape.hidden_size, shape.head_dim
    queries, keys = shape.num_heads * d, shape.num_kv_heads * d
    rotary = FP32 * 2 * d
    token = (FP32 + ranks.norm + 2 * c) * h + rotary + 2 * c * keys
    pair = (2 * c + ranks.norm + c + ranks.norm) * h + rotary + 2 * c * queries + FP32 * shape.num_heads + 4 * c * shape.intermediate_size
    later = (FP32 + ranks.norm) * h + rotary
    target = (h * c if work.top is None else 6 * work.top + 2 * FP32) + TOKEN
    return [
        Part(
            "batch",
            work.tokens * (shape.num_aux * h * c + target),
            f"tokens x (aux {shape.num_aux * h:,} x {c} B + {target:,} B of the target)",
        ),
        Part("kept by tokens", work.tokens * token, f"tokens x {token:,} B: two norms, layer input, key, value"),
        Part(
            "kept by pairs",
            work.pairs * pair + (work.pairs - work.counted_J[0]) * later,
            f"pairs x {pair:,} B + those of steps j >= 1 x {later:,} B: norms, layer input, query, attention, 4 x SwiGLU",
        ),
        Part("kept as chains' keys", work.chain_keys * 2 * c * keys, f"sum of j x pairs of step j x 2 x keys x {c} B"),
    ]


def _loss(shape: DrafterShape, work: Work, ranks: Ranks) -> dict[str, float]:
    c, h, size = ranks.compute, shape.hidden_size, shape.draft_vocab_size
    labels = min(LABELS_PER_BLOCK, work.labels)
    each = work.pairs / max(work.labels, 1)
    softmaxed = min(LABELS_PER_SLICE[ranks.device], labels)
    wide = 2 * FP32 + FP32 * ranks.casts
    if work.top is None:
        block = labels * (each + 1) * size * c + softmaxed * size * (each * wide + 2 * FP32)
    else:
        block = labels * each * size * c + softmaxed * each * (size * wide + work.top * 4 * FP32)
    scaled = (FP32 + 2 * c) * work.pairs * h
    return {
        "lm_head's cast and gradient": (c * ranks.casts + FP32 + c) * size * h,
        "4 x normed states": 4 * c * work.pairs * h,
        **({"a block's logits": block} if block > scaled else {"their gradient, scaled": scaled}),
    }


def _final_norm(shape: DrafterShape, work: Work, ranks: Ranks) -> dict[str, float]:
    wide = 2 if ranks.device == "cuda" else 4
    return {
        "lm_head's gradient": FP32 * shape.draft_vocab_size * shape.hidden_size,
        f"states' gradients, {wide} x float32": (2 * ranks.compute + wide * FP32) * work.pairs * shape.hidden_size,
    }


def _last_step(shape: DrafterShape, work: Work, ranks: Ranks) -> dict[str, float]:
    """Gradients of all pairs' final states, then what the MLP or the attention of the last step needs on its way back."""
    c, h, d = ranks.compute, shape.hidden_size, shape.head_dim
    queries, keys = shape.num_heads * d, shape.num_kv_heads * d
    pairs, own_keys = work.counted_J[-1], len(work.counted_J) - 1
    mlp = {"MLP": pairs * (5 * c * shape.intermediate_size + 2 * FP32 * h)}
    block = min(BLOCK_QUERIES[ranks.device], pairs)
    attention = {
        "queries": pairs * queries * (4 * c + 2 * FP32),
        "keys": work.tokens * keys * (4 * c + 2 * FP32) + pairs * own_keys * keys * 4 * c,
        f"scores of {block:,.0f} queries x {work.longest:,.0f} keys": shape.num_heads
        * block
        * work.longest
        * (2 * FP32 + 2 * c * ranks.casts),
    }
    larger = mlp if sum(mlp.values()) > sum(attention.values()) else attention
    return {"states' gradients": c * work.pairs * h, **larger}
