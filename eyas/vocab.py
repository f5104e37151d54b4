"""The draft vocabulary: which target tokens a drafter can propose, and how row numbers and token ids map onto each other.

Row r of a drafter's lm_head is target token ``ids_D[r] = r + d2t[r]``. D draft vocabulary, V target vocabulary, H hidden size.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from eyas.errors import EyasError
from eyas.files import digest_bytes

RIDGE = 1e-2  # of the mean square of a head's column: as good as 1e-3 and 1e-1 on SmolLM2's starter


def choose_vocab(counts_V: Tensor, size: int, old_ids_D: Tensor | None = None) -> Tensor:
    """The ``size`` most frequent tokens as sorted int64 ids; among equals those of ``old_ids_D`` win, then the lower id.

    Raises EyasError when ``size`` is not between 1 and the number of tokens counted for.
    """
    if not 1 <= size <= len(counts_V):
        raise EyasError(f"a draft vocabulary of {size} tokens does not fit a target vocabulary of {len(counts_V)}")
    ranks_V = 2 * counts_V
    if old_ids_D is not None:
        ranks_V[old_ids_D] += 1
    return ranks_V.sort(descending=True, stable=True).indices[:size].sort().values


def drafter_vocab(counts_V: Tensor, size: int | None, own_ids_D: Tensor | None) -> Tensor:
    """The vocabulary in which a run's drafter drafts, row by row: a warm start's own, or the ``size`` (all) tokens counted most often.

    prep and train both ask here, with the same counts, so that log-probabilities are stored in the vocabulary that is trained.
    """
    if size is None and own_ids_D is not None:
        return own_ids_D
    return choose_vocab(counts_V, size or len(counts_V), own_ids_D)


def vocab_digest(ids_D: Tensor) -> str:
    """SHA-256 over the target tokens of a drafter's rows (int32, little-endian), hexadecimal; the order of the rows is part of it."""
    return digest_bytes(ids_D.cpu().numpy().astype("<i4").tobytes())


def offsets(ids_D: Tensor) -> Tensor:
    """d2t as engines want it: what to add to a row number to get the target token, int64."""
    return ids_D - torch.arange(len(ids_D), device=ids_D.device)


def absolute(d2t_D: Tensor) -> Tensor:
    """Target token id of every row, from offsets."""
    return d2t_D + torch.arange(len(d2t_D), device=d2t_D.device)


def membership(ids_D: Tensor, vocab_size: int) -> Tensor:
    """t2d: bool [V], true for the tokens in the draft vocabulary."""
    mask_V = torch.zeros(vocab_size, dtype=torch.bool, device=ids_D.device)
    mask_V[ids_D] = True
    return mask_V


def coverage(counts_V: Tensor, ids_D: Tensor) -> float:
    """Share (0 to 1) of all counted tokens that are in the draft vocabulary. Raises EyasError when nothing was counted."""
    total = int(counts_V.sum())
    if total == 0:
        raise EyasError("coverage of a draft vocabulary: no token was counted")
    return int(counts_V[ids_D].sum()) / total


def expected_length(conditional_J: Sequence[float | None], old: float, new: float) -> float:
    """Acceptance length to expect when the draft vocabulary's coverage goes from ``old`` to ``new`` (shares of the text, ``old`` above 0).

        1 + sum over j of prod over i <= j of  min(1, r_i * new / old)

    r_i is the conditional acceptance rate of draft i with the old vocabulary (None, never reached: 0). A chain ends at a token that cannot
    be proposed, so r_i = coverage * a_i, a_i the rate among tokens that can be; a_i is taken to stay, and tokens to fall outside
    independently of one another. New tokens are right that often only once they are trained. With new = old: the length as it is.
    """
    length = chance = 1.0
    for rate in conditional_J:
        chance *= min(1.0, (rate or 0.0) * new / old)
        length += chance
    return length


