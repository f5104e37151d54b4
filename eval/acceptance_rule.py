"""How drafts are picked and which of them stand: greedy, SGLang's rule for argmax drafts, and rejection sampling of sampled drafts.

All three leave the target's distribution as it is; they differ in how many drafts stand.
"""

import random
from typing import Literal

import torch
from torch import Tensor

RuleName = Literal["sglang", "rejection"]


class AcceptanceRule:
    """Drafts are the drafter's argmax.

    Greedy: a draft stands when it is the target's argmax. At temperature T, SGLang's rule for argmax drafts: draft d stands with the
    target's probability p(d); when it falls, the token is drawn from p without d, renormalised; after s standing drafts from p. The
    token's distribution is p either way: p(d) + (1 - p(d)) * 0 for d and (1 - p(d)) * p(x) / (1 - p(d)) for any other x.
    """

    def __init__(self, temperature: float, seed: int) -> None:
        self.temperature = temperature
        self.uniform = random.Random(seed).random  # one stream a request, the same on every machine

    def pick(self, logits_1D: Tensor) -> Tensor:
        """Row [1] of the draft vocabulary that is drafted."""
        return logits_1D.argmax(-1)

    def accept(self, logits_MV: Tensor, drafts_S: Tensor) -> list[int]:
        """The drafts that stand and one more token, from the s + 1 rows of logits behind x_t+1 and each draft."""
        drafts = drafts_S.tolist()
        if self.temperature == 0:
            best = logits_MV.argmax(-1).tolist()
            standing = next((i for i, draft in enumerate(drafts) if draft != best[i]), len(drafts))
            return best[: standing + 1]
        p_MV = torch.softmax(logits_MV.float() / self.temperature, dim=-1)
        for i, draft in enumerate(drafts):
            if self.uniform() >= float(p_MV[i, draft]):
                p_MV[i, draft] = 0
                return [*drafts[:i], draw(p_MV[i], self.uniform())]
        return [*drafts, draw(p_MV[-1], self.uniform())]


class RejectionRule:
    """Drafts are sampled from the drafter's distribution q at the request's temperature (> 0); draft d stands with probability
    min(1, p(d) / q(d)), and when it falls the token is drawn from max(0, p - q), renormalised (Leviathan et al. 2023, Chen et al. 2023).

    A draft stands with probability sum of min(p, q) on average, where argmax drafts stand with p(argmax q): more when q is close to p.
    q is 0 outside the draft vocabulary, ``draft_ids_D``, which the rule allows. SGLang 0.5.23 refuses it for a reduced vocabulary.
    """

    def __init__(self, temperature: float, seed: int, draft_ids_D: Tensor) -> None:
        self.temperature, self.draft_ids_D = temperature, draft_ids_D
        self.uniform = random.Random(seed).random
        self._q_SD: list[Tensor] = []

    def pick(self, logits_1D: Tensor) -> Tensor:
        """Row [1] of the draft vocabulary that is drafted; q is kept until the cycle's ``accept``."""
        q_D = torch.softmax(logits_1D[0].float() / self.temperature, dim=-1)
        self._q_SD.append(q_D)
        return torch.tensor([draw(q_D, self.uniform())], device=logits_1D.device)

    def accept(self, logits_MV: Tensor, drafts_S: Tensor) -> list[int]:
        """The drafts that stand and one more token, from the s + 1 rows of logits behind x_t+1 and each draft."""
        drafts, q_SD, self._q_SD = drafts_S.tolist(), self._q_SD, []
        p_MV = torch.softmax(logits_MV.float() / self.temperature, dim=-1)
        for i, draft in enumerate(drafts):
            q_V = torch.zeros_like(p_MV[i]).index_copy_(0, self.draft_ids_D, q_SD[i])
            if self.uniform() * float(q_V[draft]) >= float(p_MV[i, draft]):
                return [*drafts[:i], draw((p_MV[i] - q_V).clamp_(min=0), self.uniform())]
        return [*drafts, draw(p_MV[-1], self.uniform())]


Rule = AcceptanceRule | RejectionRule


def draw(weights_V: Tensor, point: float) -> int:
    """The index at which the cumulative sum of the weights (not all zero) passes ``point``, a uniform number in [0, 1)."""
    cumulative_V = weights_V.double().cumsum(0)
    index = torch.searchsorted(cumulative_V, cumulative_V[-1] * point, right=True)
    return min(int(index), len(cumulative_V) - 1)
