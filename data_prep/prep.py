"""The stage: prompts -> replies -> rows -> hidden states, for training and for the two held-out sets.

    eyas prep -c CONFIG        (or: python -m data_prep -c CONFIG)

Reads ``prep.sources``; writes ``output/replies`` and ``output/states/{train,greedy,sampled}`` (each with a manifest) and
``output/states/token_counts.safetensors``. What is current is skipped, what was interrupted is resumed; the target is loaded only
when something is left to do. Cost: SmolLM2-135M on a CPU spends most of it on the replies, see the rates in the table it ends with.
"""

from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from data_prep.capture_hf import CaptureReport, capture
from data_prep.capture_request import StartServer
from data_prep.capture_server import ServedCapture
from data_prep.coverage import coverage_notes, supervised_counts
from data_prep.prompts import split_prompts
from data_prep.replies import QUARANTINE, SETS, read_rows, write_quarantine, write_replies
from data_prep.rows import Row, require_share
from data_prep.warm_start import Capture, candidate_layers, measure_warm_start, readings_table, serving_note
from eyas.attention_hf import NAME as ATTENTION
from eyas.config import Config
from eyas.conventions import family_of
from eyas.errors import EyasError
from eyas.files import atomic_path, digest_json
from eyas.folder import DrafterFolder, read_drafter
from eyas.manifest import is_current, read_manifest
from eyas.state_row import LARGEST_VOCAB
from eyas.states import StateSpec, finish_store
from eyas.target import Target, open_target, pick_device
from eyas.vocab import drafter_vocab, vocab_digest

TOKEN_COUNTS = "token_counts.safetensors"


def run_prep(config: Config, start_server: StartServer | None = None) -> None:
    """Run the stage and print a table of what it holds. ``start_server`` runs the configured engine: for ``prep.states.backend`` sglang and
    vllm, and for ``prep.replies.mode: server`` where no servers are named.

    Raises EyasError for unusable sources, target or drafter, for folders begun with other settings, when the capture's proof fails,
    and when more than ``prep.max_quarantine`` of the rows are unusable.
    """
    console = Console()
    target = open_target(config.target)
    drafter = None if config.drafter.init == "scratch" else _warm_start(config, target)
    candidates = candidate_layers(config, target, drafter)
    split = split_prompts(config.prep, config.seed)

    @cache
    def model() -> PreTrainedModel:
        return target.load_model(getattr(torch, config.target.dtype), pick_device(config.target.device), ATTENTION)

    def capture_here(rows: Sequence[Row], folder: Path, spec: StateSpec, name: str) -> CaptureReport:
        return capture(model(), target, rows, folder, spec, config.prep.states, name, draft_ids_D)

    served = None
    if config.prep.states.backend != "hf":
        if start_server is None:
            raise EyasError(f"prep.states.backend {config.prep.states.backend} needs somebody to start its server, as `eyas prep` does")
        served = ServedCapture(config, target, start_server)
    run_capture = served or capture_here
    with ExitStack() as stack:

        @cache
        def reply_servers() -> Sequence[str]:
            named = config.prep.replies.servers
            if named or start_server is None or config.engine.kind == "embedded":
                return named
            return [stack.enter_context(start_server({}, {}))]

        write_replies(config, target, split, model, reply_servers)
    rows = {name: read_rows(config, target, name).usable for name in SETS}
    counts_V = supervised_counts(rows["train"], target.shape.vocab_size)
    draft_ids_D = drafter_vocab(counts_V, config.drafter.draft_vocab_size, None if drafter is None else drafter.drafter.draft_ids_D)
    measured = None
    with served or nullcontext():
        if drafter is not None and (len(candidates) > 1 or config.drafter.draft_vocab_size):
            measured = measure_warm_start(config, target, drafter, candidates, rows, run_capture)
            console.print(readings_table(measured))
            if warning := serving_note(config, drafter, measured["layers"], family_of(target.shape.model_type)):
                console.print(warning, highlight=False, markup=False, soft_wrap=True)
        spec = state_spec(config, target, measured["layers"] if measured else candidates[0], draft_ids_D)
        for name in SETS:
            _states(config, spec, name, rows[name], run_capture, measured)
    with atomic_path(config.folder("states") / TOKEN_COUNTS) as temporary:
        save_file({"counts": counts_V}, temporary)
    console.print(_table(config))
    covered = coverage_notes(config, rows, counts_V, None if drafter is None else drafter.drafter, measured)
    for line in _notes(config, split.dropped, spec, measured) + covered:
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def state_spec(config: Config, target: Target, layers: Sequence[int], draft_ids_D: Tensor) -> StateSpec:
    """What the stores hold, for a drafter of this draft vocabulary. Raises EyasError where ``prep.states.top_logprobs`` does not fit it."""
    shape, k, drafts = target.shape, config.prep.states.top_logprobs, len(draft_ids_D)
    final = StateSpec(tuple(layers), shape.hidden_size, config.prep.states.dtype, shape.vocab_size, target.digest, target.tokenizer_digest)
    if k is None:
        return final
    if k > drafts or drafts > LARGEST_VOCAB:
        raise EyasError(
            f"prep.states.top_logprobs is {k}, of a draft vocabulary of {drafts:,} tokens: at most that many, of at most {LARGEST_VOCAB:,} "
            "(drafter.draft_vocab_size)"
        )
    return replace(final, top_logprobs=k, vocab_digest=vocab_digest(draft_ids_D))


