"""What differs between two runs, and how likely it explains a difference in speed.

Ranked by weight: what makes the two incomparable first (other prompts, another target), then what is known to decide speed (engine, flags,
link, NCCL variables; clocks, throttling and load that moved the way the speed did), then what merely differs.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eval.arguments import comparable
from eval.clients import BASELINE
from eval.measurement import Measurement
from eyas.manifest import Manifest

CLOCK_SHARE, CPU_CLOCK_SHARE, LOAD_PER_CORE, DEGREES, THROTTLED = 0.02, 0.03, 0.1, 5.0, 0.05
"""Differences below these are how a machine breathes, not what explains a drift."""


@dataclass(frozen=True)
class Cause:
    """Something that differs, and how likely it explains a difference in speed."""

    kind: str
    name: str
    first: Any
    second: Any
    weight: int
    """0 to 100; the ranking, nothing more."""
    note: str


@dataclass(frozen=True)
class Run:
    """A bench folder that was read."""

    folder: Path
    manifest: Manifest
    measurements: list[Measurement]
    conditions: list[dict[str, Any]]


def causes(runs: tuple[Run, Run], direction: int) -> list[Cause]:
    """Everything that differs, likeliest explanation first.

    ``direction``: -1 when the second run was slower, 1 when it was faster, 0 when that cannot be told.
    """
    found = [*_config_causes(runs), *_server_causes(runs), *_recorded_causes(runs), *_machine_causes(runs, direction)]
    return sorted(found, key=lambda cause: -cause.weight)


_CONFIG_WEIGHTS = {"engine.kind": 97, "engine.python": 40, "engine.environment": 40, "eval": 95, "target": 95, "seed": 20, "engine": 80}
"""By name, else by section."""
_INPUT_NOTES = {
    "prompts": (90, "other prompts: only the common ones are compared"),
    "drafter": (75, "another drafter: cannot move the baseline"),
    "environment": (70, "another environment profile"),
}


def _config_causes(runs: tuple[Run, Run]) -> Iterator[Cause]:
    one, other = (run.manifest for run in runs)
    for name, old, new in _differences(one.config, other.config):
        weight = _CONFIG_WEIGHTS.get(name) or _CONFIG_WEIGHTS.get(name.partition(".")[0], 50)
        yield Cause("settings", name, old, new, weight, "")
    for name, old, new in _differences(one.inputs, other.inputs):
        weight, note = _INPUT_NOTES.get(name.partition(".")[0], (50, ""))
        yield Cause("inputs", name, _short(old), _short(new), weight, note)


def _server_causes(runs: tuple[Run, Run]) -> Iterator[Cause]:
    """Resolved arguments, server by server; a difference that the baseline shows too is told once. Of other engines only the version."""
    servers = [run.manifest.holds.get("servers", {}) for run in runs]
    same_engine = runs[0].manifest.config["engine"]["kind"] == runs[1].manifest.config["engine"]["kind"]
    told: set[tuple[str, str, str]] = set()
    for server in sorted(set(servers[0]) & set(servers[1]), key=lambda name: (name != BASELINE, name)):
        for name, old, new in _differences(_arguments(servers[0][server]), _arguments(servers[1][server])):
            if (same_engine or name == "version") and (name, str(old), str(new)) not in told:
                told.add((name, str(old), str(new)))
                weight = 85 if name == "version" else 70
                yield Cause("server", f"{name} ({'baseline' if server == BASELINE else server})", old, new, weight, "")


def _arguments(info: Mapping[str, Any]) -> dict[str, Any]:
    """Resolved arguments; of the embedded engine's own section what decides its speed."""
    own = info.get("eyas")
    engine = {f"eyas.{name}": own.get(name) for name in ("threads", "target_digest", "draft_steps")} if isinstance(own, Mapping) else {}
    return comparable(info) | engine


