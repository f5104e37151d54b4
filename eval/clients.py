"""Client of a server with SGLang's HTTP interface: requests that are measured, with the engine's own acceptance counts per request.

``connect`` gives this client, or vLLM's (eval/client_vllm.py), whichever the server needs.

Requests go out one at a time (batch 1 is what speculation is for). Field names are SGLang's; the older ones (before 0.5.12) are
understood too. The embedded server adds two things: the request field ``speculative`` that names the drafter of this request or "none",
and ``meta_info["eyas"]``, the seconds spent in each part of the cycle.
"""

import time
from collections.abc import Sequence
from typing import Any

from eval.client_vllm import VllmClient
from eval.connection import Connection, EngineClient, message
from eval.reply import Counts, Reply
from eyas.errors import EyasError

__all__ = ["BASELINE", "AnyClient", "Client", "Counts", "Reply", "VllmClient", "connect"]

BASELINE = "none"
FLUSH_LIMIT_S, FLUSH_POLL_S = 20.0, 0.05


class Client(EngineClient):
    """Client of SGLang and of the embedded server."""

    def ready(self) -> None:
        """Ask the server for one token (/health_generate); returns when it answered."""
        self._server.request("GET", "/health_generate")

    def flush_cache(self) -> None:
        """Empty the prefix cache, so that no request finds another's prompt computed.

        A server refuses (400) while it still clears up behind a reply whose last token is out already, so that is asked again for a while.
        """
        refused_until = time.monotonic() + FLUSH_LIMIT_S
        while (answer := self._server.answer("POST", "/flush_cache")).status_code != 200:
            if answer.status_code != 400 or time.monotonic() > refused_until:
                raise EyasError(f"{self.url}/flush_cache answered {answer.status_code}: {message(answer.text)}")
            time.sleep(FLUSH_POLL_S)

    def server_info(self) -> dict[str, Any]:
        """The server's resolved arguments (/server_info, /get_server_info on older SGLang)."""
        older = self._server.answer("GET", "/server_info").status_code == 404
        return self._server.object("GET", "/get_server_info" if older else "/server_info")

    def generate(
        self, prompt_ids: Sequence[int], max_new_tokens: int, temperature: float, seed: int, speculative: str | None = None
    ) -> Reply:
        """Stream one completion of exactly these prompt tokens through /generate.

        ``seed`` fixes the sampling where the engine can (temperature > 0). ``speculative``: a drafter's name or "none"; None sends no such
        field, for a server that has one fixed behaviour.
        """
        sampling: dict[str, Any] = {"max_new_tokens": max_new_tokens, "temperature": temperature}
        if temperature > 0:
            sampling["sampling_seed"] = seed
        body: dict[str, Any] = {"input_ids": list(prompt_ids), "sampling_params": sampling, "stream": True}
        if speculative is not None:
            body["speculative"] = speculative
        ids: list[int] = []
        pieces: list[int] = []
        last: dict[str, Any] = {}
        first_s, first_tokens, total_s = 0.0, 0, 0.0
        for now, event in self._server.events("/generate", body):
            meta = event.get("meta_info")
            if not isinstance(meta, dict):
                raise EyasError(f"{self.url}/generate sent a piece without meta_info: is it an SGLang-style server?")
            new = list(event.get("output_ids") or [])
            # SGLang's stream carries all ids so far, or only the new ones (--stream-output): the count of tokens tells which.
            known, ids = len(ids), new if len(new) == meta.get("completion_tokens") else ids + new
            pieces += [len(ids) - known] if len(ids) > known else []
            if ids and not first_tokens:
                first_s, first_tokens = now, len(ids)
            last, total_s = event, now
        meta = last.get("meta_info", {})
        if not meta.get("finish_reason"):
            raise EyasError(f"{self.url}/generate: the stream ended before the reply was finished; look at the server's log")
        reason = _reason(meta["finish_reason"])
        if reason == "abort":
            raise EyasError(f"{self.url}/generate aborted the request: {message(meta['finish_reason']) or 'it does not say why'}")
        if not ids:
            raise EyasError(f"{self.url}/generate: the reply holds no output_ids: this server is too old to be measured")
        return Reply(
            prompt_tokens=int(meta.get("prompt_tokens", len(prompt_ids))),
            completion_tokens=int(meta.get("completion_tokens", len(ids))),
            cached_tokens=int(meta.get("cached_tokens") or 0),
            output_ids=tuple(ids),
            text=str(last.get("text") or ""),
            finish_reason=reason,
            first_token_s=first_s,
            first_tokens=first_tokens,
            total_s=total_s,
            counts=_counts(meta),
            parts=dict(meta.get("eyas") or {}),
            pieces=tuple(pieces),
        )

    def chat(self, messages: Sequence[dict[str, str]], max_new_tokens: int, temperature: float, speculative: str | None = None) -> Reply:
        """One chat completion, not streamed (SGLang gives meta_info only then), rendered by the *server's* chat template.

        ``output_ids`` is empty and the times are those of the whole request.
        """
        body: dict[str, Any] = {
            "model": "default",
            "messages": list(messages),
            "max_tokens": max_new_tokens,
            "temperature": temperature,
            "return_meta_info": True,
        }
        if speculative is not None:
            body["speculative"] = speculative
        start = time.perf_counter()
        answer = self._server.object("POST", "/v1/chat/completions", body)
        total_s = time.perf_counter() - start
        try:
            choice, usage = answer["choices"][0], answer["usage"]
            meta = choice.get("meta_info") or {}
            return Reply(
                prompt_tokens=int(usage["prompt_tokens"]),
                completion_tokens=int(usage["completion_tokens"]),
                cached_tokens=int(meta.get("cached_tokens") or 0),
                output_ids=(),
                text=str(choice["message"].get("content") or ""),
                finish_reason=_reason(choice["finish_reason"]),
                first_token_s=total_s,
                first_tokens=int(usage["completion_tokens"]),
                total_s=total_s,
                counts=_counts(meta),
                parts=dict(meta.get("eyas") or {}),
            )
        except (KeyError, IndexError, TypeError) as error:
            raise EyasError(f"{self.url}/v1/chat/completions: the answer is no chat completion ({error!r})") from None


