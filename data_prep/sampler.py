"""On-policy replies: batched sampling through a transformers model, every slot always busy.

A preallocated cache holds one sequence a slot, each at its own length (no left padding). A reply that ended hands its slot to the
next prompt at once; when no prompt is left, the last slot moves into the gap, so a step never computes an idle row. A prompt is
prefilled alone, so its states do not depend on what else is in the batch.

Cost: one target forward per step for ``slots`` tokens, plus one prefill a prompt. SmolLM2-135M in bf16 on one CPU core, 64 slots,
contexts of about 300: some 380 tokens a second of core time in decoding, 1,000 in prefill.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel

from eyas.errors import EyasError

LOOP_PERIOD = 32
LOOP_REPEATS = 4
LOOP_TOKENS = 48
ROOM_STEP = 64


@dataclass(frozen=True)
class Request:
    """One prompt to be answered with at most ``max_new_tokens`` tokens; ``key`` names it and seeds its randomness."""

    key: str
    prompt_ids: list[int]
    max_new_tokens: int


@dataclass(frozen=True)
class Reply:
    """What the target answered: the generated ids, the end token included when it came (``finished``)."""

    key: str
    ids: list[int]
    finished: bool


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen from logits. Temperature 0 is greedy; ``seed`` and a request's key fix its temperature and all its draws."""

    temperatures: tuple[float, ...]
    top_p: float
    seed: int
    stream: str = ""

    def temperature(self, request: Request) -> float:
        """The one of ``temperatures`` at which this request is answered."""
        return self.temperatures[self._number("temperature", request) % len(self.temperatures)]

    def draws(self, request: Request) -> Tensor:
        """Uniform numbers in [0, 1), one a token, of this request alone: float32 [max_new_tokens]."""
        generator = torch.Generator().manual_seed(self.draw_seed(request))
        return torch.rand(request.max_new_tokens, generator=generator)

    def draw_seed(self, request: Request) -> int:
        """What fixes this request's draws, below 2 ** 63."""
        return self._number(self.stream, request)

    def _number(self, purpose: str, request: Request) -> int:
        name = f"{self.seed}/{purpose}/{request.key}".encode()
        return int.from_bytes(hashlib.sha256(name).digest()[:8], "big") >> 1


@dataclass
class _Slot:
    request: Request
    temperature: float
    draws: Tensor
    ids: list[int] = field(default_factory=list)


