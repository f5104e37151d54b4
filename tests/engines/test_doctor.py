"""eyas doctor on SGLang and vLLM: a healthy export has no fault, and what is wrong with a folder is what the engine is then seen to do."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from eval.checks import Check
from eval.doctor import examine
from eyas.config import Config
from eyas.files import read_object, write_json
from eyas.manifest import begin, finish
from eyas.target import Target
from tests.engines.served import SGLANG, STARTER, VLLM, VLLM_ENGINE, Text, need

LAYERS = [2, 15, 27]
Chats = list[list[dict[str, str]]]


@pytest.fixture
def config(
    request: pytest.FixtureRequest, tmp_path: Path, sglang: dict[str, Any], target: Target, texts: list[Text], chats: Chats
) -> Config:
    """A run that trained the starter, with held-out prompts, to be served by one of the engines."""
    config = Config.model_validate(
        {
            "output": tmp_path / "run",
            "target": {"model": "package:smollm2", "device": "cpu"},
            "prep": {"sources": [{"source": "none.jsonl"}]},
            "drafter": {"init": "scratch"},
            "engine": {"dtype": "float32", "context": 1024} | {"sglang": sglang, "vllm": VLLM_ENGINE}[request.param],
        }
    )
    rows = [
        {"key": f"{number:064d}", "category": "chat", "messages": chats[number], "prompt_ids": prompt, "reply_ids": reply}
        for number, (prompt, reply) in enumerate(texts)
    ]
    config.folder("replies").mkdir(parents=True)
    (config.folder("replies") / "greedy.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    shutil.copytree(STARTER, config.folder("train") / "best")
    begin(config.folder("train"), "checkpoint", {}, {"target": target.digest})
    finish(config.folder("train"), {"layers": LAYERS})
    return config


ENGINES = pytest.mark.parametrize(
    "config", [pytest.param("sglang", marks=need(SGLANG)), pytest.param("vllm", marks=need(VLLM))], indirect=True
)


def examined(config: Config, export: Path) -> dict[str, Check]:
    return {check.name: check for check in examine(config, export, prompts=6, new_tokens=40).checks}


def faulty(checks: dict[str, Check]) -> set[str]:
    return {name for name, check in checks.items() if check.verdict == "fault"}


@ENGINES
def test_a_healthy_export_is_healthy_in_every_respect(config: Config) -> None:
    checks = examined(config, Path(shutil.copytree(STARTER, config.folder("export"))))
    assert faulty(checks) == set(), checks
    silent = {"served: states"} if config.engine.kind == "vllm" else set()
    assert {name for name, check in checks.items() if check.verdict == "not checked"} == silent
    told = checks["served: steps"].told
    count = int(told.split()[0])
    assert told.startswith(f"{count} of {count} verify steps as the trained drafter does offline")
    assert count > 100


@ENGINES
def test_faults_of_a_folder_are_named_and_the_engine_drafts_as_a_drafter_with_them(config: Config) -> None:
    """Layer ids that mean the next layers, and a lost rotary base."""
    export = Path(shutil.copytree(STARTER, config.folder("export")))
    values = read_object(export / "config.json")
    for lost in ("rope_theta", "rope_parameters"):
        values.pop(lost)
    nested, top = [2, 15, 27], [3, 16, 28]
    name = "eagle_aux_hidden_state_layer_ids"
    write_json(export / "config.json", values | {name: top, "eagle_config": {"use_aux_hidden_state": True, name: nested}})
    checks = examined(config, export)
    seen = {"served: states"} if config.engine.kind == "sglang" else set()
    assert faulty(checks) == {"export: layers", "export: rope", "loader: layers", "loader: rope", *seen}
    if seen:
        assert "hands over hidden_states[3, 16, 28]" in checks["served: states"].told
    told = checks["served: steps"].told
    count = int(told.split()[0])
    assert told.startswith(f"{count} of {count} verify steps as a drafter with the faults above does")
