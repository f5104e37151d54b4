"""TEST STAND-IN: attention of a batch over the key-value pool, as SGLang's `intel_amx` backend calls it, registered as torch operators.

Shapes: N new tokens of the batch, one request's after the other's; Q of them one request's; S tokens it has in all; H query heads over G
key heads; K and V the sizes of a key and a value; P slots of the pool. Multi-head latent attention comes in two forms. Absorbed, there is
one key head, and the pool's rows are the keys and with their first V numbers the values. Un-absorbed, keys and values are given for each
head, and the pool, whose rows are of another size, is not read: no request that has tokens there is computed so.
"""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

_TABLE = "Tensor table, Tensor rows_B, Tensor seq_lens_B"
_OPTIONS = "float scaling, float logit_cap, bool cross, int window, Tensor? encoder_lens, Tensor? sinks"
_library = torch.library.Library("sgl_kernel", "FRAGMENT")
_library.define(
    "extend_attention_cpu(Tensor q_NHK, Tensor k_NGK, Tensor v_NGV, Tensor(a!) out_NHV, Tensor k_pool_PGK, Tensor v_pool_PGV, "
    f"float k_scale, float v_scale, {_TABLE}, Tensor new_B, Tensor start_B, int max_new, {_OPTIONS}, Tensor? tree_mask, bool causal) -> ()"
)
_library.define(
    "decode_attention_cpu(Tensor q_BHK, Tensor(a!) k_pool_PGK, Tensor(b!) v_pool_PGV, float k_scale, float v_scale, Tensor(c!) out_BHV, "
    f"Tensor? k_BGK, Tensor? v_BGV, Tensor slots_B, Tensor scratch, {_TABLE}, {_OPTIONS}) -> ()"
)


def extend_attention_cpu(
    q_NHK: Tensor,
    k_NGK: Tensor,
    v_NGV: Tensor,
    out_NHV: Tensor,
    k_pool_PGK: Tensor,
    v_pool_PGV: Tensor,
    k_scale: float,
    v_scale: float,
    table: Tensor,
    rows_B: Tensor,
    seq_lens_B: Tensor,
    new_B: Tensor,
    start_B: Tensor,
    max_new: int,
    scaling: float,
    logit_cap: float,
    cross: bool,
    window: int,
    encoder_lens: Tensor | None,
    sinks: Tensor | None,
    tree_mask: Tensor | None,
    causal: bool,
) -> None:
    """Each request's new tokens see all its earlier tokens, from the pool, and of the new ones those before them and themselves.

    seq_lens_B counts earlier and new tokens, new_B the new ones, which begin at start_B in q, k, v and out. tree_mask (flat bools, a
    square of new tokens for each request in turn) replaces "before them and themselves".
    """
    _refuse(k_scale=k_scale != 1, v_scale=v_scale != 1, logit_cap=logit_cap, cross=cross, window=window, sinks=sinks is not None)
    masks = None if tree_mask is None else tree_mask.bool().split([new * new for new in new_B.tolist()])
    for request, (row, length, new, start) in enumerate(_lists(rows_B, seq_lens_B, new_B, start_B)):
        own = slice(start, start + new)
        earlier = table[row, : length - new].long()
        k_SGK, v_SGV = k_NGK[own], v_NGV[own]
        if len(earlier):
            k_SGK, v_SGV = torch.cat([k_pool_PGK[earlier], k_SGK]), torch.cat([v_pool_PGV[earlier], v_SGV])
        seen_QS = torch.ones(new, length, dtype=torch.bool)
        if masks is not None:
            seen_QS[:, length - new :] = masks[request].view(new, new)
        elif causal:
            seen_QS.tril_(length - new)
        out_NHV[own] = _attend(q_NHK[own], k_SGK, v_SGV, scaling, seen_QS)


def decode_attention_cpu(
    q_BHK: Tensor,
    k_pool_PGK: Tensor,
    v_pool_PGV: Tensor,
    k_scale: float,
    v_scale: float,
    out_BHV: Tensor,
    k_BGK: Tensor | None,
    v_BGV: Tensor | None,
    slots_B: Tensor,
    scratch: Tensor,
    table: Tensor,
    rows_B: Tensor,
    seq_lens_B: Tensor,
    scaling: float,
    logit_cap: float,
    cross: bool,
    window: int,
    encoder_lens: Tensor | None,
    sinks: Tensor | None,
) -> None:
    """One new token of each request: its key and value, where given, go into slot slots_B of the pool; it sees all of the request."""
    _refuse(k_scale=k_scale != 1, v_scale=v_scale != 1, logit_cap=logit_cap, cross=cross, window=window, sinks=sinks is not None)
    if k_BGK is not None and v_BGV is not None:
        k_pool_PGK[slots_B] = k_BGK.to(k_pool_PGK.dtype)
        v_pool_PGV[slots_B] = v_BGV.to(v_pool_PGV.dtype)
    for request, (row, length) in enumerate(_lists(rows_B, seq_lens_B)):
        slots_S = table[row, :length].long()
        out_BHV[request] = _attend(q_BHK[request, None], k_pool_PGK[slots_S], v_pool_PGV[slots_S], scaling, None)[0]


def _attend(q_QHK: Tensor, k_SGK: Tensor, v_SGV: Tensor, scaling: float, seen_QS: Tensor | None) -> Tensor:
    """[Q, H, V]."""
    q_HQK, k_GSK, v_GSV = (x.transpose(0, 1) for x in (q_QHK, k_SGK, v_SGV))
    return scaled_dot_product_attention(q_HQK, k_GSK, v_GSV, seen_QS, scale=scaling, enable_gqa=True).transpose(0, 1)


def _lists(*tensors: Tensor) -> list[tuple[int, ...]]:
    return list(zip(*(tensor.tolist() for tensor in tensors), strict=True))


def _refuse(**features: object) -> None:
    asked = [name for name, value in features.items() if value]
    if asked:
        raise NotImplementedError(f"this stand-in's attention knows no {', '.join(asked)}")


_library.impl("extend_attention_cpu", extend_attention_cpu, "CPU")
_library.impl("decode_attention_cpu", decode_attention_cpu, "CPU")
