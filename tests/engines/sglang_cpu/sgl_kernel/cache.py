"""TEST STAND-IN: which slots of the key-value pool belong to which token of which request.

``table`` (SGLang: req_to_token, int32) has a row for each request and in it a slot for each position; ``rows_B`` says which row each of
the B requests of a batch has. ``pool_len``, the width of the table, is what a compiled operator needs; a tensor knows it.
"""

import ctypes

import torch
from torch import Tensor


def assign_req_to_token_pool_cpu(rows_B: Tensor, table: Tensor, start_B: Tensor, end_B: Tensor, slots_N: Tensor, pool_len: int) -> None:
    """Write ``slots_N``, one request's after the other's, into the table at positions start <= p < end."""
    taken = 0
    for row, start, end in zip(rows_B.tolist(), start_B.tolist(), end_B.tolist(), strict=True):
        table[row, start:end] = slots_N[taken : taken + end - start].to(table.dtype)
        taken += end - start


def assign_extend_cache_locs_cpu(rows_B: Tensor, table: Tensor, start_B: Tensor, end_B: Tensor, slots_N: Tensor, pool_len: int) -> None:
    """Read the slots of positions start <= p < end into ``slots_N``, one request's after the other's; what follows stays as it was."""
    filled = 0
    for row, start, end in zip(rows_B.tolist(), start_B.tolist(), end_B.tolist(), strict=True):
        slots_N[filled : filled + end - start] = table[row, start:end]
        filled += end - start


def assign_draft_cache_locs_contiguous_cpu(
    rows_B: Tensor, table: Tensor, seq_lens_B: Tensor, slots_N: Tensor, pool_len: int, topk: int, steps: int
) -> None:
    """Read the topk x steps slots that follow each request's tokens."""
    assign_extend_cache_locs_cpu(rows_B, table, seq_lens_B, seq_lens_B + topk * steps, slots_N, pool_len)


def build_draft_decode_metadata_cpu(table: Tensor, rows_B: Tensor, seq_lens_B: Tensor, topk: int, steps: int, pool_len: int) -> Tensor:
    """A table [B * topk, pool_len] with a row for each branch of each request: the slots of its tokens, then of its ``steps`` drafts.

    The drafts of branch k have the slots at positions seq_len + k * steps and on in the request's own row.
    """
    branches = torch.zeros(len(rows_B), topk, pool_len, dtype=table.dtype)
    for request, (row, length) in enumerate(zip(rows_B.tolist(), seq_lens_B.tolist(), strict=True)):
        branches[request, :, :length] = table[row, :length]
        branches[request, :, length : length + steps] = table[row, length : length + topk * steps].view(topk, steps)
    return branches.view(-1, pool_len)


def fill_accept_out_cache_loc_cpu(accept_index: Tensor, slots_N: Tensor, accepted_slots: Tensor) -> None:
    """Gather the slots of the accepted tokens, in order, to the front of ``accepted_slots``; -1 in ``accept_index`` is no token."""
    accepted = accept_index[accept_index >= 0].long()
    accepted_slots[: len(accepted)] = slots_N[accepted]


def copy_all_layer_kv_cache_cpu(buffers_L: Tensor, slot_bytes_L: Tensor, to_N: Tensor, from_N: Tensor) -> None:
    """Copy slots within each of L buffers, given as address and bytes a slot; all are read before any is written."""
    slots = 1 + int(torch.cat([to_N, from_N]).max())
    for address, size in zip(buffers_L.tolist(), slot_bytes_L.tolist(), strict=True):
        memory = (ctypes.c_uint8 * (slots * size)).from_address(address)
        buffer = torch.frombuffer(memory, dtype=torch.uint8).view(slots, size)
        buffer[to_N] = buffer[from_N]
