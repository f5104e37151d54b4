"""Economics' part of a plan: break-even, and by how much acceptance must grow; with what the run's bench and training have measured."""

import math
from collections.abc import Sequence

import numpy as np

from eval.bench import STARTER
from eval.clients import BASELINE
from eval.economics import break_even, plan, required_rate
from eval.measurement import MEASUREMENTS, read_measurements
from eval.summary import Summary, summarise
from eyas.config import Config
from eyas.errors import EyasError
from eyas.files import read_jsonl
from eyas.plan import Known, give_node
from eyas.sheet import Sheet
from eyas.statistics import Interval

SPREAD = 1.96  # standard errors to either side of a 95 % interval
LEAST_POINTS = 3


def measured_by_bench(config: Config) -> Known:
    """Baseline rate, cycle time and the starter's acceptance length, as far as ``output/bench`` has them."""
    folder = config.folder("bench")
    if not (folder / MEASUREMENTS).is_file():
        return {}
    try:
        summary = summarise(read_measurements(folder), config.eval.temperature, config.eval.bootstrap, config.seed)
    except EyasError:  # a bench that has only begun
        return {}
    return _rates(summary)


def _rates(summary: Summary) -> Known:
    base, main, starter = summary.variant(BASELINE), summary.variant(summary.main), summary.variant(STARTER)
    found: dict[str, tuple[Interval | None, str]] = {
        "baseline_tps": (None if base is None else base.decode_tokens_per_second, "decoding of the baseline"),
        "cycle_ms": (None if main is None else main.cycle_ms, f"cycle of {summary.main}"),
        "acceptance_length": (None if starter is None else starter.length, "the starter"),
    }
    return {key: (value.value, f"measured: bench, {what}") for key, (value, what) in found.items() if value and value.value}


def learning_curve(config: Config) -> list[tuple[int, float]]:
    """(supervised tokens trained on, offline acceptance length on greedy text) of every validation after the first step."""
    log = config.folder("train") / "log.jsonl"
    rows = [row for _, row in read_jsonl(log) if row.get("kind") == "validation"] if log.is_file() else []
    return [(row["supervised_tokens"], row["greedy"]["length"]) for row in rows if row["supervised_tokens"]]


def per_doubling(curve: Sequence[tuple[int, float]]) -> float | None:
    """Acceptance length gained with each doubling of the tokens, by least squares; None with fewer than three points."""
    if len({tokens for tokens, _ in curve}) < LEAST_POINTS:
        return None
    doublings, lengths = np.log2([tokens for tokens, _ in curve]), np.array([length for _, length in curve])
    away = doublings - doublings.mean()
    return float((away * lengths).sum() / (away**2).sum())


def add_break_even(sheet: Sheet, config: Config, known: Known) -> None:
    """Enter the figures; the baseline's rate is in the sheet already (``eyas.plan.add_phases``)."""
    drafts = config.engine.draft_steps
    sheet.topic("break-even")
    give_node(sheet, config, known, "cycle_ms", "cycle", "ms")
    give_node(sheet, config, known, "acceptance_length", "acceptance length now", "tokens")
    give_node(sheet, config, known, "want_tps", "wished for", "tokens/s")
    baseline_tps, cycle_ms = sheet.known("baseline_tps"), sheet.known("cycle_ms")
    if baseline_tps is not None and cycle_ms is not None:
        plan(baseline_tps, cycle_ms, sheet.known("want_tps"))  # refuses what must be another unit
    sheet.compute(
        "now_tps",
        "speculation now",
        "tokens/s",
        "{acceptance_length} / {cycle_ms} ms",
        lambda acceptance_length, cycle_ms: 1000 * acceptance_length / cycle_ms,
    )
    sheet.compute(
        "even_length",
        "break-even",
        "tokens",
        "{cycle_ms} ms x {baseline_tps} tokens/s",
        lambda cycle_ms, baseline_tps: break_even(cycle_ms, baseline_tps),
    )
    sheet.compute(
        "want_length",
        "for what is wished",
        "tokens",
        "{cycle_ms} ms x {want_tps} tokens/s",
        lambda cycle_ms, want_tps: break_even(cycle_ms, want_tps),
    )
    sheet.compute(
        "even_gain",
        "gain to break even",
        "tokens",
        "{even_length} - {acceptance_length}",
        lambda even_length, acceptance_length: even_length - acceptance_length,
    )
    sheet.compute(
        "want_gain",
        "gain for what is wished",
        "tokens",
        "{want_length} - {acceptance_length}",
        lambda want_length, acceptance_length: want_length - acceptance_length,
    )
    for key, length, label in (
        ("now_rate", "acceptance_length", "acceptance of a draft now"),
        ("even_rate", "even_length", "acceptance to break even"),
        ("want_rate", "want_length", "acceptance for what is wished"),
    ):
        _rate(sheet, key, length, label, drafts)
    sheet.note(f"A cycle of {drafts} drafts is taken to cost the same whatever is accepted; `eyas sweep` measures other numbers of drafts.")
    _tokens_needed(sheet, config, drafts)


