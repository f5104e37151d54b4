"""eyas export --check: the engines' own loaders take our folder whole, and what is wrong with a folder shows in them."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from eval.checks import Check
from eval.loader_check import EngineName, check_loader
from eyas.config import Config
from eyas.files import read_object, write_json
from eyas.folder import read_drafter
from tests.engines.served import SGLANG, STARTER, VLLM, VLLM_ENGINE, need


@pytest.fixture
def config(request: pytest.FixtureRequest, tmp_path: Path, sglang: dict[str, Any]) -> Config:
    return Config.model_validate(
        {
            "output": tmp_path,
            "target": {"model": "package:smollm2", "device": "cpu"},
            "prep": {"sources": [{"source": "none.jsonl"}]},
            "drafter": {"init": "scratch"},
            "engine": {"dtype": "float32", "context": 1024} | {"sglang": sglang, "vllm": VLLM_ENGINE}[request.param],
        }
    )


ENGINES = pytest.mark.parametrize(
    ("config", "engine"),
    [pytest.param("sglang", "sglang", marks=need(SGLANG)), pytest.param("vllm", "vllm", marks=need(VLLM))],
    indirect=["config"],
)


def checked(config: Config, folder: Path, engine: EngineName) -> dict[str, Check]:
    starter = read_drafter(STARTER)
    return {check.name.removeprefix("loader: "): check for check in check_loader(config, folder, engine, starter.drafter, starter.layers)}


@ENGINES
def test_the_starter_is_loaded_whole(config: Config, engine: EngineName) -> None:
    checks = checked(config, STARTER, engine)
    assert {name: check.verdict for name, check in checks.items()} == dict.fromkeys(checks, "ok")
    assert set(checks) == {"tensors", "d2t", "layers", "rope", "positions", "config"}
    assert "hidden_states[2, 15, 27]" in checks["layers"].told


@ENGINES
def test_what_is_wrong_with_a_folder_shows_in_the_engine(config: Config, engine: EngineName, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(STARTER, tmp_path / "broken"))
    tensors = load_file(folder / "model.safetensors")
    tensors["midlayer.other_norm.weight"] = tensors.pop("midlayer.hidden_norm.weight")
    tensors["d2t"] += torch.arange(len(tensors["d2t"]))
    save_file(tensors, folder / "model.safetensors")
    values = read_object(folder / "config.json")
    for lost in ("rope_theta", "rope_parameters"):
        values.pop(lost)
    ids = {"eagle_aux_hidden_state_layer_ids": [3, 16, 28]}
    write_json(folder / "config.json", values | ids | {"eagle_config": ids})
    checks = checked(config, folder, engine)
    told = {name: check.told for name, check in checks.items() if check.verdict == "fault"}
    assert set(told) == {"tensors", "d2t", "layers", "rope"}
    assert {"sglang": "other_norm.weight is not known to sglang", "vllm": "vllm refuses midlayer.other_norm.weight"}[engine] in told[
        "tensors"
    ]
    assert "hidden_norm.weight got no values" in told["tensors"]
    assert "target ids where offsets are due" in told["d2t"]
    assert {"sglang": "hidden_states[4, 17, 29]", "vllm": "hidden_states[3, 16, 28]"}[engine] in told["layers"]
    assert "10000" in told["rope"]
