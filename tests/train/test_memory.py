"""The plan's memory against tensors that a real step holds, as the allocator counts them and as the process grows."""

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.plan import Size, measure, predicted_bytes
from benchmarks.train_step import synthetic_batch
from eyas.drafter import Drafter, DrafterShape
from train.costs import multiply_adds, parameters, planned_work, total, work_of
from train.memory import Memory, Ranks, largest_batch, memory
from train.ttt import TrainingTimeTest

SMALL = DrafterShape(
    hidden_size=96,
    intermediate_size=256,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    vocab_size=1000,
    draft_vocab_size=500,
    rms_norm_eps=1e-5,
    rope_theta=1e4,
    max_position=512,
)
DTYPES = (torch.bfloat16, torch.float32)


def prepared(shape: DrafterShape, rows: list[int], steps: int, dtype: torch.dtype):
    torch.manual_seed(0)
    drafter = Drafter(shape)
    drafter.set_embedding(torch.randn(shape.vocab_size, shape.hidden_size, dtype=dtype))
    head_DH = torch.randn(shape.draft_vocab_size, shape.hidden_size, dtype=dtype)
    test, batch = TrainingTimeTest(drafter, head_DH, steps, 0.8), synthetic_batch(shape, rows, dtype)
    return test, batch, memory(shape, work_of(batch, test.chains(batch)), Ranks(1, dtype.itemsize, "cpu"))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_kept_for_the_backward_pass_is_what_autograd_saves(dtype: torch.dtype):
    test, batch, planned = prepared(SMALL, [200, 100], 3, dtype)
    given = {x.untyped_storage().data_ptr() for x in [*test.drafter.parameters(), batch.aux_NA, batch.final_NH, test.drafter.embedding_VH]}
    saved: dict[int, tuple[int, torch.Tensor]] = {}

    def keep(x: torch.Tensor) -> torch.Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in given:
            saved[storage.data_ptr()] = (storage.nbytes(), x)  # with the tensor, whose place would be given away
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        sums = test(batch)
    names = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    casts = sum(weight.numel() for name, weight in test.drafter.named_parameters() if name.split(".")[-2] in names)
    passed_on = int(sums.counted_J.sum()) * SMALL.hidden_size * dtype.itemsize + 4 * test.drafter.lm_head.weight.numel()
    expected = total(planned.kept[1:]) + passed_on + (2 * casts if dtype == torch.bfloat16 else 0)
    assert sum(size for size, _ in saved.values()) == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_most_that_a_step_allocates_is_within_a_fifth(dtype: torch.dtype):
    shape = SMALL.model_copy(update={"hidden_size": 256, "intermediate_size": 640, "num_heads": 4, "num_kv_heads": 4, "head_dim": 64})
    test, batch, planned = prepared(shape, [150, 100], 3, dtype)
    optimizer = torch.optim.AdamW(test.drafter.parameters(), fused=True)

    def step() -> None:
        test(batch).loss_sum.backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        step()
    kineto = profiled.profiler.kineto_results
    events = sorted((event for event in kineto.events() if event.name() == "[memory]"), key=lambda event: event.start_ns())
    now = peak = 0
    for event in events:
        now += event.nbytes()
        peak = max(peak, now)
    assert peak == pytest.approx(planned.worst.amount - planned.kept[0].amount, rel=0.2)


def test_a_process_grows_by_what_is_planned():
    size = Size(320, 800, 4, 4, 80, 8000, 1400, (500, 300), 3)
    found = measure(size, "fp32", 1)
    assert found.bytes == pytest.approx(predicted_bytes(size, found.work, "fp32"), rel=0.2)


def planned(ranks: Ranks, tokens: int = 4096) -> Memory:
    return memory(SMALL, planned_work(tokens, 300, 0.75, 1.0, 4), ranks)


def held(found: Memory) -> dict[str, float]:
    return {part.what: part.amount for part in found.held}


def test_ddp_holds_16_bytes_a_parameter_and_fsdp2_its_share_of_them():
    spread = ("masters", "AdamW moments", "gradients")
    ddp, fsdp = held(planned(Ranks(8))), held(planned(Ranks(8, sharded=True)))
    assert sum(ddp[name] for name in spread) == 16 * parameters(SMALL)
    assert sum(fsdp[name] for name in spread) == 2 * parameters(SMALL)
    assert {name: amount for name, amount in ddp.items() if name not in spread} == {k: v for k, v in fsdp.items() if k not in spread}


def test_the_largest_batch_fits_and_the_next_larger_one_does_not():
    room = planned(Ranks(8)).peak
    found = largest_batch(SMALL, Ranks(8), room, lambda tokens: planned_work(tokens, 300, 0.75, 1.0, 4))
    assert found == 4096
    assert planned(Ranks(8), found + 256).peak > room


def test_where_not_even_what_is_held_fits_no_batch_does():
    assert largest_batch(SMALL, Ranks(8), 1.0, lambda tokens: planned_work(tokens, 300, 0.75, 1.0, 4)) == 0


def test_stored_log_probabilities_spare_the_targets_lm_head_and_its_product():
    work = planned_work(4096, 300, 0.75, 1.0, 4, top=64)
    assert held(memory(SMALL, work, Ranks(8)))["target's lm_head"] == 0
    assert {part.what: part.amount for part in multiply_adds(SMALL, work)}["target's lm_head"] == 0
