"""Verify steps are taken from a stream only where it shows them; rendering is compared by what the server offers."""

from pathlib import Path

import pytest

from eval.clients import Client, Counts, Reply
from eval.measurement import BenchPrompt
from eval.served import Rendering, accepted_by_step, ask, aux_states, speculative_field
from eyas.errors import EyasError
from eyas.target import Target
from tests.eval.conftest import ToyServer
from tests.eval.tiny import tiny_target


def reply(pieces: tuple[int, ...], verify_ct: int | None, tokens: int | None = None) -> Reply:
    counts = None if verify_ct is None else Counts(verify_ct, 0, None, (), None)
    total = sum(pieces) if tokens is None else tokens
    return Reply(4, total, 0, tuple(range(total)), "", "length", 0.1, 1, 1.0, counts, pieces=pieces)


def test_each_piece_behind_the_first_is_a_step_and_the_cut_off_last_one_is_left_out() -> None:
    assert accepted_by_step(reply((1, 3, 1, 4, 2), 4)) == [2, 0, 3]


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (reply((1, 3, 5, 2), 4), "the stream has 4 pieces for 1 \\+ 4 steps"),
        (reply((4, 3, 1), 2), "single steps cannot be told"),
        (reply((1, 3, 1), 2, tokens=7), "single steps cannot be told"),
        (reply((), 3, tokens=9), "single steps cannot be told"),
        (reply((1, 1, 1), None), "it does not speculate"),
    ],
)
def test_a_stream_that_gathers_steps_or_shows_none_is_refused(answer: Reply, told: str) -> None:
    with pytest.raises(EyasError, match=told):
        accepted_by_step(answer)


def test_served_steps_come_from_the_stream_of_each_prompt(toy_server: ToyServer) -> None:
    prompts = [BenchPrompt(str(number), "chat", [], [number, 5]) for number in (3, 4)]
    with Client(toy_server.url) as client:
        requests = ask(client, prompts, 12, "result")
    assert (requests.unknown, [one.prompt_ids for one in requests.served]) == (0, [[3, 5], [4, 5]])
    assert [one.accepted for one in requests.served] == [[2, 1, 3], [2, 1, 3]]


def test_the_embedded_server_is_asked_for_a_drafter_by_name_and_others_are_not() -> None:
    assert speculative_field({"eyas": {"drafters": ["starter", "result"], "default": "starter"}}, "result") == "result"
    assert speculative_field({"eyas": {"drafters": ["starter"], "default": "starter"}}, "result") == "starter"
    assert speculative_field({"version": "0.5.23"}, "result") is None


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return tiny_target(Path(tmp_path_factory.mktemp("target")))


def test_a_server_without_tokenize_is_compared_by_number_of_tokens(toy_server: ToyServer, target: Target) -> None:
    prompts = [BenchPrompt("a", "chat", [{"role": "user", "content": "hello"}], list(range(5)))]
    with Client(toy_server.url) as client:
        rendering = Rendering(toy_server.url, client, target.tokenizer())
        assert [check.verdict for check in rendering.checks(prompts)] == ["not checked", "ok"]
        toy_server.extra_template_tokens = 2
        _, template = rendering.checks(prompts)
        rendering.close()
    assert template.verdict == "fault"
    assert template.told == "a chat has 7 tokens on the server and 5 here: another template"


def test_a_server_that_returns_no_states_has_none(toy_server: ToyServer) -> None:
    toy_server.break_after = 0
    assert aux_states(toy_server.url, [1, 2, 3]) is None
