"""What a run will take before it is started: models, text, disk, hours a phase.

A plan is one ``Sheet``. What is given is the config's ``node`` section, a model's config.json, or what the run has measured already, and
each line tells which. ``eyas.cli`` lets the stages add to it in turn: ``begin_plan``, train.plan, ``add_phases``, eval.plan.
"""

import math
import statistics
from pathlib import Path
from typing import Any, Literal

from eyas.config import Config
from eyas.files import read_jsonl
from eyas.manifest import NAME as MANIFEST
from eyas.manifest import read_manifest
from eyas.shapes import Shapes
from eyas.sheet import Sheet, terms
from eyas.state_row import StateSpec

# A checkpoint holds float32 masters and AdamW's two moments; the best drafter lies beside them in bfloat16.
CHECKPOINT_BYTES, BEST_BYTES = 12, 2
Known = dict[str, tuple[float, str]]
"""Key -> value that this run has measured, and where."""


def measured_so_far(config: Config) -> Known:
    """What the run's folders tell of its text and rates; empty before the first stage."""
    found: Known = {}
    replies = _holds(config.folder("replies")).get("sets", {}).get("train", {})
    states = _holds(config.folder("states/train"))
    for holds, where in ((replies, "replies"), (states, "states/train")):
        if holds.get("rows") and holds.get("supervised"):
            text = f"measured: {where}"
            found["training_tokens"] = (holds["tokens"], text)
            found["reply_share"] = (holds["supervised"] / holds["tokens"], text)
            found["reply_tokens"] = (holds["supervised"] / holds["rows"], f"{text}, supervised tokens a row")
    for key, holds, where in (("reply_tps", replies, "replies"), ("prefill_tps", states, "states/train")):
        if holds.get("tokens_per_second"):
            found[key] = (holds["tokens_per_second"], f"measured: {where}, the run that finished it")
    log = config.folder("train") / "log.jsonl"
    rates = [row["tokens_per_second"] for _, row in read_jsonl(log) if row.get("kind") == "train"] if log.is_file() else []
    if rates:
        found["training_tps"] = (statistics.median(rates), "measured: train/log.jsonl, median")
    return found


def _holds(folder: Path) -> dict[str, Any]:
    """What a complete folder's manifest tells, nothing for one that is missing or unfinished."""
    if not (folder / MANIFEST).is_file():
        return {}
    manifest = read_manifest(folder)
    return manifest.holds if manifest.complete else {}


def give_node(sheet: Sheet, config: Config, known: Known, key: str, label: str, unit: str) -> None:
    """Enter a figure of the ``node`` section, or what was measured in its place."""
    value, how = known.get(key, (getattr(config.node, key), f"node.{key}"))
    sheet.give(key, label, value, unit, how, f"node.{key}")


def begin_plan(config: Config, shapes: Shapes, parameters: int, known: Known) -> Sheet:
    """Models, text and disk."""
    sheet = Sheet()
    _models(sheet, shapes, parameters)
    _text(sheet, config, known)
    _disk(sheet, config, shapes, known)
    return sheet


def _models(sheet: Sheet, shapes: Shapes, parameters: int) -> None:
    target, drafter = shapes.target, shapes.drafter
    sheet.topic("models")
    sheet.give("hidden", "hidden size", drafter.hidden_size, "", "target")
    sheet.give("vocabulary", "vocabulary", target.vocab_size, "tokens", "target")
    sheet.give("draft_vocabulary", "draft vocabulary", drafter.draft_vocab_size, "tokens", "drafter")
    sheet.give("parameters", "trained parameters", parameters, "", "fc, one decoder layer, norms, lm_head")
    sheet.note(f"target: {shapes.target_from}")
    sheet.note(f"drafter: {shapes.drafter_from}")


def _text(sheet: Sheet, config: Config, known: Known) -> None:
    sheet.topic("text")
    give_node(sheet, config, known, "training_tokens", "training text", "tokens")
    give_node(sheet, config, known, "reply_tokens", "mean reply", "tokens")
    give_node(sheet, config, known, "reply_share", "share of replies", "")
    give_node(sheet, config, known, "draftable_share", "of them in draft vocabulary", "")
    sheet.compute(
        "supervised",
        "supervised",
        "tokens",
        "{training_tokens} x {reply_share}",
        lambda training_tokens, reply_share: round(training_tokens * reply_share),
    )
    sheet.compute(
        "rows",
        "prompts needed",
        "",
        "{supervised} supervised / {reply_tokens} a reply",
        lambda supervised, reply_tokens: math.ceil(supervised / reply_tokens),
    )
    sheet.note("For comparison: lightseekorg/kimi-k2.5-eagle3 was trained from scratch on 600,000 samples (published).")


