"""Damage to a store is named, and what is whole stays usable."""

import json
from pathlib import Path

import pytest
import torch

from eyas.errors import EyasError
from eyas.shard import write_shard
from eyas.states import StateStore, StateWriter, finish_store
from tests.eyas.state_rows import MB, finished, make_row, spec


def damaged(tmp_path: Path, dtype: str = "bfloat16") -> Path:
    rows = [make_row(i, 20) for i in range(4)]
    store = finished(tmp_path, rows, dtype, shard_bytes=20 * spec(dtype).bytes_per_token() * 2)
    assert store.verify() == []
    return tmp_path / "states-w0-00001.safetensors"


def faults(folder: Path) -> list[str]:
    return StateStore(folder, incomplete=True).verify()


def test_a_truncated_shard_is_named(tmp_path):
    shard = damaged(tmp_path)
    shard.write_bytes(shard.read_bytes()[:-100])
    (fault,) = faults(tmp_path)
    assert fault.startswith(f"{shard.name}: truncated")
    store = StateStore(tmp_path)
    with pytest.raises(EyasError, match=shard.name):
        [store.read(i) for i in range(4)]


@pytest.mark.parametrize("dtype", ["bfloat16", "fp8"])
def test_a_single_flipped_bit_is_named(tmp_path, dtype):
    shard = damaged(tmp_path, dtype)
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 4
    shard.write_bytes(data)
    (fault,) = faults(tmp_path)
    assert fault.startswith(f"{shard.name}: its checksum")


def test_an_empty_shard_is_named(tmp_path):
    shard = damaged(tmp_path)
    shard.write_bytes(b"")
    assert faults(tmp_path) == [f"{shard.name}: empty (zero bytes)"]


def test_a_missing_shard_is_named_at_opening_and_by_verify(tmp_path):
    shard = damaged(tmp_path)
    shard.unlink()
    assert faults(tmp_path) == [f"{shard.name}: missing"]
    with pytest.raises(EyasError, match=rf"1 of 2 shards are missing, the first is {shard.name}"):
        StateStore(tmp_path)


def test_a_deleted_shards_rows_are_captured_anew_and_only_they(tmp_path):
    damaged(tmp_path).unlink()
    (tmp_path / "manifest.json").unlink()
    with StateWriter(tmp_path, spec(), MB) as writer:
        assert [writer.add(make_row(i, 20)) for i in range(4)] == [False, False, True, True]
    finish_store(tmp_path, {})
    assert StateStore(tmp_path).verify() == []


def test_a_foreign_file_under_a_shards_name_is_named(tmp_path):
    shard = damaged(tmp_path)
    write_shard(shard, {"weight": [torch.ones(3).bfloat16()]}, {"format": "pt"})
    assert faults(tmp_path) == [f"{shard.name}: not a shard of states"]
    shard.write_bytes(b"PK\x03\x04" * 50)
    assert faults(tmp_path) == [f"{shard.name}: not a safetensors file (or cut off within its header)"]


def test_a_shard_of_a_future_format_is_named(tmp_path):
    shard = damaged(tmp_path)
    write_shard(shard, {"ids": [torch.ones(3, dtype=torch.int32)]}, {"eyas": "states", "format": "2"})
    assert faults(tmp_path) == [f"{shard.name}: format 2; this eyas reads format 1"]


def test_a_sidecar_of_a_future_format_is_named(tmp_path):
    sidecar = damaged(tmp_path).with_suffix(".json")
    sidecar.write_text(json.dumps({**json.loads(sidecar.read_text()), "format": 2, "new_field": 1}))
    assert f"{sidecar.name}: format 2; this eyas reads format 1" in faults(tmp_path)
    with pytest.raises(EyasError, match=f"{sidecar.name}: format 2"):
        StateWriter(tmp_path, spec(), MB)


def test_a_sidecar_of_another_spec_is_named(tmp_path):
    sidecar = damaged(tmp_path).with_suffix(".json")
    values = json.loads(sidecar.read_text())
    values["spec"]["target_digest"] = "another"
    sidecar.write_text(json.dumps(values))
    assert any(fault.startswith(f"{sidecar.name}: spec.target_digest is 'another' there") for fault in faults(tmp_path))


def test_a_shard_without_a_sidecar_is_named(tmp_path):
    sidecar = damaged(tmp_path).with_suffix(".json")
    sidecar.unlink()
    found = faults(tmp_path)
    assert f"{sidecar.stem}.safetensors: no sidecar, not part of the store" in found
    assert any(fault.startswith("index.json: 2 rows have no sidecar") for fault in found)


def test_an_index_that_is_not_the_manifests_is_refused_and_named(tmp_path):
    damaged(tmp_path)
    index = tmp_path / "index.json"
    index.write_text(index.read_text() + "\n")
    with pytest.raises(EyasError, match="not the index"):
        StateStore(tmp_path)
    (fault,) = faults(tmp_path)
    assert fault.startswith("index.json: ")
    index.unlink()
    with pytest.raises(EyasError, match=r"cannot read .*index\.json"):
        StateStore(tmp_path)


def test_swapped_rows_are_found_by_their_keys(tmp_path):
    sidecar = damaged(tmp_path).with_suffix(".json")
    values = json.loads(sidecar.read_text())
    values["keys"].reverse()
    sidecar.write_text(json.dumps(values))
    assert sum("holds other tokens" in fault for fault in faults(tmp_path)) == 2


def test_a_manifest_with_a_bad_spec_names_the_field(tmp_path):
    damaged(tmp_path)
    manifest = tmp_path / "manifest.json"
    values = json.loads(manifest.read_text())
    values["config"]["dtype"] = "int3"
    manifest.write_text(json.dumps(values))
    with pytest.raises(EyasError, match=r"config\.dtype"):
        StateStore(tmp_path)
