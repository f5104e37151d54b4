"""The figure of a sweep: decoding rate by draft steps, measured points and the curve that the cost model expects."""

from io import StringIO
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from eval.sweep_result import SweepResult
from eyas.statistics import Interval

INK, MUTED, GRID, BASE = "#4c5560", "#5d6672", "#dcdfe3", "#8a939d"
COLOURS = ("#1f6fb2", "#d98a14", "#1b8a6b", "#b0609a", "#7a6bd0")
_STYLE: Any = {
    "svg.fonttype": "none",
    "font.size": 10.5,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": GRID,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "xtick.labelcolor": MUTED,
    "ytick.labelcolor": MUTED,
    "legend.frameon": False,
    "legend.fontsize": 9.5,
    "errorbar.capsize": 3.0,
    "svg.hashsalt": "sweep",
}


def sweep_figure(result: SweepResult) -> str | None:
    """An SVG document; None when nothing but baselines was measured."""
    if not result.rows and not result.simulations:
        return None
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(6.4, 4.0), layout="constrained")
        axes = figure.add_subplot()
        baseline = result.baseline_tps.value or 0.0
        axes.axhline(baseline, color=BASE, linestyle=(0, (4, 3)), label="no speculation")
        if result.rows:
            _by_steps(axes, result, baseline)
        else:
            _by_length(axes, result, baseline)
        axes.set_ylabel("tokens a second, decoding")
        axes.set_ylim(bottom=0)
        axes.legend(loc="best")
        buffer = StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    return buffer.getvalue()


def _by_steps(axes: Axes, result: SweepResult, baseline: float) -> None:
    """Each drafter: its expected curve, its chains with intervals, its trees as open markers. All at the mean baseline of the sweep."""
    for number, name in enumerate(result.drafters):
        colour = COLOURS[number % len(COLOURS)]
        aside = 0.07 * (number - (len(result.drafters) - 1) / 2)  # intervals of several drafters stand side by side
        curve = next((costs.curve for costs in result.costs if costs.variant == name), [])
        axes.plot([f.setting.steps for f in curve], [baseline * f.speedup for f in curve], ":", color=colour, linewidth=1.6)
        for chain, marker, filled in ((True, "o", colour), (False, "D", "none")):
            rows = [row for row in result.rows if row.variant == name and row.setting.chain == chain]
            if rows:
                axes.errorbar(
                    [row.setting.steps + aside for row in rows],
                    [baseline * (row.speedup.value or 0.0) for row in rows],
                    yerr=[[baseline * arm for arm in arms] for arms in zip(*(_arms(row.speedup) for row in rows), strict=True)],
                    fmt=marker,
                    color=colour,
                    markerfacecolor=filled,
                    label=name if chain else f"{name}, trees",
                )
    axes.plot([], [], ":", color=MUTED, label="expected by the cost model")
    axes.set_xticks(sorted({row.setting.steps for row in result.rows}))
    axes.set_xlabel("draft steps")


def _by_length(axes: Axes, result: SweepResult, baseline: float) -> None:
    """Each setting's rate over the pretended acceptance length, and where it crosses the baseline."""
    for number, found in enumerate(result.simulations):
        colour = COLOURS[number % len(COLOURS)]
        lengths, rates = [point.length for point in found.points], [baseline * point.speedup for point in found.points]
        axes.plot(lengths, rates, "o-", color=colour, label=str(found.setting))
        if found.break_even is not None:
            axes.plot(found.break_even, baseline, "x", color=colour, markersize=8)
    axes.set_xlabel("acceptance length, pretended")


def _arms(interval: Interval) -> tuple[float, float]:
    if interval.value is None or interval.low is None or interval.high is None:
        return 0.0, 0.0
    return max(interval.value - interval.low, 0.0), max(interval.high - interval.value, 0.0)