def _rate(sheet: Sheet, key: str, length: str, label: str, drafts: int) -> None:
    """The conditional acceptance that a length in the sheet takes."""
    value = sheet.known(length)
    rate = None if value is None else required_rate(value, drafts)
    told = f"r with 1 + r + ... + r^{drafts} = {sheet.figures[length].label}"
    if value is not None and rate is None:
        sheet.give(key, label, "impossible", "", f"{drafts} drafts bring {drafts + 1} tokens at most: more drafts, or a shorter cycle")
    else:
        sheet.give(key, label, rate, "", told, ", ".join(sheet.figures[length].missing))


def _tokens_needed(sheet: Sheet, config: Config, drafts: int) -> None:
    curve = learning_curve(config)
    sheet.topic("tokens needed")
    sheet.give(
        "doubling",
        "gained with each doubling",
        per_doubling(curve),
        "tokens",
        f"measured: train/log.jsonl, {len(curve)} validations",
        "three validations of eyas train",
    )
    sheet.give(
        "last_tokens",
        "trained on so far",
        curve[-1][0] if curve else None,
        "supervised tokens",
        "measured: train/log.jsonl",
        "three validations of eyas train",
    )
    sheet.give(
        "last_length",
        "acceptance length there",
        curve[-1][1] if curve else None,
        "tokens",
        "measured: train/log.jsonl",
        "three validations of eyas train",
    )
    sheet.compute(
        "needed",
        "to break even",
        "supervised tokens",
        "{last_tokens} x 2^(({even_length} - {last_length}) / {doubling}), if it goes on like this",
        lambda last_tokens, even_length, last_length, doubling: _extrapolated(
            last_tokens, (even_length - last_length) / doubling if doubling > 0 else math.inf
        ),
    )
    sheet.compute(
        "heldout_cycles",
        "verify steps to see the gain",
        "",
        f"({SPREAD} x {drafts} / {{even_gain}})^2: its half to either side, 1 to {drafts + 1} tokens a step, steps independent",
        lambda even_gain: math.ceil((SPREAD * drafts / even_gain) ** 2) if even_gain > 0 else 0,
    )
    sheet.compute(
        "heldout_tokens",
        "held-out reply tokens for it",
        "tokens",
        "{heldout_cycles} x {acceptance_length}; several times as many, steps of one reply being alike",
        lambda heldout_cycles, acceptance_length: math.ceil(heldout_cycles * acceptance_length),
    )


def _extrapolated(tokens: float, doublings: float) -> float | str:
    """Tokens after so many doublings; beyond a thousandfold a curve says nothing."""
    if doublings <= 0:
        return tokens
    return round(tokens * 2**doublings) if doublings <= 10 else "out of reach: above a thousand times as many"
