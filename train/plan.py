"""Training's part of a plan: operations, hours, and memory of a rank under DDP and FSDP2."""

from dataclasses import replace
from typing import Literal

from eyas.config import Config
from eyas.drafter import DrafterShape
from eyas.plan import Known, give_node
from eyas.sheet import Sheet, number, terms
from train.costs import Work, multiply_adds, per_pair, planned_work, total
from train.memory import GIB, Memory, Ranks, largest_batch, memory, traffic

MARGIN = 0.9
"""Share of a GPU's memory that a plan fills: the rest is the libraries' own, NCCL's buffers and fragmentation."""


def add_training(sheet: Sheet, config: Config, shape: DrafterShape, known: Known) -> None:
    """Enter training's figures behind ``eyas.plan.begin_plan``'s."""
    longest = config.prep.max_length
    alike, worst = _work(sheet, config, config.train.batch_tokens), _work(sheet, config, config.train.batch_tokens, longest)
    _operations(sheet, config, shape, alike, known)
    _hours(sheet, config, known)
    ranks = _ranks(config)
    sheet.topic("memory of a micro-batch")
    if worst is None:
        sheet.give("batch_peak_gib", "most at once", None, "GiB", "", _asked(sheet))
        return
    _batch(sheet, config, memory(shape, worst, ranks))
    _rank(sheet, config, shape, ranks, worst, known)
    if ranks.count > 1:
        _rank(sheet, config, shape, replace(ranks, sharded=True), worst, known)


def _work(sheet: Sheet, config: Config, tokens: int, longest: float | None = None) -> Work | None:
    """What so many tokens hold, None while the text is not known. ``longest``: the longest row to be prepared for."""
    reply_tokens, reply_share = sheet.known("reply_tokens"), sheet.known("reply_share")
    if reply_tokens is None or reply_share is None:
        return None
    return planned_work(
        tokens, reply_tokens, reply_share, sheet.known("draftable_share"), config.train.ttt_steps, longest, config.prep.states.top_logprobs
    )


def _asked(sheet: Sheet) -> str:
    return ", ".join(name for key in ("reply_tokens", "reply_share") for name in sheet.figures[key].missing)


def _operations(sheet: Sheet, config: Config, shape: DrafterShape, work: Work | None, known: Known) -> None:
    sheet.topic("training")
    sheet.give(
        "pair_gmac", "a pair, forward", per_pair(shape) / 1e9, "G multiply-adds", "parameters - fc - norms: q, k, v, o, MLP, lm_head"
    )
    if work is None:
        sheet.give("token_gflop", "a token, forward and backward", None, "GFLOP", "", _asked(sheet))
        sheet.give("token_mb", "a token moves", None, "MB", "", _asked(sheet))
    else:
        told = f"of {config.train.ttt_steps} at most: chains inside a reply whose tokens are in the draft vocabulary"
        sheet.give("pairs", "pairs a token", work.pairs / work.tokens, "", told)
        parts = multiply_adds(shape, work)
        for part in parts:
            key = f"gmac_{part.what.replace(', ', '_').replace(' ', '_')}"
            sheet.give(key, f"  {part.what}", part.amount / work.tokens / 1e9, "G multiply-adds", part.how)
        sheet.give("token_gflop", "a token, forward and backward", 2 * total(parts) / work.tokens / 1e9, "GFLOP", "2 x the sum")
        moved = traffic(shape, work, _ranks(config))
        told = "read and written beside products: " + terms({part.what: part.amount / work.tokens / 1e6 for part in moved})
        sheet.give("token_mb", "a token moves", total(moved) / work.tokens / 1e6, "MB", told)
    give_node(sheet, config, known, "gpus", "GPUs", "")


