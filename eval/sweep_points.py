"""Points of a sweep: one drafter (or none) at one setting, as a line of ``sweep/points.jsonl``, and what follows from one.

A point is measured over a handful of prompts, the same ones at every point, so points are compared prompt by prompt (eyas/statistics.py).
Rates are of decoding, from the first token on. A point's baseline is what ran nearest to it: the baseline requests of its own server start
where speculation is switched per request (embedded), else the baseline servers before and after it.
"""

import itertools
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from eval.cost_model import Setting
from eval.measurement import Measurement
from eyas.errors import EyasError
from eyas.files import JsonlAppender, read_jsonl
from eyas.statistics import Floats, Interval, bootstrap, quotient, ratio

POINTS = "points.jsonl"


@dataclass(frozen=True)
class Forecast:
    """What is expected of a setting of a drafter before it is measured there."""

    setting: Setting
    length: float
    """Tokens a verify step emits."""
    cycle: float
    """Baseline steps a cycle costs."""
    at_most: bool
    """True for a tree: its acceptance is that of a larger tree, cut to its depth, and cannot be more."""

    @property
    def speedup(self) -> float:
        """Decoding rate over the baseline's."""
        return self.length / self.cycle


@dataclass(frozen=True)
class Point:
    """A line of points.jsonl. ``setting`` is None for the baseline."""

    variant: str
    setting: Setting | None
    simulated: float | None
    """The acceptance length that the engine was told to pretend; None for a drafter's own."""
    start: int
    """Number of the server start that it was measured in, counted over all runs."""
    made_from: str
    """Digest of all that decides the numbers: rows with another one do not belong to this sweep."""
    wall_s: float
    forecast: Forecast | None
    """What was expected before it was measured, where that was known."""
    samples: list[Measurement]

    @property
    def tokens(self) -> int:
        """Decoded tokens."""
        return sum(sample.decode_tokens for sample in self.samples)

    @property
    def seconds(self) -> float:
        """Seconds of decoding."""
        return sum(sample.decode_s for sample in self.samples)

    @property
    def cycles(self) -> int:
        """Verify steps."""
        return sum(sample.verify_ct or 0 for sample in self.samples)


def read_points(folder: Path) -> list[Point]:
    """All points of a sweep folder, none when there is no file. Raises EyasError naming file and line for a broken one."""
    path = Path(folder) / POINTS
    if not path.exists():
        return []
    with JsonlAppender(path):  # a killed run may have left a torn last line: opening for appending cuts it off
        pass
    return [_point(row, f"{path}, line {line}") for line, row in read_jsonl(path)]


def _point(row: dict[str, Any], where: str) -> Point:
    try:
        forecast, setting = row["forecast"], row["setting"]
        return Point(
            **row
            | {
                "setting": Setting(**setting) if setting else None,
                "forecast": Forecast(**forecast | {"setting": Setting(**forecast["setting"])}) if forecast else None,
                "samples": [Measurement(**values) for values in row["samples"]],
            }
        )
    except (KeyError, TypeError) as error:
        raise EyasError(f"{where}: not a point of this version's sweep ({error!r}); remove the line or the file") from None


def append_point(folder: Path, point: Point) -> None:
    """Add a finished point."""
    with JsonlAppender(Path(folder) / POINTS) as file:
        file.append(asdict(point))


