"""The offline walk with the drafter alone: what a greedy server would accept, from states and a text that are already there.

It drafts as a server does and computes nothing else: no loss, no gradient, no draft behind a wrong one. Training has its own way to the
same hits (train.ttt), which shares work with the loss.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from eyas.acceptance import Cycle, walk
from eyas.drafter import Drafter

SCORES_AT_A_TIME = 2**25  # attention scores of a block of chains: 128 MB in float32


@torch.inference_mode()
def walk_row(drafter: Drafter, ids_T: Tensor, supervised_T: Tensor, aux_TA: Tensor, steps: int) -> list[Cycle]:
    """Verify steps, ``steps`` drafts each, along all replies of one row; none where no reply has two tokens.

    ids_T int64 and supervised_T bool are the row's tokens, aux_TA the target's states at them. They are taken to the drafter's device, the
    states to its dtype; its embedding is set.
    """
    weight = drafter.fc.weight
    ids_T, aux_TA = ids_T.to(weight.device), aux_TA.to(weight.device, weight.dtype)
    hidden_TH = drafter.combine(aux_TA)
    # The last position has no next token; its key is made from a wrong one and no chain sees it.
    inputs_T2H = drafter.layer_input(ids_T.roll(-1), hidden_TH)
    keys_TKd, values_TKd = drafter.keys_values(inputs_T2H, torch.arange(len(ids_T), device=ids_T.device))
    size = max(1, SCORES_AT_A_TIME // (drafter.shape.num_heads * len(ids_T)))
    cycles: list[Cycle] = []
    for chain_t_M in reply_chains(supervised_T):
        parts = [
            _hits(drafter, ids_T, hidden_TH[t_M], inputs_T2H[t_M], keys_TKd, values_TKd, t_M, steps)
            for t_M in chain_t_M.to(ids_T.device).split(size)
        ]
        cycles += walk(torch.cat(parts).cpu(), chain_t_M)
    return cycles


def reply_chains(supervised_T: Tensor) -> Iterator[Tensor]:
    """Positions t of every reply's chains, consecutive: from the last prompt token to the reply's last token but two, int64 [M]."""
    t_C = (supervised_T[1:-1] & supervised_T[2:]).nonzero()[:, 0]
    for chain_t_M in torch.tensor_split(t_C, (t_C.diff() != 1).nonzero()[:, 0] + 1):
        if len(chain_t_M):
            yield chain_t_M


def _hits(
    drafter: Drafter, ids_T: Tensor, hidden_MH: Tensor, inputs_M2H: Tensor, keys_TKd: Tensor, values_TKd: Tensor, t_M: Tensor, steps: int
) -> Tensor:
    """bool [M, steps]: draft j of the chain at t is the text's token, as long as all its drafts before were."""
    hits_MJ = torch.zeros(len(t_M), steps, dtype=torch.bool, device=t_M.device)
    chain_M = torch.arange(len(t_M), device=t_M.device)  # chains that have hit so far; t_M and all others are theirs
    own_k_MjKd = own_v_MjKd = keys_TKd.new_empty(len(t_M), 0, *keys_TKd.shape[1:])
    for j in range(steps):
        if j > 0:
            inputs_M2H = drafter.layer_input(ids_T[t_M + 1 + j], hidden_MH)
            k_MKd, v_MKd = drafter.keys_values(inputs_M2H, t_M + j)
            own_k_MjKd, own_v_MjKd = torch.cat([own_k_MjKd, k_MKd[:, None]], 1), torch.cat([own_v_MjKd, v_MKd[:, None]], 1)
        queries_MQd = drafter.queries(inputs_M2H, t_M + j)
        attention_MQd = _attention(queries_MQd, keys_TKd, values_TKd, t_M, own_k_MjKd, own_v_MjKd, drafter.shape.scale)
        hidden_MH = drafter.finish(attention_MQd, hidden_MH)
        guess_M = drafter.draft_ids_D[drafter.logits(hidden_MH).argmax(-1)]
        reached_M = t_M + 2 + j < len(ids_T)
        hit_M = reached_M & (guess_M == ids_T[(t_M + 2 + j).clamp(max=len(ids_T) - 1)])
        hits_MJ[chain_M, j] = hit_M
        chain_M, t_M, hidden_MH = chain_M[hit_M], t_M[hit_M], hidden_MH[hit_M]
        own_k_MjKd, own_v_MjKd = own_k_MjKd[hit_M], own_v_MjKd[hit_M]
    return hits_MJ


def _attention(
    queries_MQd: Tensor, keys_TKd: Tensor, values_TKd: Tensor, t_M: Tensor, own_k_MjKd: Tensor, own_v_MjKd: Tensor, scale: float
) -> Tensor:
    """Attention [M, Q, d] of each chain's query to the row's keys up to its t and to the chain's own; softmax in float32 or wider."""
    if not len(t_M):
        return queries_MQd
    seen = int(t_M[-1]) + 1
    queries_MKGd = queries_MQd.unflatten(1, (keys_TKd.shape[1], -1))
    row_MKGT = torch.einsum("mkgd,tkd->mkgt", queries_MKGd, keys_TKd[:seen])
    later_MT = torch.arange(seen, device=t_M.device) > t_M[:, None]
    row_MKGT = row_MKGT.masked_fill_(later_MT[:, None, None], float("-inf"))
    own_MKGj = torch.einsum("mkgd,mjkd->mkgj", queries_MKGd, own_k_MjKd)
    scores = torch.cat([row_MKGT, own_MKGj], -1).to(torch.promote_types(queries_MQd.dtype, torch.float32)) * scale
    row_MKGT, own_MKGj = scores.softmax(-1).to(queries_MQd.dtype).split([seen, own_k_MjKd.shape[1]], -1)
    out_MKGd = torch.einsum("mkgt,tkd->mkgd", row_MKGT, values_TKd[:seen]) + torch.einsum("mkgj,mjkd->mkgd", own_MKGj, own_v_MjKd)
    return out_MKGd.flatten(1, 2)
