"""The target's distribution as a store keeps it in place of the final state: its top log-probabilities in a draft vocabulary.

Nothing here needs more than torch: a capture plug-in computes it within an engine. There lm_head is sharded over the ranks, and this
needs it whole. So rank 0 takes it from a file that ``prep`` writes for it (``Target.lm_head`` reads that one tensor of the target's own
shards), beside its engine's weights: 163,840 x 7,168 in bfloat16 are 2.35 GB of its GPU at Kimi's size. No rank waits for another, and
how an engine lays out its head does not matter. The product costs 2 x V x H operations a token: 4 % of a prefill of 32 B parameters.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

TOKENS_PER_CHUNK = 256
"""Tokens whose logits over the whole vocabulary exist at a time: 168 MB in float32 at 163,840, three times over."""


@dataclass(frozen=True, eq=False)
class TopLogProbs:
    """What the target says next at each of N tokens, as far as a draft vocabulary goes.

    index_NK: rows of the drafter's lm_head, likeliest first. logprob_NK: their log-probabilities in the *whole* vocabulary. rest_N:
    probability of the draft vocabulary's other tokens. outside_N: of all tokens outside of it. exp(logprob), rest and outside add up to 1.
    """

    index_NK: Tensor
    logprob_NK: Tensor
    rest_N: Tensor
    outside_N: Tensor

    def map(self, change: Callable[[Tensor], Tensor]) -> "TopLogProbs":
        """The same with every tensor changed alike."""
        return TopLogProbs(*(change(tensor) for tensor in (self.index_NK, self.logprob_NK, self.rest_N, self.outside_N)))


@torch.no_grad()
def top_log_probs(final_NH: Tensor, head_VH: Tensor, draft_ids_D: Tensor, k: int) -> TopLogProbs:
    """The ``k`` likeliest tokens of the draft vocabulary after each token: index int32, the rest float32, where ``final_NH`` is.

    final_NH: the states that lm_head multiplies. head_VH: the target's whole lm_head, whose dtype the product has, as in the target
    itself; softmaxes are float32. draft_ids_D: target token of each row of the drafter's lm_head. Raises ValueError when k exceeds D.
    """
    if k > len(draft_ids_D):
        raise ValueError(f"{k} log-probabilities of a draft vocabulary of {len(draft_ids_D)} tokens")
    # An empty batch takes one empty chunk.
    parts = [_chunk(chunk_NH.to(head_VH.dtype) @ head_VH.T, draft_ids_D, k) for chunk_NH in final_NH.split(TOKENS_PER_CHUNK)]
    return join(parts)


def join(parts: list[TopLogProbs]) -> TopLogProbs:
    """Those of several stretches of tokens, one behind the other."""
    return TopLogProbs(*(torch.cat(tensors) for tensors in zip(*(_tensors(part) for part in parts), strict=True)))


def _tensors(top: TopLogProbs) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return top.index_NK, top.logprob_NK, top.rest_N, top.outside_N


def _chunk(logits_NV: Tensor, draft_ids_D: Tensor, k: int) -> TopLogProbs:
    logprobs_NV = torch.log_softmax(logits_NV.float(), -1)
    draft_ND = logprobs_NV.index_select(1, draft_ids_D)
    logprob_NK, index_NK = draft_ND.topk(k, -1)
    # Sums of what is left, not 1 less the sum of what is taken: small ones would drown in its rounding.
    rest_N = draft_ND.scatter_(1, index_NK, float("-inf")).exp_().sum(-1)
    outside_N = logprobs_NV.index_fill_(1, draft_ids_D, float("-inf")).exp_().sum(-1)
    return TopLogProbs(index_NK.int(), logprob_NK, rest_N, outside_N)
