"""Files: all or nothing, and every fault with the file's name."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from safetensors.torch import save_file

from eyas.errors import EyasError
from eyas.files import (
    FileLock,
    JsonlAppender,
    atomic_path,
    digest_bytes,
    digest_file,
    digest_json,
    read_json,
    read_jsonl,
    read_object,
    write_json,
    write_text,
)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_file_appears_under_its_name_only_when_it_is_whole(tmp_path):
    target = tmp_path / "deep" / "er" / "file.txt"
    with atomic_path(target) as temporary:
        temporary.write_text("new")
        assert not target.exists()
    assert target.read_text() == "new"
    assert names(target.parent) == ["file.txt"]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, error):
    target = tmp_path / "file.txt"
    target.write_text("old")

    def fail() -> None:
        with atomic_path(target) as temporary:
            temporary.write_text("half")
            raise error

    with pytest.raises(error):
        fail()
    assert target.read_text() == "old"
    assert names(tmp_path) == ["file.txt"]


def test_the_users_umask_decides_who_may_read_a_file(tmp_path):
    before = os.umask(0o027)
    try:
        write_text(tmp_path / "file.txt", "x")
    finally:
        os.umask(before)
    assert (tmp_path / "file.txt").stat().st_mode & 0o777 == 0o640


def test_a_tensor_file_is_as_readable_as_any_other(tmp_path):
    with atomic_path(tmp_path / "x.safetensors") as temporary:
        save_file({"x": torch.zeros(1)}, temporary)
    write_text(tmp_path / "x.txt", "x")
    assert (tmp_path / "x.safetensors").stat().st_mode == (tmp_path / "x.txt").stat().st_mode


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(EyasError, match=r"cannot write .*file/x/y\.txt: "):
        write_text(tmp_path / "file" / "x" / "y.txt", "")


LIMITED = """
import resource, signal, sys, torch
from pathlib import Path
from safetensors.torch import save_file
from eyas.errors import EyasError
from eyas.files import JsonlAppender, atomic_path, write_text
folder = Path(sys.argv[1])
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))

def save(path):
    with atomic_path(path) as temporary:
        save_file({"a": torch.zeros(100_000)}, temporary)

def append(path):
    with JsonlAppender(path) as file:
        file.append({"x": 1})
        file.append({"x": "y" * 200_000})

for work, name in ((lambda path: write_text(path, "y" * 200_000), "a.txt"), (save, "a.safetensors"), (append, "a.jsonl")):
    try:
        work(folder / name)
    except EyasError as error:
        print(error)
