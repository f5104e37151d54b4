"""Write the report of a bench folder: report.json (all numbers), report.md, and report.html (one file, nothing from outside).

Reads only bench/, train/log.jsonl and manifests, so it can be written again anywhere at any time, with nothing measured anew.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from eval import figures
from eval.bench import STARTER, read_measurements
from eval.clients import BASELINE
from eval.statistics import Interval
from eval.summary import Summary, Variant, summarise
from eval.training import TrainingLog, read_training
from eyas.config import Config
from eyas.files import digest_file, write_json, write_text
from eyas.manifest import NAME, Manifest, begin, finish, read_manifest

_OWN_ARGUMENTS = {"eyas", "port", "host", "nccl_port", "random_seed", "launch_command", "pid", "start_time", "uptime"}
"""Server arguments that mean nothing for a comparison; those of speculation itself differ by intent."""


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
    conditions: dict[str, Any]


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
    conditions = _conditions(config, measured, summary)
    return Report(
        headline=headline(summary),
        summary=summary,
        training=read_training(config.folder("train")),
        notes=_notes(summary, measured, temperature),
        conditions=conditions,
    )


def headline(summary: Summary) -> Headline:
    """Does speculation pay here, what did fine-tuning change, and what decides it."""
    main = summary.variant(summary.main)
    if main is None:
        return Headline("cannot be told", "Only the baseline was measured.", "", "")
    if main.speedup is None or main.speedup.value is None:
        return Headline("cannot be told", "The baseline was not measured: there is nothing to compare with.", _gain(summary, main), "")
    times = f"{main.speedup.value:.2f} times the baseline's end-to-end speed ({interval(main.speedup)})"
    if summary.pays is None:
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


def _notes(summary: Summary, measured: Manifest, temperature: float) -> list[str]:
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
    for variant in summary.variants:
        if variant.differences is not None and variant.differences.differing:
            notes.append(
                f"{variant.differences.differing} of {variant.differences.requests} greedy replies of {variant.name} differ from the "
                "baseline's. Rounding can do that (a forward over one position and one over several differ in the last bits), "
                "and so can a fault of the engine."
            )
    notes += [f"Servers differ in {difference}." for difference in argument_differences(measured.holds.get("servers", {}))]
    return notes


def argument_differences(servers: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Resolved server arguments that differ from the baseline's, apart from speculation itself: 'NAME: 48 (result), None (none)'."""
    base = servers.get(BASELINE, {})
    found = []
    for name, info in servers.items():
        for key in sorted({*base, *info} if base else set()):
            if "speculative" not in key and key not in _OWN_ARGUMENTS and base.get(key) != info.get(key):
                found.append(f"{key}: {info.get(key)} ({name}), {base.get(key)} (baseline)")
    return found


def _conditions(config: Config, measured: Manifest, summary: Summary) -> dict[str, Any]:
    evaluated, engine, machine = measured.config["eval"], measured.config["engine"], measured.holds.get("machine", {})
    main = summary.variant(summary.main)
    servers = measured.holds.get("servers", {})
    foreign = any(not isinstance(info.get("eyas"), dict) for info in servers.values())
    order = "one server after the other" if foreign else "every variant on each in an order that rotates"
    return {
        "target": measured.config["target"]["model"],
        "warm start": config.drafter.init,
        "engine": "a server started by somebody else" if foreign else f"{engine['kind']}, {engine['dtype']}, one request at a time",
        "drafts a cycle": main.draft_steps if main else None,
        "temperature": evaluated["temperature"],
        "new tokens at most": evaluated["max_new_tokens"],
        "prompts": f"{summary.prompts} held-out chat prompts, {order}, cache flushed before each request",
        "intervals": f"95 %, BCa bootstrap over prompts, {config.eval.bootstrap:,} resamples of ratios of sums, comparisons paired",
        "looping": measured.holds.get("loop_rule"),
        "machine of the client" if foreign else "machine": ", ".join(
            str(value)
            for value in (machine.get("processor"), f"{machine.get('cores')} cores", machine.get("architecture"), machine.get("system"))
            if value
        ),
        "threads": next((info["eyas"].get("threads") for info in servers.values() if isinstance(info.get("eyas"), dict)), None),
        "OMP_NUM_THREADS": machine.get("omp_num_threads"),
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
    environment.filters["shade"] = lambda name: figures.VARIABLES[figures.colour(name, report.summary)]
    return environment.get_template(template).render(
        report=report,
        summary=report.summary,
        main=report.summary.variant(report.summary.main),
        starter=report.summary.variant(STARTER),
        drafters=[variant for variant in report.summary.variants if variant.name != BASELINE],
        figures=_figures(report) if template.endswith(".html.j2") else {},
    )


def _figures(report: Report) -> dict[str, str]:
    summary, training = report.summary, report.training
    main = summary.variant(summary.main)
    drawn = {"speed": figures.speed_figure(summary), "time": figures.time_figure(summary)}
    if main is not None:
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
