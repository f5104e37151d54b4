"""Chat template and loss mask, from token ids alone.

A reply is what a template renders between the generation prompt, with which it announces it, and its end token; no marker text has to be
known. Mostly what is rendered before a reply is the beginning of what is rendered with it. Templates of thinking models rewrite earlier
turns, some as soon as a reply is there; then the generation prompt itself is found again, as often as in the prompt, or the conversation is
unusable, never half masked. Prompts are taken as a server renders them, so a reply that later ones show otherwise makes a row of its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError

from data_prep.prompts import Messages, Unusable
from eyas.errors import EyasError
from eyas.tokenizer import ChatTokenizer

THINK = ("<think>", "</think>")
THINKING_OFF: dict[str, Any] = {"thinking": False, "enable_thinking": False}
"""Template arguments that switch thinking off, under both names in use (Kimi and DeepSeek, Qwen and GLM)."""


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


def prompt_ids(tokenizer: ChatTokenizer, messages: Messages, options: dict[str, Any] | None = None) -> list[int]:
    """The prompt as a server renders it, generation prompt appended; ``options`` are the template's arguments.

    Raises Unusable when the template refuses the messages.
    """
    return _render(tokenizer, messages, generation_prompt=True, options=options)


def conversation(
    tokenizer: ChatTokenizer, messages: Messages, eos_ids: Sequence[int], options: dict[str, Any] | None = None
) -> list[Tokens]:
    """Rows of a conversation that comes with its replies: each reply behind what a server would have seen when it wrote it.

    A reply that the next prompt holds as it was written shares the row with the next one; where the template rewrites it (thinking is
    taken out of history), its row ends with it and the next reply gets a row of its own. Every reply is supervised once, up to and
    including its end token, thinking and tool calls included; headers, other roles, and an empty thinking block (templates put it there,
    the target never wrote it) are not.

    Thinking comes in the message's ``reasoning_content``. A template that leaves an empty block even for the last reply, as Kimi's, gets
    it back between the marks; with thinking off (``options``) it is left out, as it was asked.

    Raises Unusable when the template refuses the messages, shows a reply otherwise than its prompt announced it, ends it without an end
    token, or does not show its thinking, and when a reply's own text holds an end token or thinking marks that the template adds.
    """
    asked = next((index for index, message in enumerate(messages) if message["role"] == "user"), len(messages))
    replies = [index for index, message in enumerate(messages) if message["role"] == "assistant" and index > asked]
    if not replies:
        raise Unusable("no reply")
    rows, think = [Tokens([], [])], think_ids(tokenizer)
    for index in replies:
        prompt = _render(tokenizer, messages[:index], generation_prompt=True, options=options)
        reply, first = _reply(tokenizer, messages[: index + 1], prompt, eos_ids, think, options)
        known = rows[-1].supervised if prompt[: len(rows[-1].ids)] == rows[-1].ids else []
        unseen = len(prompt) + first - len(known)
        row = Tokens(prompt + reply, known + [False] * unseen + [True] * (len(reply) - first))
        rows[-1:] = [row] if known or not rows[-1].ids else [rows[-1], row]
    return rows


def _reply(
    tokenizer: ChatTokenizer,
    messages: Messages,
    prompt: list[int],
    eos_ids: Sequence[int],
    think: tuple[int, int] | None,
    options: dict[str, Any] | None,
) -> tuple[list[int], int]:
    """The last message as the target wrote it behind ``prompt``, end token included, and where in it the target's own tokens begin."""
    message = messages[-1]
    if any(set(tokenizer.encode(text, add_special_tokens=False)) & set(eos_ids) for text in _texts(message)):
        raise Unusable("end token inside a reply")
    ids = _render(tokenizer, messages, generation_prompt=False, options=options)
    start = len(prompt) if ids[: len(prompt)] == prompt else _announced(tokenizer, messages, ids, prompt, options)
    end = next((place for place in range(start, len(ids)) if ids[place] in eos_ids), -1)
    if end < 0:
        raise Unusable("no end token behind a reply")
    reply, first = ids[start : end + 1], _skip_empty_thinking(tokenizer, ids, start, end, think) - start
    if first and think and reply[first] == think[0]:
        raise Unusable("thinking inside a reply's text, which the template takes as reasoning_content")
    reasoning = message.get("reasoning_content")
    if not reasoning or (think and _last_word(tokenizer, prompt) == think[1]):
        return reply, first
    thought = tokenizer.encode(reasoning, add_special_tokens=False)
    if think and set(thought) & set(think):
        raise Unusable("thinking marks inside a reply's reasoning")
    if think and reply[:first] in ([think[1]], list(think)):
        return reply[: first - 1] + thought + reply[first - 1 :], 0
    if reasoning.strip() not in str(tokenizer.decode(reply)):
        raise Unusable("the chat template does not show the reply's reasoning")
    return reply, 0


