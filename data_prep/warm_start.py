"""The untouched warm start, measured: which layers it was trained on where its config does not tell, and how it does on this text.

The same ids in a drafter's config mean other layers to other engines and training codes (eyas.conventions). A drafter fed the layers it was
trained on is accepted more: so all candidates are captured in one pass over a few replies, and the offline walk decides. What came out is
kept in ``states/warm_start.json``; a later run with the same drafter, replies and candidates reads it there.

Cost: ``prep.states.probe_tokens`` through the target once, and through the drafter once for each candidate.
"""

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from data_prep.capture_hf import CaptureReport
from data_prep.rows import Row
from data_prep.template import Tokens
from eyas.acceptance import Acceptance
from eyas.config import Config
from eyas.conventions import SGLANG, VLLM, Family, fed_layers
from eyas.drafter_config import LAYER_IDS
from eyas.errors import EyasError
from eyas.files import digest_json, read_object, write_json
from eyas.folder import DrafterFolder, drafter_digest
from eyas.initial import with_positions
from eyas.offline import walk_row
from eyas.progress import Task
from eyas.state_row import StateRow, row_key
from eyas.states import StateSpec, StateStore, finish_store
from eyas.statistics import Interval, paired_difference
from eyas.target import Target, pick_device

RECORD = "warm_start.json"
PROBE = "probe"
RESAMPLES = 2000
REPLY_TOKENS = 256

Layers = tuple[int, ...]
Capture = Callable[[Sequence[Row], Path, StateSpec, str], CaptureReport]
"""Stores the states of rows in a folder, under a name for the progress line."""


@dataclass(frozen=True)
class Reading:
    """The untouched drafter on one candidate: verify steps of each reply in turn, and of all."""

    layers: Layers
    by_reply: list[Acceptance]
    steps: int

    @property
    def total(self) -> Acceptance:
        """Sums over all replies."""
        return sum(self.by_reply, Acceptance.none(self.steps))

    @property
    def length(self) -> float:
        """Acceptance length. Raises EyasError where no reply has a verify step."""
        length = self.total.length
        if length is None:
            raise EyasError("no reply has two tokens to measure the warm start on: name its layers in prep.states.layers")
        return length

    def ahead_of(self, other: "Reading", seed: int) -> Interval:
        """Acceptance length minus the other's, paired by reply."""
        own, others = self.by_reply, other.by_reply
        return paired_difference(
            [part.tokens for part in own],
            [part.cycles for part in own],
            [part.tokens for part in others],
            [part.cycles for part in others],
            RESAMPLES,
            seed,
        )


def candidate_layers(config: Config, target: Target, drafter: DrafterFolder | None) -> list[Layers]:
    """The lists among which the stores' layers are to be found, likeliest first; one alone is settled.

    From scratch (``drafter`` None): ``prep.states.layers``, else the target's default. Warm start: ``prep.states.layers``, else
    ``prep.states.candidates``, else what its config can mean.
    Raises EyasError when the drafter is not for this target, or was not trained on the layers that the config names.
    """
    asked = config.prep.states
    if drafter is None:
        return [tuple(asked.layers or target.default_layers())]
    init, shape = config.drafter.init, drafter.drafter.shape
    for what, own, other in (
        ("hidden size", shape.hidden_size, target.shape.hidden_size),
        ("vocabulary", shape.vocab_size, target.shape.vocab_size),
    ):
        if own != other:
            raise EyasError(f"{init} is no drafter for {target.name}: {what} {own} in the drafter, {other} in the target")
    if asked.layers and drafter.candidates and tuple(asked.layers) not in drafter.candidates:
        readings = " or ".join(str(list(candidate)) for candidate in drafter.candidates)
        raise EyasError(f"prep.states.layers is {asked.layers}, {init} reads layers {readings}: name those, or leave it out")
    named = [asked.layers] if asked.layers else asked.candidates
    if not named:
        readable = [candidate for candidate in drafter.candidates if max(candidate) < target.shape.num_layers]
        return readable or drafter.candidates or [target.default_layers()]
    for candidate in named:
        if len(candidate) != shape.num_aux:
            raise EyasError(f"prep.states names layers {candidate}, {init} takes {shape.num_aux} states")
    return [tuple(candidate) for candidate in named]


