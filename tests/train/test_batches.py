"""Rows are packed, dealt to ranks and loaded without one lost or doubled."""

import threading
import time
from dataclasses import replace
from itertools import islice

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eyas.distribution import TopLogProbs
from eyas.errors import EyasError
from eyas.states import StateRow, StateSpec
from train.batches import Batch, Position, Prefetch, blank, epoch_order, fill, pack, plan_epoch

SPEC = StateSpec(layers=(1, 2), hidden_size=4, dtype="bfloat16", vocab_size=50, target_digest="t", tokenizer_digest="k")


def state_row(number: int, length: int) -> StateRow:
    return StateRow(
        key=f"row{number}",
        category="chat",
        ids_T=torch.arange(length) + number,
        supervised_T=torch.arange(length) % 2 == number % 2,
        aux_TA=torch.full((length, 8), float(number), dtype=torch.bfloat16),
        final_TH=torch.full((length, 4), float(-number), dtype=torch.bfloat16),
    )


class Rows:
    """A store of made-up rows; ``broken`` cannot be read."""

    spec = SPEC

    def __init__(self, lengths: list[int], broken: int | None = None) -> None:
        self.lengths, self.broken, self.reads = lengths, broken, 0

    def read(self, i: int) -> StateRow:
        self.reads += 1
        if i == self.broken:
            raise EyasError(f"row {i} is broken")
        return state_row(i, self.lengths[i])


plans = st.tuples(
    st.lists(st.integers(1, 60), min_size=1, max_size=60), st.integers(0, 5), st.integers(0, 3), st.integers(1, 4), st.integers(1, 3)
)


def rows_of(step) -> list[int]:
    return [row for ranks in step.micro_batches for rows in ranks for row in rows]


@settings(max_examples=200, deadline=None)
@given(plans)
def test_every_row_is_used_once_an_epoch_whatever_the_world_size(plan) -> None:
    lengths, seed, epoch, world, accumulation = plan
    steps = plan_epoch(lengths, seed, Position(epoch), 64, world, accumulation)
    assert sorted(row for step in steps for row in rows_of(step)) == list(range(len(lengths)))
    assert steps[-1].after == Position(epoch + 1, 0)


@settings(max_examples=200, deadline=None)
@given(plans, st.integers(10, 64))
def test_no_micro_batch_exceeds_the_budget_but_a_long_row_alone(plan, budget) -> None:
    lengths, seed, epoch, world, accumulation = plan
    for step in plan_epoch(lengths, seed, Position(epoch), budget, world, accumulation):
        assert len(step.micro_batches) <= accumulation
        for ranks in step.micro_batches:
            assert len(ranks) == world
            for rows in ranks:
                assert len(rows) <= 1 or sum(lengths[row] for row in rows) <= budget


@settings(max_examples=100, deadline=None)
@given(plans)
def test_more_processes_or_more_accumulation_take_the_same_rows_a_step(plan) -> None:
    lengths, seed, epoch, world, accumulation = plan
    wide = plan_epoch(lengths, seed, Position(epoch), 64, world * accumulation, 1)
    deep = plan_epoch(lengths, seed, Position(epoch), 64, 1, world * accumulation)
    assert [sorted(rows_of(step)) for step in wide] == [sorted(rows_of(step)) for step in deep]


@settings(max_examples=100, deadline=None)
@given(plans, st.integers(0, 5), st.integers(1, 4))
def test_resuming_with_any_number_of_processes_neither_loses_nor_repeats_a_row(plan, done, other_world) -> None:
    lengths, seed, epoch, world, accumulation = plan
    first = plan_epoch(lengths, seed, Position(epoch), 64, world, accumulation)[:done]
    at = first[-1].after if first else Position(epoch)
    rest = plan_epoch(lengths, seed, at, 64, other_world, accumulation) if at.epoch == epoch else []
    assert sorted(row for step in [*first, *rest] for row in rows_of(step)) == list(range(len(lengths)))


def test_a_resumed_plan_is_the_rest_of_the_plan() -> None:
    lengths = torch.randint(5, 60, (200,), generator=torch.Generator().manual_seed(1)).tolist()
    whole = plan_epoch(lengths, 3, Position(2), 256, 2, 2)
    assert plan_epoch(lengths, 3, whole[3].after, 256, 2, 2) == whole[4:]


