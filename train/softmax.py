"""Softmax that also gives its log-sum-exp, for the attention and the loss."""

import torch
from torch import Tensor


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """What softmaxes and sums of ``dtype`` values are computed in: float32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


def softmax_lse(scores_xn: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax over the last dimension, and log-sum-exp [..., 1], of scores with at least one finite value a row.

    The largest probability is exp(max - lse) and at least 1/n, so its logarithm gives lse exactly enough; two passes for a maximum
    cost a tenth of the second exponential that ``logsumexp`` would take.
    """
    probabilities_xn = torch.softmax(scores_xn, -1)
    return probabilities_xn, scores_xn.amax(-1, keepdim=True) - probabilities_xn.amax(-1, keepdim=True).log()
