"""Replays of served requests: what would the drafter have had accepted, had it been read so or so?

A served request gives its text and how many drafts each verify step accepted. With the target's states along that text the drafter drafts
again at the start of every served step, by the embedded engine's own draft chain. Read as it was trained, a drafter accepts step by step
what a healthy server accepted (in float32 exactly). Where it does not, the replay is repeated with misreadings: other layers, fc's chunks
in another order, d2t taken for what it is not, rotary positions of another kind. The one that tells the served steps is the culprit; of
two at once the pair.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, permutations
from math import comb
from typing import Any, Literal

import torch
from torch import Tensor

from eval.acceptance_rule import AcceptanceRule
from eval.engine import DraftChain
from eyas.drafter import Drafter

DraftIds = Literal["offsets", "absolute", "lost"]
Kind = Literal["layers", "fc", "d2t", "rope"]
# A misreading is named when chance would make it so much better than the reading it is compared with once in as many examinations.
CHANCE = 2e-3
CERTAIN = 0.995
"""Share of verify steps that the supposed reading must tell, lest others be tried at all."""
CLEARLY_LESS, SLACK = 2 / 3, 2
"""A misreading must be wrong less often than this share of what it is compared with, a few steps aside."""
GREEDY = AcceptanceRule(0.0, 0)
EXPLAINED = {torch.float32: 0.98, torch.bfloat16: 0.9}
"""Share of verify steps that a replay must tell to be an explanation. In bfloat16 near-ties fall out either way."""


@dataclass(frozen=True)
class Served:
    """One greedy request: its tokens, and the accepted drafts of each verify step but the last, which the end cut off."""

    prompt_ids: list[int]
    output_ids: list[int]
    accepted: list[int]


@dataclass(frozen=True, eq=False)
class Case:
    """A served request with what a replay needs: ``states[k]`` is HF ``hidden_states[k]`` along ``ids`` [T, H]."""

    ids: list[int]
    prompt_tokens: int
    accepted: list[int]
    states: Mapping[int, Tensor]


@dataclass(frozen=True)
class Reading:
    """How an engine reads a drafter.

    layers: HF hidden_states ids, in the order in which fc gets them. draft_ids: what d2t is taken for; "absolute": target ids that are
    added to row numbers as if they were offsets; "lost": there is none, row r is token r.
    """

    layers: tuple[int, ...]
    draft_ids: DraftIds
    rope_theta: float
    rope_scaling: tuple[tuple[str, Any], ...] | None


@dataclass(frozen=True)
class Misreading:
    """One way in which a reading can go wrong."""

    kind: Kind
    told: str
    change: Callable[[Reading], Reading]


@dataclass(frozen=True)
class Diagnosis:
    """What explains the served steps.

    culprits: the misreadings (none: the drafter is read as supposed, or nothing known explains it). others: what explains as much.
    told: steps that the explanation predicts, of ``steps``; supposed: those that the supposed reading predicts.
    """

    culprits: tuple[Misreading, ...]
    others: tuple[tuple[Misreading, ...], ...]
    told: int
    supposed: int
    steps: int

    @property
    def share(self) -> float:
        """Of the steps, those that are explained."""
        return self.told / self.steps


class Replay:
    """A drafter that can be read in several ways. It has its embedding; ``steps`` drafts a verify step."""

    def __init__(self, drafter: Drafter, steps: int, capacity: int) -> None:
        self._drafter, self._steps, self._capacity = drafter, steps, capacity + steps + 1
        self._turned: dict[Any, Drafter] = {}

    def reading(self, layers: Sequence[int]) -> Reading:
        """As the drafter itself says, on these layers."""
        shape = self._drafter.shape
        return Reading(tuple(layers), "offsets", shape.rope_theta, _frozen(shape.rope_scaling))

    @torch.inference_mode()
    def accepted(self, reading: Reading, case: Case) -> Iterator[int]:
        """Leading drafts that are the text's tokens, at the start of every served step in turn."""
        chain = DraftChain(self._read(reading), reading.layers, self._steps, self._capacity)
        chain.draft_ids_D = self.draft_ids(reading.draft_ids)
        aux_TA = torch.cat([case.states[layer] for layer in reading.layers], dim=-1)
        done, known = 0, case.prompt_tokens  # positions whose keys the chain has; tokens that are certain but the one in hand
        for served in case.accepted:
            first = chain.extend(aux_TA[done:known], case.ids[done + 1 : known + 1], restart=done == 0)
            text = case.ids[known + 1 : known + 1 + self._steps]
            drafts = chain.draft(first, GREEDY).tolist()
            yield next((place for place, token in enumerate(text) if drafts[place] != token), len(text))
            done, known = known, known + served + 1

    def _read(self, reading: Reading) -> Drafter:
        key = (reading.rope_theta, reading.rope_scaling)
        if key not in self._turned:
            scaling = None if reading.rope_scaling is None else dict(reading.rope_scaling)
            shape = self._drafter.shape.model_copy(update={"rope_theta": reading.rope_theta, "rope_scaling": scaling})
            with torch.device("meta"):
                drafter = Drafter(shape)
            drafter.load_state_dict(self._drafter.state_dict(), assign=True)
            assert self._drafter.embedding_VH is not None
            drafter.set_embedding(self._drafter.embedding_VH)
            self._turned[key] = drafter
        return self._turned[key]

    def draft_ids(self, kind: DraftIds) -> Tensor:
        """Target token that each row of the head stands for when d2t is taken for ``kind``."""
        ids_D = self._drafter.draft_ids_D
        rows_D = torch.arange(len(ids_D), device=ids_D.device)
        if kind == "lost":
            return rows_D
        # A token behind the vocabulary is one that no text has; token 0 stands for it where it must be looked up.
        ids_D = ids_D if kind == "offsets" else ids_D + rows_D
        return torch.where(ids_D < self._drafter.shape.vocab_size, ids_D, 0)


