"""The stand-in for SGLang's compiled CPU operators does what they must: against plain loops, and against SGLang's own Triton kernels.

The kernels run in Triton's interpreter under SGLang's Python (triton_twins.py); only those tests need SGLang installed.
"""

import json
import math
import os
import random
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.engines.draft_trees import Tree, grow
from tests.engines.served import SGLANG, STAND_IN

TREES = [(1, 3, 4), (2, 3, 6), (3, 2, 8), (4, 4, 16)]
"""topk, steps, width"""
LENGTHS = [5, 1, 9]
POOL_LEN = 40


@pytest.fixture(scope="module")
def kernels() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(STAND_IN))
        import sgl_kernel

    return sgl_kernel


def table(rows: int = 5, seed: int = 0) -> list[list[int]]:
    """Every slot of the pool but 0 once, in no order."""
    slots = list(range(1, rows * POOL_LEN + 1))
    random.Random(seed).shuffle(slots)
    return [slots[row * POOL_LEN : (row + 1) * POOL_LEN] for row in range(rows)]


ROWS = [3, 0, 4]


# Slots


def test_slots_are_written_and_read_request_by_request(kernels: ModuleType) -> None:
    start, end = [2, 0, 7], [6, 0, 10]
    slots = [101, 102, 103, 104, 201, 202, 203]
    expected = table()
    expected[3][2:6], expected[4][7:10] = slots[:4], slots[4:]
    pool = torch.tensor(table(), dtype=torch.int32)
    arguments = [torch.tensor(values) for values in (ROWS, start, end)]
    kernels.assign_req_to_token_pool_cpu(arguments[0], pool, *arguments[1:], torch.tensor(slots), POOL_LEN)
    assert pool.tolist() == expected
    read = torch.full((9,), -7)
    kernels.assign_extend_cache_locs_cpu(arguments[0], pool, *arguments[1:], read, POOL_LEN)
    assert read.tolist() == [*slots, -7, -7]


def test_drafts_take_the_slots_behind_the_tokens_branch_by_branch(kernels: ModuleType) -> None:
    pool, rows, lengths = torch.tensor(table(), dtype=torch.int32), torch.tensor(ROWS), torch.tensor(LENGTHS)
    slots = torch.empty(3 * 2 * 3, dtype=torch.int64)
    kernels.assign_draft_cache_locs_contiguous_cpu(rows, pool, lengths, slots, POOL_LEN, 2, 3)
    assert slots.tolist() == [table()[row][length + n] for row, length in zip(ROWS, LENGTHS, strict=True) for n in range(6)]
    branches = kernels.build_draft_decode_metadata_cpu(pool, rows, lengths, 2, 3, POOL_LEN)
    assert branches.dtype == torch.int32
    for request, (row, length) in enumerate(zip(ROWS, LENGTHS, strict=True)):
        for branch in range(2):
            drafts = slots.view(3, 2, 3)[request, branch].tolist()
            assert branches[request * 2 + branch, : length + 3].tolist() == [*table()[row][:length], *drafts]


def test_accepted_slots_are_gathered_in_order(kernels: ModuleType) -> None:
    index = torch.tensor([[0, 2, -1], [3, -1, -1], [6, 7, 8]], dtype=torch.int32)
    found = torch.full((9,), -7)
    kernels.fill_accept_out_cache_loc_cpu(index, torch.arange(50, 59), found)
    assert found.tolist() == [50, 52, 53, 56, 57, 58, -7, -7, -7]


def test_cached_keys_and_values_move_in_every_layer_even_where_moves_overlap(kernels: ModuleType) -> None:
    layers = [torch.randn(12, 3, 4), torch.randn(12, 2, dtype=torch.float64), torch.randn(12, 2, 2).to(torch.bfloat16)]
    expected = [layer.clone() for layer in layers]
    to, source = [1, 2, 3, 9], [2, 3, 1, 5]
    for new, layer in zip(expected, layers, strict=True):
        for there, here in zip(to, source, strict=True):
            new[there] = layer[here].clone()
    addresses = torch.tensor([layer.data_ptr() for layer in layers], dtype=torch.uint64)
    sizes = torch.tensor([layer[0].numel() * layer.element_size() for layer in layers])
    kernels.copy_all_layer_kv_cache_cpu(addresses, sizes, torch.tensor(to), torch.tensor(source))
    assert all(torch.equal(layer, new) for layer, new in zip(layers, expected, strict=True))


