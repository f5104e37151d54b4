"""The target's states along what a server has served: from the target itself where it fits into memory, else from the held-out store.

The target gives any layer's states for any text. The store has those of the trained layers, for its own replies; a served text is followed
as far as it is the stored one, which for greedy replies is mostly far.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch

from eval.replay import Case, Served
from eyas.attention_hf import NAME as ATTENTION
from eyas.errors import EyasError
from eyas.manifest import NAME as MANIFEST
from eyas.probe import LayerInputs
from eyas.shard import read_header
from eyas.states import StateStore
from eyas.target import Target
from eyas.weights import weight_files

ROOM = 0.8
"""Share of the free memory that the target may take."""
_ITEM = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2}


@dataclass(frozen=True)
class Followed:
    """Cases to replay, and the layers whose states they have. agreement: share of served tokens that are our target's own choice."""

    cases: list[Case]
    layers: tuple[int, ...]
    agreement: float | None


def fits(target: Target, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the target's weights find room on ``device``; of quantised weights nobody knows here what they grow to."""
    kinds = [(entry.dtype, prod(entry.shape)) for file in weight_files(target.folder) for entry in read_header(file).tensors.values()]
    if any(kind not in _ITEM for kind, _ in kinds):
        return False
    return sum(count for _, count in kinds) * dtype.itemsize < ROOM * _free(device)


def along_target(target: Target, served: Sequence[Served], layers: Sequence[int], dtype: torch.dtype, device: torch.device) -> Followed:
    """Run the target over each served text."""
    model = target.load_model(dtype, device, ATTENTION)
    cases, chosen, tokens = [], 0, 0
    with LayerInputs(model, layers) as inputs, torch.inference_mode():
        for request in served:
            ids = [*request.prompt_ids, *request.output_ids]
            count = len(request.output_ids)
            row_1T = torch.tensor([ids], device=device)
            logits_MV = model(input_ids=row_1T, use_cache=False, logits_to_keep=count + 1).logits[0]
            chosen += int((logits_MV[:-1].argmax(-1) == row_1T[0, -count:]).sum())
            tokens += count
            states = {layer: state_1TH[0].clone() for layer, state_1TH in inputs.states.items()}
            cases.append(Case(ids, len(request.prompt_ids), request.accepted, states))
    return Followed(cases, tuple(layers), chosen / tokens if tokens else None)


def along_store(folder: Path, served: Sequence[Served], dtype: torch.dtype, device: torch.device) -> Followed:
    """Take the states of the same texts from ``folder`` (states/greedy). Raises EyasError when it is no store, or no text agrees."""
    if not (folder / MANIFEST).is_file():
        raise EyasError(f"{folder} does not exist")
    store = StateStore(folder)
    rows = {tuple(row.ids_T[~row.supervised_T].tolist()): row for row in (store.read(i) for i in range(len(store)))}
    cases = []
    for request in served:
        row = rows.get(tuple(request.prompt_ids))
        if row is None:
            continue
        ids = [*request.prompt_ids, *request.output_ids]
        shared = next((i for i, (one, two) in enumerate(zip(ids, row.ids_T.tolist(), strict=False)) if one != two), len(ids))
        shared = min(shared, len(row.ids_T))
        accepted = _within(request, shared)
        if accepted:
            parts = row.aux_TA[:shared].to(device, dtype).split(store.spec.hidden_size, dim=-1)
            states = dict(zip(store.spec.layers, parts, strict=True))
            cases.append(Case(ids[:shared], len(request.prompt_ids), accepted, states))
    if not cases:
        raise EyasError(f"no served reply begins as in {folder}")
    return Followed(cases, store.spec.layers, None)


def _within(request: Served, tokens: int) -> list[int]:
    """The steps that end among the first ``tokens`` tokens, with the token behind them, which shows that they end there."""
    end, kept = len(request.prompt_ids) + 1, []
    for accepted in request.accepted:
        end += accepted + 1
        if end > tokens:
            break
        kept.append(accepted)
    return kept


def _free(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return 0
