"""What is measured on held-out rows is the walk over the drafter's own guesses, however the rows are packed or shared out."""

from pathlib import Path

import pytest
import torch

from eyas.acceptance import Acceptance, walk
from eyas.drafter import Drafter, DrafterShape
from eyas.errors import EyasError
from eyas.states import StateRow, StateSpec, StateStore, StateWriter, finish_store, row_key
from eyas.target import Target
from train.batches import pack
from train.ttt import TrainingTimeTest, evaluate_hits
from train.validation import HeldOut, Measurement, measure

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def probe(tiny_target: Target) -> TrainingTimeTest:
    shape = tiny_target.shape
    torch.manual_seed(3)
    drafter = Drafter(
        DrafterShape(
            hidden_size=shape.hidden_size,
            intermediate_size=shape.intermediate_size,
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            vocab_size=shape.vocab_size,
            draft_vocab_size=shape.vocab_size,
            rms_norm_eps=shape.rms_norm_eps,
            rope_theta=shape.rope_theta,
            max_position=512,
        )
    )
    drafter.set_embedding(tiny_target.embedding(torch.float32))
    test = TrainingTimeTest(drafter, tiny_target.lm_head(torch.float32), 3, 1.0)
    with torch.no_grad():  # with the target's head even random weights guess right now and then
        drafter.lm_head.weight.copy_(tiny_target.lm_head(torch.float32))
    return test


@pytest.fixture(scope="module")
def store(tiny_states: Path) -> StateStore:
    return StateStore(tiny_states / "sampled")


def test_the_measurement_is_the_walk_row_by_row(probe, store) -> None:
    expected = Acceptance.none(3)
    by_category: dict[str, Acceptance] = {}
    for number in range(len(store)):
        (reply,) = evaluate_hits(probe, pack([store.read(number)]).to(CPU, torch.float32)).replies
        one = Acceptance.of(walk(reply.hits_MJ, reply.chain_t_M), 3)
        assert one.tokens == store.supervised[number] - 1
        expected += one
        name = store.categories[number]
        by_category[name] = by_category.get(name, Acceptance.none(3)) + one
    measured = measure(probe, store, 64, CPU)
    assert expected.accepted_J[0] > 0
    assert measured.overall == expected
    assert measured.by_category == by_category
    assert sum(measured.by_context.values(), Acceptance.none(3)) == expected


def test_neither_packing_nor_sharing_out_changes_it(probe, store) -> None:
    whole = measure(probe, store, 10_000, CPU)
    vectors: list[torch.Tensor] = []

    def keep(sums: torch.Tensor) -> torch.Tensor:
        vectors.append(sums)
        return sums

    for rank in range(3):
        measure(probe, store, 20, CPU, rank, 3, keep)
    total = sum(vectors)
    shared = measure(probe, store, 20, CPU, reduce=lambda sums: total)
    assert shared.overall == whole.overall
    assert shared.by_category == whole.by_category
    assert shared.by_context == whole.by_context
    assert shared.loss_J == pytest.approx(whole.loss_J, rel=1e-5)


def test_verify_steps_of_a_long_row_are_counted_by_the_context_they_begin_with(probe, store, tmp_path) -> None:
    torch.manual_seed(7)
    ids, supervised, states = torch.randint(48, (300,)), torch.arange(300) >= 240, torch.randn(300, 32)
    with StateWriter(tmp_path / "long", store.spec, 1 << 20) as writer:
        writer.add(StateRow(row_key(ids.tolist(), supervised.tolist()), "chat", ids, supervised, states.repeat(1, 3), states))
    finish_store(tmp_path / "long", {})
    long = StateStore(tmp_path / "long")
    (reply,) = evaluate_hits(probe, pack([long.read(0)]).to(CPU, torch.float32)).replies
    cycles = walk(reply.hits_MJ, reply.chain_t_M)
    early, late = ([cycle for cycle in cycles if (cycle.t + 2 < 256) == short] for short in (True, False))
    assert early
    assert measure(probe, long, 64, CPU).by_context == {"<256": Acceptance.of(early, 3), "256-511": Acceptance.of(late, 3)}


def test_checkpoints_are_chosen_by_the_mean_of_both_lengths() -> None:
    def held_out(tokens: int) -> HeldOut:
        return HeldOut(Acceptance(10, tokens, (10,), (10,), (5,)), {}, {}, (1.0,))

    measurement = Measurement({"greedy": held_out(20), "sampled": held_out(15)})
    assert measurement.length == 1.75
    assert measurement.as_json()["greedy"]["length"] == 2.0


def test_replies_too_short_to_measure_are_an_error_that_names_the_store(probe, store, tmp_path) -> None:
    spec: StateSpec = store.spec
    ids, supervised = torch.tensor([3, 4, 5]), torch.tensor([False, False, True])
    states = torch.zeros(3, 32)
    with StateWriter(tmp_path / "short", spec, 1 << 20) as writer:
        writer.add(StateRow(row_key([3, 4, 5], [False, False, True]), "chat", ids, supervised, states.repeat(1, 3), states))
    finish_store(tmp_path / "short", {})
    with pytest.raises(EyasError, match="short: no held-out reply has two supervised tokens"):
        measure(probe, StateStore(tmp_path / "short"), 64, CPU)
