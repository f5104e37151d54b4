"""The report's figures as inline SVG that takes its colours from the page, so that one drawing serves a light and a dark page.

matplotlib draws with placeholder colours; each is then replaced by a CSS variable (--ink, --series-1 ...). Text stays text, in the page's
font. Nothing in the SVG refers to anything outside the page.
"""

import re
from collections.abc import Callable, Sequence
from io import StringIO
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from eval.bench import STARTER
from eval.clients import BASELINE
from eval.summary import Summary, Variant, known_rates
from eval.training import AcceptancePoint, TrainingLog
from eyas.statistics import Interval

# Placeholders: colours that no drawing uses by itself.
INK, MUTED, GRID = "#010203", "#020304", "#030405"
BASE_COLOUR, STARTER_COLOUR, MAIN_COLOUR = "#040506", "#050607", "#060708"
OTHER_COLOURS = ("#070809", "#08090a", "#090a0b")
VARIABLES = {
    INK: "--ink",
    MUTED: "--muted",
    GRID: "--grid",
    BASE_COLOUR: "--baseline",
    STARTER_COLOUR: "--starter",
    MAIN_COLOUR: "--main",
    OTHER_COLOURS[0]: "--other-1",
    OTHER_COLOURS[1]: "--other-2",
    OTHER_COLOURS[2]: "--other-3",
}
WIDTH = 4.8
_STYLE: Any = {
    "svg.fonttype": "none",
    "font.size": 10.5,
    "text.color": INK,
    "axes.labelcolor": MUTED,
    "axes.edgecolor": GRID,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 10.5,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "xtick.color": GRID,
    "ytick.color": GRID,
    "xtick.labelcolor": MUTED,
    "ytick.labelcolor": MUTED,
    "legend.frameon": False,
    "legend.fontsize": 9.5,
    "legend.labelcolor": INK,
    "lines.linewidth": 2.0,
    "errorbar.capsize": 4.0,
}


def colour(name: str, summary: Summary) -> str:
    """The same colour for a variant in every figure."""
    if name == BASELINE:
        return BASE_COLOUR
    if name == summary.main:
        return MAIN_COLOUR
    if name == STARTER:
        return STARTER_COLOUR
    others = [variant.name for variant in summary.variants if variant.name not in {BASELINE, STARTER, summary.main}]
    return OTHER_COLOURS[others.index(name) % len(OTHER_COLOURS)]


def label(name: str) -> str:
    """A variant's name for readers."""
    return {BASELINE: "no speculation"}.get(name, name)


def speed_figure(summary: Summary) -> str:
    """Bars: end-to-end tokens a second of every variant, with intervals."""

    def draw(axes: Axes) -> None:
        shown = [variant for variant in summary.variants if variant.tokens_per_second.value is not None]
        for place, variant in enumerate(reversed(shown)):
            rate = variant.tokens_per_second
            value = rate.value or 0.0
            axes.barh(place, value, height=0.55, color=colour(variant.name, summary))
            if rate.low is not None and rate.high is not None:
                axes.errorbar(value, place, xerr=[[value - rate.low], [rate.high - value]], color=INK, linewidth=1.2)
            axes.annotate(
                f"{value:.1f}", (rate.high or value, place), xytext=(7, 0), textcoords="offset points", va="center", fontweight="bold"
            )
        axes.set_yticks(range(len(shown)), [label(variant.name) for variant in reversed(shown)])
        axes.tick_params(axis="y", labelcolor=INK, length=0)
        axes.grid(visible=False, axis="y")
        axes.set_xlabel("tokens a second, end to end")
        axes.margins(x=0.14)

    return _svg("speed", draw, height=0.9 + 0.55 * len(summary.variants))


def levels_figure(summary: Summary) -> str:
    """Lines: tokens a second of all requests together, by how many are in flight. Only where there are several levels."""
    if len(summary.levels) < 2:
        return ""

    def draw(axes: Axes) -> None:
        places = range(len(summary.levels))  # levels double, so equal steps
        for variant in summary.variants:
            rates = [next(found.tokens_per_second for found in level.variants if found.name == variant.name) for level in summary.levels]
            axes.errorbar(
                places,
                [rate.value or 0.0 for rate in rates],
                yerr=_all_arms(rates),
                fmt="o-",
                color=colour(variant.name, summary),
                label=label(variant.name),
            )
        axes.set_xticks(places, [str(level.concurrency) for level in summary.levels])
        axes.set_ylim(bottom=0)
        axes.set_xlabel("requests in flight")
        axes.set_ylabel("tokens a second, together")
        _legend(axes)

    return _svg("levels", draw, height=3.2)


