"""SGLang's own classes for Kimi-K2.5, its latent attention and a drafter beside it, on a tiny random one: the text is what transformers
says, with and without speculation, and an export is accepted as the offline walk foretells it.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from eval.loader_check import check_loader
from eval.served_states import FromTarget, recognised
from eyas.folder import read_drafter
from tests.engines.kimi_run import CHAT, Kimi, Run, serve
from tests.engines.served import SGLANG, STEPS, need, require_walked
from tests.offline_walk import walk_offline

pytestmark = need(SGLANG)


@pytest.fixture(scope="module")
def engine(sglang: dict[str, Any]) -> dict[str, Any]:
    """SGLang's first request on its own account has an image in it, which the stand-in for the processor does not know."""
    return sglang | {"flags": sglang["flags"] | {"skip-server-warmup": True}, "draft_flags": {"enable-return-hidden-states": True}}


@pytest.fixture(scope="module")
def baseline(kimi_run: Run, engine: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Kimi:
    return serve(kimi_run, engine, tmp_path_factory.mktemp("baseline"), None)


@pytest.fixture(scope="module")
def drafted(kimi_run: Run, engine: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Kimi:
    return serve(kimi_run, engine, tmp_path_factory.mktemp("drafted"), kimi_run.export)


def test_without_speculation_it_says_what_transformers_says(baseline: Kimi, kimi_run: Run) -> None:
    assert baseline.ids == [reply for _, reply in kimi_run.texts]


def test_with_the_export_it_says_the_same(drafted: Kimi, kimi_run: Run) -> None:
    assert drafted.ids == [reply for _, reply in kimi_run.texts]
    assert drafted.info["speculative_algorithm"] == "EAGLE3"


def test_behind_cached_tokens_attention_is_absorbed_and_the_text_the_same(baseline: Kimi, drafted: Kimi, kimi_run: Run) -> None:
    for served in (baseline, drafted):
        assert all(reply.cached_tokens > len(prompt) // 2 for reply, (prompt, _) in zip(served.again, kimi_run.texts, strict=True))
        assert [list(reply.output_ids) for reply in served.again] == served.ids


def test_every_request_is_accepted_as_the_offline_walk_foretells(drafted: Kimi, kimi_run: Run) -> None:
    walks = list(walk_offline(kimi_run.target, kimi_run.export, kimi_run.texts, torch.float32, STEPS))
    require_walked(drafted, walks)
    # the promise would be empty if drafts never, or always, stood
    accepted = [cycle.accepted for cycles in walks for cycle in cycles]
    assert 0.25 < sum(count > 0 for count in accepted) / len(accepted) < 0.75


def test_the_drafter_is_fed_the_layers_it_was_trained_on(drafted: Kimi, kimi_run: Run) -> None:
    assert drafted.states_TA is not None
    own = FromTarget(kimi_run.target, torch.float32, torch.device("cpu")).along(kimi_run.texts[0][0])
    layers, error = recognised(drafted.states_TA, own)
    assert layers == read_drafter(kimi_run.export).layers
    assert error < 1e-4


def test_a_chat_is_rendered_as_our_template_renders_it(baseline: Kimi, drafted: Kimi, kimi_run: Run) -> None:
    assert baseline.chat.prompt_tokens == drafted.chat.prompt_tokens == kimi_run.prompt_tokens(CHAT)


def test_its_loader_takes_the_export_whole(kimi_run: Run, engine: dict[str, Any], tmp_path: Path) -> None:
    written = read_drafter(kimi_run.export)
    checks = check_loader(kimi_run.on(engine, tmp_path), kimi_run.export, "sglang", written.drafter, written.layers)
    assert {check.name: check.verdict for check in checks} == {check.name: "ok" for check in checks}