AnyClient = Client | VllmClient


def connect(url: str, timeout_s: float = 600.0) -> AnyClient:
    """The client that speaks the server's language: vLLM signs its list of models, everything else is taken for SGLang-style.

    Raises EyasError when no server answers.
    """
    with Connection(url, timeout_s) as server:
        answer = server.answer("GET", "/v1/models")
    signed = answer.status_code == 200 and '"owned_by":"vllm"' in answer.text.replace(" ", "")
    return VllmClient(url, timeout_s) if signed else Client(url, timeout_s)


def _reason(value: Any) -> str:
    """SGLang writes {"type": "stop", ...} in meta_info and "stop" in chat answers."""
    return str(value.get("type", value)) if isinstance(value, dict) else str(value)


def _counts(meta: dict[str, Any]) -> Counts | None:
    """A request's speculation from meta_info; None when it ran without."""
    verify_ct = int(meta.get("spec_verify_ct") or 0)
    if not verify_ct:
        return None
    histogram = tuple(int(count) for count in _first(meta, "spec_correct_drafts_histogram", "spec_accept_histogram") or ())
    correct = _first(meta, "spec_num_correct_drafts", "spec_accepted_drafts", "spec_accept_token_num")
    if correct is None:
        correct = sum(accepted * count for accepted, count in enumerate(histogram))
    proposed = _first(meta, "spec_num_proposed_drafts", "spec_proposed_drafts", "spec_draft_token_num")
    length = meta.get("spec_accept_length")
    return Counts(
        verify_ct, int(correct), None if proposed is None else int(proposed), histogram, None if length is None else float(length)
    )


def _first(meta: dict[str, Any], *names: str) -> Any:
    return next((meta[name] for name in names if meta.get(name) is not None), None)
