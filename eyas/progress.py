"""Progress of long work: a live bar or line in a terminal, a plain line every ten seconds elsewhere (CI, logs)."""

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.status import Status as Spinner
from rich.text import Text

PLAIN_EVERY_S = 10.0


class Task:
    """One counted piece of work, e.g. 'capture' in tokens. Use as a context manager, or call ``close``."""

    def __init__(self, description: str, total: float, unit: str, done: float = 0, console: Console | None = None) -> None:
        self.description, self.total, self.unit, self.done = description, total, unit, done
        self._start_done, self._start = done, time.monotonic()
        self._last_print = self._start
        self._note = ""
        self._console = console or Console(stderr=True)
        self._bar: Progress | None = None
        self._id: TaskID | None = None
        if self._console.is_terminal:
            self._bar = Progress(
                TextColumn("{task.description}", markup=False),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[rate]}", markup=False),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[note]}", markup=False),
                console=self._console,
            )
            self._id = self._bar.add_task(description, total=total, rate="", note="")
            self._bar.update(self._id, completed=done)
            self._bar.start()

    def advance(self, amount: float = 1, note: str | None = None) -> None:
        """Count ``amount`` units as done; ``note`` is shown behind (loss, acceptance ...)."""
        self.done += amount
        if note is not None:
            self._note = note
        if self._bar is not None and self._id is not None:
            self._bar.update(self._id, completed=self.done, rate=self._rate_text(), note=self._note)
        elif time.monotonic() - self._last_print >= PLAIN_EVERY_S:
            self._last_print = time.monotonic()
            self._print_line()

    def print(self, text: str) -> None:
        """Print a line that stays."""
        # markup off: a note may hold brackets
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def rate(self) -> float:
        """Units a second in this process."""
        return (self.done - self._start_done) / max(time.monotonic() - self._start, 1e-9)

    def _rate_text(self) -> str:
        rate = self.rate()
        return f"{rate:,.0f} {self.unit}/s" if rate >= 100 else f"{rate:.3g} {self.unit}/s"

    def _line(self) -> str:
        rate = self.rate()
        eta = f"ETA {clock(max(0.0, self.total - self.done) / rate)}" if rate > 0 else "ETA unknown"
        return f"{self.description}: {self.done:,.0f}/{self.total:,.0f} {self.unit}, {self._rate_text()}, {eta} {self._note}".rstrip()

    def _print_line(self) -> None:
        self.print(self._line())

    def close(self) -> None:
        """Stop the display; in plain mode print the final line."""
        if self._bar is not None:
            self._bar.stop()
        else:
            self._print_line()

    def __enter__(self) -> "Task":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class Status:
    """One line about work that is waited for, not counted: in a terminal rewritten in place; elsewhere printed at every turn of events, and
    every ten seconds between them. Use as a context manager, or call ``close``."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._spinner: Spinner | None = None
        self._turn: str | None = None
        self._printed = 0.0

    def show(self, text: str, turn: str) -> None:
        """Show ``text``; another ``turn`` than before (a phase, a state) is a turn of events."""
        now = time.monotonic()
        if self._console.is_terminal:
            if self._spinner is None:
                self._spinner = self._console.status("")
                self._spinner.start()
            self._spinner.update(Text(text))
        elif turn != self._turn or now - self._printed >= PLAIN_EVERY_S:
            self._turn, self._printed = turn, now
            self.print(text)

    def print(self, text: str) -> None:
        """Print a line that stays."""
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def close(self) -> None:
        """Remove the line."""
        if self._spinner is not None:
            self._spinner.stop()
            self._spinner = None

    def __enter__(self) -> "Status":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def clock(seconds: float) -> str:
    """H:MM:SS; the hours go on counting after a day."""
    minutes, second = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{second:02d}"
