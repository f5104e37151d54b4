"""Exact chain speculative decoding of one request at a time, in PyTorch; ``decode`` is all of it, the rest are its parts.

Words: the target has processed x_0 .. x_t, and x_t+1 is in hand. A cycle
  extends the drafter's keys by the true aux states of what was verified (position i pairs fc(a_i) with the embedding of x_i+1),
  drafts s tokens (the argmax, or sampled: eval.acceptance_rule), one drafter forward each (the first comes from the extension),
  verifies: one target forward over x_t+1 and the drafts gives s + 1 distributions,
  accepts the correct drafts and one token of the target's own, so a cycle emits 1 to s + 1 tokens.
Without a drafter the same loop emits one token per target forward: the baseline.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Literal, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from eval.acceptance_rule import AcceptanceRule, RejectionRule, Rule, RuleName
from eval.kv_cache import cache_for
from eyas.attention_hf import NAME, grouped_attention
from eyas.drafter import Drafter
from eyas.errors import EyasError
from eyas.folder import DrafterFolder
from eyas.probe import LayerInputs
from eyas.target import Target

OnTokens = Callable[[list[int]], None]
FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class Generation:
    """One finished request.

    ``accepted`` are the correct drafts of each verify cycle, the last one counted before the cut; ``trimmed`` tokens of the last cycle
    came after the end and were dropped: len(output_ids) == 1 + sum(accepted) + verify_ct - trimmed with a drafter.
    ``seconds`` and ``counts`` are by part: prefill, prefill_draft (the drafter's keys of the prompt), decode (baseline), verify, extend,
    draft, overhead (sampling is part of verify and decode). ``first_token_s`` counts from the call, ``decode_s`` is all that follows.
    """

    prompt_ids: list[int]
    output_ids: list[int]
    finish_reason: FinishReason
    accepted: list[int]
    trimmed: int
    verify_ct: int
    first_token_s: float
    prefill_s: float
    decode_s: float
    seconds: dict[str, float]
    counts: dict[str, int]


@dataclass(frozen=True)
class Request:
    """What is to be decoded: at most ``max_new_tokens`` tokens, ended by any of ``stop_ids``, which is part of the output."""

    prompt_ids: list[int]
    max_new_tokens: int
    temperature: float
    seed: int
    stop_ids: frozenset[int]
    rule: RuleName = "sglang"


@torch.inference_mode()
def decode(target: "TargetRunner", chain: "DraftChain | None", request: Request, on_tokens: OnTokens | None = None) -> Generation:
    """Decode one request; ``on_tokens`` gets each cycle's tokens as they come, and ends decoding by raising."""
    clock, output, rule = Laps(), Output(request, on_tokens), _rule(request, chain)
    accepted: list[int] = []
    target.keep(0)
    logits_1V = target.forward(request.prompt_ids, last_only=True)
    new = rule.accept(logits_1V, drafts_S=target.no_drafts)
    known = [*request.prompt_ids[1:], *new]  # the tokens that follow what the target processed last
    clock.lap("prefill")
    while not output.take(new):
        clock.lap("overhead")
        drafts_S = target.no_drafts
        if chain is not None:
            first = chain.extend(target.aux(chain.layers, len(known)), known, restart=not accepted)
            clock.lap("extend" if accepted else "prefill_draft")
            drafts_S = chain.draft(first, rule)
            clock.lap("draft", chain.steps - 1)
        logits_MV = target.forward(new[-1:], drafts_S)
        known = new = rule.accept(logits_MV, drafts_S)
        target.keep(target.length - len(drafts_S) + len(new) - 1)
        accepted.append(len(new) - 1)
        clock.lap("decode" if chain is None else "verify")
    return output.generation(accepted if chain is not None else [], clock)


def _rule(request: Request, chain: "DraftChain | None") -> Rule:
    if request.rule == "rejection" and request.temperature > 0 and chain is not None:
        return RejectionRule(request.temperature, request.seed, chain.draft_ids_D)
    return AcceptanceRule(request.temperature, request.seed)


@dataclass(frozen=True)
class Draft:
    """One draft step: its logits over the draft vocabulary, and the drafter's pre-norm state behind it, which the next step takes in."""

    logits_1D: Tensor
    hidden_1H: Tensor


class DraftChain:
    """A drafter with its step-0 keys: one slot per position, and behind them the temporary keys of the chain being drafted.

    Step j at t has rotary position t + j and sees positions <= t and its own chain's steps, so its key goes into slot t + j.
    """

    def __init__(self, drafter: Drafter, layers: Sequence[int], steps: int, capacity: int) -> None:
        shape, weight = drafter.shape, drafter.fc.weight
        self.drafter, self.layers, self.steps = drafter, tuple(layers), steps
        self.length = 0
        self.keys_1KCd = weight.new_zeros(1, shape.num_kv_heads, capacity, shape.head_dim)
        self.values_1KCd = torch.zeros_like(self.keys_1KCd)
        # A chain at the very end of the context may run past the last position; such drafts are cut off whatever they are.
        self.positions_C = torch.arange(capacity, device=weight.device).clamp_(max=shape.max_position - 1)
        self.draft_ids_D = drafter.draft_ids_D

    def extend(self, aux_NA: Tensor, next_ids: list[int], restart: bool = False) -> Draft:
        """Step 0 of N verified positions, position i with the token x_i+1: store their keys; the last one gives the first draft."""
        if restart:
            self.length = 0
        self.length += len(next_ids)
        ids_N = torch.tensor(next_ids, device=self.positions_C.device)
        return self._step(ids_N, self.drafter.combine(aux_NA), self.length)

    def draft(self, first: Draft, rule: Rule) -> Tensor:
        """All draft ids [s] of a cycle, as ``rule`` picks them. The chain's own keys are overwritten by the next extension."""
        step, ids = first, [self.draft_ids_D[rule.pick(first.logits_1D)]]
        for number in range(1, self.steps):
            step = self._step(ids[-1], step.hidden_1H, self.length + number)
            ids.append(self.draft_ids_D[rule.pick(step.logits_1D)])
        return torch.cat(ids)

    def _step(self, ids_N: Tensor, hidden_NH: Tensor, end: int) -> Draft:
        """Run the drafter at the N slots before ``end``: all of them get keys, the last one alone attends and drafts."""
        start = end - len(ids_N)
        inputs_N2H = self.drafter.layer_input(ids_N, hidden_NH)
        queries_NQd, keys_NKd, values_NKd = self.drafter.queries_keys_values(inputs_N2H, self.positions_C[start:end])
        self.keys_1KCd[0, :, start:end] = keys_NKd.transpose(0, 1)
        self.values_1KCd[0, :, start:end] = values_NKd.transpose(0, 1)
        query_1Q1d = queries_NQd[None, -1, :, None]
        keys_1KTd, values_1KTd = self.keys_1KCd[:, :, :end], self.values_1KCd[:, :, :end]
        attention_11Qd = grouped_attention(query_1Q1d, keys_1KTd, values_1KTd, None, self.drafter.shape.scale)
        hidden_1H = self.drafter.finish(attention_11Qd[0], hidden_NH[-1:])
        return Draft(self.drafter.logits(hidden_1H), hidden_1H)


class TargetRunner:
    """The target's own forward with a preallocated cache; hooks keep the inputs of the decoder layers that drafters need."""

    def __init__(self, model: PreTrainedModel, layers: Sequence[int], capacity: int) -> None:
        self.model = model
        self.device = model.device
        self.cache = cache_for(model.config, capacity)
        self.length = 0
        self.positions_1C = torch.arange(capacity, device=self.device)[None]
        self.no_drafts = torch.empty(0, dtype=torch.int64, device=self.device)
        self._inputs = LayerInputs(model, layers)

    def forward(self, ids: list[int], drafts_S: Tensor | None = None, last_only: bool = False) -> Tensor:
        """Process ``ids`` and the drafts behind what the cache holds. Returns logits of each of them, or of the last one."""
        ids_M = torch.tensor(ids, device=self.device)
        if drafts_S is not None:
            ids_M = torch.cat([ids_M, drafts_S])
        end = self.length + len(ids_M)
        logits_1MV = self.model(
            input_ids=ids_M[None],
            position_ids=self.positions_1C[:, self.length : end],
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=int(last_only),
        ).logits
        self.length = end
        return logits_1MV[0]

    def aux(self, layers: Sequence[int], count: int) -> Tensor:
        """Aux states [count, A] of the first ``count`` tokens of the last forward."""
        return torch.cat([self._inputs.states[layer][0, :count] for layer in layers], dim=-1)

    def keep(self, length: int) -> None:
        """Forget all but the first ``length`` tokens."""
        self.cache.keep(length)
        self.length = length


class Output:
    """The reply so far: cuts at the first stop id and at the limit."""

    def __init__(self, request: Request, on_tokens: OnTokens | None) -> None:
        self.request, self.on_tokens = request, on_tokens
        self.ids: list[int] = []
        self.trimmed = 0
        self.reason: FinishReason | None = None

    def take(self, new: list[int]) -> bool:
        """Append a cycle's tokens; True when the reply is complete."""
        wanted = new[: self.request.max_new_tokens - len(self.ids)]
        stop = next((i for i, token in enumerate(wanted) if token in self.request.stop_ids), None)
        if stop is not None:
            wanted = wanted[: stop + 1]
        self.ids += wanted
        self.trimmed = len(new) - len(wanted)
        if stop is not None:
            self.reason = "stop"
        elif len(self.ids) == self.request.max_new_tokens:
            self.reason = "length"
        if self.on_tokens is not None:
            self.on_tokens(wanted)
        return self.reason is not None

    def generation(self, accepted: list[int], clock: "Laps") -> Generation:
        """The finished reply."""
        assert self.reason is not None
        clock.lap("overhead")
        prefill_s = clock.seconds["prefill"]
        return Generation(
            prompt_ids=self.request.prompt_ids,
            output_ids=self.ids,
            finish_reason=self.reason,
            accepted=accepted,
            trimmed=self.trimmed,
            verify_ct=len(accepted),
            first_token_s=prefill_s,
            prefill_s=prefill_s + clock.seconds.get("prefill_draft", 0.0),
            decode_s=sum(clock.seconds.values()) - prefill_s,
            seconds=clock.seconds,
            counts=clock.counts,
        )


class Laps:
    """Wall-clock by part: the time since the last lap belongs to the part named now, so the parts add up to the whole."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.counts: dict[str, int] = {}
        self._last = time.perf_counter()

    def lap(self, part: str, count: int = 1) -> None:
        """Close a lap that held ``count`` executions of ``part``."""
        now = time.perf_counter()
        self.seconds[part] = self.seconds.get(part, 0.0) + now - self._last
        self.counts[part] = self.counts.get(part, 0) + count
        self._last = now


class Engine:
    """A loaded target and any number of drafters, chosen per request; requests run one at a time.

    ``context`` bounds prompt and reply together, ``draft_steps`` is s, ``rule`` says how drafts are picked at temperature > 0.
    Raises EyasError when a drafter does not fit the target.
    """

    def __init__(
        self,
        target: Target,
        drafters: Mapping[str, DrafterFolder],
        dtype: torch.dtype,
        context: int,
        draft_steps: int,
        device: torch.device | str = "cpu",
        rule: RuleName = "sglang",
    ) -> None:
        self.context, self.draft_steps, self.rule = context, draft_steps, rule
        self.stop_ids = frozenset(target.shape.eos_ids)
        self.vocab_size = target.shape.vocab_size
        if context > target.shape.max_position:
            raise EyasError(f"engine.context is {context}, target {target.name} has {target.shape.max_position} positions; lower it")
        self.layers = {name: _layers(folder, target) for name, folder in drafters.items()}
        for name, folder in drafters.items():
            _require_fit(name, folder, target, context)
        model = target.load_model(dtype, torch.device(device), NAME)
        capacity = context + draft_steps + 1  # the last cycle may verify past the end
        self._target = TargetRunner(model, sorted({layer for chosen in self.layers.values() for layer in chosen}), capacity)
        self._chains: dict[str, DraftChain] = {}
        for name, folder in drafters.items():
            drafter = folder.drafter.to(device=device, dtype=dtype).eval()
            drafter.set_embedding(cast(torch.nn.Embedding, model.get_input_embeddings()).weight)  # shared, not copied
            drafter.fuse()
            self._chains[name] = DraftChain(drafter, self.layers[name], draft_steps, capacity)
        self._busy = Lock()

    @property
    def drafters(self) -> list[str]:
        """Names that ``generate`` knows."""
        return list(self._chains)

    def check(self, prompt_ids: Sequence[int], max_new_tokens: int, temperature: float, drafter: str | None) -> None:
        """Raise EyasError, naming what is wrong, for a request that ``generate`` would not serve."""
        if not prompt_ids or len(prompt_ids) >= self.context:
            raise EyasError(f"the prompt has {len(prompt_ids)} tokens; 1 to {self.context - 1} fit into the context of {self.context}")
        if max_new_tokens < 1 or not 0 <= temperature < float("inf"):
            raise EyasError(f"max_new_tokens must be at least 1 and temperature at least 0, got {max_new_tokens} and {temperature}")
        if min(prompt_ids) < 0 or max(prompt_ids) >= self.vocab_size:
            raise EyasError(f"token ids must be 0 to {self.vocab_size - 1}, got {min(prompt_ids)} to {max(prompt_ids)}")
        if drafter is not None and drafter not in self._chains:
            raise EyasError(f"no drafter {drafter!r} is loaded; there are {self.drafters or 'none'}")

    def generate(
        self,
        prompt_ids: list[int],
        max_new_tokens: int,
        temperature: float = 0.0,
        seed: int = 0,
        drafter: str | None = None,
        on_tokens: OnTokens | None = None,
        stop_ids: Sequence[int] | None = None,
    ) -> Generation:
        """Decode one request, with speculation when ``drafter`` names one.

        Args:
            prompt_ids: at least one token, at most ``context - 1``.
            max_new_tokens: at least 1; the context may end the reply earlier (finish_reason "length" then too).
            temperature: 0 is greedy.
            seed: of this request's stream of uniform numbers.
            drafter: name, or None for the baseline.
            on_tokens: called with each cycle's tokens; an exception from it ends decoding and passes through.
            stop_ids: tokens that end the reply; None takes the target's own, an empty sequence none.

        Raises EyasError for a request that cannot be served (see ``check``).
        """
        self.check(prompt_ids, max_new_tokens, temperature, drafter)
        limit = min(max_new_tokens, self.context - len(prompt_ids))
        stops = self.stop_ids if stop_ids is None else frozenset(stop_ids)
        request = Request(list(prompt_ids), limit, temperature, seed, stops, self.rule)
        with self._busy:
            return decode(self._target, self._chains[drafter] if drafter is not None else None, request, on_tokens)


def _layers(folder: DrafterFolder, target: Target) -> tuple[int, ...]:
    """The layers a drafter is fed: as recorded, else the likeliest reading of its config, else EAGLE-3's default."""
    return folder.layers or next(iter(folder.candidates), None) or target.default_layers()


def _require_fit(name: str, folder: DrafterFolder, target: Target, context: int) -> None:
    shape, wanted = folder.drafter.shape, target.shape
    for field in ("hidden_size", "vocab_size"):
        if getattr(shape, field) != getattr(wanted, field):
            raise EyasError(f"drafter {name}: {field} is {getattr(shape, field)}, the target's is {getattr(wanted, field)}")
    if shape.max_position < context:
        raise EyasError(
            f"drafter {name}: max_position {shape.max_position} is below the context {context}; export it again or lower engine.context"
        )
    layers = _layers(folder, target)
    if len(layers) != shape.num_aux:
        raise EyasError(f"drafter {name}: its config names {len(layers)} aux layers, its fc takes {shape.num_aux}")
