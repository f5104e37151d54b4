"""Client of a server with SGLang's HTTP interface: requests that are measured, with the engine's own acceptance counts per request.

Requests go out one at a time (batch 1 is what speculation is for). Field names are SGLang's; the older ones (before 0.5.12) are
understood too. The embedded server adds two things: the request field ``speculative`` that names the drafter of this request or "none",
and ``meta_info["eyas"]``, the seconds spent in each part of the cycle.
"""

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

import httpx

from eyas.errors import EyasError

BASELINE = "none"
_LOOPBACK = {"127.0.0.1", "localhost", "::1"}


@dataclass(frozen=True)
class Counts:
    """One request's speculation, as the engine counted it."""

    verify_ct: int
    correct: int
    """Accepted drafts of all cycles; the cut-off last cycle counts untrimmed in SGLang."""
    proposed: int | None
    histogram: tuple[int, ...]
    """Index: accepted drafts in a cycle; value: number of such cycles. Empty when the engine gives none."""
    engine_length: float | None
    """The acceptance length under the engine's own name and rule (SGLang: all completion tokens / verify steps)."""


@dataclass(frozen=True)
class Reply:
    """What one request brought and how long it took, in seconds from sending."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    output_ids: tuple[int, ...]
    text: str
    finish_reason: str
    first_token_s: float
    first_tokens: int
    """Tokens in the first piece of the stream: 1 unless the engine sends them late."""
    total_s: float
    counts: Counts | None
    """None when the request ran without speculation."""
    parts: dict[str, Any] = field(default_factory=dict)
    """The embedded engine's seconds and counts by part."""


class Client:
    """One connection to one server. Close it, or use it as a context manager.

    Every method raises EyasError in one line when the server is not there, dies, answers an error, or sends what is no reply.
    """

    def __init__(self, url: str, timeout_s: float = 600.0) -> None:
        parts = urlsplit(url)
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            raise EyasError(f"--url {url}: expected http://HOST:PORT")
        self.url = url.rstrip("/")
        # A proxy from the environment must not stand between us and a server on this machine.
        self._http = httpx.Client(
            base_url=self.url, timeout=httpx.Timeout(timeout_s, connect=10.0), trust_env=parts.hostname not in _LOOPBACK
        )

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection."""
        self._http.close()

    def ready(self) -> None:
        """Ask the server for one token (/health_generate); returns when it answered."""
        self._request("GET", "/health_generate")

    def flush_cache(self) -> None:
        """Empty the prefix cache, so that no request finds another's prompt computed."""
        self._request("POST", "/flush_cache")

    def server_info(self) -> dict[str, Any]:
        """The server's resolved arguments (/server_info, /get_server_info on older SGLang)."""
        response = self._send("GET", "/server_info", None)
        if response.status_code == 404:
            response = self._send("GET", "/get_server_info", None)
        return _object(_checked(response, "/server_info"), "/server_info")

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
        last: dict[str, Any] = {}
        first_s, first_tokens, total_s = 0.0, 0, 0.0
        start = time.perf_counter()
        for event in self._events("/generate", body):
            now = time.perf_counter() - start
            meta = event.get("meta_info")
            if not isinstance(meta, dict):
                raise EyasError(f"{self.url}/generate sent a piece without meta_info: is it an SGLang-style server?")
            new = list(event.get("output_ids") or [])
            # SGLang's stream carries all ids so far, or only the new ones (--stream-output): the count of tokens tells which.
            ids = new if len(new) == meta.get("completion_tokens") else ids + new
            if ids and not first_tokens:
                first_s, first_tokens = now, len(ids)
            last, total_s = event, now
        meta = last.get("meta_info", {})
        if not meta.get("finish_reason"):
            raise EyasError(f"{self.url}/generate: the stream ended before the reply was finished; look at the server's log")
        reason = _reason(meta["finish_reason"])
        if reason == "abort":
            raise EyasError(f"{self.url}/generate aborted the request: {_message(meta['finish_reason']) or 'it does not say why'}")
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
        answer = _object(self._request("POST", "/v1/chat/completions", body), "/v1/chat/completions")
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

    def _events(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Server-sent events of one streamed request, [DONE] excluded."""
        try:
            with self._http.stream("POST", path, json=body) as response:
                if response.status_code != 200:
                    response.read()
                    _checked(response, path)
                for line in response.iter_lines():
                    payload = line.removeprefix("data:").strip()
                    if not line.startswith("data:") or payload == "[DONE]":
                        continue
                    event = _parsed(payload, path)
                    if "error" in event:
                        raise EyasError(f"{self.url}{path} broke off: {_message(event)}")
                    yield event
        except httpx.HTTPError as error:
            raise self._gone(path, error) from None

    def _request(self, method: str, path: str, body: dict[str, Any] | None = None) -> httpx.Response:
        return _checked(self._send(method, path, body), path)

    def _send(self, method: str, path: str, body: dict[str, Any] | None) -> httpx.Response:
        try:
            return self._http.request(method, path, json=body)
        except httpx.HTTPError as error:
            raise self._gone(path, error) from None

    def _gone(self, path: str, error: httpx.HTTPError) -> EyasError:
        if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
            return EyasError(f"no server answers at {self.url}: start one with `eyas serve`, or check --url")
        if isinstance(error, httpx.TimeoutException):
            return EyasError(f"{self.url}{path} sent nothing for {self._http.timeout.read:g} s: the server hangs; look at its log")
        return EyasError(f"{self.url}{path}: the server closed the connection ({error}); it probably died: look at its log")


def _checked(response: httpx.Response, path: str) -> httpx.Response:
    if response.status_code == 200:
        return response
    where = f"{response.request.url.scheme}://{response.request.url.netloc.decode()}{path}"
    raise EyasError(f"{where} answered {response.status_code}: {_message(_loose(response)) or response.reason_phrase}")


def _loose(response: httpx.Response) -> Any:
    try:
        return response.json()
    except ValueError:
        return response.text


def _message(answer: Any) -> str:
    """The first line of an error answer, whichever of the usual shapes it has."""
    while isinstance(answer, dict):
        answer = next((answer[key] for key in ("error", "message", "detail") if answer.get(key)), "")
    lines = str(answer).strip().splitlines()
    return lines[0][:300] if lines else ""


def _object(response: httpx.Response, path: str) -> dict[str, Any]:
    return _parsed(response.text, path)


def _parsed(text: str, path: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        raise EyasError(f"{path}: the server sent what is not JSON: {text[:80]!r}") from None
    if not isinstance(value, dict):
        raise EyasError(f"{path}: expected a JSON object from the server, got {type(value).__name__}")
    return value


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
