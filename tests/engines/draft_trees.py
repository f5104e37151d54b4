"""Draft trees as EAGLE grows them, in plain Python: who is whose child is known from growing them, not from SGLang's numbering."""

import random
from dataclasses import dataclass


@dataclass(frozen=True)
class Tree:
    """A grown tree and SGLang's description of it.

    parents, tokens: of the tree's nodes; 0 is the root, whose parent is itself. proposals: numbers of nodes 1, 2, ... among all proposals.
    branches: SGLang's parent list: which proposal each branch grew from, the root's first.
    """

    parents: list[int]
    tokens: list[int]
    proposals: list[int]
    branches: list[int]

    def path(self, node: int) -> list[int]:
        """The node and its ancestors, without the root."""
        return [] if node == 0 else [node, *self.path(self.parents[node])]

    def children(self, node: int) -> list[int]:
        return [child for child in range(1, len(self.parents)) if self.parents[child] == node]


@dataclass(frozen=True)
class _Proposal:
    number: int
    parent: int | None
    token: int
    score: float


def grow(topk: int, steps: int, width: int, vocabulary: int, rng: random.Random) -> Tree:
    """Propose topk children of the root, then ``steps`` - 1 times topk children of each of the topk best latest; keep the best.

    The best of all proposals by the product of probabilities on the way become the tree, as many as make ``width`` nodes with the root.
    """
    every: list[_Proposal] = []

    def propose(parent: _Proposal | None) -> list[_Proposal]:
        tokens = rng.sample(range(vocabulary), topk)
        chances = sorted((rng.uniform(0.05, 0.9) for _ in tokens), reverse=True)
        above = (None, 1.0) if parent is None else (parent.number, parent.score)
        found = [
            _Proposal(len(every) + place, above[0], token, above[1] * chance)
            for place, (token, chance) in enumerate(zip(tokens, chances, strict=True))
        ]
        every.extend(found)
        return found

    latest, branches = propose(None), [-1]
    for _ in range(1, steps):
        best = sorted(latest, key=lambda proposal: -proposal.score)[:topk]
        branches += [proposal.number for proposal in best]
        latest = [child for proposal in best for child in propose(proposal)]
    kept = sorted(sorted(every, key=lambda proposal: -proposal.score)[: width - 1], key=lambda proposal: proposal.number)
    place = {proposal.number: node for node, proposal in enumerate(kept, start=1)}
    parents = [0, *(0 if proposal.parent is None else place[proposal.parent] for proposal in kept)]
    return Tree(parents, [rng.randrange(vocabulary), *(proposal.token for proposal in kept)], list(place), branches)
