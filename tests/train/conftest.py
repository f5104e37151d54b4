"""A whole training run's inputs in miniature: a random Llama target, its greedy and sampled text, and the states along it."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from eyas.config import TargetConfig
from eyas.states import StateRow, StateSpec, StateWriter, finish_store, row_key
from eyas.target import Target, open_target

VOCABULARY, PROMPT, REPLY = 48, 4, 16
LAYERS = (1, 2, 3)
MakeRun = Callable[..., Path]


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    """A random Llama of 4 layers and width 32."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("target")
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.3,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=1,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return open_target(TargetConfig(model=str(folder)))


@pytest.fixture(scope="session")
def tiny_states(tiny_target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """states/{train,greedy,sampled} and token_counts, as prep leaves them."""
    folder = tmp_path_factory.mktemp("prep") / "states"
    model: Any = tiny_target.load_model(torch.float32, "cpu")
    generator = torch.Generator().manual_seed(5)
    counts = torch.zeros(VOCABULARY, dtype=torch.int64)
    for name, rows, temperature in (("train", 40, 0.0), ("greedy", 6, 0.0), ("sampled", 6, 0.7)):
        spec = StateSpec(LAYERS, 32, "bfloat16", VOCABULARY, tiny_target.digest, tiny_target.tokenizer_digest)
        with StateWriter(folder / name, spec, 1 << 20) as writer:
            for number in range(rows):
                row = _row(model, generator, temperature, f"category{number % 2}", PROMPT + number % 3, REPLY - number % 5)
                counts += torch.bincount(row.ids_T[row.supervised_T], minlength=VOCABULARY) if name == "train" else 0
                writer.add(row)
        finish_store(folder / name, {})
    save_file({"counts": counts}, folder / "token_counts.safetensors")
    return folder


@torch.no_grad()
def _row(model: Any, generator: torch.Generator, temperature: float, category: str, prompt: int, reply: int) -> StateRow:
    ids = torch.randint(2, VOCABULARY, (1, prompt), generator=generator)
    for _ in range(reply):
        logits = model(ids).logits[0, -1]
        if temperature:
            token = torch.multinomial(torch.softmax(logits / temperature, -1), 1, generator=generator)
        else:
            token = logits.argmax(-1, keepdim=True)
        ids = torch.cat([ids, token[None]], 1)
    states = model(ids, output_hidden_states=True).hidden_states
    supervised = torch.arange(prompt + reply) >= prompt
    return StateRow(
        key=row_key(ids[0].tolist(), supervised.tolist()),
        category=category,
        ids_T=ids[0],
        supervised_T=supervised,
        aux_TA=torch.cat([states[layer][0] for layer in LAYERS], -1),
        final_TH=states[-1][0],
    )


@pytest.fixture
def make_run(tiny_target: Target, tiny_states: Path, tmp_path: Path) -> MakeRun:
    """Call with a name and ``train`` settings: writes the config of a run (and links the states); returns the path of the YAML file."""
    return partial(_write_run, tmp_path, tiny_target, tiny_states)


@pytest.fixture(scope="module")
def make_module_run(tiny_target: Target, tiny_states: Path, tmp_path_factory: pytest.TempPathFactory) -> MakeRun:
    """The same for a run that a module's tests share."""
    return partial(_write_run, tmp_path_factory.mktemp("runs"), tiny_target, tiny_states)


def _write_run(folder: Path, target: Target, states: Path, name: str, init: str = "scratch", **settings: Any) -> Path:
    output = folder / name
    (output / "states").mkdir(parents=True)
    for part in ("train", "greedy", "sampled", "token_counts.safetensors"):
        (output / "states" / part).symlink_to(states / part)
    tiny = {
        "ttt_steps": 3,
        "epochs": 2,
        "batch_tokens": 64,
        "learning_rate": 3e-3,
        "precision": "fp32",
        "evaluate_every": 5,
        "checkpoint_every": 4,
        "log_every": 3,
    }
    config = {
        "output": str(output),
        "target": {"model": str(target.folder), "device": "cpu"},
        "prep": {"sources": [{"source": "unused.jsonl"}]},
        "drafter": {"init": init, **({"draft_vocab_size": 32} if init == "scratch" else {})},
        "train": {**tiny, **settings},
        "engine": {"draft_steps": 2},
    }
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(config))
    return path
