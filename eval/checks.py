"""Findings of a check-up: what was looked at, whether it is as it should be, and what was seen; as a table and as JSON."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from rich.table import Table
from rich.text import Text

Verdict = Literal["ok", "fault", "not checked"]
_STYLES = {"ok": "green", "fault": "bold red", "not checked": "yellow"}


@dataclass(frozen=True)
class Check:
    """One thing that was looked at. ``told``: what was seen; of a fault what is wrong and what mends it; else why it was not checked."""

    name: str
    verdict: Verdict
    told: str


def ok(name: str, told: str) -> Check:
    """As it should be."""
    return Check(name, "ok", told)


def fault(name: str, told: str) -> Check:
    """Wrong."""
    return Check(name, "fault", told)


def not_checked(name: str, told: str) -> Check:
    """Not looked at, for a reason."""
    return Check(name, "not checked", told)


def faults(checks: Sequence[Check]) -> list[Check]:
    """Those that are wrong."""
    return [check for check in checks if check.verdict == "fault"]


def table(checks: Sequence[Check], title: str) -> Table:
    """One row a check."""
    drawn = Table(title=title, title_justify="left", box=None, header_style="bold", pad_edge=False)
    drawn.add_column("check", no_wrap=True)
    drawn.add_column("", no_wrap=True)
    drawn.add_column("", overflow="fold")
    for check in checks:
        drawn.add_row(Text(check.name), Text(check.verdict, style=_STYLES[check.verdict]), Text(check.told))
    return drawn


def record(checks: Sequence[Check]) -> list[dict[str, Any]]:
    """As JSON."""
    return [asdict(check) for check in checks]
