"""The fused loss against the plain one, and its memory."""

import pytest
import torch
from torch import Tensor

from eyas.distribution import TopLogProbs
from train.loss import LABELS_PER_BLOCK, soft_cross_entropy, top_cross_entropy


def plain(normed_PH: Tensor, lm_head_DH: Tensor, final_NH: Tensor, target_head_DH: Tensor, label_P: Tensor) -> Tensor:
    """The l of every pair, by the formula."""
    p_PD = (final_NH[label_P] @ target_head_DH.T).softmax(-1)
    return -(p_PD * (normed_PH @ lm_head_DH.T).log_softmax(-1)).sum(-1)


def case(dtype: torch.dtype = torch.float64, pairs: int = 700) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """More labels than a block, in no order, some of many pairs and some of none."""
    generator = torch.Generator().manual_seed(2)
    normed, head = torch.randn(pairs, 16, generator=generator).to(dtype), torch.randn(50, 16, generator=generator).to(dtype)
    final, target = torch.randn(300, 16, generator=generator).to(dtype), torch.randn(50, 16, generator=generator).to(dtype)
    label, weight = torch.randint(0, 300, (pairs,), generator=generator), torch.rand(pairs, generator=generator)
    return normed.requires_grad_(), head.requires_grad_(), final, target, label, weight


def test_loss_and_gradients_equal_the_formula() -> None:
    *tensors, weight = case()
    found, expected = soft_cross_entropy(*tensors, weight), plain(*tensors)
    total = (expected * weight).sum()
    torch.testing.assert_close(found.loss_P, expected.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found.loss_sum, total, rtol=1e-12, atol=1e-12)
    mine, theirs = torch.autograd.grad(found.loss_sum / 7, tensors[:2]), torch.autograd.grad(total / 7, tensors[:2])
    torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-12)


def test_bfloat16_gradients_are_within_one_percent_of_float64_on_the_same_numbers() -> None:
    *tensors, weight = case(torch.bfloat16)
    exact = [tensor.detach().double().requires_grad_() for tensor in tensors[:2]]
    expected = (plain(*exact, tensors[2].double(), tensors[3].double(), tensors[4]) * weight).sum()
    found = soft_cross_entropy(tensors[0], tensors[1], *tensors[2:], weight).loss_sum
    assert float(found.detach()) == pytest.approx(float(expected.detach()), rel=2e-3)
    for mine, theirs in zip(torch.autograd.grad(found, tensors[:2]), torch.autograd.grad(expected, exact), strict=True):
        assert float((mine.double() - theirs).norm() / theirs.norm()) < 1e-2


def test_a_drafter_near_its_target_still_gets_the_small_gradient_that_is_left() -> None:
    _, head, final, _, label, weight = case(torch.bfloat16)
    target = (head.detach().float() + 0.05 * torch.randn(head.shape, generator=torch.Generator().manual_seed(3))).bfloat16()
    same = final[label].clone().requires_grad_()
    exact = [tensor.detach().double().requires_grad_() for tensor in (same, head)]
    expected = (plain(*exact, final.double(), target.double(), label) * weight).sum()
    found = soft_cross_entropy(same, head, final, target, label, weight).loss_sum
    for mine, theirs in zip(torch.autograd.grad(found, (same, head)), torch.autograd.grad(expected, exact), strict=True):
        assert float((mine.double() - theirs).norm() / theirs.norm()) < 0.1


def test_master_weights_get_a_float32_gradient_from_a_bfloat16_product() -> None:
    normed, head, final, target, label, weight = case(torch.bfloat16)
    master = head.detach().float().requires_grad_()
    loss = soft_cross_entropy(normed, master, final, target, label, weight).loss_sum
    (gradient,) = torch.autograd.grad(loss, master)
    assert gradient.dtype == torch.float32


