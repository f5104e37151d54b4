"""The drafter that held-out text accepts most, kept as a drafter folder that says which step it is from."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from eyas.drafter import Drafter
from eyas.files import read_json
from eyas.folder import write_drafter

RECORD = "eyas_training"


@dataclass(frozen=True)
class Best:
    """The step a kept drafter comes from, and its acceptance length there (mean of the held-out sets)."""

    step: int
    length: float


def keep_best(folder: Path, drafter: Drafter, config: dict[str, Any], best: Best, dtype: torch.dtype) -> None:
    """Write the drafter, rounded to ``dtype``, with ``config`` as its config.json and ``best`` in it; replaces the one of before."""
    record = {"step": best.step, "acceptance_length": best.length}
    write_drafter(folder, drafter, {**config, RECORD: record}, dtype)


def read_best(folder: Path) -> Best:
    """What the kept drafter says about itself: it can be of a later step than the checkpoint of a killed run."""
    record = read_json(folder / "config.json")[RECORD]
    return Best(record["step"], record["acceptance_length"])
