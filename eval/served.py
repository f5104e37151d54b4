"""What a server is seen to do: how it renders and tokenises chats, and what it accepts step by step on a few greedy requests.

The steps of a request are the pieces of its stream: a server sends what a verify step brought as it comes. Where pieces and the engine's
own count of verify steps disagree (a stream interval, a proxy that gathers), there are no steps to be compared.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import httpx
import torch
from torch import Tensor

from eval.checks import Check, fault, not_checked, ok
from eval.clients import BASELINE, AnyClient
from eval.connection import Connection
from eval.measurement import BenchPrompt
from eval.replay import Served
from eval.reply import Reply
from eyas.errors import EyasError
from eyas.tokenizer import ChatTokenizer

COMPARED_CHATS = 8
_SHOWN = 40


@dataclass(frozen=True)
class Requests:
    """Greedy requests to one drafter: those whose steps are known, and of the others how many and why."""

    served: list[Served]
    unknown: int
    reason: str


def ask(client: AnyClient, prompts: Sequence[BenchPrompt], max_new_tokens: int, speculative: str | None) -> Requests:
    """Send each prompt's tokens, one after the other, greedily."""
    served, reasons = [], []
    for prompt in prompts:
        flush(client)
        reply = client.generate(prompt.prompt_ids, max_new_tokens, 0.0, 0, speculative)
        try:
            served.append(Served(prompt.prompt_ids, list(reply.output_ids), accepted_by_step(reply)))
        except EyasError as error:
            reasons.append(str(error))
    return Requests(served, len(reasons), reasons[0] if reasons else "")


def flush(client: AnyClient) -> None:
    """Empty the prefix cache where the server lets us: a cached prompt changes its times, not what is accepted behind it."""
    with suppress(EyasError):
        client.flush_cache()


def accepted_by_step(reply: Reply) -> list[int]:
    """Accepted drafts of every verify step but the last. Raises EyasError when the stream does not show them."""
    if reply.counts is None:
        raise EyasError("the server reports no verify steps: it does not speculate")
    first, *steps = reply.pieces or (0,)
    if first != 1 or len(steps) != reply.counts.verify_ct or sum(reply.pieces) != reply.completion_tokens:
        raise EyasError(f"the stream has {len(steps) + 1} pieces for 1 + {reply.counts.verify_ct} steps, so single steps cannot be told")
    return [tokens - 1 for tokens in steps[:-1]]


def aux_states(url: str, ids: Sequence[int]) -> Tensor | None:
    """The aux states [T, A] that the server hands its drafter along ``ids``; None from a server that does not return them.

    SGLang started with --enable-return-hidden-states does. What it has in its prefix cache it leaves out.
    """
    body = {"input_ids": list(ids), "sampling_params": {"max_new_tokens": 1, "temperature": 0.0}, "return_hidden_states": True}
    with Connection(url, 600.0) as server:
        answer = server.answer("POST", "/generate", body)
    states = (_answered(answer).get("meta_info") or {}).get("hidden_states")
    if not states or len(states[0]) != len(ids):
        return None
    return torch.tensor(states[0])


def speculative_field(info: dict[str, Any], name: str) -> str | None:
    """How to ask for the drafter: the embedded server wants its name (or its default's), others do what they were started with."""
    embedded = info.get("eyas")
    if not isinstance(embedded, dict):
        return None
    names = [name, embedded.get("default"), *embedded.get("drafters", [])]
    return next((known for known in names if known in embedded.get("drafters", [])), BASELINE)


