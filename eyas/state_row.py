"""One row of the hidden-state store: what it holds, its name, and how it lies on disk.

Nothing here needs more than torch and numpy: capture plug-ins write rows from within an engine, whose environment is not ours.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from eyas.distribution import TopLogProbs
from eyas.fp8 import blocks, quantise

LARGEST_VOCAB = 1 << 16
"""Rows of a draft vocabulary that a stored index can count to."""
LEAST_LOGPROB = torch.finfo(torch.float16).min


@dataclass(frozen=True)
class StateSpec:
    """What every row of a store has in common; two stores with different specs cannot be mixed.

    ``layers`` are ids k of HF ``hidden_states[k]``; ``hidden_size`` is the target's H. With ``top_logprobs`` k a row holds, in place of the
    final state, the target's k largest log-probabilities in the draft vocabulary of ``vocab_digest`` (``eyas.vocab.vocab_digest``).
    """

    layers: tuple[int, ...]
    hidden_size: int
    dtype: Literal["bfloat16", "fp8"]
    vocab_size: int
    target_digest: str
    tokenizer_digest: str
    top_logprobs: int | None = None
    vocab_digest: str | None = None

    def to_json(self) -> dict[str, Any]:
        """The spec as JSON reads it back, for manifest and sidecars; without the last two where there are none, as stores always were."""
        return {name: value for name, value in asdict(self).items() if value is not None} | {"layers": list(self.layers)}

    @property
    def final_width(self) -> int:
        """Width of the final states: H, or 0 where the top log-probabilities stand for them."""
        return self.hidden_size if self.top_logprobs is None else 0

    @property
    def aux_width(self) -> int:
        """A, the width of the joined aux states."""
        return len(self.layers) * self.hidden_size

    def tensors(self) -> dict[str, tuple[torch.dtype, int | None]]:
        """Name -> (dtype, width; None for one value a token) of a shard's tensors, in the order in which they lie in the file."""
        tail: dict[str, tuple[torch.dtype, int | None]] = {"supervised": (torch.uint8, None)}
        if self.top_logprobs is not None:
            head: dict[str, tuple[torch.dtype, int | None]] = {
                "ids": (torch.int32, None),
                "rest": (torch.float32, None),
                "outside": (torch.float32, None),
                # float16, not bfloat16: a probability of e^-8 .. e^-16 is off by at most 0.4 %, not 3 %; on SmolLM2, k 128, the sum of
                # a token's errors is 0.0003 instead of 0.0021
                "logprob": (torch.float16, self.top_logprobs),
                "index": (torch.uint16, self.top_logprobs),
            }
            if self.dtype == "bfloat16":
                return {**head, "aux": (torch.bfloat16, self.aux_width), **tail}
            scale = (torch.bfloat16, len(self.layers) * blocks(self.hidden_size))
            return {**head, "aux_scale": scale, "aux": (torch.float8_e4m3fn, self.aux_width), **tail}
        if self.dtype == "bfloat16":
            return {
                "ids": (torch.int32, None),
                "aux": (torch.bfloat16, self.aux_width),
                "final": (torch.bfloat16, self.hidden_size),
                **tail,
            }
        scales = blocks(self.hidden_size)
        return {
            "ids": (torch.int32, None),
            "aux_scale": (torch.bfloat16, len(self.layers) * scales),
            "final_scale": (torch.bfloat16, scales),
            "aux": (torch.float8_e4m3fn, self.aux_width),
            "final": (torch.float8_e4m3fn, self.hidden_size),
            **tail,
        }

    def bytes_per_token(self) -> int:
        """Disk bytes of one token, headers and index aside."""
        return sum(dtype.itemsize * (width or 1) for dtype, width in self.tensors().values())


@dataclass(frozen=True, eq=False)
class StateRow:
    """One conversation: T tokens, which of them are supervised, and the target's states at each.

    ``aux_TA`` joins hidden_states[k] for k in the spec's layers; ``final_TH`` is the state that lm_head multiplies. As written: any float
    dtype, any device. As read: bfloat16 on the CPU; a bfloat16 store hands out views of the mapped file (copy before changing them).
    Where the spec has ``top_logprobs``, ``top`` is there, one entry a token, and ``final_TH`` is [T, 0].
    """

    key: str
    category: str
    ids_T: Tensor
    supervised_T: Tensor
    aux_TA: Tensor
    final_TH: Tensor
    top: TopLogProbs | None = None


class NotFinite(ValueError):
    """A row's states (or log-probabilities) hold NaN or infinity, or become so in bfloat16; the row is not stored. ``key`` names it."""

    def __init__(self, key: str, tensor: str) -> None:
        super().__init__(f"row {key}: {tensor} states are not finite in bfloat16")
        self.key = key


