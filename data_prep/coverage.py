"""How much of the user's text a draft vocabulary covers, and what another one would bring: the lines with which prep ends."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from data_prep.rows import Row
from eyas.config import Config
from eyas.drafter import Drafter
from eyas.vocab import choose_vocab, coverage, expected_length, membership


def supervised_counts(rows: Sequence[Row], vocab_size: int) -> Tensor:
    """How often each target token is supervised, int64 [V]: what a draft vocabulary is chosen from."""
    ids = [token for row in rows for token in _said(row)]
    return torch.bincount(torch.tensor(ids, dtype=torch.long), minlength=vocab_size)


def coverage_notes(
    config: Config, rows: Mapping[str, Sequence[Row]], counts_V: Tensor, drafter: Drafter | None, measured: Mapping[str, Any] | None
) -> list[str]:
    """Coverage of the training text by the warm start's draft vocabulary, and by the one that will be chosen; where both are there, what
    the change promises.

    rows: by set. counts_V: supervised tokens of the training rows. measured: ``warm_start.measure_warm_start``'s record.
    """
    size, own_ids_D = config.drafter.draft_vocab_size, None if drafter is None else drafter.draft_ids_D
    found = {} if own_ids_D is None else {f"of {config.drafter.init}": own_ids_D}
    if size or own_ids_D is None:
        found["chosen on the training text"] = choose_vocab(counts_V, size or len(counts_V), own_ids_D)
    notes = [
        f"draft vocabulary {source}: {len(ids_D):,} tokens cover {coverage(counts_V, ids_D):.2%} of the supervised training tokens"
        for source, ids_D in found.items()
    ]
    if measured is not None and len(found) == 2:
        rates = next(reading["conditional_J"] for reading in measured["readings"] if reading["layers"] == measured["layers"])
        notes += gain_notes(rows["greedy"], found, len(counts_V), rates)
    return notes


def gain_notes(greedy: Sequence[Row], vocabularies: Mapping[str, Tensor], vocab_size: int, rates: Sequence[float | None]) -> list[str]:
    """What changing from the first to the second of ``vocabularies`` promises, on greedily answered held-out rows, whose tokens are the
    target's argmax.

    rates: conditional acceptance rates of the untouched drafter. The estimate is ``vocab.expected_length``.
    """
    said_by_row = [torch.tensor(_said(row), dtype=torch.long) for row in greedy]
    said, notes, covered = sum(map(len, said_by_row)), [], []
    for source, ids_D in vocabularies.items():
        outside_V = ~membership(ids_D, vocab_size)
        outside = [int(outside_V[said_S].sum()) for said_S in said_by_row]
        covered.append(1 - sum(outside) / said)
        notes.append(
            f"draft vocabulary {source}: {sum(outside):,} of the {said:,} tokens that the target says greedily to held-out prompts are "
            f"outside ({1 - covered[-1]:.2%}), in {sum(map(bool, outside)):,} of {len(greedy):,} replies"
        )
    if covered[0] > 0:
        before, after = (expected_length(rates, covered[0], share) for share in covered)
        notes.append(
            f"expected of the new draft vocabulary by its coverage, once its new rows are trained: acceptance length {before:.3f} -> "
            f"{after:.3f} ({after - before:+.3f})"
        )
    return notes


def _said(row: Row) -> list[int]:
    """The supervised tokens of a row."""
    return [token for token, flag in zip(row.tokens.ids, row.tokens.supervised, strict=True) if flag]
