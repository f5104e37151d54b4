"""Rows of made-up states, and stores of them, for the tests of the hidden-state store; also imported by processes that those start."""

from pathlib import Path

import torch

from eyas.states import StateRow, StateSpec, StateStore, StateWriter, finish_store, row_key

H = 144  # one whole block of 128 and a short one
LAYERS = (2, 15, 27)
MB = 1 << 20


def spec(dtype: str = "bfloat16") -> StateSpec:
    return StateSpec(LAYERS, H, dtype, vocab_size=49152, target_digest="target", tokenizer_digest="tokens")


def make_row(seed: int, tokens: int, category: str = "chat", dtype: torch.dtype = torch.bfloat16) -> StateRow:
    """The same row for the same seed and length, in any process."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(49152, (tokens,), generator=generator)
    supervised = torch.rand(tokens, generator=generator) < 0.6
    aux = (torch.randn(tokens, len(LAYERS) * H, generator=generator) * 10).to(dtype)
    final = torch.randn(tokens, H, generator=generator).to(dtype)
    return StateRow(row_key(ids.tolist(), supervised.tolist()), category, ids, supervised, aux, final)


def fill(folder: Path, rows: list[StateRow], dtype: str = "bfloat16", shard_bytes: int = MB, writer: str = "w0") -> None:
    with StateWriter(folder, spec(dtype), shard_bytes, writer) as store:
        for row in rows:
            store.add(row)


def finished(folder: Path, rows: list[StateRow], dtype: str = "bfloat16", shard_bytes: int = MB) -> StateStore:
    fill(folder, rows, dtype, shard_bytes)
    finish_store(folder, {})
    return StateStore(folder)


def assert_same_row(read: StateRow, written: StateRow) -> None:
    assert (read.key, read.category) == (written.key, written.category)
    assert read.ids_T.dtype == torch.int64
    assert read.supervised_T.dtype == torch.bool
    assert torch.equal(read.ids_T, written.ids_T)
    assert torch.equal(read.supervised_T, written.supervised_T)
    assert torch.equal(read.aux_TA, written.aux_TA.bfloat16())
    assert torch.equal(read.final_TH, written.final_TH.bfloat16())
