"""vLLM itself serves what we export: the same text as without speculation, and acceptance as the offline walk foretells it.

One server after the other: the baseline, the starter drafter, the fitted one. In float32, greedily, where nothing may differ.
"""

import pytest
import torch

from eyas.target import Target
from tests.engines.served import STARTER, STEPS, VLLM, VLLM_ENGINE, Served, Text, accepted_shares, need, require_walked, serve
from tests.fitted import Fitted
from tests.offline_walk import walk_offline

BLOCK = 128
"""Tokens of a block of vLLM's prefix cache on CPU: shorter beginnings are not kept."""
Chats = list[list[dict[str, str]]]

pytestmark = need(VLLM)


@pytest.fixture(scope="module")
def baseline(tmp_path_factory: pytest.TempPathFactory, texts: list[Text], chats: Chats) -> Served:
    return serve(VLLM_ENGINE, tmp_path_factory.mktemp("baseline"), None, texts, chats[0], at_once=4)


@pytest.fixture(scope="module")
def starter(tmp_path_factory: pytest.TempPathFactory, texts: list[Text], chats: Chats) -> Served:
    return serve(VLLM_ENGINE, tmp_path_factory.mktemp("starter"), STARTER, texts, chats[0])


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory, fitted: Fitted, known: list[Text], chats: Chats) -> Served:
    """The fitted drafter, on a server that does not report acceptance per request, as all did before 0.32: its counters tell."""
    flags = VLLM_ENGINE["flags"] | {"per-request-spec-decode-metrics": False}
    return serve(VLLM_ENGINE | {"flags": flags}, tmp_path_factory.mktemp("counted"), fitted.folder, known, chats[0])


def test_without_speculation_vllm_says_what_transformers_says(baseline: Served, texts: list[Text]) -> None:
    assert baseline.ids == [reply for _, reply in texts]
    assert [reply.counts for reply in baseline.replies] == [None] * len(texts)
    assert baseline.info["version"] == "vllm 0.32.0"
    assert baseline.info["speculative_algorithm"] is None


def test_with_the_starter_drafter_the_text_is_the_baselines(starter: Served, baseline: Served) -> None:
    assert starter.ids == baseline.ids
    asked = {"algorithm": "EAGLE3", "draft_model_path": str(STARTER), "num_steps": STEPS, "eagle_topk": 1, "num_draft_tokens": STEPS + 1}
    assert {key: starter.info[f"speculative_{key}"] for key in asked} == asked
    assert starter.info["max_running_requests"] == baseline.info["max_running_requests"]


def test_every_request_is_accepted_as_the_offline_walk_foretells(starter: Served, target: Target, texts: list[Text]) -> None:
    walks = list(walk_offline(target, STARTER, texts, torch.float32, STEPS))
    require_walked(starter, walks)
    # the promise would be empty if drafts never, or always, stood
    assert sum(map(len, walks)) > 200
    assert 1.3 < starter.length < 3


def test_of_the_fitted_drafter_the_first_draft_always_stands_and_later_ones_hardly_ever(
    counted: Served, fitted: Fitted, known: list[Text], target: Target
) -> None:
    assert counted.ids == [reply for _, reply in known]
    require_walked(counted, list(walk_offline(target, fitted.folder, known, torch.float32, STEPS)))
    first, second, third = accepted_shares(counted)
    assert first > 0.95
    assert second < 0.15
    assert third < 0.1


def test_vllms_own_acceptance_length_is_one_and_its_accepted_drafts_a_step(starter: Served, counted: Served) -> None:
    for counts in [*starter.counts, *counted.counts]:
        assert counts.engine_length == pytest.approx(1 + counts.correct / counts.verify_ct)


def test_a_chat_is_rendered_as_our_template_renders_it(starter: Served, baseline: Served, target: Target, texts: list[Text]) -> None:
    prompt, reply = texts[0]
    said = target.tokenizer().decode(reply, skip_special_tokens=True)
    assert (starter.chat.prompt_tokens, starter.chat.text) == (len(prompt), said)
    assert (baseline.chat.prompt_tokens, baseline.chat.text) == (len(prompt), said)
    assert baseline.chat.counts is None
    assert starter.chat.counts == starter.replies[0].counts


def test_no_prompt_of_a_request_alone_is_found_computed(starter: Served, baseline: Served) -> None:
    """The prefix cache is on, as a user has it, and finds what prompts share when nobody empties it."""
    assert max(reply.cached_tokens for reply in baseline.replies) >= BLOCK
    assert {reply.cached_tokens for reply in starter.replies} == {0}
