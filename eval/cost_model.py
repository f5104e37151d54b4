"""What a draft+verify cycle costs at each setting, fitted to what was measured.

Costs are counted in baseline steps, the time of one token without speculation on the same machine at the same time. Two things follow: a
machine that became slower between two server starts does not bend the fit, and a cycle of c baseline steps breaks even at an acceptance
length of exactly c. The model:

    cycle(steps, topk, tokens) = 1 + once + forward x (steps - 1) + token x (tokens - 1) + branch x (steps - 1) x (topk - 1)

1 is the target's own step. ``once`` is what a cycle has but once: the drafter's extension over the verified tokens, which yields the first
draft, and bookkeeping. ``forward`` is one more draft forward (steps - 1 of them), ``token`` one more token to verify, ``branch`` one more
branch in a draft forward. No term can be negative, so the fit is a non-negative least squares, of relative errors.

A chain has tokens = steps + 1, so chains alone tell only sums: once + token (the first draft) and forward + token (each further one). Trees
tell them apart. The model keeps account of it: what the measured settings do not determine is None, never a guess.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
TERMS = ("once", "forward", "token", "branch")
ONCE, FORWARD, TOKEN, BRANCH = np.eye(len(TERMS))
FIRST_DRAFT, FURTHER_DRAFT = ONCE + TOKEN, FORWARD + TOKEN


@dataclass(frozen=True, order=True)
class Setting:
    """Draft steps in a row, branches a step, and tokens a verify step computes; the drafts and the token before them."""

    steps: int
    topk: int
    tokens: int

    @property
    def chain(self) -> bool:
        """One branch: each draft follows the one before."""
        return self.topk == 1

    @property
    def possible(self) -> bool:
        """A chain has exactly steps + 1 tokens; a tree has topk + (steps - 1) x topk x topk drafts to choose from."""
        if self.chain:
            return self.tokens == self.steps + 1
        return 2 <= self.tokens <= 1 + self.topk + (self.steps - 1) * self.topk**2

    def covers(self, other: "Setting") -> bool:
        """True when this one drafts all that ``other`` drafts: same kind, no less of anything."""
        larger = self.steps >= other.steps and self.topk >= other.topk and self.tokens >= other.tokens
        return self.chain == other.chain and larger

    def terms(self) -> Floats:
        """How often each term of the model occurs in a cycle."""
        return np.array([1, self.steps - 1, self.tokens - 1, (self.steps - 1) * (self.topk - 1)], dtype=np.float64)

    def __str__(self) -> str:
        steps = f"{self.steps} step" + ("s" if self.steps > 1 else "")
        return steps if self.chain else f"{steps}, top-k {self.topk}, {self.tokens} tokens"


@dataclass(frozen=True)
class Observation:
    """A measured cycle, in baseline steps."""

    setting: Setting
    cycle: float


@dataclass(frozen=True)
class CostModel:
    """A fit. All costs are in baseline steps; times ``baseline_ms`` they are milliseconds."""

    baseline_ms: float
    coefficients: Floats
    """One of each term, as fitted; meaningful only in combinations that are determined."""
    observations: Sequence[Observation]
    rank: int
    determined: Floats
    """Projection onto the combinations of terms that the observations determine."""

    def cost(self, terms: Floats) -> float | None:
        """The cost of a combination of terms, None when what was measured does not determine it."""
        if not np.allclose(self.determined @ terms, terms, atol=1e-6):
            return None
        return float(self.coefficients @ terms)

    def cycle(self, setting: Setting) -> float | None:
        """Baseline steps that a cycle costs, which is also the acceptance length that breaks even."""
        cost = self.cost(setting.terms())
        return None if cost is None else 1 + cost

    def verify(self, tokens: int) -> float | None:
        """Baseline steps of a verify step of so many tokens; None unless trees have told tokens and draft forwards apart."""
        token = self.cost(TOKEN)
        return None if token is None else 1 + token * (tokens - 1)

    def residuals(self) -> list[float]:
        """Fitted over measured cycle, minus 1, of each observation."""
        return [float(1 + self.coefficients @ seen.setting.terms()) / seen.cycle - 1 for seen in self.observations]

    @property
    def worst(self) -> float | None:
        """Largest relative residual; None while there are no more settings than terms to fit, when it says nothing."""
        if len({seen.setting for seen in self.observations}) <= self.rank:
            return None
        return max(abs(residual) for residual in self.residuals())


def fit(observations: Sequence[Observation], baseline_ms: float) -> CostModel:
    """The model that fits best, least squares of relative errors with no negative term; at least one observation."""
    terms_OT = np.array([seen.setting.terms() for seen in observations])
    cycle_O = np.array([seen.cycle for seen in observations])
    coefficients = non_negative_least_squares(terms_OT / cycle_O[:, None], (cycle_O - 1) / cycle_O)
    _, sizes, directions_TT = np.linalg.svd(terms_OT)
    rank = int(np.sum(sizes > 1e-9 * sizes[0]))
    known_RT = directions_TT[:rank]
    return CostModel(baseline_ms, coefficients, tuple(observations), rank, known_RT.T @ known_RT)


def non_negative_least_squares(matrix_OT: Floats, wanted_O: Floats) -> Floats:
    """x >= 0 that minimises |matrix x - wanted|.

    The minimum is the plain least squares on some subset of the columns; with four columns there are fifteen, so all are tried.
    """
    columns = matrix_OT.shape[1]
    best, least = np.zeros(columns), float(np.sum(wanted_O**2))
    for count in range(1, columns + 1):
        for chosen in itertools.combinations(range(columns), count):
            part = np.linalg.lstsq(matrix_OT[:, chosen], wanted_O, rcond=None)[0]
            error = float(np.sum((matrix_OT[:, chosen] @ part - wanted_O) ** 2))
            if (part >= 0).all() and error < least * (1 - 1e-12):
                best, least = np.zeros(columns), error
                best[list(chosen)] = part
    return best