def misreadings(supposed: Reading, default_layers: Sequence[int], available: Sequence[int]) -> list[Misreading]:
    """All that are known: how a drafter that is supposed to be read so can be read wrong, on layers whose states are ``available``."""
    found = []
    layers = tuple(sorted(supposed.layers))
    for other in dict.fromkeys([tuple(k + 1 for k in layers), tuple(k - 1 for k in layers), tuple(default_layers)]):
        if other != layers and set(other) <= set(available):
            told = f"it is fed hidden_states{list(other)} instead of {list(layers)}"
            found.append(Misreading("layers", told, _feed(dict(zip(layers, other, strict=True)))))
    for order in permutations(range(len(layers))):
        if list(order) != sorted(order):
            told = f"fc gets its chunks in the order {', '.join(str(place + 1) for place in order)}"
            found.append(Misreading("fc", told, _order(order)))
    kinds: tuple[tuple[DraftIds, str], ...] = (
        ("absolute", "d2t is taken for offsets, but what the engine has are target ids"),
        ("lost", "d2t is lost, row r of the head stands for token r"),
    )
    found += [Misreading("d2t", told, _draft_ids(kind)) for kind, told in kinds]
    if supposed.rope_scaling is not None:
        found.append(Misreading("rope", "rope scaling is lost", lambda reading: replace(reading, rope_scaling=None)))
    if supposed.rope_theta != LOST_THETA:
        told = f"rope theta is {LOST_THETA:g} instead of {supposed.rope_theta:g}, as where a config has none"
        found.append(Misreading("rope", told, lambda reading: replace(reading, rope_theta=LOST_THETA, rope_scaling=None)))
    return found


LOST_THETA = 10000.0


def diagnose(replay: Replay, cases: Sequence[Case], supposed: Reading, known: Sequence[Misreading], explained: float) -> Diagnosis:
    """Find which of the ``known`` misreadings, alone or two of different kinds, tells the served steps better than the supposed reading.

    ``explained``: share of the steps that a culprit must tell. A pair must be better than the best single one, too.
    """
    plain = _right(replay, cases, supposed)
    steps, best = len(plain), plain
    found = Diagnosis((), (), sum(plain), sum(plain), steps)
    for size in (1, 2):
        if sum(best) >= CERTAIN * steps:
            break
        tried = [(group, _right(replay, cases, _applied(supposed, group), best, explained)) for group in _groups(known, size)]
        better = [(group, right) for group, right in tried if right and _is_better(right, best)]
        if better:
            culprits, best = max(better, key=lambda item: sum(item[1]))
            others = tuple(group for group, right in better if sum(right) == sum(best) and group != culprits)
            found = Diagnosis(culprits, others, sum(best), sum(plain), steps)
    return found


def _right(replay: Replay, cases: Sequence[Case], reading: Reading, than: Sequence[bool] = (), explained: float = 0.0) -> list[bool]:
    """For each served step: the replay accepts as many. Empty when it is too often wrong to be an explanation better than ``than``."""
    right: list[bool] = []
    wrong = wrong_than = 0
    for case in cases:
        for served, replayed in zip(case.accepted, replay.accepted(reading, case), strict=True):
            right.append(served == replayed)
            wrong += served != replayed
            if than:
                wrong_than += not than[len(right) - 1]
                if wrong > min((1 - explained) * len(right), CLEARLY_LESS * wrong_than) + SLACK:
                    return []
    return right


def _is_better(right: list[bool], than: list[bool]) -> bool:
    """By a sign test over the steps that only one of the two tells."""
    gained = sum(one and not other for one, other in zip(right, than, strict=True))
    lost = sum(other and not one for one, other in zip(right, than, strict=True))
    total = gained + lost
    return total > 0 and sum(comb(total, count) for count in range(gained, total + 1)) / 2**total < CHANCE


def _groups(known: Sequence[Misreading], size: int) -> Iterator[tuple[Misreading, ...]]:
    for group in combinations(known, size):
        if len({one.kind for one in group}) == size:
            yield group


def _applied(reading: Reading, group: Sequence[Misreading]) -> Reading:
    for misreading in group:
        reading = misreading.change(reading)
    return reading


def _feed(instead: Mapping[int, int]) -> Callable[[Reading], Reading]:
    return lambda reading: replace(reading, layers=tuple(instead[k] for k in reading.layers))


def _order(places: Sequence[int]) -> Callable[[Reading], Reading]:
    return lambda reading: replace(reading, layers=tuple(reading.layers[place] for place in places))


def _draft_ids(kind: DraftIds) -> Callable[[Reading], Reading]:
    return lambda reading: replace(reading, draft_ids=kind)


def _frozen(scaling: Mapping[str, Any] | None) -> tuple[tuple[str, Any], ...] | None:
    return None if scaling is None else tuple(sorted(scaling.items()))
