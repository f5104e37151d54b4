"""Run by SGLang's Python with TRITON_INTERPRET=1: SGLang's Triton kernels on the cases of test_sglang_operators.py, JSON in, JSON out."""

import json
import sys

import torch
from sglang.kernels.ops.speculative import cache_locs, eagle, multi_layer_eagle, spec_tree
from sglang.srt.mem_cache.allocation import assign_req_to_token_pool
from torch import Tensor


def tree(case: dict, lengths: Tensor) -> dict:
    """A batch of trees, built in both forms of the mask and verified."""
    topk, steps = case["topk"], case["steps"]
    branches, proposals, tokens, says = (torch.tensor(case[name]) for name in ("branches", "proposals", "tokens", "says"))
    batch, width = tokens.shape
    built = []
    for mode in (spec_tree.TreeMaskMode.FULL_MASK, spec_tree.TreeMaskMode.QLEN_ONLY):
        mask = torch.ones(width * (width * batch + (int(lengths.sum()) if mode == 0 else 0)), dtype=torch.bool)
        positions = torch.empty(batch * width, dtype=torch.int64)
        index, child, sibling = (torch.full((batch, width), -1) for _ in range(3))
        spec_tree.sgl_build_tree_kernel_triton(
            branches, proposals, lengths, mask, positions, index, child, sibling, topk, steps, width, mode
        )
        built.append({"mask": mask, "positions": positions, "index": index, "child": child, "sibling": sibling})
    predicts = torch.full((batch * width,), -7, dtype=torch.int32)
    accept_index = torch.full((batch, steps + 1), -1, dtype=torch.int32)
    accepted = torch.empty(batch, dtype=torch.int32)
    spec_tree.verify_tree_greedy_triton(predicts, accept_index, accepted, tokens, index, child, sibling, says)
    return {
        "built": [{name: output.tolist() for name, output in outputs.items()} for outputs in built],
        "verified": [predicts.tolist(), accept_index.tolist(), accepted.tolist()],
    }


def slots(table: Tensor, rows: Tensor, lengths: Tensor) -> dict:
    batch, width = len(rows), table.shape[1]
    draft = torch.empty(batch * 2 * 3, dtype=torch.int64)
    cache_locs.assign_draft_cache_locs_contiguous[(batch,)](rows, table, lengths, draft, width, 2, 3)
    read = torch.full((batch * 4,), -7)
    cache_locs.assign_extend_cache_locs[(batch,)](rows, table, lengths, lengths + 4, read, width, 4)
    reads = draft_reads(table, rows, lengths, topk=2, steps=3)
    assign_req_to_token_pool[(batch,)](rows, table, lengths, lengths + 4, torch.arange(1000, 1000 + 4 * batch), width, 4)
    return {"draft_slots": draft.tolist(), "read": read.tolist(), "draft_reads": reads, "written": table.tolist()}


def draft_reads(table: Tensor, rows: Tensor, lengths: Tensor, topk: int, steps: int) -> list[list[int]]:
    """The slots that the branches of all requests read in each draft step, one after the other."""
    batch = len(rows)
    positions = lengths.repeat_interleave(topk)
    indices = torch.full((steps, 500), -7)
    ends = torch.zeros(steps, 500, dtype=torch.int32)
    cache_locs.generate_draft_decode_kv_indices[(steps, batch, topk)](
        rows, table, lengths, indices, ends, positions, table.shape[1], indices.shape[1], ends.shape[1], 4, 4, 8, 1
    )
    return [row[: int(positions.sum()) + batch * topk * (step + 1)].tolist() for step, row in enumerate(indices)]


def tokens() -> dict:
    bonus = torch.zeros(3, dtype=torch.int32)
    eagle.fill_bonus_tokens[(3,)](torch.arange(100, 112, dtype=torch.int32), torch.tensor([1, 4, 2]), bonus, 4)
    accepted = torch.full((9,), -7)
    index = torch.tensor([[0, 2, -1], [3, -1, -1], [6, 7, 8]], dtype=torch.int32)
    eagle.fill_accept_out_cache_loc[(9,)](index, torch.arange(50, 59), accepted, 16)
    rotated = []
    for places in (None, torch.tensor([0, 4, 5])):
        ids = torch.tensor([10, 11, 12, 20, 21, 30])
        lists = (torch.tensor([0, 3, 5]), torch.tensor([3, 2, 1]), torch.tensor([91, 92, 93]))
        multi_layer_eagle.rotate_input_ids_kernel[(3,)](ids, *lists, places, BLOCK_SIZE=8)
        rotated.append(ids.tolist())
    return {"bonus": bonus.tolist(), "accepted": accepted.tolist(), "rotated": rotated}


def main() -> None:
    cases = json.load(sys.stdin)
    rows, lengths = torch.tensor(cases["rows"]), torch.tensor(cases["lengths"])
    found = {"trees": [tree(case, lengths) for case in cases["trees"]]}
    found |= slots(torch.tensor(cases["table"], dtype=torch.int32), rows, lengths) | tokens()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