def _disk(sheet: Sheet, config: Config, shapes: Shapes, known: Known) -> None:
    states = config.prep.states
    sheet.topic("disk")
    kinds: tuple[tuple[Literal["bfloat16", "fp8"], int | None], ...] = (("bfloat16", None), ("fp8", None))
    for dtype, top in (*kinds, *([(states.dtype, states.top_logprobs)] if states.top_logprobs else [])):
        size, told = _token_bytes(shapes, dtype, top)
        key = f"token_bytes_{dtype}" + (f"_top{top}" if top else "")
        sheet.give(key, f"states, {dtype}" + (f", top {top}" if top else ""), size, "B a token", told)
    size, _ = _token_bytes(shapes, states.dtype, states.top_logprobs)
    sheet.give("token_bytes", "states of this run", size, "B a token", "prep.states.dtype, prep.states.top_logprobs")
    sheet.compute(
        "states_gb",
        "all states",
        "GB",
        "{training_tokens} x {token_bytes} B",
        lambda training_tokens, token_bytes: training_tokens * token_bytes / 1e9,
    )
    sheet.give("checkpoints", "checkpoints kept, one in writing", config.train.keep_checkpoints + 1, "", "train.keep_checkpoints + 1")
    sheet.compute(
        "checkpoints_gb",
        "checkpoints",
        "GB",
        f"{{parameters}} x ({{checkpoints}} x {CHECKPOINT_BYTES} + {BEST_BYTES}) B: float32 masters and moments; the best in bfloat16",
        lambda parameters, checkpoints: parameters * (checkpoints * CHECKPOINT_BYTES + BEST_BYTES) / 1e9,
    )
    sheet.compute(
        "disk_needed_gb",
        "needed at once",
        "GB",
        "{states_gb} + {checkpoints_gb}",
        lambda states_gb, checkpoints_gb: states_gb + checkpoints_gb,
    )
    give_node(sheet, config, known, "disk_gb", "disk", "GB")
    sheet.compute("disk_fits", "fits", "", "{disk_needed_gb} GB of {disk_gb}", lambda disk_needed_gb, disk_gb: disk_needed_gb <= disk_gb)
    sheet.compute(
        "windows",
        "rolling windows",
        "",
        "{states_gb} / ({disk_gb} - {checkpoints_gb}) GB: captured, trained, deleted one after the other",
        lambda states_gb, disk_gb, checkpoints_gb: (
            math.ceil(states_gb / (disk_gb - checkpoints_gb)) if disk_gb > checkpoints_gb else "none: not even the checkpoints fit"
        ),
    )
    give_node(sheet, config, known, "prefill_tps", "prefill of the target", "tokens/s")
    sheet.compute(
        "write_mb_per_s",
        "written by capture",
        "MB/s",
        "{prefill_tps} x {token_bytes} B",
        lambda prefill_tps, token_bytes: prefill_tps * token_bytes / 1e6,
    )
    give_node(sheet, config, known, "disk_mb_per_s", "disk takes", "MB/s")
    sheet.compute(
        "disk_keeps_up",
        "disk keeps up",
        "",
        "{write_mb_per_s} of {disk_mb_per_s} MB/s",
        lambda write_mb_per_s, disk_mb_per_s: write_mb_per_s <= disk_mb_per_s,
    )


def _token_bytes(shapes: Shapes, dtype: Literal["bfloat16", "fp8"], top: int | None) -> tuple[int, str]:
    """Bytes of a stored token, and what they are made of."""
    spec = StateSpec(shapes.layers, shapes.target.hidden_size, dtype, shapes.target.vocab_size, "", "", top, None if top is None else "")
    return spec.bytes_per_token(), terms({name: kind.itemsize * (width or 1) for name, (kind, width) in spec.tensors().items()})


def add_phases(sheet: Sheet, config: Config, known: Known) -> None:
    """Hours a phase; needs training's own (``training_h``)."""
    sheet.topic("hours")
    give_node(sheet, config, known, "reply_tps", "replies of the target", "tokens/s")
    sheet.compute(
        "replies_h",
        "replies",
        "h",
        "{supervised} tokens / {reply_tps} a second",
        lambda supervised, reply_tps: supervised / reply_tps / 3600,
    )
    sheet.compute(
        "capture_h",
        "capture",
        "h",
        "{training_tokens} tokens / min({prefill_tps}, {disk_mb_per_s} MB / {token_bytes} B) a second",
        lambda training_tokens, prefill_tps, disk_mb_per_s, token_bytes: (
            training_tokens / min(prefill_tps, disk_mb_per_s * 1e6 / token_bytes) / 3600
        ),
    )
    give_node(sheet, config, known, "server_start_minutes", "start of a server", "min")
    servers = (config.prep.replies.mode == "server") + (config.prep.states.backend != "hf")
    sheet.compute(
        "prep_starts_h",
        "starts of servers in prep",
        "h",
        f"{servers} x {{server_start_minutes}} min; in rolling windows one more each",
        lambda server_start_minutes: servers * server_start_minutes / 60,
    )
    training = sheet.figures["training_h"]
    sheet.give("training_phase_h", "training", training.value, "h", "under training", ", ".join(training.missing))
    _bench(sheet, config, known)
    sheet.compute(
        "total_h",
        "all of it",
        "h",
        "the sum: the target fills the GPUs, so nothing overlaps",
        lambda replies_h, capture_h, prep_starts_h, training_phase_h, bench_h: (
            replies_h + capture_h + prep_starts_h + training_phase_h + bench_h
        ),
    )


def _bench(sheet: Sheet, config: Config, known: Known) -> None:
    drafters = len(config.eval.compare) + 1 + (config.drafter.init != "scratch")
    switched = config.engine.kind == "embedded"  # one server that switches per request, else the baseline before and after
    runs = drafters + (1 if switched else 2)
    servers = 1 if switched else runs
    tokens = runs * config.eval.prompts * config.eval.max_new_tokens * len(config.eval.concurrency)
    sheet.give(
        "bench_tokens",
        "bench, at most",
        tokens,
        "tokens",
        f"{runs} runs x {config.eval.prompts} prompts x {config.eval.max_new_tokens} tokens",
    )
    give_node(sheet, config, known, "baseline_tps", "baseline", "tokens/s")
    sheet.compute(
        "bench_h",
        "bench",
        "h",
        f"{{bench_tokens}} / {{baseline_tps}} a second + {servers} starts x {{server_start_minutes}} min",
        lambda bench_tokens, baseline_tps, server_start_minutes: bench_tokens / baseline_tps / 3600 + servers * server_start_minutes / 60,
    )
