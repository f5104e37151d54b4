"""The export is the checkpoint, in a folder an engine can load, or an error."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import eval.export as export_module
from eval.engine import Engine
from eval.export import export
from eyas.config import Config
from eyas.drafter import Drafter
from eyas.errors import EyasError
from eyas.files import read_json, read_object, write_json
from eyas.folder import drafter_config, read_drafter, tensor_contract, write_drafter
from eyas.manifest import begin, finish, read_manifest
from eyas.target import Target
from tests.eval.tiny import LAYERS, tiny_config, tiny_drafter, tiny_target


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return tiny_target(tmp_path_factory.mktemp("target"), vocab_size=40)


def trained(output: Path, target: Target, complete: bool = True, dtype: torch.dtype = torch.bfloat16) -> Config:
    """A finished training run: its best drafter knows fewer positions than the target."""
    config = tiny_config(output, target)
    folder = config.folder("train")
    drafter = tiny_drafter(target, 24)
    short = Drafter(drafter.shape.model_copy(update={"max_position": 64}))
    short.load_state_dict(drafter.state_dict())
    write_drafter(folder / "best", short, drafter_config(short.shape, LAYERS, target), dtype)
    begin(folder, "checkpoint", {"train": {}}, {"target": target.digest})
    if complete:
        finish(folder, {"layers": list(LAYERS), "best": {"step": 7, "length": 1.5}})
    return config


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_export_holds_exactly_the_checkpoints_tensors(tmp_path: Path, target: Target, dtype: torch.dtype) -> None:
    config = trained(tmp_path, target, dtype=dtype)
    folder = export(config)
    ours, best = load_file(folder / "model.safetensors"), load_file(config.folder("train") / "best" / "model.safetensors")
    assert set(ours) == set(tensor_contract(read_drafter(folder).drafter.shape))
    assert all(torch.equal(ours[name], best[name]) and ours[name].dtype == best[name].dtype for name in best)


def test_export_can_be_used_at_every_position_of_target_and_context(tmp_path: Path, target: Target) -> None:
    folder = export(trained(tmp_path, target))
    assert read_json(folder / "config.json")["max_position_embeddings"] == 256
    assert read_json(folder / "config.json")["tie_word_embeddings"] is False
    Engine(target, {"result": read_drafter(folder)}, torch.float32, context=256, draft_steps=3)


def test_manifest_says_what_was_exported_for_which_target(tmp_path: Path, target: Target) -> None:
    manifest = read_manifest(export(trained(tmp_path, target)), "export")
    assert manifest.complete
    assert manifest.holds["layers"] == list(LAYERS)
    assert manifest.holds["target_digest"] == target.digest
    assert manifest.holds["dtype"] == "bfloat16"
    assert manifest.holds["checkpoint"] == {"step": 7, "length": 1.5}


def test_a_current_export_is_not_written_again_and_a_new_checkpoint_is(tmp_path: Path, target: Target) -> None:
    config = trained(tmp_path, target)
    weights = export(config) / "model.safetensors"
    before = weights.stat().st_mtime_ns
    export(config)
    assert weights.stat().st_mtime_ns == before
    best = config.folder("train") / "best" / "model.safetensors"
    tensors = load_file(best)
    save_file(tensors | {"fc.weight": tensors["fc.weight"] * 2}, best)
    export(config)
    assert torch.equal(load_file(weights)["fc.weight"], tensors["fc.weight"] * 2)


def test_an_unfinished_or_missing_training_run_is_an_error(tmp_path: Path, target: Target) -> None:
    with pytest.raises(EyasError, match="run `eyas train` first"):
        export(tiny_config(tmp_path, target))
    with pytest.raises(EyasError, match="has not finished"):
        export(trained(tmp_path, target, complete=False))


def test_a_drafter_of_another_target_is_an_error(tmp_path: Path, target: Target) -> None:
    trained(tmp_path / "run", target)
    other = tiny_target(tmp_path / "other", vocab_size=40, seed=9)
    with pytest.raises(EyasError, match=r"trained for another target .* remove it and train again"):
        export(tiny_config(tmp_path / "run", other))


def test_layers_that_disagree_with_the_training_run_are_an_error(tmp_path: Path, target: Target) -> None:
    config = trained(tmp_path, target)
    path = config.folder("train") / "best" / "config.json"
    drafter = read_drafter(path.parent).drafter
    write_json(path, drafter_config(drafter.shape, (1, 2, 4), target))
    with pytest.raises(EyasError, match=r"reads layers \(1, 2, 4\)"):
        export(config)


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        (lambda tensors: tensors.pop("norm.weight"), "norm.weight is None"),
        (lambda tensors: tensors.update(extra=torch.zeros(1)), "extra is "),
        (lambda tensors: tensors.update({"fc.weight": tensors["fc.weight"].half()}), "fc.weight is .*float16"),
        (lambda tensors: tensors.update({"lm_head.weight": tensors["lm_head.weight"].flip(0).contiguous()}), "other logits"),
    ],
)
def test_a_fault_in_the_written_file_is_found(
    tmp_path: Path, target: Target, monkeypatch: pytest.MonkeyPatch, fault: object, told: str
) -> None:
    def write_badly(folder: Path, *arguments: object) -> None:
        write_drafter(folder, *arguments)
        tensors = load_file(folder / "model.safetensors")
        fault(tensors)
        save_file(tensors, folder / "model.safetensors")

    config = trained(tmp_path, target)
    monkeypatch.setattr(export_module, "write_drafter", write_badly)
    with pytest.raises(EyasError, match=told):
        export(config)
    assert not read_manifest(config.folder("export")).complete


def kimi_like(folder: Path) -> Target:
    """The same target under a model_type that SGLang serves after DeepSeek's manner."""
    target = tiny_target(folder, vocab_size=40)
    write_json(folder / "config.json", target.config | {"model_type": "kimi_k2"})
    return Target(folder, str(folder))


