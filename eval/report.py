"""Write the report of a bench folder: report.json (all numbers), report.md, and report.html (one file, nothing from outside).

Reads only bench/, train/log.jsonl and manifests, so it can be written again anywhere at any time, with nothing measured anew.
"""

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from eval import figures
from eval.arguments import ArgumentComparison, argument_text, compare_arguments
from eval.bench import STARTER
from eval.clients import BASELINE
from eval.conditions import LegRow, leg_rows, read_conditions
from eval.measurement import read_measurements
from eval.summary import Summary, Variant, summarise
from eval.training import TrainingLog, read_training
from eyas.config import Config
from eyas.files import digest_file, write_json, write_text
from eyas.manifest import NAME, Manifest, begin, finish, read_manifest
from eyas.statistics import Interval


@dataclass(frozen=True)
class Headline:
    """What a reader takes away, in sentences."""

    verdict: str
    """'pays', 'does not pay' or 'cannot be told'."""
    sentence: str
    gain: str
    reason: str


@dataclass(frozen=True)
class Report:
    """Everything the three files are made from."""

    headline: Headline
    summary: Summary
    training: TrainingLog | None
    notes: list[str]
    arguments: ArgumentComparison
    legs: list[LegRow]
    engine_figure: str
    """What the engine calls its own acceptance length, and by which rule it counts."""
    conditions: dict[str, Any]
    environment: dict[str, str]


def write_report(config: Config) -> Path:
    """Write report.json, report.md and report.html of a run and return the path of report.html.

    Raises EyasError when nothing was measured yet, or not to the end.
    """
    folder, bench_folder = config.folder("report"), config.folder("bench")
    measured = read_manifest(bench_folder, "bench")
    report = make_report(config, bench_folder, measured)
    if (folder / NAME).exists():
        (folder / NAME).unlink()  # a report is cheap and always written anew
    begin(
        folder,
        "report",
        {"bootstrap": config.eval.bootstrap, "seed": config.seed},
        {"bench": digest_file(bench_folder / "measurements.jsonl")},
    )
    write_json(folder / "report.json", {"format": 1, **_plain(asdict(report))})
    write_text(folder / "report.md", render(report, "report.md.j2"))
    write_text(folder / "report.html", render(report, "report.html.j2"))
    finish(folder, {"prompts": report.summary.prompts, "verdict": report.headline.verdict})
    return folder / "report.html"


def make_report(config: Config, bench_folder: Path, measured: Manifest) -> Report:
    """All numbers and sentences, nothing written."""
    temperature = float(measured.config["eval"]["temperature"])
    summary = summarise(read_measurements(bench_folder), temperature, config.eval.bootstrap, config.seed)
    recorded = read_conditions(bench_folder)
    apart = {} if _switched(measured) else measured.holds.get("servers", {})  # one server has nothing to be compared with
    arguments = compare_arguments(apart, measured.holds.get("equalised", {}))
    return Report(
        headline=headline(summary),
        summary=summary,
        training=read_training(config.folder("train")),
        notes=_notes(summary, measured, temperature, arguments),
        arguments=arguments,
        legs=leg_rows(recorded),
        engine_figure=_engine_figure(measured),
        conditions=_conditions(config, measured, summary),
        environment=recorded[-1]["environment"] if recorded else {},
    )


def headline(summary: Summary) -> Headline:
    """Does speculation pay here, what did fine-tuning change, and what decides it."""
    main = summary.variant(summary.main)
    if main is None:
        return Headline("cannot be told", "Only the baseline was measured.", "", "")
    if main.speedup is None or main.speedup.value is None:
        return Headline("cannot be told", "The baseline was not measured: there is nothing to compare with.", _gain(summary, main), "")
    times = f"{main.speedup.value:.2f} times the baseline's end-to-end speed ({interval(main.speedup)})"
    if summary.drift is not None and main.name in summary.drift.hides:
        verdict, sentence = (
            "cannot be told",
            f"It cannot be told whether speculation pays: {times}, but the baseline by itself changed as much: after the drafters it was "
            f"{number(summary.drift.change.value)} times as fast as before them.",
        )
    elif summary.pays is None:
        verdict, sentence = (
            "cannot be told",
            f"It cannot be told yet whether speculation pays: {times}, and 1 lies inside the interval or it has none.",
        )
    elif summary.pays:
        verdict, sentence = "pays", f"Speculation pays here: {times}."
    else:
        verdict, sentence = "does not pay", f"Speculation does not pay here: {times}."
    return Headline(verdict, sentence, _gain(summary, main), _reason(main))