# Tokens


def test_the_bonus_token_is_the_last_accepted_one(kernels: ModuleType) -> None:
    bonus = torch.zeros(3, dtype=torch.int32)
    kernels.fill_bonus_tokens_cpu(torch.arange(100, 112, dtype=torch.int32), torch.tensor([1, 4, 2]), bonus, 4)
    assert bonus.tolist() == [100, 107, 109]


@pytest.mark.parametrize("places", [None, [0, 4, 5]])
def test_ids_move_up_and_the_next_token_comes_last_or_where_it_is_told(kernels: ModuleType, places: list[int] | None) -> None:
    ids = torch.tensor([10, 11, 12, 20, 21, 30])
    arguments = [torch.tensor(values) for values in ([0, 3, 5, 6], [3, 2, 1, 0], [91, 92, 93, 94])]
    kernels.rotate_input_ids_cpu(ids, *arguments, None if places is None else torch.tensor([*places, 0]))
    assert ids.tolist() == ([11, 12, 91, 21, 92, 93] if places is None else [91, 12, 12, 21, 92, 93])


# Trees


def grown(topk: int, steps: int, width: int) -> list[Tree]:
    rng = random.Random(topk * 100 + width)
    return [grow(topk, steps, width, 12, rng) for _ in LENGTHS]


def built(kernels: ModuleType, trees: list[Tree], topk: int, steps: int, width: int, mode: int = 1) -> dict[str, Tensor]:
    """The operator's outputs, from buffers as SGLang prepares them."""
    cells = width * (width * len(trees) + (sum(LENGTHS) if mode == 0 else 0))
    outputs = {
        "mask": torch.ones(cells, dtype=torch.bool),
        "positions": torch.empty(width * len(trees), dtype=torch.int64),
        **{name: torch.full((len(trees), width), -1) for name in ("index", "child", "sibling")},
    }
    branches, selected = (torch.tensor([getattr(tree, name) for tree in trees]) for name in ("branches", "proposals"))
    kernels.build_tree_kernel_efficient_cpu(branches, selected, torch.tensor(LENGTHS), *outputs.values(), topk, steps, width, mode)
    return outputs


@pytest.mark.parametrize(("topk", "steps", "width"), TREES)
def test_a_tree_is_described_as_it_grew(kernels: ModuleType, topk: int, steps: int, width: int) -> None:
    trees = grown(topk, steps, width)
    outputs = built(kernels, trees, topk, steps, width)
    for request, (tree, length) in enumerate(zip(trees, LENGTHS, strict=True)):
        nodes = range(width)
        seen = outputs["mask"].view(len(trees), width, width)[request].tolist()
        assert seen == [[other in {0, *tree.path(node)} for other in nodes] for node in nodes]
        assert outputs["positions"].view(len(trees), width)[request].tolist() == [length + len(tree.path(node)) for node in nodes]
        assert outputs["index"][request].tolist() == [request * width + node for node in nodes]
        for node in nodes:
            assert linked(outputs, request, node) == tree.children(node)


def linked(outputs: dict[str, Tensor], request: int, node: int) -> list[int]:
    children, child = [], int(outputs["child"][request, node])
    while child != -1:
        children.append(child)
        child = int(outputs["sibling"][request, child])
    return children


