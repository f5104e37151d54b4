"""The draft vocabulary, with numbers."""

import pytest
import torch

from eyas import vocab
from eyas.acceptance import Acceptance, walk
from eyas.errors import EyasError


def test_the_most_frequent_tokens_are_chosen_and_ties_go_to_the_lower_id() -> None:
    counts = torch.tensor([0, 5, 2, 9, 2, 2, 0])
    assert vocab.choose_vocab(counts, 3).tolist() == [1, 2, 3]
    assert vocab.choose_vocab(counts, 6).tolist() == [0, 1, 2, 3, 4, 5]


def test_ties_are_deterministic_in_a_large_vocabulary() -> None:
    chosen = vocab.choose_vocab(torch.zeros(100_000, dtype=torch.int64), 1000)
    assert torch.equal(chosen, torch.arange(1000))


@pytest.mark.parametrize("size", [0, 8])
def test_an_impossible_size_is_refused(size: int) -> None:
    with pytest.raises(EyasError, match="does not fit"):
        vocab.choose_vocab(torch.ones(7), size)


def test_offsets_and_ids_are_inverse_with_the_numbers_engines_expect() -> None:
    ids = torch.tensor([2, 3, 7, 30])
    assert vocab.offsets(ids).tolist() == [2, 2, 5, 27]
    assert torch.equal(vocab.absolute(vocab.offsets(ids)), ids)
    assert vocab.membership(ids, 31).nonzero().flatten().tolist() == [2, 3, 7, 30]


def test_coverage_is_the_share_of_counted_tokens() -> None:
    assert vocab.coverage(torch.tensor([6, 3, 1]), torch.tensor([0, 2])) == pytest.approx(0.7)
    with pytest.raises(EyasError, match="no token was counted"):
        vocab.coverage(torch.zeros(3), torch.tensor([0]))


IDS = torch.tensor([2, 3, 7, 30])


@pytest.mark.parametrize("with_mask", [False, True])
@pytest.mark.parametrize(("d2t", "expected"), [(vocab.offsets(IDS), True), (IDS, False)])
def test_offsets_and_target_ids_are_told_apart_by_the_numbers(d2t: torch.Tensor, expected: bool, with_mask: bool) -> None:
    mask = vocab.membership(IDS, 31) if with_mask else None
    assert vocab.is_offset(d2t, 31, mask) is expected


def test_the_mask_decides_where_both_readings_are_possible() -> None:
    d2t = torch.tensor([0, 1, 2, 3])  # as offsets tokens 0, 2, 4, 6
    assert vocab.is_offset(d2t, 10, vocab.membership(torch.tensor([0, 2, 4, 6]), 10))
    assert not vocab.is_offset(d2t, 10, vocab.membership(torch.tensor([0, 1, 2, 3]), 10))
    with pytest.raises(EyasError, match="alike"):
        vocab.is_offset(d2t, 10)


@pytest.mark.parametrize(
    ("d2t", "mask", "told"),
    [
        ([5, 5, 40, 5], None, "outside"),
        ([-1, -1, 2, 2], None, "outside"),
        ([1, 0, 0, 0], None, "twice"),
        ([0, 0, 0, 0], [2, 3, 7, 30], "t2d marks other tokens"),
        ([0, 0, 0, 0], [], "t2d marks other tokens"),
    ],
)
def test_nonsense_is_refused(d2t: list[int], mask: list[int] | None, told: str) -> None:
    mask_V = None if mask is None else vocab.membership(torch.tensor(mask, dtype=torch.int64), 31)
    with pytest.raises(EyasError, match=told):
        vocab.is_offset(torch.tensor(d2t), 31, mask_V)


def test_a_new_draft_vocabulary_keeps_known_rows_and_takes_new_ones_from_the_target() -> None:
    target = torch.randn(60, 4)
    old, new = torch.arange(1, 60, 2), torch.arange(20, 60)
    rows = target[old].clone()
    moved = vocab.reselect(rows, old, new, target)
    torch.testing.assert_close(moved, target[new])
    rows[15] = 7.0  # of token 31
    assert torch.equal(vocab.reselect(rows, old, new, target)[11], rows[15])


