"""Ctrl-C and SIGTERM, put off to the end of a step."""

import signal
from types import FrameType
from typing import Any


class StopRequest:
    """Within ``with``, the first Ctrl-C or SIGTERM sets ``wanted``; the next one acts as usual."""

    def __init__(self) -> None:
        self.wanted = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "StopRequest":
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._stop)
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self.wanted = True
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
