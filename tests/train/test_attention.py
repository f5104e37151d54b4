"""The merged attention against one dense softmax."""

import pytest
import torch
from torch import Tensor

from train.attention import BLOCK_QUERIES, merged_attention, query_blocks


def dense(q_MQd: Tensor, k_NKd: Tensor, v_NKd: Tensor, kd_MKjd: Tensor, vd_MKjd: Tensor, seen_MN: Tensor, scale: float) -> Tensor:
    """Keys of the prefix and of the chain side by side under one mask."""
    group = q_MQd.shape[1] // k_NKd.shape[1]
    k, v, kd, vd = (x.repeat_interleave(group, 1) for x in (k_NKd, v_NKd, kd_MKjd, vd_MKjd))
    prefix = torch.einsum("mhd,nhd->mhn", q_MQd, k).masked_fill(~seen_MN[:, None], float("-inf"))
    chain = torch.einsum("mhd,mhjd->mhj", q_MQd, kd)
    p = (torch.cat([prefix, chain], -1) * scale).softmax(-1)
    n = len(k)
    return torch.einsum("mhn,nhd->mhd", p[..., :n], v) + torch.einsum("mhj,mhjd->mhd", p[..., n:], vd)


def case(heads: int, key_heads: int, steps: int) -> tuple[list[Tensor], Tensor, Tensor, Tensor]:
    """Two rows of 13 and 9 tokens, queries with gaps: tensors, their positions, the rows' starts, and what each query sees."""
    generator = torch.Generator().manual_seed(1)
    starts_B1 = torch.tensor([0, 13, 13, 22])
    t_M = torch.tensor([4, 5, 6, 9, 10, 11, 13, 15, 16, 20])
    shapes = [(10, heads, 8), (22, key_heads, 8), (22, key_heads, 8), (10, key_heads, steps, 8), (10, key_heads, steps, 8)]
    tensors = [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]
    at = torch.arange(22)
    row_M = torch.searchsorted(starts_B1, t_M, right=True) - 1
    return tensors, t_M, starts_B1, (at <= t_M[:, None]) & (at >= starts_B1[row_M, None])


@pytest.mark.parametrize("block", [1, 3, 64])
@pytest.mark.parametrize(("heads", "key_heads"), [(4, 4), (6, 2), (3, 1)])
@pytest.mark.parametrize("steps", [0, 1, 6])
def test_output_and_all_gradients_equal_dense_attention(
    heads: int, key_heads: int, steps: int, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(BLOCK_QUERIES, "cpu", block)
    tensors, t_M, starts_B1, seen_MN = case(heads, key_heads, steps)
    weight = torch.randn(10, heads, 8, dtype=torch.float64)
    expected = dense(*tensors, seen_MN, 0.3)
    found = merged_attention(*tensors, query_blocks(t_M, starts_B1), 0.3)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    for mine, theirs in zip(
        torch.autograd.grad((found * weight).sum(), tensors, materialize_grads=True),
        torch.autograd.grad((expected * weight).sum(), tensors),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-12)


def test_scores_of_hundreds_overflow_nothing() -> None:
    tensors, t_M, starts_B1, seen_MN = case(4, 2, 3)
    loud = [(tensor.detach().float() * (40 if number in (0, 1, 3) else 1)).requires_grad_() for number, tensor in enumerate(tensors)]
    found = merged_attention(*loud, query_blocks(t_M, starts_B1), 1.0)
    torch.testing.assert_close(found, dense(*loud, seen_MN, 1.0), rtol=1e-4, atol=1e-4)
    assert all(bool(gradient.isfinite().all()) for gradient in torch.autograd.grad(found.sum(), loud))


def test_what_a_query_must_not_see_does_not_matter() -> None:
    tensors, t_M, starts_B1, seen_MN = case(4, 2, 2)
    unseen_N = ~seen_MN.any(0)
    before = merged_attention(*tensors, query_blocks(t_M, starts_B1), 0.3)
    with torch.no_grad():
        tensors[1][unseen_N] = 1e30
        tensors[2][unseen_N] = float("nan")
    assert torch.equal(merged_attention(*tensors, query_blocks(t_M, starts_B1), 0.3), before)


def test_no_block_crosses_a_row_and_every_query_is_in_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BLOCK_QUERIES, "cpu", 4)
    _, t_M, starts_B1, seen_MN = case(1, 1, 0)
    blocks = query_blocks(t_M, starts_B1)
    assert [query for block in blocks for query in range(block.queries.start, block.queries.stop)] == list(range(10))
    for block in blocks:
        seen_cn = torch.ones(block.hidden_cw.shape[0], block.keys.stop - block.keys.start, dtype=torch.bool)
        seen_cn[:, seen_cn.shape[1] - block.hidden_cw.shape[1] :] = ~block.hidden_cw
        assert torch.equal(seen_cn, seen_MN[block.queries, block.keys])
        assert int(seen_MN[block.queries].sum()) == int(seen_cn.sum())


def test_no_tensor_larger_than_a_block_of_scores_is_made() -> None:
    tokens, heads = 2048, 4
    q, k, v = (torch.randn(tokens, n, 16, requires_grad=True) for n in (heads, 2, 2))
    none = torch.empty(tokens, 2, 0, 16)
    largest = _LargestTensor()
    with largest:
        merged_attention(q, k, v, none, none, query_blocks(torch.arange(tokens), torch.tensor([0, tokens])), 0.25).sum().backward()
    assert largest.numbers <= BLOCK_QUERIES["cpu"] * heads * tokens


class _LargestTensor(torch.utils._python_dispatch.TorchDispatchMode):
    """Watches every operation, autograd's own included, for the largest result."""

    numbers = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = function(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(result):
            if isinstance(tensor, Tensor):
                self.numbers = max(self.numbers, tensor.numel())
        return result
