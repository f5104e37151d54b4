"""The hidden-state store: what is written is read, whatever happens in between."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from eyas import fp8
from eyas.errors import EyasError
from eyas.manifest import read_manifest
from eyas.shard import read_header
from eyas.states import NotFinite, StateRow, StateSpec, StateStore, StateWriter, finish_store, row_key
from tests.eyas.state_rows import MB, H, assert_same_row, fill, finished, make_row, spec


def fp8_bound(values_TC: torch.Tensor, width: int) -> torch.Tensor:
    """Largest allowed error by element: fp8.py's stated bound, and half a bfloat16 unit in the last place for the result's rounding."""
    layers = values_TC.float().view(len(values_TC), -1, width)
    peaks = torch.stack([block.abs().amax(-1) for block in layers.split(fp8.BLOCK, -1)], -1)
    peak = peaks.repeat_interleave(fp8.BLOCK, -1)[..., :width].reshape(values_TC.shape)
    small = (peak / 458752).clamp_min(fp8.SMALLEST_SCALE * 2**-10)
    return torch.maximum(values_TC.float().abs() / 16, small) * 1.001 + values_TC.float().abs() / 256


# --- round trips


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=12),
    shard_kb=st.integers(1, 200),
    dtype=st.sampled_from([torch.bfloat16, torch.float32, torch.float16]),
)
def test_bfloat16_rows_of_any_lengths_and_shard_sizes_come_back_exactly(tmp_path_factory, lengths, shard_kb, dtype):
    rows = [make_row(i, n, category="ab"[i % 2], dtype=dtype) for i, n in enumerate(lengths)]
    store = finished(tmp_path_factory.mktemp("store"), rows, shard_bytes=shard_kb << 10)
    by_key = {row.key: row for row in rows}
    assert store.keys == sorted(by_key)
    for i, key in enumerate(store.keys):
        assert_same_row(store.read(i), by_key[key])
        assert store.lengths[i] == len(by_key[key].ids_T)
        assert store.supervised[i] == int(by_key[key].supervised_T.sum())
        assert store.categories[i] == by_key[key].category
    assert store.verify() == []


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lengths=st.lists(st.integers(1, 20), min_size=1, max_size=6))
def test_fp8_rows_come_back_within_the_stated_error_and_tokens_exactly(tmp_path_factory, lengths):
    rows = {row.key: row for row in (make_row(i, n) for i, n in enumerate(lengths))}
    store = finished(tmp_path_factory.mktemp("store"), list(rows.values()), "fp8")
    for i, key in enumerate(store.keys):
        read, row = store.read(i), rows[key]
        assert torch.equal(read.ids_T, row.ids_T)
        assert torch.equal(read.supervised_T, row.supervised_T)
        for got, given_ in ((read.aux_TA, row.aux_TA), (read.final_TH, row.final_TH)):
            assert got.dtype == torch.bfloat16
            assert ((got.float() - given_.float()).abs() <= fp8_bound(given_, H)).all()
    assert store.verify() == []


@settings(max_examples=60, deadline=None)
@given(
    width=st.sampled_from([1, 64, 127, 128, 129, 256, 576]),
    layers=st.integers(1, 3),
    exponents=st.lists(st.integers(-133, 127), min_size=1, max_size=8),
    seed=st.integers(0, 2**31),
)
def test_fp8_keeps_its_error_bound_from_the_smallest_to_the_largest_bfloat16(width, layers, exponents, seed):
    generator = torch.Generator().manual_seed(seed)
    unit = torch.rand(len(exponents), layers * width, generator=generator, dtype=torch.float64) * 2 - 1
    values = (unit * torch.tensor(exponents, dtype=torch.float64).exp2().unsqueeze(1)).bfloat16()
    codes, scales = fp8.quantise(values, width)
    assert codes.dtype == torch.float8_e4m3fn
    assert scales.shape == (len(exponents), layers * fp8.blocks(width))
    back = fp8.dequantise(codes, scales, width)
    assert back.isfinite().all()
    assert ((back.float() - values.float()).abs() <= fp8_bound(values, width)).all()


def test_fp8_blocks_of_zeros_come_back_as_zeros():
    values = torch.zeros(4, 576).bfloat16()
    assert torch.equal(fp8.dequantise(*fp8.quantise(values, 576), 576), values)


@pytest.mark.parametrize("value", [torch.finfo(torch.bfloat16).max, torch.finfo(torch.bfloat16).tiny, 1e-40, 1.0])
def test_fp8_blocks_of_one_value_come_back_within_one_percent_or_half_the_smallest_code(value):
    values = torch.tensor([[value], [-value]]).bfloat16().expand(2, 576)
    back = fp8.dequantise(*fp8.quantise(values, 576), 576)
    assert back.isfinite().all()
    assert ((back.double() - values.double()).abs() <= fp8.SMALLEST_SCALE * 2**-10 + values.double().abs() / 100).all()


def test_fp8_scales_do_not_cross_from_one_layer_into_the_next():
    values = torch.cat([torch.full((1, 144), 1e-3), torch.full((1, 144), 1e4)], 1).bfloat16()
    back = fp8.dequantise(*fp8.quantise(values, 144), 144)
    assert ((back.float() / values.float() - 1).abs() <= 0.01).all()


def test_fp8_aux_states_of_kimi_cost_at_most_22500_bytes_a_token():
    kimi = StateSpec((2, 30, 58), 7168, "fp8", 163840, "", "")
    sizes = {name: dtype.itemsize * (width or 1) for name, (dtype, width) in kimi.tensors().items()}
    assert sum(size for name, size in sizes.items() if not name.startswith("final")) == 21_845
    assert kimi.bytes_per_token() == 29_125


def test_a_shard_on_disk_is_as_big_as_its_tokens_cost(tmp_path):
    for dtype in ("bfloat16", "fp8"):
        store = finished(tmp_path / dtype, [make_row(0, 100), make_row(1, 7)], dtype)
        size = (tmp_path / dtype / "states-w0-00000.safetensors").stat().st_size
        assert 0 < size - 107 * store.spec.bytes_per_token() < 1000  # the header


def test_a_row_is_kept_apart_from_the_batch_it_was_cut_from(tmp_path):
    row = make_row(0, 9)
    batch = row.aux_TA.clone()
    with StateWriter(tmp_path, spec(), MB) as writer:
        writer.add(replace(row, aux_TA=batch))
        batch.zero_()
    finish_store(tmp_path, {})
    assert_same_row(StateStore(tmp_path).read(0), row)


def test_strided_views_and_columns_of_a_batch_are_stored_right(tmp_path):
    row = make_row(0, 9)
    wide = torch.cat([row.aux_TA, row.final_TH], 1).repeat_interleave(2, 0)[::2]
    view = replace(row, aux_TA=wide[:, : 3 * H], final_TH=wide[:, 3 * H :])
    assert_same_row(finished(tmp_path, [view]).read(0), row)


def test_row_key_is_the_digest_of_int32_ids_and_mask_bytes():
    import hashlib

    assert row_key([1, 258], [False, True]) == hashlib.sha256(b"\x01\0\0\0\x02\x01\0\0" + b"\0\x01").hexdigest()
    assert len({row_key([1, 2], [False, True]), row_key([1, 2], [True, True]), row_key([2, 1], [False, True])}) == 3
    with pytest.raises(ValueError, match="2 ids, but 1"):
        row_key([1, 2], [True])


# --- what is refused


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("tensor", ["aux_TA", "final_TH"])
@pytest.mark.parametrize("dtype", ["bfloat16", "fp8"])
def test_a_row_with_nan_or_infinity_is_refused_by_key_and_the_writer_goes_on(tmp_path, bad, tensor, dtype):
    row, good = make_row(0, 5), make_row(1, 5)
    broken = getattr(row, tensor).clone()
    broken[3, 7] = bad
    with StateWriter(tmp_path, spec(dtype), MB) as writer:
        with pytest.raises(NotFinite) as caught:
            writer.add(replace(row, **{tensor: broken}))
        assert caught.value.key == row.key
        assert row.key not in writer.keys
        assert writer.add(good)
    finish_store(tmp_path, {})
    assert StateStore(tmp_path).keys == [good.key]


def test_a_float32_state_too_large_for_bfloat16_is_refused(tmp_path):
    row = make_row(0, 5, dtype=torch.float32)
    row.final_TH[0, 0] = 3.4e38
    with StateWriter(tmp_path, spec(), MB) as writer, pytest.raises(NotFinite):
        writer.add(row)


def test_rows_of_wrong_shape_ids_or_key_are_refused(tmp_path):
    row = make_row(0, 5)
    empty = StateRow(row_key([], []), "chat", row.ids_T[:0], row.supervised_T[:0], row.aux_TA[:0], row.final_TH[:0])
    far = row.ids_T.clone()
    far[0] = 49152
    with StateWriter(tmp_path, spec(), MB) as writer:
        for bad, message in [
            (replace(row, aux_TA=row.aux_TA[:, :-1]), "aux has shape"),
            (replace(row, final_TH=row.final_TH[:-1]), "final has shape"),
            (replace(row, supervised_T=row.supervised_T[:-1]), "supervised has shape"),
            (replace(row, ids_T=far), "outside the vocabulary"),
            (replace(row, key="0" * 64), "not row_key"),
            (empty, "no tokens"),
        ]:
            with pytest.raises(ValueError, match=message):
                writer.add(bad)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers": (1, 15, 27)}, r"layers is \[2, 15, 27\] there and \[1, 15, 27\] here"),
        ({"target_digest": "other"}, "target_digest is 'target' there and 'other' here"),
        ({"dtype": "fp8"}, "dtype is 'bfloat16' there and 'fp8' here"),
    ],
)
def test_a_store_of_another_spec_is_refused_naming_field_and_both_values(tmp_path, change, message):
    fill(tmp_path, [make_row(0, 5)])
    with pytest.raises(EyasError, match=message):
        StateWriter(tmp_path, replace(spec(), **change), MB)


def test_an_unfinished_store_does_not_open_unless_allowed(tmp_path):
    fill(tmp_path, [make_row(0, 5)])
    with pytest.raises(EyasError, match="not complete"):
        StateStore(tmp_path)
    assert len(StateStore(tmp_path, incomplete=True)) == 1
    assert StateStore(tmp_path, incomplete=True).verify() == ["manifest.json: the store is not complete"]


def test_a_folder_without_a_store_says_what_is_missing(tmp_path):
    with pytest.raises(EyasError, match=r"manifest\.json does not exist"):
        StateStore(tmp_path)


def test_a_store_without_a_row_is_not_finished(tmp_path):
    fill(tmp_path, [])
    with pytest.raises(EyasError, match="no row"):
        finish_store(tmp_path, {})


def test_a_writer_name_that_could_be_anothers_prefix_is_refused(tmp_path):
    for name in ("w-1", "", "a/b", "w.1"):
        with pytest.raises(ValueError, match="writer name"):
            StateWriter(tmp_path, spec(), MB, name)


# --- many writers, and interruptions


def test_a_name_already_in_use_is_refused_and_free_again_after_close(tmp_path):
    first = StateWriter(tmp_path, spec(), MB, "w3")
    with pytest.raises(EyasError, match="as w3"):
        StateWriter(tmp_path, spec(), MB, "w3")
    with pytest.raises(EyasError, match="writer w3 is still at work"):
        finish_store(tmp_path, {})
    first.close()
    StateWriter(tmp_path, spec(), MB, "w3").close()


def test_a_row_that_two_writers_hold_counts_once(tmp_path):
    both = make_row(0, 5)
    one, two = StateWriter(tmp_path, spec(), MB, "one"), StateWriter(tmp_path, spec(), MB, "two")
    assert one.add(both)
    assert two.add(both)
    assert two.add(make_row(1, 6))
    one.close()
    two.close()
    manifest = finish_store(tmp_path, {"rejected": 3})
    assert {k: manifest.holds[k] for k in ("rows", "tokens", "duplicates", "rejected")} == {
        "rows": 2,
        "tokens": 11,
        "duplicates": 1,
        "rejected": 3,
    }
    store = StateStore(tmp_path)
    assert store.verify() == []
    assert_same_row(store.read(store.keys.index(both.key)), both)


def test_adding_a_row_again_changes_nothing(tmp_path):
    row = make_row(0, 5)
    with StateWriter(tmp_path, spec(), MB) as writer:
        assert writer.add(row)
        assert not writer.add(row)
    with StateWriter(tmp_path, spec(), MB, "other") as writer:
        assert row.key in writer.keys
        assert not writer.add(row)
    assert [path.name for path in tmp_path.glob("*.safetensors")] == ["states-w0-00000.safetensors"]


def test_totals_are_counted_by_category(tmp_path):
    rows = [make_row(0, 5, "code"), make_row(1, 6, "chat"), make_row(2, 7, "chat")]
    finished(tmp_path, rows)
    holds = read_manifest(tmp_path, "states").holds
    chat = sum(int(row.supervised_T.sum()) for row in rows[1:])
    assert holds["categories"]["chat"] == {"rows": 2, "tokens": 13, "supervised": chat}
    assert (holds["rows"], holds["tokens"]) == (3, 18)


def test_more_rows_can_be_added_to_a_finished_store(tmp_path):
    finished(tmp_path, [make_row(0, 5)])
    fill(tmp_path, [make_row(1, 5)])
    with pytest.raises(EyasError, match="not complete"):
        StateStore(tmp_path)
    finish_store(tmp_path, {})
    assert len(StateStore(tmp_path)) == 2


WRITE = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from state_rows import MB, make_row, spec
from eyas.states import StateWriter
folder, writer, seeds = Path(sys.argv[2]), sys.argv[3], range(*map(int, sys.argv[4:6]))
with StateWriter(folder, spec(), 40_000, writer) as store:
    print("ready", flush=True)
    for seed in seeds:
        store.add(make_row(seed, 3 + seed % 17))
"""


