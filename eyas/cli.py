"""The command line. Every command reads one config; errors a user can mend become one line and exit code 1."""

import os
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from eyas.errors import EyasError

if TYPE_CHECKING:
    from eval.checks import Check

# The heavy libraries (torch, transformers) are imported inside the commands: --help must answer at once.


class Commands(TyperGroup):
    """All commands: an EyasError is one line on stderr and exit code 1, Ctrl-C is one line and 130."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command that was asked for."""
        try:
            return super().invoke(ctx)
        except EyasError as error:
            print(f"eyas: {error}", file=sys.stderr)
            raise typer.Exit(1) from None
        except KeyboardInterrupt as stop:
            if os.environ.get("RANK", "0") == "0":
                print(f"eyas: interrupted, {str(stop) or 'what was finished is kept'}; the same command resumes", file=sys.stderr)
            raise typer.Exit(130) from None


app = typer.Typer(
    name="eyas",
    cls=Commands,
    help="Fine-tune EAGLE-3 drafters until speculative decoding pays.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


class LoaderOf(StrEnum):
    """Engines whose loader an export can be checked with."""

    sglang = "sglang"
    vllm = "vllm"


class OnInterrupt(StrEnum):
    """What an interrupt does to a server that this command started."""

    stop = "stop"
    detach = "detach"


ConfigOption = Annotated[Path, typer.Option("--config", "-c", help="YAML config of the run")]
SetOption = Annotated[list[str] | None, typer.Option("--set", "-s", help="override a config key, e.g. --set train.epochs=1")]
DEFAULT_CONFIG = Path("configs/smollm2.yaml")


@app.command()
def prep(
    config: ConfigOption = DEFAULT_CONFIG,
    heldout: Annotated[
        bool, typer.Option("--heldout", help="only the held-out prompts, unanswered: enough to measure drafters that exist already")
    ] = False,
    overrides: SetOption = None,
) -> None:
    """Get replies to the prompts and capture the target's hidden states; resumes where it stopped."""
    from eyas.config import load_config

    loaded = load_config(config, overrides)
    if heldout:
        from data_prep.heldout import write_heldout

        print(write_heldout(loaded))
    else:
        from functools import partial

        from data_prep.prep import run_prep
        from eval.launcher import capturing

        run_prep(loaded, partial(capturing, loaded))


@app.command()
def train(config: ConfigOption = DEFAULT_CONFIG, overrides: SetOption = None) -> None:
    """Fine-tune the drafter; resumes from its last checkpoint. For several GPUs: accelerate launch -m train -c CONFIG."""
    from eyas.config import load_config
    from train.trainer import train as run_train

    run_train(load_config(config, overrides))


@app.command()
def export(
    config: ConfigOption = DEFAULT_CONFIG,
    check: Annotated[
        LoaderOf | None, typer.Option(help="load it with this engine's own loader (under engine.python) and compare; no server, no GPU")
    ] = None,
    overrides: SetOption = None,
) -> None:
    """Write the best checkpoint as a folder that SGLang and vLLM load, read it back and compare."""
    from eval.export import export as run_export
    from eyas.config import load_config

    loaded = load_config(config, overrides)
    folder = run_export(loaded)
    if check is not None:
        from eval.loader_check import check_loader
        from eyas.folder import read_drafter

        written = read_drafter(folder)
        _tell(check_loader(loaded, folder, check.value, written.drafter, written.layers), str(folder))


@app.command()
def doctor(
    export: Annotated[Path, typer.Argument(help="the drafter folder that is served")],
    config: ConfigOption = DEFAULT_CONFIG,
    url: Annotated[str | None, typer.Option(help="a server that serves it already; by default the configured engine is started")] = None,
    prompts: Annotated[int, typer.Option(min=1, help="held-out prompts sent, greedily, one at a time")] = 8,
    new_tokens: Annotated[int, typer.Option(min=8, help="tokens of each reply")] = 64,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON instead of a table")] = False,
    overrides: SetOption = None,
) -> None:
    """Find why acceptance on a server is below what was measured offline: compares everything in between and names the culprit.

    Exit code: 0 when nothing is wrong, 1 when a fault was found.
    """
    from eval.doctor import examine
    from eyas.config import load_config

    found = examine(load_config(config, overrides), export, url, prompts, new_tokens)
    if as_json:
        print(found.json())
        raise typer.Exit(0 if found.healthy else 1)
    _tell(found.checks, str(export))


@app.command()
def show(
    row: Annotated[str, typer.Argument(help="number of the row, from 0, or the beginning of its key")],
    config: ConfigOption = DEFAULT_CONFIG,
    split: Annotated[str, typer.Option(help="train, greedy or sampled")] = "train",
    overrides: SetOption = None,
) -> None:
    """Print one row of the store with its supervised tokens in colour."""
    from data_prep.show import show as run_show
    from eyas.config import load_config

    run_show(load_config(config, overrides), row, split)


@app.command()
def serve(
    config: ConfigOption = DEFAULT_CONFIG,
    variant: Annotated[str | None, typer.Option(help="drafter to serve with, or 'none' for the baseline; by default the export")] = None,
    port: Annotated[int | None, typer.Option(help="instead of engine.port; 0 takes a free one")] = None,
    detach: Annotated[bool, typer.Option("--detach", help="return as soon as the server is started; `eyas wait` watches it")] = False,
    on_interrupt: Annotated[OnInterrupt, typer.Option(help="what Ctrl-C does to the server")] = OnInterrupt.stop,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="print the command and its environment to paste, start nothing")] = False,
    overrides: SetOption = None,
) -> None:
    """Serve the target over HTTP by the engine of the config (embedded, SGLang or vLLM), watch it start, and stay until it ends.

    The server stays when this command is killed or its terminal is lost: `eyas wait` finds it again.

    Exit code: 0 when it was stopped or left on request after it was ready (or --detach), 1 when it died or could not be started,
    130 when it was interrupted and stopped before it was ready.
    """
    from eval.bench import RESULT, servable_drafters
    from eval.launcher import dry_run as run_dry
    from eval.launcher import serve as run_serve
    from eyas.config import load_config

    loaded, variant = load_config(config, overrides), variant or RESULT
    drafters = servable_drafters(loaded, variant)
    if dry_run:
        print(run_dry(loaded, drafters, variant, port))
    else:
        run_serve(loaded, drafters, variant, port, detach, stop_on_interrupt=on_interrupt is OnInterrupt.stop)


