"""``python -m data_prep CONFIG``: replies and hidden states of a run; the same command resumes."""

import argparse
import sys
from pathlib import Path

from data_prep.prep import run_prep
from eyas.config import load_config
from eyas.errors import EyasError


def main(arguments: list[str] | None = None) -> int:
    """Run; return the exit code: 0, 1 after an error the user can mend, 130 after Ctrl-C."""
    parser = argparse.ArgumentParser(prog="data_prep", description="Get replies and capture hidden states; the same command resumes.")
    parser.add_argument("config", type=Path, help="YAML config of the run")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides", help="override a config key")
    options = parser.parse_args(arguments)
    try:
        run_prep(load_config(options.config, options.overrides))
    except EyasError as error:
        print(f"data_prep: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("data_prep: interrupted; the same command resumes", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
