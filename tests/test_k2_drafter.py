"""The drafter that users start from, AQ-MedAI's Kimi-K2-Instruct-eagle3: read as it is published, and its twin from prep to export."""

import json
import subprocess
import sys
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from data_prep import warm_start
from data_prep.prep import run_prep
from eval.export import export
from eyas.config import Config
from eyas.drafter import Drafter
from eyas.drafter_config import build_shape, read_config
from eyas.files import read_object
from eyas.folder import read_drafter, tensor_contract
from eyas.manifest import read_manifest
from eyas.states import StateStore
from eyas.target import Target
from tests.hub_server import hub
from tests.k2_drafter import FULL, FULL_IDS, FULL_TENSORS, published_config, twin_sizes, write_twin
from tests.kimi import write_tiny_deepseek
from train.trainer import train

FETCH = "import sys; from eyas.folder import read_drafter; print(read_drafter(sys.argv[1]).drafter.shape.model_dump_json())"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    folder = write_tiny_deepseek(tmp_path_factory.mktemp("k2") / "target")
    return Target(folder, "tiny-k2")


def test_the_full_size_config_gives_exactly_the_published_names_and_shapes() -> None:
    read = read_config(published_config(FULL, FULL_IDS), "deepseek")
    with torch.device("meta"):
        drafter = Drafter(build_shape(read.sizes, read.draft_vocab_size or 0, read.num_aux or 0))
    assert {name: tuple(tensor.shape) for name, tensor in drafter.state_dict().items()} == FULL_TENSORS
    assert tensor_contract(drafter.shape) == FULL_TENSORS
    assert 1.18e9 < sum(parameter.numel() for parameter in drafter.parameters()) < 1.20e9
    assert (drafter.shape.rope_theta, drafter.shape.rms_norm_eps, drafter.shape.rope_scaling) == (1e6, 1e-6, None)
    assert (read.layers, read.candidates) == (None, [(2, 30, 58), (3, 31, 59)])


def test_the_twin_has_the_published_names_and_relations_between_its_sizes(tmp_path: Path, target: Target) -> None:
    write_twin(tmp_path / "twin", target, [2, 3, 5], with_embedding=True)
    tensors = load_file(tmp_path / "twin" / "model.safetensors")
    assert tensors.pop("embed_tokens.weight").shape == (target.shape.vocab_size, target.shape.hidden_size)
    assert tensors.keys() == FULL_TENSORS.keys()
    assert (tensors["d2t"].dtype, tensors["t2d"].dtype) == (torch.int64, torch.bool)
    assert {tensor.dtype for name, tensor in tensors.items() if name not in ("d2t", "t2d")} == {torch.bfloat16}
    sizes, scale = twin_sizes(target), target.shape.hidden_size / FULL["hidden_size"]
    assert tensors["midlayer.self_attn.q_proj.weight"].shape[0] > sizes["hidden_size"]
    for name in ("intermediate_size", "hidden_size"):
        assert sizes[name] == pytest.approx(FULL[name] * scale, rel=0.05)


def test_the_twin_is_read_with_both_readings_of_its_ids(tmp_path: Path, target: Target) -> None:
    found = read_drafter(write_twin(tmp_path / "twin", target, [2, 3, 5]), family="deepseek")
    assert found.layers is None
    assert found.candidates == [(2, 3, 5), (3, 4, 6)]
    assert found.drafter.shape.max_position == target.shape.max_position // 2
    assert found.drafter.shape.rope_theta == 1e6
    assert torch.equal(found.drafter.t2d.nonzero()[:, 0], found.drafter.draft_ids_D)


