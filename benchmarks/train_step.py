"""Time of one optimiser step on synthetic rows, and how near it comes to the machine's matrix product rate.

    python -m benchmarks.train_step                      # one row of 512, bf16: SmolLM2's sizes, draft vocabulary 8192, 7 TTT steps
    python -m benchmarks.train_step --rows 1400 700 500 300 --precision fp32

A quarter of each row is prompt, the rest supervised, everything in the draft vocabulary. GFLOP/s counts the multiply-adds of matrices over
pairs that count (forward and backward, attention scores left out), not those spent. Threads: OMP_NUM_THREADS. About ten seconds.
"""

import argparse
import json
import resource
import statistics
import time
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from eyas.drafter import Drafter, DrafterShape
from train.batches import Batch
from train.ttt import Chains, TrainingTimeTest

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True)
class StepTime:
    """Median over the timed steps."""

    step_s: float
    forward_s: float
    backward_s: float
    optimizer_s: float
    supervised: int
    supervised_per_s: float
    gflops: float
    gemm_gflops: float
    rss_before_mb: float
    rss_peak_mb: float
    loss: float


def shape(draft_vocab_size: int) -> DrafterShape:
    return DrafterShape(
        hidden_size=576,
        intermediate_size=1536,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        vocab_size=49152,
        draft_vocab_size=draft_vocab_size,
        rms_norm_eps=1e-5,
        rope_theta=1e5,
        max_position=8192,
    )


def synthetic_batch(of: DrafterShape, lengths: list[int], dtype: torch.dtype) -> Batch:
    tokens = sum(lengths)
    return Batch(
        ids_N=torch.randint(0, of.draft_vocab_size, (tokens,)),
        positions_N=torch.cat([torch.arange(length) for length in lengths]),
        supervised_N=torch.cat([torch.arange(length) >= length // 4 for length in lengths]),
        aux_NA=torch.randn(tokens, of.num_aux * of.hidden_size).to(dtype),
        final_NH=torch.randn(tokens, of.hidden_size).to(dtype),
        starts_B1=torch.tensor([0, *lengths]).cumsum(0),
        keys=tuple(str(number) for number in range(len(lengths))),
    )


def flops(of: DrafterShape, tokens: int, chains: Chains) -> float:
    """Multiply-adds of the weights' products, twice for the sum and three times for the backward pass."""
    h, qd, kd = of.hidden_size, of.num_heads * of.head_dim, of.num_kv_heads * of.head_dim
    keys = 2 * h * 2 * kd
    pair = 2 * h * qd + qd * h + 3 * h * of.intermediate_size + h * of.draft_vocab_size
    counted = [len(t) for t in chains.t_by_step]
    return 6.0 * (tokens * (of.num_aux * h * h + keys) + sum(counted) * pair + sum(counted[1:]) * keys)


def gemm_gflops(dtype: torch.dtype) -> float:
    """The rate of the product that costs most: 512 states with an lm_head of 8192 rows."""
    x, w = torch.randn(512, 576).to(dtype), torch.randn(8192, 576).to(dtype)
    return 2 * 512 * 576 * 8192 / 1e9 / min(_seconds(lambda: x @ w.T) for _ in range(10))


def measure(lengths: list[int], dtype: torch.dtype, steps: int, draft_vocab_size: int, repeats: int) -> StepTime:
    torch.manual_seed(0)
    of = shape(draft_vocab_size)
    drafter = Drafter(of)
    drafter.set_embedding(torch.randn(of.vocab_size, of.hidden_size).to(dtype))
    head_DH: Tensor = (torch.randn(of.draft_vocab_size, of.hidden_size) * of.hidden_size**-0.5).to(dtype)
    test = TrainingTimeTest(drafter, head_DH, steps, 0.8)
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=1e-4, fused=True)
    batch = synthetic_batch(of, lengths, dtype)
    before = _rss_mb()
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        sums = test(batch)
        loss = sums.loss_sum / int(sums.counted_J[0])
        forward = time.perf_counter()
        loss.backward()
        backward = time.perf_counter()
        torch.nn.utils.clip_grad_norm_(drafter.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        end = time.perf_counter()
        times.append((end - start, forward - start, backward - forward, end - backward))
    step, forward, backward, update = (statistics.median(column) for column in zip(*times[1:], strict=True))
    supervised = int(batch.supervised_N.sum())
    return StepTime(
        step_s=step,
        forward_s=forward,
        backward_s=backward,
        optimizer_s=update,
        supervised=supervised,
        supervised_per_s=supervised / step,
        gflops=flops(of, batch.tokens, test.chains(batch)) / step / 1e9,
        gemm_gflops=gemm_gflops(dtype),
        rss_before_mb=before,
        rss_peak_mb=_rss_mb(),
        loss=float(loss.detach()),
    )


def _seconds(function: object) -> float:
    start = time.perf_counter()
    function()  # type: ignore[operator]
    return time.perf_counter() - start


def _rss_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[512], help="tokens of each row")
    parser.add_argument("--precision", choices=sorted(DTYPES), default="bf16")
    parser.add_argument("--ttt-steps", type=int, default=7)
    parser.add_argument("--draft-vocab-size", type=int, default=8192)
    parser.add_argument("--repeats", type=int, default=6)
    options = parser.parse_args()
    result = measure(options.rows, DTYPES[options.precision], options.ttt_steps, options.draft_vocab_size, options.repeats)
    print(json.dumps({"rows": options.rows, "precision": options.precision, "threads": torch.get_num_threads(), **asdict(result)}))


if __name__ == "__main__":
    main()
