"""The loss: cross-entropy against the target's whole distribution, with lm_head fused in.

    l = -sum_v p_v log q_v,   p = softmax(final . target_head^T),   q = softmax(normed . lm_head^T),   over the draft vocabulary

p is the distribution of one position of the text (a label); up to J steps of the training-time test predict it. Pairs are sorted by label
and taken in blocks of labels: one product for the targets' logits, one for all predictions of them, then loss and gradient q - p in place.
Nothing of size [pairs, vocabulary] outlives its block, and the backward pass only scales what the forward pass found.

Where the states hold the target's top log-probabilities, p is known for the k likeliest tokens T of the vocabulary, and of the rest R only
the mass r. Then R is one class, of which the drafter is asked for no more than that mass:

    l = -sum_T p_v log q_v - r log q_R,     dl/dz_v = q_v - p_v in T,  q_v (1 - r / q_R) in R,     q_R = sum_R q_v

which is the gradient against a p whose rest is spread as q's own. In T it is exact, in R wrong by |p_v - r q_v / q_R|, which goes to 0 as
the drafter learns. (Dropping r and scaling T up is wrong by 2 r and sharpens the drafter for ever; spreading r evenly is exact in T too,
but pulls the tail flat even where q = p. Measured: benchmarks/smaller_states.py.) l is smaller than the whole cross-entropy by what the
two say about R, so losses compare only among states of the same k; with k = D they are the same.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from eyas.distribution import TopLogProbs
from train.softmax import softmax_lse, wide_dtype

# Labels whose logits exist at a time (the product with lm_head wants many), and whose float32 softmaxes do (a CPU wants them in its cache).
LABELS_PER_BLOCK = 256
LABELS_PER_SLICE = {"cpu": 8, "cuda": 256}


@dataclass(frozen=True)
class PairLosses:
    """What the fused loss gives for P pairs.

    loss_sum: scalar sum of weight * l, differentiable once. loss_P: the l of every pair, detached. guess_P: int64 row of lm_head with the
    largest q (the first of equals, as argmax in a server), or None when not asked for.
    """

    loss_sum: Tensor
    loss_P: Tensor
    guess_P: Tensor | None


def soft_cross_entropy(
    normed_PH: Tensor,
    lm_head_DH: Tensor,
    final_NH: Tensor,
    target_head_DH: Tensor,
    label_P: Tensor,
    weight_P: Tensor,
    with_guess: bool = False,
) -> PairLosses:
    """Sum over pairs of weight * l, where pair i compares ``normed_PH[i]`` with the target's distribution at ``final_NH[label_P[i]]``.

    Computes in the dtype of ``normed_PH`` (lm_head is cast to it, its gradient is float32 or wider), softmaxes in float32 or wider.
    Gradients go to ``normed_PH`` and ``lm_head_DH`` alone.
    """
    return _pair_losses(normed_PH, lm_head_DH, _FromFinal(final_NH, target_head_DH), label_P, weight_P, with_guess)


def top_cross_entropy(
    normed_PH: Tensor, lm_head_DH: Tensor, top: TopLogProbs, label_P: Tensor, weight_P: Tensor, with_guess: bool = False
) -> PairLosses:
    """The same from the target's top log-probabilities at every packed token, without its lm_head."""
    return _pair_losses(normed_PH, lm_head_DH, _FromTop(top), label_P, weight_P, with_guess)


def _pair_losses(
    normed_PH: Tensor, lm_head_DH: Tensor, targets: "_FromFinal | _FromTop", label_P: Tensor, weight_P: Tensor, with_guess: bool
) -> PairLosses:
    with_grad = torch.is_grad_enabled() and (normed_PH.requires_grad or lm_head_DH.requires_grad)
    loss_sum, loss_P, guess_P = _SoftCrossEntropy.apply(normed_PH, lm_head_DH, targets, label_P, weight_P, with_guess, with_grad)
    return PairLosses(loss_sum, loss_P, guess_P)


# Losses of the pairs of a block's labels first .. stop, given their logits [r, D] (which become the gradient) and each one's label there.
_Losses = Callable[[Tensor, Tensor, int, int, bool], Tensor]


@dataclass(frozen=True)
class _FromFinal:
    """Distributions made of final states and the target's lm_head."""

    final_NH: Tensor
    head_DH: Tensor

    def block(self, label_L: Tensor, dtype: torch.dtype) -> _Losses:
        logits_LD = self.final_NH[label_L].to(dtype) @ self.head_DH.T

        def losses(logits_rD: Tensor, number_r: Tensor, first: int, stop: int, with_grad: bool) -> Tensor:
            p_lD = torch.softmax(logits_LD[first:stop].to(wide_dtype(dtype)), -1)
            return _cross_entropy(logits_rD, p_lD.index_select(0, number_r - first), with_grad)

        return losses


@dataclass(frozen=True)
class _FromTop:
    """Distributions known at the top."""

    top: TopLogProbs

    def block(self, label_L: Tensor, dtype: torch.dtype) -> _Losses:
        wide = wide_dtype(dtype)
        top = self.top.map(lambda tensor: tensor[label_L])
        index_LK, p_LK, rest_L1 = top.index_NK.long(), top.logprob_NK.to(wide).exp(), top.rest_N[:, None].to(wide)
        inside_L1 = p_LK.sum(-1, keepdim=True) + rest_L1
        p_LK, rest_L1 = p_LK / inside_L1, rest_L1 / inside_L1

        def losses(logits_rD: Tensor, number_r: Tensor, first: int, stop: int, with_grad: bool) -> Tensor:
            return _top_cross_entropy(logits_rD, index_LK[number_r], p_LK[number_r], rest_L1[number_r], with_grad)

        return losses


