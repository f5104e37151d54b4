"""A sweep for readers: ``sweep.json`` (all numbers), ``sweep.md``, ``sweep.svg``, and the same tables for a terminal."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from eval.sweep_figure import sweep_figure
from eval.sweep_result import Costs, Row, SweepResult
from eyas.files import write_json, write_text
from eyas.manifest import versions
from eyas.statistics import Interval

NONE = "–"
DRIFT = 1.1
"""Fastest over slowest baseline of a sweep from which it is said aloud."""


@dataclass(frozen=True)
class Listing:
    """A table before it is drawn; the first columns are words, the others numbers."""

    title: str
    columns: list[str]
    rows: list[list[str]]
    words: int
    note: str = ""


def write_report(folder: Path, result: SweepResult) -> None:
    """Write the three files; the figure only where there is a point to draw."""
    write_json(folder / "sweep.json", asdict(result) | {"versions": versions()})
    figure = sweep_figure(result)
    if figure:
        write_text(folder / "sweep.svg", figure)
    write_text(folder / "sweep.md", markdown(result, figure is not None))


def markdown(result: SweepResult, figure: bool) -> str:
    """The sweep as one page of Markdown."""
    text = ["# Which speculation pays here?", f"**{result.sentence}**", *_drift(result), *_recommendation(result)]
    text += [f"Flags for {engine}:\n\n```\n{flags}\n```" for engine, flags in result.flags.items()]
    if figure:
        text.append("![Decoding rate by draft steps, measured and expected](sweep.svg)")
    for listing in listings(result):
        head = f"| {' | '.join(listing.columns)} |"
        rule = f"|{'|'.join('---' if number < listing.words else '---:' for number in range(len(listing.columns)))}|"
        body = "\n".join(f"| {' | '.join(row)} |" for row in listing.rows)
        text += [f"## {listing.title}", f"{head}\n{rule}\n{body}", listing.note]
    return "\n\n".join(part for part in [*text, "## How it was measured", _method(result)] if part) + "\n"


def terminal(result: SweepResult) -> RenderableType:
    """The sweep for a terminal."""
    parts: list[RenderableType] = []
    for listing in listings(result):
        table = Table(title=listing.title, title_justify="left", show_edge=False, pad_edge=False, title_style="bold")
        for number, column in enumerate(listing.columns):
            table.add_column(column, justify="left" if number < listing.words else "right")
        for row in listing.rows:
            table.add_row(*(Text(cell) for cell in row))
        parts += [table, ""]
    lines = [result.sentence, *_drift(result), *_recommendation(result), *(f"{engine}: {flags}" for engine, flags in result.flags.items())]
    return Group(*parts, *(Text(line) for line in lines))


def listings(result: SweepResult) -> list[Listing]:
    """All tables that have something to say."""
    found = [
        _measured(result.rows),
        _costs(result),
        _verify(result.costs),
        _positions(result.rows),
        _not_measured(result),
        _pretended(result),
    ]
    return [listing for listing in found if listing.rows]


def _measured(rows: Sequence[Row]) -> Listing:
    return Listing(
        "Measured",
        ["drafter", "setting", "tok/s", "x baseline", "foretold", "acceptance length", "breaks even at", "cycle, ms", "loops"],
        [
            [
                row.variant,
                str(row.setting),
                _number(row.tokens_per_second.value, 1),
                _interval(row.speedup),
                _number(row.foretold),
                _interval(row.length),
                f"{row.cycle:.2f}",
                f"{row.cycle_ms:.2f}",
                f"{row.looping}/{row.requests}",
            ]
            for row in rows
        ],
        2,
        "Rates are of decoding, one request at a time, with 95 % intervals over prompts. A cycle that costs c baseline tokens breaks "
        "even at an acceptance length of c. *Foretold* is what the points measured before made of it. *Loops* repeat themselves.",
    )


def _costs(result: SweepResult) -> Listing:
    rows = []
    for costs in result.costs:
        fitted = (costs.first_draft, costs.further_draft, costs.forward, costs.token, costs.branch)
        rows.append([costs.variant, "fit", *map(_number, fitted)])
        if costs.parts is not None:
            first, further = costs.parts.first, costs.parts.further
            sums = _number(sum(first.values())), _number(sum(further.values()))
            rows.append([costs.variant, "parts", *sums, _number(further["forward"]), _number(further["verify"]), NONE])
    tested = [
        f"{costs.error:.1%} over the {costs.settings} settings of {costs.variant}" for costs in result.costs if costs.error is not None
    ]
    error = f"its largest error is {', '.join(tested)}" if tested else "with no more settings than terms it has no error to show"
    return Listing(
        "What drafting costs, in baseline steps",
        ["drafter", "by", "first draft", "each further draft", "of it: draft forward", "of it: a token to verify", "a branch"],
        rows,
        2,
        f"A baseline step is {_step_ms(result):.2f} ms. *Fit* is the cost model on the cycle times that the client saw; {error}. *Parts* "
        "are the engine's own clocks, where it has any. Chains alone cannot tell a draft forward from a token to verify; trees can.",
    )


def _verify(all_costs: Sequence[Costs]) -> Listing:
    tokens = sorted({count for costs in all_costs for count in costs.verify})
    return Listing(
        "What a verify step costs, in baseline steps",
        ["drafter", "by", *(f"{count} tokens" for count in tokens)],
        [
            [costs.variant, costs.verify_source or NONE, *(_number(costs.verify.get(count)) for count in tokens)]
            for costs in all_costs
            if costs.verify
        ],
        2,
    )


def _positions(rows: Sequence[Row]) -> Listing:
    longest = max((len(row.conditional) for row in rows), default=0)
    return Listing(
        "Acceptance by draft position",
        ["drafter", "setting", *(str(position + 1) for position in range(longest))],
        [
            [row.variant, str(row.setting), *(f"{rate:.0%}" for rate in row.conditional), *[NONE] * (longest - len(row.conditional))]
            for row in rows
            if row.conditional
        ],
        2,
        "Share of the cycles that accepted all drafts before a position which accepted that one too.",
    )


def _not_measured(result: SweepResult) -> Listing:
    rows = [[skipped.variant, str(skipped.setting), f"hopeless: {skipped.reason}", _number(skipped.foretold)] for skipped in result.skipped]
    rows += [[failed.variant, str(failed.setting), f"failed: {failed.reason}", _number(failed.foretold)] for failed in result.failed]
    return Listing("Not measured", ["drafter", "setting", "why", "x baseline, expected"], rows, 3)


def _pretended(result: SweepResult) -> Listing:
    return Listing(
        "Pretended acceptance",
        ["setting", "acceptance length", "tok/s", "x baseline", "breaks even at"],
        [
            [str(found.setting), f"{point.length:.2f}", f"{point.tokens_per_second:.1f}", f"{point.speedup:.2f}", _number(found.break_even)]
            for found in result.simulations
            for point in found.points
        ],
        1,
        "The engine accepted so many tokens a cycle whatever the drafter said: the text means nothing, the times do.",
    )


def _drift(result: SweepResult) -> list[str]:
    """A warning where the baseline moved more than settings usually differ: intervals over prompts know nothing of the machine."""
    legs = result.baseline_legs
    if len(legs) < 2 or max(legs) <= DRIFT * min(legs):
        return []
    return [
        f"Beware: the baseline itself moved between {min(legs):.1f} and {max(legs):.1f} tok/s while this was measured. Each point is set "
        "against the baseline nearest to it, but the intervals do not hold what the machine did in between; take a quieter machine."
    ]


def _recommendation(result: SweepResult) -> list[str]:
    best = result.best
    if best is None or not result.flags:
        return []
    text = [
        f"{'Take' if result.pays else 'If any, take'} {best.variant} at {best.setting}: {_interval(result.expected_tps, 1)} tok/s are "
        f"expected, {_interval(best.speedup)} x the {_number(result.baseline_tps.value, 1)} tok/s without speculation."
    ]
    if result.rivals:
        close = ", ".join(f"{row.variant} at {row.setting}" for row in result.rivals)
        text.append(f"On these prompts it cannot be told from {close}.")
    if result.engine == "embedded":
        text.append("It was measured with the embedded engine; in another engine verify steps cost otherwise, so sweep there too.")
    return text


def _method(result: SweepResult) -> str:
    legs = result.baseline_legs
    drift = f", from {min(legs):.1f} to {max(legs):.1f} tok/s" if len(legs) > 1 else ""
    return (
        f"Target `{result.target}`, engine {result.engine}, {result.prompts} held-out prompts at every point, the baseline measured "
        f"{len(legs)} times{drift}. Every rate is set against the baseline nearest to it in time, so that a drift of the machine cancels. "
        "Settings are compared here; what the chosen one brings, `eyas bench` measures on more prompts."
    )


def _step_ms(result: SweepResult) -> float:
    return 1000 / result.baseline_tps.value if result.baseline_tps.value else 0.0


def _number(value: float | None, digits: int = 2) -> str:
    return NONE if value is None else f"{value:.{digits}f}"


def _interval(interval: Interval | None, digits: int = 2) -> str:
    if interval is None or interval.value is None:
        return NONE
    ends = "" if interval.low is None else f" ({interval.low:.{digits}f} to {interval.high:.{digits}f})"
    return f"{interval.value:.{digits}f}{ends}"
