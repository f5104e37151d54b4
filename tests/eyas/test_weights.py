"""Weights are found by their index, and only in their own folder."""

import json
from pathlib import Path

import pytest

from eyas.errors import EyasError
from eyas.weights import INDEX, weight_files


def folder(tmp_path: Path, weight_map: object) -> Path:
    for name in ("model/b.safetensors", "model/a.safetensors", "model/other.safetensors", "outside.safetensors"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "model" / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return tmp_path / "model"


def test_an_index_decides_which_files_count(tmp_path: Path) -> None:
    files = weight_files(folder(tmp_path, {"x": "b.safetensors", "y": "a.safetensors", "z": "b.safetensors"}))
    assert [file.name for file in files] == ["a.safetensors", "b.safetensors"]


@pytest.mark.parametrize("name", ["../outside.safetensors", "c.safetensors"])
def test_a_file_outside_the_folder_or_not_there_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(EyasError, match=f"lacks 1 of its 2 shards, the first is {Path(name).name}"):
        weight_files(folder(tmp_path, {"x": "a.safetensors", "y": name}))


@pytest.mark.parametrize("weight_map", [None, {}, {"x": 3}])
def test_an_index_without_a_map_is_refused(tmp_path: Path, weight_map: object) -> None:
    with pytest.raises(EyasError, match="has no weight_map"):
        weight_files(folder(tmp_path, weight_map))


def test_what_is_no_folder_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(EyasError, match="nosuch is not there: name a folder"):
        weight_files(tmp_path / "nosuch")
    with pytest.raises(EyasError, match="file is no folder: name a folder"):
        weight_files(tmp_path / "file")