def level_speedups_figure(summary: Summary) -> str:
    """Lines: speed-up of every drafter by how many requests are in flight, all together. Only where there are several levels."""
    speedups = {
        name: known
        for name in (variant.name for variant in summary.variants)
        if len(known := [found.speedup for level in summary.levels for found in level.variants if found.name == name and found.speedup]) > 1
    }
    if not speedups:
        return ""

    def draw(axes: Axes) -> None:
        places = range(len(summary.levels))
        for name, known in speedups.items():
            values = [speedup.value or 0.0 for speedup in known]
            axes.errorbar(places, values, yerr=_all_arms(known), fmt="o-", color=colour(name, summary), label=label(name))
        axes.axhline(1, color=INK, linewidth=1, linestyle=(0, (4, 3)))
        axes.set_xticks(places, [str(level.concurrency) for level in summary.levels])
        axes.set_xlabel("requests in flight")
        axes.set_ylabel("speed-up")
        _legend(axes)

    return _svg("level-speedups", draw, height=3.2)


def categories_figure(summary: Summary) -> str:
    """Points: acceptance length of every drafter in every category. Only where there are several categories."""
    groups = summary.categories
    if len(groups) < 2:
        return ""
    drafters = [variant.name for variant in summary.variants if variant.name != BASELINE]

    def draw(axes: Axes) -> None:
        for number, drafter in enumerate(drafters):
            offset = 0.5 * ((len(drafters) - 1) / 2 - number) / max(len(drafters), 1)
            known = [(place, group.lengths[drafter]) for place, group in enumerate(reversed(groups)) if group.lengths[drafter].value]
            axes.errorbar(
                [length.value or 0.0 for _, length in known],
                [place + offset for place, _ in known],
                xerr=_all_arms([length for _, length in known]),
                fmt="o",
                color=colour(drafter, summary),
                label=label(drafter),
            )
        axes.set_yticks(range(len(groups)), [group.name for group in reversed(groups)])
        axes.set_ylim(-0.6, len(groups) - 0.4)
        axes.tick_params(axis="y", labelcolor=INK, length=0)
        axes.grid(visible=False, axis="y")
        axes.set_xlabel("acceptance length")
        axes.legend(loc="lower center", bbox_to_anchor=(0.45, 1.0), ncols=3)

    return _svg("categories", draw, height=1.3 + (0.24 + 0.16 * len(drafters)) * len(groups))


def contexts_figure(summary: Summary) -> str:
    """Lines: acceptance length of every drafter by context length."""
    groups = summary.contexts.groups
    if len(groups) < 2:
        return ""

    def draw(axes: Axes) -> None:
        for variant in summary.variants:
            known = [(place, group.lengths[variant.name]) for place, group in enumerate(groups) if variant.name in group.lengths]
            if known:
                axes.errorbar(
                    [place for place, _ in known],
                    [length.value or 0.0 for _, length in known],
                    yerr=_all_arms([length for _, length in known]),
                    fmt="o-",
                    color=colour(variant.name, summary),
                    label=label(variant.name),
                )
        axes.set_xticks(range(len(groups)), [group.name for group in groups])
        axes.set_xlim(-0.3, len(groups) - 0.7)
        axes.set_ylim(bottom=1)
        axes.set_xlabel("tokens of context")
        axes.set_ylabel("acceptance length")
        _legend(axes)

    return _svg("contexts", draw, height=3.2)


def acceptance_figure(summary: Summary, training: TrainingLog | None, kind: str) -> str:
    """Lines: acceptance by draft position, ``kind`` 'unconditional' or 'conditional', every drafter served, and offline beside it."""

    def draw(axes: Axes) -> None:
        longest = 1
        for variant in summary.variants:
            rates = known_rates(getattr(variant, kind))
            if not rates:
                continue
            longest = max(longest, len(rates))
            axes.plot(_positions(rates), rates, "o-", color=colour(variant.name, summary), label=f"{label(variant.name)}, served")
        for name, point in _offline(summary, training):
            rates = known_rates(getattr(point, kind))
            if rates:
                axes.plot(
                    _positions(rates), rates, "s:", color=colour(name, summary), markerfacecolor="none", label=f"{label(name)}, offline"
                )
                longest = max(longest, len(rates))
        axes.set_xticks(range(1, longest + 1))
        axes.set_xlim(0.7, longest + 0.3)
        axes.set_ylim(0, 1)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        axes.set_xlabel("draft position in the cycle")
        _legend(axes)

    return _svg(f"acceptance-{kind}", draw, height=3.4)