class Rendering:
    """The server's tokenizer and chat template beside ours.

    Both through /tokenize and /detokenize, which all three engines have; older ones without are compared by number of prompt tokens.
    """

    def __init__(self, url: str, client: AnyClient, tokenizer: ChatTokenizer) -> None:
        self._server = Connection(url, 60.0)
        self._client, self._tokenizer = client, tokenizer

    def close(self) -> None:
        """Close the connection."""
        self._server.close()

    def checks(self, prompts: Sequence[BenchPrompt]) -> list[Check]:
        """Tokenizer, then template; the text that the template gives is compared even where the ids already differ."""
        chats = prompts[:COMPARED_CHATS]
        if self._ids({"prompt": "a", "add_special_tokens": False}) is None:
            return [not_checked("served: tokenizer", "the server has no /tokenize"), self._by_count(chats)]
        tokenizer = self._compare_texts(chats)
        return [tokenizer, self._compare_chats(chats, tokenizer.verdict == "ok")]

    def _compare_texts(self, prompts: Sequence[BenchPrompt]) -> Check:
        name = "served: tokenizer"
        texts = [message["content"] for prompt in prompts for message in prompt.messages]
        for text in texts:
            own = self._tokenizer.encode(text, add_special_tokens=False)
            theirs = self._ids({"prompt": text, "add_special_tokens": False}) or []
            if own != theirs:
                return fault(name, f"{_difference(own, theirs)} in {_short(text)}: the server runs with another tokenizer")
        return ok(name, f"the same ids for {len(texts)} messages")

    def _compare_chats(self, prompts: Sequence[BenchPrompt], same_tokenizer: bool) -> Check:
        name = "served: template"
        for prompt in prompts:
            if "tools" in prompt.template:  # of which /tokenize does not know
                continue
            kwargs = {"chat_template_kwargs": prompt.template} if prompt.template else {}
            ids = self._ids({"messages": prompt.messages, "add_generation_prompt": True, **kwargs})
            if ids is None:
                return self._by_count(prompts)
            rendered: Any = self._tokenizer.apply_chat_template(
                prompt.messages, add_generation_prompt=True, return_dict=False, **prompt.template
            )
            if ids == list(rendered):
                continue
            # As text, lest another tokenizer be taken for another template.
            own, theirs = str(self._tokenizer.decode(rendered)), self._text(ids)
            if theirs is not None and theirs != own:
                return fault(name, f"the server renders a chat as {_around(theirs, own)}, ours is {_around(own, theirs)}")
            if same_tokenizer:
                return fault(name, f"{_difference(list(rendered), ids)} in a chat")
        return ok(name, f"{len(prompts)} chats rendered as here")

    def _by_count(self, prompts: Sequence[BenchPrompt]) -> Check:
        name = "served: template"
        for prompt in prompts:
            if prompt.template:  # chats are asked with the server's defaults
                continue
            reply = self._client.chat(prompt.messages, 1, 0.0)
            if reply.prompt_tokens != len(prompt.prompt_ids):
                return fault(
                    name,
                    f"a chat has {reply.prompt_tokens} tokens on the server and {len(prompt.prompt_ids)} here: another template",
                )
        return ok(name, f"{len(prompts)} chats have as many tokens as here (the server does not tell which)")

    def _ids(self, body: dict[str, Any]) -> list[int] | None:
        tokens = _answered(self._server.answer("POST", "/tokenize", body)).get("tokens")
        return tokens if isinstance(tokens, list) else None

    def _text(self, ids: list[int]) -> str | None:
        body = _answered(self._server.answer("POST", "/detokenize", {"tokens": ids, "skip_special_tokens": False}))
        text = body.get("text", body.get("prompt"))
        return text if isinstance(text, str) else None


def _answered(answer: httpx.Response) -> dict[str, Any]:
    """The JSON object of a good answer, an empty one for a server that has no such route."""
    try:
        body = answer.json() if answer.status_code == 200 else {}
    except ValueError:
        return {}
    return body if isinstance(body, dict) else {}


def _difference(own: Sequence[int], theirs: Sequence[int]) -> str:
    place = next((i for i, (one, other) in enumerate(zip(own, theirs, strict=False)) if one != other), min(len(own), len(theirs)))
    one, other = own[place : place + 1], theirs[place : place + 1]
    return f"token {place} is {other[0] if other else 'missing'}, here {one[0] if one else 'the text ends there'},"


def _around(text: str, other: str) -> str:
    """Where ``text`` begins to differ from ``other``, with what is around it."""
    place = next((i for i, (one, two) in enumerate(zip(text, other, strict=False)) if one != two), min(len(text), len(other)))
    start = max(place - _SHOWN // 4, 0)
    return repr(("…" if start else "") + text[start : start + _SHOWN])


def _short(text: str) -> str:
    return repr(text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…")