def start_writer(folder: Path, writer: str, first: int, last: int) -> subprocess.Popen:
    here = str(Path(__file__).parent)
    arguments = [sys.executable, "-c", WRITE, here, str(folder), writer, str(first), str(last)]
    return subprocess.Popen(arguments, stdout=subprocess.PIPE, env={**os.environ, "OMP_NUM_THREADS": "1"})


def assert_whole(folder: Path, seeds: range) -> None:
    rows = {row.key: row for row in (make_row(seed, 3 + seed % 17) for seed in seeds)}
    store = StateStore(folder)
    assert store.keys == sorted(rows)
    for i, key in enumerate(store.keys):
        assert_same_row(store.read(i), rows[key])
    assert store.verify() == []
    names = {path.name for path in folder.iterdir()}
    shards = {shard for shard in names if shard.endswith(".safetensors")}
    assert names == shards | {shard.replace(".safetensors", ".json") for shard in shards} | {"index.json", "manifest.json"}


def test_two_processes_writing_at_once_lose_nothing_and_double_nothing(tmp_path):
    both = [start_writer(tmp_path, "w0", 0, 60), start_writer(tmp_path, "w1", 40, 100)]
    assert [process.wait(120) for process in both] == [0, 0]
    finish_store(tmp_path, {})
    assert_whole(tmp_path, range(100))


