"""The wire: what SGLang 0.5.23's clients send and read, as far as the embedded server serves it.

A request field that would change the reply and is not served is refused by name; at its neutral value it is accepted. Two additions are
ours: the request field ``speculative`` (a drafter's name, or "none") and ``meta_info["eyas"]`` (seconds and counts by part).
"""

import time
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, model_validator

from eval.engine import Generation

GREEDY_BELOW = 1e-6  # SGLang's: a temperature below it is greedy

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "top_p": (1,),
    "top_k": (-1, 1 << 30),
    "min_p": (0,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "min_new_tokens": (0,),
    "min_tokens": (0,),
    "n": (1,),
    "stop": ("", []),
    "logit_bias": ({},),
    "logprobs": (False,),
    "return_logprob": (False,),
    "return_hidden_states": (False,),
    "spaces_between_special_tokens": (True,),
    "no_stop_trim": (False,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "log_metrics": (True, False),
}
_IGNORED = ("model", "user", "rid")  # name a request or its sender; nothing is computed from them


class Wire(BaseModel):
    """Base of requests: null means not given, unsupported fields are errors unless neutral."""

    model_config = ConfigDict(extra="forbid")
    ignored: ClassVar[tuple[str, ...]] = ()

    @model_validator(mode="before")
    @classmethod
    def _drop_neutral(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        kept = {}
        for name, value in values.items():
            if value is None or name in cls.ignored:
                continue
            if name in cls.model_fields:
                kept[name] = value
            elif name not in _NEUTRAL or value not in _NEUTRAL[name]:
                raise ValueError(f"{name} = {str(value)[:60]!s} is not supported by the embedded server")
        return kept


class SamplingParams(Wire):
    """``sampling_params`` of /generate, SGLang's names and defaults."""

    max_new_tokens: int = Field(128, ge=1)
    temperature: float = Field(1.0, ge=0, le=100, allow_inf_nan=False)
    sampling_seed: int | None = None
    stop_token_ids: list[int] = Field(default_factory=list)
    ignore_eos: bool = False
    skip_special_tokens: bool = True


class GenerateRequest(Wire):
    """/generate: one prompt, as text or as token ids."""

    ignored = _IGNORED

    text: str | None = None
    input_ids: list[int] | None = None
    sampling_params: SamplingParams = SamplingParams()
    stream: bool = False
    speculative: str | None = None

    @model_validator(mode="after")
    def _one_prompt(self) -> "GenerateRequest":
        if (self.text is None) == (self.input_ids is None):
            raise ValueError("give either text or input_ids")
        return self

    @property
    def sampling(self) -> SamplingParams:
        """How to sample, as in ``ChatRequest``."""
        return self.sampling_params


class TextPart(Wire):
    """A part of a message's content; only text is served."""

    type: str = Field(pattern="^text$")
    text: str


class Message(Wire):
    """A chat message."""

    role: str
    content: str | list[TextPart]
    name: str | None = None

    def plain(self) -> dict[str, str]:
        """As chat templates want it."""
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": self.role, "content": content} | ({"name": self.name} if self.name else {})


class StreamOptions(Wire):
    """``stream_options`` of a chat."""

    include_usage: bool = False


class ChatRequest(Wire):
    """/v1/chat/completions. Without a limit the reply may fill the context."""

    ignored = _IGNORED

    messages: list[Message] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    temperature: float = Field(1.0, ge=0, le=100, allow_inf_nan=False)
    seed: int | None = None
    stop_token_ids: list[int] = Field(default_factory=list)
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    return_meta_info: bool = False
    return_spec_tokens_details: bool = False
    speculative: str | None = None

    @model_validator(mode="after")
    def _meta_info_is_not_streamed(self) -> "ChatRequest":
        if self.stream and self.return_meta_info:
            raise ValueError("return_meta_info is not given with stream=true (SGLang's rule); use return_spec_tokens_details or /generate")
        return self

    @property
    def sampling(self) -> SamplingParams:
        """The same choices under /generate's names."""
        return SamplingParams(
            max_new_tokens=self.max_completion_tokens or self.max_tokens or 1 << 30,
            temperature=self.temperature,
            sampling_seed=self.seed,
            stop_token_ids=self.stop_token_ids,
            ignore_eos=self.ignore_eos,
            skip_special_tokens=self.skip_special_tokens,
        )


class TokenizeRequest(Wire):
    """/tokenize: a text, or a chat with the generation prompt behind it."""

    ignored = _IGNORED

    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _one_thing(self) -> "TokenizeRequest":
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        if not self.add_generation_prompt:
            raise ValueError("add_generation_prompt = false is not supported by the embedded server")
        return self


class DetokenizeRequest(Wire):
    """/detokenize: token ids."""

    ignored = _IGNORED

    tokens: list[int]
    skip_special_tokens: bool = True


def meta_info(request_id: str, generation: Generation, draft_steps: int, latency_s: float) -> dict[str, Any]:
    """``meta_info`` of a finished reply. SGLang's rules: the last cycle counts untrimmed, the length divides all completion tokens."""
    tokens = len(generation.output_ids)
    info: dict[str, Any] = {
        "id": request_id,
        "finish_reason": finish_reason(generation),
        "prompt_tokens": len(generation.prompt_ids),
        "completion_tokens": tokens,
        "cached_tokens": 0,
        "e2e_latency": latency_s,
    }
    if generation.verify_ct:
        info |= spec_details(generation, draft_steps)
    info["eyas"] = {
        "seconds": generation.seconds,
        "counts": generation.counts,
        "accepted": generation.accepted,
        "trimmed": generation.trimmed,
        "first_token_s": generation.first_token_s,
        "prefill_s": generation.prefill_s,
        "decode_s": generation.decode_s,
    }
    return info


def partial_meta_info(request_id: str, prompt_tokens: int, tokens: int) -> dict[str, Any]:
    """``meta_info`` of a piece of a stream that goes on."""
    return {
        "id": request_id,
        "finish_reason": None,
        "prompt_tokens": prompt_tokens,
        "completion_tokens": tokens,
        "cached_tokens": 0,
    }


def spec_details(generation: Generation, draft_steps: int) -> dict[str, Any]:
    """SGLang's per-request numbers of speculation."""
    correct, proposed = sum(generation.accepted), generation.verify_ct * draft_steps
    return {
        "spec_accept_rate": correct / proposed if proposed else 0.0,
        "spec_accept_length": len(generation.output_ids) / generation.verify_ct if generation.verify_ct else 0.0,
        "spec_num_correct_drafts": correct,
        "spec_num_proposed_drafts": proposed,
        "spec_verify_ct": generation.verify_ct,
        "spec_correct_drafts_histogram": [generation.accepted.count(drafts) for drafts in range(draft_steps + 1)],
    }


def finish_reason(generation: Generation) -> dict[str, Any]:
    """SGLang's object form; chat answers carry its ``type`` alone."""
    if generation.finish_reason == "stop":
        return {"type": "stop", "matched": generation.output_ids[-1]}
    return {"type": "length", "length": len(generation.output_ids)}


def usage(generation: Generation) -> dict[str, Any]:
    """Token counts of a chat answer."""
    prompt, tokens = len(generation.prompt_ids), len(generation.output_ids)
    return {"prompt_tokens": prompt, "completion_tokens": tokens, "total_tokens": prompt + tokens, "prompt_tokens_details": None}


def chat_answer(
    request: ChatRequest, request_id: str, model: str, text: str, generation: Generation, info: dict[str, Any], draft_steps: int
) -> dict[str, Any]:
    """A whole chat completion."""
    reason = finish_reason(generation)
    choice: dict[str, Any] = {
        "index": 0,
        "message": {"role": "assistant", "content": text},
        "logprobs": None,
        "finish_reason": reason["type"],
        "matched_stop": reason.get("matched"),
    }
    if request.return_meta_info:
        choice["meta_info"] = info
    answer = {
        "id": request_id,
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model,
        "choices": [choice],
        "usage": usage(generation),
    }
    return answer | sglext(request, generation, draft_steps)


def sglext(request: ChatRequest, generation: Generation, draft_steps: int) -> dict[str, Any]:
    """SGLang's extension object, when asked for."""
    wanted = request.return_spec_tokens_details and generation.verify_ct
    return {"sglext": {"spec_tokens_details": spec_details(generation, draft_steps)}} if wanted else {}


def chat_chunk(request_id: str, model: str, delta: dict[str, Any], reason: dict[str, Any] | None = None) -> dict[str, Any]:
    """One piece of a streamed chat completion."""
    choice = {
        "index": 0,
        "delta": delta,
        "logprobs": None,
        "finish_reason": reason and reason["type"],
        "matched_stop": reason and reason.get("matched"),
    }
    return {"id": request_id, "object": "chat.completion.chunk", "created": int(time.time()), "model": model, "choices": [choice]}


def error_body(message: str, status: int, param: str | None = None) -> dict[str, Any]:
    """OpenAI's error object."""
    kind = "invalid_request_error" if status < 500 else "api_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}
