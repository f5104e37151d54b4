"""Which tokenizer a Kimi target is read with, and that none with wrong special ids is taken."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from eyas.config import TargetConfig
from eyas.errors import EyasError
from eyas.kimi_tokenizer import SPECIAL, KimiTokenizer
from eyas.target import open_target
from tests.kimi_vocabulary import write_kimi_tokenizer

START, VOCABULARY = 512, 768
TEXT = "hello <|im_end|>你好 <think>"


def write_target(folder: Path, model_type: str = "kimi_k25") -> Path:
    """Config and one tensor: as much of a target as opening it takes."""
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 8, "num_attention_heads": 1, "vocab_size": VOCABULARY}
    text = {**sizes, "rms_norm_eps": 1e-5, "max_position_embeddings": 64, "tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps({"model_type": model_type, "text_config": text}))
    save_file({"language_model.model.embed_tokens.weight": torch.zeros(VOCABULARY, 8)}, folder / "model.safetensors")
    return folder


def write_fast_tokenizer(folder: Path, misplaced: bool = False) -> None:
    """The same bytes and special tokens as a tokenizer.json; misplaced: one after the other, without the gaps between them."""
    vocabulary = {letter: place for place, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    places = range(len(SPECIAL)) if misplaced else SPECIAL.values()
    vocabulary |= {name: START + place for name, place in zip(SPECIAL, places, strict=True)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIAL])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="[EOS]").save_pretrained(folder)


def open_tokenizer(folder: Path, **settings: Any) -> Any:
    return open_target(TargetConfig(model=str(folder), **settings)).tokenizer()


def test_a_published_vocabulary_is_read_without_the_repositorys_code(tmp_path: Path) -> None:
    tokenizer = open_tokenizer(write_kimi_tokenizer(write_target(tmp_path), START))
    assert isinstance(tokenizer, KimiTokenizer)
    assert tokenizer.vocab_size == VOCABULARY


def test_transformers_tokenizer_is_an_option_and_gives_the_same_ids_for_bytes(tmp_path: Path) -> None:
    write_fast_tokenizer(write_target(tmp_path))
    write_kimi_tokenizer(tmp_path, START, words=())
    ours, theirs = open_tokenizer(tmp_path), open_tokenizer(tmp_path, tokenizer="transformers")
    assert not isinstance(theirs, KimiTokenizer)
    assert ours.encode(TEXT) == theirs.encode(TEXT, add_special_tokens=False)
    assert ours.decode(ours.encode(TEXT)) == TEXT


@pytest.mark.parametrize("tokenizer", ["auto", "transformers"])
def test_a_transformers_tokenizer_with_other_special_ids_is_refused_in_one_line(tmp_path: Path, tokenizer: str) -> None:
    write_fast_tokenizer(write_target(tmp_path), misplaced=True)
    with pytest.raises(EyasError, match=r"16 of Kimi's special tokens at other ids: .*535 should be </think> and decodes to ''") as caught:
        open_tokenizer(tmp_path, tokenizer=tokenizer)
    assert "\n" not in str(caught.value)
    assert "target.tokenizer: tiktoken" in str(caught.value)


def test_other_models_are_not_read_with_kimis_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(EyasError, match=r"reads Kimi's vocabulary, and .* is a llama model"):
        open_tokenizer(write_kimi_tokenizer(write_target(tmp_path, "llama"), START), tokenizer="tiktoken")


def test_what_each_chat_has_of_its_own_is_no_template_argument() -> None:
    assert TargetConfig(model="x", template={"thinking": False}).template == {"thinking": False}
    with pytest.raises(ValidationError, match="template: tools is no argument to choose"):
        TargetConfig(model="x", template={"tools": []})