def test_a_writer_killed_at_any_moment_is_resumed_without_loss(tmp_path):
    chance = random.Random(7)
    for _ in range(2):
        process = start_writer(tmp_path, "w0", 0, 400)
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(chance.uniform(0.0, 0.25))
        process.send_signal(signal.SIGKILL)
        process.wait(60)
    (tmp_path / ".states-w0-00099.safetensors.abcd.tmp").write_bytes(b"half")
    (tmp_path / "states-w0-00098.safetensors").write_bytes(b"a shard whose sidecar was never written")
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("states-*.json")}
    assert start_writer(tmp_path, "w0", 0, 400).wait(120) == 0
    finish_store(tmp_path, {})
    assert_whole(tmp_path, range(400))
    assert before.items() <= {path: path.stat().st_mtime_ns for path in tmp_path.glob("states-*.json")}.items()


def test_finishing_cleans_up_after_a_writer_that_never_came_back(tmp_path):
    fill(tmp_path, [make_row(0, 5)])
    for name in (".dead.lock", ".states-dead-00000.json.0a1b.tmp", "states-dead-00000.safetensors"):
        (tmp_path / name).write_bytes(b"")
    finish_store(tmp_path, {})
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "index.json",
        "manifest.json",
        "states-w0-00000.json",
        "states-w0-00000.safetensors",
    ]


