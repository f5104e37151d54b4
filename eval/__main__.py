"""``python -m eval -c CONFIG``: ``eyas eval``."""

import sys

from eyas.cli import main

if __name__ == "__main__":
    main(["eval", *sys.argv[1:]])