def is_offset(d2t_D: Tensor, vocab_size: int, t2d_V: Tensor | None = None) -> bool:
    """Tell from the numbers whether ``d2t`` holds offsets (True) or target ids (False).

    A reading is possible when it gives distinct tokens of the vocabulary and, if ``t2d_V`` is there, exactly those that it marks.
    Both are possible only without t2d, when no two neighbouring tokens are in the draft vocabulary.
    Raises EyasError when neither reading is possible, or both are and differ.
    """
    as_offsets = _fits(absolute(d2t_D), vocab_size, t2d_V)
    as_ids = _fits(d2t_D, vocab_size, t2d_V)
    if as_offsets and as_ids and bool(torch.any(absolute(d2t_D) != d2t_D)):
        raise EyasError("d2t makes sense as offsets and as target ids alike: add t2d, the mask over the target vocabulary, to tell")
    if not (as_offsets or as_ids):
        raise EyasError(f"d2t is neither offsets nor target ids: {_fault(absolute(d2t_D), d2t_D, vocab_size, t2d_V)}")
    return as_offsets


def reselect(rows_DH: Tensor, old_ids_D: Tensor, new_ids_E: Tensor, target_head_VH: Tensor) -> Tensor:
    """Rows [E, H] of an lm_head for another draft vocabulary: known tokens take their rows along, new ones start from the target's head,
    moved as training has moved the known ones.

    A softmax does not notice what all rows share, so training moves all rows of a head together; a row straight from the target's head
    stands out. (SmolLM2's starter, 4,900 new tokens: acceptance length 1.30 with the target's own rows, 1.76 when these are moved by the
    known ones' mean, 2.00 when moved by ``_moved``, and 1.99 before.)
    """
    row_of_V = torch.full((len(target_head_VH),), -1, dtype=torch.int64, device=old_ids_D.device)
    row_of_V[old_ids_D] = torch.arange(len(old_ids_D), device=old_ids_D.device)
    row_E = row_of_V[new_ids_E]
    rows_EH = torch.empty(len(new_ids_E), rows_DH.shape[1], dtype=rows_DH.dtype, device=rows_DH.device)
    rows_EH[row_E >= 0] = rows_DH[row_E[row_E >= 0]]
    new_NH = target_head_VH[new_ids_E[row_E < 0]].to(rows_DH)
    rows_EH[row_E < 0] = new_NH + _moved(target_head_VH[old_ids_D].to(rows_DH), rows_DH, new_NH)
    return rows_EH


def _moved(from_DH: Tensor, to_DH: Tensor, new_NH: Tensor) -> Tensor:
    """How far rows ``new_NH`` would have moved, by the affine map (ridge regression) of how far ``from_DH`` moved to become ``to_DH``."""
    moved_DH = (to_DH - from_DH).float()
    mean_H, mean_moved_H = from_DH.float().mean(0), moved_DH.mean(0)
    x_DH = from_DH.float() - mean_H
    gram_HH = (x_DH.T @ x_DH).double()
    gram_HH += RIDGE * gram_HH.diagonal().mean().clamp_min(1e-12) * torch.eye(len(gram_HH), dtype=torch.float64, device=gram_HH.device)
    map_HH = torch.linalg.solve(gram_HH, (x_DH.T @ (moved_DH - mean_moved_H)).double()).float()
    return (mean_moved_H + (new_NH.float() - mean_H) @ map_HH).to(new_NH.dtype)


def _fits(ids_D: Tensor, vocab_size: int, t2d_V: Tensor | None) -> bool:
    if bool(((ids_D < 0) | (ids_D >= vocab_size)).any()) or len(ids_D.unique()) < len(ids_D):
        return False
    return t2d_V is None or torch.equal(membership(ids_D, vocab_size), t2d_V)


def _fault(as_offsets_D: Tensor, as_ids_D: Tensor, vocab_size: int, t2d_V: Tensor | None) -> str:
    """Why neither reading holds, for the reading that comes closer."""
    told = []
    for name, ids_D in (("as offsets", as_offsets_D), ("as target ids", as_ids_D)):
        outside = int(((ids_D < 0) | (ids_D >= vocab_size)).sum())
        doubles = len(ids_D) - len(ids_D.unique())
        if outside:
            told.append(f"{name}, {outside} of {len(ids_D)} tokens are outside the vocabulary of {vocab_size}")
        elif doubles:
            told.append(f"{name}, {doubles} of {len(ids_D)} tokens come twice")
        elif t2d_V is not None:
            wrong = int((membership(ids_D, vocab_size) != t2d_V).sum())
            told.append(f"{name}, t2d marks other tokens ({wrong} differ)")
    return "; ".join(told)
