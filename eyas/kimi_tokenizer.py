"""Kimi's tokenizer, read from the files that Moonshot publishes, without the Python code that lies beside them.

``tiktoken.model`` holds the tokens with their ranks, ``tokenizer_config.json`` the names of the special ones, ``chat_template.jinja`` the
template. Rules as in the published code (tokenization_kimi.py of K2.5): special tokens are the 256 ids behind the ranks, those without a
name are called reserved; a text is cut at special tokens, and stretches of more than 25,000 characters with or without a blank are cut,
before it is split by the pattern; marks in a text become their ids whoever wrote them, so a user who types <|im_end|> ends his turn, here
as in every server that renders chats through that code. Tools are declared in TypeScript (``kimi_tools``).
"""

import base64
import binascii
import re
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import tiktoken
from transformers.utils.chat_template_utils import render_jinja_template

from eyas.errors import EyasError
from eyas.files import read_object
from eyas.kimi_tools import declare, sort_keys
from eyas.tokenizer import ChatTokenizer

VOCABULARY = "tiktoken.model"
RESERVED = 256
SPECIAL = {
    "[BOS]": 0,
    "[EOS]": 1,
    "<|im_end|>": 2,
    "<|im_user|>": 3,
    "<|im_assistant|>": 4,
    "[EOT]": 9,
    "<|im_system|>": 10,
    "<|tool_calls_section_begin|>": 11,
    "<|tool_calls_section_end|>": 12,
    "<|tool_call_begin|>": 13,
    "<|tool_call_argument_begin|>": 14,
    "<|tool_call_end|>": 15,
    "<|im_middle|>": 17,
    "<|media_begin|>": 18,
    "<|media_content|>": 19,
    "<|media_end|>": 20,
    "<|media_pad|>": 21,
    "<think>": 22,
    "</think>": 23,
    "[UNK]": 254,
    "[PAD]": 255,
}
"""Special tokens of Kimi-K2.5 by their place among the last 256 ids of the vocabulary, which begin at 163584 of 163840."""
TEMPLATE = Path(__file__).with_name("kimi_template.jinja")
K2_SYSTEM = "You are Kimi, an AI assistant created by Moonshot AI."
"""What K2-Instruct is told where a chat has no system turn. K2.5 is told nothing."""
SINCE_THINKING = ("<|media_", "<think>", "</think>")
"""Beginnings of those that K2-Instruct need not have: it neither sees nor thinks."""
PATTERN = "|".join(
    (
        r"[\p{Han}]+",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
"""What a text is split by before byte pairs are merged (tokenization_kimi.py, the same in K2, K2-Thinking, K2.5 and K2.6)."""
PIECE, RUN = 400_000, 25_000
"""Characters of a text encoded at once, and of a stretch in it that is all blank or without a blank."""


class KimiTokenizer:
    """A ``tokenizer.ChatTokenizer`` over a folder. Its template is the folder's, where that ships none our own.

    Args:
        folder: holds tiktoken.model and tokenizer_config.json, and perhaps chat_template.jinja.
        vocab_size: of the model; the special tokens are its last 256 ids.
        thinks: whether the model thinks and sees, as K2.5 does and K2-Instruct does not.

    Raises:
        EyasError: a file is missing, broken, or of another model, or special tokens are not where they belong (each is named).
    """

    def __init__(self, folder: Path, vocab_size: int, thinks: bool) -> None:
        self.name_or_path, self.vocab_size = str(folder), vocab_size
        settings = read_object(folder / "tokenizer_config.json")
        ranks, start = read_ranks(folder / VOCABULARY), vocab_size - RESERVED
        if len(ranks) != start:
            told = f"it has {len(ranks)} tokens, the model's vocabulary of {vocab_size} has {start} before the special ones"
            raise EyasError(f"{folder / VOCABULARY}: {told}: the file is cut short or another model's")
        added = _added_tokens(settings, folder)
        ids = range(start, vocab_size)
        self._special = {str(added.get(place, {}).get("content", f"<|reserved_token_{place}|>")): place for place in ids}
        self._hidden = {place for place in ids if added.get(place, {}).get("special")}
        self._encoding = tiktoken.Encoding(VOCABULARY, pat_str=PATTERN, mergeable_ranks=ranks, special_tokens=self._special)
        longest_first = sorted(self._special, key=len, reverse=True)
        self._marks = re.compile(f"({'|'.join(map(re.escape, longest_first))})")
        named = {name: settings.get(name) for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
        self._named = {name: value.get("content") if isinstance(value, dict) else value for name, value in named.items() if value}
        self.chat_template = _template(folder, settings)
        if self.chat_template is None:
            self.chat_template = TEMPLATE.read_text(encoding="utf-8")
            self._named |= {"thinks": thinks, "default_system": None if thinks else K2_SYSTEM}
        require_special_ids(self, vocab_size, thinks)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of a text. Kimi's tokenizer puts no token around it, whatever ``add_special_tokens`` says."""
        ids = list[int]()
        for piece in self._marks.split(text):
            if piece in self._special:
                ids.append(self._special[piece])
            else:
                for part in _parts(piece):
                    ids += self._encoding.encode_ordinary(part)
        return ids

    def decode(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool = False, clean_up_tokenization_spaces: bool | None = None
    ) -> str:
        """The text of ids. ``skip_special_tokens`` leaves out those that tokenizer_config.json calls special: not <think>, not tool calls.

        Raises EyasError for an id that is not in the vocabulary.
        """
        ids = [int(token) for token in token_ids if not (skip_special_tokens and token in self._hidden)]
        if outside := [token for token in ids if not 0 <= token < self.vocab_size]:
            raise EyasError(f"token {outside[0]} is not in the vocabulary of {self.name_or_path}, which has {self.vocab_size}")
        return self._encoding.decode(ids)

    def apply_chat_template(
        self,
        conversation: Sequence[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        tokenize: bool = True,
        add_generation_prompt: bool = False,
        return_dict: bool = False,
        **options: Any,
    ) -> Any:
        """The chat as transformers would render it with the published code: a text, or its ids.

        Raises jinja2.TemplateError for messages that the template refuses.
        """
        if tools:
            tools = sort_keys(tools)
            options = {"tools_ts_str": declare(tools), **options}
        arguments: dict[str, Any] = {"tools": tools, "chat_template": self.chat_template, **self._named, **options}
        rendered: Any = render_jinja_template([list(conversation)], add_generation_prompt=add_generation_prompt, **arguments)
        text = rendered[0][0]
        if not tokenize:
            return text
        ids = self.encode(text)
        return {"input_ids": ids, "attention_mask": [1] * len(ids)} if return_dict else ids


def require_special_ids(tokenizer: ChatTokenizer, vocab_size: int, thinks: bool) -> None:
    """Raise EyasError, naming each of them, when special tokens of Kimi are not where the model has them.

    transformers' own backends have put those behind <|im_assistant|> elsewhere (transformers#45356: 163607 decoded to nothing).

    Args:
        tokenizer: of whichever kind.
        vocab_size: of the model; the special tokens are its last 256 ids.
        thinks: whether the model thinks and sees, as K2.5 does.
    """
    wrong = []
    for name, place in SPECIAL.items():
        if not thinks and name.startswith(SINCE_THINKING):
            continue
        token = vocab_size - RESERVED + place
        told, found = _told(tokenizer, token), tokenizer.encode(name, add_special_tokens=False)
        if told != name or list(found) != [token]:
            wrong.append(f"{token} should be {name} and decodes to {told!r}")
    if wrong:
        raise EyasError(
            f"the tokenizer in {tokenizer.name_or_path} has {len(wrong)} of Kimi's special tokens at other ids: {'; '.join(wrong)}. "
            f"Rows made with it would be wrong: use the published {VOCABULARY} and tokenizer_config.json, and target.tokenizer: tiktoken"
        )


def read_ranks(path: Path) -> dict[bytes, int]:
    """Tokens and their ranks 0 ... n-1 in a tiktoken.model: a line each, base64 of the token and its rank.

    Not through tiktoken's own reader, which keeps copies by path and would go on using one after the file has changed.
    """
    ranks: dict[bytes, int] = {}
    number = 0
    try:
        for number, line in enumerate(path.read_bytes().splitlines(), 1):  # noqa: B007 (told when a line is broken)
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
    except OSError as error:
        raise EyasError(f"cannot read {path}: {error.strerror or error}") from None
    except (ValueError, binascii.Error):
        raise EyasError(f"{path}, line {number}: is no base64 token with its rank; fetch the file again") from None
    if sorted(ranks.values()) != list(range(len(ranks))) or not ranks:
        raise EyasError(f"{path}: its {len(ranks)} ranks are not 0 to {max(len(ranks) - 1, 0)}; fetch the file again")
    return ranks


def _told(tokenizer: ChatTokenizer, token: int) -> str:
    try:
        return str(tokenizer.decode([token]))
    except (EyasError, IndexError, KeyError, OverflowError, TypeError, ValueError):  # ids that the tokenizer does not have
        return ""


def _added_tokens(settings: dict[str, Any], folder: Path) -> dict[int, dict[str, Any]]:
    found = settings.get("added_tokens_decoder")
    if not isinstance(found, dict) or not all(key.isdecimal() and isinstance(value, dict) for key, value in found.items()):
        raise EyasError(f"{folder / 'tokenizer_config.json'}: added_tokens_decoder, which names the special tokens, is missing or broken")
    return {int(key): value for key, value in found.items()}


def _template(folder: Path, settings: dict[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    told = settings.get("chat_template")
    return told if isinstance(told, str) else None


def _parts(text: str) -> Iterator[str]:
    """The text cut where the published code cuts it, which keeps tiktoken's matching from running out of stack."""
    for first in range(0, len(text), PIECE):
        piece = text[first : first + PIECE]
        cuts = [cut for run in re.finditer(r"\s+|\S+", piece) for cut in islice(range(run.start(), run.end(), RUN), 1, None)]
        for start, end in zip([0, *cuts], [*cuts, len(piece)], strict=True):
            yield piece[start:end]
