"""SGLang itself serves what we export, chains and trees: the same text as without speculation, acceptance as the offline walk foretells it.

SGLang is unchanged; its compiled CPU operators alone have a stand-in (sglang_cpu, tested in test_sglang_operators.py). One server after the
other, in float32, greedily, where nothing may differ.
"""

from typing import Any

import pytest
import torch

from eyas.target import Target
from tests.engines.served import SGLANG, STARTER, STEPS, Served, Text, accepted_shares, need, require_walked, serve
from tests.fitted import Fitted
from tests.offline_walk import walk_offline

TREE = {"topk": 2, "draft_tokens": 6}
Chats = list[list[dict[str, str]]]

pytestmark = need(SGLANG)


@pytest.fixture(scope="module")
def baseline(sglang: dict[str, Any], tmp_path_factory: pytest.TempPathFactory, texts: list[Text], chats: Chats) -> Served:
    return serve(sglang, tmp_path_factory.mktemp("baseline"), None, texts, chats[0], at_once=4)


@pytest.fixture(scope="module")
def chain(sglang: dict[str, Any], tmp_path_factory: pytest.TempPathFactory, texts: list[Text], chats: Chats) -> Served:
    return serve(sglang, tmp_path_factory.mktemp("chain"), STARTER, texts, chats[0])


@pytest.fixture(scope="module")
def tree(sglang: dict[str, Any], tmp_path_factory: pytest.TempPathFactory, texts: list[Text], chats: Chats) -> Served:
    return serve(sglang | TREE, tmp_path_factory.mktemp("tree"), STARTER, texts, chats[0], at_once=4)


@pytest.fixture(scope="module")
def fitted_chain(
    sglang: dict[str, Any], tmp_path_factory: pytest.TempPathFactory, fitted: Fitted, known: list[Text], chats: Chats
) -> Served:
    return serve(sglang, tmp_path_factory.mktemp("fitted_chain"), fitted.folder, known, chats[0])


@pytest.fixture(scope="module")
def fitted_tree(
    sglang: dict[str, Any], tmp_path_factory: pytest.TempPathFactory, fitted: Fitted, known: list[Text], chats: Chats
) -> Served:
    return serve(sglang | TREE, tmp_path_factory.mktemp("fitted_tree"), fitted.folder, known, chats[0], at_once=4)


def test_without_speculation_sglang_says_what_transformers_says(baseline: Served, texts: list[Text]) -> None:
    assert baseline.ids == [reply for _, reply in texts]
    assert [reply.counts for reply in baseline.replies] == [None] * len(texts)
    assert baseline.info["version"] == "0.5.23"
    assert baseline.info["speculative_algorithm"] is None


def test_a_chain_gives_the_baselines_text(chain: Served, baseline: Served) -> None:
    assert chain.ids == baseline.ids
    asked = {"algorithm": "EAGLE3", "draft_model_path": str(STARTER), "num_steps": STEPS, "eagle_topk": 1, "num_draft_tokens": STEPS + 1}
    assert {key: chain.info[f"speculative_{key}"] for key in asked} == asked


def test_every_request_is_accepted_as_the_offline_walk_foretells(chain: Served, target: Target, texts: list[Text]) -> None:
    walks = list(walk_offline(target, STARTER, texts, torch.float32, STEPS))
    require_walked(chain, walks)
    # the promise would be empty if drafts never, or always, stood
    assert sum(map(len, walks)) > 200
    assert 1.3 < chain.length < 3


def test_a_tree_gives_the_baselines_text_in_no_more_verify_steps_than_a_chain(tree: Served, chain: Served, baseline: Served) -> None:
    assert tree.ids == baseline.ids
    assert (tree.info["speculative_eagle_topk"], tree.info["speculative_num_draft_tokens"]) == (TREE["topk"], TREE["draft_tokens"])
    assert tree.length >= chain.length
    for counts, reply in zip(tree.counts, tree.replies, strict=True):
        assert sum(counts.histogram) == counts.verify_ct
        assert counts.correct == sum(accepted * times for accepted, times in enumerate(counts.histogram))
        # all that was emitted, less what the last verify step emitted behind the end
        assert 0 <= counts.correct + counts.verify_ct - (reply.completion_tokens - 1) <= STEPS


def test_of_the_fitted_drafters_chain_the_first_draft_always_stands_and_later_ones_hardly_ever(
    fitted_chain: Served, fitted: Fitted, known: list[Text], target: Target
) -> None:
    assert fitted_chain.ids == [reply for _, reply in known]
    require_walked(fitted_chain, list(walk_offline(target, fitted.folder, known, torch.float32, STEPS)))
    first, second, third = accepted_shares(fitted_chain)
    assert first > 0.95
    assert second < 0.15
    assert third < 0.1


def test_of_the_fitted_drafters_tree_the_first_draft_always_stands(fitted_tree: Served, fitted_chain: Served, known: list[Text]) -> None:
    assert fitted_tree.ids == [reply for _, reply in known]
    assert accepted_shares(fitted_tree)[0] > 0.95
    assert fitted_tree.length >= fitted_chain.length


def test_a_chat_is_rendered_as_our_template_renders_it(chain: Served, baseline: Served, target: Target, texts: list[Text]) -> None:
    prompt, reply = texts[0]
    said = target.tokenizer().decode(reply, skip_special_tokens=True)
    assert (chain.chat.prompt_tokens, chain.chat.text) == (len(prompt), said)
    assert (baseline.chat.prompt_tokens, baseline.chat.text) == (len(prompt), said)
    assert baseline.chat.counts is None
    assert chain.chat.counts == chain.replies[0].counts


def test_no_prompt_of_a_request_alone_is_found_computed(chain: Served, fitted_chain: Served) -> None:
    """The prefix cache is on, as a user has it, so it was emptied in time; the chat finds the system prompt of the request before it."""
    assert {reply.cached_tokens for reply in [*chain.replies, *fitted_chain.replies]} == {0}
    assert chain.chat.cached_tokens > 0
