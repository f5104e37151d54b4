"""The stage: prompts -> replies -> rows -> hidden states, for training and for the two held-out sets.

    eyas prep -c CONFIG        (or: python -m data_prep -c CONFIG)

Reads ``prep.sources``; writes ``output/replies`` and ``output/states/{train,greedy,sampled}`` (each with a manifest) and
``output/states/token_counts.safetensors``. What is current is skipped, what was interrupted is resumed; the target is loaded only
when something is left to do. Cost: SmolLM2-135M on a CPU spends most of it on the replies, see the rates in the table it ends with.
"""

from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from data_prep.capture_hf import CaptureReport, capture
from data_prep.prompts import split_prompts
from data_prep.replies import QUARANTINE, SETS, read_rows, write_quarantine, write_replies
from data_prep.rows import Row, require_share
from eyas.attention_hf import NAME as ATTENTION
from eyas.config import Config
from eyas.conventions import family_of
from eyas.files import atomic_path, digest_json
from eyas.folder import DrafterFolder, read_drafter
from eyas.manifest import is_current, read_manifest
from eyas.states import StateSpec, finish_store
from eyas.target import Target, open_target, pick_device
from eyas.vocab import choose_vocab, coverage

TOKEN_COUNTS = "token_counts.safetensors"


def run_prep(config: Config) -> None:
    """Run the stage and print a table of what it holds.

    Raises EyasError for unusable sources, target or drafter, for folders begun with other settings, when the capture's proof fails,
    and when more than ``prep.max_quarantine`` of the rows are unusable.
    """
    console = Console()
    target = open_target(config.target)
    drafter = None if config.drafter.init == "scratch" else _warm_start(config, target)
    spec = state_spec(config, target, drafter)
    split = split_prompts(config.prep, config.seed)

    @cache
    def model() -> PreTrainedModel:
        return target.load_model(getattr(torch, config.target.dtype), pick_device(config.target.device), ATTENTION)

    write_replies(config, target, split, model)
    rows = {name: read_rows(config, target, name).usable for name in SETS}
    for name in SETS:
        _states(config, target, spec, name, rows[name], model)
    counts_V = supervised_counts(rows["train"], target.shape.vocab_size)
    with atomic_path(config.folder("states") / TOKEN_COUNTS) as temporary:
        save_file({"counts": counts_V}, temporary)
    console.print(_table(config))
    for line in _notes(config, split.dropped, spec, counts_V, drafter):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def state_spec(config: Config, target: Target, drafter: DrafterFolder | None) -> StateSpec:
    """What the stores hold. Layers: ``prep.states.layers``, else those the warm start was trained on, else the target's default."""
    recorded = None if drafter is None else drafter.layers or next(iter(drafter.candidates), None)
    layers = tuple(config.prep.states.layers or recorded or target.default_layers())
    shape = target.shape
    return StateSpec(layers, shape.hidden_size, config.prep.states.dtype, shape.vocab_size, target.digest, target.tokenizer_digest)


def supervised_counts(rows: list[Row], vocab_size: int) -> Tensor:
    """How often each target token is supervised, int64 [V]: what a fresh drafter's vocabulary is chosen from."""
    ids = [token for row in rows for token, flag in zip(row.tokens.ids, row.tokens.supervised, strict=True) if flag]
    return torch.bincount(torch.tensor(ids, dtype=torch.long), minlength=vocab_size)


def _warm_start(config: Config, target: Target) -> DrafterFolder:
    return read_drafter(config.drafter.init, torch.bfloat16, family_of(target.shape.model_type))


def _states(config: Config, target: Target, spec: StateSpec, name: str, rows: list[Row], model: Callable[[], PreTrainedModel]) -> None:
    """Capture one set, unless its store is complete and of these very rows."""
    folder = config.folder(f"states/{name}")
    digest = digest_json(sorted(row.key for row in rows))
    if is_current(folder, "states", spec.to_json(), {}) and read_manifest(folder).holds.get("rows_digest") == digest:
        return
    report = capture(model(), target, rows, folder, spec, config.prep.states, name)
    reasons = Counter(fault.reason for fault in report.quarantined)
    if reasons:
        write_quarantine(folder, {name: report.quarantined})
        require_share(reasons.total(), len(rows), reasons, config.prep)
    finish_store(folder, {"rows_digest": digest, "quarantined": dict(reasons), **_proof(report)})


