"""The drafter's own walk gives what training's packed and fused way gives, row by row."""

import pytest
import torch

from eyas import offline, vocab
from eyas.acceptance import Acceptance, walk
from eyas.drafter import Drafter
from eyas.offline import reply_chains, walk_row
from eyas.states import StateRow
from eyas.target import Target
from tests.eval.tiny import tiny_drafter, tiny_target
from train.batches import pack
from train.ttt import TrainingTimeTest, evaluate_hits

STEPS = 4


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return tiny_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def drafter(target: Target) -> Drafter:
    """Of two thirds of the vocabulary, and right now and then on the rows below."""
    return tiny_drafter(target, 200)


@pytest.fixture(scope="module")
def rows(target: Target, drafter: Drafter) -> list[StateRow]:
    """Random states and tokens, except that the drafter is right as often as not, several drafts in a row."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for length, replies in ((40, [(5, 38)]), (60, [(3, 20), (30, 60)]), (9, [(2, 3), (5, 7)]), (12, [(0, 12)]), (30, [(28, 30)])):
        ids_T = drafter.draft_ids_D[torch.randint(200, (length,), generator=generator)]
        supervised_T = torch.zeros(length, dtype=torch.bool)
        for start, end in replies:
            supervised_T[start:end] = True
        states_TA = torch.randn(length, 3 * 32, generator=generator)
        row = StateRow("", "", ids_T, supervised_T, states_TA, torch.zeros(length, 32))
        for start, end in replies:
            _agree(target, drafter, row, max(start - 1, 0), end, generator)
        found.append(row)
    return found


def _agree(target: Target, drafter: Drafter, row: StateRow, first: int, end: int, generator: torch.Generator) -> None:
    """Take the drafter's word for 0 to STEPS tokens, skip one, and so on from the chain at ``first`` to the reply's end."""
    test = TrainingTimeTest(drafter, target.lm_head(torch.float32)[drafter.draft_ids_D], STEPS, 1.0)
    t = first
    while t < end - 2:
        accepted = int(torch.randint(STEPS + 1, (), generator=generator))
        for j in range(min(accepted, end - 2 - t)):
            batch = pack([row])
            chains = test.chains(batch)
            guess_P = test.pair_losses(batch, chains, with_guess=True).guess_P
            assert guess_P is not None
            place = int((chains.t_by_step[j] == t).nonzero()[0, 0])
            row.ids_T[t + 2 + j] = drafter.draft_ids_D[guess_P.split(chains.counted_J.tolist())[j][place]]
        t += accepted + 1


@pytest.mark.parametrize("scores_at_a_time", [offline.SCORES_AT_A_TIME, 300])
def test_it_walks_as_trainings_hits_do(
    target: Target, drafter: Drafter, rows: list[StateRow], monkeypatch: pytest.MonkeyPatch, scores_at_a_time: int
) -> None:
    monkeypatch.setattr(offline, "SCORES_AT_A_TIME", scores_at_a_time)
    test = TrainingTimeTest(drafter, target.lm_head(torch.float32)[drafter.draft_ids_D], STEPS, 1.0)
    total = Acceptance.none(STEPS)
    for row in rows:
        expected = [cycle for reply in evaluate_hits(test, pack([row])).replies for cycle in walk(reply.hits_MJ, reply.chain_t_M)]
        found = walk_row(drafter, row.ids_T, row.supervised_T, row.aux_TA, STEPS)
        assert found == expected
        total += Acceptance.of(found, STEPS)
    assert all(count > 4 for count in total.accepted_J)


def test_chains_run_from_the_last_prompt_token_to_the_last_token_but_two_of_each_reply(rows: list[StateRow]) -> None:
    chains = [[part.tolist() for part in reply_chains(row.supervised_T)] for row in rows]
    assert chains[0] == [list(range(4, 36))]
    assert chains[1] == [list(range(2, 18)), list(range(29, 58))]
    assert chains[2] == [[4]]
    assert chains[3] == [list(range(10))]
    assert chains[4] == [[27]]


def test_a_row_without_a_reply_of_two_tokens_has_no_verify_step(drafter: Drafter, rows: list[StateRow]) -> None:
    row = rows[0]
    for start, end in ((39, 40), (40, 40)):
        supervised_T = (torch.arange(40) >= start) & (torch.arange(40) < end)
        assert walk_row(drafter, row.ids_T, supervised_T, row.aux_TA, STEPS) == []


def test_tokens_outside_the_draft_vocabulary_are_never_hit(drafter: Drafter, rows: list[StateRow]) -> None:
    outside = (~vocab.membership(drafter.draft_ids_D, 300)).nonzero()[0, 0]
    row = rows[0]
    cycles = walk_row(drafter, torch.full_like(row.ids_T, int(outside)), row.supervised_T, row.aux_TA, STEPS)
    assert {cycle.accepted for cycle in cycles} == {0}
