"""The target's states along what a server has served: from the target itself where it fits into memory, else from the held-out store.

The target gives any layer's states for any text. The store has those of the trained layers, for its own replies; a served text is followed
as far as it is the stored one, which for greedy replies is mostly far.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from eval.replay import Case, Served
from eyas.attention_hf import NAME as ATTENTION
from eyas.config import Config
from eyas.errors import EyasError
from eyas.manifest import NAME as MANIFEST
from eyas.probe import LayerInputs
from eyas.shard import read_header
from eyas.states import StateRow, StateStore
from eyas.target import Target, pick_device
from eyas.weights import weight_files

ROOM = 0.8
"""Share of the free memory that the target may take."""
SAME = 0.1
"""Median relative error below which two states are equal but for rounding (bfloat16: 0.02). Neighbouring layers differ by 0.15 or more."""
_ITEM = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2}


@dataclass(frozen=True)
class Followed:
    """Cases to replay, and the layers whose states they have. agreement: share of served tokens that are our target's own choice."""

    cases: list[Case]
    layers: tuple[int, ...]
    agreement: float | None


class FromTarget:
    """States that the target computes here, of any layer."""

    def __init__(self, target: Target, dtype: torch.dtype, device: torch.device) -> None:
        self._model = target.load_model(dtype, device, ATTENTION)
        self._device = device
        self.layers = tuple(range(target.shape.num_layers))

    @torch.inference_mode()
    def follow(self, served: Sequence[Served], layers: Sequence[int]) -> Followed:
        """Run the target over each served text."""
        cases, chosen, tokens = [], 0, 0
        with LayerInputs(self._model, layers) as inputs:
            for request in served:
                ids, count = [*request.prompt_ids, *request.output_ids], len(request.output_ids)
                row_1T = torch.tensor([ids], device=self._device)
                logits_MV = self._model(input_ids=row_1T, use_cache=False, logits_to_keep=count + 1).logits[0]
                chosen += int((logits_MV[:-1].argmax(-1) == row_1T[0, -count:]).sum())
                tokens += count
                states = {layer: state_1TH[0].clone() for layer, state_1TH in inputs.states.items()}
                cases.append(Case(ids, len(request.prompt_ids), request.accepted, states))
        return Followed(cases, tuple(layers), chosen / tokens if tokens else None)

    @torch.inference_mode()
    def along(self, ids: Sequence[int]) -> dict[int, Tensor]:
        """States of every layer along some tokens: k -> [T, H]."""
        with LayerInputs(self._model, self.layers) as inputs:
            self._model(input_ids=torch.tensor([list(ids)], device=self._device), use_cache=False, logits_to_keep=1)
            return {layer: state_1TH[0] for layer, state_1TH in inputs.states.items()}


class FromStore:
    """States that prep captured (states/greedy), of the trained layers. Raises EyasError when there are none."""

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device) -> None:
        if not (folder / MANIFEST).is_file():
            raise EyasError(f"the target does not fit into memory here, and {folder} does not exist")
        self._store, self._dtype, self._device = StateStore(folder), dtype, device
        self.layers = self._store.spec.layers

    def follow(self, served: Sequence[Served], layers: Sequence[int]) -> Followed:
        """Take the stored states of each served text as far as it is the stored one; ``layers`` are the store's, whatever is asked."""
        rows = {tuple(row.ids_T[~row.supervised_T].tolist()): row for row in self._rows()}
        cases = []
        for request in served:
            row = rows.get(tuple(request.prompt_ids))
            if row is None:
                continue
            ids = [*request.prompt_ids, *request.output_ids]
            shared = _shared(ids, row.ids_T.tolist())
            accepted = _within(request, shared)
            if accepted:
                cases.append(Case(ids[:shared], len(request.prompt_ids), accepted, self._states(row, shared)))
        if not cases:
            raise EyasError(f"no served reply begins as in {self._store.folder}")
        return Followed(cases, self.layers, None)

    def along(self, ids: Sequence[int]) -> dict[int, Tensor]:
        """States of the stored layers along a row's first tokens; empty when no row begins so."""
        row = next((row for row in self._rows() if row.ids_T[: len(ids)].tolist() == list(ids)), None)
        return {} if row is None else self._states(row, len(ids))

    def _rows(self) -> Iterator[StateRow]:
        return (self._store.read(i) for i in range(len(self._store)))

    def _states(self, row: StateRow, count: int) -> dict[int, Tensor]:
        parts = row.aux_TA[:count].to(self._device, self._dtype).split(self._store.spec.hidden_size, dim=-1)
        return dict(zip(self.layers, parts, strict=True))


def source_of_states(config: Config, target: Target) -> FromTarget | FromStore:
    """The target, if its weights fit into the memory of its device, else the held-out store. Raises EyasError when there is neither."""
    dtype, device = getattr(torch, config.engine.dtype), pick_device(config.target.device)
    if fits(target, dtype, device):
        return FromTarget(target, dtype, device)
    return FromStore(config.folder("states/greedy"), dtype, device)


def fits(target: Target, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the target's weights are here and find room on ``device``; of quantised ones nobody knows here what they grow to."""
    if not target.is_whole:
        return False
    kinds = [(entry.dtype, prod(entry.shape)) for file in weight_files(target.folder) for entry in read_header(file).tensors.values()]
    if any(kind not in _ITEM for kind, _ in kinds):
        return False
    return sum(count for _, count in kinds) * dtype.itemsize < ROOM * _free(device)


def recognised(aux_TA: Tensor, states: Mapping[int, Tensor]) -> tuple[tuple[int | None, ...], float]:
    """Which of ``states`` (k -> [T, H]) the chunks of ``aux_TA`` are, None for one that is none of them, and the largest error of those
    that are: of a chunk the median over tokens of the relative error."""
    width = next(iter(states.values())).shape[-1]
    found: list[int | None] = []
    worst = 0.0
    for chunk_TH in aux_TA.split(width, dim=-1):
        errors = {layer: _error(chunk_TH, state_TH) for layer, state_TH in states.items()}
        nearest = min(errors, key=lambda layer: errors[layer])
        same = errors[nearest] < SAME
        found.append(nearest if same else None)
        worst = max(worst, errors[nearest]) if same else worst
    return tuple(found), worst


def _error(one_TH: Tensor, other_TH: Tensor) -> float:
    if one_TH.shape != other_TH.shape:
        return float("inf")
    one_TH, other_TH = one_TH.float(), other_TH.float().to(one_TH.device)
    return float(((one_TH - other_TH).norm(dim=-1) / other_TH.norm(dim=-1).clamp_min(1e-6)).median())


def _shared(ids: Sequence[int], stored: Sequence[int]) -> int:
    differ = (place for place, (one, other) in enumerate(zip(ids, stored, strict=False)) if one != other)
    return next(differ, min(len(ids), len(stored)))


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
