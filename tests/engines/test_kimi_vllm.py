"""vLLM's own classes for Kimi-K2.5 and its latent attention, on a tiny random one: the text is what transformers says.

There is no drafter beside it: on a CPU vLLM 0.32 wants cache blocks of 16 tokens for latent attention and of 32 for the drafter's.
"""

from pathlib import Path

import pytest

from eval.loader_check import check_loader
from eyas.folder import read_drafter
from tests.engines.kimi_run import CHAT, Kimi, Run, serve
from tests.engines.served import VLLM, VLLM_ENGINE, need

pytestmark = need(VLLM)


@pytest.fixture(scope="module")
def baseline(kimi_run: Run, tmp_path_factory: pytest.TempPathFactory) -> Kimi:
    return serve(kimi_run, VLLM_ENGINE, tmp_path_factory.mktemp("baseline"), None)


def test_it_says_what_transformers_says(baseline: Kimi, kimi_run: Run) -> None:
    assert baseline.ids == [reply for _, reply in kimi_run.texts]
    assert [list(reply.output_ids) for reply in baseline.again] == baseline.ids


def test_a_chat_is_rendered_as_our_template_renders_it(baseline: Kimi, kimi_run: Run) -> None:
    assert baseline.chat.prompt_tokens == kimi_run.prompt_tokens(CHAT)


def test_its_loader_takes_the_export_whole(kimi_run: Run, tmp_path: Path) -> None:
    written = read_drafter(kimi_run.export)
    checks = check_loader(kimi_run.on(VLLM_ENGINE, tmp_path), kimi_run.export, "vllm", written.drafter, written.layers)
    assert {check.name: check.verdict for check in checks} == {check.name: "ok" for check in checks}
