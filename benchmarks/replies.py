"""On-policy replies a second: our sampler against transformers' ``generate`` on the same prompts, greedy, in one run.

    python -m benchmarks.replies [--prompts 96] [--tokens 96] [--slots 64]

``generate`` gets batches of the same size, left-padded, sorted by length. Cost: minutes, nearly all of them in ``generate``.
"""

import argparse
import time

import torch
from rich.console import Console
from rich.table import Table

from data_prep.prompts import load_source
from data_prep.sampler import Request, Sampling, sample
from data_prep.template import prompt_ids
from eyas.attention_hf import NAME
from eyas.config import SourceConfig, TargetConfig
from eyas.target import open_target


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=96)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--slots", type=int, default=64)
    options = parser.parse_args()
    target = open_target(TargetConfig(model="package:smollm2"))
    tokenizer = target.tokenizer()
    source = SourceConfig(source="package:evals", families=["group:general"], limit=options.prompts)
    prompts = sorted((prompt_ids(tokenizer, prompt.messages) for prompt in load_source(source, seed=0)), key=len)

    ours = target.load_model(torch.bfloat16, torch.device("cpu"), NAME)
    requests = [Request(str(number), ids, options.tokens) for number, ids in enumerate(prompts)]
    start = time.perf_counter()
    replies = list(sample(ours, requests, Sampling((0.0,), 1.0, 0), slots=options.slots, stop_ids=target.shape.eos_ids))
    rows = [("eyas", sum(len(reply.ids) for reply in replies), time.perf_counter() - start)]

    theirs = target.load_model(torch.bfloat16, torch.device("cpu"))
    tokenizer.padding_side = "left"
    start, tokens = time.perf_counter(), 0
    for first in range(0, len(prompts), options.slots):
        batch = tokenizer.pad({"input_ids": prompts[first : first + options.slots]}, return_tensors="pt")
        output = theirs.generate(**batch, max_new_tokens=options.tokens, do_sample=False)
        replied = output[:, batch["input_ids"].shape[1] :]
        ended = (replied == target.shape.eos_ids[0]).long().cumsum(1)
        tokens += int((ended - (replied == target.shape.eos_ids[0]).long() == 0).sum())
    rows.append(("transformers generate", tokens, time.perf_counter() - start))

    table = Table("", "reply tokens", "seconds", "tokens a second")
    for name, count, elapsed in rows:
        table.add_row(name, f"{count:,}", f"{elapsed:.1f}", f"{count / elapsed:.0f}")
    Console().print(f"{torch.get_num_threads()} threads, {len(prompts)} prompts", table)


if __name__ == "__main__":
    main()