def measure_warm_start(
    config: Config,
    target: Target,
    drafter: DrafterFolder,
    candidates: Sequence[Layers],
    rows: Mapping[str, Sequence[Row]],
    capture: Capture,
) -> dict[str, Any]:
    """Find the layers among ``candidates`` on which the drafter is accepted most, and return what ``states/warm_start.json`` has.

    Keys: ``layers`` (the chosen ones), ``reason``, ``readings`` (acceptance of each candidate, likeliest first, and its difference to the
    first with a 95 % interval), ``tokens``, ``replies``, ``draft_steps``, and by what it is current: ``drafter``, ``identity``.
    A candidate is preferred to the first only where the difference is clear of noise.
    """
    chosen = probe_rows(rows, config.prep.states.probe_tokens)
    digest = drafter_digest(drafter.drafter)
    identity = digest_json(
        [digest, candidates, [row.key for row in chosen], config.engine.draft_steps, config.prep.states.dtype, config.target.dtype]
    )
    path = config.folder("states") / RECORD
    if path.is_file() and (record := read_object(path)).get("identity") == identity:
        return record
    store = _capture(config, target, candidates, chosen, capture)
    readings = _readings(config, target, drafter, candidates, store)
    leads = [reading.ahead_of(readings[0], config.seed) for reading in readings]
    best = _prefer(readings, leads)
    record = {
        "layers": list(best.layers),
        "reason": _reason(best, readings, leads, sum(store.lengths)),
        "readings": [_told(reading, lead) for reading, lead in zip(readings, leads, strict=True)],
        "tokens": sum(store.lengths),
        "replies": len(store),
        "draft_steps": config.engine.draft_steps,
        "drafter": digest,
        "identity": identity,
    }
    write_json(path, record)
    shutil.rmtree(store.folder)
    return read_object(path)


def probe_rows(rows: Mapping[str, Sequence[Row]], tokens: int) -> list[Row]:
    """Rows of at least so many tokens in all, if there are as many: greedy held-out ones, then training's, each in order of their keys.

    Cut behind the first ``REPLY_TOKENS`` of their reply: replies are what the interval counts, and many short ones tell more than few long.
    """
    chosen: dict[str, Row] = {}
    missing = tokens
    for row in (_cut(row) for name in ("greedy", "train") for row in sorted(rows[name], key=lambda row: row.key)):
        if missing <= 0:
            break
        if row.key not in chosen:
            chosen[row.key] = row
            missing -= len(row.tokens.ids)
    return list(chosen.values())


def _cut(row: Row) -> Row:
    end = row.tokens.supervised.index(True) + REPLY_TOKENS
    if end >= len(row.tokens.ids):
        return row
    tokens = Tokens(row.tokens.ids[:end], row.tokens.supervised[:end])
    return Row(row_key(tokens.ids, tokens.supervised), row.prompt_key, row.category, tokens)


def readings_table(record: Mapping[str, Any]) -> Table:
    """What the measurement found, a line for each candidate."""
    steps = range(record["draft_steps"])
    title = f"untouched warm start, {record['tokens']:,} tokens of {record['replies']:,} replies"
    table = Table("hidden_states", "acceptance length", *(f"draft {j + 1}" for j in steps), "verify steps", "to the first", title=title)
    for column in table.columns[1:]:
        column.justify = "right"
    for number, reading in enumerate(record["readings"]):
        rates = ("-" if rate is None else f"{rate:.1%}" for rate in reading["conditional_J"])
        lead = "" if number == 0 else _interval(**reading["to_first"])
        kept = " kept" if reading["layers"] == record["layers"] else ""
        table.add_row(f"{reading['layers']}{kept}", f"{reading['length']:.3f}", *rates, f"{reading['cycles']:,}", lead)
    return table