def test_the_full_mask_leaves_the_tokens_before_the_tree_alone(kernels: ModuleType) -> None:
    trees = grown(2, 3, 6)
    whole, square = (built(kernels, trees, 2, 3, 6, mode)["mask"] for mode in (0, 1))
    for length, tree in zip(LENGTHS, square.view(3, 6, 6), strict=True):
        rows, whole = whole[: 6 * (length + 6)].view(6, length + 6), whole[6 * (length + 6) :]
        assert rows[:, :length].all()
        assert torch.equal(rows[:, length:], tree)
    assert len(whole) == 0


def test_packed_masks_are_refused(kernels: ModuleType) -> None:
    with pytest.raises(NotImplementedError, match="mode 2"):
        built(kernels, grown(2, 3, 6), 2, 3, 6, mode=2)


@pytest.mark.parametrize(("topk", "steps", "width"), TREES)
@pytest.mark.parametrize("agreeing", [0.0, 0.7, 1.0])
def test_verification_goes_down_the_tree_as_far_as_the_target_agrees(
    kernels: ModuleType, topk: int, steps: int, width: int, agreeing: float
) -> None:
    trees = grown(topk, steps, width)
    says = target_says(trees, agreeing)
    predicts, index, accepted = verified(kernels, trees, says, topk, steps, width)
    for request, tree in enumerate(trees):
        way = [0]
        while child := next((child for child in tree.children(way[-1]) if tree.tokens[child] == says[request][way[-1]]), None):
            way.append(child)
        assert accepted[request] == len(way) - 1
        assert index[request].tolist() == [request * width + node for node in way] + [-1] * (steps + 1 - len(way))
        for node in range(width):
            assert predicts[request * width + node] == (says[request][node] if node in way else -7)


def target_says(trees: list[Tree], agreeing: float) -> list[list[int]]:
    """What the target says behind each node: with this chance one of its children, else a token that none has."""
    rng = random.Random(7)
    return [
        [
            tree.tokens[rng.choice(tree.children(node))] if tree.children(node) and rng.random() < agreeing else 99
            for node in range(len(tree.parents))
        ]
        for tree in trees
    ]


def verified(
    kernels: ModuleType, trees: list[Tree], says: list[list[int]], topk: int, steps: int, width: int
) -> tuple[Tensor, Tensor, Tensor]:
    outputs = built(kernels, trees, topk, steps, width)
    predicts = torch.full((len(trees) * width,), -7, dtype=torch.int32)
    index = torch.full((len(trees), steps + 1), -1, dtype=torch.int32)
    accepted = torch.empty(len(trees), dtype=torch.int32)
    kernels.verify_tree_greedy_cpu(
        predicts=predicts,
        accept_index=index,
        accept_token_num=accepted,
        candidates=torch.tensor([tree.tokens for tree in trees]),
        retrive_index=outputs["index"],
        retrive_next_token=outputs["child"],
        retrive_next_sibling=outputs["sibling"],
        target_predict=torch.tensor(says),
    )
    return predicts, index, accepted


# Attention


