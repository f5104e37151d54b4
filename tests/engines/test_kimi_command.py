"""The commands for the 8-GPU node, read by SGLang's own argument parser: it takes every flag, and understands what the config means."""

import json
import os
import subprocess
from typing import Any

import pytest

from eval.bench import STARTER, servable_drafters
from eval.clients import BASELINE
from eval.command import launch
from eyas.config import load_config
from eyas.files import write_json
from tests.engines.served import ROOT, SGLANG, STAND_IN, need

pytestmark = need(SGLANG)

# What SGLang does with its command line before it starts anything: read it, then resolve it with what the models' configs say.
PARSE = """
import json, sys
import msgspec
from sglang.srt.arg_groups.overrides import resolving_view
from sglang.srt.server_args import prepare_server_args
for line in sys.stdin:
    words, resolve = json.loads(line)
    arguments = prepare_server_args(words)
    if resolve:
        arguments.resolve_once()
        view = resolving_view(arguments)
        values = {field.name: getattr(view, field.name) for field in msgspec.structs.fields(type(arguments))}
    else:
        values = msgspec.structs.asdict(arguments)
    print("parsed " + json.dumps(values, default=str))
"""
# What decides in the configs of Kimi-K2.5 and of AQ-MedAI's drafter, weights aside.
KIMI = {
    "architectures": ["KimiK25ForConditionalGeneration"],
    "model_type": "kimi_k25",
    "tie_word_embeddings": False,
    "text_config": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "kimi_k2",
        "hidden_size": 7168,
        "num_hidden_layers": 61,
        "vocab_size": 163840,
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 384,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "max_position_embeddings": 262144,
        "rope_theta": 50000.0,
        "rope_scaling": {"type": "yarn", "factor": 64.0, "original_max_position_embeddings": 4096},
    },
    "vision_config": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128, "patch_size": 14},
}
DRAFTER = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "head_dim": 128,
    "num_hidden_layers": 1,
    "vocab_size": 163840,
    "draft_vocab_size": 32000,
    "rope_theta": 1e6,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
}
SHARED = {
    "model_path": "moonshotai/Kimi-K2.5",
    "trust_remote_code": True,
    "context_length": 131072,
    "dtype": "bfloat16",
    "host": "127.0.0.1",
    "port": 30000,
    "tp_size": 8,
    "max_running_requests": 48,
    "mem_fraction_static": 0.85,
}
SPECULATION = {
    "speculative_algorithm": "EAGLE3",
    "speculative_num_steps": 3,
    "speculative_eagle_topk": 1,
    "speculative_num_draft_tokens": 4,
    "speculative_draft_model_quantization": "unquant",
}


Arguments = dict[str, dict[str, Any]]
"""Variant -> the server arguments that SGLang makes of its command."""


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Arguments, Arguments]:
    """The arguments as they are read, and as they are resolved for the models that they name (folders with their configs, on a CPU)."""
    config = load_config(ROOT / "configs" / "kimi-k2.5.yaml", [f"engine.environment={ROOT / 'configs' / 'env' / 'nccl-pcie.yaml'}"])
    drafters = servable_drafters(config, "result")
    commands = {name: launch(config, name, drafters.get(name), config.engine.port).command for name in (BASELINE, STARTER, "result")}
    assert all(command[1:3] == ["-m", "sglang.launch_server"] for command in commands.values())
    folders = {SHARED["model_path"]: KIMI} | dict.fromkeys(("AQ-MedAI/Kimi-K2-Instruct-eagle3", "checkpoints/kimi-k2.5/export"), DRAFTER)
    places = {}
    for name, values in folders.items():
        places[name] = tmp_path_factory.mktemp("model")
        write_json(places[name] / "config.json", values)
    local = [[str(places.get(word, word)) for word in command[3:]] + ["--device", "cpu"] for command in commands.values()]
    asked = [(command[3:], False) for command in commands.values()] + [(words, True) for words in local]
    environment = os.environ | {
        "PYTHONPATH": str(STAND_IN),
        "SGLANG_USE_CPU_ENGINE": "1",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    lines = "".join(json.dumps(line) + "\n" for line in asked)
    answer = subprocess.run([SGLANG, "-c", PARSE], input=lines, env=environment, capture_output=True, text=True, timeout=280)
    assert answer.returncode == 0, answer.stderr[-3000:]
    got = [json.loads(line.removeprefix("parsed ")) for line in answer.stdout.splitlines() if line.startswith("parsed ")]
    return dict(zip(commands, got[:3], strict=True)), dict(zip(commands, got[3:], strict=True))


@pytest.fixture(scope="module")
def parsed(both: tuple[Arguments, Arguments]) -> Arguments:
    return both[0]


@pytest.fixture(scope="module")
def resolved(both: tuple[Arguments, Arguments]) -> Arguments:
    return both[1]


def test_the_baseline_is_understood(parsed: Arguments) -> None:
    got = parsed[BASELINE]
    assert {name: got[name] for name in SHARED} == SHARED
    assert {name: got[name] for name in SPECULATION} == dict.fromkeys(SPECULATION)
    assert got["speculative_draft_model_path"] is None


@pytest.mark.parametrize(("variant", "path"), [(STARTER, "AQ-MedAI/Kimi-K2-Instruct-eagle3"), ("result", "checkpoints/kimi-k2.5/export")])
def test_speculation_is_understood(parsed: Arguments, variant: str, path: str) -> None:
    got = parsed[variant]
    assert {name: got[name] for name in SHARED | SPECULATION} == SHARED | SPECULATION
    assert got["speculative_draft_model_path"] == path


def test_nothing_but_speculation_tells_the_two_apart(parsed: Arguments) -> None:
    one, other = parsed[BASELINE], parsed[STARTER]
    differing = {name for name in one if one[name] != other[name]}
    assert differing - {"random_seed"} == {*SPECULATION, "speculative_draft_model_path"}


def test_sglang_finds_nothing_to_refuse_or_to_change_when_it_looks_into_the_models(resolved: Arguments) -> None:
    kept = {name: value for name, value in SHARED.items() if name != "model_path"}
    for variant, got in resolved.items():
        assert {name: got[name] for name in kept} == kept, variant
    for variant in (STARTER, "result"):
        kept = {name: value for name, value in SPECULATION.items() if name != "speculative_draft_model_quantization"}
        assert {name: resolved[variant][name] for name in kept} == kept