def serving_note(config: Config, drafter: DrafterFolder, layers: Sequence[int], family: Family) -> str | None:
    """A warning where the configured engine would feed the untouched drafter, as its config stands, other layers than these."""
    kind = config.engine.kind
    if kind == "embedded":
        return None
    version = config.engine.version or (SGLANG if kind == "sglang" else VLLM)
    nested, top = ((place or {}).get(LAYER_IDS) for place in (drafter.raw_config.get("eagle_config"), drafter.raw_config))
    fed = fed_layers(nested, top, kind, version, family)
    if fed is None or fed == tuple(layers):
        return None
    return (
        f"{kind} {version} feeds the untouched {config.drafter.init} hidden_states{list(fed)}, not those that it was trained on: what "
        "it is accepted there says little about it; the export is written right"
    )


def _capture(config: Config, target: Target, candidates: Sequence[Layers], rows: Sequence[Row], capture: Capture) -> StateStore:
    """All candidates' layers in one pass, in a store that is begun anew: it is small, and lives until the measurement is done."""
    folder = config.folder("states") / PROBE
    shutil.rmtree(folder, ignore_errors=True)
    layers = tuple(sorted({layer for candidate in candidates for layer in candidate}))
    shape = target.shape
    spec = StateSpec(layers, shape.hidden_size, config.prep.states.dtype, shape.vocab_size, target.digest, target.tokenizer_digest)
    capture(rows, folder, spec, PROBE)
    finish_store(folder, {})
    return StateStore(folder)


def _readings(config: Config, target: Target, folder: DrafterFolder, candidates: Sequence[Layers], store: StateStore) -> list[Reading]:
    device, dtype, steps = pick_device(config.target.device), getattr(torch, config.target.dtype), config.engine.draft_steps
    positions = max(folder.drafter.shape.max_position, *store.lengths)
    drafter = with_positions(folder.drafter, positions).to(device, dtype)
    drafter.set_embedding(target.embedding(dtype).to(device))
    readings = [Reading(candidate, [], steps) for candidate in candidates]
    with Task("warm start", sum(store.lengths), "tokens") as task:
        for row in map(store.read, range(len(store))):
            for reading in readings:
                cycles = walk_row(drafter, row.ids_T, row.supervised_T, _aux(row, store.spec, reading.layers), steps)
                reading.by_reply.append(Acceptance.of(cycles, steps))
            task.advance(len(row.ids_T))
    return readings


def _aux(row: StateRow, spec: StateSpec, layers: Layers) -> Tensor:
    """The states of ``layers`` side by side, of all those that the row has."""
    places = [spec.layers.index(layer) for layer in layers]
    return row.aux_TA.unflatten(1, (len(spec.layers), -1))[:, places].flatten(1)


def _prefer(readings: Sequence[Reading], leads: Sequence[Interval]) -> Reading:
    """The most accepted among the first and those that are ahead of it beyond noise."""
    clear = [reading for reading, lead in zip(readings, leads, strict=True) if lead.low is not None and lead.low > 0]
    return max(clear, key=lambda reading: reading.length, default=readings[0])


def _reason(best: Reading, readings: Sequence[Reading], leads: Sequence[Interval], tokens: int) -> str:
    """Why the best was kept, in a sentence with its numbers."""
    measured = f"untouched, on {tokens:,} tokens of {len(best.by_reply):,} replies"
    if len(readings) == 1:
        return f"layers {list(best.layers)}: acceptance length {best.length:.3f} ({measured})"
    noise = any(not lead.excludes(0) for lead in leads[1:])
    why = "within noise, so the likelier reading" if noise and best is readings[0] else "by measurement"
    told = [f"{list(readings[0].layers)} {readings[0].length:.3f}"]
    for reading, lead in zip(readings[1:], leads[1:], strict=True):
        told.append(f"{list(reading.layers)} {reading.length:.3f} ({_interval(lead.value, lead.low, lead.high)})")
    return f"layers {list(best.layers)}, {why}: acceptance length {', '.join(told)} ({measured})"


def _interval(value: float | None, low: float | None, high: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:+.3f}" + ("" if low is None or high is None else f" [{low:+.3f}, {high:+.3f}]")


def _told(reading: Reading, lead: Interval) -> dict[str, Any]:
    difference = {"value": lead.value, "low": lead.low, "high": lead.high}
    return {"layers": list(reading.layers), **reading.total.as_json(), "to_first": difference}
