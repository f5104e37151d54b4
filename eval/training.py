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
    # A resumed run writes the steps after its checkpoint again: the later line is the one that counts.
    loss: dict[int, LossPoint] = {}
    acceptance: dict[int, AcceptancePoint] = {}
    for _, row in read_jsonl(path):
        step = row.get("step")
        if not isinstance(step, int):
            continue
        if isinstance(row.get("loss"), int | float):
            loss[step] = LossPoint(step, float(row["loss"]))
        sets = _held_out_sets(row)
        if sets is not None:
            acceptance[step] = _point(step, sets)
    return TrainingLog([loss[step] for step in sorted(loss)], [acceptance[step] for step in sorted(acceptance)])


def _held_out_sets(row: dict[str, Any]) -> dict[str, Any] | None:
    """The measurement of the held-out sets in a log line: the line itself, or one of its values."""
    candidates = [row, *(value for value in row.values() if isinstance(value, dict))]
    return next((value for value in candidates if isinstance(value.get("greedy"), dict)), None)


def _point(step: int, sets: dict[str, Any]) -> AcceptancePoint:
    greedy = sets["greedy"]
    length = float(greedy["length"])
    return AcceptancePoint(
        step=step,
        length=length,
        chosen_by=float(sets.get("acceptance_length", length)),
        unconditional=list(greedy["unconditional_J"]),
        conditional=list(greedy["conditional_J"]),
    )
