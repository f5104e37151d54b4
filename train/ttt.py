"""The training-time test: the drafter unrolled J steps from every position where a server could start a chain.

Row x_0 .. x_n-1 with the target's aux states a_t. Step 0 at t reads the embedding of x_t+1 beside fc(a_t) and predicts x_t+2's
distribution; step j at t reads x_t+1+j beside the drafter's own pre-norm state of step j-1 at t, sits at rotary position t+j, sees the
step-0 keys of its row up to t and the keys (t, 1..j), and predicts x_t+2+j's distribution (whose final state lies at t+1+j).
A pair (t, j) counts iff x_t+1 .. x_t+2+j are supervised tokens of one reply and x_t+2 .. x_t+2+j are in the draft vocabulary: the chains
that a server can start and continue.

What it costs: fc, k_proj and v_proj for all tokens of the batch, everything else for counted pairs alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call

from eyas.drafter import Drafter
from train.attention import merged_attention, query_blocks
from train.batches import Batch
from train.loss import PairLosses, soft_cross_entropy, top_cross_entropy


@dataclass(frozen=True)
class Chains:
    """``t_by_step[j]``: int64 packed positions t, ascending, whose pair (t, j) counts; those of step j + 1 are among those of step j."""

    t_by_step: tuple[Tensor, ...]

    @property
    def counted_J(self) -> Tensor:
        """Counted pairs of each step, int64, on the CPU."""
        return torch.tensor([len(t) for t in self.t_by_step])

    def label_P(self) -> Tensor:
        """For all pairs, step by step: the packed position t+1+j whose next token the pair predicts."""
        return torch.cat([t + 1 + j for j, t in enumerate(self.t_by_step)])


def counted_chains(ids_N: Tensor, supervised_N: Tensor, starts_B1: Tensor, t2d_V: Tensor, steps: int) -> Chains:
    """Find the pairs that count (see the module) among packed rows; ``t2d_V`` says which target tokens are in the draft vocabulary."""
    length_N = chain_lengths(ids_N, supervised_N, starts_B1, t2d_V)
    return Chains(tuple((length_N > j).nonzero()[:, 0] for j in range(steps)))


def chain_lengths(ids_N: Tensor, supervised_N: Tensor, starts_B1: Tensor, t2d_V: Tensor) -> Tensor:
    """Number of steps that count at every packed position, however many are trained: int64 [N]."""
    draftable_N = supervised_N & t2d_V[ids_N]
    at_N = torch.arange(len(ids_N), device=ids_N.device)
    row_end_N = _row_ends(starts_B1)
    undraftable_N = torch.where(draftable_N, len(ids_N), at_N)
    run_end_N = undraftable_N.flip(0).cummin(0).values.flip(0).minimum(row_end_N)
    length_N = torch.zeros_like(at_N)
    starts_N = _chain_starts(supervised_N, row_end_N)
    t_M = starts_N.nonzero()[:, 0]
    length_N[t_M] = run_end_N[t_M + 2] - (t_M + 2)
    return length_N


def _chain_starts(supervised_N: Tensor, row_end_N: Tensor) -> Tensor:
    """Where t+1 and t+2 lie in the row of t and are supervised: a reply's last prompt token up to its last token but two."""
    at_N = torch.arange(len(supervised_N), device=supervised_N.device)
    return supervised_N.roll(-1) & supervised_N.roll(-2) & (at_N + 2 < row_end_N)


def _row_ends(starts_B1: Tensor) -> Tensor:
    return starts_B1[1:].repeat_interleave(starts_B1.diff())