def row_key(ids: Sequence[int], supervised: Sequence[bool]) -> str:
    """SHA-256 over a row's ids (int32, little-endian) and supervised mask (one byte each), hexadecimal: the row's name everywhere."""
    if len(ids) != len(supervised):
        raise ValueError(f"{len(ids)} ids, but {len(supervised)} supervised flags")
    digest = hashlib.sha256(np.asarray(ids, dtype="<i4").tobytes())
    digest.update(np.asarray(supervised, dtype=np.bool_).tobytes())
    return digest.hexdigest()


def check_row(row: StateRow, spec: StateSpec) -> None:
    """Raise ValueError when the row does not fit the spec, or its key is not that of its tokens."""
    tokens = len(row.ids_T)
    wanted = {"ids": (tokens,), "supervised": (tokens,), "aux": (tokens, spec.aux_width), "final": (tokens, spec.final_width)}
    given = {"ids": row.ids_T, "supervised": row.supervised_T, "aux": row.aux_TA, "final": row.final_TH}
    if (row.top is None) != (spec.top_logprobs is None):
        raise ValueError(f"row {row.key}: top log-probabilities are {'missing' if row.top is None else 'none that this store holds'}")
    if row.top is not None and spec.top_logprobs is not None:
        top, k = row.top, spec.top_logprobs
        wanted |= {"index": (tokens, k), "logprob": (tokens, k), "rest": (tokens,), "outside": (tokens,)}
        given |= {"index": top.index_NK, "logprob": top.logprob_NK, "rest": top.rest_N, "outside": top.outside_N}
    for name, shape in wanted.items():
        if given[name].shape != shape:
            raise ValueError(f"row {row.key}: {name} has shape {list(given[name].shape)}, expected {list(shape)}")
    if not tokens:
        raise ValueError(f"row {row.key} has no tokens")
    if row.ids_T.min() < 0 or row.ids_T.max() >= spec.vocab_size:
        raise ValueError(f"row {row.key} has ids outside the vocabulary of {spec.vocab_size}")
    if row.key != row_key(row.ids_T.tolist(), row.supervised_T.tolist()):
        raise ValueError(f"row {row.key}: the key is not row_key of its ids and supervised mask")


def encode_row(row: StateRow, spec: StateSpec) -> dict[str, Tensor]:
    """The row's tensors as they lie on disk, in memory of their own: the caller's may be slices of a big batch.

    Raises NotFinite for NaN or infinity.
    """
    pieces = {
        "ids": row.ids_T.to("cpu", torch.int32, copy=True),
        "supervised": row.supervised_T.to("cpu", torch.uint8, copy=True),
    }
    states = [("aux", row.aux_TA)]
    if row.top is None:
        states.append(("final", row.final_TH))
    else:
        pieces |= _encode_top(row.key, row.top)
    for name, values in states:
        rounded = values.detach().to(torch.bfloat16)
        low, high = rounded.aminmax()  # NaN comes through; fifty times as fast on a CPU as isfinite().all()
        if not bool(low.isfinite() & high.isfinite()):
            raise NotFinite(row.key, name)
        if spec.dtype == "bfloat16":
            pieces[name] = rounded.to("cpu", copy=True, memory_format=torch.contiguous_format)
        else:
            codes, scales = quantise(rounded, spec.hidden_size)
            pieces[name], pieces[f"{name}_scale"] = codes.cpu(), scales.cpu()
    return pieces


def _encode_top(key: str, top: TopLogProbs) -> dict[str, Tensor]:
    """A log-probability of minus infinity (a token that the target never says) becomes the least that float16 has."""
    logprob_TK = top.logprob_NK.detach().float().clamp_min(LEAST_LOGPROB)
    for name, values in (("log-probabilities", logprob_TK), ("rest masses", top.rest_N), ("outside masses", top.outside_N)):
        if not bool(values.isfinite().all()):
            raise NotFinite(key, name)
    return {
        "index": top.index_NK.to("cpu", torch.uint16, copy=True),
        "logprob": logprob_TK.to("cpu", torch.float16),
        "rest": top.rest_N.detach().to("cpu", torch.float32, copy=True),
        "outside": top.outside_N.detach().to("cpu", torch.float32, copy=True),
    }


def decode_top(part: Mapping[str, Tensor]) -> TopLogProbs:
    """The top log-probabilities of a stretch of a shard: index int32, the log-probabilities float16 as they lie there."""
    return TopLogProbs(part["index"].int(), part["logprob"], part["rest"], part["outside"])