def _warm_start(config: Config, target: Target) -> DrafterFolder:
    return read_drafter(config.drafter.init, torch.float32, family_of(target.shape.model_type))


def _states(config: Config, spec: StateSpec, name: str, rows: list[Row], run_capture: Capture, measured: dict[str, Any] | None) -> None:
    """Capture one set, unless its store is complete and of these very rows."""
    folder = config.folder(f"states/{name}")
    digest = digest_json(sorted(row.key for row in rows))
    if is_current(folder, "states", spec.to_json(), {}) and read_manifest(folder).holds.get("rows_digest") == digest:
        return
    report = run_capture(rows, folder, spec, name)
    reasons = Counter(fault.reason for fault in report.quarantined)
    if reasons:
        write_quarantine(folder, {name: report.quarantined})
        require_share(reasons.total(), len(rows), reasons, config.prep)
    finish_store(folder, {"rows_digest": digest, "quarantined": dict(reasons), "warm_start": measured, **_proof(report)})


def _proof(report: CaptureReport) -> dict[str, Any]:
    """What a manifest tells of the capture; rates are of the process that finished it."""
    return {
        "padding_share": round(report.padding_share, 4),
        "tokens_per_second": round(report.tokens / report.seconds) if report.seconds else None,
        "captured_by": report.by,
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


def _notes(config: Config, dropped: dict[str, int], spec: StateSpec, measured: dict[str, Any] | None) -> list[str]:
    manifests = [read_manifest(config.folder("replies"))] + [read_manifest(config.folder(f"states/{name}")) for name in SETS]
    reasons = sum((Counter(manifest.holds["quarantined"]) for manifest in manifests), Counter[str]())
    omitted = sum(counts["omitted"] for counts in manifests[0].holds["sets"].values())
    kept = "final" if spec.top_logprobs is None else f"{spec.top_logprobs} log-probabilities of the draft vocabulary"
    notes = [f"layers: hidden_states{list(spec.layers)} and {kept}, {spec.dtype}"]
    if measured is not None:
        notes.append(f"{config.drafter.init}: {measured['reason']}")
    notes.append(f"quarantined: {_named(reasons)}" + (f" ({QUARANTINE} beside the set tells which)" if reasons else ""))
    notes.append(f"prompts dropped: {_named(dropped)}")
    if omitted:
        notes.append(f"unfinished replies left out (prep.replies.unfinished: drop): {omitted}")
    return notes


def _named(counts: dict[str, int]) -> str:
    return ", ".join(f"{count:,} {reason}" for reason, count in sorted(counts.items(), key=lambda item: -item[1])) or "none"
