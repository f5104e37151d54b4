"""What tests in real engines share: prompts, what transformers answers to them greedily in float32, and SGLang as it is served on a CPU."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from data_prep.prompts import load_source
from data_prep.template import prompt_ids
from eyas.config import SourceConfig, TargetConfig
from eyas.target import Target, open_target
from tests.engines.kimi_run import Run
from tests.engines.kimi_run import kimi_run as make_kimi_run
from tests.engines.served import SGLANG, STAND_IN, Text
from tests.fitted import Fitted

PROMPTS = 12
TOKENS = 48


@pytest.fixture(scope="session")
def target() -> Target:
    return open_target(TargetConfig(model="package:smollm2"))


@pytest.fixture(scope="session")
def chats() -> list[list[dict[str, str]]]:
    """A dozen real prompts of two families that the starter drafter was not trained on."""
    prompts = load_source(SourceConfig(source="package:evals", families=["group:contracts", "group:radio"], limit=80), seed=3)
    random.Random(0).shuffle(prompts)
    return [prompt.messages for prompt in prompts[:PROMPTS]]


@pytest.fixture(scope="session")
def texts(target: Target, chats: list[list[dict[str, str]]]) -> list[Text]:
    """What transformers answers, at most 48 tokens each."""
    model, tokenizer = target.load_model(torch.float32, "cpu"), target.tokenizer()
    found = []
    for messages in chats:
        ids = prompt_ids(tokenizer, messages)
        with torch.inference_mode():
            whole_1T = model.generate(torch.tensor([ids]), max_new_tokens=TOKENS, do_sample=False)
        found.append((ids, whole_1T[0, len(ids) :].tolist()))
    return found


@pytest.fixture(scope="session")
def known(fitted: Fitted) -> list[Text]:
    """The texts that the fitted drafter knows."""
    return [(text.prompt_ids, text.reply_ids) for text in fitted.texts]


@pytest.fixture(scope="session")
def kimi_run(kimi: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run that trained and exported a drafter for a tiny random Kimi-K2.5."""
    return make_kimi_run(kimi, tmp_path_factory.mktemp("kimi_run"))


@pytest.fixture(scope="session")
def sglang(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The engine section of a config: SGLang on a CPU that others use too, with the stand-in for its compiled operators."""
    environment = {
        "PYTHONPATH": str(STAND_IN),
        "SGLANG_USE_CPU_ENGINE": "1",
        "OMP_NUM_THREADS": "1",
        # SGLang compiles the choice of a tree's drafts while the first request waits; uncompiled it is quick enough.
        "TORCHDYNAMO_DISABLE": "1",
        "HF_HUB_OFFLINE": "1",
    }
    profile = tmp_path_factory.mktemp("profile") / "sglang-cpu.yaml"
    profile.write_text(yaml.safe_dump(environment))
    flags = {
        "device": "cpu",
        # each by its own flag: SGLang overrides the one for both where it finds no AMX
        "prefill-attention-backend": "intel_amx",
        "decode-attention-backend": "intel_amx",
        "max-total-tokens": 8192,
        "max-running-requests": 4,
        "sleep-on-idle": True,
    }
    return {"kind": "sglang", "python": str(SGLANG), "environment": str(profile), "flags": flags}