"""


def test_a_disk_that_refuses_is_one_line_for_text_weights_and_appended_lines(tmp_path):
    run = subprocess.run([sys.executable, "-c", LIMITED, str(tmp_path)], capture_output=True, text=True, timeout=120, check=True)
    said = run.stdout.splitlines()
    assert run.stderr == ""
    assert len(said) == 3
    for name, line in zip(["a.txt", "a.safetensors", "a.jsonl"], said, strict=True):
        assert line.startswith(f"cannot write {tmp_path / name}: ")
        assert "File too large" in line
    assert names(tmp_path) == ["a.jsonl"]
    with JsonlAppender(tmp_path / "a.jsonl") as file:
        file.append({"x": 2})
    assert [value for _, value in read_jsonl(tmp_path / "a.jsonl")] == [{"x": 1}, {"x": 2}]


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=())),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(st.characters(exclude_categories=())), inner, max_size=4),
    max_leaves=8,
)


@given(value=json_values)
@example(value={"\udc80": "half a pair: \\\ud83d"})
def test_json_is_read_as_it_was_written_lone_surrogates_included(tmp_path_factory, value):
    folder = tmp_path_factory.mktemp("json")
    write_json(folder / "a.json", value)
    assert read_json(folder / "a.json") == value
    with JsonlAppender(folder / "a.jsonl") as file:
        file.append({"value": value})
    assert list(read_jsonl(folder / "a.jsonl")) == [(1, {"value": value})]
    assert digest_json(value) == digest_json(json.loads(json.dumps(value)))


def test_nan_is_never_written(tmp_path):
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(tmp_path / "a.json", [float("nan")])
    with JsonlAppender(tmp_path / "a.jsonl") as file, pytest.raises(ValueError, match="not JSON compliant"):
        file.append({"x": float("inf")})
    assert names(tmp_path) == ["a.jsonl"]
    assert (tmp_path / "a.jsonl").read_text() == ""


def test_a_missing_broken_or_unreadable_json_file_is_named(tmp_path):
    with pytest.raises(EyasError, match=r"no\.json does not exist"):
        read_json(tmp_path / "no.json")
    (tmp_path / "a.json").write_text('{"a": 1,\n oops}')
    with pytest.raises(EyasError, match=r"a\.json is not valid JSON: .*line 2"):
        read_json(tmp_path / "a.json")
    (tmp_path / "b.json").write_bytes(b"\xff")
    with pytest.raises(EyasError, match=r"b\.json is not valid JSON"):
        read_json(tmp_path / "b.json")
    with pytest.raises(EyasError, match="cannot read"):
        read_json(tmp_path)


def test_json_that_must_be_an_object_and_is_not_is_named(tmp_path):
    write_json(tmp_path / "a.json", {"a": [1]})
    assert read_object(tmp_path / "a.json") == {"a": [1]}
    write_json(tmp_path / "a.json", [1])
    with pytest.raises(EyasError, match=r"a\.json: expected a JSON object, found list"):
        read_object(tmp_path / "a.json")


def test_json_lines_come_with_their_numbers_and_blank_lines_are_skipped(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"a": 1}\r\n\n  \n{"a": 2}')
    assert list(read_jsonl(tmp_path / "a.jsonl")) == [(1, {"a": 1}), (4, {"a": 2})]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b'{"a": 1}\n{"a": \n', r"a\.jsonl, line 2: not valid JSON"),
        (b'{"a": 1}\n\n[1]\n', r"a\.jsonl, line 3: expected a JSON object, found list"),
        (b"\xff\xfe", r"a\.jsonl is not UTF-8 text"),
    ],
)
def test_a_broken_line_is_named(tmp_path, data, message):
    (tmp_path / "a.jsonl").write_bytes(data)
    with pytest.raises(EyasError, match=message):
        list(read_jsonl(tmp_path / "a.jsonl"))


def test_a_missing_jsonl_file_is_named(tmp_path):
    with pytest.raises(EyasError, match=r"no\.jsonl does not exist"):
        list(read_jsonl(tmp_path / "no.jsonl"))


@given(lines=st.lists(st.integers(0, 200_000), max_size=4), torn=st.integers(0, 200_000))
def test_a_torn_last_line_is_cut_off_and_whole_lines_stay(tmp_path_factory, lines, torn):
    path = tmp_path_factory.mktemp("torn") / "a.jsonl"
    whole = b"".join(b'{"x": "' + b"y" * size + b'"}\n' for size in lines)
    path.write_bytes(whole + b"z" * torn)
    JsonlAppender(path).close()
    assert path.read_bytes() == whole


def test_an_appended_line_is_there_before_the_file_is_closed(tmp_path):
    file = JsonlAppender(tmp_path / "new" / "a.jsonl")
    file.append({"x": "ä"})
    assert (tmp_path / "new" / "a.jsonl").read_text(encoding="utf-8") == '{"x": "ä"}\n'
    file.close()


def test_digests_are_sha256(tmp_path):
    (tmp_path / "a").write_bytes(b"abc")
    abc = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert digest_bytes(b"abc") == digest_file(tmp_path / "a") == abc
    assert digest_json({"b": 1, "a": "ä"}) == digest_bytes('{"a":"ä","b":1}'.encode())
    with pytest.raises(EyasError, match="cannot read"):
        digest_file(tmp_path / "none")


HOLD = """
import sys, time
from pathlib import Path
from eyas.files import FileLock
lock = FileLock(Path(sys.argv[1]), "taken")
print("held", flush=True)
time.sleep(60)
"""


def test_a_lock_is_refused_while_its_holder_lives_and_free_when_it_was_killed(tmp_path):
    path = tmp_path / "lock"
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(path)], stdout=subprocess.PIPE)
    assert holder.stdout is not None
    holder.stdout.readline()
    with pytest.raises(EyasError, match="busy"):
        FileLock(path, "busy")
    holder.kill()
    holder.wait(60)
    lock = FileLock(path, "busy")
    lock.release()
    assert names(tmp_path) == []


def test_a_lock_in_a_folder_that_is_not_there_is_an_error(tmp_path):
    with pytest.raises(EyasError, match="cannot lock"):
        FileLock(tmp_path / "no" / "lock", "busy")


def test_weights_saved_through_an_atomic_path_are_readable(tmp_path):
    with atomic_path(tmp_path / "a.safetensors") as temporary:
        save_file({"a": torch.ones(3)}, temporary)
    assert names(tmp_path) == ["a.safetensors"]