def test_the_guess_is_the_first_of_the_largest() -> None:
    *tensors, weight = case()
    with torch.no_grad():
        tensors[1][30] = tensors[1][4]
    guess = soft_cross_entropy(*tensors, weight, with_guess=True).guess_P
    assert guess is not None
    assert torch.equal(guess, (tensors[0] @ tensors[1].T).argmax(-1))
    assert not bool((guess == 30).any())
    assert soft_cross_entropy(*tensors, weight).guess_P is None


def test_a_second_backward_pass_is_an_error_not_a_wrong_gradient() -> None:
    *tensors, weight = case()
    loss = soft_cross_entropy(*tensors, weight).loss_sum * 2
    torch.autograd.grad(loss, tensors[:2], retain_graph=True)
    with pytest.raises(RuntimeError, match="inplace"):
        torch.autograd.grad(loss, tensors[:2])


def test_no_pair_gives_zero_loss_and_zero_gradients() -> None:
    *tensors, weight = case(pairs=0)
    found = soft_cross_entropy(*tensors, weight, with_guess=True)
    assert float(found.loss_sum.detach()) == 0
    assert torch.equal(torch.autograd.grad(found.loss_sum, tensors[1])[0], torch.zeros(50, 16, dtype=torch.float64))


def test_without_gradients_the_loss_is_the_same() -> None:
    *tensors, weight = case()
    expected = soft_cross_entropy(*tensors, weight)
    with torch.no_grad():
        found = soft_cross_entropy(*tensors, weight)
    assert not found.loss_sum.requires_grad
    torch.testing.assert_close(found.loss_sum, expected.loss_sum.detach())


def test_nothing_of_all_pairs_times_the_vocabulary_is_made() -> None:
    pairs, draft = 14000, 1000
    normed, head = torch.randn(pairs, 8, requires_grad=True), torch.randn(draft, 8, requires_grad=True)
    label = torch.arange(pairs) // 4
    largest = _LargestTensor()
    with largest:
        soft_cross_entropy(normed, head, torch.randn(3500, 8), torch.randn(draft, 8), label, torch.ones(pairs)).loss_sum.backward()
    assert largest.numbers <= LABELS_PER_BLOCK * 4 * draft
    assert largest.numbers * 7 < pairs * draft


class _LargestTensor(torch.utils._python_dispatch.TorchDispatchMode):
    """Watches every operation, autograd's own included, for the largest result."""

    numbers = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = function(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(result):
            if isinstance(tensor, Tensor):
                self.numbers = max(self.numbers, tensor.numel())
        return result


# --- top log-probabilities in place of final states


def top_case(k: int, pairs: int = 700) -> tuple[Tensor, Tensor, TopLogProbs, Tensor, Tensor, Tensor]:
    """``case`` with the target's head enlarged by tokens outside of the draft vocabulary, and the target's p [label, D] beside the top."""
    normed, head, final, target, label, weight = case(pairs=pairs)
    outside = torch.randn(30, 16, generator=torch.Generator().manual_seed(4)).double()
    p_LV = (final @ torch.cat([target, outside]).T).softmax(-1)
    p_LK, index_LK = p_LV[:, :50].topk(k, -1)
    rest_L = p_LV[:, :50].scatter(1, index_LK, 0.0).sum(-1)
    top = TopLogProbs(index_LK.int(), p_LK.log(), rest_L, p_LV[:, 50:].sum(-1))
    return normed, head, top, label, weight, p_LV[:, :50] / p_LV[:, :50].sum(-1, keepdim=True)


def plain_top(normed_PH: Tensor, lm_head_DH: Tensor, p_LD: Tensor, k: int, label_P: Tensor) -> Tensor:
    """-sum_T p log q - r log q_R of every pair, T the k largest p of its label, R the others."""
    losses = []
    for x_H, label in zip(normed_PH, label_P.tolist(), strict=True):
        q_D, p_D = (lm_head_DH @ x_H).softmax(-1), p_LD[label]
        order = p_D.argsort(descending=True)
        known, rest = order[:k], order[k:]
        loss = -(p_D[known] * q_D[known].log()).sum()
        losses.append(loss - p_D[rest].sum() * q_D[rest].sum().log() if len(rest) else loss)
    return torch.stack(losses)


@pytest.mark.parametrize("k", [1, 8, 49])
def test_loss_and_gradients_of_a_known_top_equal_the_formula(k: int) -> None:
    normed, head, top, label, weight, p_LD = top_case(k)
    found, expected = top_cross_entropy(normed, head, top, label, weight), plain_top(normed, head, p_LD, k, label)
    total = (expected * weight).sum()
    torch.testing.assert_close(found.loss_P, expected.detach(), rtol=1e-11, atol=1e-12)
    mine, theirs = torch.autograd.grad(found.loss_sum / 7, (normed, head)), torch.autograd.grad(total / 7, (normed, head))
    torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)