def test_rows_are_flushed_after_a_minute_even_when_the_shard_is_small(tmp_path, monkeypatch):
    monkeypatch.setattr("eyas.state_shards.FLUSH_AFTER_S", 0.0)
    writer = StateWriter(tmp_path, spec(), MB)
    writer.add(make_row(0, 5))
    assert (tmp_path / "states-w0-00000.json").exists()
    writer.close()


def test_rows_taken_before_an_exception_are_kept(tmp_path):
    def interrupted() -> None:
        with StateWriter(tmp_path, spec(), MB) as writer:
            writer.add(make_row(0, 5))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert len(StateStore(tmp_path, incomplete=True)) == 1


FILL_DISK = """
import resource, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from state_rows import MB, make_row, spec
from eyas.errors import EyasError
from eyas.states import StateWriter
folder = Path(sys.argv[2])
writer = StateWriter(folder, spec(), MB)
writer.add(make_row(0, 5))
writer.flush()
if sys.argv[3] == "limit":
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, 500_000))
try:
    writer.add(make_row(1, 2000))
except EyasError as error:
    print(error)
"""


def fill_disk(folder: Path, how: str) -> str:
    here = str(Path(__file__).parent)
    run = subprocess.run([sys.executable, "-c", FILL_DISK, here, str(folder), how], capture_output=True, text=True, timeout=120, check=True)
    return run.stdout


