"""The training-time test against the slow reference, and what it must not depend on."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from eyas.distribution import TopLogProbs
from eyas.drafter import Drafter, DrafterShape
from tests.train.reference import counts, reference_loss, reference_pairs
from train.attention import BLOCK_QUERIES
from train.batches import Batch
from train.loss import LABELS_PER_SLICE
from train.ttt import TrainingTimeTest, counted_chains, evaluate_hits

STEPS, DECAY = 4, 0.8
MHA = {"num_heads": 4, "num_kv_heads": 4}
GQA = {"num_heads": 6, "num_kv_heads": 2}
FULL, REDUCED = {"draft_vocab_size": 40}, {"draft_vocab_size": 24}
Row = list[tuple[int, bool]]


def drafter(seed: int = 0, **changes: int) -> Drafter:
    """A drafter with random weights; a reduced draft vocabulary takes tokens from all over the target's."""
    torch.manual_seed(seed)
    sizes = {"hidden_size": 24, "intermediate_size": 40, "head_dim": 8, "vocab_size": 40, "max_position": 512}
    made = Drafter(DrafterShape(**{**sizes, **GQA, **REDUCED, **changes}, rms_norm_eps=1e-5, rope_theta=10000.0)).double()
    with torch.no_grad():
        for name, weight in made.named_parameters():
            weight.copy_(1 + 0.3 * torch.randn_like(weight) if weight.dim() == 1 else torch.randn_like(weight) * weight.shape[-1] ** -0.5)
            if name == "lm_head.weight":
                weight.mul_(2)
    ids_D = torch.randperm(made.shape.vocab_size)[: made.shape.draft_vocab_size].sort().values
    made.d2t.copy_(ids_D - torch.arange(len(ids_D)))
    made.t2d.zero_()[ids_D] = True
    made.set_embedding(torch.randn(made.shape.vocab_size, made.shape.hidden_size).double())
    return made


def target_head(made: Drafter) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    size = (made.shape.draft_vocab_size, made.shape.hidden_size)
    return torch.randn(size, generator=generator).double() * 3 * made.shape.hidden_size**-0.5


def text(made: Drafter, pattern: str, seed: int = 0) -> Row:
    """A row written as one letter a token: p not supervised, s supervised and in the draft vocabulary, o supervised and outside of it."""
    generator = torch.Generator().manual_seed(seed)
    inside, outside = made.t2d.nonzero()[:, 0], (~made.t2d).nonzero()[:, 0]
    pools = {"p": torch.arange(len(made.t2d)), "s": inside, "o": outside}
    return [(int(pools[c][torch.randint(len(pools[c]), (), generator=generator)]), c != "p") for c in pattern]


def packed(made: Drafter, rows: Sequence[Row], dtype: torch.dtype = torch.float64) -> Batch:
    """Rows as a batch. The states of a row depend on its tokens alone, so a row is the same wherever it is packed."""
    states = [torch.Generator().manual_seed(sum(token for token, _ in row) + len(row)) for row in rows]
    size = made.shape.hidden_size
    return Batch(
        ids_N=torch.tensor([token for row in rows for token, _ in row], dtype=torch.int64),
        positions_N=torch.cat([torch.arange(len(row)) for row in rows]),
        supervised_N=torch.tensor([flag for row in rows for _, flag in row], dtype=torch.bool),
        aux_NA=torch.cat([torch.randn(len(row), 3 * size, generator=g) for row, g in zip(rows, states, strict=True)]).to(dtype),
        final_NH=torch.cat([torch.randn(len(row), size, generator=g) for row, g in zip(rows, states, strict=True)]).to(dtype),
        starts_B1=torch.tensor([0, *[len(row) for row in rows]]).cumsum(0),
        keys=tuple(str(number) for number in range(len(rows))),
    )


def gradients(made: Drafter, loss: Tensor) -> dict[str, Tensor]:
    names, weights = zip(*made.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(loss, weights), strict=True))


def loss_and_gradients(made: Drafter, batches: Sequence[Batch], dtype: torch.dtype = torch.float64) -> tuple[float, dict[str, Tensor]]:
    test = TrainingTimeTest(made, target_head(made).to(dtype), STEPS, DECAY)
    loss = torch.stack([test(batch).loss_sum for batch in batches]).sum()
    return float(loss.detach()), gradients(made, loss)


def difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest relative error of any parameter's gradient."""
    assert found.keys() == expected.keys()
    return max(float((found[name] - expected[name]).norm() / expected[name].norm()) for name in expected)


HARD = ["pppsssssss", "ppssossssopsspppsssss", "pp", "pppp", "psssss", "ppsp", "psp", "sssss", "pppppppsosososs", "pssppppsssssssssss"]


@pytest.mark.parametrize("heads", [MHA, GQA], ids=["mha", "gqa"])
@pytest.mark.parametrize("vocabulary", [FULL, REDUCED], ids=["full", "reduced"])
def test_loss_and_every_gradient_equal_the_reference_in_float64(heads: dict[str, int], vocabulary: dict[str, int]) -> None:
    made = drafter(**heads, **vocabulary)
    patterns = [pattern.replace("o", "s") if vocabulary is FULL else pattern for pattern in HARD]
    batch = packed(made, [text(made, pattern, seed) for seed, pattern in enumerate(patterns)])
    expected = reference_loss(made, batch, target_head(made), STEPS, DECAY)
    loss, found = loss_and_gradients(made, [batch])
    assert loss == pytest.approx(float(expected.detach()), rel=1e-9)
    assert difference(found, gradients(made, expected)) < 1e-6


def test_all_log_probabilities_in_place_of_final_states_give_the_reference_without_a_target_head() -> None:
    made = drafter()
    batch = packed(made, [text(made, pattern, seed) for seed, pattern in enumerate(HARD)])
    expected = reference_loss(made, batch, target_head(made), STEPS, DECAY)
    logprob_ND, index_ND = (batch.final_NH @ target_head(made).T).log_softmax(-1).sort(-1, descending=True)
    nothing_N = torch.zeros(batch.tokens).double()
    told = replace(batch, final_NH=batch.final_NH[:, :0], top=TopLogProbs(index_ND, logprob_ND, nothing_N, nothing_N))
    test = TrainingTimeTest(made, torch.empty(0, made.shape.hidden_size).double(), STEPS, DECAY)
    sums = test(told, with_hits=True)
    assert float(sums.loss_sum.detach()) == pytest.approx(float(expected.detach()), rel=1e-9)
    assert difference(gradients(made, sums.loss_sum), gradients(made, expected)) < 1e-6
    assert torch.equal(sums.hits_J, TrainingTimeTest(made, target_head(made), STEPS, DECAY)(batch, with_hits=True).hits_J)


def test_blocks_and_label_blocks_of_any_size_give_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    made = drafter()
    batch = packed(made, [text(made, "pp" + "sssso" * 8), text(made, "ppp" + "s" * 20)])
    expected = reference_loss(made, batch, target_head(made), STEPS, DECAY)
    wanted = gradients(made, expected)
    for queries, labels, per_slice in ((1, 1, 1), (3, 5, 2), (7, 64, 64)):
        monkeypatch.setitem(BLOCK_QUERIES, "cpu", queries)
        monkeypatch.setattr("train.loss.LABELS_PER_BLOCK", labels)
        monkeypatch.setitem(LABELS_PER_SLICE, "cpu", per_slice)
        loss, found = loss_and_gradients(made, [batch])
        assert loss == pytest.approx(float(expected.detach()), rel=1e-9)
        assert difference(found, wanted) < 1e-6


def test_float32_equals_the_reference_to_float32_precision() -> None:
    made = drafter()
    rows = [text(made, pattern, seed) for seed, pattern in enumerate(HARD)]
    expected = reference_loss(made, packed(made, rows, torch.float32), target_head(made).float(), STEPS, DECAY)
    wanted = gradients(made, expected)
    narrow = drafter().float()
    loss, found = loss_and_gradients(narrow, [packed(narrow, rows, torch.float32)], torch.float32)
    assert loss == pytest.approx(float(expected.detach()), rel=2e-6)
    assert difference({name: gradient.double() for name, gradient in found.items()}, wanted) < 2e-5


