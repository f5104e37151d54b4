"""Engine commands as they are rendered from the config: every word of them."""

import json
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from eval.command import Addition, Launch, is_loopback, launch
from eyas.config import Config, load_config
from eyas.errors import EyasError

ROOT = Path(__file__).parents[2]


def config(target: dict[str, Any] | None = None, **engine: Any) -> Config:
    return Config.model_validate(
        {
            "output": "out",
            "target": {"model": "owner/target"} | (target or {}),
            "prep": {"sources": [{"source": "none.jsonl"}]},
            "drafter": {"init": "scratch"},
            "engine": {"kind": "sglang", "python": "engines/bin/python", "context": 2048, "dtype": "float32"} | engine,
        }
    )


def line(command: list[str]) -> str:
    return shlex.join(command)


BASELINE = (
    "engines/bin/python -m sglang.launch_server --model-path owner/target --context-length 2048 --dtype float32 "
    "--host 127.0.0.1 --port 31000 --tp 8"
)


def test_an_sglang_baseline_has_no_word_of_speculation() -> None:
    got = launch(config(flags={"tp": 8}, draft_flags={"speculative-attention-mode": "decode"}), "none", None, 31000)
    assert line(got.command) == BASELINE
    assert (got.kind, got.url) == ("sglang", "http://127.0.0.1:31000")


def test_a_flag_of_several_values_has_a_word_for_each() -> None:
    got = launch(config(flags={"tp": 8, "cuda-graph-bs": [1, 2, 4]}), "none", None, 31000)
    assert line(got.command) == f"{BASELINE} --cuda-graph-bs 1 2 4"
    with pytest.raises(ValidationError, match="flags"):
        config(flags={"cuda-graph-bs": []})


def test_sglang_speculates_with_the_drafter_of_the_variant() -> None:
    got = launch(config(flags={"tp": 8}, draft_flags={"speculative-attention-mode": "decode"}), "result", "out/export", 31000)
    assert line(got.command) == (
        f"{BASELINE} --speculative-algorithm EAGLE3 --speculative-draft-model-path out/export --speculative-num-steps 3 "
        "--speculative-eagle-topk 1 --speculative-num-draft-tokens 4 --speculative-attention-mode decode"
    )


def test_a_tree_and_hub_revisions_reach_sglang() -> None:
    tree = config({"revision": "abc", "trust_remote_code": True}, topk=2, draft_steps=3, draft_tokens=6)
    words = line(launch(tree, "starter", "hub:owner/drafter@v1", 31000).command)
    assert "--model-path owner/target --revision abc --trust-remote-code --context-length" in words
    assert "--speculative-draft-model-path owner/drafter --speculative-draft-model-revision v1 --speculative-num-steps 3" in words
    assert words.endswith("--speculative-eagle-topk 2 --speculative-num-draft-tokens 6")


def test_vllm_takes_its_drafter_and_draft_flags_in_one_json() -> None:
    vllm = config(kind="vllm", flags={"enforce-eager": True}, draft_flags={"draft-tensor-parallel-size": 1}, draft_steps=2)
    command = launch(vllm, "starter", "hub:owner/drafter@v1", 8000).command
    at = command.index("--speculative-config")
    assert json.loads(command[at + 1]) == {
        "method": "eagle3",
        "model": "owner/drafter",
        "revision": "v1",
        "num_speculative_tokens": 2,
        "draft_tensor_parallel_size": 1,
    }
    assert (
        line(command[:9])
        == "engines/bin/python -m vllm.entrypoints.openai.api_server --model owner/target --max-model-len 2048 --dtype float32"
    )
    assert "--enforce-eager" in command
    assert "--speculative-config" not in launch(vllm, "none", None, 8000).command


def test_the_embedded_engine_runs_in_this_python() -> None:
    embedded = launch(config(kind="embedded", python=None), "starter", None, 5)
    assert embedded.command == [sys.executable, "-m", "eval.server", "out/servers/embedded/job.json"]
    assert embedded.environment == {}


def test_the_packaged_target_is_its_folder(smollm2: Path) -> None:
    assert launch(config({"model": "package:smollm2"}), "none", None, 5).command[4] == str(smollm2)
    with pytest.raises(EyasError, match="no packaged target 'package:other'"):
        launch(config({"model": "package:other"}), "none", None, 5)


def test_home_folders_are_written_out() -> None:
    command = launch(config({"model": "~/target"}), "result", "~/export", 5).command
    assert command[command.index("--model-path") + 1] == str(Path.home() / "target")
    assert command[command.index("--speculative-draft-model-path") + 1] == str(Path.home() / "export")


@pytest.mark.parametrize(
    ("engine", "told"),
    [
        ({"flags": {"port": 1}}, "engine.flags: port: eyas sets port itself, from engine.port"),
        ({"flags": {"context_length": 1}}, "context-length itself, from engine.context"),
        ({"flags": {"--model": "x"}}, "model: eyas sets model-path itself, from target.model"),  # an abbreviation, as argparse takes them
        ({"draft_flags": {"speculative-num-steps": 5}}, "engine.draft_flags: speculative-num-steps.*from engine.draft_steps"),
        ({"kind": "vllm", "flags": {"speculative_config": "{}"}}, "speculative-config itself, from the variant and engine.draft_flags"),
        ({"kind": "vllm", "draft_flags": {"num_speculative_tokens": 5}}, "num-speculative-tokens itself, from engine.draft_steps"),
    ],
)
def test_a_flag_that_eyas_sets_is_refused_by_name(engine: dict[str, Any], told: str) -> None:
    with pytest.raises(EyasError, match=told):
        launch(config(**engine), "result", "out/export", 31000)


