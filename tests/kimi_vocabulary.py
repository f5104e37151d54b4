"""A small tokenizer in the files that Moonshot publishes: tiktoken.model (base64 of a token, its rank) and tokenizer_config.json."""

import base64
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eyas.files import read_object
from eyas.kimi_tokenizer import SPECIAL

PLAIN = ("<think>", "</think>", "<|tool_call", "<|tool_calls")
"""Marks that tokenizer_config.json does not call special: a reply's text shows them."""
WORDS = ("hello", " hello", " world", " the", "ing", "tool", "ü", "你", "你好")
"""Made of their own beginnings, as byte pairs merge: 'hello' brings 'he', 'hel' and 'hell' along."""


def write_kimi_tokenizer(folder: Path, special_from: int = 163584, words: Sequence[str] = WORDS) -> Path:
    """Write both files into ``folder``, which may hold other files, and return it.

    Args:
        folder: made where it is not there. A tokenizer_config.json in it keeps its other entries (such as the class that loads a
            tokenizer.json beside it); without one it is written as published, to be loaded by code of the repository.
        special_from: where the 256 special tokens begin, [BOS] first and [PAD] last; that many tokens come before them, so the model's
            ``vocab_size`` is ``special_from + 256``. The default is the real start; a tiny model can do with 512 (vocabulary 768).
        words: tokens beside the 256 bytes. () leaves bytes alone, as a byte-level tokenizer without merges has them.

    The first 256 ranks are the bytes in the order of ``sorted(pre_tokenizers.ByteLevel.alphabet())``: '!' is 0, '~' is 93. What is left up
    to ``special_from`` is filled with tokens that no text can have (they are not UTF-8).
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokens = list(dict.fromkeys([*_bytes(), *(word for text in words for word in _beginnings(text.encode()))]))
    if len(tokens) > special_from:
        raise ValueError(f"{len(tokens)} tokens do not fit below {special_from}")
    tokens += [b"\xff\xff" + number.to_bytes(3, "big") for number in range(len(tokens), special_from)]
    lines = [f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(tokens)]
    (folder / "tiktoken.model").write_text("".join(lines))
    settings = folder / "tokenizer_config.json"
    published = {
        "tokenizer_class": "TikTokenTokenizer",
        "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1000000000000000019884624838656,
    }
    values = (read_object(settings) if settings.is_file() else published) | {
        "added_tokens_decoder": {str(special_from + place): _added(name) for name, place in SPECIAL.items()},
        "bos_token": "[BOS]",
        "eos_token": "[EOS]",
        "pad_token": "[PAD]",
        "unk_token": "[UNK]",
    }
    settings.write_text(json.dumps(values, indent=1))
    return folder


def _bytes() -> list[bytes]:
    """All single bytes: those that print stand for themselves, and come first."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    return [bytes([value]) for value in [*printable, *(value for value in range(256) if value not in printable)]]


def _beginnings(word: bytes) -> list[bytes]:
    return [word[:length] for length in range(2, len(word) + 1)]


def _added(name: str) -> dict[str, Any]:
    flags = dict.fromkeys(("lstrip", "normalized", "rstrip", "single_word"), False)
    return {"content": name, "special": not name.startswith(PLAIN), **flags}