def _hours(sheet: Sheet, config: Config, known: Known) -> None:
    settings, most = config.train, config.train.max_steps or 2**62
    a_step = settings.batch_tokens * settings.accumulation
    sheet.give("epochs", "epochs", settings.epochs, "", "train.epochs")
    sheet.compute(
        "steps",
        "optimiser steps",
        "",
        f"{{epochs}} x {{training_tokens}} / ({{gpus}} x {a_step:,} tokens)" + (f", {most:,} at most" if settings.max_steps else ""),
        lambda epochs, training_tokens, gpus: min(-(-epochs * training_tokens // (gpus * a_step)), most),
    )
    sheet.compute(
        "trained_tokens",
        "trained on",
        "tokens",
        f"at most {{steps}} x {{gpus}} x {a_step:,}",
        lambda epochs, training_tokens, steps, gpus: min(epochs * training_tokens, steps * gpus * a_step),
    )
    if "training_tps" in known:
        sheet.give("training_tps", "tokens a second", known["training_tps"][0], "tokens/s", known["training_tps"][1])
        sheet.compute(
            "training_h",
            "training",
            "h",
            "{trained_tokens} / {training_tps} a second",
            lambda trained_tokens, training_tps: trained_tokens / training_tps / 3600,
        )
    else:
        _predicted_hours(sheet, config, known)
    sheet.compute(
        "read_mb_per_s",
        "read from disk",
        "MB/s",
        "{training_tps} x {token_bytes} B",
        lambda training_tps, token_bytes: training_tps * token_bytes / 1e6,
    )


def _predicted_hours(sheet: Sheet, config: Config, known: Known) -> None:
    give_node(sheet, config, known, "training_tflops", "reached by one GPU", "TFLOP/s")
    sheet.compute(
        "products_h",
        "products",
        "h",
        "{trained_tokens} x {token_gflop} GFLOP / ({gpus} x {training_tflops} TFLOP/s)",
        lambda trained_tokens, token_gflop, gpus, training_tflops: trained_tokens * token_gflop / (gpus * training_tflops * 1e3) / 3600,
    )
    give_node(sheet, config, known, "bandwidth_gb_per_s", "moved by one GPU", "GB/s")
    sheet.compute(
        "moves_h",
        "everything else",
        "h",
        "{trained_tokens} x {token_mb} MB / ({gpus} x {bandwidth_gb_per_s} GB/s)",
        lambda trained_tokens, token_mb, gpus, bandwidth_gb_per_s: trained_tokens * token_mb / (gpus * bandwidth_gb_per_s * 1e3) / 3600,
    )
    if config.node.gpus == 1:
        sheet.give("exchange_h", "exchange of gradients", 0.0, "h", "one process has none")
    else:
        give_node(sheet, config, known, "link_gb_per_s", "sent by one GPU", "GB/s")
        sheet.compute(
            "exchange_h",
            "exchange of gradients",
            "h",
            "{steps} x 2 x ({gpus} - 1) / {gpus} x {parameters} x 4 B / {link_gb_per_s} GB/s, none of it hidden",
            lambda steps, gpus, parameters, link_gb_per_s: steps * 2 * (gpus - 1) / gpus * parameters * 4 / (link_gb_per_s * 1e9) / 3600,
        )
    sheet.compute(
        "training_h",
        "training",
        "h",
        "{products_h} + {moves_h} + {exchange_h}; measuring the held-out sets comes on top",
        lambda products_h, moves_h, exchange_h: products_h + moves_h + exchange_h,
    )
    sheet.compute(
        "training_tps",
        "tokens a second",
        "tokens/s",
        "{trained_tokens} / {training_h} h",
        lambda trained_tokens, training_h: trained_tokens / training_h / 3600,
    )


def _batch(sheet: Sheet, config: Config, found: Memory) -> None:
    """What a step adds to what is held, which neither DDP nor FSDP2 spreads over ranks."""
    for place, part in enumerate(found.kept):
        sheet.give(f"kept_{place}", part.what, part.amount / GIB, "GiB", part.how)
    for place, part in enumerate(found.phases):
        sheet.give(f"phase_{place}", f"at the {part.what}", part.amount / GIB, "GiB", part.how)
    sheet.give("batch_peak_gib", "most at once", found.worst.amount / GIB, "GiB", f"at the {found.worst.what}")
    sheet.note(f"train.batch_tokens {config.train.batch_tokens:,}, a row of prep.max_length {config.prep.max_length:,} among them.")


def _rank(sheet: Sheet, config: Config, shape: DrafterShape, ranks: Ranks, work: Work, known: Known) -> None:
    way = "FSDP2" if ranks.sharded else "DDP" if ranks.count > 1 else "one process"
    key, found = way.lower().replace(" ", "_"), memory(shape, work, ranks)
    sheet.topic(f"memory of a rank, {way}" + (f" over {ranks.count}" if ranks.count > 1 else ""))
    for place, part in enumerate(found.held):
        sheet.give(f"{key}_held_{place}", part.what, part.amount / GIB, "GiB", part.how)
    sheet.give(f"{key}_held_gib", "held from step to step", total(found.held) / GIB, "GiB", "the sum")
    told = f"{number(total(found.held) / GIB)} + {number(found.worst.amount / GIB)} of a micro-batch"
    sheet.give(f"{key}_peak_gib", "peak", found.peak / GIB, "GiB", told)
    size = config.node.gpu_memory_gib
    room = None if size is None else MARGIN * size
    fits = None if room is None else found.peak <= room * GIB
    ask = "node.gpu_memory_gib"
    sheet.give(
        f"{key}_fits", "fits", fits, "", f"{number(found.peak / GIB)} of {number(room)} GiB: {MARGIN:.0%} of node.gpu_memory_gib", ask
    )
    most = None if room is None else largest_batch(shape, ranks, room * GIB, lambda tokens: _planned(sheet, config, tokens))
    sheet.give(f"{key}_batch", "largest train.batch_tokens", most, "tokens", "the same with fewer tokens, its longest row cut to them", ask)


def _planned(sheet: Sheet, config: Config, tokens: int) -> Work:
    work = _work(sheet, config, tokens, config.prep.max_length)
    assert work is not None
    return work


def _ranks(config: Config) -> Ranks:
    device: Literal["cuda", "cpu"] = "cpu" if config.target.device == "cpu" else "cuda"
    return Ranks(config.node.gpus, 2 if config.train.precision == "bf16" else 4, device)
