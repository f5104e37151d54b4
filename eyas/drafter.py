"""The EAGLE-3 drafter: one decoder layer that guesses the target's next tokens from its hidden states.

What it computes, in order (the same as SGLang's ``LlamaForCausalLMEagle3``):

    h = fc(aux)                                          combine: three states of the target, side by side, to one
    x = [input_layernorm(embed(token)), hidden_norm(h)]  layer_input: 2H wide
    q, k, v = W x, rotary position on q and k            queries, keys_values
    h = h + o_proj(attention);  h = h + MLP(norm(h))     finish: the residual is h as it came in, not normed
    logits = lm_head(norm(h)) over the draft vocabulary  logits

Attention itself belongs to the caller: training and serving see different keys. The un-normed ``h`` that ``finish`` returns is both what
``logits`` reads and what the next draft step takes in place of ``combine``'s result.
Shapes: leading dimensions are free ("x"), H hidden size, A = num_aux * H, Q and K query and key-value heads, d head size, V and D target
and draft vocabulary. Row r of ``lm_head`` is target token ``r + d2t[r]``.
"""

from collections.abc import Callable
from typing import Any, Self

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from eyas import vocab

# Kinds that SGLang and transformers compute alike; the others (dynamic, longrope, mrope ...) need more than a position.
_ROPE_KEYS: dict[str, frozenset[str]] = {
    "linear": frozenset({"factor"}),
    "llama3": frozenset({"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}),
    "yarn": frozenset({"factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"}),
}
_NEEDED_ROPE_KEYS = {**_ROPE_KEYS, "yarn": frozenset({"factor", "original_max_position_embeddings"})}


class DrafterShape(BaseModel):
    """Sizes and constants of a drafter; with the weights, all that decides what it computes.

    ``rope_scaling`` is None or ``{"rope_type": "linear" | "llama3" | "yarn", "factor": ...}`` with transformers' keys; ``max_position`` is
    the number of positions it can be used at.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    hidden_size: int = Field(ge=1)
    intermediate_size: int = Field(ge=1)
    num_heads: int = Field(ge=1)
    num_kv_heads: int = Field(ge=1)
    head_dim: int = Field(ge=2)
    vocab_size: int = Field(ge=1)
    draft_vocab_size: int = Field(ge=1)
    num_aux: int = Field(3, ge=1)
    rms_norm_eps: float = Field(gt=0)
    rope_theta: float = Field(gt=0)
    rope_scaling: dict[str, Any] | None = None
    max_position: int = Field(ge=1)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads {self.num_heads} is no multiple of num_kv_heads {self.num_kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim {self.head_dim} is odd; rotary positions need pairs")
        if self.draft_vocab_size > self.vocab_size:
            raise ValueError(f"draft_vocab_size {self.draft_vocab_size} is above vocab_size {self.vocab_size}")
        if self.rope_scaling is not None:
            check_rope(self.rope_scaling)
        return self

    @property
    def scale(self) -> float:
        """What attention scores are multiplied by before the softmax."""
        return float(self.head_dim) ** -0.5


def check_rope(scaling: dict[str, Any]) -> None:
    """Raise ValueError naming what of a ``rope_scaling`` a drafter cannot have."""
    kind = scaling.get("rope_type")
    if kind not in _ROPE_KEYS:
        raise ValueError(f"rope_type {kind!r} is not supported (linear, llama3 and yarn are)")
    given = set(scaling) - {"rope_type"}
    if unknown := sorted(given - _ROPE_KEYS[kind]):
        raise ValueError(f"rope_type {kind}: {unknown[0]} is not supported")
    if missing := sorted(_NEEDED_ROPE_KEYS[kind] - given):
        raise ValueError(f"rope_type {kind}: {missing[0]} is missing")
    if ("mscale" in given) != ("mscale_all_dim" in given):
        raise ValueError("rope_type yarn: mscale and mscale_all_dim only count together")


def rope_table(shape: DrafterShape, device: torch.device | str | None = None) -> Tensor:
    """Rotary factors of every position: float32 [max_position, 2, head_dim], row 0 cosines, row 1 sines signed for ``rotate``.

    Frequencies are transformers' (ROPE_INIT_FUNCTIONS); yarn's magnitude is in both rows, as in SGLang.
    """
    frequencies_f, magnitude = _frequencies(shape)
    positions_P = torch.arange(shape.max_position, dtype=torch.float32, device=device)
    angles_Pf = torch.outer(positions_P, frequencies_f.to(positions_P))
    cosines_Pf, sines_Pf = angles_Pf.cos() * magnitude, angles_Pf.sin() * magnitude
    return torch.stack([torch.cat([cosines_Pf, cosines_Pf], -1), torch.cat([-sines_Pf, sines_Pf], -1)], 1)


def _frequencies(shape: DrafterShape) -> tuple[Tensor, float]:
    if shape.rope_scaling is None:
        exponents_f = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
        return 1.0 / shape.rope_theta**exponents_f, 1.0
    config = LlamaConfig(
        hidden_size=shape.hidden_size,
        num_attention_heads=shape.num_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.max_position,
        rope_parameters={"rope_theta": shape.rope_theta, **shape.rope_scaling},
    )
    return ROPE_INIT_FUNCTIONS[shape.rope_scaling["rope_type"]](config, torch.device("cpu"))


def rotate(x_xHd: Tensor, factors_x2d: Tensor) -> Tensor:
    """Turn the pairs (i, i + d/2) of every head by its position's angle, in float32; ``factors_x2d`` are rows of ``rope_table``."""
    cosines_x1d, sines_x1d = factors_x2d.unsqueeze(-3).unbind(-2)
    wide_xHd = _wide(x_xHd)
    return torch.addcmul(wide_xHd * cosines_x1d, wide_xHd.roll(x_xHd.shape[-1] // 2, -1), sines_x1d).to(x_xHd.dtype)


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight, computed in float32 and rounded once to the dtype of ``x``."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x_xH: Tensor) -> Tensor:
        """The normed ``x``, same shape and dtype."""
        wide_xH = _wide(x_xH)
        return F.rms_norm(wide_xH, self.weight.shape, self.weight.to(wide_xH.dtype), self.eps).to(x_xH.dtype)


class Attention(nn.Module):
    """The four projections; the product of queries and keys is the caller's."""

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        self.q_proj = nn.Linear(2 * shape.hidden_size, shape.num_heads * shape.head_dim, bias=False)
        self.k_proj = nn.Linear(2 * shape.hidden_size, shape.num_kv_heads * shape.head_dim, bias=False)
        self.v_proj = nn.Linear(2 * shape.hidden_size, shape.num_kv_heads * shape.head_dim, bias=False)
        self.o_proj = nn.Linear(shape.num_heads * shape.head_dim, shape.hidden_size, bias=False)


class MLP(nn.Module):
    """SwiGLU: down(silu(gate x) * up x)."""

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x_xH: Tensor) -> Tensor:
        """Same shape out as in."""
        return self.down_proj(F.silu(self.gate_proj(x_xH)) * self.up_proj(x_xH))


class Midlayer(nn.Module):
    """The decoder layer, under the names its weights have in a drafter folder."""

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.hidden_norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = MLP(shape)


class Drafter(nn.Module):
    """The network; its state dict is the exported file (``d2t`` and ``t2d`` included, the embedding not).

    The embedding is the target's and frozen: give it with ``set_embedding`` before ``layer_input``.
    A new instance has random weights and, unless told otherwise, d2t of zeros: the first D target tokens.
    """

    embedding_VH: Tensor | None
    d2t: Tensor
    t2d: Tensor

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        self.shape = shape
        self.fc = nn.Linear(shape.num_aux * shape.hidden_size, shape.hidden_size, bias=False)
        self.midlayer = Midlayer(shape)
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.lm_head = nn.Linear(shape.hidden_size, shape.draft_vocab_size, bias=False)
        self.register_buffer("d2t", torch.zeros(shape.draft_vocab_size, dtype=torch.int64))
        self.register_buffer("t2d", torch.arange(shape.vocab_size) < shape.draft_vocab_size)
        self.register_buffer("embedding_VH", None, persistent=False)
        self._rope_P2d: Tensor | None = None
        self._qkv: Tensor | None = None
        self._gate_up: Tensor | None = None

    def set_embedding(self, embedding_VH: Tensor) -> None:
        """Take the target's embedding; it is neither trained nor saved. It keeps its dtype, looked-up rows take that of the states."""
        expected = (self.shape.vocab_size, self.shape.hidden_size)
        if tuple(embedding_VH.shape) != expected:
            raise ValueError(f"embedding is {tuple(embedding_VH.shape)}, the drafter needs {expected}")
        self.embedding_VH = embedding_VH.detach()

    @property
    def draft_ids_D(self) -> Tensor:
        """Target token id of every row of ``lm_head``, int64."""
        return vocab.absolute(self.d2t)

    def combine(self, aux_xA: Tensor) -> Tensor:
        """The target's aux states, concatenated in layer order, to one hidden state [..., H]."""
        return self.fc(aux_xA)

    def layer_input(self, token_ids_x: Tensor, hidden_xH: Tensor) -> Tensor:
        """Normed embedding of the token beside the normed state: [..., 2H]."""
        assert self.embedding_VH is not None, "set_embedding comes first"
        embedded_xH = F.embedding(token_ids_x, self.embedding_VH).to(hidden_xH.dtype)
        return torch.cat([self.midlayer.input_layernorm(embedded_xH), self.midlayer.hidden_norm(hidden_xH)], -1)

    def queries(self, x_x2H: Tensor, positions_x: Tensor) -> Tensor:
        """Rotated queries [..., Q, d] of a layer input at its positions (int64, from 0)."""
        q_xQd = self.midlayer.self_attn.q_proj(x_x2H).unflatten(-1, (self.shape.num_heads, self.shape.head_dim))
        return rotate(q_xQd, self._rope(positions_x))

    def keys_values(self, x_x2H: Tensor, positions_x: Tensor) -> tuple[Tensor, Tensor]:
        """Rotated keys and plain values, each [..., K, d]."""
        heads = (self.shape.num_kv_heads, self.shape.head_dim)
        k_xKd = self.midlayer.self_attn.k_proj(x_x2H).unflatten(-1, heads)
        v_xKd = self.midlayer.self_attn.v_proj(x_x2H).unflatten(-1, heads)
        return rotate(k_xKd, self._rope(positions_x)), v_xKd

    def queries_keys_values(self, x_x2H: Tensor, positions_x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """``queries`` and ``keys_values`` of the same input; one matrix product after ``fuse``."""
        if self._qkv is None:
            return self.queries(x_x2H, positions_x), *self.keys_values(x_x2H, positions_x)
        queries, keys = self.shape.num_heads, self.shape.num_kv_heads
        heads_xhd = F.linear(x_x2H, self._qkv).unflatten(-1, (queries + 2 * keys, self.shape.head_dim))
        turned_xhd = rotate(heads_xhd.narrow(-2, 0, queries + keys), self._rope(positions_x))
        return turned_xhd.narrow(-2, 0, queries), turned_xhd.narrow(-2, queries, keys), heads_xhd.narrow(-2, queries + keys, keys)

    def finish(self, attention_xQd: Tensor, hidden_xH: Tensor) -> Tensor:
        """The layer after attention: o_proj, residual, MLP, residual; ``hidden_xH`` is what ``layer_input`` was given."""
        hidden_xH = hidden_xH + self.midlayer.self_attn.o_proj(attention_xQd.flatten(-2))
        normed_xH = self.midlayer.post_attention_layernorm(hidden_xH)
        if self._gate_up is None:
            return hidden_xH + self.midlayer.mlp(normed_xH)
        gate_xI, up_xI = F.linear(normed_xH, self._gate_up).chunk(2, -1)
        return hidden_xH + self.midlayer.mlp.down_proj(F.silu(gate_xI) * up_xI)

    def logits(self, hidden_xH: Tensor) -> Tensor:
        """Scores over the draft vocabulary [..., D] of a state that ``finish`` returned."""
        return self.lm_head(self.norm(hidden_xH))

    def fuse(self) -> Self:
        """Prepare for serving: q, k, v and gate, up become one matrix each (the single ones stay, as views). Freezes the weights.

        Comes after ``.to()``: moving or converting the module undoes it.
        """
        self.requires_grad_(False)
        attention, mlp = self.midlayer.self_attn, self.midlayer.mlp
        self._qkv = _pack([attention.q_proj, attention.k_proj, attention.v_proj])
        self._gate_up = _pack([mlp.gate_proj, mlp.up_proj])
        return self

    def _rope(self, positions_x: Tensor) -> Tensor:
        if self._rope_P2d is None or self._rope_P2d.device != positions_x.device:
            self._rope_P2d = rope_table(self.shape, positions_x.device)
        return self._rope_P2d[positions_x]

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        # .to(), .half(), .cuda() replace every parameter: what was packed or computed for the old ones is stale
        self._rope_P2d = self._qkv = self._gate_up = None
        return super()._apply(fn, recurse)


def _pack(layers: list[nn.Linear]) -> Tensor:
    packed = torch.cat([layer.weight.detach() for layer in layers])
    for layer, part in zip(layers, packed.split([layer.out_features for layer in layers]), strict=True):
        layer.weight.data = part
    return packed