def test_layer_ids_are_written_for_the_version_that_is_to_serve_and_others_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """hidden_states[3, 4, 4] of DeepSeek's kind: SGLang before 0.5.13 adds one to every list, later ones to none that begins with 3."""
    target = kimi_like(tmp_path / "kimi")
    layers = (3, 4, 4)
    for version, ids in (("0.5.12", [2, 3, 3]), ("0.5.23", [3, 4, 4])):
        config = tiny_config(tmp_path / version, target, kind="sglang", version=version)
        drafter = tiny_drafter(target, 24)
        write_drafter(config.folder("train") / "best", drafter, drafter_config(drafter.shape, layers, target), torch.bfloat16)
        begin(config.folder("train"), "checkpoint", {"train": {}}, {"target": target.digest})
        finish(config.folder("train"), {"layers": list(layers)})
        folder = export(config)
        assert read_object(folder / "config.json")["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == ids
        assert read_object(folder / "config.json")["eagle_aux_hidden_state_layer_ids"] == list(layers)
        assert read_drafter(folder).layers == layers
    said = capsys.readouterr().err
    assert "sglang from 0.5.13 on reads hidden_states[2, 3, 3]: it needs an export of its own" in said
    assert "sglang before 0.5.13 reads hidden_states[4, 5, 5]: it needs an export of its own" in said


def test_an_export_that_every_version_reads_alike_says_nothing(tmp_path: Path, target: Target, capsys: pytest.CaptureFixture[str]) -> None:
    export(trained(tmp_path, target))
    assert capsys.readouterr().err == ""


def test_rope_is_written_both_ways_and_the_draft_vocabulary_always(tmp_path: Path, target: Target) -> None:
    config = read_object(export(trained(tmp_path, target)) / "config.json")
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 5000.0
    assert config["draft_vocab_size"] == 24
