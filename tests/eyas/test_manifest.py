"""Manifests: what a folder is, whether it is current, and what differs when it is not."""

import json
from pathlib import Path

import pytest

from eyas.errors import EyasError
from eyas.manifest import Manifest, begin, finish, is_current, read_manifest, require_same, write_manifest

CONFIG = {"dtype": "bfloat16", "layers": (2, 15, 27), "output": Path("out"), "inner": {"rate": 0.1}}
INPUTS = {"target": "abc"}


def test_a_manifest_is_read_as_it_was_written(tmp_path):
    manifest = Manifest(kind="states", config={"a": [1]}, inputs=INPUTS, holds={"rows": 3}, complete=True)
    write_manifest(tmp_path, manifest)
    assert read_manifest(tmp_path, "states") == manifest
    assert {"eyas", "python", "torch", "safetensors"} <= manifest.versions.keys()


def test_a_begun_folder_is_incomplete_and_a_finished_one_is_current(tmp_path):
    begin(tmp_path, "replies", CONFIG, INPUTS)
    assert not read_manifest(tmp_path).complete
    assert not is_current(tmp_path, "replies", CONFIG, INPUTS)
    assert finish(tmp_path, {"rows": 2}).holds == {"rows": 2}
    assert is_current(tmp_path, "replies", CONFIG, INPUTS)


def test_a_folder_without_a_manifest_is_not_current(tmp_path):
    assert not is_current(tmp_path / "nowhere", "replies", CONFIG, INPUTS)


@pytest.mark.parametrize(
    ("config", "inputs"), [({**CONFIG, "dtype": "fp8"}, INPUTS), (CONFIG, {"target": "xyz"}), ({**CONFIG, "new": 1}, INPUTS)]
)
def test_a_folder_made_from_something_else_is_not_current(tmp_path, config, inputs):
    begin(tmp_path, "replies", CONFIG, INPUTS)
    finish(tmp_path, {})
    assert not is_current(tmp_path, "replies", config, inputs)


def test_tuples_and_paths_in_a_config_count_as_the_lists_and_texts_they_become(tmp_path):
    begin(tmp_path, "replies", CONFIG, INPUTS)
    begin(tmp_path, "replies", {**CONFIG, "layers": [2, 15, 27], "output": "out"}, INPUTS)


@pytest.mark.parametrize(
    ("config", "inputs", "message"),
    [
        ({**CONFIG, "dtype": "fp8"}, INPUTS, r"config\.dtype is 'bfloat16' there and 'fp8' here"),
        ({**CONFIG, "layers": (1, 2)}, INPUTS, r"config\.layers is \[2, 15, 27\] there and \[1, 2\] here"),
        ({**CONFIG, "inner": {"rate": 0.2}}, INPUTS, r"config\.inner\.rate is 0\.1 there and 0\.2 here"),
        ({**CONFIG, "seed": 1}, INPUTS, r"config\.seed is None there and 1 here"),
        (CONFIG, {"target": "xyz"}, r"inputs\.target is 'abc' there and 'xyz' here"),
    ],
)
def test_resuming_with_something_else_names_the_field_and_both_values(tmp_path, config, inputs, message):
    begin(tmp_path, "replies", CONFIG, INPUTS)
    before = (tmp_path / "manifest.json").read_bytes()
    with pytest.raises(EyasError, match=message):
        begin(tmp_path, "replies", config, inputs)
    assert (tmp_path / "manifest.json").read_bytes() == before


def test_resuming_a_finished_folder_makes_it_incomplete_again(tmp_path):
    begin(tmp_path, "replies", CONFIG, INPUTS)
    finish(tmp_path, {"rows": 2})
    begin(tmp_path, "replies", CONFIG, INPUTS)
    assert not read_manifest(tmp_path).complete


def test_a_folder_of_another_kind_is_refused(tmp_path):
    begin(tmp_path, "replies", CONFIG, INPUTS)
    with pytest.raises(EyasError, match="holds replies, expected states"):
        read_manifest(tmp_path, "states")
    with pytest.raises(EyasError, match="holds replies, expected states"):
        begin(tmp_path, "states", CONFIG, INPUTS)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"kind": "states", "config": {}, "format": 2}', r"manifest\.json: format: "),
        ('{"kind": "cats", "config": {}}', r"manifest\.json: kind: "),
        ('{"kind": "states", "config": {}, "more": 1}', r"manifest\.json: more: "),
        ('{"kind": "states"', r"manifest\.json is not valid JSON"),
        ("[]", r"manifest\.json: "),
    ],
)
def test_a_foreign_or_broken_manifest_is_named_with_its_fault(tmp_path, text, message):
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(EyasError, match=message):
        read_manifest(tmp_path)


def test_finishing_what_was_not_begun_is_an_error(tmp_path):
    with pytest.raises(EyasError, match="does not exist"):
        finish(tmp_path, {})


def test_equal_dicts_need_no_word():
    require_same("x", {"a": {"b": [1]}}, {"a": {"b": [1]}})


def test_a_number_that_json_lacks_is_written_as_null(tmp_path):
    begin(tmp_path, "bench", {}, {})
    finish(tmp_path, {"rate": float("nan")})
    assert json.loads((tmp_path / "manifest.json").read_text())["holds"] == {"rate": None}
