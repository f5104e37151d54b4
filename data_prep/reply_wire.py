"""The wire to a reply server: a prompt goes out as token ids, the very ids that were generated come back.

A server signs its list of models. SGLang and the embedded server are asked through /generate, which has given ids in every version; all
others (vLLM, routers) through OpenAI's /v1/completions, which takes ids as a prompt and gives ids for ``return_token_ids``. From a server
that knows that field not, the text is tokenised again, and counts only where it comes out as many tokens as were generated.
"""

from dataclasses import dataclass
from typing import Any

from data_prep.prompts import Messages, Unusable
from data_prep.sampler import Request, Sampling
from eyas.errors import EyasError
from eyas.tokenizer import ChatTokenizer

GENERATE, COMPLETIONS = "/generate", "/v1/completions"
_GENERATES = ("sglang", "eyas")
# As the model alone would have it: servers otherwise take what generation_config.json says.
_PLAIN = {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}


class NoAnswer(Exception):
    """A request that got no reply and may get one when it is sent again; ``reason`` is what it is counted under if it never does."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason


@dataclass(frozen=True)
class Model:
    """What a server serves: its name there, the path that takes token ids, and how many tokens a request may have (None: not told)."""

    name: str
    path: str
    context: int | None


@dataclass(frozen=True)
class Answer:
    """A reply as the server gave it: the generated ids, with the end token if it came, and 'stop' or 'length'."""

    ids: list[int]
    finish_reason: str
    by_text: bool = False


@dataclass(frozen=True)
class Asking:
    """What is the same for all requests of a set: how tokens are chosen, which ones end a reply, and the tokenizer."""

    sampling: Sampling
    stop_ids: tuple[int, ...]
    tokenizer: ChatTokenizer

    def body(self, model: Model, request: Request) -> dict[str, Any]:
        """The JSON that asks ``model`` for ``request``. A reply of temperature > 0 has its prompt's own seed, for servers that heed it."""
        temperature = self.sampling.temperature(request)
        chosen = {"temperature": temperature, "top_p": self.sampling.top_p, **_PLAIN, "stop_token_ids": list(self.stop_ids)}
        seed = {} if temperature == 0 else {"sampling_seed" if model.path == GENERATE else "seed": self.sampling.draw_seed(request)}
        if model.path == GENERATE:
            return {"input_ids": request.prompt_ids, "sampling_params": {**chosen, **seed, "max_new_tokens": request.max_new_tokens}}
        wanted = {"return_token_ids": True, "skip_special_tokens": False}
        return {"model": model.name, "prompt": request.prompt_ids, "max_tokens": request.max_new_tokens, **chosen, **seed, **wanted}

    def read(self, model: Model, request: Request, value: Any) -> Answer:
        """The reply in a server's JSON.

        Raises NoAnswer for an aborted request or what is no reply, Unusable for one that no row can be made of, EyasError when the server
        does not answer the tokens that were sent.
        """
        try:
            said = _generated(value) if model.path == GENERATE else _completed(value)
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise NoAnswer("what the server sent is no reply", f"{type(error).__name__} {error} in {str(value)[:100]}") from None
        if said.reason == "abort":
            raise NoAnswer("aborted by the server", said.detail)
        if said.reason not in ("stop", "length"):
            raise Unusable(f"ended by the server: {said.reason}")
        if said.prompt_tokens not in (None, len(request.prompt_ids)) or said.prompt_ids not in (None, request.prompt_ids):
            sent = len(request.prompt_ids)
            raise EyasError(f"it answers a prompt of {said.prompt_tokens} tokens where {sent} were sent: it changes prompts")
        ids = self._retokenised(said) if said.ids is None else said.ids
        if said.reason == "stop" and (not ids or ids[-1] not in self.stop_ids):
            if said.matched not in self.stop_ids:
                raise Unusable("stopped without an end token of the target")
            ids = [*ids, said.matched]
        if not 0 < len(ids) <= request.max_new_tokens:
            raise NoAnswer("what the server sent is no reply", f"{len(ids)} tokens where 1 to {request.max_new_tokens} were asked")
        return Answer(ids, said.reason, by_text=said.ids is None)

    def _retokenised(self, said: "_Said") -> list[int]:
        if said.tokens is None:
            raise EyasError("it gives neither token ids nor the number of tokens: nothing tells which tokens were generated")
        ids = list(self.tokenizer.encode(said.text, add_special_tokens=False))
        again = self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        if said.reason == "stop" and (not ids or ids[-1] not in self.stop_ids):
            ids.append(said.matched if said.matched in self.stop_ids else self.stop_ids[0])
        # half a character, cut by the limit, is a mark that may well be one token itself
        if len(ids) != said.tokens or again != said.text or "\ufffd" in said.text:
            raise Unusable("text that does not come back as the tokens it was made of")
        return ids


@dataclass(frozen=True)
class _Said:
    """The fields of a reply, under whichever names they came."""

    reason: str
    detail: str
    ids: list[int] | None
    text: str
    tokens: int | None
    prompt_tokens: int | None
    prompt_ids: list[int] | None
    matched: Any


def _generated(value: Any) -> _Said:
    meta = value["meta_info"]
    ended = meta["finish_reason"]
    return _Said(
        ended["type"],
        str(ended.get("message") or ""),
        _ids(value["output_ids"]),
        "",
        None,
        meta.get("prompt_tokens"),
        None,
        ended.get("matched"),
    )


def _completed(value: Any) -> _Said:
    choice, usage = value["choices"][0], value.get("usage") or {}
    ids, matched = choice.get("token_ids"), choice.get("matched_stop", choice.get("stop_reason"))
    return _Said(
        str(choice["finish_reason"]),
        "",
        None if ids is None else _ids(ids),
        str(choice["text"]),
        usage.get("completion_tokens"),
        usage.get("prompt_tokens"),
        choice.get("prompt_token_ids"),
        matched,
    )


def _ids(values: Any) -> list[int]:
    if not all(isinstance(value, int) and value >= 0 for value in values):
        raise ValueError("token ids that are no numbers")
    return list(values)


def served_model(value: Any) -> Model:
    """What /v1/models tells of the first model. Raises NoAnswer for something else."""
    try:
        first = value["data"][0]
        context = first.get("max_model_len")
        path = GENERATE if first.get("owned_by") in _GENERATES else COMPLETIONS
        return Model(str(first["id"]), path, context if isinstance(context, int) else None)
    except (KeyError, IndexError, TypeError, AttributeError):
        raise NoAnswer("its /v1/models is no list of models", str(value)[:100]) from None


def tokenize_body(model: Model, messages: Messages, options: dict[str, Any]) -> dict[str, Any]:
    """The JSON that asks /tokenize for a chat's prompt; ``options`` are the template's arguments."""
    return {"model": model.name, "messages": messages} | ({"chat_template_kwargs": options} if options else {})
