"""The learning rate over a run: a linear warm-up, then a cosine down to a floor."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Schedule:
    """How far a run is, and the rate that goes with it.

    steps: planned optimiser steps. seconds: time budget of the run, None without one. warmup, floor: TrainConfig's warmup_share and
    final_rate_share.
    """

    steps: int
    seconds: float | None
    warmup: float
    floor: float

    def share(self, step: int, elapsed: float) -> float:
        """Share of the run that is over once ``step`` steps are done and ``elapsed`` seconds are gone: whichever limit is nearer."""
        by_clock = elapsed / self.seconds if self.seconds else 0.0
        return min(max(step / self.steps, by_clock), 1.0)

    def rate(self, share: float) -> float:
        """Factor on the peak learning rate at ``share``; 1 at the end of the warm-up, ``floor`` at 1."""
        if share < self.warmup:
            return share / self.warmup
        fall = (share - self.warmup) / (1.0 - self.warmup)
        return self.floor + (1.0 - self.floor) * 0.5 * (1.0 + math.cos(math.pi * fall))
