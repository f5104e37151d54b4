"""What a measured request brings, whatever engine served it."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Counts:
    """One request's speculation, as the engine counted it."""

    verify_ct: int
    correct: int
    """Accepted drafts of all cycles; the cut-off last cycle counts untrimmed in SGLang."""
    proposed: int | None
    histogram: tuple[int, ...]
    """Index: accepted drafts in a cycle; value: number of such cycles. Empty when the engine gives none."""
    engine_length: float | None
    """The acceptance length under the engine's own name and rule (SGLang: all completion tokens / verify steps)."""


@dataclass(frozen=True)
class Reply:
    """What one request brought and how long it took, in seconds from sending."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    output_ids: tuple[int, ...]
    text: str
    finish_reason: str
    first_token_s: float
    first_tokens: int
    """Tokens in the first piece of the stream: 1 unless the engine sends them late."""
    total_s: float
    counts: Counts | None
    """None when the request ran without speculation."""
    parts: dict[str, Any] = field(default_factory=dict)
    """The embedded engine's seconds and counts by part."""
    pieces: tuple[int, ...] = ()
    """Tokens that each piece of the stream brought; where every step is sent as it comes, the first is 1 and each other one a step."""