def test_a_top_of_the_whole_draft_vocabulary_is_the_loss_of_the_final_states() -> None:
    *tensors, weight = case()
    normed, head, top, label, _, _ = top_case(50)
    found, expected = top_cross_entropy(normed, head, top, label, weight, True), soft_cross_entropy(*tensors, weight, True)
    torch.testing.assert_close(found.loss_P, expected.loss_P, rtol=1e-11, atol=1e-12)
    assert torch.equal(found.guess_P, expected.guess_P)  # type: ignore[arg-type]
    mine, theirs = torch.autograd.grad(found.loss_sum, (normed, head)), torch.autograd.grad(expected.loss_sum, tensors[:2])
    torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)


def test_a_drafter_equal_to_its_target_is_left_alone_however_little_of_the_top_is_known() -> None:
    _, _, final, target, label, weight = case()
    same = final[label].clone().requires_grad_()
    p_LK, index_LK = (final @ target.T).softmax(-1).topk(3, -1)
    top = TopLogProbs(index_LK.int(), p_LK.log(), 1 - p_LK.sum(-1), torch.zeros(300))
    (gradient,) = torch.autograd.grad(top_cross_entropy(same, target, top, label, weight).loss_sum, same)
    assert float(gradient.abs().max()) < 1e-12


def test_a_rest_that_the_drafter_gives_nothing_makes_no_infinity() -> None:
    normed, head = torch.tensor([[400.0]], requires_grad=True), torch.tensor([[1.0], [0.0], [-1.0]], requires_grad=True)
    top = TopLogProbs(torch.tensor([[0]]), torch.tensor([[0.5]]).log(), torch.tensor([0.5]), torch.tensor([0.0]))
    loss = top_cross_entropy(normed, head, top, torch.tensor([0]), torch.ones(1)).loss_sum
    gradients = torch.autograd.grad(loss, (normed, head))
    assert bool(loss.isfinite())
    assert all(bool(gradient.isfinite().all()) for gradient in gradients)


def test_no_pair_with_a_known_top_gives_zero() -> None:
    normed, head, top, label, weight, _ = top_case(5, pairs=0)
    assert float(top_cross_entropy(normed, head, top, label, weight).loss_sum.detach()) == 0


def test_of_a_known_top_nothing_of_all_pairs_times_the_vocabulary_is_made() -> None:
    pairs, draft = 14000, 1000
    normed, head = torch.randn(pairs, 8, requires_grad=True), torch.randn(draft, 8, requires_grad=True)
    top = TopLogProbs(torch.arange(5).repeat(3500, 1), torch.full((3500, 5), 0.1).log(), torch.full((3500,), 0.3), torch.full((3500,), 0.2))
    largest = _LargestTensor()
    with largest:
        top_cross_entropy(normed, head, top, torch.arange(pairs) // 4, torch.ones(pairs)).loss_sum.backward()
    assert largest.numbers <= LABELS_PER_BLOCK * 4 * draft
