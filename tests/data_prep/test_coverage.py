"""What prep says about draft vocabularies, in numbers that can be counted by hand."""

import pytest
import torch

from data_prep.coverage import coverage_notes, gain_notes, supervised_counts
from data_prep.rows import Row
from data_prep.template import reply_row
from eyas import vocab
from eyas.drafter import Drafter, DrafterShape
from eyas.states import row_key

SHAPE = DrafterShape(
    hidden_size=4,
    intermediate_size=4,
    num_heads=1,
    num_kv_heads=1,
    head_dim=4,
    vocab_size=20,
    draft_vocab_size=2,
    rms_norm_eps=1e-5,
    rope_theta=100.0,
    max_position=16,
)


def make_row(*reply: int) -> Row:
    tokens = reply_row([1, 2], reply)
    return Row(row_key(tokens.ids, tokens.supervised), "", "chat", tokens)


@pytest.fixture
def drafter() -> Drafter:
    drafter = Drafter(SHAPE)
    ids_D = torch.tensor([5, 6])
    drafter.d2t.copy_(vocab.offsets(ids_D))
    drafter.t2d.copy_(vocab.membership(ids_D, 20))
    return drafter


ROWS = {"train": [make_row(5, 5, 7), make_row(6, 7, 8, 7)], "greedy": [make_row(5, 6, 5, 6), make_row(5, 7, 7, 9), make_row(8, 8)]}


def test_prompts_are_not_counted() -> None:
    counts_V = supervised_counts(ROWS["train"], 20)
    assert {token: int(count) for token, count in enumerate(counts_V) if count} == {5: 2, 6: 1, 7: 3, 8: 1}


def test_tokens_and_replies_outside_are_counted_and_the_gain_is_the_formulas() -> None:
    outside, inside, gain = gain_notes(ROWS["greedy"], {"old": torch.tensor([5, 6]), "new": torch.tensor([5, 6, 7])}, 20, [0.5, 0.25])
    assert outside == (
        "draft vocabulary old: 5 of the 10 tokens that the target says greedily to held-out prompts are outside (50.00%), in 2 of 3 replies"
    )
    assert "3 of the 10 tokens" in inside
    # 1 + .5 + .5 x .25 before; rates times .7 / .5 after
    assert gain.endswith("acceptance length 1.625 -> 1.945 (+0.320)")


def test_the_change_is_told_only_where_a_vocabulary_is_chosen_anew(make_config, drafter: Drafter) -> None:
    measured = {
        "layers": [1, 2, 3],
        "readings": [{"layers": [0, 1, 2], "conditional_J": [0.0]}, {"layers": [1, 2, 3], "conditional_J": [0.5]}],
    }
    config = make_config()
    warm = config.model_copy(update={"drafter": config.drafter.model_copy(update={"init": "a-folder"})})
    anew = config.model_copy(update={"drafter": config.drafter.model_copy(update={"init": "a-folder", "draft_vocab_size": 3})})
    counts_V = supervised_counts(ROWS["train"], 20)
    assert coverage_notes(config, ROWS, counts_V, None, None) == [
        "draft vocabulary chosen on the training text: 20 tokens cover 100.00% of the supervised training tokens"
    ]
    assert coverage_notes(warm, ROWS, counts_V, drafter, measured) == [
        "draft vocabulary of a-folder: 2 tokens cover 42.86% of the supervised training tokens"
    ]
    notes = coverage_notes(anew, ROWS, counts_V, drafter, measured)
    assert notes[1] == "draft vocabulary chosen on the training text: 3 tokens cover 85.71% of the supervised training tokens"
    assert "acceptance length 1.500 -> 1.700 (+0.200)" in notes[-1]


def test_a_vocabulary_that_covers_nothing_promises_nothing() -> None:
    notes = gain_notes(ROWS["greedy"], {"old": torch.tensor([3]), "new": torch.tensor([5, 6])}, 20, [None])
    assert len(notes) == 2
