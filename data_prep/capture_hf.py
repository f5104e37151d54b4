"""Hidden states through transformers: aux layers and the final state of every token of every row, into a state store.

Rows are sorted by length and padded on the right to the longest of a batch of at most ``batch_tokens``; attention is causal, so padding
behind a row changes nothing in it. Forward pre-hooks keep the wanted layers' inputs only (transformers' own ``output_hidden_states``
keeps every layer's).

The capture proves itself on the first row it runs and on a sample of rows throughout: such a row goes alone through the model's ordinary
forward, lm_head of its final state must be the logits the model gives, and the states captured in the batch must be its states.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel

from data_prep.rows import Quarantined, Row
from eyas.config import StatesConfig
from eyas.distribution import TopLogProbs, top_log_probs
from eyas.errors import EyasError
from eyas.probe import LayerInputs
from eyas.progress import Task
from eyas.states import NotFinite, StateRow, StateSpec, StateWriter
from eyas.target import Target

# Largest relative error (norm of the difference over norm, of one token's state of one layer) between a row alone and in a batch.
# Other batch shapes take other matrix kernels, whose rounding differs; a wrong row, layer or position differs by about 1.
STATE_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.15}
# Largest difference of a logit from lm_head(final), relative to the largest logit of the row.
LOGIT_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
LIKE_LENGTH = 0.85
MB = 2**20


@dataclass
class CaptureReport:
    """What one capture did: tokens run now, of these padding; rows proved, worst relative errors found; rows that could not be stored."""

    by: str = f"transformers {transformers.__version__}"
    tokens: int = 0
    padding: int = 0
    seconds: float = 0.0
    rechecked: int = 0
    worst_state: float = 0.0
    worst_logit: float = 0.0
    quarantined: list[Quarantined] = field(default_factory=list)

    @property
    def padding_share(self) -> float:
        """Share of the computed positions that were padding."""
        return self.padding / max(self.tokens + self.padding, 1)


def capture(
    model: PreTrainedModel,
    target: Target,
    rows: Sequence[Row],
    folder: Path,
    spec: StateSpec,
    states: StatesConfig,
    name: str,
    draft_ids_D: Tensor | None = None,
) -> CaptureReport:
    """Store the states of ``rows`` that ``folder`` does not have yet. ``draft_ids_D``: the draft vocabulary of ``spec.top_logprobs``.

    The batches are the same whether or not a run was interrupted; a batch whose rows are all stored is skipped.
    Raises EyasError when the states fail their proof, or when the store has rows other than these.
    """
    report = CaptureReport()
    by_key = {row.key: row for row in rows}
    with StateWriter(folder, spec, states.shard_mb * MB) as writer:
        foreign = writer.keys - by_key.keys()
        if foreign:
            raise EyasError(f"{folder} holds {len(foreign)} rows that the replies do not have; remove it to capture anew")
        done = sum(len(by_key[key].tokens.ids) for key in writer.keys)
        total = sum(len(row.tokens.ids) for row in rows)
        with Task(f"capture ({name})", total=total, unit="tokens", done=done) as task, Probe(model, spec.layers) as probe:
            proof = Proof(model, target, spec)
            distribution = None
            if spec.top_logprobs is not None:
                assert draft_ids_D is not None
                distribution = partial(top_log_probs, head_VH=proof.head_VH, draft_ids_D=draft_ids_D.to(model.device), k=spec.top_logprobs)
            for batch in batches(rows, states.batch_tokens):
                missing = [row for row in batch if row.key not in writer.keys]
                if not missing:
                    continue
                aux_BTA, final_BTH = probe(batch, target.shape.pad_id)
                for index, row in enumerate(batch):
                    length = len(row.tokens.ids)
                    aux_TA, final_TH = aux_BTA[index, :length], final_BTH[index, :length]
                    if not report.rechecked or sampled(row.key, states.recheck):
                        proof.check(row, aux_TA, final_TH, report)
                    _store(writer, row, aux_TA, final_TH, distribution, report)
                tokens = sum(len(row.tokens.ids) for row in batch)
                report.tokens += tokens
                report.padding += len(batch) * len(batch[0].tokens.ids) - tokens
                task.advance(sum(len(row.tokens.ids) for row in missing), note=f"padding {report.padding_share:.1%}")
            report.seconds = report.tokens / task.rate() if report.tokens else 0.0
    return report


def batches(rows: Sequence[Row], batch_tokens: int) -> Iterator[list[Row]]:
    """Rows in batches of like length, longest first; a batch times its longest row is at most ``batch_tokens`` (one row may exceed it).

    A batch that is at least a quarter full takes no row much shorter than its longest: a smaller batch costs less than the padding.
    """
    batch: list[Row] = []
    for row in sorted(rows, key=lambda row: (-len(row.tokens.ids), row.key)):
        length, longest = len(row.tokens.ids), len(batch[0].tokens.ids) if batch else 0
        full = (len(batch) + 1) * longest > batch_tokens
        uneven = 4 * len(batch) * longest >= batch_tokens and length < LIKE_LENGTH * longest
        if batch and (full or uneven):
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch


class Probe:
    """Runs batches through the target's decoder and keeps the inputs of ``layers`` and the normed output."""

    def __init__(self, model: PreTrainedModel, layers: Sequence[int]) -> None:
        self._decoder: Any = model.get_decoder()
        self._device = model.device
        self._inputs = LayerInputs(model, layers)

    def __enter__(self) -> "Probe":
        return self

    def __exit__(self, *_: object) -> None:
        self._inputs.close()

    @torch.inference_mode()
    def __call__(self, batch: Sequence[Row], pad_id: int) -> tuple[Tensor, Tensor]:
        """Return aux states [B, T, A] and final states [B, T, H] of a batch padded to its first, longest row."""
        ids_BT = torch.full((len(batch), len(batch[0].tokens.ids)), pad_id)
        for index, row in enumerate(batch):
            ids_BT[index, : len(row.tokens.ids)] = torch.tensor(row.tokens.ids)
        final_BTH = self._decoder(input_ids=ids_BT.to(self._device), use_cache=False).last_hidden_state
        return self._inputs.aux(), final_BTH


