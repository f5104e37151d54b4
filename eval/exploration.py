"""Which point of a sweep to measure next, and which ones never, from what is measured so far. One drafter at a time; nothing runs here.

The order: the longest chain first, because its acceptance by position gives the acceptance length of every shorter chain; then the shortest
one, because the two together give what a further draft costs; then whatever is expected to be fastest, so that the best is known early and
the hopeless are never started. Trees likewise, the largest first: no tree cut out of it can be accepted more.

A point is hopeless when it stays behind the baseline, or behind the drafter's own best, by more than the margin even with the upper end of
the interval of its acceptance and with a cycle cheaper by the worst error of the cost fit. It takes a fit with an error to tell, so one
setting more than the fit has terms is always measured (of chains, three).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from eval.cost_model import CostModel, Observation, Setting, fit
from eval.sweep_points import Forecast, PairedPoint


@dataclass(frozen=True)
class Exploration:
    """What is known about one drafter: its points, and the fit of their cycles (None before the first)."""

    points: Sequence[PairedPoint]
    model: CostModel | None

    @classmethod
    def of(cls, points: Sequence[PairedPoint], baseline_ms: float) -> "Exploration":
        """Fit the cycles of a drafter's points."""
        observations = [Observation(point.setting, point.cycle) for point in points]
        return cls(points, fit(observations, baseline_ms) if observations else None)

    @property
    def best(self) -> PairedPoint | None:
        """The fastest point; among equals the one with the fewest drafts."""
        return max(self.points, key=lambda point: (point.gain, -point.setting.steps), default=None)

    def source(self, setting: Setting) -> PairedPoint | None:
        """The point whose acceptance tells most about ``setting``: the smallest one that covers it."""
        telling = [point for point in self.points if point.setting != setting and point.tells(setting)]
        return min(telling, key=lambda point: point.setting, default=None)

    def forecast(self, setting: Setting) -> Forecast | None:
        """What to expect of a setting from the others; None when they do not tell its acceptance or its cost."""
        source, cycle = self.source(setting), self.model.cycle(setting) if self.model else None
        if source is None or cycle is None:
            return None
        return Forecast(setting, source.length_at(setting).value or 0.0, cycle, at_most=not setting.chain)

    def curve(self) -> list[Forecast]:
        """All chains up to the longest measured one, by its acceptance and the fitted cost: what the model makes of the whole drafter."""
        chains = [point for point in self.points if point.setting.chain and point.tells(point.setting)]
        longest = max(chains, key=lambda point: point.setting, default=None)
        if longest is None or self.model is None:
            return []
        settings = [Setting(steps, 1, steps + 1) for steps in range(1, longest.setting.steps + 1)]
        cycles = [(setting, self.model.cycle(setting)) for setting in settings]
        return [Forecast(setting, longest.length_at(setting).value or 0.0, cycle, False) for setting, cycle in cycles if cycle is not None]

    def hopeless(self, setting: Setting, margin: float) -> str | None:
        """Why a setting is not worth measuring, None when it is or when that cannot be told."""
        source = self.source(setting)
        if source is None or self.model is None or self.model.worst is None:
            return None
        fitted = self.model.cycle(setting)
        if fitted is None:
            return None
        cycle = fitted * (1 - self.model.worst)
        over = source.best_case(setting, cycle, None)
        if over < 1 - margin:
            length = source.length_at(setting)
            return (
                f"at most {over:.2f} x the baseline: a cycle costs {fitted:.2f} baseline steps, "
                f"the acceptance length is at most {length.high or length.value or 0:.2f}"
            )
        best = self.best
        if best is not None and (over := source.best_case(setting, cycle, best)) < 1 - margin:
            return f"at most {over:.2f} x its best so far, {best.setting}"
        return None

    def next(self, pending: Sequence[Setting]) -> Setting:
        """The one of ``pending`` (at least one) to measure now."""
        for chain in (True, False):
            todo = [setting for setting in pending if setting.chain == chain]
            seen = {point.setting for point in self.points if point.setting.chain == chain}
            if todo and not seen:
                return max(todo)
            if todo and len(seen) == 1:
                return min(todo)
        return max(pending, key=self._expected)

    def _expected(self, setting: Setting) -> tuple[float, Setting]:
        forecast = self.forecast(setting)
        return (float("inf") if forecast is None else forecast.speedup, setting)