def break_even_figure(summary: Summary, main: Variant) -> str:
    """The line speed-up = length / break-even for the main variant's cycle time, and every variant where it was measured."""
    threshold = main.break_even.value if main.break_even else None
    if threshold is None:
        return ""

    def draw(axes: Axes) -> None:
        right = max((main.draft_steps or 1) + 1.0, 1.15 * threshold)
        axes.plot([1, right], [1 / threshold, right / threshold], color=MUTED, linewidth=1.4)
        axes.axhline(1, color=INK, linewidth=1, linestyle=(0, (4, 3)))
        axes.plot([threshold, threshold], [0, 1], color=INK, linewidth=1, linestyle=(0, (4, 3)))
        axes.annotate(f"break-even {threshold:.2f}", (threshold, 0), xytext=(5, 7), textcoords="offset points", fontsize=9.5)
        for variant in summary.variants:
            length, speedup = variant.length, variant.decode_speedup
            if length is None or speedup is None or length.value is None or speedup.value is None:
                continue
            shade = colour(variant.name, summary)
            axes.errorbar(
                length.value,
                speedup.value,
                xerr=_arms(length),
                yerr=_arms(speedup),
                fmt="o",
                color=shade,
                label=label(variant.name),
                markersize=7,
            )
        axes.set_xlim(1, right)
        axes.set_ylim(0, max(1.3, right / threshold))
        axes.set_xlabel("acceptance length (tokens a verify step)")
        axes.set_ylabel("speed-up of decoding")
        _legend(axes)

    return _svg("break-even", draw, height=3.4)


def prediction_figure(summary: Summary, main: Variant) -> str:
    """Line: predicted decoding rate by number of drafts, the measured one marked, the baseline as a line."""
    if not summary.predictions or summary.cost is None:
        return ""
    predictions, cost = summary.predictions, summary.cost

    def draw(axes: Axes) -> None:
        rates = [prediction.tokens_per_second for prediction in predictions]
        steps = [prediction.steps for prediction in predictions]
        baseline = 1000 / cost.baseline_ms
        axes.plot(steps, rates, "o-", color=MAIN_COLOUR, markerfacecolor="none", label="predicted")
        measured = main.decode_tokens_per_second
        axes.errorbar(cost.steps, measured.value or 0.0, yerr=_arms(measured), fmt="o", color=MAIN_COLOUR, markersize=7, label="measured")
        axes.axhline(baseline, color=BASE_COLOUR, linestyle=(0, (4, 3)), label="no speculation")
        axes.set_ylim(0, 1.15 * max(*rates, baseline))
        axes.set_xticks(steps)
        axes.set_xlabel("drafts a cycle")
        axes.set_ylabel("tokens a second, decoding")
        _legend(axes)

    return _svg("prediction", draw, height=3.2)


def time_figure(summary: Summary) -> str:
    """Stacked bars: milliseconds of a cycle by part, one baseline token for comparison."""
    shown = [variant for variant in summary.variants if variant.parts is not None]
    if not shown or summary.cost is None:
        return ""
    cost = summary.cost
    names = ("verify", "extend", "draft", "prompt", "overhead")
    shades = (MAIN_COLOUR, OTHER_COLOURS[0], STARTER_COLOUR, OTHER_COLOURS[1], BASE_COLOUR)

    def draw(axes: Axes) -> None:
        for place, variant in enumerate(reversed(shown)):
            left = 0.0
            for name, shade in zip(names, shades, strict=True):
                width = max(float(getattr(variant.parts, f"{name}_ms")), 0.0)
                axes.barh(place, width, left=left, height=0.5, color=shade, label=name if place == 0 else None)
                left += width
        top = len(shown)
        axes.barh(top, cost.single_ms, height=0.5, color=MAIN_COLOUR)
        axes.barh(top, max(cost.baseline_ms - cost.single_ms, 0.0), left=cost.single_ms, height=0.5, color=BASE_COLOUR)
        axes.set_yticks(range(top + 1), [*(f"{variant.name}: a cycle" for variant in reversed(shown)), "baseline: a token"])
        axes.tick_params(axis="y", labelcolor=INK, length=0)
        axes.grid(visible=False, axis="y")
        axes.set_xlabel("milliseconds")
        axes.legend(loc="lower center", bbox_to_anchor=(0.4, 1.0), ncols=5, handlelength=0.9, columnspacing=1.0, handletextpad=0.4)

    return _svg("time", draw, height=1.4 + 0.5 * (len(shown) + 1))


