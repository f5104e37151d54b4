"""One request of a capture: what a server needs for it, how it is sent until it is answered, and what an answer tells."""

import asyncio
import random
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

import eyas
from data_prep import engine_plugin
from eyas.config import Flags
from eyas.errors import EyasError

RESERVED = 8
"""Tokens of their context that engines keep for themselves, the one that they must answer included."""
TRIES = 6
BACK_OFF_S, LONGEST_S = 0.5, 8.0
AGAIN = (429, 502, 503, 504)  # no room, or not there at the moment

StartServer = Callable[[Flags, dict[str, str]], AbstractContextManager[str]]
"""Runs the configured engine's server, with more flags and variables, for the length of a block, and gives its URL."""


@dataclass(frozen=True)
class ServerNeeds:
    """What a server has to be started with, on top of the config's engine section."""

    flags: Flags
    environment: dict[str, str]


@dataclass(frozen=True)
class Next:
    """The answer to a row: whether its states were taken, and the token that the target would say next, where that was asked."""

    taken: bool
    token: int | None = None
    logprob: float | None = None


def python_path() -> str:
    """The folders by which an engine finds what it has to load: this checkout, and the one with the entry point.

    Raises EyasError where eyas was installed among other packages, which must not get in the way of the engine's own.
    """
    checkout = Path(eyas.__file__).parents[1]
    if not (checkout / "pyproject.toml").is_file():
        raise EyasError(f"an engine captures with eyas run from a clone (pip install --editable), this one is installed in {checkout}")
    return f"{checkout}:{Path(engine_plugin.__file__).parent / 'found'}"


async def exchange(http: httpx.AsyncClient, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    """Send a request until it is answered: a lost connection or a server without room is tried again, with growing pauses.

    Raises EyasError when it is refused, or not answered after all tries.
    """
    for attempt in range(TRIES):
        if attempt:
            await asyncio.sleep(random.uniform(0.5, 1) * min(LONGEST_S, BACK_OFF_S * 2**attempt))
        try:
            response = await http.request(method, path, json=body)
        except httpx.TransportError as error:
            fault = f"{type(error).__name__} {error}".strip()
            continue
        if response.status_code in AGAIN:
            fault = f"it answers {response.status_code}"
            continue
        if response.status_code != 200:
            raise EyasError(f"{address(http)}{path} answered {response.status_code}: {_said(response)}")
        try:
            value = response.json()
        except ValueError:
            value = None
        if not isinstance(value, dict):
            raise EyasError(f"{address(http)}{path}: expected a JSON object from the server, got {response.text[:80]!r}")
        return value
    raise EyasError(f"the server at {address(http)} does not answer any more ({fault}); its log tells more")


def address(http: httpx.AsyncClient) -> str:
    """The server's URL, for messages."""
    return str(http.base_url).rstrip("/")


def _said(response: httpx.Response) -> str:
    """The first line of an error answer, whichever of the usual shapes it has."""
    try:
        value: Any = response.json()
    except ValueError:
        value = response.text
    while isinstance(value, dict):
        value = next((value[key] for key in ("error", "message", "detail") if value.get(key)), response.reason_phrase)
    return (str(value).strip().splitlines() or [response.reason_phrase])[0][:300]
