"""Offline acceptance: the exact walk a greedy server would make over a text that is already there.

A reply r_0 .. r_n-1 gives the chains i = 0 .. n-2, at consecutive row positions t. Chain i has r_i in hand and drafts r_i+1, r_i+2, ...
``hits[i, j]`` says that its draft j equals r_i+1+j. A verify step at chain i accepts the leading hits, at most ``steps``, emits one token
more (the target's own, the bonus) and the next one starts at chain i + accepted + 1. The first token r_0 comes from the prefill.

The verify step that runs into the end of the text is cut off: its drafts are right as far as the text goes and its bonus token lies
behind the end. It is a verify step all the same, so ``length`` is (completion tokens - 1) / verify steps, as measured on a server.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from torch import Tensor

from eyas.errors import EyasError


@dataclass(frozen=True)
class Cycle:
    """One verify step of the walk.

    t: row position of its chain (tokens up to t + 1 are known). accepted: leading hits. judged: drafts that the text reaches, at most
    the draft steps. cut_off: ran into the end of the text, so that ``accepted`` is all the text shows and no bonus token was emitted.
    """

    t: int
    accepted: int
    judged: int
    cut_off: bool

    @property
    def emitted(self) -> int:
        """Tokens that this verify step added to the reply."""
        return self.accepted if self.cut_off else self.accepted + 1

    @property
    def context(self) -> int:
        """Tokens known when drafting began: the prompt and the reply so far."""
        return self.t + 2


def walk(hits_MJ: Tensor, chain_t_M: Tensor, steps: int | None = None) -> list[Cycle]:
    """Walk ONE reply and return its verify steps in order; only the last one can be cut off.

    hits_MJ: bool, draft j of chain m is the text's token; entries behind the end of the text (m + j >= M) are not read.
    chain_t_M: int64 row positions of the chains, consecutive, from the reply's first (the last prompt token) to the last but one token.
    steps: drafts of a verify step; None takes J. Raises EyasError when the chains are not consecutive or steps exceeds J.
    """
    chains, drafts = hits_MJ.shape
    steps = drafts if steps is None else steps
    if steps > drafts:
        raise EyasError(f"acceptance: {steps} draft steps asked for, but hits are known for {drafts}")
    positions = chain_t_M.tolist()
    if len(positions) != chains or any(b - a != 1 for a, b in pairwise(positions)):
        raise EyasError("acceptance: the chains of a reply must lie at consecutive positions, one row of hits each")
    hits = hits_MJ.tolist()
    cycles, m = [], 0
    while m < chains:
        judged = min(steps, chains - m)
        accepted = next((j for j in range(judged) if not hits[m][j]), judged)
        cycles.append(Cycle(t=positions[m], accepted=accepted, judged=judged, cut_off=m + accepted == chains))
        m += accepted + 1
    return cycles


@dataclass(frozen=True)
class Acceptance:
    """Sums over verify steps; ``+`` merges any two with the same number of draft steps.

    cycles, tokens: verify steps and what they emitted, the cut-off ones included. Per draft position j, over the steps whose draft j the
    text can judge: drafted_J all of them, reached_J those whose drafts before j were all accepted, accepted_J those that accepted j too.
    """

    cycles: int
    tokens: int
    drafted_J: tuple[int, ...]
    reached_J: tuple[int, ...]
    accepted_J: tuple[int, ...]

    @classmethod
    def none(cls, steps: int) -> "Acceptance":
        """The neutral element for ``steps`` draft positions."""
        zeros = (0,) * steps
        return cls(0, 0, zeros, zeros, zeros)

    @classmethod
    def of(cls, cycles: Iterable[Cycle], steps: int) -> "Acceptance":
        """Sum verify steps, of one reply or of many. Keep the lists per reply to bootstrap over replies."""
        cycles = list(cycles)
        positions = range(steps)
        return cls(
            cycles=len(cycles),
            tokens=sum(cycle.emitted for cycle in cycles),
            drafted_J=tuple(sum(cycle.judged > j for cycle in cycles) for j in positions),
            reached_J=tuple(sum(cycle.judged > j and cycle.accepted >= j for cycle in cycles) for j in positions),
            accepted_J=tuple(sum(cycle.accepted > j for cycle in cycles) for j in positions),
        )

    @classmethod
    def from_numbers(cls, numbers: Sequence[int]) -> "Acceptance":
        """Inverse of ``numbers``."""
        cycles, tokens, *rest = numbers
        steps = len(rest) // 3
        return cls(cycles, tokens, tuple(rest[:steps]), tuple(rest[steps : 2 * steps]), tuple(rest[2 * steps :]))

    def numbers(self) -> list[int]:
        """The sums as one flat list of 2 + 3 J integers: addition of such lists (an all-reduce, say) is merging."""
        return [self.cycles, self.tokens, *self.drafted_J, *self.reached_J, *self.accepted_J]

    def __add__(self, other: "Acceptance") -> "Acceptance":
        if len(self.drafted_J) != len(other.drafted_J):
            raise EyasError(f"acceptance: cannot merge {len(self.drafted_J)} draft steps with {len(other.drafted_J)}")
        return Acceptance.from_numbers([a + b for a, b in zip(self.numbers(), other.numbers(), strict=True)])

    @property
    def length(self) -> float | None:
        """Acceptance length: tokens emitted per verify step, bonus token included. None without a verify step."""
        return self.tokens / self.cycles if self.cycles else None

    @property
    def unconditional_J(self) -> tuple[float | None, ...]:
        """Share of verify steps whose draft j was accepted, for each j; None where nothing was drafted."""
        return tuple(a / n if n else None for a, n in zip(self.accepted_J, self.drafted_J, strict=True))

    @property
    def conditional_J(self) -> tuple[float | None, ...]:
        """The same among the verify steps that had accepted every draft before j."""
        return tuple(a / n if n else None for a, n in zip(self.accepted_J, self.reached_J, strict=True))

    def as_json(self) -> dict[str, Any]:
        """The sums and the rates made of them, by name."""
        return {**asdict(self), "length": self.length, "unconditional_J": self.unconditional_J, "conditional_J": self.conditional_J}


def context_bucket(context: int) -> str:
    """The bucket of a context length in tokens: '<256', '256-511', '512-1023' and so on by powers of two."""
    if context < 256:
        return "<256"
    low = 1 << (context.bit_length() - 1)
    return f"{low}-{2 * low - 1}"
