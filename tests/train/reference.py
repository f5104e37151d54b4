"""The training-time test the slow way, in float64: one pair (t, j) after the other, as the formulas read. Shares no code with train/."""

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from eyas.drafter import Drafter
from train.batches import Batch


@dataclass(frozen=True)
class Pair:
    """One counted pair: where it is (packed position t, step j), its loss and whether argmax q is the text's token."""

    t: int
    j: int
    loss: Tensor
    hit: bool


def counts(ids: list[int], supervised: list[bool], in_draft: list[bool], t: int, j: int) -> bool:
    """Whether (t, j) of a row counts: x_t+1 .. x_t+2+j supervised, hence of one reply, x_t+2 .. x_t+2+j in the draft vocabulary."""
    if t + 2 + j >= len(ids):
        return False
    return all(supervised[t + 1 : t + 3 + j]) and all(in_draft[token] for token in ids[t + 2 : t + 3 + j])


def reference_pairs(drafter: Drafter, batch: Batch, target_head_DH: Tensor, steps: int) -> list[Pair]:
    """All counted pairs of all rows."""
    starts = batch.starts_B1.tolist()
    return [pair for start, end in pairwise(starts) for pair in _row(drafter, batch, target_head_DH, steps, start, end)]


def reference_loss(drafter: Drafter, batch: Batch, target_head_DH: Tensor, steps: int, decay: float) -> Tensor:
    """Sum over j of decay^j times the sum over t of l(t, j)."""
    return sum((decay**pair.j * pair.loss for pair in reference_pairs(drafter, batch, target_head_DH, steps)), torch.zeros(()).double())


def _row(drafter: Drafter, batch: Batch, target_head_DH: Tensor, steps: int, start: int, end: int) -> list[Pair]:
    ids, supervised, n = batch.ids_N[start:end].tolist(), batch.supervised_N[start:end].tolist(), end - start
    in_draft = drafter.t2d.tolist()
    fc_TH = batch.aux_NA[start:end].double() @ drafter.fc.weight.T
    step0 = [_layer_input(drafter, ids[t + 1], fc_TH[t]) for t in range(n - 1)]
    keys0 = [_key(drafter, x, t) for t, x in enumerate(step0)]
    values0 = [_value(drafter, x) for x in step0]
    pairs = []
    for t in range(n):
        state, keys, values = fc_TH[t], keys0[: t + 1], values0[: t + 1]
        for j in range(steps):
            if not counts(ids, supervised, in_draft, t, j):
                break
            x = _layer_input(drafter, ids[t + 1 + j], state)
            if j > 0:
                keys, values = [*keys, _key(drafter, x, t + j)], [*values, _value(drafter, x)]
            state = _finish(drafter, _attend(drafter, _query(drafter, x, t + j), keys, values), state)
            logits_D = drafter.lm_head.weight @ _rms(state, drafter.norm.weight, drafter.shape.rms_norm_eps)
            p_D = (target_head_DH.double() @ batch.final_NH[start + t + 1 + j].double()).softmax(-1)
            guess = int(logits_D.argmax())
            hit = guess + int(drafter.d2t[guess]) == ids[t + 2 + j]
            pairs.append(Pair(start + t, j, -(p_D * logits_D.log_softmax(-1)).sum(), hit))
    return pairs


def _rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.pow(2).mean() + eps).sqrt() * weight


def _layer_input(drafter: Drafter, token: int, state: Tensor) -> Tensor:
    assert drafter.embedding_VH is not None
    layer, eps = drafter.midlayer, drafter.shape.rms_norm_eps
    embedded = drafter.embedding_VH[token].double()
    return torch.cat([_rms(embedded, layer.input_layernorm.weight, eps), _rms(state, layer.hidden_norm.weight, eps)])


def _heads(drafter: Drafter, projected: Tensor) -> Tensor:
    return projected.view(-1, drafter.shape.head_dim)


def _rope(drafter: Drafter, heads_hd: Tensor, position: int) -> Tensor:
    # angles in float32: that is the convention of the models, not a shortcut
    half = drafter.shape.head_dim // 2
    frequency = 1.0 / drafter.shape.rope_theta ** (torch.arange(0, 2 * half, 2, dtype=torch.float32) / (2 * half))
    angle = position * frequency
    cos, sin = angle.cos().double(), angle.sin().double()
    a, b = heads_hd[:, :half], heads_hd[:, half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def _key(drafter: Drafter, x: Tensor, position: int) -> Tensor:
    return _rope(drafter, _heads(drafter, drafter.midlayer.self_attn.k_proj.weight @ x), position)


def _value(drafter: Drafter, x: Tensor) -> Tensor:
    return _heads(drafter, drafter.midlayer.self_attn.v_proj.weight @ x)


def _query(drafter: Drafter, x: Tensor, position: int) -> Tensor:
    return _rope(drafter, _heads(drafter, drafter.midlayer.self_attn.q_proj.weight @ x), position)


def _attend(drafter: Drafter, query_Qd: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
    shape, group = drafter.shape, drafter.shape.num_heads // drafter.shape.num_kv_heads
    heads = []
    for head in range(shape.num_heads):
        scores = torch.stack([query_Qd[head] @ key[head // group] for key in keys]) * shape.head_dim**-0.5
        heads.append(scores.softmax(-1) @ torch.stack([value[head // group] for value in values]))
    return torch.cat(heads)


def _finish(drafter: Drafter, attention: Tensor, state: Tensor) -> Tensor:
    layer = drafter.midlayer
    state = state + layer.self_attn.o_proj.weight @ attention
    x = _rms(state, layer.post_attention_layernorm.weight, drafter.shape.rms_norm_eps)
    gate = layer.mlp.gate_proj.weight @ x
    return state + layer.mlp.down_proj.weight @ (gate * gate.sigmoid() * (layer.mlp.up_proj.weight @ x))
