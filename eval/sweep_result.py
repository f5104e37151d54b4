"""What a sweep found: every point with intervals, what a cycle costs, the setting to take, and whether speculation pays at all."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from eval.bench import RESULT
from eval.clients import BASELINE
from eval.command import launch
from eval.cost_model import BRANCH, FIRST_DRAFT, FORWARD, FURTHER_DRAFT, TOKEN, CostModel, Setting
from eval.economics import required_rate
from eval.exploration import Exploration
from eval.sweep_points import Forecast, PairedPoint, Parts, Point, pair
from eyas.config import Config, EngineConfig
from eyas.statistics import Interval, ratio


@dataclass(frozen=True)
class Row:
    """A measured point. ``cycle`` is in baseline steps, and so the acceptance length that breaks even."""

    variant: str
    setting: Setting
    tokens_per_second: Interval
    speedup: Interval
    length: Interval
    conditional: list[float]
    """Acceptance by position, among the cycles that accepted all before it."""
    cycle_ms: float
    cycle: float
    parts: Parts | None
    forecast: Forecast | None
    foretold: float | None
    """The speed-up that was expected before it was measured."""
    looping: int
    """Replies that repeat themselves, and are accepted for it."""
    requests: int


@dataclass(frozen=True)
class Skipped:
    """A point that was not measured."""

    variant: str
    setting: Setting
    reason: str
    foretold: float | None


@dataclass(frozen=True)
class PartCosts:
    """What one more draft costs by the parts that the engine tells, in baseline steps: the first one, and each further one."""

    first: dict[str, float]
    further: dict[str, float]


@dataclass(frozen=True)
class Costs:
    """A drafter's fit, in baseline steps; None is what the measured settings do not tell."""

    variant: str
    settings: int
    error: float | None
    """Largest relative error of a fitted cycle."""
    first_draft: float | None
    further_draft: float | None
    """Of a chain: one more draft forward and one more token to verify."""
    token: float | None
    forward: float | None
    branch: float | None
    parts: PartCosts | None
    verify: dict[int, float]
    """Tokens -> what a verify step of so many costs, by the engine's own parts where it tells them, else by the fit."""
    verify_source: Literal["parts", "fit"] | None
    curve: list[Forecast]
    """Every chain up to the longest one measured, as it is expected to be."""


@dataclass(frozen=True)
class Pretended:
    """One pretended acceptance length."""

    asked: float
    length: float
    tokens_per_second: float
    speedup: float


@dataclass(frozen=True)
class Simulation:
    """A setting with pretended acceptance lengths: where its rate crosses the baseline's."""

    setting: Setting
    points: list[Pretended]
    break_even: float | None
    """Acceptance length; None when more acceptance costs so much more time that there is none."""


@dataclass(frozen=True)
class SweepResult:
    """All that a sweep says."""

    target: str
    engine: str
    prompts: int
    drafters: dict[str, str]
    baseline_tps: Interval
    baseline_legs: list[float]
    """Tokens a second of every baseline measurement, in order."""
    rows: list[Row]
    skipped: list[Skipped]
    failed: list[Skipped]
    costs: list[Costs]
    simulations: list[Simulation]
    best: Row | None
    rivals: list[Row]
    """Points that this many prompts cannot tell from the best."""
    expected_tps: Interval | None
    """Of the best point, at the mean baseline of the sweep."""
    pays: bool | None
    sentence: str
    flags: dict[str, str]
    """Engine -> flags to paste, empty when speculation does not pay."""


def summarise(
    config: Config,
    drafters: Mapping[str, str],
    points: Sequence[Point],
    skipped: Mapping[tuple[str, Setting], str],
    failed: Mapping[tuple[str, Setting], str],
) -> SweepResult:
    """Everything that follows from the points of a sweep."""
    resamples, seed = config.eval.bootstrap, config.seed
    baselines = [point for point in points if point.setting is None]
    real = pair([point for point in points if point.simulated is None], resamples, seed)
    baseline_tps = _rate(baselines, resamples, seed)
    baseline_ms = 1000 / baseline_tps.value if baseline_tps.value else 0.0
    known = {name: Exploration.of([point for point in real if point.point.variant == name], baseline_ms) for name in drafters}
    costs = [_costs(name, found, found.model) for name, found in known.items() if found.model]
    best = max(real, key=lambda point: (point.gain, -point.setting.steps, point.point.variant == RESULT), default=None)
    rivals = [point for point in real if best is not None and point is not best and not point.against(best).excludes(1.0)]
    simulations = _simulations([point for point in points if point.simulated or point.setting is None], resamples, seed)
    pays = _pays(best.speedup()) if best else None
    return SweepResult(
        target=config.target.model,
        engine=config.engine.kind,
        prompts=max((len(point.samples) for point in points), default=0),
        drafters=dict(drafters),
        baseline_tps=baseline_tps,
        baseline_legs=[point.tokens / point.seconds for point in baselines],
        rows=[_row(point) for point in sorted(real, key=lambda point: (list(drafters).index(point.point.variant), point.setting))],
        skipped=_not_measured(skipped, known),
        failed=_not_measured(failed, known),
        costs=costs,
        simulations=simulations,
        best=_row(best) if best else None,
        rivals=[_row(point) for point in rivals],
        expected_tps=_scaled(best.speedup(), baseline_tps.value or 0.0) if best else None,
        pays=pays,
        sentence=_sentence(best, pays, baseline_ms, costs, simulations),
        flags=paste(config, best.setting, drafters[best.point.variant]) if best and pays is not False else {},
    )


