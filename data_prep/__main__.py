"""``python -m data_prep -c CONFIG``: ``eyas prep``."""

import sys

from eyas.cli import main

if __name__ == "__main__":
    main(["prep", *sys.argv[1:]])