def test_bfloat16_loss_is_within_a_thousandth_and_gradients_within_two_percent_of_float64() -> None:
    made = drafter(hidden_size=64, intermediate_size=96, head_dim=16, vocab_size=400, draft_vocab_size=300)
    with torch.no_grad():  # the same numbers for both: what bf16 can hold
        for weight in made.parameters():
            weight.copy_(weight.bfloat16())
    head = target_head(made).bfloat16()
    batch = packed(made, [text(made, "p" * 20 + "s" * 60, seed) for seed in range(4)], torch.bfloat16)
    exact = TrainingTimeTest(made, head.double(), STEPS, DECAY)
    sums = exact(
        Batch(batch.ids_N, batch.positions_N, batch.supervised_N, batch.aux_NA.double(), batch.final_NH, batch.starts_B1, batch.keys)
    )
    wanted = gradients(made, sums.loss_sum)
    narrow = drafter(hidden_size=64, intermediate_size=96, head_dim=16, vocab_size=400, draft_vocab_size=300).float()
    narrow.load_state_dict(made.state_dict())
    rounded = TrainingTimeTest(narrow, head, STEPS, DECAY)(batch)
    assert float(rounded.loss_sum.detach()) == pytest.approx(float(sums.loss_sum.detach()), rel=1e-3)
    found = {name: gradient.double() for name, gradient in gradients(narrow, rounded.loss_sum).items()}
    assert difference(found, wanted) < 2e-2


def test_packing_order_and_micro_batches_change_no_gradient() -> None:
    made = drafter()
    rows = [text(made, pattern, seed) for seed, pattern in enumerate(HARD)]
    loss, together = loss_and_gradients(made, [packed(made, rows)])
    for parts in ([rows[::-1]], [[row] for row in rows], [rows[:4], rows[4:]]):
        other, apart = loss_and_gradients(made, [packed(made, part) for part in parts])
        assert other == pytest.approx(loss, rel=1e-12)
        assert difference(apart, together) < 1e-12


def test_gradients_reach_every_parameter() -> None:
    made = drafter()
    _, found = loss_and_gradients(made, [packed(made, [text(made, "ppssssss")])])
    assert all(float(gradient.norm()) > 1e-6 for gradient in found.values())


@pytest.mark.parametrize("patterns", [["pp", "pppp", "ppo", "ps", "p"], []], ids=["nothing counts", "no row"])
def test_a_batch_in_which_nothing_counts_gives_zero_loss_and_zero_gradients(patterns: list[str]) -> None:
    made = drafter()
    rows = [text(made, pattern) for pattern in patterns]
    batch = packed(made, rows) if rows else packed(made, [[]])
    sums = TrainingTimeTest(made, target_head(made), STEPS, DECAY)(batch)
    assert float(sums.loss_sum.detach()) == 0
    assert sums.counted_J.tolist() == [0] * STEPS
    assert all(float(gradient.abs().sum()) == 0 for gradient in gradients(made, sums.loss_sum).values())


def test_pairs_that_count_are_those_of_the_definition() -> None:
    made = drafter()
    generator = torch.Generator().manual_seed(3)
    in_draft = made.t2d.tolist()
    for seed in range(30):
        letters = [
            "".join("ppsso"[int(i)] for i in torch.randint(5, (int(n),), generator=generator))
            for n in torch.randint(1, 14, (4,), generator=generator)
        ]
        rows = [text(made, pattern, seed) for pattern in letters]
        batch = packed(made, rows)
        chains = counted_chains(batch.ids_N, batch.supervised_N, batch.starts_B1, made.t2d, STEPS)
        for j in range(STEPS):
            expected = [
                start + t
                for row, start in zip(rows, batch.starts_B1.tolist(), strict=False)
                for t in range(len(row))
                if counts([token for token, _ in row], [flag for _, flag in row], in_draft, t, j)
            ]
            assert chains.t_by_step[j].tolist() == expected


def test_the_first_chain_of_a_reply_sits_on_the_last_prompt_token() -> None:
    made = drafter()
    batch = packed(made, [text(made, "pppsss"), text(made, "ppsssppsss")])
    chains = counted_chains(batch.ids_N, batch.supervised_N, batch.starts_B1, made.t2d, 3)
    assert [t.tolist() for t in chains.t_by_step] == [[2, 3, 7, 8, 12, 13], [2, 7, 12], []]


