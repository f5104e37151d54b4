"""When speculation pays: what a cycle costs, how many tokens it must bring, and which acceptance brings them.

A cycle with s drafts (top-k 1) costs verify(s+1) + extend(s+1) + (s-1) drafts + overhead: the target checks the s drafts and the token
before them, the drafter then recomputes its keys from the target's true states for those s+1 positions, which yields the next first
draft, and each further draft is one forward of one token. It emits L tokens, so decoding runs at L / cycle tokens a second, and
against a baseline of B tokens a second it breaks even at L = cycle x B.

With conditional acceptance r at every position, k drafts bring 1 + r + r^2 + ... + r^k tokens a cycle; an endless chain 1 / (1 - r).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.table import Table

from eyas.errors import EyasError

PLANNED_DRAFTS = (2, 3, 4, 5, 7)


@dataclass(frozen=True)
class CycleCost:
    """Measured milliseconds of the parts of a cycle with ``steps`` drafts, and of the baseline.

    ``baseline_ms`` is a baseline token as the client sees it, ``single_ms`` the target's forward of one position in it, ``verify_ms`` and
    ``extend_ms`` the target's and the drafter's forward over ``steps`` + 1 positions, ``draft_ms`` one draft forward (of one position; None
    where a cycle has none, with one draft).
    """

    steps: int
    baseline_ms: float
    single_ms: float
    verify_ms: float
    extend_ms: float
    draft_ms: float | None
    overhead_ms: float

    def verify(self, tokens: int) -> float:
        """Target forward over ``tokens`` positions: a straight line through one position and the measured verify step."""
        return self._line(tokens, self.single_ms, self.verify_ms)

    def extend(self, tokens: int) -> float:
        """Drafter forward over ``tokens`` positions: a straight line through a draft (1 token) and the measured extend.

        Without a measured draft the extend is taken to cost the same at any length.
        """
        return self._line(tokens, self._draft(), self.extend_ms)

    def _line(self, tokens: int, one: float, measured: float) -> float:
        # A longer forward is never cheaper: timing noise must not become a negative slope that is extrapolated.
        slope = max(measured - one, 0.0) / self.steps
        return measured + slope * (tokens - self.steps - 1)

    def cycle(self, steps: int) -> float:
        """Milliseconds of a cycle with ``steps`` drafts."""
        return self.verify(steps + 1) + self.extend(steps + 1) + (steps - 1) * self._draft() + self.overhead_ms

    def _draft(self) -> float:
        return self.extend_ms if self.draft_ms is None else self.draft_ms


@dataclass(frozen=True)
class Prediction:
    """What another number of drafts would bring."""

    steps: int
    length: float
    """Tokens a cycle."""
    cycle_ms: float
    tokens_per_second: float
    break_even: float
    """Tokens a cycle at which this number of drafts equals the baseline."""
    extrapolated: bool
    """True beyond the measured number of drafts, where the last measured conditional rate is carried on."""


def break_even(cycle_ms: float, baseline_tps: float) -> float:
    """Tokens per cycle at which speculation is exactly as fast as the baseline."""
    return cycle_ms / 1000 * baseline_tps


def chain_length(conditional: Sequence[float], steps: int) -> float:
    """Tokens a cycle of ``steps`` drafts, from conditional acceptance rates by position; the last one is carried on beyond them."""
    if not conditional:
        return 1.0
    reached, length = 1.0, 1.0
    for position in range(steps):
        reached *= conditional[min(position, len(conditional) - 1)]
        length += reached
    return length


def predict(cost: CycleCost, conditional: Sequence[float], steps: Sequence[int]) -> list[Prediction]:
    """Tokens a second for each number of drafts, from the cost of the measured one and its conditional acceptance rates."""
    predictions = []
    for count in steps:
        length, cycle_ms = chain_length(conditional, count), cost.cycle(count)
        predictions.append(
            Prediction(
                steps=count,
                length=length,
                cycle_ms=cycle_ms,
                tokens_per_second=1000 * length / cycle_ms,
                break_even=break_even(cycle_ms, 1000 / cost.baseline_ms),
                extrapolated=count > cost.steps,
            )
        )
    return predictions


def best(predictions: Sequence[Prediction]) -> Prediction:
    """The fastest; among equals the one with the fewest drafts."""
    return max(predictions, key=lambda prediction: (prediction.tokens_per_second, -prediction.steps))


@dataclass(frozen=True)
class Plan:
    """What acceptance a cycle time and a wished speed demand."""

    baseline_tps: float
    cycle_ms: float
    want_tps: float | None
    length: float
    """Tokens a cycle that are needed (to break even, or for ``want_tps``)."""
    conditional: dict[int, float | None]
    """Number of drafts -> the conditional acceptance that brings them; None where even acceptance 1 does not."""
    endless: float
    """The same for a chain without end, the least that any number of drafts needs."""


def plan(baseline_tps: float, cycle_ms: float, want_tps: float | None = None) -> Plan:
    """The acceptance that pays (or that ``want_tps`` needs), at a cycle time taken as the same for every number of drafts.

    Raises EyasError for values that are no positive numbers, or that look like another unit.
    """
    _require("baseline-tps", baseline_tps, "tokens a second", 1e-3, 1e6)
    _require("cycle-ms", cycle_ms, "milliseconds", 0.0, math.inf)
    _require_milliseconds(cycle_ms, baseline_tps)
    if want_tps is not None:
        _require("want-tps", want_tps, "tokens a second", 1e-3, 1e6)
    length = break_even(cycle_ms, baseline_tps if want_tps is None else want_tps)
    conditional = {drafts: required_rate(length, drafts) for drafts in PLANNED_DRAFTS}
    return Plan(baseline_tps, cycle_ms, want_tps, length, conditional, max(0.0, 1 - 1 / length))


def required_rate(length: float, drafts: int) -> float | None:
    """The r in [0, 1] with 1 + r + ... + r^drafts = length; 0 when one token is enough, None when not even r = 1 does."""
    if length <= 1:
        return 0.0
    if length > drafts + 1:
        return None
    low, high = 0.0, 1.0
    for _ in range(60):  # halving: past the precision of a double
        middle = (low + high) / 2
        if chain_length([middle], drafts) < length:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def _require(name: str, value: float, unit: str, least: float, most: float) -> None:
    if not math.isfinite(value) or value <= 0:
        raise EyasError(f"--{name} must be a positive number of {unit}, got {value:g}")
    if not least <= value <= most:
        raise EyasError(f"--{name} {value:g} is no plausible number of {unit} (expected {least:g} to {most:g})")


def _require_milliseconds(cycle_ms: float, baseline_tps: float) -> None:
    step_ms = 1000 / baseline_tps
    if cycle_ms < 0.1 * step_ms:
        raise EyasError(
            f"--cycle-ms {cycle_ms:g} is far below one baseline step ({step_ms:.4g} ms at {baseline_tps:g} tok/s); "
            f"it is in milliseconds: if you meant {cycle_ms:g} seconds, give {cycle_ms * 1000:g}"
        )
    if cycle_ms > 10_000 or cycle_ms > 1000 * step_ms:
        raise EyasError(
            f"--cycle-ms {cycle_ms:g} is {cycle_ms / 1000:.4g} seconds a cycle, {cycle_ms / step_ms:,.0f} baseline steps; "
            f"it is in milliseconds: if you meant microseconds, give {cycle_ms / 1000:g}"
        )


def plan_table(result: Plan) -> RenderableType:
    """The plan for a terminal."""
    table = Table(title=None, show_edge=False, pad_edge=False)
    table.add_column("drafts", justify="right")
    table.add_column("conditional acceptance needed", justify="right")
    for drafts, rate in result.conditional.items():
        table.add_row(str(drafts), f"impossible (at most {drafts + 1} tokens a cycle)" if rate is None else f"{rate:.3f}")
    table.add_row("endless", f"{result.endless:.3f}")
    step_ms = 1000 / result.baseline_tps
    lines = [f"baseline {result.baseline_tps:g} tok/s ({step_ms:.2f} ms a token), cycle {result.cycle_ms:g} ms"]
    if result.want_tps is None:
        lines.append(f"break-even: [bold]{result.length:.3f}[/bold] tokens a cycle")
    else:
        lines.append(f"break-even: {break_even(result.cycle_ms, result.baseline_tps):.3f} tokens a cycle")
        lines.append(f"for {result.want_tps:g} tok/s: [bold]{result.length:.3f}[/bold] tokens a cycle")
    if result.length <= 1:
        lines.append("one token a cycle is enough: any acceptance will do")
    lines.append("the cycle is taken to cost the same for every number of drafts; longer chains cost more")
    return Group(*lines, "", table)