class _SoftCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        normed_PH: Tensor,
        lm_head_DH: Tensor,
        targets: _FromFinal | _FromTop,
        label_P: Tensor,
        weight_P: Tensor,
        with_guess: bool,
        with_grad: bool,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        dtype = normed_PH.dtype
        wide = wide_dtype(dtype)
        label_P, order_P = label_P.sort(stable=True)
        label_L, number_P, pairs_L = torch.unique_consecutive(label_P, return_inverse=True, return_counts=True)
        ends = [0, *pairs_L.cumsum(0).tolist()]
        x_PH, weight_P1 = normed_PH[order_P], weight_P[order_P, None].to(wide)
        head_DH = lm_head_DH.to(dtype)
        weighted_PH = (x_PH * weight_P1).to(dtype)
        loss_P = torch.empty_like(label_P, dtype=wide)
        guess_P = torch.empty_like(label_P) if with_guess else None
        dx_PH = torch.empty_like(x_PH)
        dhead_DH = None
        for first in range(0, len(label_L), LABELS_PER_BLOCK):
            labels = slice(first, min(first + LABELS_PER_BLOCK, len(label_L)))
            pairs = slice(ends[labels.start], ends[labels.stop])
            logits_RD = x_PH[pairs] @ head_DH.T
            losses = targets.block(label_L[labels], dtype)
            per_slice = LABELS_PER_SLICE.get(logits_RD.device.type, LABELS_PER_BLOCK)
            for start in range(labels.start, labels.stop, per_slice):
                stop = min(start + per_slice, labels.stop)
                here = slice(ends[start], ends[stop])
                logits_rD = logits_RD[here.start - pairs.start : here.stop - pairs.start]
                if guess_P is not None:
                    guess_P[here] = logits_rD.to(wide).argmax(-1)
                loss_P[here] = losses(logits_rD, number_P[here] - first, start - first, stop - first, with_grad)
            if with_grad:
                dx_PH[pairs] = logits_RD @ head_DH
                part_DH = logits_RD.T @ weighted_PH[pairs]
                dhead_DH = part_DH.to(wide) if dhead_DH is None else dhead_DH.add_(part_DH)
        loss_sum = (loss_P * weight_P1[:, 0]).sum()
        if with_grad:
            dhead_DH = torch.zeros_like(head_DH, dtype=wide) if dhead_DH is None else dhead_DH
            ctx.save_for_backward(_unsort((dx_PH * weight_P1).to(dtype), order_P), dhead_DH)
            ctx.head_dtype = lm_head_DH.dtype
        loss_P, guess_P = _unsort(loss_P, order_P), _unsort(guess_P, order_P) if guess_P is not None else None
        ctx.mark_non_differentiable(*(x for x in (loss_P, guess_P) if x is not None))
        return loss_sum, loss_P, guess_P

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        dx_PH, dhead_DH = ctx.saved_tensors
        # in place: lm_head's gradient is large, and autograd refuses a second use of what changed
        return (dx_PH * grad).to(dx_PH.dtype), dhead_DH.mul_(grad).to(ctx.head_dtype), *[None] * 5


def _cross_entropy(logits_rD: Tensor, p_rD: Tensor, with_grad: bool) -> Tensor:
    """-sum p log q of every row; with ``with_grad`` its gradient q - p takes the place of the logits."""
    z_rD = logits_rD.to(p_rD.dtype)
    q_rD, lse_r1 = softmax_lse(z_rD)
    loss_r = lse_r1[:, 0] - torch.linalg.vecdot(p_rD, z_rD)
    if with_grad:
        logits_rD.copy_(q_rD.sub_(p_rD))
    return loss_r


def _top_cross_entropy(logits_rD: Tensor, index_rK: Tensor, p_rK: Tensor, rest_r1: Tensor, with_grad: bool) -> Tensor:
    """-sum_T p log q - r log q_R of every row; with ``with_grad`` its gradient takes the place of the logits."""
    z_rD = logits_rD.to(p_rK.dtype)
    q_rD, lse_r1 = softmax_lse(z_rD)
    z_rK, q_rK = z_rD.gather(1, index_rK), q_rD.gather(1, index_rK)
    q_rD.scatter_(1, index_rK, 0.0)
    q_rest_r1 = q_rD.sum(-1, keepdim=True).clamp_min(torch.finfo(q_rD.dtype).tiny)
    loss_r = (p_rK * (lse_r1 - z_rK)).sum(-1) - (rest_r1 * q_rest_r1.log())[:, 0]
    if with_grad:
        gradient_rD = q_rD.mul_(1.0 - rest_r1 / q_rest_r1).scatter_(1, index_rK, q_rK - p_rK)
        logits_rD.copy_(gradient_rD)
    return loss_r


def _unsort(x_Px: Tensor, order_P: Tensor) -> Tensor:
    result_Px = torch.empty_like(x_Px)
    result_Px[order_P] = x_Px
    return result_Px
