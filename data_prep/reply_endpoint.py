"""One reply server: the connections to it, one request, and how well it is doing."""

import asyncio
import json
import math
import random
import socket
import ssl
import time
from collections.abc import Sequence
from email.utils import parsedate_to_datetime
from itertools import cycle
from typing import Any
from urllib.parse import urlsplit

import httpx

from data_prep.prompts import Messages, Unusable
from data_prep.reply_wire import Answer, Asking, Model, NoAnswer, served_model, tokenize_body
from data_prep.sampler import Request
from eyas.errors import EyasError

PER_POOL = 8
"""Connections of one pool: httpx looks through all of them at every request."""
IDLE_S = 2.0
"""Servers close what idles for 5 s; a request that is on its way just then is lost."""
CONNECT_S, OPEN_S = 30.0, 60.0
FAILURES = 3
"""So many failures in a row, without a reply between them, and nothing is sent to a server any more until it answers again."""
BACK_OFF_S, LONGEST_S = 0.5, 30.0
RETRY_AFTER_LIMIT_S = 600.0
OWN_TEMPLATE = "serve the target with the tokenizer and chat template of its own folder"
# A host that vanished without a word is found out within a minute, however long a reply may take.
_KEEPALIVE = [("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3)]


class Busy(NoAnswer):
    """A server that takes no more requests for now, and for how many seconds it asks to be left alone (None: it does not say)."""

    def __init__(self, detail: str, retry_after_s: float | None) -> None:
        super().__init__("no server had room for it", detail)
        self.retry_after_s = retry_after_s


class RefusedByServer(Unusable):
    """A request that a server will never answer (400, 413, 422 ...)."""

    def __init__(self, status: int, detail: str) -> None:
        super().__init__(f"refused by the server ({status})")
        self.status, self.detail = status, detail


def back_off(tries: int) -> float:
    """Seconds to wait after ``tries`` failures: anything up to a limit that doubles each time, so that no two come back together."""
    return random.uniform(0, min(LONGEST_S, BACK_OFF_S * 2**tries))


class Endpoint:
    """A server and what is known of it. ``limit`` is how many requests it has room for, as far as it told.

    Args:
        url: http://HOST:PORT, with or without the /v1 that OpenAI clients want.
        connections: the most that are open at a time.
        timeout_s: how long a reply may take.
    """

    def __init__(self, url: str, connections: int, timeout_s: float) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self.model: Model | None = None
        self.up = False
        self.in_flight, self.limit = 0, math.inf
        self.failures = 0
        self.resume_at = self.open_at = 0.0
        self.fault = "it was not asked yet"
        https = urlsplit(self.url).scheme == "https"
        # reading all certificates takes long, and plain HTTP needs none
        context = ssl.create_default_context() if https else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        pools = [self._pool(context, timeout_s, trust_env=https) for _ in range(-(-connections // PER_POOL))]
        self._pools, self._next = pools, cycle(pools)

    def _pool(self, context: ssl.SSLContext, timeout_s: float, trust_env: bool) -> httpx.AsyncClient:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=IDLE_S)
        options = [(socket.IPPROTO_TCP, getattr(socket, name), value) for name, value in _KEEPALIVE if hasattr(socket, name)]
        return httpx.AsyncClient(
            base_url=self.url,
            transport=httpx.AsyncHTTPTransport(
                verify=context, limits=limits, socket_options=[(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1), *options]
            ),
            timeout=httpx.Timeout(timeout_s, connect=CONNECT_S, pool=None),
            trust_env=trust_env,  # a proxy from the environment must not stand between us and the engines beside us
        )

    async def close(self) -> None:
        """Close all connections."""
        await asyncio.gather(*(pool.aclose() for pool in self._pools))

    def has_room(self, now: float) -> bool:
        """Whether a request may be sent now."""
        return self.up and self.in_flight < self.limit and now >= self.resume_at

    def replied(self) -> None:
        """Count a reply: the server lives, and may have room for more."""
        self.failures = 0
        self.limit += 1 / self.limit

    def refused(self, busy: Busy, now: float) -> None:
        """Leave a server alone that has no room, then send it no more than it had just now (``in_flight``, without the refused one)."""
        self.limit = max(1, min(self.limit, self.in_flight))
        pause = back_off(self.failures) if busy.retry_after_s is None else busy.retry_after_s
        self.resume_at = max(self.resume_at, now + pause)
        self.fault = str(busy)
        if not self.in_flight:  # it refuses even a lone request
            self.failures += 1

    def failed(self, fault: NoAnswer) -> None:
        """Count a failure."""
        self.failures += 1
        self.fault = str(fault)

    def take_out(self, now: float) -> None:
        """Send nothing until ``open`` succeeds again; ``open_at`` is when to try."""
        self.up = False
        self.open_at = now + back_off(min(self.failures, FAILURES + 1))  # a trial costs little: 8 s at the most

    async def open(self, first: Request, longest: int, asking: Asking) -> None:
        """Ask what the server serves and for one token of ``first``.

        ``longest``: tokens of the longest request and its reply. Raises NoAnswer while it is not there, EyasError when it can never serve.
        """
        try:
            self.model = model = served_model(await self._send("GET", "/v1/models", None, OPEN_S))
            if model.context is not None and model.context < longest:
                raise EyasError(
                    f"it serves {model.context} tokens of prompt and reply together, {longest} are needed: raise its context length, "
                    "or lower prep.max_length or prep.replies.max_new_tokens"
                )
            await self.ask(Request(first.key, first.prompt_ids, 1), asking, OPEN_S)
        except RefusedByServer as reason:
            raise EyasError(f"it refuses requests: {reason.detail}") from None
        except Unusable:
            pass  # a reply of one token that no row can be made of is a reply
        self.up, self.failures, self.limit = True, 0, math.inf

    async def ask(self, request: Request, asking: Asking, timeout_s: float | None = None) -> Answer:
        """Send one request and read its reply. Raises NoAnswer, Unusable, or EyasError (``Asking.read``)."""
        assert self.model is not None
        value = await self._send("POST", self.model.path, asking.body(self.model, request), timeout_s)
        return asking.read(self.model, request, value)

    async def require_template(self, samples: Sequence[tuple[Messages, list[int]]], options: dict[str, Any], asking: Asking) -> str | None:
        """Compare how the server renders ``samples`` with their ids here; ``options`` are the chat template's arguments.

        Returns why some could not be told, None when all are equal. Raises EyasError at the first difference.
        """
        assert self.model is not None
        unknown = None
        for messages, ids in samples:
            body = tokenize_body(self.model, messages, options)
            try:
                theirs = [int(token) for token in (await self._send("POST", "/tokenize", body, OPEN_S))["tokens"]]
            except RefusedByServer as error:
                unknown = f"it refuses one ({error.detail})"
                continue
            except (NoAnswer, KeyError, TypeError, ValueError):  # no such path
                try:
                    answer = await self._send("POST", "/v1/chat/completions", body | {"max_tokens": 1, "temperature": 0}, OPEN_S)
                    count = int(answer["usage"]["prompt_tokens"])
                except (Unusable, NoAnswer, KeyError, TypeError, ValueError) as fault:
                    return f"it neither tokenises a chat nor counts its tokens ({fault})"
                if count != len(ids):
                    raise EyasError(f"it makes {count} tokens of a chat that is {len(ids)} here: {OWN_TEMPLATE}") from None
                continue
            if theirs != ids:
                raise EyasError(_difference(ids, theirs, asking))
        return unknown

    async def _send(self, method: str, path: str, body: dict[str, Any] | None, timeout_s: float | None) -> Any:
        options: dict[str, Any] = {} if timeout_s is None else {"timeout": timeout_s}
        try:
            response = await next(self._next).request(method, path, json=body, **options)
        except httpx.TimeoutException as error:
            raise NoAnswer("no reply in prep.replies.timeout_s", f"{type(error).__name__} at {path}") from None
        except httpx.HTTPError as error:
            raise NoAnswer("the connection was lost", str(error) or type(error).__name__) from None
        if response.status_code == 200:
            try:
                return json.loads(response.content)
            except ValueError:
                raise NoAnswer("what the server sent is no reply", f"no JSON: {response.text[:80]!r}") from None
        raise _fault(response)


def _fault(response: httpx.Response) -> Exception:
    """What an answer other than 200 means."""
    status, retry_after = response.status_code, _retry_after(response.headers.get("retry-after"))
    text = f"{status} {_message(response)}".strip()
    if status in (429, 503):  # SGLang says 503 when its queue is full
        return Busy(text, retry_after)
    # 404: a server that is starting again may not have all its paths yet
    if status >= 500 or status < 400 or status in (404, 405, 408, 409, 425):
        return NoAnswer("a server answered an error", text)
    if status in (401, 403):
        return EyasError(f"it answers {text}: eyas sends no key, serve without one")
    return RefusedByServer(status, text)


def _message(response: httpx.Response) -> str:
    """The first line of an error answer, whichever of the usual shapes it has."""
    try:
        value = response.json()
    except ValueError:
        value = response.text
    while isinstance(value, dict):
        value = next((value[key] for key in ("error", "message", "detail") if value.get(key)), "")
    lines = str(value).strip().splitlines()
    return lines[0][:200] if lines else response.reason_phrase


def _retry_after(value: str | None) -> float | None:
    """Seconds that a Retry-After header asks for: a number or a date, 10 minutes at most."""
    if value is None:
        return None
    try:
        seconds = float(value) if value.strip().isdigit() else parsedate_to_datetime(value).timestamp() - time.time()
    except (ValueError, TypeError):
        return None
    return min(max(seconds, 0.0), RETRY_AFTER_LIMIT_S)


def _difference(ours: list[int], theirs: list[int], asking: Asking) -> str:
    """One line on two renderings of one chat."""
    place = next((place for place, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))
    here, there = (repr(asking.tokenizer.decode(ids[place : place + 8])) for ids in (ours, theirs))
    return (
        f"it renders a chat as {len(theirs)} tokens that is {len(ours)} here, from token {place} on {there} and not {here}: {OWN_TEMPLATE}"
    )
