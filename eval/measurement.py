"""One measured request, and the file that holds them all: ``bench/measurements.jsonl``."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eval.clients import BASELINE, Counts, Reply
from eyas.errors import EyasError
from eyas.files import JsonlAppender, read_jsonl

MEASUREMENTS = "measurements.jsonl"
PAIRS, BEFORE, BETWEEN, AFTER = "pairs", "before", "between", "after"
"""Legs of a schedule (eval/schedule.py): one server that switches per request, or the baseline before and after the drafters."""

LOOP_GRAM, LOOP_TIMES = 8, 3
LOOP_RULE = f"some {LOOP_GRAM} consecutive tokens of the reply occur at least {LOOP_TIMES} times in it"


@dataclass(frozen=True)
class BenchPrompt:
    """A held-out prompt as it is sent: exactly these tokens."""

    key: str
    category: str
    messages: list[dict[str, str]]
    prompt_ids: list[int]
    template: dict[str, Any] = field(default_factory=dict)
    """Arguments of the chat template with which the messages became these tokens."""


@dataclass(frozen=True)
class Measurement:
    """One request: one prompt under one variant. Seconds are the client's, from sending."""

    key: str
    category: str
    variant: str
    order: int
    """Place of the variant in this prompt's rotation, from 0."""
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    finish_reason: str
    first_token_s: float
    first_tokens: int
    total_s: float
    verify_ct: int | None
    """Verify steps; None without speculation."""
    correct: int | None
    proposed: int | None
    histogram: list[int]
    """Index: accepted drafts in a cycle; value: cycles."""
    engine_length: float | None
    """Acceptance length under the engine's own name and rule."""
    looping: bool
    output_ids: list[int]
    parts: dict[str, Any] = field(default_factory=dict)
    leg: str = PAIRS
    concurrency: int = 1
    """Requests in flight while this one ran, itself included."""
    sent_at: float = 0.0
    """Seconds since 1970 at which it was sent: tells which requests ran at the same time."""

    @property
    def place(self) -> "Place":
        """What makes it this measurement and no other; each is taken once."""
        return (self.key, self.variant, self.leg, self.concurrency)

    @property
    def decode_s(self) -> float:
        """Seconds from the first token to the last."""
        return self.total_s - self.first_token_s

    @property
    def decode_tokens(self) -> int:
        """Tokens that came in ``decode_s``."""
        return self.completion_tokens - self.first_tokens

    @property
    def emitted(self) -> int:
        """Tokens that verify steps emitted: all but the first, which comes from the prefill."""
        return self.completion_tokens - 1

    @property
    def accepted(self) -> list[int] | None:
        """Accepted drafts of each cycle in turn, the last one untrimmed; None where the engine tells only their sum."""
        accepted = self.parts.get("accepted")
        return list(accepted) if accepted and len(accepted) == self.verify_ct else None


Place = tuple[str, str, str, int]
"""Key of the prompt, variant, leg, concurrency."""


def measurement(
    prompt: BenchPrompt, variant: str, order: int, reply: Reply, leg: str = PAIRS, concurrency: int = 1, sent_at: float = 0.0
) -> Measurement:
    """A reply as a row of measurements.jsonl."""
    counts = reply.counts or Counts(0, 0, None, (), None)
    return Measurement(
        key=prompt.key,
        category=prompt.category,
        variant=variant,
        order=order,
        prompt_tokens=reply.prompt_tokens,
        completion_tokens=reply.completion_tokens,
        cached_tokens=reply.cached_tokens,
        finish_reason=reply.finish_reason,
        first_token_s=reply.first_token_s,
        first_tokens=reply.first_tokens,
        total_s=reply.total_s,
        verify_ct=counts.verify_ct if reply.counts or variant != BASELINE else None,
        correct=counts.correct if reply.counts else None,
        proposed=counts.proposed,
        histogram=list(counts.histogram),
        engine_length=counts.engine_length,
        looping=loops(reply.output_ids),
        output_ids=list(reply.output_ids),
        parts=reply.parts,
        leg=leg,
        concurrency=concurrency,
        sent_at=sent_at,
    )


def read_measurements(folder: Path) -> list[Measurement]:
    """All measurements of a bench folder. Raises EyasError naming file and line for a broken one."""
    path = Path(folder) / MEASUREMENTS
    found = []
    for line, row in read_jsonl(path):
        try:
            found.append(Measurement(**row))
        except TypeError as error:
            raise EyasError(f"{path}, line {line}: not a measurement of this version ({error})") from None
    return found


def places_done(folder: Path) -> set[Place]:
    """What a bench folder holds already; empty when nothing was measured yet."""
    path = Path(folder) / MEASUREMENTS
    if not path.exists():
        return set()
    with JsonlAppender(path):  # a killed run may have left a torn last line: opening for appending cuts it off
        pass
    return {measured.place for measured in read_measurements(folder)}


def loops(ids: Sequence[int]) -> bool:
    """True for a reply that repeats itself (LOOP_RULE): such text is trivially accepted and says nothing about a drafter."""
    grams = Counter(tuple(ids[start : start + LOOP_GRAM]) for start in range(len(ids) - LOOP_GRAM + 1))
    return any(count >= LOOP_TIMES for count in grams.values())


def first_difference(ids: Sequence[int], baseline_ids: Sequence[int]) -> int | None:
    """Index of the first token at which two replies differ (a shorter one differs at its end); None when they are equal."""
    for index, (one, other) in enumerate(zip(ids, baseline_ids, strict=False)):
        if one != other:
            return index
    return None if len(ids) == len(baseline_ids) else min(len(ids), len(baseline_ids))