def test_the_order_depends_on_seed_and_epoch_alone() -> None:
    assert epoch_order(50, 1, 0) == epoch_order(50, 1, 0)
    assert len({tuple(epoch_order(50, seed, epoch)) for seed in range(3) for epoch in range(3)}) == 9


def test_ranks_are_balanced_to_within_five_percent_and_budgets_filled_to_eighty() -> None:
    lengths = torch.randint(50, 500, (2000,), generator=torch.Generator().manual_seed(0)).tolist()
    steps = plan_epoch(lengths, 0, Position(), 4096, 4, 1)[:-1]
    loads = torch.tensor([[sum(lengths[row] for row in step.of_rank(rank)[0]) for rank in range(4)] for step in steps]).double()
    assert ((loads.amax(1) - loads.mean(1)) / loads.mean(1)).mean() < 0.05
    assert loads.mean() / 4096 > 0.8


def test_packing_keeps_rows_whole_and_counts_positions_from_zero() -> None:
    batch = pack([state_row(1, 3), state_row(2, 2)])
    assert batch.ids_N.tolist() == [1, 2, 3, 2, 3]
    assert batch.positions_N.tolist() == [0, 1, 2, 0, 1]
    assert batch.supervised_N.tolist() == [False, True, False, True, False]
    assert batch.aux_NA[:, 0].tolist() == [1, 1, 1, 2, 2]
    assert batch.final_NH[:, 0].tolist() == [-1, -1, -1, -2, -2]
    assert batch.starts_B1.tolist() == [0, 3, 5]
    assert batch.keys == ("row1", "row2")
    assert batch.tokens == 5
    assert isinstance(batch.to(torch.device("cpu")), Batch)


def test_log_probabilities_are_packed_moved_and_blank_where_a_store_holds_them() -> None:
    rows = [
        replace(state_row(number, tokens), final_TH=torch.empty(tokens, 0), top=top(number, tokens)) for number, tokens in ((1, 3), (2, 2))
    ]
    batch = pack(rows).to(torch.device("cpu"), torch.float64)
    assert batch.top is not None
    assert batch.top.index_NK[:, 0].tolist() == [1, 1, 1, 2, 2]
    assert batch.top.outside_N.tolist() == [1, 1, 1, 2, 2]
    assert (batch.aux_NA.dtype, batch.top.logprob_NK.dtype) == (torch.float64, torch.float16)
    empty = blank(replace(SPEC, top_logprobs=4, vocab_digest="d"))
    assert empty.top is not None
    assert (empty.top.index_NK.shape, empty.final_NH.shape) == ((1, 4), (1, 0))
    assert blank(SPEC).top is None


def top(number: int, tokens: int) -> TopLogProbs:
    index = torch.full((tokens, 4), number, dtype=torch.int32)
    return TopLogProbs(index, -index.half(), torch.full((tokens,), 0.5), torch.full((tokens,), float(number)))


@given(st.lists(st.integers(1, 90), max_size=40))
@settings(deadline=None)
def test_measuring_visits_every_row_once_within_the_budget(lengths) -> None:
    filled = fill(lengths, 64)
    assert sorted(row for rows in filled for row in rows) == list(range(len(lengths)))
    assert all(len(rows) == 1 or sum(lengths[row] for row in rows) <= 64 for rows in filled)


def test_prefetched_batches_come_in_order_and_nothing_for_a_rank_without_rows_is_a_blank() -> None:
    with Prefetch(Rows([4, 5, 6]), [(2, 0), (), (1,)]) as batches:
        found = list(batches)
    assert [batch.keys for batch in found] == [("row2", "row0"), ("",), ("row1",)]
    assert not found[1].supervised_N.any()
    assert found[1].aux_NA.shape == (1, 8)


def test_an_error_while_loading_is_raised_where_the_batch_was_due() -> None:
    with Prefetch(Rows([4, 4, 4], broken=1), [(0,), (1,), (2,)]) as batches:
        feed = iter(batches)
        assert next(feed).keys == ("row0",)
        with pytest.raises(EyasError, match="row 1 is broken"):
            next(feed)


def test_the_loader_runs_ahead_by_no_more_than_its_queue_and_ends_with_its_block() -> None:
    store = Rows([2] * 100)
    with Prefetch(store, [(i,) for i in range(100)], ahead=3) as batches:
        list(islice(batches, 2))
        time.sleep(0.3)
        assert 2 < store.reads <= 2 + 3 + 1
    assert "prefetch" not in {thread.name for thread in threading.enumerate()}
