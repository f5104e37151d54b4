"""``eyas_grouped``: attention for transformers models that is fast for few queries over a long cache.

The ``sdpa`` implementation repeats keys and values per query head and is slow in batched decoding on a CPU (measured with two
threads, bf16, 16 sequences, 300 keys, 9/3 heads: 4.8 ms a layer). With few queries one matrix product per key head does the same
in 0.4 ms: the query heads that share a key head are rows of one matrix. Long prompts still go through SDPA's flash kernel.

Importing this module registers the name; use it as ``from_pretrained(..., attn_implementation=eyas.attention_hf.NAME)``.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, causal_mask_function, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from eyas.errors import EyasError

NAME = "eyas_grouped"
FEW_QUERIES = 16
_UNSUPPORTED = ("softcap", "s_aux", "position_bias")


def grouped_attention(query_BHMd: Tensor, key_BKTd: Tensor, value_BKTd: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Attention of M new queries over T keys, H query heads on K key heads; softmax in fp32.

    ``mask`` broadcasts to [B, 1, M, T], True (or 0 in an additive one) where a query may look. ``None`` means that the queries are
    the last M of the T positions and look back causally. Returns [B, M, H, d] in the dtype of the query.
    """
    B, H, M, d = query_BHMd.shape
    K, T = key_BKTd.shape[1:3]
    rows = H // K * M
    # keys x queries, not queries x keys: the cache is read as it lies, without a transposed copy (twice as fast)
    scores_BKTr = torch.matmul(key_BKTd, query_BHMd.reshape(B, K, rows, d).transpose(-1, -2))
    scores = scores_BKTr.transpose(-1, -2).to(torch.float32, memory_format=torch.contiguous_format).mul_(scale)
    scores_by_query = scores.view(B, K, H // K, M, T)
    if mask is None:
        if M > 1:
            later = torch.ones(M, M, dtype=torch.bool, device=scores.device).triu_(1)
            scores_by_query[..., T - M :].masked_fill_(later, torch.finfo(torch.float32).min)
    elif mask.dtype == torch.bool:
        scores_by_query.masked_fill_(~mask[:, :, None], torch.finfo(torch.float32).min)
    else:
        scores_by_query.add_(mask[:, :, None])
    weights = torch.softmax(scores, dim=-1).to(value_BKTd.dtype)
    return torch.matmul(weights, value_BKTd).view(B, H, M, -1).transpose(1, 2)


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The function transformers calls: query [B, H, M, d], key and value [B, K, T, d]; returns ([B, M, H, d], None).

    Raises EyasError for what it does not compute: soft-capped scores, attention sinks, position biases.
    """
    for name in _UNSUPPORTED:
        if kwargs.get(name) is not None:
            raise EyasError(f"this target's attention uses {name} ({type(module).__name__}), which {NAME} does not compute")
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    M, T = query.shape[2], key.shape[2]
    if M <= FEW_QUERIES:
        return grouped_attention(query, key, value, attention_mask, scale), None
    if attention_mask is None and M < T:
        attention_mask = torch.ones(M, T, dtype=torch.bool, device=query.device).tril_(T - M)[None, None]
    output = nn.functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=attention_mask,
        is_causal=attention_mask is None,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return output.transpose(1, 2), None


def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    **kwargs: Any,
) -> Tensor | None:
    """The mask transformers asks for: None for plain causal attention that ends at the last key, else SDPA's boolean mask."""
    q_offset = int(q_offset)
    ends_together = q_offset + q_length == kv_offset + kv_length
    unpadded = attention_mask is None or bool(attention_mask.all())
    if ends_together and unpadded and mask_function is causal_mask_function:
        return None
    return sdpa_mask(
        batch_size,
        q_length,
        kv_length,
        q_offset,
        kv_offset,
        mask_function,
        attention_mask,
        allow_is_causal_skip=False,
        **kwargs,
    )


ALL_ATTENTION_FUNCTIONS.register(NAME, attention_forward)
ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, attention_mask)
