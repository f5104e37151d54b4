"""A checkpoint is there completely or not at all, and gives back what it was given."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from torch import nn

from eyas.errors import EyasError
from train.batches import Position
from train.checkpoint import Counters, latest, optimizer_tensors, random_tensors, restore_optimizer, restore_random, save

COUNTERS = Counters(
    step=7, position=Position(1, 5), seconds=1.5, validated=5, validation_seconds=0.25, tokens=70, supervised=30, window=[0.1, 1 / 3]
)


def write(root: Path, step: int, keep: int = 9, value: float = 1.0) -> Path:
    parts = {"model": {"w": torch.full((2, 3), value)}, "optimizer": {}, "random": {"cpu": torch.get_rng_state()[None]}}
    return save(root, Counters(**{**asdict(COUNTERS), "step": step, "position": COUNTERS.position}), parts, keep)


def test_what_is_saved_is_found_and_read_back_exactly(tmp_path) -> None:
    write(tmp_path, 7, value=1 / 3)
    found = latest(tmp_path)
    assert found is not None
    assert found.counters == COUNTERS
    assert torch.equal(found.tensors("model")["w"], torch.full((2, 3), 1 / 3))


def test_the_newest_by_number_counts_and_older_ones_are_removed(tmp_path) -> None:
    for step in (9, 100, 1_000_000, 999_999):
        write(tmp_path, step, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-1000000", "step-999999"]
    assert latest(tmp_path).counters.step == 1_000_000


@pytest.mark.parametrize("damage", ["no json", "broken json", "missing tensors", "short tensors", "extra tensors"])
def test_an_incomplete_folder_is_passed_over(tmp_path, damage) -> None:
    write(tmp_path, 1)
    folder = write(tmp_path, 2)
    if damage == "no json":
        (folder / "checkpoint.json").unlink()
    elif damage == "broken json":
        (folder / "checkpoint.json").write_text('{"counters":')
    elif damage == "missing tensors":
        (folder / "optimizer.safetensors").unlink()
    elif damage == "short tensors":
        (folder / "model.safetensors").write_bytes(b"")
    else:
        (folder / "more.safetensors").write_bytes(b"")
    assert latest(tmp_path).counters.step == 1


def test_a_damaged_newer_folder_makes_no_valid_one_go(tmp_path) -> None:
    (write(tmp_path, 9) / "checkpoint.json").unlink()
    for step in (1, 2, 3):
        write(tmp_path, step, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000002", "step-000003"]


def test_flipped_bytes_are_noticed_before_they_are_used(tmp_path) -> None:
    path = write(tmp_path, 1) / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(EyasError, match="damaged"):
        latest(tmp_path).tensors("model")


def test_a_leftover_of_a_killed_save_is_no_checkpoint_and_is_cleared(tmp_path) -> None:
    (tmp_path / ".step-000003.tmp").mkdir(parents=True)
    (tmp_path / ".step-000003.tmp" / "model.safetensors").write_bytes(b"half")
    assert latest(tmp_path) is None
    write(tmp_path, 3)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000003"]


def test_a_disk_that_refuses_is_one_line_and_leaves_the_old_checkpoint(tmp_path) -> None:
    write(tmp_path, 1)
    (tmp_path / "step-000002").write_text("in the way")
    with pytest.raises(EyasError, match=r"cannot write .*step-000002"):
        write(tmp_path, 2)
    assert latest(tmp_path).counters.step == 1


def test_nothing_is_pickled(tmp_path) -> None:
    folder = write(tmp_path, 1)
    assert {path.suffix for path in folder.iterdir()} == {".safetensors", ".json"}
    assert json.loads((folder / "checkpoint.json").read_text())["counters"]["step"] == 1


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    for _ in range(number):
        model(torch.randn(8, 5)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_adamw_goes_on_exactly_after_its_moments_went_through_a_checkpoint(tmp_path) -> None:
    def fresh() -> tuple[nn.Module, torch.optim.AdamW]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, fused=True)

    whole, optimizer = fresh()
    steps(whole, optimizer, 8)

    first, optimizer = fresh()
    steps(first, optimizer, 5)
    random = {name: state[None] for name, state in random_tensors(torch.device("cpu")).items()}
    save(tmp_path, COUNTERS, {"model": first.state_dict(), "optimizer": optimizer_tensors(optimizer, first), "random": random}, 1)

    torch.manual_seed(99)
    found = latest(tmp_path)
    second, optimizer = fresh()
    second.load_state_dict(found.tensors("model"))
    restore_optimizer(optimizer, second, found.tensors("optimizer"))
    restore_random(found.tensors("random"), 0, torch.device("cpu"))
    steps(second, optimizer, 3)
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), second.parameters(), strict=True))


def test_moments_of_another_shape_are_refused() -> None:
    model, other = nn.Linear(3, 2), nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(other.parameters())
    other(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    with pytest.raises(EyasError, match=r"moments of weight are \(2, 4\), the drafter has \(2, 3\)"):
        restore_optimizer(torch.optim.AdamW(model.parameters()), model, optimizer_tensors(optimizer, other))
