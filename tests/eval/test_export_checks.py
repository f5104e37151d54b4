"""An export beside what was trained, as each engine and version reads it."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from eval.checks import Check, faults
from eval.export_checks import Trained, check_export, chunk_order, fed_layers, read_export, read_trained
from eyas.conventions import Engine, Family
from eyas.drafter import Drafter
from eyas.files import read_object, write_json
from eyas.folder import drafter_config, write_drafter
from eyas.target import Target
from tests.eval.tiny import LAYERS, tiny_config, tiny_drafter, tiny_target

ENGINES: list[tuple[Engine | None, str]] = [("sglang", "0.5.6"), ("sglang", "0.5.23"), ("vllm", "0.32.0"), (None, "")]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return tiny_target(tmp_path_factory.mktemp("target"))


@pytest.fixture
def drafter(target: Target) -> Drafter:
    return tiny_drafter(target, 200)


@pytest.fixture
def export(tmp_path: Path, target: Target, drafter: Drafter) -> Path:
    write_drafter(tmp_path / "export", drafter, drafter_config(drafter.shape, LAYERS, target), torch.float32)
    return tmp_path / "export"


def checked(
    export: Path, target: Target, drafter: Drafter, engine: Engine | None = "sglang", version: str = "0.5.23", family: Family = "llama"
) -> list[Check]:
    trained = Trained(Path("train/best"), drafter, LAYERS, target.digest, target.tokenizer_digest)
    return check_export(read_export(export, engine, version, family), trained, target, 200)


def named(checks: list[Check]) -> dict[str, str]:
    return {check.name.removeprefix("export: "): check.told for check in faults(checks)}


def change(export: Path, **values: object) -> None:
    write_json(export / "config.json", read_object(export / "config.json") | values)


@pytest.mark.parametrize(("engine", "version"), ENGINES)
def test_an_export_is_as_it_was_trained_for_every_engine(
    export: Path, target: Target, drafter: Drafter, engine: Engine | None, version: str
) -> None:
    checks = checked(export, target, drafter, engine, version)
    assert {check.verdict for check in checks} == {"ok"}
    assert {check.name for check in checks} >= {f"export: {name}" for name in ("weights", "d2t", "layers", "rope", "config")}
    assert fed_layers(read_export(export, engine, version, "llama"), target) == LAYERS


def test_layer_ids_that_one_version_reads_otherwise_are_a_fault_for_that_one_alone(export: Path, target: Target, drafter: Drafter) -> None:
    """[1, 3, 4] for DeepSeek's kind: from 0.5.13 on a list that begins with 1 means the next layers, before every list does."""
    change(export, eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 2, 3]})
    assert not faults(checked(export, target, drafter, "sglang", "0.5.12", "deepseek"))
    told = named(checked(export, target, drafter, "sglang", "0.5.13", "deepseek"))
    assert list(told) == ["layers"]
    assert "sglang 0.5.13 feeds it hidden_states[0, 2, 3]" in told["layers"]
    assert not faults(checked(export, target, drafter, "vllm", "0.32.0", "deepseek"))


def test_the_embedded_engine_minds_both_other_engines(export: Path, target: Target, drafter: Drafter) -> None:
    change(export, eagle_aux_hidden_state_layer_ids=[0, 2, 3])
    assert "vllm 0.32.0 feeds it hidden_states[0, 2, 3]" in named(checked(export, target, drafter, None))["layers"]
    assert "layers" not in named(checked(export, target, drafter, "sglang", "0.5.23"))


def test_a_config_without_ids_leaves_an_engine_to_its_default(export: Path, target: Target, drafter: Drafter) -> None:
    change(export, eagle_config={})
    assert "sglang 0.5.23 finds no ids and takes its default" in named(checked(export, target, drafter))["layers"]


def test_tensors_that_are_missing_unknown_or_others_are_named(export: Path, target: Target, drafter: Drafter) -> None:
    tensors = load_file(export / "model.safetensors")
    tensors["extra.weight"] = tensors.pop("norm.weight")
    save_file(tensors | {"lm_head.weight": tensors["lm_head.weight"] * 2}, export / "model.safetensors")
    told = named(checked(export, target, drafter))["weights"]
    assert "norm.weight is missing" in told
    assert "extra.weight is unknown" in told
    assert "lm_head.weight differs" in told
    assert "fc.weight" not in told


def test_d2t_that_is_missing_absolute_or_of_another_drafter_is_told_apart(export: Path, target: Target, drafter: Drafter) -> None:
    tensors = load_file(export / "model.safetensors")
    own = tensors["d2t"]
    for d2t, told in (
        (own + torch.arange(len(own)), "it holds target ids"),
        (own.roll(1), "it is not the d2t that was trained"),
        (None, "there is none"),
    ):
        save_file(
            {**{name: value for name, value in tensors.items() if name != "d2t"}, **({} if d2t is None else {"d2t": d2t})},
            export / "model.safetensors",
        )
        assert named(checked(export, target, drafter))["d2t"].startswith(told)


@pytest.mark.parametrize(
    ("values", "name", "told"),
    [
        (
            {"rope_theta": 1.0, "rope_parameters": {"rope_type": "default", "rope_theta": 1.0}},
            "rope",
            "theta 1, no scaling; trained with theta 5000",
        ),
        ({"rope_theta": 1.0}, "rope", "must agree"),
        ({"rope_parameters": None}, "rope", "rope_parameters is missing"),
        ({"max_position_embeddings": 199}, "config", "199, below the context of 200"),
        ({"draft_vocab_size": None}, "config", "draft_vocab_size is None, must be 200"),
        ({"tie_word_embeddings": True}, "config", "tie_word_embeddings is True"),
    ],
)
def test_config_fields_that_are_wrong_are_named(
    export: Path, target: Target, drafter: Drafter, values: dict[str, object], name: str, told: str
) -> None:
    change(export, **values)
    found = named(checked(export, target, drafter))
    assert list(found) == [name]
    assert told in found[name]


def test_fields_that_a_foreign_drafter_leaves_out_are_no_fault(export: Path, target: Target, drafter: Drafter) -> None:
    config = read_object(export / "config.json")
    for name in ("eyas", "rope_parameters", "num_aux_hidden_states"):
        config.pop(name)
    write_json(export / "config.json", config)
    assert not faults(checked(export, target, drafter))


def test_the_order_of_fcs_chunks_is_recognised() -> None:
    own = torch.arange(24.0).view(2, 12)
    one, two, three = own.chunk(3, dim=1)
    assert chunk_order(own, own, 3) == (0, 1, 2)
    assert chunk_order(torch.cat([three, one, two], dim=1), own, 3) == (2, 0, 1)
    assert chunk_order(own + 1, own, 3) is None


def test_without_a_training_run_the_export_tells_what_was_trained(export: Path, target: Target, tmp_path: Path) -> None:
    trained = read_trained(tiny_config(tmp_path / "run", target), export, "llama")
    assert trained is not None
    assert (trained.folder, trained.layers, trained.tokenizer_digest) == (export, LAYERS, target.tokenizer_digest)
