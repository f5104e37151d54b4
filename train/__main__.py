"""``python -m train CONFIG`` or ``accelerate launch [--num_processes N] -m train CONFIG``: train on one or several devices."""

import argparse
import os
import sys
from pathlib import Path

from eyas.config import load_config
from eyas.errors import EyasError
from train.trainer import train


def main(arguments: list[str] | None = None) -> int:
    """Run; return the exit code: 0, 1 after an error the user can mend, 130 after Ctrl-C."""
    parser = argparse.ArgumentParser(prog="train", description="Fine-tune a drafter on captured states; the same command resumes.")
    parser.add_argument("config", type=Path, help="YAML config of the run")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides", help="override a config key")
    options = parser.parse_args(arguments)
    try:
        train(load_config(options.config, options.overrides))
    except EyasError as error:
        print(f"train: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt as error:
        if os.environ.get("RANK", "0") == "0":
            print(f"train: interrupted, {str(error) or 'nothing new to keep'}; the same command resumes", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
