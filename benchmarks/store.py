"""How fast the state store writes and reads, against the machine's own memory copy, file write, file read and SHA-256.

    python benchmarks/store.py --hidden-size 576 --megabytes 256

All rates are MB of bfloat16 states (aux and final) a second, whatever lies on the disk, so that they compare; fp8 moves 0.51 bytes for
each of them, and the target's top log-probabilities stand for the final states in the last two lines.
Reading is from a warm page cache and includes one copy of every row into a buffer, as a batch does; writing includes fsync.
Each figure is the best of ``--repeats`` interleaved rounds; on a busy machine the processor's own seconds say more.
"""

import argparse
import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from eyas.distribution import TopLogProbs
from eyas.states import StateRow, StateSpec, StateStore, StateWriter, finish_store, row_key

LAYERS = (2, 15, 27)
TOP = 128
SHARD_BYTES = 256 << 20


def make_rows(hidden_size: int, megabytes: int) -> list[StateRow]:
    """Rows of 100 to 1500 tokens, of so many MB of bfloat16 states in all."""
    generator = torch.Generator().manual_seed(0)
    rows: list[StateRow] = []
    tokens = (megabytes << 20) // (2 * (len(LAYERS) + 1) * hidden_size)
    while tokens > 0:
        length = min(tokens, int(torch.randint(100, 1501, (), generator=generator)))
        ids = torch.randint(32000, (length,), generator=generator)
        supervised = torch.rand(length, generator=generator) < 0.7
        aux = torch.randn(length, len(LAYERS) * hidden_size, generator=generator).bfloat16()
        final = torch.randn(length, hidden_size, generator=generator).bfloat16()
        rows.append(StateRow(row_key(ids.tolist(), supervised.tolist()), "chat", ids, supervised, aux, final))
        tokens -= length
    return rows


def with_top(row: StateRow, generator: torch.Generator) -> StateRow:
    """The row with log-probabilities in place of its final states."""
    tokens = len(row.ids_T)
    index = torch.randint(32000, (tokens, TOP), generator=generator, dtype=torch.int32)
    logprob = torch.randn(tokens, TOP, generator=generator).log_softmax(-1)
    return replace(row, final_TH=row.final_TH[:, :0], top=TopLogProbs(index, logprob, torch.zeros(tokens), torch.zeros(tokens)))


def write_store(folder: Path, rows: list[StateRow], dtype: str, hidden_size: int) -> None:
    top, vocabulary = (None, None) if rows[0].top is None else (TOP, "vocabulary")
    spec = StateSpec(LAYERS, hidden_size, dtype, 32000, "target", "tokenizer", top, vocabulary)
    with StateWriter(folder, spec, SHARD_BYTES) as writer:
        for row in rows:
            writer.add(row)
    finish_store(folder, {})


def read_store(folder: Path, order: list[int], buffer: torch.Tensor) -> None:
    store = StateStore(folder)
    for i in order:
        row = store.read(i)
        top = () if row.top is None else (row.top.index_NK, row.top.logprob_NK)
        for states in (row.aux_TA, row.final_TH, *top):
            buffer[: states.numel()].copy_(states.reshape(-1))


def write_file(path: Path, data: torch.Tensor) -> None:
    with path.open("wb") as file:
        file.write(data.numpy().data)
        file.flush()
        os.fsync(file.fileno())


def read_file(path: Path, data: torch.Tensor) -> None:
    with path.open("rb") as file:
        file.readinto(data.numpy().data)


def seconds(work: Callable[[], object]) -> tuple[float, float]:
    """Elapsed and processor seconds."""
    start, used = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - start, time.process_time() - used


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden-size", type=int, default=576)
    parser.add_argument("--megabytes", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where to write; default: the system's temporary folder")
    arguments = parser.parse_args()
    rows = make_rows(arguments.hidden_size, arguments.megabytes)
    generator = torch.Generator().manual_seed(2)
    tops = [with_top(row, generator) for row in rows]
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(1)).tolist()
    data = torch.randint(256, (arguments.megabytes << 20,), dtype=torch.uint8)
    other = torch.zeros_like(data)
    buffer = torch.zeros(max(row.aux_TA.numel() for row in rows), dtype=torch.bfloat16)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        folder = Path(name)

        def rewrite(dtype: str) -> None:
            write_store(folder / dtype, rows, dtype, arguments.hidden_size)

        def rewrite_top() -> None:
            write_store(folder / "top", tops, "fp8", arguments.hidden_size)

        works: dict[str, Callable[[], object]] = {
            "memory copy": lambda: other.copy_(data),
            "SHA-256": lambda: hashlib.sha256(data.numpy().data),
            "plain file write + fsync": lambda: write_file(folder / "plain", data),
            "plain file read": lambda: read_file(folder / "plain", other),
            "store write, bfloat16": lambda: rewrite("bfloat16"),
            "store read, bfloat16, random order": lambda: read_store(folder / "bfloat16", order, buffer),
            "store write, fp8": lambda: rewrite("fp8"),
            "store read, fp8, random order": lambda: read_store(folder / "fp8", order, buffer),
            f"store write, fp8, top {TOP}": rewrite_top,
            f"store read, fp8, top {TOP}, random": lambda: read_store(folder / "top", order, buffer),
        }
        elapsed = dict.fromkeys(works, float("inf"))
        processor = dict.fromkeys(works, float("inf"))
        for _ in range(arguments.repeats):
            for dtype in ("bfloat16", "fp8", "top"):
                shutil.rmtree(folder / dtype, ignore_errors=True)
            for what, work in works.items():
                wall, used = seconds(work)
                elapsed[what], processor[what] = min(elapsed[what], wall), min(processor[what], used)
    size = sum(row.aux_TA.nbytes + row.final_TH.nbytes for row in rows) / 1e6
    print(f"{len(rows)} rows, {size:,.0f} MB of bfloat16 states, H {arguments.hidden_size}, {torch.get_num_threads()} thread(s)")
    for what in works:
        print(f"{what:36} {size / elapsed[what]:9,.0f} MB/s {size / processor[what]:9,.0f} MB per processor second")


if __name__ == "__main__":
    main()