def _rate(points: Sequence[Point], resamples: int, seed: int) -> Interval:
    """Decoding rate over several measurements of the same prompts; a prompt's are drawn together."""
    by_key: dict[str, list[float]] = {}
    for sample in (sample for point in points for sample in point.samples):
        sums = by_key.setdefault(sample.key, [0.0, 0.0])
        sums[0] += sample.decode_tokens
        sums[1] += sample.decode_s
    return ratio([tokens for tokens, _ in by_key.values()], [seconds for _, seconds in by_key.values()], resamples, seed)


def _scaled(interval: Interval, factor: float) -> Interval:
    value, low, high = (None if end is None else factor * end for end in (interval.value, interval.low, interval.high))
    return Interval(value, low, high, interval.count)


def _row(point: PairedPoint) -> Row:
    forecast = point.point.forecast
    return Row(
        variant=point.point.variant,
        setting=point.setting,
        tokens_per_second=point.tokens_per_second(),
        speedup=point.speedup(),
        length=point.length(),
        conditional=point.conditional(),
        cycle_ms=point.cycle_ms,
        cycle=point.cycle,
        parts=point.parts(),
        forecast=forecast,
        foretold=forecast.speedup if forecast else None,
        looping=sum(sample.looping for sample in point.point.samples),
        requests=len(point.point.samples),
    )


def _not_measured(reasons: Mapping[tuple[str, Setting], str], known: Mapping[str, Exploration]) -> list[Skipped]:
    found = []
    for (name, setting), reason in reasons.items():
        forecast = known[name].forecast(setting)
        found.append(Skipped(name, setting, reason, forecast.speedup if forecast else None))
    return found


def _costs(name: str, known: Exploration, model: CostModel) -> Costs:
    told = [(point, parts) for point in known.points if (parts := point.parts()) is not None]
    verify = {point.setting.tokens: parts.verify_ms / point.baseline_ms for point, parts in told}
    source: Literal["parts", "fit"] | None = "parts" if verify else None
    if not verify:
        fitted = {point.setting.tokens: model.verify(point.setting.tokens) for point in known.points}
        verify = {tokens: cost for tokens, cost in fitted.items() if cost is not None}
        source = "fit" if verify else None
    return Costs(
        variant=name,
        settings=len({point.setting for point in known.points}),
        error=model.worst,
        first_draft=model.cost(FIRST_DRAFT),
        further_draft=model.cost(FURTHER_DRAFT),
        token=model.cost(TOKEN),
        forward=model.cost(FORWARD),
        branch=model.cost(BRANCH),
        parts=_part_costs(told),
        verify=dict(sorted(verify.items())),
        verify_source=source,
        curve=known.curve(),
    )


def _part_costs(told: Sequence[tuple[PairedPoint, Parts]]) -> PartCosts | None:
    """Each part as a straight line over the number of steps (the engine that tells parts drafts chains)."""
    steps = [point.setting.steps for point, _ in told]
    if len(set(steps)) < 2:
        return None
    first, further = dict[str, float](), dict[str, float]()
    for name in ("verify", "extend", "rest"):
        slope, offset = np.polyfit(steps, [getattr(parts, f"{name}_ms") / point.baseline_ms for point, parts in told], 1)
        first[name], further[name] = float(offset + slope), float(slope)
    first["verify"] -= 1  # the baseline's own step
    forwards = [(parts.forward_ms / point.baseline_ms, point.setting.steps - 1) for point, parts in told if parts.forward_ms is not None]
    further["forward"] = sum(cost * count for cost, count in forwards) / sum(count for _, count in forwards)
    return PartCosts(first, further)