def _gain(summary: Summary, main: Variant) -> str:
    starter = summary.variant(STARTER)
    if summary.gain is None or summary.gain.value is None or starter is None or starter.length is None or main.length is None:
        return ""
    direction = "longer than before" if summary.gain.value > 0 else "shorter than before"
    judged = direction if summary.gain.excludes(0.0) else "no difference that the data can tell"
    return (
        f"Acceptance length {number(main.length.value)} after fine-tuning, {number(starter.length.value)} before: "
        f"a difference of {summary.gain.value:+.2f} ({interval(summary.gain, signed=True)}), {judged}."
    )


def _reason(main: Variant) -> str:
    """Acceptance against break-even, and which cost is the largest beside the verify step."""
    if main.length is None or main.break_even is None or main.length.value is None or main.break_even.value is None:
        return ""
    over = main.length.value >= main.break_even.value
    text = (
        f"A cycle brings {main.length.value:.2f} tokens and must bring {main.break_even.value:.2f} to break even: "
        f"{'above' if over else 'below'} by {abs(main.length.value - main.break_even.value):.2f}."
    )
    if main.parts is not None:
        parts = {"drafting": main.parts.draft_ms, "the drafter's extension": main.parts.extend_ms, "overhead": main.parts.overhead_ms}
        parts["the drafter's pass over the prompt"] = main.parts.prompt_ms
        name = max(parts, key=lambda part: parts[part])
        text += (
            f" The verify step takes {main.parts.verify_ms:.1f} of the cycle's {main.parts.cycle_ms:.1f} ms; "
            f"the largest other cost is {name} ({parts[name]:.1f} ms)."
        )
    return text


def _notes(summary: Summary, measured: Manifest, temperature: float, arguments: ArgumentComparison) -> list[str]:
    """What a careful reader must know before trusting the numbers."""
    notes = []
    if not measured.complete:
        notes.append("The measurement was not run to its end.")
    if summary.incomplete:
        notes.append(f"{summary.incomplete} prompts were left out: not measured under every variant.")
    if summary.prompts < 20:
        notes.append(f"Only {summary.prompts} prompts: the intervals are rough.")
    if summary.cached_tokens:
        notes.append(
            f"{summary.cached_tokens:,} prompt tokens came from the prefix cache in spite of the flush: first-token times are too good."
        )
    template = measured.holds.get("template") or {}
    if template and template["prompt_tokens"] != template["server_prompt_tokens"]:
        notes.append(
            f"The server's chat template gives other prompts than training saw ({template['server_prompt_tokens']} tokens, "
            f"expected {template['prompt_tokens']}): chat requests will be accepted less than measured here."
        )
    if summary.looping_prompts:
        notes.append(
            f"{summary.looping_prompts} of {summary.prompts} prompts were answered with looping text; "
            "acceptance without them is in the table."
        )
    if temperature > 0:
        notes.append(f"Sampled at temperature {temperature:g}: replies differ between variants by chance and are not compared.")
    notes += _drift_notes(summary, measured)
    for variant in summary.variants:
        if variant.differences is not None and variant.differences.differing:
            notes.append(
                f"{variant.differences.differing} of {variant.differences.requests} greedy replies of {variant.name} differ from the "
                "baseline's. Rounding can do that (a forward over one position and one over several differ in the last bits), "
                "and so can a fault of the engine."
            )
    notes += [f"Servers differ in {difference}." for difference in arguments.remaining]
    return notes


def _drift_notes(summary: Summary, measured: Manifest) -> list[str]:
    """How far the baseline moved by itself, and whether that is as much as somebody claims."""
    drift = summary.drift
    if drift is None:
        apart = len({variant.name for variant in summary.variants}) > 1 and not _switched(measured)
        return ["The baseline was measured once: how far this machine drifts by itself is not known."] if apart else []
    notes = [
        f"The drift of the baseline is as large as the speed-up of {name}: nothing can be said of its speed here." for name in drift.hides
    ]
    if drift.differing:
        notes.append(f"{drift.differing} of {drift.prompts} greedy replies of the baseline differ between before and after.")
    return notes


def _switched(measured: Manifest) -> bool:
    """True when the variants took turns on one server."""
    servers = measured.holds.get("servers", {})
    return bool(servers) and all(isinstance(info.get("eyas"), dict) for info in servers.values())


def _engine_figure(measured: Manifest) -> str:
    if _switched(measured):
        return "embedded engine: spec_accept_length"
    return "vLLM: mean acceptance length" if measured.config["engine"]["kind"] == "vllm" else "SGLang: spec_accept_length"


