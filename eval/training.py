"""What a report says about training: the curves in train/log.jsonl."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eyas.files import read_jsonl


@dataclass(frozen=True)
class LossPoint:
    """Training loss at an optimiser step."""

    step: int
    loss: float


@dataclass(frozen=True)
class AcceptancePoint:
    """Offline acceptance on the greedy held-out rows at an optimiser step; rates by draft position."""

    step: int
    length: float
    chosen_by: float
    """What checkpoints are compared by: the mean of the held-out sets' acceptance lengths."""
    unconditional: list[float | None]
    conditional: list[float | None]


@dataclass(frozen=True)
class TrainingLog:
    """The curves of one training run, in order of steps."""

    loss: list[LossPoint]
    acceptance: list[AcceptancePoint]

    @property
    def start(self) -> AcceptancePoint | None:
        """The drafter before the first step."""
        return next((point for point in self.acceptance if point.step == 0), None)

    @property
    def best(self) -> AcceptancePoint | None:
        """The checkpoint that was kept: the longest acceptance, the earlier among equals."""
        return max(self.acceptance, key=lambda point: (point.chosen_by, -point.step), default=None)


def read_training(folder: Path) -> TrainingLog | None:
    """The log of a train folder; None when nothing was trained there (a bench of given drafters)."""
    path = Path(folder) / "log.jsonl"
    if not path.exists():
        return None
    loss, acceptance = [], []
    for _, row in read_jsonl(path):
        if row.get("kind") == "train" and row["loss"] is not None:
            loss.append(LossPoint(row["step"], row["loss"]))
        elif row.get("kind") == "validation":
            acceptance.append(_point(row))
    return TrainingLog(loss, acceptance)


def _point(row: dict[str, Any]) -> AcceptancePoint:
    greedy = row["greedy"]
    return AcceptancePoint(
        step=row["step"],
        length=greedy["length"],
        chosen_by=row["acceptance_length"],
        unconditional=greedy["unconditional_J"],
        conditional=greedy["conditional_J"],
    )
