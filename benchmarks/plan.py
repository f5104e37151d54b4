"""What `eyas plan` predicts of a training step, against steps measured here: memory of each size, time scaled from the first to the others.

    python -m benchmarks.plan                        # five sizes, fp32, one thread, two minutes
    python -m benchmarks.plan --precision bf16       # a quarter of an hour where bf16 has no plain product of its own

Every size runs in processes of its own. Memory is the rise of the peak resident memory (VmHWM) over what was there before the drafter was
built; time is processor seconds of the median step, so that a busy machine does not count (one thread). Two sizes give the rates
(operations and bytes a second) with which the others' times are predicted, as `node.training_tflops` and `node.bandwidth_gb_per_s` do in a
plan. Linux only.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.train_step import DTYPES, synthetic_batch
from eyas.drafter import Drafter, DrafterShape
from train.costs import Work, multiply_adds, total, work_of
from train.memory import Ranks, memory, traffic
from train.ttt import TrainingTimeTest

MB = 2**20


@dataclass(frozen=True)
class Size:
    """A drafter's sizes, row lengths of a micro-batch (a quarter of each is prompt) and TTT steps."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    draft_vocab: int
    rows: tuple[int, ...]
    steps: int

    def shape(self) -> DrafterShape:
        return DrafterShape(
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_heads=self.heads,
            num_kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            vocab_size=self.vocab,
            draft_vocab_size=self.draft_vocab,
            rms_norm_eps=1e-5,
            rope_theta=1e5,
            max_position=8192,
        )


SIZES = (
    Size(576, 1536, 9, 3, 64, 16384, 4096, (300, 200), 5),
    Size(448, 1152, 8, 8, 64, 10240, 2000, (1024,), 7),  # Kimi-K2.5's drafter divided by 16, one row
    Size(576, 1536, 9, 3, 64, 16384, 4096, (600, 300, 100), 5),
    Size(384, 1024, 6, 6, 64, 16384, 4096, (500, 300), 7),
    Size(768, 2048, 12, 12, 64, 16384, 2048, (400,), 4),
)
CALIBRATION = 2


@dataclass(frozen=True)
class Measured:
    """Of one size: the rise of memory in bytes, seconds of a step, and what the micro-batch held."""

    bytes: int
    seconds: float
    work: Work


# Every tensor of 64 KB and more gets pages of its own, which go back when it is freed: the peak is the tensors', not the heap's.
PAGES = {"MALLOC_MMAP_THRESHOLD_": "65536"}


def measure(size: Size, precision: str, repeats: int, plain: bool = False) -> Measured:
    """Run ``size`` in a process of its own; ``plain``: without oneDNN, whose bf16 products keep scratch memory."""
    asked = ["--one", json.dumps(asdict(size)), "--precision", precision, "--repeats", str(repeats), *(["--plain"] if plain else [])]
    environment = {"OMP_NUM_THREADS": "1", **os.environ, **PAGES}
    root = Path(__file__).parents[1]
    command = [sys.executable, "-m", "benchmarks.plan", *asked]
    ran = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, check=False)
    if ran.returncode:
        raise RuntimeError(ran.stderr)
    found: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    work = Work(**{**found["work"], "counted_J": tuple(found["work"]["counted_J"])})
    return Measured(found["bytes"], found["seconds"], work)


def run_here(size: Size, precision: str, repeats: int) -> Measured:
    """Warm up on a small step, then build ``size`` and train it for ``repeats`` steps and one before."""
    _train(Size(64, 128, 2, 2, 32, 256, 128, (16,), 2), precision, 1)
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts anew
    times, work = _train(size, precision, repeats + 1)
    return Measured(_status("VmHWM") - before, statistics.median(times[1:]), work)


def _train(size: Size, precision: str, repeats: int) -> tuple[list[float], Work]:
    torch.manual_seed(0)
    shape, dtype = size.shape(), DTYPES[precision]
    drafter = Drafter(shape)
    drafter.set_embedding(torch.randn(shape.vocab_size, shape.hidden_size, dtype=dtype))
    head_DH = torch.randn(shape.draft_vocab_size, shape.hidden_size, dtype=dtype) * shape.hidden_size**-0.5
    test = TrainingTimeTest(drafter, head_DH, size.steps, 0.8)
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=1e-4, fused=True)
    batch = synthetic_batch(shape, list(size.rows), dtype)
    times = []
    for _ in range(repeats):
        began = time.process_time()
        test(batch).loss_sum.backward()
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.process_time() - began)
    return times, work_of(batch, test.chains(batch))


def _status(name: str) -> int:
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) * 1024


def predicted_bytes(size: Size, work: Work, precision: str) -> float:
    """Peak memory of one process on a CPU."""
    return memory(size.shape(), work, Ranks(1, DTYPES[precision].itemsize, "cpu")).peak


def costs(size: Size, work: Work, precision: str) -> tuple[float, float]:
    """Operations and bytes moved of a step."""
    ranks = Ranks(1, DTYPES[precision].itemsize, "cpu")
    return 2 * total(multiply_adds(size.shape(), work)), total(traffic(size.shape(), work, ranks))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--precision", choices=sorted(DTYPES), default="fp32")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--plain", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        torch.backends.mkldnn.set_flags(not options.plain)
        values = json.loads(options.one)
        print(json.dumps(asdict(run_here(Size(**{**values, "rows": tuple(values["rows"])}), options.precision, options.repeats))))
        return
    found = []
    for size in SIZES:
        measured = measure(size, options.precision, options.repeats)
        if options.precision == "bf16":
            measured = replace(measured, bytes=measure(size, options.precision, 1, plain=True).bytes)
        found.append(measured)
    costs_SC = np.array([costs(size, measured.work, options.precision) for size, measured in zip(SIZES, found, strict=True)])
    seconds_S = np.array([measured.seconds for measured in found])
    per_cost_C = np.linalg.solve(costs_SC[:CALIBRATION], seconds_S[:CALIBRATION])
    print(f"{options.precision}, one thread; MB (2^20 bytes), processor seconds")
    print(f"{1e-9 / per_cost_C[0]:.0f} GFLOP/s and {1e-9 / per_cost_C[1]:.1f} GB/s, from the first {CALIBRATION} sizes")
    print("hidden rows                    pairs   MB plan  measured          step plan  measured")
    for size, measured, plan_s in zip(SIZES, found, costs_SC @ per_cost_C, strict=True):
        plan_bytes = predicted_bytes(size, measured.work, options.precision)
        print(
            f"{size.hidden:6} {','.join(map(str, size.rows)):20} {measured.work.pairs:9,.0f} {plan_bytes / MB:9,.0f} "
            f"{measured.bytes / MB:9,.0f} {plan_bytes / measured.bytes - 1:+7.1%} {plan_s:9.2f} s {measured.seconds:7.2f} s "
            f"{plan_s / measured.seconds - 1:+7.1%}"
        )


if __name__ == "__main__":
    main()