class Proof:
    """Compares captured states with what the model's ordinary forward says about the row alone."""

    def __init__(self, model: PreTrainedModel, target: Target, spec: StateSpec) -> None:
        self._model, self._layers = model, spec.layers
        self._hidden_size = spec.hidden_size
        self.head_VH = target.lm_head(model.dtype).to(model.device)

    @torch.inference_mode()
    def check(self, row: Row, aux_TA: Tensor, final_TH: Tensor, report: CaptureReport) -> None:
        """Add the row's errors to ``report``. Raises EyasError naming what differs and by how much; non-finite rows pass (quarantined)."""
        if not (aux_TA.isfinite().all() and final_TH.isfinite().all()):
            return
        output = self._model(
            input_ids=torch.tensor([row.tokens.ids], device=self._model.device), output_hidden_states=True, use_cache=False
        )
        states = output.hidden_states
        logits_TV = output.logits[0].float()
        difference = (nn.functional.linear(states[-1][0], self.head_VH).float() - logits_TV).abs().max()
        logit_error = float(difference / logits_TV.abs().max())
        report.worst_logit = max(report.worst_logit, logit_error)
        if not logit_error <= LOGIT_TOLERANCE[self._model.dtype]:
            raise EyasError(
                f"row {row.key[:12]}: lm_head(hidden_states[-1]) differs from the model's logits by {logit_error:.2g} of the largest: "
                "training could not rebuild this target's distribution from its final state"
            )
        pairs = [(f"hidden_states[{layer}]", states[layer][0]) for layer in self._layers] + [("the final state", states[-1][0])]
        captured = [*aux_TA.split(self._hidden_size, dim=-1), final_TH]
        for (name, alone_TH), batched_TH in zip(pairs, captured, strict=True):
            error = relative_error(batched_TH, alone_TH)
            report.worst_state = max(report.worst_state, error)
            if not error <= STATE_TOLERANCE[self._model.dtype]:
                raise EyasError(f"row {row.key[:12]}: {name} captured in a batch differs from the row alone by {error:.2g} of its norm")
        report.rechecked += 1


def relative_error(batched_TH: Tensor, alone_TH: Tensor) -> float:
    """Largest error of one token's state, relative to its norm."""
    alone_TH = alone_TH.float()
    return float(((batched_TH.float() - alone_TH).norm(dim=-1) / alone_TH.norm(dim=-1).clamp_min(1e-6)).max())


def sampled(key: str, share: float) -> bool:
    """Whether a row is among the ``share`` that is proved; a row's key decides."""
    return int(key[:8], 16) < share * 2**32


def _store(
    writer: StateWriter,
    row: Row,
    aux_TA: Tensor,
    final_TH: Tensor,
    distribution: Callable[[Tensor], TopLogProbs] | None,
    report: CaptureReport,
) -> None:
    """Write a row; with ``distribution``, what it makes of the final states in their place."""
    ids_T, supervised_T = torch.tensor(row.tokens.ids), torch.tensor(row.tokens.supervised)
    top = distribution(final_TH) if distribution else None
    try:
        writer.add(StateRow(row.key, row.category, ids_T, supervised_T, aux_TA, final_TH if top is None else final_TH[:, :0], top))
    except NotFinite:
        report.quarantined.append(Quarantined(row.prompt_key, row.category, "states not finite"))
