"""Every planted fault is named, two at once are both named, and a healthy export is said to be healthy."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import eval.doctor as doctor_module
import eval.served_states as states_module
from eval.checks import faults
from eval.doctor import Examination, examine
from eyas.cli import main
from eyas.drafter import Drafter
from eyas.files import read_object, write_json
from eyas.folder import DrafterFolder
from tests.eval.tiny_run import LAYERS, Plant, Run, serving, tiny_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return tiny_run(tmp_path_factory.mktemp("doctor"))


def examined(run: Run, plant: Plant = lambda folder: folder, export: Path | None = None, target: Path | None = None) -> Examination:
    with serving(run, plant, export, target) as url:
        return examine(run.config, export or run.export, url, new_tokens=40)


def named(found: Examination) -> set[str]:
    return {check.name for check in faults(found.checks)}


def shifted(by: int) -> Plant:
    return lambda folder: replace(folder, layers=tuple(k + by for k in LAYERS))


def swapped(*places: int) -> Plant:
    return lambda folder: replace(folder, layers=tuple((folder.layers or ())[place] for place in places))


def theta_lost(folder: DrafterFolder) -> DrafterFolder:
    old = folder.drafter
    drafter = Drafter(old.shape.model_copy(update={"rope_theta": 10000.0}))
    drafter.load_state_dict(old.state_dict())
    return replace(folder, drafter=drafter)


def d2t_absolute(folder: DrafterFolder) -> DrafterFolder:
    """As an engine that adds row numbers to target ids; what falls behind the vocabulary becomes token 0, lest the engine fail."""
    drafter = folder.drafter
    rows_D = torch.arange(len(drafter.d2t))
    read_D = drafter.draft_ids_D + rows_D
    drafter.d2t.copy_(torch.where(read_D < drafter.shape.vocab_size, read_D, 0) - rows_D)
    return folder


def d2t_lost(folder: DrafterFolder) -> DrafterFolder:
    folder.drafter.d2t.zero_()
    return folder


def both(*plants: Plant) -> Plant:
    def plant(folder: DrafterFolder) -> DrafterFolder:
        for one in plants:
            folder = one(folder)
        return folder

    return plant


def test_a_healthy_export_is_healthy_and_its_served_steps_are_the_offline_ones(run: Run) -> None:
    found = examined(run)
    assert named(found) == set()
    assert found.healthy
    assert {check.name for check in found.checks if check.verdict == "not checked"} == {"served: states"}
    steps = next(check for check in found.checks if check.name == "served: steps")
    count = int(steps.told.split()[0])
    assert steps.told.startswith(f"{count} of {count} verify steps")
    assert count > 100
    assert found.served_length == found.replayed_length
    assert found.served_length is not None
    assert found.served_length > 1.5


@pytest.mark.parametrize(
    ("plant", "kinds"),
    [
        (shifted(-1), {"layers"}),
        (swapped(0, 2, 1), {"fc"}),
        (swapped(2, 1, 0), {"fc"}),
        (both(shifted(1), theta_lost), {"layers", "rope"}),
        (both(shifted(1), swapped(0, 2, 1)), {"layers", "fc"}),
        (both(swapped(1, 0, 2), theta_lost), {"fc", "rope"}),
    ],
)
def test_what_a_server_reads_wrong_is_named_from_the_steps_it_accepts(run: Run, plant: Plant, kinds: set[str]) -> None:
    found = examined(run, plant)
    assert named(found) == {f"served: {kind}" for kind in kinds}
    assert found.served_length is not None
    assert found.replayed_length is not None
    assert found.served_length < found.replayed_length - 0.2


@pytest.mark.parametrize(
    ("plant", "name", "told"),
    [
        (shifted(1), "served: layers", "it is fed hidden_states[2, 3, 4] instead of [1, 2, 3]: so replayed"),
        (theta_lost, "served: rope", "rope theta is 10000 instead of 50, as where a config has none: so replayed"),
        # where nothing is accepted, nothing tells the one from the other
        (d2t_absolute, "served: d2t", "d2t is taken for offsets, but what the engine has are target ids (as well: d2t is lost"),
        (d2t_lost, "served: d2t", "d2t is taken for offsets, but what the engine has are target ids (as well: d2t is lost"),
    ],
)
def test_what_is_read_wrong_is_told(run: Run, plant: Plant, name: str, told: str) -> None:
    assert next(check.told for check in examined(run, plant).checks if check.name == name).startswith(told)


@pytest.fixture
def broken(run: Run, tmp_path: Path) -> Path:
    """A copy of the export to be broken."""
    return Path(shutil.copytree(run.export, tmp_path / "export"))


def write_d2t_absolute(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"d2t": tensors["d2t"] + torch.arange(len(tensors["d2t"]))}, folder / "model.safetensors")


def write_fc_swapped(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    parts = tensors["fc.weight"].chunk(3, dim=1)
    save_file(tensors | {"fc.weight": torch.cat([parts[0], parts[2], parts[1]], dim=1)}, folder / "model.safetensors")


def write_other_weights(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"norm.weight": tensors["norm.weight"] * 2}, folder / "model.safetensors")


def change_config(folder: Path, **values: object) -> None:
    config = read_object(folder / "config.json")
    write_json(folder / "config.json", {key: value for key, value in (config | values).items() if value != "gone"})


def write_rope_lost(folder: Path) -> None:
    change_config(folder, rope_theta="gone", rope_parameters="gone")


def write_ids_up(folder: Path) -> None:
    config = read_object(folder / "config.json")
    change_config(folder, eyas=config["eyas"] | {"captured_hidden_states": [2, 3, 4]})


FOLDER_FAULTS: dict[str, tuple[Callable[[Path], None], str]] = {
    "d2t absolute": (write_d2t_absolute, "export: d2t"),
    "fc chunks swapped": (write_fc_swapped, "export: fc"),
    "other weights": (write_other_weights, "export: weights"),
    "rope lost": (write_rope_lost, "export: rope"),
    "ids one up": (write_ids_up, "export: layers"),
}


@pytest.mark.parametrize("fault", FOLDER_FAULTS)
def test_what_is_wrong_in_the_folder_is_named(run: Run, broken: Path, fault: str) -> None:
    write, name = FOLDER_FAULTS[fault]
    write(broken)
    assert named(examined(run, export=broken)) == {name}


def test_served_steps_are_explained_by_what_is_wrong_in_the_folder(run: Run, broken: Path) -> None:
    write_fc_swapped(broken)
    write_rope_lost(broken)
    found = examined(run, export=broken)
    assert named(found) == {"export: fc", "export: rope"}
    steps = next(check for check in found.checks if check.name == "served: steps")
    assert steps.verdict == "ok"
    assert "as a drafter with the faults above does" in steps.told


def test_one_fault_in_the_folder_and_one_in_the_engine_are_both_named(run: Run, broken: Path) -> None:
    write_fc_swapped(broken)
    assert named(examined(run, shifted(1), broken)) == {"export: fc", "served: layers"}


@pytest.fixture
def other_target(run: Run, tmp_path: Path) -> Path:
    """A copy of the target whose tokenizer or template is to be changed."""
    return Path(shutil.copytree(run.target.folder, tmp_path / "target"))


def swap_letters(target: Path) -> None:
    """Another tokenizer: two letters have changed their ids."""
    tokenizer = read_object(target / "tokenizer.json")
    words = tokenizer["model"]["vocab"]
    words["e"], words["o"] = words["o"], words["e"]
    write_json(target / "tokenizer.json", tokenizer)


def change_template(target: Path) -> None:
    path = target / "chat_template.jinja"
    path.write_text(path.read_text().replace("a:{%", "assistant:{%"))


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ([swap_letters], {"served: tokenizer"}),
        ([change_template], {"served: template"}),
        ([swap_letters, change_template], {"served: tokenizer", "served: template"}),
    ],
)
def test_another_tokenizer_or_template_of_the_server_is_named(
    run: Run, other_target: Path, changes: list[Callable[[Path], None]], names: set[str]
) -> None:
    for change in changes:
        change(other_target)
    assert named(examined(run, target=other_target)) == {"served: target", *names}


@pytest.mark.parametrize(("change", "name"), [(swap_letters, "tokenizer: ids"), (change_template, "tokenizer: template")])
def test_a_target_folder_whose_tokenizer_has_changed_since_training_is_named(
    run: Run, other_target: Path, change: Callable[[Path], None], name: str
) -> None:
    change(other_target)
    moved = run.config.model_copy(update={"target": run.config.target.model_copy(update={"model": str(other_target)})})
    with serving(run, target=other_target) as url:
        assert named(examine(moved, run.export, url, new_tokens=40)) == {"tokenizer: files", name}


def test_a_target_too_large_for_the_memory_is_followed_by_its_stored_states(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(states_module, "fits", lambda *_: False)
    found = examined(run)
    assert named(found) == set()
    assert next(check.verdict for check in found.checks if check.name == "served: steps") == "ok"
    assert "served: other layers" in {check.name for check in found.checks if check.verdict == "not checked"}
    assert named(examined(run, swapped(2, 1, 0))) == {"served: fc"}


def states_of(run: Run, *layers: int) -> Callable[[str, list[int]], torch.Tensor]:
    """What SGLang would return of the states that it hands over."""
    target = states_module.FromTarget(run.target, torch.float32, torch.device("cpu"))

    def states(_: str, ids: list[int]) -> torch.Tensor:
        along = target.along(ids)
        return torch.cat([along[layer] for layer in layers], dim=-1)

    return states


def test_states_that_a_server_returns_tell_its_layers_even_where_nothing_is_accepted(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_module, "aux_states", states_of(run, 2, 3, 4))
    assert named(examined(run, both(shifted(1), d2t_lost))) == {"served: states", "served: d2t"}
    found = examined(run, both(shifted(1), theta_lost))
    assert named(found) == {"served: states", "served: rope"}
    told = next(check.told for check in found.checks if check.name == "served: states")
    assert told.startswith("the server hands over hidden_states[2, 3, 4], relative error 0")
    assert told.endswith("trained on hidden_states[1, 2, 3]")


def test_states_of_the_trained_layers_are_recognised(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_module, "aux_states", states_of(run, *LAYERS))
    found = examined(run)
    assert {check.verdict for check in found.checks} == {"ok"}


def test_a_state_of_no_known_layer_is_recognised_as_none() -> None:
    states = {layer: torch.randn(6, 8, generator=torch.Generator().manual_seed(layer)) for layer in range(4)}
    aux_TA = torch.cat([states[3] * 1.01, states[1], states[0] + states[2]], dim=-1)
    found, error = states_module.recognised(aux_TA, states)
    assert found == (3, 1, None)
    assert error == pytest.approx(0.01, rel=1e-3)


def test_a_server_that_is_not_there_is_a_finding_and_the_folder_is_examined_all_the_same(run: Run, broken: Path) -> None:
    write_fc_swapped(broken)
    found = examine(run.config, broken, "http://127.0.0.1:9")
    assert named(found) == {"export: fc", "served"}


def test_the_command_starts_the_engine_prints_json_and_ends_with_1_on_a_fault(
    run: Run, broken: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    write_fc_swapped(broken)
    config = tmp_path / "config.yaml"
    config.write_text(json.dumps(run.config.model_dump(mode="json")))
    with pytest.raises(SystemExit) as ended:
        main(["doctor", str(broken), "-c", str(config), "--json", "--prompts", "3", "--new-tokens", "30"])
    assert ended.value.code == 1
    told = json.loads(capsys.readouterr().out)
    assert told["healthy"] is False
    assert [check["name"] for check in told["checks"] if check["verdict"] == "fault"] == ["export: fc"]
