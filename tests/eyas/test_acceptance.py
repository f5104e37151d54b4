"""The walk equals a server, literally simulated, and its sums add up."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eyas.acceptance import Acceptance, Cycle, context_bucket, walk
from eyas.errors import EyasError


def serve(prompt: list[int], reply: list[int], drafts: list[list[int]], steps: int) -> list[dict[str, int]]:
    """A greedy server whose target says ``reply``: draft, verify, emit, until the reply is out. drafts[i] is drafted with r_i in hand."""
    text = [*prompt, reply[0]]
    log = []
    while len(text) < len(prompt) + len(reply):
        in_hand = len(text) - len(prompt) - 1
        draft = drafts[in_hand][:steps]
        rest = reply[in_hand + 1 :]
        accepted = 0
        while accepted < len(draft) and accepted < len(rest) and draft[accepted] == rest[accepted]:
            accepted += 1
        before = len(text)
        text += draft[:accepted]
        text += rest[accepted : accepted + 1]
        log.append({"context": before, "accepted": accepted, "emitted": len(text) - before, "judged": min(steps, len(rest))})
    assert text == prompt + reply
    return log


@st.composite
def served_replies(draw: st.DrawFn) -> tuple[list[int], list[int], list[list[int]], int]:
    steps = draw(st.integers(1, 5))
    token = st.integers(0, 1)
    prompt = draw(st.lists(token, min_size=1, max_size=6))
    reply = draw(st.lists(token, min_size=1, max_size=30))
    drafts = [draw(st.lists(token, min_size=steps, max_size=steps)) for _ in reply]
    return prompt, reply, drafts, steps


def hits_of(prompt: list[int], reply: list[int], drafts: list[list[int]], steps: int, outside: bool) -> tuple[torch.Tensor, torch.Tensor]:
    rows = [[drafts[i][j] == reply[i + 1 + j] if i + 1 + j < len(reply) else outside for j in range(steps)] for i in range(len(reply) - 1)]
    return torch.tensor(rows, dtype=torch.bool).reshape(-1, steps), torch.arange(len(prompt) - 1, len(prompt) + len(reply) - 2)


@settings(max_examples=300, deadline=None)
@given(served_replies(), st.booleans())
def test_the_walk_equals_a_simulated_server_cycle_by_cycle(case, outside) -> None:
    prompt, reply, drafts, steps = case
    cycles = walk(*hits_of(prompt, reply, drafts, steps, outside))
    served = serve(prompt, reply, drafts, steps)
    found = [{"context": c.context, "accepted": c.accepted, "emitted": c.emitted, "judged": c.judged} for c in cycles]
    assert found == served


@settings(max_examples=200, deadline=None)
@given(served_replies())
def test_the_length_is_completion_tokens_less_one_per_verify_step(case) -> None:
    prompt, reply, drafts, steps = case
    acceptance = Acceptance.of(walk(*hits_of(prompt, reply, drafts, steps, False)), steps)
    assert acceptance.tokens == len(reply) - 1
    assert acceptance.cycles == len(serve(prompt, reply, drafts, steps))


@settings(max_examples=200, deadline=None)
@given(served_replies())
def test_fewer_draft_steps_walk_as_if_drafted_so(case) -> None:
    prompt, reply, drafts, steps = case
    hits, t = hits_of(prompt, reply, drafts, steps, False)
    assert walk(hits, t, steps=1) == walk(hits[:, :1], t)


@settings(max_examples=200, deadline=None)
@given(served_replies())
def test_rates_count_the_verify_steps_that_the_text_can_judge(case) -> None:
    prompt, reply, drafts, steps = case
    acceptance = Acceptance.of(walk(*hits_of(prompt, reply, drafts, steps, False)), steps)
    served = serve(prompt, reply, drafts, steps)
    for j in range(steps):
        judged = [cycle for cycle in served if cycle["judged"] > j]
        reached = [cycle for cycle in judged if cycle["accepted"] >= j]
        won = [cycle for cycle in judged if cycle["accepted"] > j]
        assert acceptance.unconditional_J[j] == (len(won) / len(judged) if judged else None)
        assert acceptance.conditional_J[j] == (len(won) / len(reached) if reached else None)


@settings(max_examples=100, deadline=None)
@given(served_replies(), st.integers(0, 30))
def test_merging_any_split_gives_the_whole(case, cut) -> None:
    prompt, reply, drafts, steps = case
    cycles = walk(*hits_of(prompt, reply, drafts, steps, False))
    whole = Acceptance.of(cycles, steps)
    assert Acceptance.of(cycles[:cut], steps) + Acceptance.of(cycles[cut:], steps) == whole
    assert whole + Acceptance.none(steps) == whole
    assert Acceptance.from_numbers(whole.numbers()) == whole


def test_only_the_last_verify_step_can_be_cut_off_and_has_no_bonus_token() -> None:
    hits = torch.ones(5, 3, dtype=torch.bool)
    assert walk(hits, torch.arange(7, 12)) == [
        Cycle(t=7, accepted=3, judged=3, cut_off=False),
        Cycle(t=11, accepted=1, judged=1, cut_off=True),
    ]


def test_a_reply_that_ends_on_a_bonus_token_is_not_cut_off() -> None:
    hits = torch.tensor([[True], [False]])
    assert [cycle.cut_off for cycle in walk(hits, torch.tensor([3, 4]))] == [False]
    assert [cycle.cut_off for cycle in walk(torch.tensor([[False], [True]]), torch.tensor([3, 4]))] == [False, True]


def test_chains_with_a_gap_are_refused() -> None:
    with pytest.raises(EyasError, match="consecutive"):
        walk(torch.ones(2, 2, dtype=torch.bool), torch.tensor([3, 5]))


def test_more_draft_steps_than_hits_are_refused() -> None:
    with pytest.raises(EyasError, match="4 draft steps asked for, but hits are known for 2"):
        walk(torch.ones(2, 2, dtype=torch.bool), torch.tensor([3, 4]), steps=4)


def test_other_numbers_of_draft_steps_do_not_merge() -> None:
    with pytest.raises(EyasError, match="cannot merge 2 draft steps with 3"):
        Acceptance.none(2) + Acceptance.none(3)


@pytest.mark.parametrize(
    ("context", "bucket"), [(2, "<256"), (255, "<256"), (256, "256-511"), (511, "256-511"), (512, "512-1023"), (70000, "65536-131071")]
)
def test_context_buckets_are_powers_of_two(context, bucket) -> None:
    assert context_bucket(context) == bucket