def unroll(drafter: Drafter, batch: Batch, chains: Chains) -> list[Tensor]:
    """Pre-norm hidden states [M_j, H] of every step j, in the order of ``chains.t_by_step[j]``."""
    # The last position of a row has no next token; its key is made from a wrong one and no chain sees it.
    hidden_NH = drafter.combine(batch.aux_NA.to(drafter.fc.weight.dtype))
    x_N2H = drafter.layer_input(batch.ids_N.roll(-1), hidden_NH)
    k_NKd, v_NKd = drafter.keys_values(x_N2H, batch.positions_N)

    t_M = chains.t_by_step[0]
    # index_select, here and below: its backward pass is five times as fast as that of indexing
    x_M2H, state_MH = x_N2H.index_select(0, t_M), hidden_NH.index_select(0, t_M)
    kd_MKjd = vd_MKjd = k_NKd.new_empty(len(t_M), k_NKd.shape[1], 0, k_NKd.shape[2])
    states = []
    for j, t_next_M in enumerate(chains.t_by_step):
        position_M = batch.positions_N[t_next_M] + j
        if j > 0:
            keep_M = torch.searchsorted(t_M, t_next_M)
            t_M, state_MH = t_next_M, state_MH.index_select(0, keep_M)
            x_M2H = drafter.layer_input(batch.ids_N[t_M + 1 + j], state_MH)
            k_MKd, v_MKd = drafter.keys_values(x_M2H, position_M)
            kd_MKjd = torch.cat([kd_MKjd.index_select(0, keep_M), k_MKd.unsqueeze(2)], 2)
            vd_MKjd = torch.cat([vd_MKjd.index_select(0, keep_M), v_MKd.unsqueeze(2)], 2)
        q_MQd = drafter.queries(x_M2H, position_M)
        blocks = query_blocks(t_M, batch.starts_B1)
        attention_MQd = merged_attention(q_MQd, k_NKd, v_NKd, kd_MKjd, vd_MKjd, blocks, drafter.shape.scale)
        state_MH = drafter.finish(attention_MQd, state_MH)
        states.append(state_MH)
    return states


@dataclass(frozen=True)
class StepSums:
    """Sums over the counted pairs of a batch; whoever has all of a step's batches divides.

    loss_sum: sum over j of decay^j * sum over t of l(t, j), differentiable. counted_J: pairs, int64, on the CPU. loss_J: sum of l,
    unweighted, detached. hits_J: pairs whose largest q is the text's token, int64; None when not asked for. The normaliser N_0 is
    ``counted_J[0]``.
    """

    loss_sum: Tensor
    counted_J: Tensor
    loss_J: Tensor
    hits_J: Tensor | None


@dataclass(frozen=True)
class ReplyHits:
    """The chains of one reply, for ``eyas.acceptance.walk``.

    row: number of the row in its batch. chain_t_M: positions in the row, consecutive from the last prompt token on. hits_MJ: bool, draft j
    of chain m is the text's token; False where the pair does not count (behind the end, outside the draft vocabulary).
    """

    row: int
    chain_t_M: Tensor
    hits_MJ: Tensor


