"""Attention of the training-time test: step-0 keys of the own row up to t, and the chain's own keys (t, 1..j).

    scores of (t, j) = q . [k(0), ..., k(t) | kd(1), ..., kd(j)] * scale,    out = softmax(scores) . [v | vd]

The left part is ordinary causal attention with many queries against the same keys, computed blockwise; the right part is a handful of
products per query. Both are merged by their log-sum-exp. The backward pass needs no gradient of it: with the merged output and the merged
lse the softmax gradient of either part stands alone, dS = P * (dP - sum(dOut * out)), as in ring attention.

Memory is O(block * row length), never O(T^2): scores are computed again in the backward pass. Blocks of explicit softmax and not
PyTorch's flash kernel, because they run on any device, need no expanded key heads, and cost less where it counts. One CPU core, bf16,
9 query and 3 key heads of 64, forward and backward: 384 queries on 512 keys 14 ms against 17 to 20, 1536 on 2048 167 ms against 190 to 246.
In float32 it is the other way round (22 against 17 ms), 2 % of a training step.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from train.softmax import softmax_lse, wide_dtype

# Queries of a block. Small enough on a CPU for the scores to stay in the cache; on a GPU each block costs a few kernel starts.
BLOCK_QUERIES = {"cpu": 64, "cuda": 512}


@dataclass(frozen=True)
class Block:
    """Consecutive queries of one row, and the step-0 keys that the last of them sees.

    queries: slice of the M queries. keys: slice of the N packed positions. hidden_cw: bool, which of the last w keys the c queries must not
    see; the keys before are seen by all.
    """

    queries: slice
    keys: slice
    hidden_cw: Tensor


def query_blocks(t_M: Tensor, starts_B1: Tensor) -> list[Block]:
    """Cut queries at packed positions ``t_M`` (ascending) into blocks that stay inside a row.

    starts_B1: int64 [B + 1], where each row begins, and N at the end.
    """
    size = BLOCK_QUERIES.get(t_M.device.type, BLOCK_QUERIES["cuda"])
    edges = torch.searchsorted(t_M, starts_B1).tolist()
    positions, starts = t_M.tolist(), starts_B1.tolist()
    return [
        _block(t_M, slice(first, min(first + size, end)), start, positions)
        for start, begin, end in zip(starts, edges, edges[1:], strict=False)
        for first in range(begin, end, size)
    ]


def _block(t_M: Tensor, queries: slice, start: int, positions: Sequence[int]) -> Block:
    first, last = positions[queries.start], positions[queries.stop - 1]
    late_w = torch.arange(first + 1, last + 1, device=t_M.device)
    return Block(queries, slice(start, last + 1), late_w > t_M[queries, None])


def merged_attention(
    q_MQd: Tensor, k_NKd: Tensor, v_NKd: Tensor, kd_MKjd: Tensor, vd_MKjd: Tensor, blocks: Sequence[Block], scale: float
) -> Tensor:
    """Attend to the step-0 keys that ``blocks`` allow and to the j keys of the own chain (j can be 0); returns [M, Q, d].

    Q query heads share K key-value heads, Q a multiple of K. Scores are rounded to the input's dtype, softmaxes are in float32 or wider.
    """
    out_MQd: Tensor = _MergedAttention.apply(q_MQd, k_NKd, v_NKd, kd_MKjd, vd_MKjd, blocks, scale)
    return out_MQd


class _MergedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q_MQd: Tensor, k_NKd: Tensor, v_NKd: Tensor, kd_MKjd: Tensor, vd_MKjd: Tensor, blocks: Sequence[Block], scale: float
    ) -> Tensor:
        kd_MKjd, vd_MKjd = kd_MKjd.contiguous(), vd_MKjd.contiguous()
        q_KMGd, k_KNd, v_KNd = _by_key_head(q_MQd, k_NKd.shape[1]), _heads_first(k_NKd), _heads_first(v_NKd)
        out_KMGd = torch.empty_like(q_KMGd, dtype=wide_dtype(q_MQd.dtype))
        lse_KMG1 = torch.empty_like(out_KMGd[..., :1])
        for block in blocks:
            probabilities_Krn, lse_Kr1 = softmax_lse(_scores(q_KMGd, k_KNd, block, scale))
            out_Krd = probabilities_Krn.to(q_MQd.dtype) @ v_KNd[:, block.keys]
            out_KMGd[:, block.queries] = out_Krd.view_as(out_KMGd[:, block.queries])
            lse_KMG1[:, block.queries] = lse_Kr1.view_as(lse_KMG1[:, block.queries])
        if kd_MKjd.shape[2]:
            scores_KMGj = _chain_scores(q_KMGd, kd_MKjd, scale)
            merged_KMG1 = torch.logaddexp(lse_KMG1, scores_KMGj.logsumexp(-1, keepdim=True))
            of_chain_KMGd = _per_query((scores_KMGj - merged_KMG1).exp_().to(q_MQd.dtype), vd_MKjd)
            out_KMGd.mul_((lse_KMG1 - merged_KMG1).exp_()).add_(of_chain_KMGd)
            lse_KMG1 = merged_KMG1
        out_MQd = out_KMGd.transpose(0, 1).reshape(q_MQd.shape).to(q_MQd.dtype)
        ctx.save_for_backward(q_MQd, k_NKd, v_NKd, kd_MKjd, vd_MKjd, out_MQd, lse_KMG1)
        ctx.blocks, ctx.scale = blocks, scale
        return out_MQd

    @staticmethod
    def backward(ctx: Any, grad_MQd: Tensor) -> tuple[Tensor | None, ...]:
        q_MQd, k_NKd, v_NKd, kd_MKjd, vd_MKjd, out_MQd, lse_KMG1 = ctx.saved_tensors
        heads, wide, scale = k_NKd.shape[1], lse_KMG1.dtype, ctx.scale
        q_KMGd, k_KNd, v_KNd = _by_key_head(q_MQd, heads), _heads_first(k_NKd), _heads_first(v_NKd)
        grad_KMGd = _by_key_head(grad_MQd, heads)
        inner_KMG1 = _by_key_head((grad_MQd.to(wide) * out_MQd).sum(-1, keepdim=True), heads)
        dq_KMGd = torch.empty_like(q_KMGd)
        dk_KNd, dv_KNd = torch.zeros_like(k_KNd, dtype=wide), torch.zeros_like(v_KNd, dtype=wide)
        for block in ctx.blocks:
            q_Krd, grad_Krd = q_KMGd[:, block.queries].flatten(1, 2), grad_KMGd[:, block.queries].flatten(1, 2)
            p_Krn = _scores(q_KMGd, k_KNd, block, scale).sub_(lse_KMG1[:, block.queries].flatten(1, 2)).exp_()
            ds_Krn = (grad_Krd @ v_KNd[:, block.keys].mT).to(wide)
            ds_Krn = ds_Krn.sub_(inner_KMG1[:, block.queries].flatten(1, 2)).mul_(p_Krn).mul_(scale).to(q_MQd.dtype)
            dv_KNd[:, block.keys] += p_Krn.to(q_MQd.dtype).mT @ grad_Krd
            dk_KNd[:, block.keys] += ds_Krn.mT @ q_Krd
            dq_KMGd[:, block.queries] = (ds_Krn @ k_KNd[:, block.keys]).view_as(dq_KMGd[:, block.queries])
        dkd_MKjd = dvd_MKjd = None
        if kd_MKjd.shape[2]:
            p_KMGj = (_chain_scores(q_KMGd, kd_MKjd, scale) - lse_KMG1).exp_()
            ds_KMGj = _per_query(grad_KMGd, vd_MKjd.mT).to(wide)
            ds_KMGj = ds_KMGj.sub_(inner_KMG1).mul_(p_KMGj).mul_(scale).to(q_MQd.dtype)
            dvd_MKjd = p_KMGj.to(q_MQd.dtype).transpose(0, 1).mT @ grad_KMGd.transpose(0, 1)
            dkd_MKjd = ds_KMGj.transpose(0, 1).mT @ q_KMGd.transpose(0, 1)
            dq_KMGd += _per_query(ds_KMGj, kd_MKjd)
        dq_MQd = dq_KMGd.transpose(0, 1).reshape(q_MQd.shape)
        dk_NKd, dv_NKd = dk_KNd.transpose(0, 1).to(k_NKd.dtype), dv_KNd.transpose(0, 1).to(v_NKd.dtype)
        return dq_MQd, dk_NKd, dv_NKd, dkd_MKjd, dvd_MKjd, None, None


def _heads_first(x_NKd: Tensor) -> Tensor:
    return x_NKd.transpose(0, 1).contiguous()


def _by_key_head(x_MQd: Tensor, heads: int) -> Tensor:
    """[M, Q, d] -> [K, M, G, d]: the G query heads that share a key head lie together."""
    return x_MQd.unflatten(1, (heads, -1)).transpose(0, 1).contiguous()


def _scores(q_KMGd: Tensor, k_KNd: Tensor, block: Block, scale: float) -> Tensor:
    """Scaled scores of a block's queries (r = c * G rows a key head) and its n keys, -inf where hidden."""
    q_KcGd = q_KMGd[:, block.queries]
    scores_Krn = (q_KcGd.flatten(1, 2) @ k_KNd[:, block.keys].mT).to(wide_dtype(q_KMGd.dtype)).mul_(scale)
    scores_KcGn = scores_Krn.unflatten(1, q_KcGd.shape[1:3])
    late = scores_Krn.shape[-1] - block.hidden_cw.shape[-1]
    scores_KcGn[..., late:].masked_fill_(block.hidden_cw[:, None], float("-inf"))
    return scores_Krn


def _chain_scores(q_KMGd: Tensor, kd_MKjd: Tensor, scale: float) -> Tensor:
    return _per_query(q_KMGd, kd_MKjd.mT).to(wide_dtype(q_KMGd.dtype)).mul_(scale)


def _per_query(x_KMGa: Tensor, y_MKab: Tensor) -> Tensor:
    """One small product for each query position and key head: [K, M, G, b]."""
    return (x_KMGa.transpose(0, 1) @ y_MKab).transpose(0, 1)