def _last_word(tokenizer: ChatTokenizer, ids: list[int]) -> int | None:
    """The last token that is more than blanks."""
    return next((token for token in reversed(ids) if str(tokenizer.decode([token])).strip()), None)


def _texts(message: dict[str, Any]) -> list[str]:
    """What a message says in its own words."""
    calls = [str(call["function"]["arguments"]) for call in message.get("tool_calls", ())]
    return [message["content"], message.get("reasoning_content", ""), *calls]


def reply_row(prompt_ids: Sequence[int], reply_ids: Sequence[int]) -> Tokens:
    """Tokens of an answered prompt: the very ids that were generated, all of the reply supervised, its end token too if it came."""
    return Tokens([*prompt_ids, *reply_ids], [False] * len(prompt_ids) + [True] * len(reply_ids))


def _render(tokenizer: ChatTokenizer, messages: Messages, generation_prompt: bool, options: dict[str, Any] | None = None) -> list[int]:
    if tokenizer.chat_template is None:
        raise EyasError(f"the tokenizer in {tokenizer.name_or_path} has no chat template; put chat_template.jinja beside it")
    try:
        ids: Any = tokenizer.apply_chat_template(
            messages, add_generation_prompt=generation_prompt, tokenize=True, return_dict=False, **(options or {})
        )
    except TemplateError as error:
        raise Unusable(f"the chat template refuses it: {error}") from None
    return list(ids)


def _announced(tokenizer: ChatTokenizer, messages: Messages, ids: list[int], prompt: list[int], options: dict[str, Any] | None) -> int:
    """Where the last message begins in ``ids``: behind the last generation prompt, when there are as many as in ``prompt``."""
    history = _render(tokenizer, messages[:-1], generation_prompt=False, options=options)
    announcement = prompt[len(history) :] if prompt[: len(history)] == history else []
    places = _places(ids, announcement)
    if not announcement or len(places) != len(_places(prompt, announcement)):
        raise Unusable("the chat template shows a reply otherwise than its prompt announces it")
    return places[-1] + len(announcement)


def _places(ids: list[int], part: list[int]) -> list[int]:
    return [place for place in range(len(ids) - len(part) + 1) if ids[place : place + len(part)] == part]


def think_ids(tokenizer: ChatTokenizer) -> tuple[int, int] | None:
    """Ids of the two thinking marks when both are single tokens of this tokenizer."""
    found = [tokenizer.encode(mark, add_special_tokens=False) for mark in THINK]
    return (found[0][0], found[1][0]) if all(len(ids) == 1 for ids in found) else None


def _skip_empty_thinking(tokenizer: ChatTokenizer, ids: list[int], start: int, end: int, think: tuple[int, int] | None) -> int:
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


def _skip_blank(tokenizer: ChatTokenizer, ids: list[int], place: int, end: int) -> int:
    while place < end and not str(tokenizer.decode([ids[place]])).strip():
        place += 1
    return place
