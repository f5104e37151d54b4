"""Acceptance by the length of the context: how well a drafter does far into a text.

The context of a verify step is what was known when its drafts were made: the prompt and the reply so far. An engine that tells the accepted
drafts of each cycle in turn (the embedded one) gives the exact bucket of every cycle. One that tells only their sum gives whole requests,
which are then put where the middle of their reply lies; the two are never mixed in one table.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from eval.measurement import Measurement
from eyas.acceptance import context_bucket
from eyas.statistics import Interval, ratio


@dataclass(frozen=True)
class ContextGroup:
    """One bucket of context lengths, in tokens."""

    name: str
    prompts: int
    """Prompts with a verify step in it, under any drafter."""
    verify_steps: dict[str, int]
    lengths: dict[str, Interval]
    """Drafter -> acceptance length there; a drafter without a verify step in the bucket is missing."""


@dataclass(frozen=True)
class Contexts:
    """The buckets, shortest first, and how they were filled."""

    by_cycle: bool
    """True: every verify step in the bucket of its own context. False: whole requests by the middle of their reply."""
    groups: list[ContextGroup]


def by_context(table: Mapping[str, Sequence[Measurement]], resamples: int, seed: int) -> Contexts:
    """Acceptance lengths of every drafter by context; ``table`` holds drafter -> one measurement a prompt, in one order."""
    rows = [measured for found in table.values() for measured in found if measured.verify_ct]
    by_cycle = bool(rows) and all(measured.accepted is not None for measured in rows)
    sums: dict[str, dict[str, dict[str, tuple[int, int]]]] = defaultdict(dict)  # bucket -> drafter -> prompt -> (tokens, verify steps)
    for drafter, found in table.items():
        for measured in found:
            for bucket, (tokens, steps) in _steps(measured, by_cycle).items():
                sums[bucket].setdefault(drafter, {})[measured.key] = (tokens, steps)
    groups = [_group(bucket, drafters, resamples, seed) for bucket, drafters in sorted(sums.items(), key=lambda item: _low(item[0]))]
    return Contexts(by_cycle, groups)


def _group(bucket: str, drafters: Mapping[str, Mapping[str, tuple[int, int]]], resamples: int, seed: int) -> ContextGroup:
    lengths, steps = {}, {}
    for drafter, prompts in drafters.items():
        tokens, cycles = zip(*prompts.values(), strict=True)
        lengths[drafter], steps[drafter] = ratio(tokens, cycles, resamples, seed), sum(cycles)
    return ContextGroup(bucket, len({key for prompts in drafters.values() for key in prompts}), steps, lengths)


def _steps(measured: Measurement, by_cycle: bool) -> dict[str, tuple[int, int]]:
    """Bucket -> tokens emitted there and verify steps that emitted them."""
    if not measured.verify_ct:
        return {}
    if not by_cycle:
        middle = measured.prompt_tokens + (measured.completion_tokens + 1) // 2
        return {context_bucket(middle): (measured.emitted, measured.verify_ct)}
    accepted, known = measured.accepted or [], measured.prompt_tokens + 1
    left = measured.emitted  # the last cycle emits only what is left of its drafts
    found: dict[str, tuple[int, int]] = {}
    for drafts in accepted:
        emitted = min(drafts + 1, left)
        tokens, steps = found.get(context_bucket(known), (0, 0))
        found[context_bucket(known)] = (tokens + emitted, steps + 1)
        known, left = known + emitted, left - emitted
    return found


def _low(bucket: str) -> int:
    digits = bucket.partition("-")[0]
    return int(digits) if digits.isdigit() else 0
