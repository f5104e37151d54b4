"""``python -m eval CONFIG [--url URL]``: measure the run's drafters against the baseline and write the report."""

import argparse
import sys
from pathlib import Path

from eval.bench import bench, default_drafters
from eval.report import write_report
from eyas.config import load_config
from eyas.errors import EyasError


def main(arguments: list[str] | None = None) -> int:
    """Run; return the exit code: 0, 1 after an error the user can mend, 130 after Ctrl-C."""
    parser = argparse.ArgumentParser(prog="eval", description="Measure drafters on held-out prompts; the same command resumes.")
    parser.add_argument("config", type=Path, help="YAML config of the run")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides", help="override a config key")
    parser.add_argument("--url", help="measure this server instead of starting the embedded one")
    options = parser.parse_args(arguments)
    try:
        config = load_config(options.config, options.overrides)
        bench(config, options.url, default_drafters(config))
        print(write_report(config))
    except EyasError as error:
        print(f"eval: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("eval: interrupted; the same command resumes", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