class TrainingTimeTest(nn.Module):
    """Drafter and loss as one module with one ``forward``, so that DDP can wrap it.

    drafter: master weights; every forward casts its matrices once to the compute dtype, norms keep theirs. target_head_DH: the target's
    lm_head rows of the draft vocabulary, frozen, [0, H] where batches bring top log-probabilities; its dtype IS the compute dtype.
    steps: J. decay: step j weighs decay ** j.
    """

    target_head_DH: Tensor

    def __init__(self, drafter: Drafter, target_head_DH: Tensor, steps: int, decay: float) -> None:
        super().__init__()
        self.drafter = drafter
        self.steps = steps
        self.decay = decay
        self.register_buffer("target_head_DH", target_head_DH.detach(), persistent=False)

    def forward(self, batch: Batch, with_hits: bool = False) -> StepSums:
        """Loss sums of a batch; a batch in which nothing counts gives zeros, and zero gradients for all parameters."""
        chains = self.chains(batch)
        return self._sums(batch, chains, self.pair_losses(batch, chains, with_hits))

    def chains(self, batch: Batch) -> Chains:
        """The pairs of ``batch`` that count."""
        return counted_chains(batch.ids_N, batch.supervised_N, batch.starts_B1, self.drafter.t2d, self.steps)

    def pair_losses(self, batch: Batch, chains: Chains, with_guess: bool) -> PairLosses:
        """Losses of all pairs, step by step in the order of ``chains``."""
        dtype = self.target_head_DH.dtype
        unrolled = _Unrolled(self.drafter)
        weights = {name: weight.to(dtype) for name, weight in unrolled.named_parameters() if weight.dim() > 1 and "lm_head" not in name}
        normed_PH = functional_call(unrolled, weights, (batch, chains))
        weight_P = torch.cat(
            [torch.full(t.shape, self.decay**j, dtype=torch.float64, device=t.device) for j, t in enumerate(chains.t_by_step)]
        )
        head_DH, label_P = self.drafter.lm_head.weight, chains.label_P()
        if batch.top is not None:
            return top_cross_entropy(normed_PH, head_DH, batch.top, label_P, weight_P, with_guess)
        return soft_cross_entropy(normed_PH, head_DH, batch.final_NH, self.target_head_DH, label_P, weight_P, with_guess)

    def _sums(self, batch: Batch, chains: Chains, losses: PairLosses) -> StepSums:
        counted = chains.counted_J.tolist()
        loss_J = torch.stack([part.sum() for part in losses.loss_P.split(counted)])
        hits_J = None
        if losses.guess_P is not None:
            hits_J = torch.stack([part.sum() for part in self.hits(batch, chains, losses.guess_P)])
        return StepSums(losses.loss_sum, chains.counted_J, loss_J, hits_J)

    def hits(self, batch: Batch, chains: Chains, guess_P: Tensor) -> Sequence[Tensor]:
        """For every step, bool [M_j]: the guess is the text's token."""
        hit_P = self.drafter.draft_ids_D[guess_P] == batch.ids_N[chains.label_P() + 1]
        return hit_P.split(chains.counted_J.tolist())


class _Unrolled(nn.Module):
    """``unroll`` and the final norm as a module, which is what ``functional_call`` can give other weights to."""

    def __init__(self, drafter: Drafter) -> None:
        super().__init__()
        self.drafter = drafter

    def forward(self, batch: Batch, chains: Chains) -> Tensor:
        """Normed states of all pairs, step by step: [P, H]."""
        return self.drafter.norm(torch.cat(unroll(self.drafter, batch, chains)))


@dataclass(frozen=True)
class Evaluation:
    """Loss sums of a batch, and the hits of each of its replies that has a chain (at least two tokens), in packed order."""

    sums: StepSums
    replies: tuple[ReplyHits, ...]


@torch.no_grad()
def evaluate_hits(test: TrainingTimeTest, batch: Batch) -> Evaluation:
    """What the drafter guesses along the text of ``batch``: everything that validation and the acceptance walk need, in one pass."""
    chains = test.chains(batch)
    losses = test.pair_losses(batch, chains, with_guess=True)
    assert losses.guess_P is not None
    hits_NJ = torch.zeros(len(batch.ids_N), test.steps, dtype=torch.bool, device=batch.ids_N.device)
    for j, (t_M, hit_M) in enumerate(zip(chains.t_by_step, test.hits(batch, chains, losses.guess_P), strict=True)):
        hits_NJ[t_M, j] = hit_M
    t_C = _chain_starts(batch.supervised_N, _row_ends(batch.starts_B1)).nonzero()[:, 0]
    replies = []
    for t_M in torch.tensor_split(t_C, ((t_C.diff() != 1).nonzero()[:, 0] + 1).cpu()):
        if len(t_M):
            row = int(torch.searchsorted(batch.starts_B1, t_M[0], right=True)) - 1
            replies.append(ReplyHits(row, batch.positions_N[t_M], hits_NJ[t_M]))
    return Evaluation(test._sums(batch, chains, losses), tuple(replies))
