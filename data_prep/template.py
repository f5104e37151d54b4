"""Chat template and loss mask, from token ids alone.

A template has the prefix property: what it renders before a reply, generation prompt included, is the beginning of what it renders
with the reply. So a reply is what lies between that prefix and its end token, and no marker text has to be searched for. Where a
template breaks the property (it rewrites earlier turns) the row is unusable, never half masked.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from data_prep.prompts import Messages, Unusable
from eyas.errors import EyasError

THINK = ("<think>", "</think>")


@dataclass(frozen=True)
class Tokens:
    """A row's token ids, and which of them the target itself wrote (supervised); both of length T."""

    ids: list[int]
    supervised: list[bool]

    def check(self, max_length: int) -> None:
        """Raise Unusable for a row that cannot be trained on: too long, nothing supervised, or everything."""
        if len(self.ids) > max_length:
            raise Unusable("row over prep.max_length")
        if not any(self.supervised):
            raise Unusable("no supervised token")
        if all(self.supervised):
            raise Unusable("everything supervised")


def prompt_ids(tokenizer: PreTrainedTokenizerBase, messages: Messages) -> list[int]:
    """The prompt as a server renders it, generation prompt appended. Raises Unusable when the template refuses the messages."""
    return _render(tokenizer, messages, generation_prompt=True)


def conversation(tokenizer: PreTrainedTokenizerBase, messages: Messages, eos_ids: Sequence[int]) -> Tokens:
    """Tokens of a conversation that comes with its replies; every assistant turn is supervised up to and including its end token.

    Not supervised: headers, other roles, what the template adds behind an end token, and an empty thinking block (templates put it
    there, the target never wrote it). The row ends with the last reply's end token.

    Raises Unusable when the template refuses the messages, rewrites an earlier turn, ends a reply without an end token, or when a
    reply's own text holds one.
    """
    replies = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    if not replies:
        raise Unusable("no reply")
    ids = _render(tokenizer, messages[: replies[-1] + 1], generation_prompt=False)
    supervised = [False] * len(ids)
    end = 0
    think = _think_ids(tokenizer)
    for index in replies:
        if set(tokenizer.encode(messages[index]["content"], add_special_tokens=False)) & set(eos_ids):
            raise Unusable("end token inside a reply")
        start = _common_prefix(ids, _render(tokenizer, messages[:index], generation_prompt=True))
        end = next((place for place in range(start, len(ids)) if ids[place] in eos_ids), -1)
        if end < 0:
            raise Unusable("no end token behind a reply")
        start = _skip_empty_thinking(tokenizer, ids, start, end, think)
        supervised[start : end + 1] = [True] * (end + 1 - start)
    return Tokens(ids[: end + 1], supervised[: end + 1])


def reply_row(prompt_ids: Sequence[int], reply_ids: Sequence[int]) -> Tokens:
    """Tokens of an answered prompt: the very ids that were generated, all of the reply supervised, its end token too if it came."""
    return Tokens([*prompt_ids, *reply_ids], [False] * len(prompt_ids) + [True] * len(reply_ids))


def _render(tokenizer: PreTrainedTokenizerBase, messages: Messages, generation_prompt: bool) -> list[int]:
    if tokenizer.chat_template is None:
        raise EyasError(f"the tokenizer in {tokenizer.name_or_path} has no chat template; put chat_template.jinja beside it")
    try:
        ids: Any = tokenizer.apply_chat_template(messages, add_generation_prompt=generation_prompt, tokenize=True, return_dict=False)
    except TemplateError as error:
        raise Unusable(f"the chat template refuses it: {error}") from None
    return list(ids)


def _common_prefix(ids: list[int], prefix: list[int]) -> int:
    if ids[: len(prefix)] != prefix:
        raise Unusable("the chat template rewrites an earlier turn")
    return len(prefix)


def _think_ids(tokenizer: PreTrainedTokenizerBase) -> tuple[int, int] | None:
    """Ids of the two thinking marks when both are single tokens of this tokenizer."""
    found = [tokenizer.encode(mark, add_special_tokens=False) for mark in THINK]
    return (found[0][0], found[1][0]) if all(len(ids) == 1 for ids in found) else None


def _skip_empty_thinking(tokenizer: PreTrainedTokenizerBase, ids: list[int], start: int, end: int, think: tuple[int, int] | None) -> int:
    """Where the reply in ids[start : end + 1] begins once an empty thinking block at its head is left out.

    The opening mark may already belong to the generation prompt.
    """
    if think is None:
        return start
    opening, closing = think
    place = start
    if ids[start] == opening:
        place += 1
    elif ids[start - 1] != opening:
        return start
    place = _skip_blank(tokenizer, ids, place, end)
    return _skip_blank(tokenizer, ids, place + 1, end) if ids[place] == closing else start


def _skip_blank(tokenizer: PreTrainedTokenizerBase, ids: list[int], place: int, end: int) -> int:
    while place < end and not str(tokenizer.decode([ids[place]])).strip():
        place += 1
    return place