def test_from_the_hub_come_config_and_safetensors_and_no_pickle(tmp_path: Path, target: Target) -> None:
    repository = write_twin(tmp_path / "repository", target, [2, 3, 5])
    for name in ("pytorch_model.bin", "optimizer.pt", "README.md", "nested/training_state.pt", "nested/model.safetensors"):
        (repository / name).parent.mkdir(exist_ok=True)
        (repository / name).write_bytes(b"not to be touched")
    with hub(repository, "AQ-MedAI/K2-twin") as server:
        asked = [sys.executable, "-c", FETCH, "hub:AQ-MedAI/K2-twin@v1.2"]
        ran = subprocess.run(asked, env=server.environment(tmp_path / "cache"), capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout) == read_drafter(repository).drafter.shape.model_dump(mode="json")
    assert sorted(server.fetched) == ["config.json", "model.safetensors"]
    assert not [request for request in server.requests if ".pt" in request or ".bin" in request]
    assert any(request.endswith("/revision/v1.2") for request in server.requests)


@dataclass(frozen=True)
class Line:
    """A run from prep to export that starts from the twin, on the tiny Kimi-K2.5; ``told`` is what prep printed."""

    config: Config
    target: Target
    export: Path
    told: str


@pytest.fixture(scope="module")
def line(kimi: Path, tmp_path_factory: pytest.TempPathFactory) -> Line:
    folder = tmp_path_factory.mktemp("k2-line")
    target = Target(kimi, str(kimi))
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"{number} is what?"}) + "\n" for number in range(8)))
    config = Config.model_validate(
        {
            "output": folder / "out",
            "target": {"model": str(kimi), "dtype": "float32", "device": "cpu"},
            "prep": {
                "sources": [{"source": str(folder / "prompts.jsonl")}],
                "heldout": {"prompts": 2},
                "replies": {"max_new_tokens": 8, "batch_size": 8},
                "states": {"probe_tokens": 100},
                "max_length": 96,
            },
            "drafter": {"init": str(write_twin(folder / "twin", target, [2, 4, 5])), "draft_vocab_size": 200},
            "train": {"ttt_steps": 2, "epochs": 1, "batch_tokens": 256, "precision": "fp32"},
            "engine": {"context": 128, "draft_steps": 2, "dtype": "float32"},
        }
    )
    with redirect_stdout(StringIO()) as told:
        run_prep(config)
    train(config)
    return Line(config, target, export(config), told.getvalue())


def test_every_stage_knows_which_layers_were_chosen_and_why(line: Line) -> None:
    record = read_object(line.config.folder("states") / "warm_start.json")
    assert [reading["layers"] for reading in record["readings"]] == [[2, 4, 5], [3, 5, 6]]
    assert record["tokens"] >= 100
    for stage in ("states/train", "states/greedy", "states/sampled", "train", "export"):
        assert read_manifest(line.config.folder(stage)).holds["warm_start"] == record, stage
    assert list(StateStore(line.config.folder("states/train")).spec.layers) == record["layers"]
    assert list(read_drafter(line.export).layers or ()) == record["layers"]
    assert record["reason"] in line.told
    assert "untouched warm start" in line.told


def test_prep_tells_what_the_new_draft_vocabulary_promises(line: Line) -> None:
    assert "are outside" in line.told
    assert "expected of the new draft vocabulary by its coverage" in line.told


def test_the_export_reaches_all_of_the_targets_positions_with_the_published_rope(line: Line) -> None:
    shape = read_drafter(line.export).drafter.shape
    twin = read_drafter(line.config.drafter.init).drafter.shape
    assert twin.max_position == line.target.shape.max_position // 2
    assert shape == twin.model_copy(update={"max_position": line.target.shape.max_position, "draft_vocab_size": 200})


def test_a_second_prep_neither_measures_nor_captures(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Target, "load_model", lambda *_: pytest.fail("model loaded"))
    monkeypatch.setattr(warm_start, "walk_row", lambda *_: pytest.fail("measured again"))
    before = {path: path.read_bytes() for path in line.config.folder("states").rglob("*.json")}
    run_prep(line.config)
    assert before == {path: path.read_bytes() for path in line.config.folder("states").rglob("*.json")}
