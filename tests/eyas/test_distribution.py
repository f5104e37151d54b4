"""The target's distribution at the top of a draft vocabulary, against float64."""

import subprocess
import sys

import pytest
import torch

from eyas import distribution
from eyas.distribution import TopLogProbs, join, top_log_probs

V, D, H, N = 60, 25, 16, 40


def case() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """States, a head that makes peaked distributions of them, and a draft vocabulary in no order."""
    generator = torch.Generator().manual_seed(0)
    states, head = torch.randn(N, H, generator=generator), torch.randn(V, H, generator=generator)
    return states, head, torch.randperm(V, generator=generator)[:D]


def test_top_rest_and_outside_are_the_whole_softmaxs() -> None:
    states, head, ids = case()
    top = top_log_probs(states, head, ids, 7)
    p_NV = (states.double() @ head.double().T).softmax(-1)
    p_ND = p_NV[:, ids]
    p_NK, index_NK = p_ND.sort(-1, descending=True)
    assert torch.equal(top.index_NK.long(), index_NK[:, :7])
    torch.testing.assert_close(top.logprob_NK.double(), p_NK[:, :7].log(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(top.rest_N.double(), p_NK[:, 7:].sum(-1), rtol=1e-4, atol=0)
    torch.testing.assert_close(top.outside_N.double(), 1 - p_ND.sum(-1), rtol=1e-4, atol=1e-9)
    assert (top.index_NK.dtype, top.logprob_NK.dtype) == (torch.int32, torch.float32)


def test_the_whole_draft_vocabulary_leaves_no_rest_and_the_whole_vocabulary_nothing_outside() -> None:
    states, head, ids = case()
    assert float(top_log_probs(states, head, ids, D).rest_N.max()) == 0
    everything = top_log_probs(states, head, torch.arange(V), V)
    assert float(everything.rest_N.max()) == float(everything.outside_N.max()) == 0


def test_masses_far_below_float32s_resolution_of_one_are_kept() -> None:
    head = torch.tensor([[40.0], [0.0], [1.0], [2.0]])
    top = top_log_probs(torch.ones(1, 1), head, torch.tensor([0, 2]), 1)
    e = torch.tensor([1.0, 2.0, 0.0]).double().sub(40).exp()
    assert float(top.rest_N) == pytest.approx(float(e[0]), rel=1e-5, abs=0)
    assert float(top.outside_N) == pytest.approx(float(e[1] + e[2]), rel=1e-5, abs=0)


@pytest.mark.parametrize("tokens", [1, 7, 64])
def test_chunks_of_any_size_give_the_same(monkeypatch: pytest.MonkeyPatch, tokens: int) -> None:
    whole = top_log_probs(*case(), 5)
    monkeypatch.setattr(distribution, "TOKENS_PER_CHUNK", tokens)
    for one, other in zip(vars(top_log_probs(*case(), 5)).values(), vars(whole).values(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_the_product_has_the_heads_dtype_and_the_softmax_float32() -> None:
    states, head, ids = case()
    low = top_log_probs(states.bfloat16(), head.bfloat16(), ids, 4)
    expected = (states.bfloat16() @ head.bfloat16().T).float().log_softmax(-1)[:, ids].topk(4).values
    torch.testing.assert_close(low.logprob_NK, expected)


def test_more_than_the_draft_vocabulary_has_is_refused() -> None:
    with pytest.raises(ValueError, match="26 log-probabilities of a draft vocabulary of 25 tokens"):
        top_log_probs(*case(), 26)


def test_stretches_join_in_order() -> None:
    states, head, ids = case()
    parts = [top_log_probs(part, head, ids, 3) for part in (states[:5], states[5:5], states[5:])]
    joined = join(parts)
    assert isinstance(joined, TopLogProbs)
    assert torch.equal(joined.index_NK, top_log_probs(states, head, ids, 3).index_NK)


def test_an_engine_needs_nothing_but_torch_for_it() -> None:
    code = (
        "import sys, eyas.distribution; print(*{name.split('.')[0] for name in sys.modules} & {'transformers', 'pydantic', 'rich', 'yaml'})"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == ""
