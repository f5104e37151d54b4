"""A target of the hub: which of its files are fetched when, by the unmodified client from a server on this machine."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from eyas.target import Target
from eyas.weights import INDEX, read_index
from tests.hub_server import COMMIT, Hub, hub

NAME = "moonshotai/tiny-kimi"
ASK = """
import json, sys
import torch
from eyas.config import TargetConfig
from eyas.errors import EyasError
from eyas.target import open_target
try:
    target = open_target(TargetConfig(model=sys.argv[1]))
    told = [eval(asked) for asked in sys.argv[2:]]
    print(json.dumps([target.revision, target.is_whole, *told]))
except EyasError as error:
    print(json.dumps(str(error)))
"""


@pytest.fixture
def repository(kimi: Path, tmp_path: Path) -> Path:
    """The tiny Kimi-K2.5 as its repository would be: code, images and a pickle beside it."""
    folder = shutil.copytree(kimi, tmp_path / "repository")
    for name in ("modeling_kimi_k25.py", "figures/demo.png", "training_state.pt"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"not needed")
    return folder


def ask(server: Hub, cache: Path, *asked: str) -> Any:
    command = [sys.executable, "-c", ASK, NAME, *asked]
    ran = subprocess.run(command, env=server.environment(cache), capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout.splitlines()[-1])


def fetched_shards(server: Hub) -> list[str]:
    return sorted(name for name in server.fetched if name.endswith(".safetensors"))


def shard_of(folder: Path, *names: str) -> list[str]:
    index = read_index(folder)
    return sorted({index[name] for name in names})


def test_opening_a_target_fetches_its_small_files_and_no_weights(repository: Path, tmp_path: Path) -> None:
    with hub(repository, NAME) as server:
        told = ask(server, tmp_path / "cache", "target.shape.hidden_size", "target.tokenizer().encode('a')")
    assert told == [COMMIT, False, Target(repository, "x").shape.hidden_size, Target(repository, "x").tokenizer().encode("a")]
    assert fetched_shards(server) == []
    assert {"config.json", "tokenizer_config.json", INDEX} <= set(server.fetched)
    assert not [name for name in server.fetched if name.endswith((".py", ".png", ".pt"))]


def test_a_tensor_brings_the_shard_that_holds_it_and_the_digest_only_the_beginnings(repository: Path, tmp_path: Path) -> None:
    local, head, norm = Target(repository, "x"), "language_model.lm_head.weight", "language_model.model.norm.weight"
    asked = ("list(target.lm_head(torch.bfloat16).shape)", "list(target.final_norm(torch.float32).shape)", "target.digest")
    with hub(repository, NAME) as server:
        told = ask(server, tmp_path / "cache", *asked)
        again = ask(server, tmp_path / "cache", *asked)
    wanted, others = shard_of(repository, head, norm), sorted(set(read_index(repository).values()))
    assert told == again == [COMMIT, False, [local.shape.vocab_size, local.shape.hidden_size], [local.shape.hidden_size], local.digest]
    assert fetched_shards(server) == wanted
    assert set(server.begun) == set(others) - set(wanted) != set()


def test_the_whole_model_comes_only_when_it_is_loaded(repository: Path, tmp_path: Path) -> None:
    with hub(repository, NAME) as server:
        told = ask(server, tmp_path / "cache", "type(target.load_model(torch.bfloat16, 'cpu')).__name__", "target.is_whole")
    assert told == [COMMIT, True, "Kimi_K25ForConditionalGeneration", True]
    assert fetched_shards(server) == sorted(set(read_index(repository).values()))


def test_a_file_that_the_repository_lacks_is_one_clear_line(repository: Path, tmp_path: Path) -> None:
    (shard,) = shard_of(repository, "language_model.lm_head.weight")
    (repository / shard).unlink()
    with hub(repository, NAME) as server:
        told = ask(server, tmp_path / "cache", "list(target.lm_head(torch.bfloat16).shape)")
        digest = ask(server, tmp_path / "cache", "target.digest")
    assert told.startswith(f"cannot fetch {shard} of {NAME} from the hub: ")
    assert digest.startswith(f"cannot read {shard} of {NAME} on the hub: ")
    assert "\n" not in told + digest


def test_a_model_of_one_file_without_an_index_is_fetched_when_opened(repository: Path, tmp_path: Path) -> None:
    (repository / INDEX).unlink()
    with hub(repository, NAME) as server:
        told = ask(server, tmp_path / "cache", "target.digest")
    assert told == [COMMIT, True, Target(repository, "x").digest]