def _conditions(config: Config, measured: Manifest, summary: Summary) -> dict[str, Any]:
    evaluated, engine, machine = measured.config["eval"], measured.config["engine"], measured.holds.get("machine", {})
    main = summary.variant(summary.main)
    servers = measured.holds.get("servers", {})
    kind, levels = engine["kind"], [level.concurrency for level in summary.levels]
    foreign = measured.holds.get("foreign", kind == "embedded" and not _switched(measured))
    order = "one server after the other"
    if _switched(measured):
        order = "every variant on each in an order that rotates"
    elif summary.drift is not None:
        order = "one server after the other, the baseline before and after the drafters"
    flying = "one request at a time" if levels == [1] else f"{', '.join(map(str, levels))} requests in flight"
    flushed = "before each request" if levels == [1] else "before each request, and before each level with several in flight"
    release = ", ".join(sorted({str(info["version"]) for info in servers.values() if info.get("version")}))
    return {
        "target": measured.config["target"]["model"],
        "warm start": config.drafter.init,
        "engine": (f"a server started by somebody else, {flying}" if foreign else f"{kind}, {engine['dtype']}, {flying}"),
        "version of the engine": release or None,
        "drafts a cycle": main.draft_steps if main else None,
        "temperature": evaluated["temperature"],
        "new tokens at most": evaluated["max_new_tokens"],
        "prompts": f"{summary.prompts} held-out chat prompts, {order}, cache flushed {flushed}",
        "intervals": f"95 %, BCa bootstrap over prompts, {config.eval.bootstrap:,} resamples of ratios of sums, comparisons paired",
        "looping": measured.holds.get("loop_rule"),
        "machine of the client" if foreign else "machine": ", ".join(
            str(value)
            for value in (machine.get("processor"), f"{machine.get('cores')} cores", machine.get("architecture"), machine.get("system"))
            if value
        ),
        "flags": " ".join(f"{name}={value}" for name, value in engine.get("flags", {}).items()) or None,
        "flags with speculation": " ".join(f"{name}={value}" for name, value in engine.get("draft_flags", {}).items()) or None,
        "threads": next((info["eyas"].get("threads") for info in servers.values() if isinstance(info.get("eyas"), dict)), None),
        "versions": ", ".join(f"{name} {value}" for name, value in measured.versions.items()),
        "seed": measured.config["seed"],
    }


def render(report: Report, template: str) -> str:
    """One of the templates beside this file, filled; HTML is escaped, Markdown is not."""
    environment = Environment(
        loader=PackageLoader("eval", ""),
        autoescape=template.endswith(".html.j2"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        finalize=None if template.endswith(".html.j2") else lambda value: str(value).replace("|", r"\|"),
    )
    environment.filters |= {"number": number, "interval": interval, "measured": measured_text, "percent": percent, "label": figures.label}
    environment.filters["value"] = argument_text
    environment.filters["shade"] = lambda name: figures.VARIABLES[figures.colour(name, report.summary)]
    return environment.get_template(template).render(
        report=report,
        summary=report.summary,
        main=report.summary.variant(report.summary.main),
        starter=report.summary.variant(STARTER),
        drafters=[variant for variant in report.summary.variants if variant.name != BASELINE],
        gpus=any(leg.gpus for leg in report.legs),
        figures=_figures(report) if template.endswith(".html.j2") else {},
    )


def _figures(report: Report) -> dict[str, str]:
    summary, training = report.summary, report.training
    main = summary.variant(summary.main)
    drawn = {"speed": figures.speed_figure(summary), "time": figures.time_figure(summary), "levels": figures.levels_figure(summary)}
    drawn["level_speedups"] = figures.level_speedups_figure(summary)
    if main is not None:
        drawn["categories"] = figures.categories_figure(summary)
        drawn["contexts"] = figures.contexts_figure(summary)
        drawn["prediction"] = figures.prediction_figure(summary, main)
        drawn["break_even"] = figures.break_even_figure(summary, main)
        drawn["unconditional"] = figures.acceptance_figure(summary, training, "unconditional")
        drawn["conditional"] = figures.acceptance_figure(summary, training, "conditional")
    if training is not None:
        drawn |= {"loss": figures.loss_figure(training), "offline": figures.offline_figure(training)}
    return {name: svg for name, svg in drawn.items() if svg}


def number(value: float | None, digits: int = 2) -> str:
    """A number for readers, a dash where there is none."""
    return "–" if value is None else f"{value:.{digits}f}"


def percent(value: float | None) -> str:
    """A share for readers."""
    return "–" if value is None else f"{100 * value:.1f} %"


def interval(value: Interval | None, digits: int = 2, signed: bool = False) -> str:
    """The two ends of an interval."""
    if value is None or value.low is None or value.high is None:
        return "no interval"
    sign = "+" if signed else ""
    return f"{value.low:{sign}.{digits}f} to {value.high:{sign}.{digits}f}"


def measured_text(value: Interval | None, digits: int = 2) -> str:
    """A value with its interval, e.g. '1.52 (1.48 to 1.56)'."""
    if value is None or value.value is None:
        return "–"
    return f"{value.value:.{digits}f}" if value.low is None else f"{value.value:.{digits}f} ({interval(value, digits)})"


def _plain(value: Any) -> Any:
    """JSON has no NaN: a number that is none becomes null."""
    if isinstance(value, dict):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