def _simulations(points: Sequence[Point], resamples: int, seed: int) -> list[Simulation]:
    by_setting: dict[Setting, list[PairedPoint]] = {}
    for point in pair(points, resamples, seed):
        by_setting.setdefault(point.setting, []).append(point)
    found = []
    for setting, measured in sorted(by_setting.items()):
        rows = [
            Pretended(
                point.point.simulated or 0.0,
                point.length().value or 0.0,
                point.tokens_per_second().value or 0.0,
                point.gain,
            )
            for point in sorted(measured, key=lambda point: point.point.simulated or 0.0)
        ]
        found.append(Simulation(setting, rows, _crossing(rows)))
    return found


def _crossing(rows: Sequence[Pretended]) -> float | None:
    """The acceptance length L with L = cycle(L), the cycle in baseline steps as a straight line through what was measured."""
    lengths, cycles = [row.length for row in rows], [row.length / row.speedup for row in rows]
    slope, offset = np.polyfit(lengths, cycles, 1) if len(set(lengths)) > 1 else (0.0, cycles[0])
    return float(offset / (1 - slope)) if slope < 1 else None


def _pays(speedup: Interval) -> bool | None:
    if speedup.value is None or not speedup.excludes(1.0):
        return None
    return speedup.value > 1


def _sentence(
    best: PairedPoint | None, pays: bool | None, baseline_ms: float, costs: Sequence[Costs], simulations: Sequence[Simulation]
) -> str:
    if best is None:
        return _simulated_sentence(simulations, baseline_ms)
    name, setting, speedup = best.point.variant, best.setting, best.speedup()
    rate, was = best.gain * 1000 / baseline_ms, 1000 / baseline_ms
    over = f"{best.gain:.2f} x" + (f" ({speedup.low:.2f} to {speedup.high:.2f})" if speedup.low is not None else "")
    if pays:
        return f"Speculation pays here: {name} at {setting} decodes {rate:.1f} tok/s instead of {was:.1f}, {over}."
    if pays is None:
        return (
            f"Whether speculation pays here cannot be told: {name} at {setting}, the fastest point, decodes {rate:.1f} tok/s instead of "
            f"{was:.1f}, {over}. Take more prompts (sweep.prompts, or `eyas bench`)."
        )
    found = next(cost for cost in costs if cost.variant == name)
    return (
        f"Speculation does not pay here, because {_what_it_costs(best, found)}; {_what_it_takes(best)} "
        f"{name} reaches {best.length().value or 0:.2f} at {setting}, its fastest point: {rate:.1f} tok/s instead of {was:.1f}."
    )


def _what_it_costs(best: PairedPoint, costs: Costs) -> str:
    tokens, cycle = best.setting.tokens, f"{best.cycle * best.baseline_ms:.1f} ms = {best.cycle:.2f} baseline steps"
    verify = costs.verify.get(tokens)
    if verify is None:
        return f"a draft+verify cycle of {tokens} tokens costs {cycle}"
    return (
        f"a verify step of {tokens} tokens costs {verify * best.baseline_ms:.1f} ms = {verify:.2f} baseline steps "
        f"(with its drafting, a cycle costs {cycle})"
    )


def _what_it_takes(best: PairedPoint) -> str:
    steps, needed = best.setting.steps, best.cycle
    rate = required_rate(needed, steps)
    if rate is None:
        return f"it would take an acceptance length of {needed:.2f}, more than the {steps + 1} that {best.setting} can bring."
    return f"it would take an acceptance length of {needed:.2f} (each draft accepted in {rate:.0%} of the cycles that reach it)."


def _simulated_sentence(simulations: Sequence[Simulation], baseline_ms: float) -> str:
    reachable = [found for found in simulations if found.break_even is not None]
    if not reachable:
        return "Nothing was measured yet."
    least = min(reachable, key=lambda found: found.break_even or 0.0)
    return (
        f"With pretended acceptance, speculation pays from an acceptance length of {least.break_even or 0:.2f} on, at {least.setting} "
        f"(baseline {1000 / baseline_ms:.1f} tok/s)."
    )


def paste(config: Config, setting: Setting, drafter: str) -> dict[str, str]:
    """Engine -> the flags by which a speculating server differs from its baseline; vLLM drafts no trees."""
    found = {}
    for kind in ("sglang", "vllm") if setting.chain else ("sglang",):
        values = {"kind": kind, "draft_steps": setting.steps, "topk": setting.topk, "draft_tokens": setting.tokens}
        own = {"draft_flags": config.engine.draft_flags} if kind == config.engine.kind else {}
        served = config.model_copy(update={"engine": EngineConfig.model_validate(values | own)})
        plain, speculating = (launch(served, name, drafter, port=1).command for name in (BASELINE, RESULT))
        found[kind] = shlex.join(speculating[len(plain) :])  # speculation adds its flags behind all others
    return found