def test_a_token_outside_the_draft_vocabulary_can_be_in_hand_but_not_drafted() -> None:
    made = drafter()
    batch = packed(made, [text(made, "posssos")])
    chains = counted_chains(batch.ids_N, batch.supervised_N, batch.starts_B1, made.t2d, 3)
    assert [t.tolist() for t in chains.t_by_step] == [[0, 1, 2, 4], [0, 1], [0]]


def test_sums_and_hits_of_a_step_equal_the_reference() -> None:
    made = drafter()
    batch = packed(made, [text(made, pattern, seed) for seed, pattern in enumerate(HARD)])
    pairs = reference_pairs(made, batch, target_head(made), STEPS)
    sums = TrainingTimeTest(made, target_head(made), STEPS, DECAY)(batch, with_hits=True)
    by_step = [[pair for pair in pairs if pair.j == j] for j in range(STEPS)]
    assert sums.counted_J.tolist() == [len(step) for step in by_step]
    assert sums.loss_J.tolist() == pytest.approx([sum(float(pair.loss.detach()) for pair in step) for step in by_step], rel=1e-9)
    assert sums.hits_J is not None
    assert sums.hits_J.tolist() == [sum(pair.hit for pair in step) for step in by_step]
    assert TrainingTimeTest(made, target_head(made), STEPS, DECAY)(batch).hits_J is None


def test_the_hits_of_a_reply_lie_at_consecutive_chains_and_equal_the_reference() -> None:
    made = drafter(vocab_size=8, draft_vocab_size=6)  # so few tokens that guesses hit
    patterns = ["pppsssssss", "ppssossssppssssss", "pp", "psp", "pppsos", "sssss"]
    batch = packed(made, [text(made, pattern, seed) for seed, pattern in enumerate(patterns)])
    found = evaluate_hits(TrainingTimeTest(made, target_head(made), STEPS, DECAY), batch)
    hit = {(pair.t, pair.j) for pair in reference_pairs(made, batch, target_head(made), STEPS) if pair.hit}
    assert hit
    assert [(reply.row, reply.chain_t_M.tolist()) for reply in found.replies] == [
        (0, [2, 3, 4, 5, 6, 7]),
        (1, [1, 2, 3, 4, 5, 6]),
        (1, [10, 11, 12, 13, 14]),
        (4, [2, 3]),
        (5, [0, 1, 2]),
    ]
    for reply in found.replies:
        t_M = (reply.chain_t_M + batch.starts_B1[reply.row]).tolist()
        assert reply.hits_MJ.tolist() == [[(t, j) in hit for j in range(STEPS)] for t in t_M]
    assert found.sums.hits_J is not None
    assert int(found.sums.hits_J.sum()) == len(hit)


def test_steps_beyond_the_trained_ones_change_no_earlier_step() -> None:
    made = drafter()
    batch = packed(made, [text(made, "pppsssssss"), text(made, "ppsssosss")])
    few, many = (TrainingTimeTest(made, target_head(made), steps, DECAY)(batch).loss_J for steps in (2, 5))
    assert few.tolist() == pytest.approx(many[:2].tolist(), rel=1e-12)


def rank_gradients(rank: int, meeting: str, folder: str) -> None:
    """One of two processes: the gradients of half the rows as DDP brings them together, divided as the trainer divides them."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    made = drafter()
    rows = [text(made, pattern, seed) for seed, pattern in enumerate(HARD)]
    test = torch.nn.parallel.DistributedDataParallel(TrainingTimeTest(made, target_head(made), STEPS, DECAY))
    test(packed(made, rows[rank::2])).loss_sum.backward()
    found = {name: 2 * weight.grad for name, weight in made.named_parameters() if weight.grad is not None}  # DDP gives the mean
    save_file(found, Path(folder) / f"rank{rank}.safetensors")
    torch.distributed.destroy_process_group()


def test_two_processes_have_the_gradient_of_one_in_float64(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(rank_gradients, (str(tmp_path / "meeting"), str(tmp_path)), nprocs=2)
    made = drafter()
    _, alone = loss_and_gradients(made, [packed(made, [text(made, pattern, seed) for seed, pattern in enumerate(HARD)])])
    for rank in (0, 1):
        assert difference(load_file(tmp_path / f"rank{rank}.safetensors"), alone) < 1e-12
