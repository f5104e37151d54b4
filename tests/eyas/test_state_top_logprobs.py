"""Rows that hold the target's top log-probabilities in place of final states."""

from dataclasses import replace

import pytest
import torch

from eyas.distribution import TopLogProbs
from eyas.errors import EyasError
from eyas.shard import read_header
from eyas.states import NotFinite, StateRow, StateSpec, StateStore, StateWriter, finish_store
from tests.eyas.state_rows import MB, make_row, spec


def top_spec(dtype: str = "bfloat16", k: int = 6) -> StateSpec:
    return replace(spec(dtype), top_logprobs=k, vocab_digest="vocabulary")


def make_top_row(seed: int, tokens: int, k: int = 6) -> StateRow:
    generator = torch.Generator().manual_seed(seed)
    row = make_row(seed, tokens)
    logprob = (torch.randn(tokens, k, generator=generator) * 3).log_softmax(-1).sort(-1, descending=True).values
    index = torch.randint(1 << 16, (tokens, k), generator=generator).int()
    rest, outside = torch.rand(2, tokens, generator=generator)
    return replace(row, final_TH=row.final_TH[:, :0], top=TopLogProbs(index, logprob, rest, outside))


@pytest.mark.parametrize("dtype", ["bfloat16", "fp8"])
def test_log_probabilities_come_back_as_float16_and_indices_and_masses_exactly(tmp_path, dtype):
    rows = {row.key: row for row in (make_top_row(seed, 3 + seed) for seed in range(5))}
    with StateWriter(tmp_path, top_spec(dtype), 2000) as writer:
        for row in rows.values():
            writer.add(row)
    finish_store(tmp_path, {})
    store = StateStore(tmp_path)
    assert store.spec == top_spec(dtype)
    assert store.verify() == []
    for i, key in enumerate(store.keys):
        read, row = store.read(i), rows[key]
        assert torch.equal(read.ids_T, row.ids_T)
        assert read.final_TH.shape == (len(row.ids_T), 0)
        assert torch.equal(read.top.index_NK, row.top.index_NK)
        assert torch.equal(read.top.rest_N, row.top.rest_N)
        assert torch.equal(read.top.outside_N, row.top.outside_N)
        assert torch.equal(read.top.logprob_NK, row.top.logprob_NK.half())
        assert read.aux_TA.shape == row.aux_TA.shape


def test_a_token_of_kimis_takes_at_most_22_500_bytes():
    kimi = StateSpec((2, 30, 58), 7168, "fp8", 163840, "target", "tokens", 128, "vocabulary")
    assert kimi.bytes_per_token() == 3 * 7168 + 2 * 3 * 56 + 128 * 4 + 8 + 5
    assert kimi.bytes_per_token() <= 22_500


def test_what_a_shard_takes_is_what_the_spec_says(tmp_path):
    with StateWriter(tmp_path, top_spec("fp8"), MB) as writer:
        writer.add(make_top_row(0, 50))
    header = read_header(next(tmp_path.glob("*.safetensors")))
    assert sum(entry.end - entry.start for entry in header.tensors.values()) == 50 * top_spec("fp8").bytes_per_token()


def test_a_spec_with_final_states_is_written_as_stores_always_were():
    assert set(spec().to_json()) == {"layers", "hidden_size", "dtype", "vocab_size", "target_digest", "tokenizer_digest"}
    assert top_spec().to_json() == {**spec().to_json(), "top_logprobs": 6, "vocab_digest": "vocabulary"}


def test_log_probabilities_of_another_vocabulary_do_not_join_a_store(tmp_path):
    StateWriter(tmp_path, top_spec(), MB).close()
    with pytest.raises(EyasError, match="vocab_digest"):
        StateWriter(tmp_path, replace(top_spec(), vocab_digest="another"), MB)


def test_a_row_with_final_states_does_not_fit_a_store_of_log_probabilities_nor_the_other_way_round(tmp_path):
    with StateWriter(tmp_path / "top", top_spec(), MB) as writer:
        with pytest.raises(ValueError, match=r"final has shape|log-probabilities are missing"):
            writer.add(make_row(0, 4))
        with pytest.raises(ValueError, match=r"index has shape \[4, 5\], expected \[4, 6\]"):
            writer.add(make_top_row(0, 4, k=5))
    with StateWriter(tmp_path / "final", spec(), MB) as writer, pytest.raises(ValueError, match="none that this store holds"):
        writer.add(make_top_row(0, 4))


def test_impossible_tokens_are_stored_as_the_least_log_probability_and_nan_is_refused(tmp_path):
    row, broken = make_top_row(0, 4), make_top_row(1, 4)
    row.top.logprob_NK[2, 5] = -torch.inf
    broken.top.logprob_NK[1, 1] = torch.nan
    with StateWriter(tmp_path, top_spec(), MB) as writer:
        writer.add(row)
        with pytest.raises(NotFinite, match="log-probabilities"):
            writer.add(broken)
    finish_store(tmp_path, {})
    read = StateStore(tmp_path).read(0)
    assert float(read.top.logprob_NK[2, 5]) == -65504
    assert float(read.top.logprob_NK[2, 5].float().exp()) == 0
