"""Times the embedded engine: baseline step, draft+verify cycle and its parts, and transformers' generate with a static cache.

    OMP_NUM_THREADS=2 python benchmarks/engine.py [--model package:smollm2] [--steps 3] [--dtype bfloat16]

The three are interleaved in rounds on one prompt, so that a slow minute of the machine slows all of them; shown are medians over rounds.
The drafter is random (its time does not depend on its weights) but its drafts are replaced by the text's own tokens in a fixed pattern of
accepted lengths 0, 1, 2 ... s, so that extensions of every length are timed. About a minute on two quiet cores.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import PreTrainedModel

from eval.engine import Draft, DraftChain, Request, TargetRunner, decode
from eyas.attention_hf import NAME
from eyas.config import TargetConfig
from eyas.drafter import Drafter, DrafterShape
from eyas.target import Target, open_target

TOKENS = 24
PARTS = ("verify", "extend", "draft", "overhead")


class PatternChain(DraftChain):
    """Drafts as ever, but hands out the text's next tokens, the (cycle % (s + 1))-th of them spoilt."""

    def start(self, prompt: list[int], text: list[int]) -> None:
        self.known, self.cycle = [*prompt, *text], 0

    def draft(self, first: Draft) -> Tensor:
        super().draft(first)
        start = self.length + 1
        ids = (self.known[start : start + self.steps] + [0] * self.steps)[: self.steps]
        accepted = self.cycle % (self.steps + 1)
        if accepted < self.steps:
            ids[accepted] = (ids[accepted] + 1) % self.drafter.shape.vocab_size
        self.cycle += 1
        return torch.tensor(ids)


def random_drafter(target: Target, draft_vocab_size: int, dtype: torch.dtype) -> Drafter:
    shape = target.shape
    drafter = Drafter(
        DrafterShape(
            hidden_size=shape.hidden_size,
            intermediate_size=shape.intermediate_size,
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            vocab_size=shape.vocab_size,
            draft_vocab_size=min(draft_vocab_size, shape.vocab_size),
            rms_norm_eps=shape.rms_norm_eps,
            rope_theta=shape.rope_theta,
            max_position=shape.max_position,
        )
    )
    drafter.to(dtype).set_embedding(target.embedding(dtype))
    return drafter.fuse()


def static_step(model: PreTrainedModel, prompt: list[int]) -> Callable[[], float]:
    """Milliseconds a token of transformers' generate with a static cache, prefill taken off."""
    ids = torch.tensor([prompt])

    def seconds(tokens: int) -> float:
        start = time.perf_counter()
        model.generate(ids, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, cache_implementation="static", pad_token_id=0)
        return time.perf_counter() - start

    return lambda: 1000 * (seconds(TOKENS + 1) - seconds(1)) / TOKENS


def measure(target: Target, steps: int, dtype: torch.dtype, prompt_tokens: int, rounds: int, draft_vocab_size: int) -> dict[str, float]:
    """Median milliseconds of each part."""
    torch.manual_seed(0)
    layers, capacity = target.default_layers(), prompt_tokens + TOKENS * (steps + 2)
    runner = TargetRunner(target.load_model(dtype, "cpu", NAME), layers, capacity)
    chain = PatternChain(random_drafter(target, draft_vocab_size, dtype), layers, steps, capacity)
    prompt = torch.randint(3, target.shape.vocab_size, (prompt_tokens,)).tolist()
    cycles = TOKENS // (steps + 1) * (steps + 1)
    long = cycles * (steps + 2) // 2 + steps + 2
    # The text comes from verify steps of the same shape: in bf16 a batch of one token rounds differently and can choose another token.
    chain.start(prompt, [])
    text = decode(runner, chain, Request(prompt, long, 0.0, 0, frozenset())).output_ids
    static = static_step(target.load_model(dtype, "cpu"), prompt)
    static()
    rows: dict[str, list[float]] = {name: [] for name in ("static", "baseline", "cycle", *PARTS)}
    for _ in range(rounds):
        rows["static"].append(static())
        base = decode(runner, None, Request(prompt, TOKENS + 1, 0.0, 0, frozenset()))
        rows["baseline"].append(1000 * (base.seconds["decode"] + base.seconds["overhead"]) / base.counts["decode"])
        chain.start(prompt, text)
        # the pattern's mean is s/2 accepted drafts a cycle, so this many tokens take `cycles` cycles
        spec = decode(runner, chain, Request(prompt, 1 + cycles * (steps + 2) // 2, 0.0, 0, frozenset()))
        per_cycle = {name: 1000 * spec.seconds[name] / spec.verify_ct for name in PARTS}
        per_cycle["extend"] = 1000 * spec.seconds["extend"] / spec.counts["extend"]
        for name, milliseconds in per_cycle.items():
            rows[name].append(milliseconds)
        rows["cycle"].append(sum(per_cycle.values()))
        accepted = [cycle % (steps + 1) for cycle in range(spec.verify_ct)]
        off = sum(was != wanted for was, wanted in zip(spec.accepted, accepted, strict=True))
    medians = {name: statistics.median(values) for name, values in rows.items()}
    return medians | {
        "off_pattern": float(off),
        "cycle/baseline": statistics.median(map(float.__truediv__, rows["cycle"], rows["baseline"])),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="package:smollm2")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--draft-vocab", type=int, default=8192)
    parser.add_argument("--prompt", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    target = open_target(TargetConfig(model=options.model))
    found = measure(target, options.steps, getattr(torch, options.dtype), options.prompt, options.rounds, options.draft_vocab)
    table = Table(
        "what",
        "ms",
        "of a baseline step",
        title=f"{options.model}, {options.dtype}, {torch.get_num_threads()} threads, s = {options.steps}",
    )
    names = {
        "static": "transformers generate, static cache: a token",
        "baseline": "baseline step",
        "cycle": f"cycle of {options.steps} drafts",
    }
    for name in ("static", "baseline", "cycle", *PARTS):
        table.add_row(names.get(name, f"  {name}"), f"{found[name]:.2f}", f"{found[name] / found['baseline']:.3f}")
    console = Console()
    console.print(table)
    console.print(f"break-even: {found['cycle/baseline']:.3f} tokens a cycle (median of the rounds' ratios)")
    if found["off_pattern"]:
        console.print(f"in the last round {found['off_pattern']:.0f} cycles were off the pattern of accepted lengths")


if __name__ == "__main__":
    main()
