"""What runs within an engine, without one: orders, the outbox, and the hook on stand-ins of what SGLang hands to it."""

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from data_prep.engine_plugin import outbox
from data_prep.engine_plugin.host_copy import HostCopier
from data_prep.engine_plugin.orders import (
    VARIABLE,
    CaptureJob,
    FlushOrder,
    RowOrder,
    from_run_lengths,
    read_order,
    read_status,
    run_lengths,
)
from data_prep.engine_plugin.outbox import Outbox, Parcel
from eyas.errors import EyasError
from eyas.manifest import begin
from eyas.states import StateSpec, StateStore, row_key

ROOT = Path(__file__).parents[2]
SPEC = StateSpec((1, 2), 8, "bfloat16", 100, "target", "tokenizer")


@pytest.fixture
def job(tmp_path: Path) -> CaptureJob:
    begin(tmp_path / "train", "states", SPEC.to_json(), {})
    return CaptureJob(tmp_path, SPEC, 2**20)


def states(tokens: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, 16, generator=generator), torch.randn(tokens, 8, generator=generator)


def order_of(ids: list[int], flags: list[bool], store: str = "train") -> RowOrder:
    return RowOrder(store, row_key(ids, flags), "chat", run_lengths(flags))


def parcel_of(ids: list[int], aux: torch.Tensor, final: torch.Tensor) -> Parcel:
    copy = HostCopier()
    return Parcel(order_of(ids, [False] + [True] * (len(ids) - 1)), ids, [(copy(aux), copy(final))])


def wait_for_flush(box: Outbox, job: CaptureJob, store: str = "train") -> Any:
    box.put(FlushOrder(store, "ticket"))
    for _ in range(1000):
        status = read_status(job.root)
        if status is not None and (status.fault or status.flushed.get(store) == "ticket"):
            return status
        time.sleep(0.01)
    raise AssertionError("it was never flushed")


@given(st.lists(st.booleans()))
def test_run_lengths_give_the_mask_back(flags: list[bool]):
    assert from_run_lengths(run_lengths(flags)) == flags


def test_the_mask_of_a_reply_is_two_numbers():
    assert run_lengths([False] * 30 + [True] * 12) == [30, 12]
    assert run_lengths([True, True, False]) == [0, 2, 1]


def test_orders_come_back_from_a_requests_parameters_as_json_has_them():
    for order in (RowOrder("train", "ab", "chat", [3, 2]), FlushOrder("train.recheck", "t1")):
        assert read_order(json.loads(json.dumps({"other": 1, **order.parameters()}))) == order
    assert read_order({"other": 1}) is None
    assert read_order(None) is None


@pytest.mark.parametrize("store", ["../elsewhere", "/tmp", "", "train/x", "a b"])
def test_no_request_writes_outside_the_jobs_folder(store: str):
    with pytest.raises(EyasError, match="not the name of a store"):
        read_order(RowOrder(store, "ab", "chat", [1]).parameters())


def test_an_order_of_another_version_is_refused():
    with pytest.raises(EyasError, match="another version of eyas"):
        read_order({"eyas_store": "train", "eyas_rows": 3})