def test_values_of_flags_become_words() -> None:
    flags = {"bare": True, "out": False, "number": 0.5, "dashed_name": "a b", "negative": "-x"}
    assert line(launch(config(flags=flags), "none", None, 31000).command).endswith(
        "--port 31000 --bare --number 0.5 --dashed-name 'a b' --negative=-x"
    )


def test_draft_flags_go_before_flags_of_the_same_name() -> None:
    both = config(flags={"max-running-requests": 48}, draft_flags={"max_running_requests": 4})
    assert "--max-running-requests 48" in line(launch(both, "none", None, 5).command)
    speculating = line(launch(both, "result", "out/export", 5).command)
    assert "--max-running-requests 4 " in speculating
    assert "requests 48" not in speculating


def test_a_container_gets_the_environment_inside(tmp_path: Path) -> None:
    (tmp_path / "env.yaml").write_text("NCCL_ALGO: Ring\n")
    contained = config(python=None, container=["docker", "run", "image"], environment=str(tmp_path / "env.yaml"))
    got = launch(contained, "none", None, 31000)
    assert line(got.words({"EYAS_SERVER": "1"})).startswith(
        "docker run image env SPT_NOENV=1 NCCL_ALGO=Ring EYAS_SERVER=1 python3 -m sglang.launch_server --model-path"
    )
    assert got.paste().startswith("docker run image env SPT_NOENV=1")


def test_an_engine_finds_the_programs_beside_its_interpreter() -> None:
    assert launch(config(python="/opt/engine/bin/python"), "none", None, 5).environment["PATH"].startswith("/opt/engine/bin:")
    assert "PATH" not in launch(config(python="python3.12"), "none", None, 5).environment


def test_what_is_printed_can_be_pasted(tmp_path: Path) -> None:
    (tmp_path / "env.yaml").write_text("OPTIONS: a b\n")
    got = Launch(["python", "-m", "engine", "--name", "it's", "--bare"], {"OPTIONS": "a b"}, "http://x", "sglang")
    assert got.paste() == "OPTIONS='a b' \\\n  python -m engine \\\n  --name 'it'\"'\"'s' \\\n  --bare"


@pytest.mark.parametrize(
    ("host", "url"),
    [("0.0.0.0", "http://127.0.0.1:5"), ("::", "http://[::1]:5"), ("::1", "http://[::1]:5"), ("node1", "http://node1:5")],
)
def test_the_url_is_one_that_can_be_asked(host: str, url: str) -> None:
    assert launch(config(host=host), "none", None, 5).url == url


def test_loopback_is_told_from_the_world() -> None:
    assert [is_loopback(host) for host in ("127.0.0.1", "::1", "localhost", "0.0.0.0", "10.0.0.1", "node1")] == [True] * 3 + [False] * 3


def test_the_node_of_eight_gpus_gets_its_commands() -> None:
    kimi = load_config(ROOT / "configs" / "kimi-k2.5.yaml", ["engine.environment=" + str(ROOT / "configs" / "env" / "nccl-pcie.yaml")])
    baseline = launch(kimi, "none", None, kimi.engine.port)
    assert line(baseline.command[1:]) == (
        "-m sglang.launch_server --model-path moonshotai/Kimi-K2.5 --trust-remote-code --context-length 131072 --dtype bfloat16 "
        "--host 127.0.0.1 --port 30000 --tp 8 --max-running-requests 48 --mem-fraction-static 0.85"
    )
    speculating = launch(kimi, "starter", kimi.drafter.init, kimi.engine.port)
    assert line(speculating.command) == line(baseline.command) + (
        " --speculative-algorithm EAGLE3 --speculative-draft-model-path AQ-MedAI/Kimi-K2-Instruct-eagle3 --speculative-num-steps 3"
        " --speculative-eagle-topk 1 --speculative-num-draft-tokens 4 --speculative-draft-model-quantization unquant"
    )
    assert baseline.environment == {
        "SPT_NOENV": "1",
        "NCCL_PROTO": "LL",
        "NCCL_ALGO": "Ring",
        "NCCL_P2P_LEVEL": "SYS",
        "NCCL_MAX_NCHANNELS": "16",
        "NCCL_BUFFSIZE": "16777216",
        "NCCL_NTHREADS": "512",
    }


def test_what_a_capture_adds_overrides_flags_and_joins_lists_with_what_is_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SGLANG_PLUGINS", "their_plugin")
    profile = tmp_path / "profile.yaml"
    profile.write_text("PYTHONPATH: /their/code\nNCCL_PROTO: LL\n")
    asked = config(flags={"tp": 8, "disable-radix-cache": False}, environment=str(profile))
    flags = {"disable-radix-cache": True, "speculative-algorithm": "EAGLE3"}
    addition = Addition(flags, {"PYTHONPATH": "/ours", "SGLANG_PLUGINS": "ours", "EYAS_CAPTURE": "{}"})
    got = launch(asked, "capture", None, 31000, addition)
    assert line(got.command) == f"{BASELINE} --disable-radix-cache --speculative-algorithm EAGLE3"
    wanted = {"PYTHONPATH": "/ours:/their/code", "SGLANG_PLUGINS": "ours,their_plugin", "EYAS_CAPTURE": "{}", "NCCL_PROTO": "LL"}
    assert wanted.items() <= got.environment.items()
