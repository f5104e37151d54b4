"""Client of a vLLM server: the same measured requests as ``eval.clients``, under vLLM's names.

Acceptance comes per request where the server was started with --per-request-spec-decode-metrics (vLLM 0.32 on). Otherwise it is the
difference of the server's counters around the request, which holds only while nobody else sends requests: that is checked, not assumed.
vLLM counts drafts before its stop check, so the cut-off last cycle is untrimmed, as in SGLang. A decode step for which nothing was drafted
(the last tokens before the context is full) is no verify step.

What a server must be started with to be measured: VLLM_SERVER_DEV_MODE=1 in its environment (resolved arguments, prefix cache) or at least
--no-enable-prefix-caching.
"""

import re
import time
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from eval.connection import EngineClient
from eval.reply import Counts, Reply
from eyas.errors import EyasError

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
# A model's generation_config.json may hold a top_p, top_k or penalty; vLLM applies them to requests that say nothing.
NEUTRAL = {"top_p": 1.0, "top_k": 0, "repetition_penalty": 1.0}
_SAMPLE = re.compile(r"^(vllm:\w+)(?:\{(.*)\})? (\S+)$")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


class VllmClient(EngineClient):
    """Client of a vLLM server."""

    def __init__(self, url: str, timeout_s: float = 600.0) -> None:
        super().__init__(url, timeout_s)
        self._counting = True  # by counters, until a reply carries its own counts or the server turns out not to speculate
        self._uncached = False  # the server keeps no prefix cache

    def ready(self) -> None:
        """Ask the server for one token; returns when it answered. (vLLM's own /health generates none.)"""
        self._server.object("POST", COMPLETIONS, {"prompt": [0], "max_tokens": 1, "temperature": 0.0})

    def flush_cache(self) -> None:
        """Empty the prefix cache, so that no request finds another's prompt computed."""
        self._uncached = self._uncached or self._metrics().setting("enable_prefix_caching") == "False"
        if self._uncached:
            return
        answer = self._server.answer("POST", "/reset_prefix_cache")
        if answer.status_code == 404:
            raise EyasError(
                f"{self.url} keeps a prefix cache that cannot be emptied: start vLLM with --no-enable-prefix-caching, "
                "or with VLLM_SERVER_DEV_MODE=1 in its environment"
            )
        if answer.status_code != 200 or not answer.json().get("success"):
            raise EyasError(f"{self.url}/reset_prefix_cache: the cache was not emptied; are other requests running?")

    def server_info(self) -> dict[str, Any]:
        """What the server runs with, under SGLang's names where both have a thing, and its resolved arguments in vLLM's own sections.

        Without VLLM_SERVER_DEV_MODE=1 a server tells no resolved arguments: the sections (``scheduler_config`` ...) are not there, and
        what only they know is None.
        """
        version = self._server.object("GET", "/version").get("version")
        served, metrics = self._model(), self._metrics()
        config = self._resolved()
        model, scheduler, speculative = (config.get(f"{name}_config") or {} for name in ("model", "scheduler", "speculative"))
        steps = speculative.get("num_speculative_tokens") or len(metrics.accepted_J) or None
        method = speculative.get("method") or ("unknown" if steps else None)
        return {
            "version": f"vllm {version}",
            "model_path": served.get("root"),
            "served_model_name": served.get("id"),
            "context_length": served.get("max_model_len"),
            "dtype": str(model["dtype"]).removeprefix("torch.") if "dtype" in model else None,
            "max_running_requests": scheduler.get("max_num_seqs"),
            "disable_radix_cache": metrics.setting("enable_prefix_caching") == "False",
            "speculative_algorithm": method.upper() if method else None,
            "speculative_draft_model_path": speculative.get("model"),
            "speculative_num_steps": steps,
            "speculative_eagle_topk": 1 if steps else None,
            "speculative_num_draft_tokens": steps + 1 if steps else None,
        } | config

    def generate(
        self, prompt_ids: Sequence[int], max_new_tokens: int, temperature: float, seed: int, speculative: str | None = None
    ) -> Reply:
        """Stream one completion of exactly these prompt tokens through /v1/completions.

        ``seed`` fixes the sampling (temperature > 0). ``speculative`` must be None: a vLLM server has one fixed behaviour.
        """
        self._require_fixed(speculative)
        body: dict[str, Any] = {"prompt": list(prompt_ids), "max_tokens": max_new_tokens, "temperature": temperature} | NEUTRAL
        body |= {"stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}
        if temperature > 0:
            body["seed"] = seed
        before = self._before()
        ids: list[int] = []
        pieces: list[int] = []
        text, reason = "", None
        usage: dict[str, Any] = {}
        speculation: dict[str, Any] | None = None
        first_s, first_tokens, total_s = 0.0, 0, 0.0
        for now, event in self._server.events(COMPLETIONS, body):
            usage = event.get("usage") or usage
            speculation = _speculation(event) or speculation
            for choice in event.get("choices", []):
                ids += (new := choice.get("token_ids") or [])
                pieces += [len(new)] if new else []
                text += choice.get("text") or ""
                reason, total_s = choice.get("finish_reason") or reason, now
            if ids and not first_tokens:
                first_s, first_tokens = now, len(ids)
        if reason is None:
            raise EyasError(f"{self.url}{COMPLETIONS}: the stream ended before the reply was finished; look at the server's log")
        if reason in {"abort", "error"}:
            raise EyasError(f"{self.url}{COMPLETIONS} aborted the request ({reason}); look at the server's log")
        if not ids:
            raise EyasError(f"{self.url}{COMPLETIONS}: the reply holds no token_ids: this server is too old to be measured")
        return Reply(
            prompt_tokens=int(usage.get("prompt_tokens", len(prompt_ids))),
            completion_tokens=int(usage.get("completion_tokens", len(ids))),
            cached_tokens=_cached(usage),
            output_ids=tuple(ids),
            text=text,
            finish_reason=reason,
            first_token_s=first_s,
            first_tokens=first_tokens,
            total_s=total_s,
            counts=self._counts(speculation, before, len(ids)),
            pieces=tuple(pieces),
        )

    def chat(self, messages: Sequence[dict[str, str]], max_new_tokens: int, temperature: float, speculative: str | None = None) -> Reply:
        """One chat completion, not streamed, rendered by the *server's* chat template.

        ``output_ids`` is empty and the times are those of the whole request, as in ``eval.clients``.
        """
        self._require_fixed(speculative)
        body = {"messages": list(messages), "max_tokens": max_new_tokens, "temperature": temperature} | NEUTRAL
        before = self._before()
        start = time.perf_counter()
        answer = self._server.object("POST", CHAT, body)
        total_s = time.perf_counter() - start
        try:
            choice, usage = answer["choices"][0], answer["usage"]
            tokens = int(usage["completion_tokens"])
            return Reply(
                prompt_tokens=int(usage["prompt_tokens"]),
                completion_tokens=tokens,
                cached_tokens=_cached(usage),
                output_ids=(),
                text=str(choice["message"].get("content") or ""),
                finish_reason=str(choice["finish_reason"]),
                first_token_s=total_s,
                first_tokens=tokens,
                total_s=total_s,
                counts=self._counts(_speculation(answer), before, tokens),
            )
        except (KeyError, IndexError, TypeError) as error:
            raise EyasError(f"{self.url}{CHAT}: the answer is no chat completion ({error!r})") from None

    def _require_fixed(self, speculative: str | None) -> None:
        if speculative is not None:
            raise EyasError(f"{self.url}: vLLM cannot switch speculation per request ({speculative!r} asked for): start a server for each")

    def _model(self) -> dict[str, Any]:
        models = self._server.object("GET", "/v1/models").get("data")
        if not models:
            raise EyasError(f"{self.url}/v1/models names no model: is it a vLLM server?")
        return dict(models[0])

    def _resolved(self) -> dict[str, Any]:
        """The resolved arguments by section; empty where the server does not tell them, or (older versions) only as prose."""
        answer = self._server.answer("GET", "/server_info?config_format=json")
        config = answer.json().get("vllm_config") if answer.status_code == 200 else None
        return config if isinstance(config, dict) else {}

    def _metrics(self) -> "Metrics":
        return Metrics(self._server.request("GET", "/metrics").text)

    def _before(self) -> "Metrics | None":
        """The counters before a request, while it is not known that they are not needed."""
        if not self._counting:
            return None
        metrics = self._metrics()
        self._counting = metrics.speculates
        return metrics if self._counting else None

    def _counts(self, speculation: dict[str, Any] | None, before: "Metrics | None", tokens: int) -> Counts | None:
        """A request's speculation; None when it ran without. ``tokens``: how many the reply has."""
        if speculation is not None:
            self._counting = False
            return _reported(speculation)
        return None if before is None else self._metrics().since(before, tokens, self.url)


class Metrics:
    """The vLLM part of one /metrics page, in Prometheus' text format; values of several engines are summed."""

    def __init__(self, page: str) -> None:
        self._values: dict[str, float] = defaultdict(float)
        self._settings: dict[str, str] = {}
        self._accepted: dict[int, float] = defaultdict(float)
        for name, labels, value in (found.groups() for line in page.splitlines() if (found := _SAMPLE.match(line))):
            self._values[name] += float(value)
            if name == "vllm:cache_config_info":
                self._settings = dict(_LABEL.findall(labels))
            if name == "vllm:spec_decode_num_accepted_tokens_per_pos_total":
                self._accepted[int(dict(_LABEL.findall(labels))["position"])] += float(value)

    def setting(self, name: str) -> str | None:
        """A resolved cache setting, as Python prints it; None where the server does not tell."""
        return self._settings.get(name)

    @property
    def speculates(self) -> bool:
        """The counters of speculation exist from the start on a server that speculates, and never on another."""
        return "vllm:spec_decode_num_drafts_total" in self._values

    @property
    def accepted_J(self) -> list[int]:
        """How often draft j was accepted since the server started."""
        return [int(self._accepted[position]) for position in sorted(self._accepted)]

    def since(self, before: "Metrics", tokens: int, url: str) -> Counts | None:
        """What one request of ``tokens`` reply tokens did between two pages. Raises EyasError when others generated in between."""
        generated = self._moved(before, "generation_tokens")
        if generated != tokens:
            raise EyasError(
                f"{url}: its counters moved by {generated} tokens during a reply of {tokens}: others use this server too. "
                "Start vLLM with --per-request-spec-decode-metrics summary (0.32 on), or measure alone, one request at a time"
            )
        drafts, correct = self._moved(before, "spec_decode_num_drafts"), self._moved(before, "spec_decode_num_accepted_tokens")
        if not drafts:
            return None
        reached = [drafts, *(now - then for now, then in zip(self.accepted_J, before.accepted_J, strict=True)), 0]
        histogram = tuple(here - further for here, further in pairwise(reached))
        return Counts(drafts, correct, self._moved(before, "spec_decode_num_draft_tokens"), histogram, 1 + correct / drafts)

    def _moved(self, before: "Metrics", counter: str) -> int:
        name = f"vllm:{counter}_total"
        return int(self._values[name] - before._values[name])


def _speculation(answer: dict[str, Any]) -> dict[str, Any] | None:
    return (answer.get("metrics") or {}).get("speculative_decoding")


def _reported(speculation: dict[str, Any]) -> Counts | None:
    """Counts from what vLLM 0.32 reports with a request."""
    try:
        counts = Counts(
            verify_ct=speculation["num_spec_steps"],
            correct=speculation["num_accepted_draft_tokens"],
            proposed=speculation["num_draft_tokens"],
            histogram=tuple(speculation["acceptance_histogram"]),
            engine_length=speculation["mean_acceptance_length"],
        )
    except KeyError as error:
        raise EyasError(
            f"vLLM reports a request's acceptance without {error}: this version does it in a way that is not known here"
        ) from None
    return counts if counts.verify_ct else None


def _cached(usage: dict[str, Any]) -> int:
    """Told only with --enable-prompt-tokens-details."""
    return int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)
