"""Blocks of explicit softmax (train/attention.py) against PyTorch's flash kernel, forward and backward, one causal row.

    python -m benchmarks.attention [--rounds 7]

Both get the same queries, keys and values of SmolLM2's shape (9 query heads on 3 key heads of 64); the flash kernel needs the key heads
repeated. Interleaved, medians. Cost: half a minute.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from train.attention import merged_attention, query_blocks

QUERIES, KEYS, WIDTH = 9, 3, 64


def blocks(q_TQd: Tensor, k_TKd: Tensor, v_TKd: Tensor) -> Tensor:
    """Ours, without chain keys."""
    length = len(q_TQd)
    none_TKjd = k_TKd.unsqueeze(2)[:, :, :0]
    layout = query_blocks(torch.arange(length), torch.tensor([0, length]))
    return merged_attention(q_TQd, k_TKd, v_TKd, none_TKjd, none_TKjd, layout, WIDTH**-0.5)


def flash(q_TQd: Tensor, k_TKd: Tensor, v_TKd: Tensor) -> Tensor:
    """PyTorch's kernel on repeated heads."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q_TQd, k_TKd, v_TKd))
    repeat = QUERIES // KEYS
    out = scaled_dot_product_attention(q, k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1), is_causal=True)
    return out[0].transpose(0, 1)


def seconds(attention: Callable[[Tensor, Tensor, Tensor], Tensor], inputs: list[Tensor]) -> float:
    start = time.perf_counter()
    attention(*inputs).sum().backward()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    table = Table("dtype", "tokens", "blocks, ms", "flash, ms", "blocks / flash")
    for dtype in (torch.bfloat16, torch.float32):
        for length in (256, 512, 1024, 2048):
            inputs = [torch.randn(length, heads, WIDTH, dtype=dtype, requires_grad=True) for heads in (QUERIES, KEYS, KEYS)]
            pairs = [(seconds(blocks, inputs), seconds(flash, inputs)) for _ in range(rounds + 1)][1:]
            ours, theirs = (statistics.median(times) for times in zip(*pairs, strict=True))
            ratio = statistics.median(a / b for a, b in pairs)
            table.add_row(str(dtype).removeprefix("torch."), str(length), f"{ours * 1e3:.1f}", f"{theirs * 1e3:.1f}", f"{ratio:.2f}")
    Console().print(f"{torch.get_num_threads()} threads, torch {torch.__version__}", table)


if __name__ == "__main__":
    main()
