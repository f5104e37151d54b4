"""A sheet of figures, each with the formula that gives it: what a plan is made of.

A figure is given (by the config, a published shape, a measurement) or computed from figures that stand before it. Where one of those is not
known the figure stays open and says what to give; nothing is guessed.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

Value = bool | int | float | str


@dataclass(frozen=True)
class Figure:
    """One line. ``value`` is None while it is open; ``missing`` names what has to be given for it."""

    topic: str
    label: str
    value: Value | None
    unit: str
    how: str
    missing: tuple[str, ...] = ()


class Sheet:
    """Figures by key, in the order in which they were entered, under topics."""

    def __init__(self) -> None:
        self.figures: dict[str, Figure] = {}
        self.notes: dict[str, list[str]] = {}
        self._topic = ""

    def topic(self, title: str) -> None:
        """What is entered from now on stands under ``title``."""
        self._topic = title
        self.notes.setdefault(title, [])

    def note(self, text: str) -> None:
        """A sentence below the current topic."""
        self.notes[self._topic].append(text)

    def give(self, key: str, label: str, value: Value | None, unit: str, how: str, ask: str = "") -> None:
        """Enter a figure whose value comes from elsewhere; None leaves it open until ``ask`` is given."""
        missing = (ask,) if value is None else ()
        self._enter(key, Figure(self._topic, label, value, unit, _not_known(missing) if missing else how, missing))

    def compute(self, key: str, label: str, unit: str, how: str, formula: Callable[..., Value]) -> None:
        """Enter a figure computed by ``formula``, whose parameters are keys of figures before; ``how`` names them in braces."""
        inputs = {name: self.figures[name] for name in inspect.signature(formula).parameters}
        missing = tuple(dict.fromkeys(name for figure in inputs.values() for name in figure.missing))
        if missing:
            self._enter(key, Figure(self._topic, label, None, unit, _not_known(missing), missing))
            return
        values = {name: figure.value for name, figure in inputs.items()}
        told = how.format_map({name: number(value) for name, value in values.items()})
        self._enter(key, Figure(self._topic, label, formula(**values), unit, told))

    def known(self, key: str) -> Any:
        """The value of a figure, None while it is open."""
        return self.figures[key].value

    def json(self) -> dict[str, Any]:
        """Topic -> key -> value, unit, formula, what is missing; and the notes."""
        topics: dict[str, Any] = {title: {"notes": notes, "figures": {}} for title, notes in self.notes.items()}
        for key, figure in self.figures.items():
            told = {"label": figure.label, "value": figure.value, "unit": figure.unit, "formula": figure.how}
            topics[figure.topic]["figures"][key] = told | ({"missing": list(figure.missing)} if figure.missing else {})
        return topics

    def tables(self) -> RenderableType:
        """A table a topic, for a terminal."""
        parts: list[RenderableType] = []
        for title, notes in self.notes.items():
            table = Table("", "", "", "how it comes about", title=title, title_justify="left", show_edge=False, pad_edge=False)
            table.columns[1].justify = "right"
            for column in table.columns[:3]:
                column.no_wrap = True
            for figure in self.figures.values():
                if figure.topic == title:
                    cells = (figure.label, number(figure.value), figure.unit if figure.value is not None else "", figure.how)
                    table.add_row(*map(Text, cells), style="yellow" if figure.value is None else "")
            parts += [table, *(Text(note) for note in notes), ""]
        return Group(*parts)

    def _enter(self, key: str, figure: Figure) -> None:
        assert key not in self.figures, key
        self.figures[key] = figure


def _not_known(missing: tuple[str, ...]) -> str:
    return f"not known: needs {', '.join(missing)}"


def number(value: Value | None) -> str:
    """A figure as people write it: thousands with commas, four digits of what is smaller."""
    if value is None:
        return "open"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str):
        return value
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def terms(parts: Mapping[str, float]) -> str:
    """Named summands, e.g. ``aux 43,008 + final 14,336``."""
    return " + ".join(f"{name} {number(amount)}" for name, amount in parts.items())