def assert_one_line_and_nothing_half_visible(said: str, folder: Path, reason: str) -> None:
    assert said.count("\n") == 1
    assert f"cannot write {folder / 'states-w0-00001.safetensors'}: {reason}" in said
    assert sorted(path.name for path in folder.iterdir()) == [
        ".w0.lock",
        "manifest.json",
        "states-w0-00000.json",
        "states-w0-00000.safetensors",
    ]
    finish_store(folder, {})
    assert StateStore(folder).verify() == []


def test_a_shard_that_outgrows_a_file_limit_leaves_nothing_half_visible(tmp_path):
    assert_one_line_and_nothing_half_visible(fill_disk(tmp_path, "limit"), tmp_path, "File too large")


@pytest.fixture
def tiny_disk(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)], capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip("mounting needs root")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_a_full_disk_leaves_nothing_half_visible(tiny_disk):
    folder = tiny_disk / "store"
    assert_one_line_and_nothing_half_visible(fill_disk(folder, "disk"), folder, "No space left on device")


def test_a_disk_that_fills_between_shard_and_sidecar_leaves_neither_and_the_next_flush_writes_both(tiny_disk):
    folder, row = tiny_disk / "store", make_row(0, 5)
    with StateWriter(folder, spec(), MB) as writer:
        writer.add(row)
        free = os.statvfs(tiny_disk)
        room = 2 * free.f_bsize  # the shard's two pages, and none for the sidecar
        (tiny_disk / "filler").write_bytes(bytes(free.f_bavail * free.f_bsize - room))
        with pytest.raises(EyasError, match=r"cannot write .*states-w0-00000\.json: No space left"):
            writer.flush()
        assert sorted(path.name for path in folder.iterdir()) == [".w0.lock", "manifest.json"]
        (tiny_disk / "filler").unlink()
    finish_store(folder, {})
    assert_same_row(StateStore(folder).read(0), row)


# --- reading


