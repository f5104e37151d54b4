"""The phases of a server's start, read from its log: weights i of n, memory pool, graph capture, warm-up, and how long each took.

Lines of the first tensor-parallel rank only: the others say the same. Times are those that the log's lines carry, so whoever attaches late
gets the same durations; a line without one counts as said when it is read.
"""

import re
import time
from dataclasses import dataclass
from datetime import datetime

BEGIN = "begin"
"""Interpreter, imports, arguments: before the engine says anything."""
GROUPS = "process groups"
WEIGHTS = "weights"
DRAFTER = "drafter weights"
POOL = "memory pool"
GRAPHS = "graph capture"
WARM_UP = "warm-up"
FIRST_TOKEN = "first token"

# Phase that a line begins, by engine. The drafter's weights have lines of their own, or are a second load of weights.
_SGLANG = (
    (GROUPS, re.compile(r"Init (?:parallel|torch distributed) begin")),
    (WEIGHTS, re.compile(r"Load weight begin")),
    (POOL, re.compile(r"Load weight end|Memory pool|KV Cache is allocated")),
    (GRAPHS, re.compile(r"Capture .* begin")),
    (WARM_UP, re.compile(r"max_total_num_tokens=|Started server process|Application startup complete")),
    (FIRST_TOKEN, re.compile(r"fired up and ready to roll")),
)
_VLLM = (
    (GROUPS, re.compile(r"Initializing a V1 LLM engine")),
    (WEIGHTS, re.compile(r"Starting to load model")),
    (DRAFTER, re.compile(r"Loading drafter model")),
    (POOL, re.compile(r"Model loading took|Available KV cache memory|KV cache layout|KV cache size")),
    (GRAPHS, re.compile(r"Capturing |Warming up model for the compilation|Compile and warming up")),
    (WARM_UP, re.compile(r"init engine \(.*\) took|Starting vLLM server")),
    (FIRST_TOKEN, re.compile(r"Application startup complete")),
)
_EMBEDDED = (
    (WEIGHTS, re.compile(r"loading the target")),
    (DRAFTER, re.compile(r"loading drafter ")),
    (FIRST_TOKEN, re.compile(r"serving .* on http")),
)
_ENGINES = {"sglang": _SGLANG, "vllm": _VLLM, "embedded": _EMBEDDED}

_COUNT = re.compile(r"(?:Completed \||\d%\|[^|]*\|)\s*(\d+)/(\d+)|\((\d+) of (\d+)\)")
_SGLANG_HEAD = re.compile(r"\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)[^\] ]*([^\]]*)\]")
_VLLM_HEAD = re.compile(r"\((\w+) pid=\d+\) [A-Z]+ (\d\d-\d\d \d\d:\d\d:\d\d) \[[^\]]*\]")
_OTHER_RANK = re.compile(r"TP0*[1-9]")
_EARLY_S = 2.0
"""A time in the log may lie this much before the last one; more is another clock (a container's time zone), and not used."""


@dataclass(frozen=True)
class Line:
    """A line of a log, without what its logger put in front."""

    text: str
    at: float | None
    """Seconds since the epoch, if it says."""
    first_rank: bool


class Phases:
    """Where a start is, and what the phases before took. ``name`` is the phase, ``done`` of ``total`` its count if it counts."""

    def __init__(self, kind: str, began_at: float) -> None:
        self._begins = _ENGINES[kind]
        self.name = BEGIN
        self.since = began_at
        self.done: int | None = None
        self.total: int | None = None
        self._seconds: dict[str, float] = {}
        self._loaded = False

    def read(self, text: str, now: float | None = None) -> None:
        """Take one line.

        Args:
            text: the line, or a bar's latest state.
            now: when it was read if that is when it was written, in seconds since the epoch; None for a line of before.
        """
        line = parse(text, self.since)
        if not line.first_rank:
            return
        name = next((name for name, begins in self._begins if begins.search(line.text)), None)
        if name == WEIGHTS and self._loaded:
            name = DRAFTER
        if name is not None and name != self.name:
            self._enter(name, self._time(line, now))
        if (count := _COUNT.search(line.text)) and self.name in (WEIGHTS, DRAFTER, GRAPHS):
            done, total = [number for number in count.groups() if number is not None]
            self.done, self.total = int(done), int(total)

    def seconds(self, now: float) -> dict[str, float]:
        """Seconds spent so far, by phase, in the order in which they came."""
        return self._seconds | {self.name: self._seconds.get(self.name, 0.0) + max(0.0, now - self.since)}

    def _enter(self, name: str, at: float) -> None:
        self._seconds = self.seconds(at)
        self._loaded = self._loaded or self.name == WEIGHTS
        self.name, self.since, self.done, self.total = name, at, None, None

    def _time(self, line: Line, now: float | None) -> float:
        latest = time.time() if now is None else now
        if line.at is not None and self.since - _EARLY_S <= line.at <= latest:
            return max(line.at, self.since)
        return self.since if now is None else now


def parse(text: str, about: float) -> Line:
    """Split off what SGLang's or vLLM's logger put in front; ``about``: a time near by, for the year that vLLM leaves out."""
    if head := _SGLANG_HEAD.match(text):
        return Line(text[head.end() :].strip(), _stamp(head[1]), not _OTHER_RANK.search(head[2]))
    if head := _VLLM_HEAD.match(text):
        year = datetime.fromtimestamp(about).year
        return Line(text[head.end() :].strip(), _stamp(f"{year}-{head[2]}"), not _OTHER_RANK.search(head[1]))
    return Line(text.strip(), None, True)


def _stamp(text: str) -> float | None:
    try:
        return datetime.strptime(text, "%Y-%m-%d %H:%M:%S").timestamp()
    except ValueError:
        return None
