"""A tiny target: a random Llama with a byte-level tokenizer and a ChatML template, as an ordinary HF folder."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from eyas.config import Config
from eyas.target import Target

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL = ["<|im_start|>", "<|im_end|>", "<think>", "</think>", "<|user|>", "<|assistant|>", "<|middle|>"]


def build_tokenizer(template: str = CHATML) -> PreTrainedTokenizerFast:
    """One token a byte, and the special tokens behind them."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", extra_special_tokens=SPECIAL)
    fast.chat_template = template
    return fast


@pytest.fixture
def make_tokenizer():
    return build_tokenizer


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    tokenizer = build_tokenizer()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=8,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=512,
        eos_token_id=tokenizer.convert_tokens_to_ids("<|im_end|>"),
        bos_token_id=None,
        initializer_range=0.3,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def tiny(tiny_folder: Path) -> Target:
    return Target(tiny_folder, "tiny")


@pytest.fixture
def make_config(tmp_path: Path, tiny_folder: Path):
    """A run of the tiny target on 24 prompts; keyword arguments replace parts of ``prep``."""
    words = ["river", "stone", "candle", "harbour", "violin", "meadow", "copper", "winter", "basket", "thunder", "garden", "mirror"]
    chooser = random.Random(0)
    prompts = tmp_path / "prompts.jsonl"
    lines = [json.dumps({"prompt": " ".join(chooser.sample(words, 4 + number % 9))}) for number in range(24)]
    prompts.write_text("\n".join(lines) + "\n")

    def make(output: str = "out", **prep: Any) -> Config:
        replies = {"max_new_tokens": 12, "batch_size": 4, "temperatures": [1.0], **prep.pop("replies", {})}
        values = {"sources": [{"source": str(prompts)}], "heldout": {"prompts": 4}, "max_length": 160, "replies": replies, **prep}
        target = {"model": str(tiny_folder), "dtype": "float32", "device": "cpu"}
        return Config.model_validate({"output": tmp_path / output, "target": target, "prep": values, "drafter": {"init": "scratch"}})

    return make