def _proof(report: CaptureReport) -> dict[str, Any]:
    """What a manifest tells of the capture; rates are of the process that finished it."""
    return {
        "padding_share": round(report.padding_share, 4),
        "tokens_per_second": round(report.tokens / report.seconds) if report.seconds else None,
        "rechecked": report.rechecked,
        "worst_state_error": report.worst_state,
        "worst_logit_error": report.worst_logit,
    }


def _table(config: Config) -> Table:
    replies = read_manifest(config.folder("replies"), "replies").holds["sets"]
    columns = [_figures(replies[name], read_manifest(config.folder(f"states/{name}"), "states").holds) for name in SETS]
    table = Table("", *SETS, title="prep")
    for place in range(1, len(SETS) + 1):
        table.columns[place].justify = "right"
    for figure in columns[0]:
        table.add_row(figure, *(column[figure] for column in columns))
    return table


def _figures(answered: dict[str, Any], stored: dict[str, Any]) -> dict[str, str]:
    return {
        "replies": f"{answered['replies']:,}",
        "finished by themselves": f"{answered['finished'] / max(answered['replies'], 1):.0%}",
        "ending in a loop": f"{answered['looping']:,}",
        "tokens a second, replies": _rate(answered["tokens_per_second"]),
        "rows": f"{stored['rows']:,}",
        "tokens": f"{stored['tokens']:,}",
        "of them supervised": f"{stored['supervised']:,}",
        "tokens a second, capture": _rate(stored["tokens_per_second"]),
        "padding": f"{stored['padding_share']:.1%}",
        "MB on disk": f"{stored['bytes'] / 1e6:,.1f}",
    }


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def _notes(config: Config, dropped: dict[str, int], spec: StateSpec, counts_V: Tensor, drafter: DrafterFolder | None) -> list[str]:
    manifests = [read_manifest(config.folder("replies"))] + [read_manifest(config.folder(f"states/{name}")) for name in SETS]
    reasons = sum((Counter(manifest.holds["quarantined"]) for manifest in manifests), Counter[str]())
    omitted = sum(counts["omitted"] for counts in manifests[0].holds["sets"].values())
    notes = [f"layers: hidden_states{list(spec.layers)} and final, {spec.dtype}"]
    notes.append(f"quarantined: {_named(reasons)}" + (f" ({QUARANTINE} beside the set tells which)" if reasons else ""))
    notes.append(f"prompts dropped: {_named(dropped)}")
    if omitted:
        notes.append(f"unfinished replies left out (prep.replies.unfinished: drop): {omitted}")
    return [*notes, *_coverage(config, spec, counts_V, drafter)]


def _coverage(config: Config, spec: StateSpec, counts_V: Tensor, drafter: DrafterFolder | None) -> list[str]:
    """How much of the training text the warm start's draft vocabulary covers, and the one that will be chosen."""
    size, own_ids_D = config.drafter.draft_vocab_size, None if drafter is None else drafter.drafter.draft_ids_D
    told = [] if own_ids_D is None else [(f"of {config.drafter.init}", own_ids_D)]
    if size or own_ids_D is None:
        told.append(("chosen on the training text", choose_vocab(counts_V, size or spec.vocab_size, own_ids_D)))
    return [
        f"draft vocabulary {source}: {len(ids_D):,} tokens cover {coverage(counts_V, ids_D):.2%} of the supervised training tokens"
        for source, ids_D in told
    ]


def _named(counts: dict[str, int]) -> str:
    return ", ".join(f"{count:,} {reason}" for reason, count in sorted(counts.items(), key=lambda item: -item[1])) or "none"
