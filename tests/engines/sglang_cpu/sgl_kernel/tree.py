"""TEST STAND-IN: the tree of draft tokens that a verify step computes, and the greedy walk down it.

A request's tree has ``width`` tokens: 0 is the root, the last token that is certain; the others are the drafts that were selected, in the
order of proposal. Proposals are numbered: topk of the first draft step, then topk^2 of every later one, topk for each branch.
``parents_BP`` holds the proposal that each branch grew from: proposal c has parent ``parents[c // topk]``, or the root when c < topk.
"""

import torch
from torch import Tensor

FULL_MASK, QLEN_ONLY = 0, 1


def build_tree_kernel_efficient_cpu(
    parents_BP: Tensor,
    selected_BD: Tensor,
    seq_lens_B: Tensor,
    mask: Tensor,
    positions_N: Tensor,
    index_BN: Tensor,
    first_child_BN: Tensor,
    next_sibling_BN: Tensor,
    topk: int,
    depth: int,
    width: int,
    mask_mode: int,
) -> None:
    """Fill in what follows from ``parents_BP`` and the selected proposals ``selected_BD``, for trees of ``width`` tokens.

    mask: flat bools, which tokens of its tree each token may see: itself, its ancestors, the root. QLEN_ONLY: [B, width, width];
    FULL_MASK: in front of each row also the request's tokens, left as they are. positions_N: in the text. index_BN: numbers through all
    trees. first_child_BN, next_sibling_BN: the tree as links, -1 for none, children in the order of their numbers.
    A draft whose parent was not selected hangs on nothing: no link leads to it, and it sees what is known of the way up, and the root.
    """
    mode = int(mask_mode)
    if mode not in (FULL_MASK, QLEN_ONLY):
        raise NotImplementedError(f"tree mask mode {mode}")
    seen = 0
    for request, length in enumerate(seq_lens_B.tolist()):
        selected = selected_BD[request].tolist()
        parents = [_parent(proposal, selected, parents_BP[request].tolist(), topk) for proposal in selected]
        index_BN[request] = torch.arange(request * width, (request + 1) * width)
        _link(parents, first_child_BN[request], next_sibling_BN[request])
        row_size = width + (length if mode == FULL_MASK else 0)
        visible = mask[seen : seen + width * row_size].view(width, row_size)[:, -width:]
        seen += width * row_size
        visible.zero_()
        for token in range(width):
            path = _path(token, parents, depth)
            visible[token, [0, token, *path]] = 1
            positions_N[request * width + token] = length + len(path)


def _parent(proposal: int, selected: list[int], parents: list[int], topk: int) -> int | None:
    """The token of the tree that a proposal grew from; None when it was not selected."""
    if proposal < topk:
        return 0
    parent = parents[proposal // topk]
    return selected.index(parent) + 1 if parent in selected else None


def _link(parents: list[int | None], first_child_N: Tensor, next_sibling_N: Tensor) -> None:
    for token in range(len(parents), 0, -1):
        parent = parents[token - 1]
        if parent is not None:
            next_sibling_N[token] = first_child_N[parent]
            first_child_N[parent] = token


def _path(token: int, parents: list[int | None], depth: int) -> list[int]:
    """The token and its ancestors below the root, as far up as they are known."""
    path: list[int] = []
    above: int | None = token
    while above and len(path) < depth:
        path.append(above)
        above = parents[above - 1]
    return path


def verify_tree_greedy_cpu(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    target_predict: Tensor,
) -> None:
    """Go down each tree as long as a child is the token that the target says after the token reached; the names are SGLang's.

    predicts [B * n]: at each token on the way, what the target says next; the last of them is the bonus token. accept_index [B, steps + 1]:
    the tokens on the way, the root first, as numbers through all trees. accept_token_num [B]: how many of them are drafts.
    """
    for request, says in enumerate(target_predict.tolist()):
        number, tokens = retrive_index[request].tolist(), candidates[request].tolist()
        first_child, next_sibling = retrive_next_token[request].tolist(), retrive_next_sibling[request].tolist()
        way = [0]
        while len(way) < accept_index.shape[1]:
            child = first_child[way[-1]]
            while child != -1 and tokens[child] != says[way[-1]]:
                child = next_sibling[child]
            if child == -1:
                break
            way.append(child)
        for place, token in enumerate(way):
            accept_index[request, place] = number[token]
            predicts[number[token]] = says[token]
        accept_token_num[request] = len(way) - 1
