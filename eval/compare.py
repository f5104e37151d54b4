"""Two benches of the same thing that came out differently: by how much, and what else differs between them.

    eyas compare checkpoints/kimi-k2.5 checkpoints/kimi-k2.5/bench.1          output folders, or bench folders
    eyas compare ONE OTHER --json

Speeds are compared prompt by prompt on the prompts that both have. What differs is ranked by how likely it explains the change
(eval/run_differences.py); a ranking is no proof, it tells what to set back first.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table

from eval.arguments import argument_text
from eval.clients import BASELINE
from eval.concurrency import shares
from eval.conditions import read_conditions
from eval.measurement import Measurement, read_measurements
from eval.run_differences import Cause, Run, causes
from eyas.errors import EyasError
from eyas.manifest import NAME, read_manifest
from eyas.statistics import Interval, paired_quotient, ratio

RESAMPLES = 2000


@dataclass(frozen=True)
class Change:
    """One quantity of one variant in both runs; ``change`` is second over first, paired by prompt."""

    first: Interval
    second: Interval
    change: Interval


@dataclass(frozen=True)
class VariantChange:
    """One variant at one level of concurrency, on the prompts that both runs have."""

    name: str
    concurrency: int
    prompts: int
    tokens_per_second: Change
    decode_tokens_per_second: Change
    length: Change | None
    cycle_ms: Change | None


@dataclass(frozen=True)
class Comparison:
    """Two runs side by side."""

    first: str
    second: str
    began: list[str | None]
    prompts: list[int]
    common: int
    variants: list[VariantChange]
    causes: list[Cause]
    """Likeliest first."""
    findings: list[str]
    """In sentences, the main one first."""


def compare_runs(first: Path, second: Path, resamples: int = RESAMPLES, seed: int = 0) -> Comparison:
    """Compare two runs; each is an output folder or its bench folder.

    Raises EyasError when one is neither, or when nothing was measured under the same variant in both.
    """
    runs = (_open(first), _open(second))
    variants = _variants(runs, resamples, seed)
    if not variants:
        names = [", ".join(sorted({m.variant for m in run.measurements})) or "nothing" for run in runs]
        raise EyasError(f"{first} and {second} have no variant measured in both at the same level ({names[0]}; {names[1]})")
    found = causes(runs, _direction(variants))
    keys = [{m.key for m in run.measurements} for run in runs]
    return Comparison(
        first=str(runs[0].folder),
        second=str(runs[1].folder),
        began=[_began(run) for run in runs],
        prompts=[len(found) for found in keys],
        common=len(keys[0] & keys[1]),
        variants=variants,
        causes=found,
        findings=_findings(variants, found),
    )


def _open(path: Path) -> Run:
    folder = path if (path / NAME).exists() and read_manifest(path).kind == "bench" else path / "bench"
    if not (folder / NAME).exists():
        raise EyasError(f"{path} is no run: neither it nor {folder} is a bench folder; give an output folder of `eyas bench`")
    return Run(folder, read_manifest(folder, "bench"), read_measurements(folder), read_conditions(folder))


def _began(run: Run) -> str | None:
    moments = [m.sent_at for m in run.measurements if m.sent_at]
    return datetime.fromtimestamp(min(moments)).astimezone().isoformat(" ", "minutes") if moments else None


def _variants(runs: tuple[Run, Run], resamples: int, seed: int) -> list[VariantChange]:
    sides = [_by_prompt(run.measurements) for run in runs]
    found = []
    for name, level in sorted(set(sides[0]) & set(sides[1]), key=lambda place: (place[1], place[0] != BASELINE, place[0])):
        one, other = sides[0][name, level], sides[1][name, level]
        keys = sorted(set(one) & set(other))
        if not keys:
            continue

        def change(top: str, bottom: str, one: _Prompts = one, other: _Prompts = other, keys: list[str] = keys) -> Change:
            columns = [[side[key][column] for key in keys] for side in (one, other) for column in (top, bottom)]
            return Change(
                ratio(columns[0], columns[1], resamples, seed),
                ratio(columns[2], columns[3], resamples, seed),
                paired_quotient(columns[2], columns[3], columns[0], columns[1], resamples, seed),
            )

        speculating = name != BASELINE
        found.append(
            VariantChange(
                name=name,
                concurrency=level,
                prompts=len(keys),
                tokens_per_second=change("tokens", "share_s"),
                decode_tokens_per_second=change("decode_tokens", "decode_s"),
                length=change("emitted", "verify_ct") if speculating else None,
                cycle_ms=change("decode_ms", "verify_ct") if speculating else None,
            )
        )
    return found


_Prompts = dict[str, dict[str, float]]
"""Key of the prompt -> means over its legs."""


def _by_prompt(measurements: Sequence[Measurement]) -> dict[tuple[str, int], _Prompts]:
    """(variant, level) -> prompts."""
    rows: dict[tuple[str, int], dict[str, list[dict[str, float]]]] = defaultdict(lambda: defaultdict(list))
    for measured, share_s in zip(measurements, shares(measurements), strict=True):
        rows[measured.variant, measured.concurrency][measured.key].append(
            {
                "tokens": measured.completion_tokens,
                "share_s": share_s,
                "decode_tokens": measured.decode_tokens,
                "decode_s": measured.decode_s,
                "decode_ms": 1000 * measured.decode_s,
                "emitted": measured.emitted,
                "verify_ct": measured.verify_ct or 0,
            }
        )
    return {
        place: {key: {name: sum(leg[name] for leg in legs) / len(legs) for name in legs[0]} for key, legs in prompts.items()}
        for place, prompts in rows.items()
    }


def _direction(variants: Sequence[VariantChange]) -> int:
    """-1 when the second run is slower beyond doubt, 1 when faster, 0 when that cannot be told; of the baseline, where there is one."""
    change = variants[0].tokens_per_second.change
    if change.value is None or not change.excludes(1.0):
        return 0
    return 1 if change.value > 1 else -1


def _findings(variants: Sequence[VariantChange], differing: Sequence[Cause]) -> list[str]:
    found = [_speed(variant) for variant in variants]
    found += [line for variant in variants if (line := _why(variant))]
    baseline, drafted = (next((v for v in variants if (v.name == BASELINE) == is_base), None) for is_base in (True, False))
    if baseline is not None and drafted is not None:
        moved = baseline.tokens_per_second.change.excludes(1.0)
        if moved:
            found.append("The server without speculation changed too: the machine or the engine did it, not the drafter.")
        elif drafted.tokens_per_second.change.excludes(1.0):
            found.append("The server without speculation did not change: look at the drafter and the flags of speculation.")
    if not differing:
        found.append("Nothing that was recorded differs.")
    elif variants[0].tokens_per_second.change.excludes(1.0):
        first = differing[0]
        found.append(f"Look first at {first.name}: {argument_text(first.first)} -> {argument_text(first.second)}.")
    return found


def _speed(variant: VariantChange) -> str:
    speed = variant.tokens_per_second
    if speed.first.value is None or speed.second.value is None or speed.change.value is None:
        return f"{_name(variant)}: nothing was decoded."
    judged = "no difference that the data can tell"
    if speed.change.excludes(1.0):
        judged = "faster" if speed.change.value > 1 else "slower"
    return (
        f"{_name(variant)}: {speed.first.value:.1f} -> {speed.second.value:.1f} tok/s, "
        f"{100 * (speed.change.value - 1):+.1f} % {_ends(speed.change)}: {judged}."
    )


def _why(variant: VariantChange) -> str:
    """A drafter's change taken apart: tokens a verify step, and time of a cycle."""
    if variant.length is None or variant.cycle_ms is None or variant.length.change.value is None or variant.cycle_ms.change.value is None:
        return ""
    length, cycle = variant.length, variant.cycle_ms
    return (
        f"{_name(variant)}: acceptance length {length.first.value:.2f} -> {length.second.value:.2f} "
        f"({100 * (length.change.value or 0) - 100:+.1f} %), cycle {cycle.first.value:.1f} -> {cycle.second.value:.1f} ms "
        f"({100 * (cycle.change.value or 0) - 100:+.1f} %)."
    )