def attend(q_HK: Tensor, keys: list[Tensor], values: list[Tensor], scaling: float) -> Tensor:
    """One query, head by head and key by key; each key [G, K], each value [G, V]."""
    heads, share = len(q_HK), len(q_HK) // len(keys[0])
    out = torch.zeros(heads, values[0].shape[1], dtype=torch.float64)
    for head in range(heads):
        weights = [math.exp(scaling * float(q_HK[head].double() @ key_GK[head // share].double())) for key_GK in keys]
        for weight, value_GV in zip(weights, values, strict=True):
            out[head] += weight / sum(weights) * value_GV[head // share].double()
    return out


class Pool:
    """Keys and values of three requests in a pool: one has earlier tokens, one none, one both more earlier and more new ones."""

    new = (3, 2, 4)
    earlier = (4, 0, 5)

    def __init__(self, heads: int, key_heads: int, key: int, value: int, dtype: torch.dtype = torch.float32, latent: bool = False) -> None:
        generator = torch.Generator().manual_seed(heads * 10 + key)
        self.table = torch.tensor(table(), dtype=torch.int32)
        self.rows = torch.tensor(ROWS)
        self.k_pool = torch.randn(5 * POOL_LEN + 1, key_heads, key, generator=generator).to(dtype)
        shape = (len(self.k_pool), key_heads, value)
        self.v_pool = self.k_pool[..., :value] if latent else torch.randn(shape, generator=generator).to(dtype)
        total = sum(self.new)
        self.q = torch.randn(total, heads, key, generator=generator).to(dtype)
        self.k = torch.randn(total, key_heads, key, generator=generator).to(dtype)
        self.v = self.k[..., :value] if latent else torch.randn(total, key_heads, value, generator=generator).to(dtype)

    @property
    def lengths(self) -> list[int]:
        return [earlier + new for earlier, new in zip(self.earlier, self.new, strict=True)]

    @property
    def starts(self) -> list[int]:
        return [sum(self.new[:request]) for request in range(len(self.new))]

    def extend(self, mask: Tensor | None = None, causal: bool = True, **features: Any) -> Tensor:
        out = torch.full((*self.q.shape[:2], self.v.shape[2]), math.nan, dtype=self.q.dtype)
        options = {"scaling": 0.3, "logit_cap": 0.0, "cross": False, "window": 0, "encoder_lens": None, "sinks": None} | features
        lengths, new, starts = torch.tensor(self.lengths), torch.tensor(self.new), torch.tensor(self.starts)
        pool = (self.k_pool, self.v_pool, 1.0, 1.0, self.table, self.rows)
        torch.ops.sgl_kernel.extend_attention_cpu(
            self.q, self.k, self.v, out, *pool, lengths, new, starts, max(self.new), *options.values(), mask, causal
        )
        return out

    def expected(self, sees: Callable[[int, int, int], bool]) -> Tensor:
        """By plain loops; ``sees(request, i, j)``: new token i sees new token j."""
        found = []
        for request, (new, earlier, start) in enumerate(zip(self.new, self.earlier, self.starts, strict=True)):
            slots = self.table[self.rows[request], :earlier].tolist()
            for i in range(new):
                seen = [start + j for j in range(new) if sees(request, i, j)]
                keys = [*(self.k_pool[slot] for slot in slots), *(self.k[n] for n in seen)]
                values = [*(self.v_pool[slot] for slot in slots), *(self.v[n] for n in seen)]
                found.append(attend(self.q[start + i], keys, values, 0.3))
        return torch.stack(found)


@pytest.mark.parametrize(("heads", "key_heads"), [(4, 4), (6, 2), (3, 1)])
def test_new_tokens_see_all_earlier_ones_and_of_the_new_ones_those_before_them(kernels: ModuleType, heads: int, key_heads: int) -> None:
    pool = Pool(heads, key_heads, 8, 8)
    torch.testing.assert_close(pool.extend(), pool.expected(lambda _, i, j: j <= i).float(), rtol=1e-5, atol=1e-5)


def test_without_causality_new_tokens_see_all(kernels: ModuleType) -> None:
    pool = Pool(4, 2, 8, 8)
    torch.testing.assert_close(pool.extend(causal=False), pool.expected(lambda *_: True).float(), rtol=1e-5, atol=1e-5)


def test_a_tree_mask_says_what_new_tokens_see_of_each_other(kernels: ModuleType) -> None:
    pool = Pool(4, 2, 8, 8)
    rng = random.Random(1)
    masks = [[[j == 0 or j == i or (j < i and rng.random() < 0.5) for j in range(new)] for i in range(new)] for new in pool.new]
    flat = torch.tensor([cell for mask in masks for row in mask for cell in row])
    assert not all(mask[i][j] for mask in masks for i in range(len(mask)) for j in range(i))
    expected = pool.expected(lambda request, i, j: masks[request][i][j])
    torch.testing.assert_close(pool.extend(flat), expected.float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("latent", [False, True])
def test_in_bfloat16_every_number_is_right_to_the_last_place(kernels: ModuleType, latent: bool) -> None:
    pool = Pool(4, 1 if latent else 2, 10, 6, torch.bfloat16, latent)
    out = pool.extend()
    assert out.dtype == torch.bfloat16
    expected = pool.expected(lambda _, i, j: j <= i)
    # half a unit in the last place, and a hair for values on the edge between two
    assert ((out.double() - expected).abs() <= expected.abs() * (2**-8 + 1e-4) + 1e-6).all()


def test_absorbed_latent_attention_reads_values_out_of_the_keys(kernels: ModuleType) -> None:
    pool = Pool(4, 1, 10, 6, latent=True)
    torch.testing.assert_close(pool.extend(), pool.expected(lambda _, i, j: j <= i).float(), rtol=1e-5, atol=1e-5)


def test_unabsorbed_latent_attention_needs_no_pool(kernels: ModuleType) -> None:
    pool = Pool(4, 4, 8, 6)
    pool.earlier = (0, 0, 0)
    expected = pool.expected(lambda _, i, j: j <= i).float()
    pool.k_pool = torch.full((len(pool.k_pool), 1, 10), math.nan)
    pool.v_pool = pool.k_pool[..., :7]
    torch.testing.assert_close(pool.extend(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "feature", [{"logit_cap": 30.0}, {"cross": True}, {"window": 5}, {"sinks": torch.zeros(4)}], ids=lambda feature: next(iter(feature))
)
def test_what_it_cannot_do_is_refused_by_name(kernels: ModuleType, feature: dict[str, Any]) -> None:
    with pytest.raises(NotImplementedError, match=next(iter(feature))):
        Pool(4, 2, 8, 8).extend(**feature)


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("latent", [True, False])
def test_a_decoded_token_sees_all_of_its_request_and_is_put_into_the_pool(kernels: ModuleType, given: bool, latent: bool) -> None:
    """``given`` False: the key and value are in the pool already."""
    pool = Pool(4, 1 if latent else 2, 10, 6, latent=latent)
    q, k, v, lengths = pool.q[:3], pool.k[:3], pool.v[:3], torch.tensor(LENGTHS)
    slots = torch.stack([pool.table[row, length - 1] for row, length in zip(ROWS, LENGTHS, strict=True)]).long()
    k_before, v_before = pool.k_pool.clone(), pool.v_pool.clone()
    out = torch.full((3, 4, 6), math.nan)
    options = (0.3, 0.0, False, 0, None, None)
    torch.ops.sgl_kernel.decode_attention_cpu(
        q,
        pool.k_pool,
        pool.v_pool,
        1.0,
        1.0,
        out,
        k if given else None,
        v if given else None,
        slots,
        torch.empty(0),
        pool.table,
        pool.rows,
        lengths,
        *options,
    )
    if given:
        k_before[slots], v_before[slots] = k, v
    assert torch.equal(pool.k_pool, k_before)
    assert torch.equal(pool.v_pool, v_before)
    for request, (row, length) in enumerate(zip(ROWS, LENGTHS, strict=True)):
        own = pool.table[row, :length].tolist()
        expected = attend(q[request], [k_before[slot] for slot in own], [v_before[slot] for slot in own], 0.3)
        torch.testing.assert_close(out[request], expected.float(), rtol=1e-5, atol=1e-5)


# SGLang's own Triton kernels


@pytest.fixture(scope="module")
def twins() -> dict[str, Any]:
    """What SGLang's Triton kernels make of the cases below; Triton interprets them."""
    if not SGLANG.exists() and os.environ.get("EYAS_ENGINES") != "required":
        pytest.skip("SGLang is not installed: make engines")
    # without SGLANG_USE_CPU_ENGINE it takes nothing from the stand-in but what torchvision needs
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(STAND_IN)}
    done = subprocess.run(
        [SGLANG, Path(__file__).with_name("triton_twins.py")],
        input=json.dumps(cases()),
        capture_output=True,
        text=True,
        env=environment,
        check=False,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def cases() -> dict[str, Any]:
    trees = []
    for topk, steps, width in TREES:
        found = grown(topk, steps, width)
        trees.append(
            {
                "topk": topk,
                "steps": steps,
                "branches": [tree.branches for tree in found],
                "proposals": [tree.proposals for tree in found],
                "tokens": [tree.tokens for tree in found],
                "says": target_says(found, 0.7),
            }
        )
    return {"table": table(), "rows": ROWS, "lengths": LENGTHS, "trees": trees}


@pytest.mark.parametrize("mode", [0, 1])
def test_trees_are_described_as_by_tritons_kernel(kernels: ModuleType, twins: dict[str, Any], mode: int) -> None:
    for (topk, steps, width), twin in zip(TREES, twins["trees"], strict=True):
        outputs = built(kernels, grown(topk, steps, width), topk, steps, width, mode)
        assert {name: output.tolist() for name, output in outputs.items()} == twin["built"][mode]


def test_trees_are_verified_as_by_tritons_kernel(kernels: ModuleType, twins: dict[str, Any]) -> None:
    for (topk, steps, width), twin in zip(TREES, twins["trees"], strict=True):
        trees = grown(topk, steps, width)
        assert [output.tolist() for output in verified(kernels, trees, target_says(trees, 0.7), topk, steps, width)] == twin["verified"]


def test_slots_are_found_as_by_tritons_kernels(kernels: ModuleType, twins: dict[str, Any]) -> None:
    pool, rows, lengths = torch.tensor(table(), dtype=torch.int32), torch.tensor(ROWS), torch.tensor(LENGTHS)
    slots = torch.empty(3 * 2 * 3, dtype=torch.int64)
    kernels.assign_draft_cache_locs_contiguous_cpu(rows, pool, lengths, slots, POOL_LEN, 2, 3)
    assert slots.tolist() == twins["draft_slots"]
    read = torch.full((12,), -7)
    kernels.assign_extend_cache_locs_cpu(rows, pool, lengths, lengths + 4, read, POOL_LEN)
    assert read.tolist() == twins["read"]
    kernels.assign_req_to_token_pool_cpu(rows, pool, lengths, lengths + 4, torch.arange(1000, 1012), POOL_LEN)
    assert pool.tolist() == twins["written"]


def test_each_draft_step_reads_the_slots_of_tritons_kernel(kernels: ModuleType, twins: dict[str, Any]) -> None:
    pool, rows, lengths = torch.tensor(table(), dtype=torch.int32), torch.tensor(ROWS), torch.tensor(LENGTHS)
    branches = kernels.build_draft_decode_metadata_cpu(pool, rows, lengths, 2, 3, POOL_LEN)
    for step, read in enumerate(twins["draft_reads"]):
        ends = (lengths.repeat_interleave(2) + step + 1).tolist()
        assert [slot for branch, end in zip(branches, ends, strict=True) for slot in branch[:end].tolist()] == read


def test_tokens_and_accepted_slots_move_as_by_tritons_kernels(kernels: ModuleType, twins: dict[str, Any]) -> None:
    bonus = torch.zeros(3, dtype=torch.int32)
    kernels.fill_bonus_tokens_cpu(torch.arange(100, 112, dtype=torch.int32), torch.tensor([1, 4, 2]), bonus, 4)
    assert bonus.tolist() == twins["bonus"]
    index = torch.tensor([[0, 2, -1], [3, -1, -1], [6, 7, 8]], dtype=torch.int32)
    slots = torch.full((9,), -7)
    kernels.fill_accept_out_cache_loc_cpu(index, torch.arange(50, 59), slots)
    assert slots.tolist() == twins["accepted"]
    for places, twin in zip((None, torch.tensor([0, 4, 5])), twins["rotated"], strict=True):
        ids = torch.tensor([10, 11, 12, 20, 21, 30])
        kernels.rotate_input_ids_cpu(ids, torch.tensor([0, 3, 5]), torch.tensor([3, 2, 1]), torch.tensor([91, 92, 93]), places)
        assert ids.tolist() == twin