def loss_figure(training: TrainingLog) -> str:
    """Line: training loss over optimiser steps."""
    if not training.loss:
        return ""

    def draw(axes: Axes) -> None:
        axes.plot([point.step for point in training.loss], [point.loss for point in training.loss], color=MAIN_COLOUR)
        axes.set_xlabel("optimiser step")
        axes.set_ylabel("training loss")

    return _svg("loss", draw, height=3.0)


def offline_figure(training: TrainingLog) -> str:
    """Line: offline acceptance length on held-out rows over optimiser steps; step 0 is the drafter that training started from."""
    if not training.acceptance:
        return ""

    def draw(axes: Axes) -> None:
        steps, lengths = [point.step for point in training.acceptance], [point.length for point in training.acceptance]
        axes.plot(steps, lengths, "o-", color=MAIN_COLOUR, markersize=4)
        kept = training.best
        if kept is not None:
            axes.plot([kept.step], [kept.length], "o", color=MAIN_COLOUR, markersize=9, label=f"kept: step {kept.step}, {kept.length:.3f}")
            axes.legend(loc="lower right")
        axes.set_xlabel("optimiser step")
        axes.set_ylabel("offline acceptance length")

    return _svg("offline", draw, height=3.0)


def _offline(summary: Summary, training: TrainingLog | None) -> list[tuple[str, AcceptancePoint]]:
    """Offline rates beside the served ones: the kept checkpoint is the result, step 0 is the warm start."""
    if training is None:
        return []
    points: list[tuple[str, AcceptancePoint]] = []
    if summary.variant(STARTER) is not None and training.start is not None:
        points.append((STARTER, training.start))
    if summary.main is not None and training.best is not None:
        points.append((summary.main, training.best))
    return points


def _positions(rates: Sequence[float]) -> list[int]:
    return list(range(1, len(rates) + 1))


def _arms(interval: Interval) -> list[list[float]] | None:
    if interval.value is None or interval.low is None or interval.high is None:
        return None
    return [[max(interval.value - interval.low, 0.0)], [max(interval.high - interval.value, 0.0)]]


def _all_arms(intervals: Sequence[Interval]) -> list[list[float]]:
    """Error bars of several points; a value without an interval gets none."""
    arms = [_arms(interval) or [[0.0], [0.0]] for interval in intervals]
    return [[low[0] for low, _ in arms], [high[0] for _, high in arms]]


def _legend(axes: Axes) -> None:
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="best")


def _svg(name: str, draw: Callable[[Axes], None], height: float) -> str:
    """Draw one figure. ``name`` salts the ids, so that two figures of one page never share any."""
    with matplotlib.rc_context({**_STYLE, "svg.hashsalt": name}):
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        draw(figure.add_subplot())
        buffer = StringIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    return _inline(buffer.getvalue())


def _inline(svg: str) -> str:
    """A standalone SVG document as an element of an HTML page: no declarations, no unused ids, colours from the page."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r'\sxmlns(:\w+)?="[^"]*"', "", svg)
    svg = re.sub(r'<svg[^>]*?(viewBox="[^"]*")[^>]*>', r'<svg \1 aria-hidden="true">', svg, count=1)
    svg = re.sub(r"font: ([^;\"]*?)px [^;\"]*", r"font-size: \1px", svg)
    referred = set(re.findall(r"#([\w.-]+)", svg))
    svg = re.sub(r'\sid="([^"]*)"', lambda found: found.group(0) if found.group(1) in referred else "", svg)
    for placeholder, variable in VARIABLES.items():
        svg = svg.replace(placeholder, f"var({variable})")
    return svg
