"""The command line. Every command reads one config; errors a user can mend become one line and exit code 1."""

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from eyas.errors import EyasError

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

ConfigOption = Annotated[Path, typer.Option("--config", "-c", help="YAML config of the run")]
SetOption = Annotated[list[str] | None, typer.Option("--set", "-s", help="override a config key, e.g. --set train.epochs=1")]
DEFAULT_CONFIG = Path("configs/smollm2.yaml")


@app.command()
def prep(config: ConfigOption = DEFAULT_CONFIG, overrides: SetOption = None) -> None:
    """Get replies to the prompts and capture the target's hidden states; resumes where it stopped."""
    from data_prep.prep import run_prep
    from eyas.config import load_config

    run_prep(load_config(config, overrides))


@app.command()
def train(config: ConfigOption = DEFAULT_CONFIG, overrides: SetOption = None) -> None:
    """Fine-tune the drafter; resumes from its last checkpoint. For several GPUs: accelerate launch -m train -c CONFIG."""
    from eyas.config import load_config
    from train.trainer import train as run_train

    run_train(load_config(config, overrides))


@app.command()
def export(config: ConfigOption = DEFAULT_CONFIG, overrides: SetOption = None) -> None:
    """Write the best checkpoint as a folder that SGLang loads, read it back and compare."""
    from eval.export import export as run_export
    from eyas.config import load_config

    run_export(load_config(config, overrides))


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
    port: Annotated[int | None, typer.Option(help="instead of engine.port; 0 takes a free one")] = None,
    baseline: Annotated[bool, typer.Option(help="serve without speculation unless a request names a drafter")] = False,
    overrides: SetOption = None,
) -> None:
    """Serve the target with the run's drafters over HTTP on loopback, as a client of SGLang expects it."""
    from eval.bench import RESULT, default_drafters
    from eval.clients import BASELINE
    from eval.server import run_server
    from eyas.config import load_config

    loaded = load_config(config, overrides)
    run_server(loaded, default_drafters(loaded), BASELINE if baseline else RESULT, port)


@app.command()
def bench(
    config: ConfigOption = DEFAULT_CONFIG,
    url: Annotated[str | None, typer.Option(help="measure this server instead of starting the embedded one")] = None,
    overrides: SetOption = None,
) -> None:
    """Measure the run's drafters against the baseline on held-out prompts; resumes where it stopped."""
    from eval.bench import bench as run_bench
    from eval.bench import default_drafters
    from eyas.config import load_config

    loaded = load_config(config, overrides)
    print(run_bench(loaded, url, default_drafters(loaded)))


@app.command()
def report(config: ConfigOption = DEFAULT_CONFIG, overrides: SetOption = None) -> None:
    """Write report.json, report.md and report.html from what was measured."""
    from eval.report import write_report
    from eyas.config import load_config

    print(write_report(load_config(config, overrides)))


@app.command("eval")
def evaluate(config: ConfigOption = DEFAULT_CONFIG, overrides: SetOption = None) -> None:
    """Export, serve, measure against the baseline, report: all of stage three."""
    export(config, overrides)
    bench(config, None, overrides)
    report(config, overrides)


@app.command()
def plan(
    baseline_tps: Annotated[float, typer.Option(help="tokens a second of the server without speculation, one request")],
    cycle_ms: Annotated[float, typer.Option(help="milliseconds of one draft+verify cycle")],
    want_tps: Annotated[float | None, typer.Option(help="tokens a second you wish for")] = None,
) -> None:
    """Say which acceptance length breaks even, and which conditional acceptance that takes."""
    from rich.console import Console

    from eval.economics import plan as make_plan
    from eval.economics import plan_table

    Console().print(plan_table(make_plan(baseline_tps, cycle_ms, want_tps)))


@app.command()
def inspect(path: Path, verify: Annotated[bool, typer.Option(help="read every byte and check it against its checksum")] = False) -> None:
    """Say what a folder is: target, state store, drafter, export, checkpoint, replies."""
    from rich.console import Console

    from eyas.inspect_folder import inspect as describe

    Console().print(describe(path, verify))


def main(arguments: list[str] | None = None) -> None:
    """Entry point."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    app(arguments)
