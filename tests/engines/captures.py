"""What tests of capture in real engines share: rows, what transformers captures of them, and a run of one engine."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from data_prep.capture_hf import capture
from data_prep.capture_server import ServedCapture
from data_prep.rows import Row
from data_prep.template import prompt_ids, reply_row
from eval.launcher import CAPTURE, capturing
from eval.starts import read_start
from eyas.attention_hf import NAME
from eyas.config import Config, StatesConfig
from eyas.state_row import StateRow
from eyas.states import StateSpec, StateStore, finish_store, row_key
from eyas.target import Target

CONTEXT = 512
ERROR = 5e-4
"""Norm of the difference of two stores' states over their norm: float32 forwards differ by 1e-6, which some values round to a neighbour."""


def rows_of(target: Target, chats: list[list[dict[str, str]]]) -> list[Row]:
    """Twenty rows of real text: short ones, and longer ones joined from several chats, up to some 300 tokens."""
    tokenizer = target.tokenizer()
    parts = [prompt_ids(tokenizer, messages) for messages in chats]
    texts = [*parts[:10], *(list(chain.from_iterable(parts[first : first + 2 + first % 4])) for first in range(10))]
    return [row_of(ids[: CONTEXT - 120], f"category {number % 3}") for number, ids in enumerate(texts)]


def row_of(ids: list[int], category: str = "chat") -> Row:
    tokens = reply_row(ids[: len(ids) // 3], ids[len(ids) // 3 :])
    return Row(row_key(tokens.ids, tokens.supervised), f"prompt of {len(ids)}", category, tokens)


def spec_of(target: Target, dtype: Any = "bfloat16") -> StateSpec:
    shape = target.shape
    return StateSpec(target.default_layers(), shape.hidden_size, dtype, shape.vocab_size, target.digest, target.tokenizer_digest)


def config_of(engine: dict[str, Any], output: Path, **states: Any) -> Config:
    return Config.model_validate(
        {
            "output": output,
            "target": {"model": "package:smollm2", "device": "cpu", "dtype": "float32"},
            "prep": {"sources": [{"source": "none.jsonl"}], "states": {"backend": engine["kind"], "recheck": 0.2, **states}},
            "drafter": {"init": "scratch"},
            "engine": {"dtype": "float32", "context": CONTEXT} | engine,
        }
    )


@contextmanager
def captured_by(config: Config, target: Target) -> Iterator[ServedCapture]:
    with ServedCapture(config, target, partial(capturing, config)) as run:
        yield run


def contents(folder: Path) -> dict[str, StateRow]:
    finish_store(folder, {})
    store = StateStore(folder)
    return {key: store.read(place) for place, key in enumerate(store.keys)}


def captured_by_transformers(target: Target, rows: list[Row], folder: Path) -> dict[str, StateRow]:
    model = target.load_model(torch.float32, "cpu", NAME)
    capture(model, target, rows, folder, spec_of(target), StatesConfig(recheck=0.0), "hf")
    return contents(folder)


def require_same(found: dict[str, StateRow], wanted: dict[str, StateRow], layers: int) -> None:
    """The same rows, tokens, masks and categories, and states that differ by rounding alone."""
    assert found.keys() == wanted.keys()
    for key, row in found.items():
        other = wanted[key]
        assert torch.equal(row.ids_T, other.ids_T)
        assert torch.equal(row.supervised_T, other.supervised_T)
        assert row.category == other.category
        pairs = [*zip(row.aux_TA.chunk(layers, 1), other.aux_TA.chunk(layers, 1), strict=True), (row.final_TH, other.final_TH)]
        for ours, theirs in pairs:
            assert (ours.float() - theirs.float()).norm() < ERROR * theirs.float().norm()


@contextmanager
def killed_at_the_first_shard(config: Config, folder: Path) -> Iterator[None]:
    """Within the block, kill -9 to the server's main process as soon as ``folder`` has a shard."""

    def watch() -> None:
        deadline = time.monotonic() + 600
        while time.monotonic() < deadline:
            if any(folder.glob("states-*.json")) and (start := read_start(config.folder("servers") / CAPTURE)):
                os.kill(start.pid, signal.SIGKILL)
                return
            time.sleep(0.01)

    thread = threading.Thread(target=watch)
    thread.start()
    yield
    thread.join()
