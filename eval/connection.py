"""HTTP to one server: plain requests and streamed events, every fault told in one line. What the answers mean is the clients' business."""

import json
import time
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

import httpx

from eyas.errors import EyasError

_LOOPBACK = {"127.0.0.1", "localhost", "::1"}


class Connection:
    """One connection to one server.

    Every method raises EyasError in one line when the server is not there, dies, hangs, answers an error, or sends what is no JSON object.
    """

    def __init__(self, url: str, timeout_s: float) -> None:
        parts = urlsplit(url)
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            raise EyasError(f"--url {url}: expected http://HOST:PORT")
        self.url = url.rstrip("/")
        # A proxy from the environment must not stand between us and a server on this machine.
        self._http = httpx.Client(
            base_url=self.url,
            timeout=httpx.Timeout(timeout_s, connect=10.0),
            trust_env=parts.hostname not in _LOOPBACK,
            verify=parts.scheme == "https",  # reading all certificates takes longer than a request, and plain HTTP needs none
        )

    def __enter__(self) -> "Connection":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection."""
        self._http.close()

    def request(self, method: str, path: str, body: dict[str, Any] | None = None) -> httpx.Response:
        """One answer; anything but 200 is an error."""
        return self._checked(self.answer(method, path, body), path)

    def object(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """The JSON object that a request answers."""
        return _parsed(self.request(method, path, body).text, path)

    def answer(self, method: str, path: str, body: dict[str, Any] | None = None) -> httpx.Response:
        """One answer, whatever its status."""
        try:
            return self._http.request(method, path, json=body)
        except httpx.HTTPError as error:
            raise self._gone(path, error) from None

    def events(self, path: str, body: dict[str, Any]) -> Iterator[tuple[float, dict[str, Any]]]:
        """Server-sent events of one streamed request, [DONE] excluded, with the seconds from sending to each."""
        start = time.perf_counter()
        try:
            with self._http.stream("POST", path, json=body) as response:
                if response.status_code != 200:
                    response.read()
                    self._checked(response, path)
                for line in response.iter_lines():
                    payload = line.removeprefix("data:").strip()
                    if not line.startswith("data:") or payload == "[DONE]":
                        continue
                    now = time.perf_counter() - start
                    event = _parsed(payload, path)
                    if "error" in event:
                        raise EyasError(f"{self.url}{path} broke off: {message(event)}")
                    yield now, event
        except httpx.HTTPError as error:
            raise self._gone(path, error) from None

    def _checked(self, response: httpx.Response, path: str) -> httpx.Response:
        if response.status_code == 200:
            return response
        raise EyasError(f"{self.url}{path} answered {response.status_code}: {message(_loose(response)) or response.reason_phrase}")

    def _gone(self, path: str, error: httpx.HTTPError) -> EyasError:
        if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
            return EyasError(f"no server answers at {self.url}: start one with `eyas serve`, or check --url")
        if isinstance(error, httpx.TimeoutException):
            return EyasError(f"{self.url}{path} sent nothing for {self._http.timeout.read:g} s: the server hangs; look at its log")
        return EyasError(f"{self.url}{path}: the server closed the connection ({error}); it probably died: look at its log")


class EngineClient:
    """What the clients of all engines are: one connection to one server. Close it, or use it as a context manager.

    Every method raises EyasError in one line when the server is not there, dies, answers an error, or sends what is no reply.
    """

    def __init__(self, url: str, timeout_s: float = 600.0) -> None:
        self._server = Connection(url, timeout_s)
        self.url = self._server.url

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection."""
        self._server.close()


def _loose(response: httpx.Response) -> Any:
    try:
        return response.json()
    except ValueError:
        return response.text


def message(answer: Any) -> str:
    """The first line of an error answer, whichever of the usual shapes it has."""
    while isinstance(answer, dict):
        answer = next((answer[key] for key in ("error", "message", "detail") if answer.get(key)), "")
    lines = str(answer).strip().splitlines()
    return lines[0][:300] if lines else ""


def _parsed(text: str, path: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        raise EyasError(f"{path}: the server sent what is not JSON: {text[:80]!r}") from None
    if not isinstance(value, dict):
        raise EyasError(f"{path}: expected a JSON object from the server, got {type(value).__name__}")
    return value