@app.command()
def wait(
    config: ConfigOption = DEFAULT_CONFIG,
    variant: Annotated[str | None, typer.Option(help="which server, when several were started")] = None,
    overrides: SetOption = None,
) -> None:
    """Watch a server that was started before, from any terminal, until it is ready; print its URL.

    Ctrl-C leaves the server alone. Exit code: 0 when it is ready, 1 when it is dead or given up, 130 when interrupted.
    """
    from eval.launcher import wait as run_wait
    from eyas.config import load_config

    try:
        print(run_wait(load_config(config, overrides), variant))
    except KeyboardInterrupt:
        raise KeyboardInterrupt("the server goes on") from None


@app.command()
def stop(
    config: ConfigOption = DEFAULT_CONFIG,
    variant: Annotated[str | None, typer.Option(help="which server; by default all of this run")] = None,
    overrides: SetOption = None,
) -> None:
    """End this run's servers with all their processes, and see that their GPU memory is free.

    Exit code: 0 when none of them runs any more, also when none did; 1 when something could not be ended.
    """
    from eval.launcher import stop as run_stop
    from eyas.config import load_config

    for name in run_stop(load_config(config, overrides), variant) or ["no server of this run was running"]:
        print(name if " " in name else f"server {name} has ended")


@app.command()
def bench(
    config: ConfigOption = DEFAULT_CONFIG,
    url: Annotated[str | None, typer.Option(help="measure this server, as it is, instead of starting the configured engine")] = None,
    overrides: SetOption = None,
) -> None:
    """Measure the run's drafters against the baseline on held-out prompts; resumes where it stopped."""
    from eval.bench import bench as run_bench
    from eval.bench import default_drafters
    from eyas.config import load_config

    loaded = load_config(config, overrides)
    print(run_bench(loaded, url, default_drafters(loaded)))


@app.command()
def sweep(
    config: ConfigOption = DEFAULT_CONFIG,
    simulate: Annotated[bool, typer.Option(help="sglang: pretend acceptance lengths, to see what a drafter would have to reach")] = False,
    overrides: SetOption = None,
) -> None:
    """Measure draft steps, top-k and draft tokens, say what a cycle costs and which setting pays; resumes where it stopped."""
    from rich.console import Console

    from eval.sweep import sweep as run_sweep
    from eval.sweep_report import terminal
    from eyas.config import load_config

    loaded = load_config(config, overrides)
    Console().print(terminal(run_sweep(loaded, simulate)))
    print(loaded.folder("sweep"))