def _name(variant: VariantChange) -> str:
    name = "no speculation" if variant.name == BASELINE else variant.name
    return name if variant.concurrency == 1 else f"{name}, {variant.concurrency} in flight"


def _ends(change: Interval) -> str:
    if change.low is None or change.high is None:
        return "(no interval)"
    return f"({100 * (change.low - 1):+.1f} to {100 * (change.high - 1):+.1f} %)"


def comparison_json(comparison: Comparison) -> dict[str, Any]:
    """Everything, for other programs."""
    return {"format": 1, **asdict(comparison)}


def comparison_text(comparison: Comparison) -> RenderableType:
    """For a terminal."""
    lines: list[RenderableType] = [
        f"first:  {comparison.first}, {comparison.began[0] or 'time not recorded'}, {comparison.prompts[0]} prompts",
        f"second: {comparison.second}, {comparison.began[1] or 'time not recorded'}, {comparison.prompts[1]} prompts",
        f"compared on the {comparison.common} prompts of both\n",
        *comparison.findings,
    ]
    if comparison.causes:
        table = Table(title="\nWhat differs, likeliest explanation first", title_justify="left", box=None, pad_edge=False)
        for column in ("what", "first", "second", ""):
            table.add_column(column, overflow="fold")
        for cause in comparison.causes:
            table.add_row(f"{cause.kind}: {cause.name}", argument_text(cause.first), argument_text(cause.second), cause.note)
        lines.append(table)
    return Group(*lines)
