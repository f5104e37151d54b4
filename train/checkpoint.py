"""Resumable checkpoints: folders ``step-NNNNNN`` of safetensors and JSON that are there completely or not at all.

model.safetensors      the drafter's state dict, fp32 masters
optimizer.safetensors  AdamW's moments, ``exp_avg.<parameter>`` and ``exp_avg_sq.<parameter>``
random.safetensors     the generators' states, one row a process
checkpoint.json        counters, and size and SHA-256 of the three; a folder without a valid one does not count
"""

import os
import re
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from eyas.errors import EyasError
from eyas.files import digest_file, fsync_folder, read_json, write_json
from train.batches import Position

NAME = "checkpoint.json"
MOMENTS = ("exp_avg", "exp_avg_sq")
_FOLDER = re.compile(r"step-(\d+)")


@dataclass
class Counters:
    """Where a run is.

    step: optimiser steps done. position: in the data. seconds: spent by earlier processes of this run. validated: step of the last
    measurement on held-out rows, -1 before the first; validation_seconds: what it took. tokens, supervised: seen so far, over all
    processes. window: sums since the last log line.
    """

    step: int = 0
    position: Position = field(default_factory=Position)
    seconds: float = 0.0
    validated: int = -1
    validation_seconds: float = 0.0
    tokens: int = 0
    supervised: int = 0
    window: list[float] = field(default_factory=list)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "Counters":
        """Inverse of ``dataclasses.asdict``."""
        return cls(**{**value, "position": Position(**value["position"])})


@dataclass(frozen=True)
class Checkpoint:
    """A valid checkpoint folder; its tensors are read on demand."""

    folder: Path
    counters: Counters
    files: dict[str, dict[str, Any]]

    def tensors(self, part: str) -> dict[str, Tensor]:
        """Read 'model', 'optimizer' or 'random' to the CPU; raises EyasError when its bytes are not those that were written."""
        path = self.folder / f"{part}.safetensors"
        try:
            if digest_file(path) != self.files[path.name]["sha256"]:
                raise EyasError(f"{path} is damaged (checksum); remove {self.folder} to resume from the checkpoint before it")
            return load_file(path)
        except (OSError, SafetensorError) as error:
            raise EyasError(f"cannot read {path}: {error}; remove {self.folder} to resume from the checkpoint before it") from error


def save(root: Path, counters: Counters, parts: dict[str, dict[str, Tensor]], keep: int) -> Path:
    """Write ``root/step-NNNNNN`` from ``parts`` ('model', 'optimizer', 'random'), then remove all but the newest ``keep`` valid ones.

    Killed at any time it leaves the checkpoints of before. Raises EyasError when the disk refuses.
    """
    folder = root / f"step-{counters.step:06d}"
    temporary = root / f".{folder.name}.tmp"
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        files = {}
        for part, tensors in parts.items():
            path = temporary / f"{part}.safetensors"
            save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, path)
            with path.open("rb") as file:
                os.fsync(file.fileno())
            files[path.name] = {"bytes": path.stat().st_size, "sha256": digest_file(path)}
        write_json(temporary / NAME, {"counters": asdict(counters), "files": files})
        outdated = root / f".{folder.name}.old"
        shutil.rmtree(outdated, ignore_errors=True)
        if folder.is_dir():
            folder.rename(outdated)  # a folder cannot be replaced in one go; removing it first would take long enough to be killed in
        temporary.rename(folder)
        fsync_folder(root)
        shutil.rmtree(outdated, ignore_errors=True)
        folders = _folders(root)
        kept = [path for path in folders if _open(path) is not None][:keep]
        for path in folders:
            if path not in kept:
                shutil.rmtree(path)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise EyasError(f"cannot write {folder}: {error}") from error
    return folder


def latest(root: Path) -> Checkpoint | None:
    """The valid checkpoint with the highest step, or None."""
    for folder in _folders(root):
        if (checkpoint := _open(folder)) is not None:
            return checkpoint
    return None


def _folders(root: Path) -> list[Path]:
    if not root.is_dir():
        return []
    found = [(int(match[1]), path) for path in root.iterdir() if path.is_dir() and (match := _FOLDER.fullmatch(path.name))]
    return [path for _, path in sorted(found, reverse=True)]


def _open(folder: Path) -> Checkpoint | None:
    try:
        value = read_json(folder / NAME)
        checkpoint = Checkpoint(folder, Counters.from_json(value["counters"]), value["files"])
    except (EyasError, KeyError, TypeError):
        return None
    sizes = {name: file["bytes"] for name, file in checkpoint.files.items()}
    there = {path.name: path.stat().st_size for path in folder.glob("*.safetensors")}
    return checkpoint if sizes == there else None


def optimizer_tensors(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Tensor]:
    """AdamW's moments by parameter name; empty before the first step."""
    states = {name: optimizer.state[parameter] for name, parameter in model.named_parameters() if parameter in optimizer.state}
    return {f"{moment}.{name}": state[moment] for name, state in states.items() for moment in MOMENTS} | {
        f"step.{name}": state["step"] for name, state in states.items()
    }


def restore_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Inverse of ``optimizer_tensors``: each tensor goes to its parameter's device. Raises EyasError for moments of other shapes."""
    for name, parameter in model.named_parameters():
        if f"step.{name}" not in tensors:
            continue
        state = {key: tensors[f"{key}.{name}"] for key in (*MOMENTS, "step")}
        if state["exp_avg"].shape != parameter.shape:
            raise EyasError(f"checkpoint: moments of {name} are {tuple(state['exp_avg'].shape)}, the drafter has {tuple(parameter.shape)}")
        # a fused AdamW counts its steps on the device, the others on the CPU
        step_device = parameter.device if optimizer.defaults.get("fused") else torch.device("cpu")
        optimizer.state[parameter] = {
            "step": state["step"].to(step_device),
            **{moment: state[moment].to(parameter.device) for moment in MOMENTS},
        }


def random_tensors(device: torch.device) -> dict[str, Tensor]:
    """This process's torch generators, uint8. (Data order and initialisation use generators of their own, made from the seed.)"""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def restore_random(states: dict[str, Tensor], rank: int, device: torch.device) -> None:
    """Set the generators from row ``rank`` of what was saved; a rank that was not there then keeps its own."""
    if rank < len(states["cpu"]):
        torch.set_rng_state(states["cpu"][rank])
        if device.type == "cuda" and "cuda" in states:
            torch.cuda.set_rng_state(states["cuda"][rank], device)