def test_a_store_of_100000_rows_opens_within_a_second(tmp_path):
    fill(tmp_path, [make_row(0, 1)])
    sidecar = tmp_path / "states-w0-00000.json"
    values = json.loads(sidecar.read_text())
    count = 100_000
    values |= {"keys": [f"{i:064x}" for i in range(count)], "lengths": [1000] * count, "supervised": [500] * count}
    values["categories"] = ["chat", "code"] * (count // 2)
    sidecar.write_text(json.dumps(values))
    finish_store(tmp_path, {})
    start = time.perf_counter()
    store = StateStore(tmp_path)
    assert time.perf_counter() - start < 1
    assert (len(store), sum(store.lengths)) == (count, 100_000_000)


def test_only_a_bounded_number_of_shards_stays_open(tmp_path, monkeypatch):
    monkeypatch.setattr("eyas.states.OPEN_SHARDS", 3)
    rows = {row.key: row for row in (make_row(i, 3) for i in range(12))}
    store = finished(tmp_path, list(rows.values()), shard_bytes=1)
    mapped = []
    for i in [*range(12), *reversed(range(12))]:
        assert_same_row(store.read(i), rows[store.keys[i]])
        mapped.append(len({line for line in Path("/proc/self/maps").read_text().split() if line.startswith(str(tmp_path))}))
    assert len(list(tmp_path.glob("*.safetensors"))) == 12
    assert 0 < max(mapped) <= 4


def test_a_row_read_earlier_stays_valid_when_its_shard_is_closed(tmp_path, monkeypatch):
    monkeypatch.setattr("eyas.states.OPEN_SHARDS", 1)
    rows = {row.key: row for row in (make_row(i, 50) for i in range(6))}
    store = finished(tmp_path, list(rows.values()), shard_bytes=1)
    for row in [store.read(i) for i in range(6)]:
        assert_same_row(row, rows[row.key])


def test_reading_one_row_touches_only_that_rows_bytes(tmp_path):
    rows = [make_row(i, 400) for i in range(40)]
    store = finished(tmp_path, rows, shard_bytes=64 * MB)
    assert len(list(tmp_path.glob("*.safetensors"))) == 1

    def resident() -> int:
        text = Path("/proc/self/smaps").read_text().split("states-w0-00000.safetensors", 1)[1]
        return int(text.split("Rss:", 1)[1].split()[0]) << 10

    row = store.read(20)
    row.aux_TA.float().sum()
    row.final_TH.float().sum()
    shard = (tmp_path / "states-w0-00000.safetensors").stat().st_size
    assert resident() < shard / 4


def test_several_threads_read_the_same_store(tmp_path, monkeypatch):
    from concurrent.futures import ThreadPoolExecutor

    monkeypatch.setattr("eyas.states.OPEN_SHARDS", 2)
    rows = {row.key: row for row in (make_row(i, 5) for i in range(10))}
    store = finished(tmp_path, list(rows.values()), "bfloat16", shard_bytes=1)
    with ThreadPoolExecutor(4) as pool:
        for row in pool.map(store.read, list(range(10)) * 10):
            assert_same_row(row, rows[row.key])


def test_a_shard_is_an_ordinary_safetensors_file_with_aligned_tensors(tmp_path):
    from safetensors.torch import load_file

    finished(tmp_path, [make_row(i, 20) for i in range(4)], "fp8")
    shard = tmp_path / "states-w0-00000.safetensors"
    assert load_file(shard)["aux"].dtype == torch.float8_e4m3fn
    header_length = int.from_bytes(shard.read_bytes()[:8], "little")
    assert header_length % 8 == 0
    for name, (dtype, _) in spec("fp8").tensors().items():
        assert read_header(shard).tensors[name].start % dtype.itemsize == 0


def test_the_manifest_records_the_spec(tmp_path):
    finished(tmp_path, [make_row(0, 5)])
    assert StateStore(tmp_path).spec == spec()
    assert read_manifest(tmp_path).config == {**spec().to_json(), "layers": [2, 15, 27]}