@app.command()
def report(config: ConfigOption = DEFAULT_CONFIG, overrides: SetOption = None) -> None:
    """Write report.json, report.md and report.html from what was measured."""
    from eval.report import write_report
    from eyas.config import load_config

    print(write_report(load_config(config, overrides)))


@app.command()
def compare(
    first: Annotated[Path, typer.Argument(help="output folder of a run, or its bench folder (bench, bench.1 ...)")],
    second: Annotated[Path, typer.Argument(help="another one")],
    as_json: Annotated[bool, typer.Option("--json", help="all numbers as JSON")] = False,
) -> None:
    """Say by how much two benches differ, and what else differs between them, likeliest explanation first."""
    import json

    from rich.console import Console

    from eval.compare import compare_runs, comparison_json, comparison_text

    found = compare_runs(first, second)
    if as_json:
        print(json.dumps(comparison_json(found), indent=2, ensure_ascii=False))
    else:
        Console(highlight=False, markup=False).print(comparison_text(found))


@app.command("eval")
def evaluate(config: ConfigOption = DEFAULT_CONFIG, overrides: SetOption = None) -> None:
    """Export, serve, measure against the baseline, report: all of stage three."""
    export(config, None, overrides)
    bench(config, None, overrides)
    report(config, overrides)


@app.command()
def plan(
    config: Annotated[Path | None, typer.Option("--config", "-c", help="YAML config of a run: plan all of it")] = None,
    baseline_tps: Annotated[float | None, typer.Option(help="tokens a second of the server without speculation, one request")] = None,
    cycle_ms: Annotated[float | None, typer.Option(help="milliseconds of one draft+verify cycle")] = None,
    want_tps: Annotated[float | None, typer.Option(help="tokens a second you wish for")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="of a run: print JSON instead of tables")] = False,
    overrides: SetOption = None,
) -> None:
    """Say what a run takes (disk, hours, memory) and gains, from its config; or, without one, which acceptance length breaks even."""
    from rich.console import Console

    if config is not None:
        given = {"baseline_tps": baseline_tps, "cycle_ms": cycle_ms, "want_tps": want_tps}
        options = [f"node.{name}={value}" for name, value in given.items() if value is not None]
        _plan_run(config, [*(overrides or []), *options], as_json)
        return
    if baseline_tps is None or cycle_ms is None:
        raise EyasError("plan: give --config of a run, or --baseline-tps and --cycle-ms")
    if as_json or overrides:
        raise EyasError("plan: --json and --set are for the plan of a run, give its --config")
    from eval.economics import plan as make_plan
    from eval.economics import plan_table

    Console().print(plan_table(make_plan(baseline_tps, cycle_ms, want_tps)))


def _plan_run(config: Path, overrides: list[str], as_json: bool) -> None:
    """Every stage's part of the plan of a run, in one sheet."""
    import json

    from rich.console import Console

    from eval.plan import add_break_even, measured_by_bench
    from eyas.config import load_config
    from eyas.plan import add_phases, begin_plan, measured_so_far
    from eyas.shapes import read_shapes
    from train.costs import parameters
    from train.plan import add_training

    loaded = load_config(config, overrides)
    shapes, known = read_shapes(loaded), measured_so_far(loaded) | measured_by_bench(loaded)
    sheet = begin_plan(loaded, shapes, parameters(shapes.drafter), known)
    add_training(sheet, loaded, shapes.drafter, known)
    add_phases(sheet, loaded, known)
    add_break_even(sheet, loaded, known)
    if as_json:
        print(json.dumps(sheet.json(), indent=2, ensure_ascii=False))
    else:
        Console(highlight=False).print(sheet.tables())


@app.command()
def inspect(path: Path, verify: Annotated[bool, typer.Option(help="read every byte and check it against its checksum")] = False) -> None:
    """Say what a folder is: target, state store, drafter, export, checkpoint, replies."""
    from rich.console import Console

    from eyas.inspect_folder import inspect as describe

    Console().print(describe(path, verify))


def _tell(checks: "list[Check]", title: str) -> None:
    """Print findings as a table; exit code 1 when one is a fault."""
    from rich.console import Console

    from eval.checks import faults, table

    Console().print(table(checks, title))
    if found := faults(checks):
        raise EyasError(f"{title}: {len(found)} of {len(checks)} checks found a fault: {', '.join(check.name for check in found)}")


def main(arguments: list[str] | None = None) -> None:
    """Entry point."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    app(arguments)