def test_new_rows_are_moved_as_training_has_moved_the_known_ones() -> None:
    torch.manual_seed(0)
    target, map_HH = torch.randn(600, 8), 0.3 * torch.randn(8, 8)
    trained = target + target @ map_HH + 5.0
    old, new = torch.arange(0, 400), torch.arange(300, 600)
    moved = vocab.reselect(trained[old], old, new, target)
    assert torch.equal(moved[:100], trained[300:400])
    error = (moved[100:] - trained[400:]).norm() / (target[400:] - trained[400:]).norm()
    assert error < 0.02  # the ridge leaves a little
    alone = vocab.reselect(trained[:1], old[:1], new, target)  # a single known row tells the mean alone
    torch.testing.assert_close(alone, target[new] + (trained[0] - target[0]))


def test_among_tokens_counted_alike_the_old_vocabulary_stays() -> None:
    counts = torch.tensor([0, 7, 0, 2, 0, 2])
    assert vocab.choose_vocab(counts, 4, torch.tensor([4, 5])).tolist() == [1, 3, 4, 5]
    assert vocab.choose_vocab(counts, 2, torch.tensor([4, 5])).tolist() == [1, 5]
    assert vocab.choose_vocab(counts, 4).tolist() == [0, 1, 3, 5]


@pytest.mark.parametrize(("old", "new"), [(0.9, 0.98), (0.98, 0.9), (0.6, 1.0)])
def test_the_length_expected_of_another_coverage_is_that_of_simulated_chains(old: float, new: float) -> None:
    generator, tokens, rates = torch.Generator().manual_seed(0), 20_000, torch.tensor([0.8, 0.7, 0.6])
    right_MJ = torch.rand(tokens, 3, generator=generator) < rates
    rank_M = torch.rand(tokens + 3, generator=generator)

    def simulated(coverage: float) -> Acceptance:
        # draft j of chain m is token m + 1 + j of the text; the tokens that a larger vocabulary has are a superset
        inside_MJ = (rank_M < coverage).unfold(0, 3, 1)[1:]
        return Acceptance.of(walk(right_MJ & inside_MJ, torch.arange(tokens)), 3)

    before, after = simulated(old), simulated(new)
    assert vocab.expected_length(before.conditional_J, old, old) == pytest.approx(before.length, abs=0.01)
    assert vocab.expected_length(before.conditional_J, old, new) == pytest.approx(after.length, rel=0.02)


def test_a_rate_never_passes_one_and_a_draft_that_was_never_reached_is_never_right() -> None:
    assert vocab.expected_length([0.9, None, 0.5], 0.5, 1.0) == 2.0
    assert vocab.expected_length([0.5, 0.5], 0.8, 0.8) == 1.75


def test_a_drafter_keeps_its_vocabulary_unless_a_size_asks_for_another() -> None:
    counts, own = torch.tensor([0, 5, 2, 9, 2, 2, 0]), torch.tensor([0, 6])
    assert vocab.drafter_vocab(counts, None, own).tolist() == [0, 6]
    assert vocab.drafter_vocab(counts, 5, own).tolist() == [1, 2, 3, 4, 5]
    assert vocab.drafter_vocab(counts, 2, None).tolist() == [1, 3]
    assert vocab.drafter_vocab(counts, None, None).tolist() == list(range(7))


def test_a_vocabularys_digest_is_of_its_tokens_in_their_order_whatever_their_dtype() -> None:
    ids = torch.tensor([3, 70000, 5])
    assert vocab.vocab_digest(ids) == vocab.vocab_digest(ids.int())
    assert len({vocab.vocab_digest(torch.tensor(other)) for other in ([3, 5], [5, 3], [3, 6], [3])}) == 4