class SlotCache(Cache):
    """Keys and values of ``slots`` sequences of different lengths, [slots, K, room, d] a layer.

    ``room`` follows the longest sequence in steps of ROOM_STEP positions: attention reads all of it, because a product over part of
    it would copy the part first (half the time of a decode step on a CPU).
    """

    def __init__(self, slots: int) -> None:
        super().__init__(layers=[])
        self.slots, self.room = slots, 0
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self._active_n = self._lengths_n = torch.zeros(0, dtype=torch.long)

    def insert(self, slot: int, prefilled: DynamicCache) -> None:
        """Copy a prefilled prompt into ``slot``. Raises EyasError for layers without full attention."""
        layers: list[Any] = prefilled.layers
        length = prefilled.get_seq_length()
        for layer in layers:
            window = getattr(layer, "sliding_window", None)
            if not hasattr(layer, "keys") or (window is not None and window <= max(self.room, length)):
                raise EyasError(f"this target cannot be sampled: {type(layer).__name__}, where full attention in every layer is needed")
        if not self.keys:
            # zeros, never empty: masked positions get weight 0, and 0 times garbage may be NaN
            self.keys = [layer.keys.new_zeros(self.slots, layer.keys.shape[1], 0, layer.keys.shape[3]) for layer in layers]
            self.values = [layer.values.new_zeros(self.slots, layer.values.shape[1], 0, layer.values.shape[3]) for layer in layers]
        self._make_room(max(length, self.room))
        for layer, keys, values in zip(layers, self.keys, self.values, strict=True):
            keys[slot, :, :length] = layer.keys[0]
            values[slot, :, :length] = layer.values[0]

    def move(self, source: int, slot: int) -> None:
        """Copy slot ``source`` into ``slot``."""
        for tensor in (*self.keys, *self.values):
            tensor[slot] = tensor[source]

    def expect(self, lengths_n: Tensor) -> Tensor:
        """Prepare one decode step of the first n slots, which hold ``lengths_n`` tokens; returns its mask, bool [n, 1, 1, room]."""
        self._active_n = torch.arange(len(lengths_n), device=lengths_n.device)
        self._lengths_n = lengths_n
        self._make_room(int(lengths_n.max()) + 1)
        return (torch.arange(self.room, device=lengths_n.device) <= lengths_n[:, None])[:, None, None]

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Called by the model's attention: store one new key and value per slot, return those of all positions."""
        n = len(self._lengths_n)
        keys, values = self.keys[layer_idx][:n], self.values[layer_idx][:n]
        keys[self._active_n, :, self._lengths_n] = key_states[:, :, 0]
        values[self._active_n, :, self._lengths_n] = value_states[:, :, 0]
        return keys, values

    def _make_room(self, length: int) -> None:
        room = -(-length // ROOM_STEP) * ROOM_STEP
        if self.room - 2 * ROOM_STEP < room <= self.room:
            return
        for tensors in (self.keys, self.values):
            for index, old in enumerate(tensors):
                kept = min(room, self.room)
                tensors[index] = old.new_zeros(*old.shape[:2], room, old.shape[3])
                tensors[index][:, :, :kept] = old[:, :, :kept]
        self.room = room


@torch.inference_mode()
def sample(
    model: PreTrainedModel, requests: Sequence[Request], sampling: Sampling, *, slots: int, stop_ids: Sequence[int]
) -> Iterator[Reply]:
    """Answer ``requests``; replies come as they end, longest prompts first started.

    Each request's randomness is its own, so a reply does not depend on its neighbours (up to rounding in batched products).
    Raises EyasError for targets whose layers are not all full attention.
    """
    waiting = sorted(requests, key=lambda request: (len(request.prompt_ids), request.key))
    if not waiting:
        return
    slots = min(slots, len(waiting))
    cache = SlotCache(slots)
    stop = frozenset(stop_ids)
    device = model.device
    active: list[_Slot] = []
    while waiting or active:
        while waiting and len(active) < slots:
            active.append(_start(model, cache, len(active), waiting.pop(), sampling))
        ids_n1 = torch.tensor([[slot.ids[-1] if slot.ids else slot.request.prompt_ids[-1]] for slot in active], device=device)
        lengths_n = torch.tensor([len(slot.request.prompt_ids) - 1 + len(slot.ids) for slot in active], device=device)
        mask = cache.expect(lengths_n)
        output = model(
            input_ids=ids_n1, attention_mask=mask, position_ids=lengths_n[:, None], past_key_values=cache, use_cache=True, logits_to_keep=1
        )
        draws_n = torch.stack([slot.draws[len(slot.ids)] for slot in active]).to(device)
        temperatures_n = torch.tensor([slot.temperature for slot in active], device=device)
        chosen_n = choose(output.logits[:, -1], temperatures_n, sampling.top_p, draws_n)
        for slot, token in zip(active, chosen_n.tolist(), strict=True):
            slot.ids.append(token)
        for index in reversed(range(len(active))):
            slot = active[index]
            finished = slot.ids[-1] in stop
            if not finished and len(slot.ids) < slot.request.max_new_tokens:
                continue
            yield Reply(slot.request.key, slot.ids, finished)
            if waiting:
                active[index] = _start(model, cache, index, waiting.pop(), sampling)
                continue
            last = active.pop()
            if last is not slot:
                cache.move(len(active), index)
                active[index] = last


def _start(model: PreTrainedModel, cache: SlotCache, index: int, request: Request, sampling: Sampling) -> _Slot:
    """Prefill all but the last prompt token, which the next decode step feeds."""
    if len(request.prompt_ids) < 2 or request.max_new_tokens < 1:
        raise ValueError(f"request {request.key} needs a prompt of at least two tokens and room for a reply")
    prefilled = DynamicCache(config=model.config)
    head_ids = torch.tensor([request.prompt_ids[:-1]], device=model.device)
    model.base_model(input_ids=head_ids, past_key_values=prefilled, use_cache=True)
    cache.insert(index, prefilled)
    return _Slot(request, sampling.temperature(request), sampling.draws(request))


def choose(logits_nV: Tensor, temperatures_n: Tensor, top_p: float, draws_n: Tensor) -> Tensor:
    """The next tokens [n]: argmax at temperature 0, else the inverse of the cumulative distribution at ``draws_n``, in fp32."""
    greedy_n = logits_nV.float().argmax(-1)
    if not bool(temperatures_n.any()):
        return greedy_n
    divisors_n1 = torch.where(temperatures_n > 0, temperatures_n, 1)[:, None]
    probabilities_nV = torch.softmax(logits_nV.float() / divisors_n1, dim=-1)
    if top_p < 1:
        probabilities_nV = _nucleus(probabilities_nV, top_p)
    cumulative_nV = probabilities_nV.cumsum(-1)
    total_n = cumulative_nV[:, -1]
    # strictly below the total, so that rounding never picks a token of probability 0 behind the last possible one
    wanted_n = torch.minimum(draws_n * total_n, torch.nextafter(total_n, torch.zeros_like(total_n)))
    sampled_n = torch.searchsorted(cumulative_nV, wanted_n[:, None], right=True)[:, 0].clamp_(max=logits_nV.shape[-1] - 1)
    return torch.where(temperatures_n > 0, sampled_n, greedy_n)


def _nucleus(probabilities_nV: Tensor, top_p: float) -> Tensor:
    """Zero all but the smallest set of most likely tokens whose mass reaches ``top_p``."""
    size = probabilities_nV.shape[-1]
    for k in (min(256, size), size):
        top = probabilities_nV.topk(k, dim=-1)
        before = top.values.cumsum(-1) - top.values
        if k == size or bool((before[:, -1] >= top_p).all()):
            break
    kept = top.values.masked_fill(before >= top_p, 0)
    return torch.zeros_like(probabilities_nV).scatter_(-1, top.indices, kept)


def is_looping(ids: Sequence[int]) -> bool:
    """True when the text ends in one n-gram (n <= 32) over and over: at least 4 times and 48 tokens."""
    for period in range(1, LOOP_PERIOD + 1):
        span = max(LOOP_REPEATS * period, LOOP_TOKENS)
        if len(ids) >= span and all(ids[-k] == ids[-k - period] for k in range(1, span - period + 1)):
            return True
    return False