class PairedPoint:
    """A point beside its baseline, paired by prompt, and the numbers that follow.

    Raises EyasError when the baseline was not measured on the same prompts.
    """

    def __init__(self, point: Point, baselines: Sequence[Point], resamples: int, seed: int) -> None:
        self.point, self.resamples, self.seed = point, resamples, seed
        beside: dict[str, list[Measurement]] = {sample.key: [] for sample in point.samples}
        for sample in (sample for baseline in baselines for sample in baseline.samples):
            if sample.key in beside:
                beside[sample.key].append(sample)
        if not all(beside.values()):
            raise EyasError(f"sweep: {point.variant} at {point.setting} has prompts that no baseline was measured on")
        self._columns = [
            [float(sample.decode_tokens) for sample in point.samples],
            [sample.decode_s for sample in point.samples],
            [float(sum(sample.decode_tokens for sample in samples)) for samples in beside.values()],
            [sum(sample.decode_s for sample in samples) for samples in beside.values()],
        ]

    @property
    def setting(self) -> Setting:
        """Where it was measured."""
        assert self.point.setting is not None
        return self.point.setting

    @property
    def baseline_ms(self) -> float:
        """Milliseconds of a baseline token beside this point."""
        return 1000 * sum(self._columns[3]) / sum(self._columns[2])

    @property
    def cycle_ms(self) -> float:
        """Milliseconds of a draft+verify cycle as the client sees it."""
        return 1000 * self.point.seconds / self.point.cycles

    @property
    def cycle(self) -> float:
        """Baseline steps of a cycle: the acceptance length that breaks even."""
        return self.cycle_ms / self.baseline_ms

    @property
    def gain(self) -> float:
        """``speedup`` without its interval."""
        return float(_speedup(np.array(self._columns).sum(axis=-1)))

    def tokens_per_second(self) -> Interval:
        """Decoding rate."""
        return ratio(self._columns[0], self._columns[1], self.resamples, self.seed)

    def length(self) -> Interval:
        """Acceptance length: tokens emitted a verify step."""
        samples = self.point.samples
        return ratio([s.emitted for s in samples], [s.verify_ct or 0 for s in samples], self.resamples, self.seed)

    def speedup(self) -> Interval:
        """Decoding rate over the baseline's."""
        return bootstrap(self._columns, _speedup, self.resamples, self.seed)

    def against(self, other: "PairedPoint") -> Interval:
        """This speed-up over another point's, paired by prompt."""
        columns = [*self._columns, *other._columns]
        return bootstrap(columns, lambda sums: quotient(_speedup(sums[..., :4]), _speedup(sums[..., 4:])), self.resamples, self.seed)

    def conditional(self) -> list[float]:
        """Share of the cycles that accepted all drafts before a position which accepted that one too, as far as any got."""
        cycles = [sum(reached(sample, drafts) for sample in self.point.samples) for drafts in range(self.setting.steps + 1)]
        return [after / before for before, after in itertools.pairwise(cycles) if before]

    def tells(self, setting: Setting) -> bool:
        """True when this point's acceptance by position says what that setting's can be."""
        return self.setting.covers(setting) and all(sample.histogram for sample in self.point.samples if sample.verify_ct)

    def length_at(self, setting: Setting) -> Interval:
        """Acceptance length to expect at a setting that ``tells`` allows, from the acceptance at its positions.

        The share of cycles that accept at least j drafts does not depend on how many more are drafted, so the length at s steps is the
        sum of those shares for j = 0 .. s. What the ends of replies cut off here is taken to be cut off there as well.
        """
        return ratio(*self._depths(setting), self.resamples, self.seed)

    def best_case(self, setting: Setting, cycle: float, best: "PairedPoint | None") -> float:
        """The most that a setting can bring with this point's acceptance when its cycle costs ``cycle`` baseline steps.

        It is the upper end of the interval of its speed-up over that of ``best``, paired by prompt, since what makes a prompt easy makes
        it easy at both settings; over the baseline when ``best`` is None.
        """
        if best is None:
            over = self.length_at(setting)
            return (over.high or over.value or 0.0) / cycle
        columns = [*self._depths(setting), *best._columns]
        over = bootstrap(
            columns,
            lambda sums: quotient(quotient(sums[..., 0], sums[..., 1]) / cycle, _speedup(sums[..., 2:])),
            self.resamples,
            self.seed,
        )
        return over.high or over.value or 0.0

    def _depths(self, setting: Setting) -> tuple[list[float], list[float]]:
        """By prompt: tokens that the cycles would have emitted at ``setting``, and the cycles."""
        samples = self.point.samples
        kept = sum(s.emitted for s in samples) / sum((s.verify_ct or 0) + (s.correct or 0) for s in samples)
        tokens = [kept * sum(reached(s, drafts) for drafts in range(setting.steps + 1)) for s in samples]
        return tokens, [float(reached(s, 0)) for s in samples]

    def parts(self) -> "Parts | None":
        """Milliseconds a cycle by part, where the engine tells them."""
        told = [sample.parts.get("seconds", {}) for sample in self.point.samples]
        seconds = {name: sum(float(values.get(name, 0.0)) for values in told) for name in ("verify", "extend", "draft")}
        if not seconds["verify"]:
            return None
        verify, extend, draft = (1000 * seconds[name] / self.point.cycles for name in ("verify", "extend", "draft"))
        forwards = self.setting.steps - 1
        forward = draft / forwards if forwards else None  # with one step the engine's draft part is bookkeeping
        return Parts(verify, extend, forward, self.cycle_ms - verify - extend - forwards * (forward or 0.0))


@dataclass(frozen=True)
class Parts:
    """Milliseconds of a cycle by part. ``rest_ms`` is what no part accounts for: HTTP, the client, the drafter's pass over the prompt."""

    verify_ms: float
    extend_ms: float
    forward_ms: float | None
    """One draft forward; None with one step, which has none."""
    rest_ms: float


def pair(points: Sequence[Point], resamples: int, seed: int) -> list[PairedPoint]:
    """Every speculating point, in the order measured, beside its baseline: that of its own server start, else the nearest on both sides.

    Points that no baseline was measured with (a run killed before) are left out.
    """
    paired = []
    for place, point in enumerate(points):
        if point.setting is None:
            continue
        own = [other for other in points if other.setting is None and other.start == point.start]
        before = [other for other in points[:place] if other.setting is None][-1:]
        after = [other for other in points[place:] if other.setting is None][:1]
        baselines = own or [*before, *after]
        if baselines:
            paired.append(PairedPoint(point, baselines, resamples, seed))
    return paired


def reached(sample: Measurement, drafts: int) -> int:
    """Cycles of a request that accepted at least so many drafts."""
    return sum(sample.histogram[drafts:])


def _speedup(sums: Floats) -> Floats:
    """Columns tokens, seconds, baseline tokens, baseline seconds."""
    return quotient(quotient(sums[..., 0], sums[..., 1]), quotient(sums[..., 2], sums[..., 3]))
