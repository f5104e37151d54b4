"""Seconds of capture over seconds of plain prefill of the same rows, in two servers of the same engine side by side.

    python -m benchmarks.capture -c CONFIG [-s KEY=VALUE ...] [--rows 96] [--tokens 256] [--passes 5]

CONFIG names target and engine (kind sglang or vllm). Both servers stay up; in every pass each gets all rows once, first the one, in the
next pass the other, so that what else the machine does meets both. The plain server is as the config has it, its prefix cache aside. A
capture's time ends when its last row is on the disk. It should cost at most 5 % more. The benchmark costs two starts and the prefills.
"""

import argparse
import asyncio
import random
import secrets
import shutil
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import httpx
from rich.console import Console
from rich.table import Table

from data_prep.capture_request import exchange
from data_prep.capture_server import ANSWER_S, CLIENTS, UNDER_WAY_ROWS, UNDER_WAY_TOKENS, CaptureClient, Window
from data_prep.engine_plugin.orders import CaptureJob, FlushOrder, RowOrder, read_status, run_lengths
from data_prep.rows import Row
from data_prep.template import reply_row
from eval.launcher import capturing, serving
from eyas.config import Config, load_config
from eyas.manifest import begin
from eyas.states import StateSpec, row_key
from eyas.target import open_target

PLAIN = {"sglang": "/generate", "vllm": "/v1/completions"}
CACHE_OFF = {"sglang": "disable-radix-cache", "vllm": "no-enable-prefix-caching"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-c", "--config", type=Path, required=True)
    parser.add_argument("-s", "--set", action="append", default=[])
    parser.add_argument("--rows", type=int, default=96)
    parser.add_argument("--tokens", type=int, default=256, help="of the longest row; the shortest has an eighth")
    parser.add_argument("--passes", type=int, default=5)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="eyas-capture-"))
    try:
        config = load_config(options.config, [*options.set, f"output={folder}/capture"])
        engine = config.engine.model_copy(update={"flags": config.engine.flags | {CACHE_OFF[config.engine.kind]: True}})
        plain = config.model_copy(update={"output": folder / "plain", "engine": engine})
        asyncio.run(measure(config, plain, options.rows, options.tokens, options.passes))
    finally:
        shutil.rmtree(folder)


async def measure(config: Config, plain: Config, rows: int, tokens: int, passes: int) -> None:
    target = open_target(config.target)
    shape, states = target.shape, config.prep.states
    spec = StateSpec(target.default_layers(), shape.hidden_size, states.dtype, shape.vocab_size, target.digest, target.tokenizer_digest)
    job = CaptureJob((config.output / "states").absolute(), spec, states.shard_mb * 2**20)
    job.root.mkdir(parents=True)
    kind = config.engine.kind
    needs = CLIENTS[kind].needs(target, job, config.engine.version)
    texts = random_rows(rows, tokens, shape.vocab_size)
    limits = httpx.Limits(max_connections=UNDER_WAY_ROWS)
    with capturing(config, needs.flags, needs.environment) as url, serving(plain, {}, "none") as plain_url:
        async with (
            httpx.AsyncClient(base_url=url, timeout=ANSWER_S, limits=limits, trust_env=False) as http,
            httpx.AsyncClient(base_url=plain_url, timeout=ANSWER_S, limits=limits, trust_env=False) as plain_http,
        ):
            client = CLIENTS[kind](http)
            seconds: dict[str, list[float]] = {"capture": [], "plain prefill": []}
            for number in range(passes + 1):
                for name in sorted(seconds, reverse=number % 2 == 1):
                    begun = time.perf_counter()
                    if name == "capture":
                        await captured(client, job, texts, number)
                    else:
                        await prefilled(plain_http, PLAIN[kind], texts)
                    if number:  # the first pass warms up
                        seconds[name].append(time.perf_counter() - begun)
    tell(seconds, sum(len(row.tokens.ids) for row in texts), spec)


async def captured(client: CaptureClient, job: CaptureJob, rows: Sequence[Row], number: int) -> None:
    store = "pass" + "abcdefghijklmnopqrstuvwxyz"[number]
    begin(job.root / store, "states", job.spec.to_json(), {})
    window = Window(UNDER_WAY_ROWS, UNDER_WAY_TOKENS)

    async def one(row: Row) -> None:
        answer = await client.send(row.tokens.ids, RowOrder(store, row.key, row.category, run_lengths(row.tokens.supervised)))
        assert answer.taken
        await window.leave(len(row.tokens.ids))

    async with asyncio.TaskGroup() as group:
        for row in rows:
            await window.enter(len(row.tokens.ids))
            group.create_task(one(row))
    flush = FlushOrder(store, secrets.token_hex(8))
    await client.send([1], flush)
    while (status := read_status(job.root)) is None or status.flushed.get(store) != flush.ticket:
        await asyncio.sleep(0.01)
    assert status.fault is None
    shutil.rmtree(job.root / store)


async def prefilled(http: httpx.AsyncClient, path: str, rows: Sequence[Row]) -> None:
    window = Window(UNDER_WAY_ROWS, UNDER_WAY_TOKENS)

    async def one(row: Row) -> None:
        sglang = {"input_ids": row.tokens.ids, "sampling_params": {"max_new_tokens": 1, "temperature": 0.0, "ignore_eos": True}}
        vllm = {"prompt": row.tokens.ids, "max_tokens": 1, "temperature": 0.0, "ignore_eos": True}
        await exchange(http, "POST", path, sglang if path == PLAIN["sglang"] else vllm)
        await window.leave(len(row.tokens.ids))

    async with asyncio.TaskGroup() as group:
        for row in rows:
            await window.enter(len(row.tokens.ids))
            group.create_task(one(row))


def random_rows(rows: int, tokens: int, vocab_size: int) -> list[Row]:
    """Rows of random tokens, longest first; no two begin alike, so that no prefix cache finds anything."""
    chooser = random.Random(0)
    lengths = sorted((chooser.randint(tokens // 8, tokens) for _ in range(rows)), reverse=True)
    made = []
    for length in lengths:
        ids = [chooser.randrange(vocab_size // 2) for _ in range(length)]
        row = reply_row(ids[: length // 2], ids[length // 2 :])
        made.append(Row(row_key(row.ids, row.supervised), str(len(made)), "chat", row))
    return made


def tell(seconds: dict[str, list[float]], tokens: int, spec: StateSpec) -> None:
    table = Table("", "median s", "tokens a second", "all passes")
    for name, each in seconds.items():
        median = statistics.median(each)
        table.add_row(name, f"{median:.2f}", f"{tokens / median:,.0f}", " ".join(f"{value:.2f}" for value in each))
    ratios = sorted(ours / theirs for ours, theirs in zip(*seconds.values(), strict=True))
    print_to = Console()
    print_to.print(f"{tokens:,} tokens a pass, {len(spec.layers)} aux layers and final of width {spec.hidden_size}, {spec.dtype}", table)
    print_to.print(f"capture over plain prefill: median {statistics.median(ratios):.3f}, passes {ratios[0]:.3f} to {ratios[-1]:.3f}")


if __name__ == "__main__":
    main()