def _recorded_causes(runs: tuple[Run, Run]) -> Iterator[Cause]:
    """Versions, environment and the constant part of the machine."""
    one, other = (_last(run) for run in runs)
    versions = [line.get("versions") or run.manifest.versions for line, run in zip((one, other), runs, strict=True)]
    for name, old, new in _differences(versions[0], versions[1]):
        yield Cause("version", name, old, new, 65 if name == "torch" else 30, "")
    if one.get("environment") is not None and other.get("environment") is not None:
        for name, old, new in _differences(one["environment"], other["environment"]):
            yield Cause("environment", name, old, new, 75 if name.startswith(("NCCL_", "OMP_")) else 60, "")
    for name, old, new in _differences(*(run.manifest.holds.get("machine", {}) for run in runs)):
        if name == "omp_num_threads":  # is among the environment
            continue
        yield Cause("machine", name, old, new, 90, "another machine, or fewer cores of it")
    yield from _gpu_causes(*(line.get("machine", {}).get("gpus", []) for line in (one, other)))


def _gpu_causes(one: Sequence[Mapping[str, Any]], other: Sequence[Mapping[str, Any]]) -> Iterator[Cause]:
    if len(one) != len(other):
        yield Cause("machine", "GPUs", len(one), len(other), 95, "another number of GPUs")
    weights = {"name": 95, "driver": 60, "pcie": 88, "power_limit_w": 82}
    for old, new in zip(one, other, strict=False):
        for name, weight in weights.items():
            if old.get(name) != new.get(name):
                yield Cause("machine", f"gpu{old['index']}.{name}", old.get(name), new.get(name), weight, "")


def _machine_causes(runs: tuple[Run, Run], direction: int) -> Iterator[Cause]:
    """What moves by itself: clocks, temperatures, load; means over the legs of the baseline, where it has legs of its own."""
    one, other = (_means(run) for run in runs)
    cores = runs[1].manifest.holds.get("machine", {}).get("cores") or 1
    for name in sorted(set(one) & set(other)):
        old, new = one[name], other[name]
        cause = _moved(name, old, new, cores)
        if cause is None:
            continue
        weight, faster = cause
        agrees = direction == 0 or (faster > 0) == (direction > 0)
        share = f"{100 * (new / old - 1):+.1f} %" if old else ""
        note = share if agrees else f"{share}, which would move the speed the other way".lstrip(", ")
        yield Cause("conditions", name, round(old, 2), round(new, 2), weight if agrees else 10, note)


def _moved(name: str, old: float, new: float, cores: int) -> tuple[int, int] | None:
    """(weight, 1 when it makes the second run faster, -1 when slower); None when it did not move beyond its usual breath."""
    leaf, up = name.rpartition(".")[2], 1 if new > old else -1
    share = abs(new / old - 1) if old else math.inf
    if leaf in {"sm_clock_mhz", "memory_clock_mhz"} and share >= CLOCK_SHARE:
        return 86, up
    if leaf == "throttled" and abs(new - old) >= THROTTLED:
        return 87, -up
    if leaf == "load" and abs(new - old) >= LOAD_PER_CORE * cores:
        return 72, -up
    if leaf == "cpu_mhz" and share >= CPU_CLOCK_SHARE:
        return 55, up
    if leaf == "temperature_c" and abs(new - old) >= DEGREES:
        return 40, -up
    return None


def _means(run: Run) -> dict[str, float]:
    """Means over the legs that measured the baseline; over all legs where none did."""
    ended = [line for line in run.conditions if line["moment"] == "end"]
    chosen = [line for line in ended if BASELINE in line["variants"]] or ended
    values: dict[str, list[float]] = defaultdict(list)
    for line in chosen:
        for name, value in line["during"].items():
            values[name].append(value)
    return {name: sum(found) / len(found) for name, found in values.items()}


def _last(run: Run) -> dict[str, Any]:
    return run.conditions[-1] if run.conditions else {}


def _differences(there: Mapping[str, Any], here: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(dotted name, first, second) of values that differ in two nested mappings."""
    for name in {**there, **here}:
        old, new = there.get(name), here.get(name)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            yield from _differences(old, new, f"{prefix}{name}.")
        elif old != new:
            yield f"{prefix}{name}", old, new


def _short(digest: Any) -> Any:
    return digest[:12] if isinstance(digest, str) else digest
