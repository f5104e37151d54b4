"""TEST STAND-IN for SGLang's package of compiled operators, for the CPU, in plain torch. Not for serving.

The real package (sglang-kernel) has no CPU build on the package index. SGLang itself runs unchanged on top of these few functions, which
are what EAGLE speculation and the `intel_amx` attention backend call; tests/engines/test_sglang_operators.py checks each of them. Written
from what the callers pass and expect, and from what the Triton kernels of the same names do. What the tests do not need is refused.

Everything that SGLang asks for with AMX stays switched off, whatever the CPU: it looks for operators that are not registered here.
"""

from sgl_kernel import attention as attention
from sgl_kernel.cache import (
    assign_draft_cache_locs_contiguous_cpu,
    assign_extend_cache_locs_cpu,
    assign_req_to_token_pool_cpu,
    build_draft_decode_metadata_cpu,
    copy_all_layer_kv_cache_cpu,
    fill_accept_out_cache_loc_cpu,
)
from sgl_kernel.tokens import fill_bonus_tokens_cpu, rotate_input_ids_cpu
from sgl_kernel.tree import build_tree_kernel_efficient_cpu, verify_tree_greedy_cpu

__all__ = [
    "assign_draft_cache_locs_contiguous_cpu",
    "assign_extend_cache_locs_cpu",
    "assign_req_to_token_pool_cpu",
    "build_draft_decode_metadata_cpu",
    "build_tree_kernel_efficient_cpu",
    "copy_all_layer_kv_cache_cpu",
    "fill_accept_out_cache_loc_cpu",
    "fill_bonus_tokens_cpu",
    "rotate_input_ids_cpu",
    "verify_tree_greedy_cpu",
]