def test_the_job_travels_through_the_environment(job: CaptureJob, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(VARIABLE, job.variable())
    assert CaptureJob.from_environment() == job
    monkeypatch.setenv(VARIABLE, "{}")
    with pytest.raises(EyasError):
        CaptureJob.from_environment()
    monkeypatch.delenv(VARIABLE)
    with pytest.raises(EyasError, match=VARIABLE):
        CaptureJob.from_environment()


def test_rows_are_in_the_store_once_their_flush_is_told(job: CaptureJob):
    box = Outbox(job, "engine")
    rows = {seed: ([seed + 1, 2, 3, 4], *states(4, seed)) for seed in range(5)}
    for ids, aux, final in rows.values():
        box.put(parcel_of(ids, aux, final))
    assert wait_for_flush(box, job).fault is None
    store = StateStore(job.root / "train", incomplete=True)
    assert len(store) == 5
    for place in range(5):
        row = store.read(place)
        ids, aux, final = rows[int(row.ids_T[0]) - 1]
        assert row.ids_T.tolist() == ids
        assert row.supervised_T.tolist() == [False, True, True, True]
        assert torch.equal(row.aux_TA, aux.bfloat16())
        assert torch.equal(row.final_TH, final.bfloat16())


def test_rows_that_are_not_finite_are_named_and_not_stored(job: CaptureJob):
    box = Outbox(job, "engine")
    aux, final = states(3)
    bad = parcel_of([1, 2, 3], aux, final.index_fill(0, torch.tensor([1]), float("nan")))
    box.put(bad)
    box.put(parcel_of([4, 5, 6], aux, final))
    status = wait_for_flush(box, job)
    assert status.not_finite == {"train": [bad.order.key]}
    assert StateStore(job.root / "train", incomplete=True).keys == [row_key([4, 5, 6], [False, True, True])]


def test_a_row_whose_mask_or_tokens_are_not_its_keys_is_a_fault(job: CaptureJob):
    box = Outbox(job, "engine")
    wrong = Parcel(RowOrder("train", "00" * 32, "chat", [1, 2]), [1, 2, 3], [tuple(map(HostCopier(), states(3)))])
    box.put(wrong)
    assert "key is not row_key" in wait_for_flush(box, job).fault


def test_a_disk_that_refuses_is_told_and_later_rows_are_dropped(job: CaptureJob):
    folder = job.root / "train"
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    folder.write_text("no folder")
    box = Outbox(job, "engine")
    box.put(parcel_of([1, 2, 3], *states(3)))
    assert "cannot write" in wait_for_flush(box, job).fault
    box.put(parcel_of([4, 5, 6], *states(3)))  # takes it, and nobody waits for ever


def test_the_engine_waits_when_too_much_is_waiting(job: CaptureJob, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(outbox, "WAITING_BYTES", 100)

    @dataclass
    class Slow:
        """A tensor that arrives late."""

        inner: Any
        bytes: int = field(init=False)

        def __post_init__(self) -> None:
            self.bytes = self.inner.bytes

        def __len__(self) -> int:
            return len(self.inner)

        def values(self) -> torch.Tensor:
            time.sleep(0.3)
            return self.inner.values()

    copy = HostCopier()
    aux, final = states(4)
    first = Parcel(order_of([1, 2, 3, 4], [False, True, True, True]), [1, 2, 3, 4], [(Slow(copy(aux)), copy(final))])
    box = Outbox(job, "engine")
    box.put(first)
    begun = time.monotonic()
    box.put(parcel_of([5, 6, 7, 8], aux, final))
    assert time.monotonic() - begun > 0.2
    wait_for_flush(box, job)
    assert len(StateStore(job.root / "train", incomplete=True)) == 2


def test_a_copy_is_not_touched_by_what_the_engine_does_to_its_buffer():
    for dtype in (torch.bfloat16, torch.float32):
        buffer = torch.ones(3, 4, dtype=dtype)
        copied = HostCopier()(buffer[1:])
        buffer.zero_()
        assert torch.equal(copied.values(), torch.ones(2, 4, dtype=torch.bfloat16))
        assert (len(copied), copied.bytes) == (2, 16)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_a_copy_is_of_what_the_stream_had_then():
    copy = HostCopier()
    buffer = torch.empty(4096, 4096, device="cuda", dtype=torch.bfloat16)
    copies = []
    for number in range(8):  # as a graph replays: the same buffer, filled anew without waiting for anybody
        torch.cuda._sleep(2_000_000)
        buffer.fill_(number)
        copies.append(copy(buffer))
    assert [float(copied.values().float().mean()) for copied in copies] == list(range(8))
    assert all(copied.values().is_pinned() for copied in copies)


def test_the_plug_in_needs_torch_and_safetensors_and_nothing_else_of_ours():
    code = (
        "import sys, json\n"
        "import data_prep.engine_plugin.sglang_hook\n"
        "print(json.dumps(sorted({name.split('.')[0] for name in sys.modules})))\n"
    )
    environment = {"PYTHONPATH": str(ROOT), "PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1"}
    found = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert not set(json.loads(found.stdout)) & {"pydantic", "transformers", "typer", "httpx", "rich", "yaml", "datasets", "sglang", "vllm"}


def test_the_entry_point_is_found_by_path_alone():
    code = (
        "from importlib.metadata import entry_points\n"
        "[point] = [point for point in entry_points(group='sglang.srt.plugins') if point.name == 'eyas_capture']\n"
        "print(point.dist.name, point.load().__module__)\n"
    )
    environment = {"PYTHONPATH": f"{ROOT}:{ROOT / 'data_prep' / 'engine_plugin' / 'found'}", "PATH": os.environ["PATH"]}
    found = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["eyas-capture", "data_prep.engine_plugin.sglang_hook"]


class Request:
    """What the hook looks at in SGLang's request."""

    def __init__(self, ids: list[int], order: RowOrder | FlushOrder | None) -> None:
        self.origin_input_ids = ids
        self.sampling_params = SimpleNamespace(custom_params=order and order.parameters())
        self.return_hidden_states = True
        self.hidden_states: list[Any] = []


@pytest.fixture
def hook(job: CaptureJob, monkeypatch: pytest.MonkeyPatch):
    from data_prep.engine_plugin import sglang_hook

    rank = {"tp_rank": 0}
    monkeypatch.setattr(sglang_hook, "_is_writer", lambda: rank["tp_rank"] == 0)
    full = SimpleNamespace(is_full=lambda: True)
    made = sglang_hook.StateHook(job)

    def batch(*parts: tuple[Request, int, bool], aux: torch.Tensor, final: torch.Tensor | None) -> int:
        """One prefill batch, as SGLang walks through its requests: (request, tokens computed, whether it is finished)."""
        output = SimpleNamespace(hidden_states=aux, last_hidden_states=final)
        offset = 0
        for request, tokens, store in parts:
            offset = made.append_prefill_hidden_states(
                lambda processor, **keywords: 10_000,
                None,
                req=request,
                logits_output=output,
                hidden_state_offset=offset,
                capture_hidden_mode=full,
                extend_input_len=tokens,
                store=store,
            )
        return offset

    batch.hook, batch.rank = made, rank
    return batch


def test_chunks_of_a_prefill_are_stitched_among_other_rows_of_the_batches(hook: Any, job: CaptureJob):
    long, short = list(range(1, 11)), [50, 51, 52]
    request = Request(long, order_of(long, [False] * 5 + [True] * 5))
    other = Request(short, order_of(short, [False, True, True]))
    (aux_a, final_a), (aux_b, final_b) = states(7, 1), states(6, 2)
    assert hook((other, 3, True), (request, 4, False), aux=aux_a, final=final_a) == 7
    assert hook((request, 6, True), aux=aux_b, final=final_b) == 6
    assert request.hidden_states == other.hidden_states == [[1.0]]
    assert wait_for_flush(hook.hook._outbox, job).fault is None
    store = StateStore(job.root / "train", incomplete=True)
    found = {len(row.ids_T): row for row in map(store.read, range(2))}
    assert torch.equal(found[10].aux_TA, torch.cat([aux_a[3:], aux_b]).bfloat16())
    assert torch.equal(found[10].final_TH, torch.cat([final_a[3:], final_b]).bfloat16())
    assert torch.equal(found[3].final_TH, final_a[:3].bfloat16())


def test_a_prefix_that_was_not_computed_is_a_fault_and_no_row(hook: Any, job: CaptureJob):
    ids = list(range(1, 9))
    request = Request(ids, order_of(ids, [False] * 4 + [True] * 4))
    aux, final = states(5)
    hook((request, 5, True), aux=aux, final=final)
    assert request.hidden_states == [[0.0]]
    assert "states of 5 of 8 tokens" in read_status(job.root).fault


def test_a_model_without_last_hidden_states_is_told(hook: Any, job: CaptureJob):
    flush = Request([1], FlushOrder("train", "t"))
    hook((flush, 1, True), aux=states(1)[0], final=None)
    assert flush.hidden_states == [[0.0]]
    assert "last_hidden_states" in read_status(job.root).fault


def test_states_of_other_layers_than_asked_are_told(hook: Any, job: CaptureJob):
    flush = Request([1], FlushOrder("train", "t"))
    hook((flush, 1, True), aux=torch.zeros(1, 24), final=torch.zeros(1, 8))
    assert "width 24 and 8, 16 and 8 are wanted" in read_status(job.root).fault


def test_other_ranks_write_nothing_and_other_peoples_requests_are_served_as_ever(hook: Any, job: CaptureJob):
    hook.rank["tp_rank"] = 1
    ids = [1, 2, 3]
    request = Request(ids, order_of(ids, [False, True, True]))
    aux, final = states(3)
    assert hook((request, 3, True), aux=aux, final=final) == 3
    assert hook((Request(ids, None), 3, True), aux=aux, final=final) == 10_000
    assert hook.hook._outbox is None
    assert list((job.root / "train").glob("*.safetensors")) == []


def test_chunks_go_with_their_request(hook: Any):
    ids = list(range(1, 9))
    request = Request(ids, order_of(ids, [False] * 4 + [True] * 4))
    hook((request, 5, False), aux=states(5)[0], final=states(5)[1])
    assert len(hook.hook._chunks) == 1
    del request
    assert len(hook.hook._chunks) == 0


def resolved(**changed: Any) -> Any:
    from data_prep.engine_plugin.sglang_hook import WANTED

    values = {name: wanted for name, (wanted, _) in WANTED.items()} | changed
    return SimpleNamespace(resolved_dict=lambda: values)


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"pp_size": 2}, "pipeline parallelism"),
        ({"attn_dp_size": 4}, "data-parallel attention"),
        ({"dp_size": 2}, "data parallelism"),
        ({"disable_radix_cache": False}, "no states"),
        ({"disable_overlap_schedule": False}, "overwrite"),
        ({"aux_hidden_state_capture": None}, "enable-return-aux-hidden-states"),
        ({"disaggregation_mode": "prefill"}, "one server"),
    ],
)
def test_servers_on_which_the_hook_would_not_see_every_state_are_refused(changed: dict[str, Any], told: str):
    from data_prep.engine_plugin.sglang_hook import check_arguments

    assert check_arguments(lambda arguments: "checked", resolved()) == "checked"
    with pytest.raises(EyasError, match=told):
        check_arguments(lambda arguments: None, resolved(**changed))
