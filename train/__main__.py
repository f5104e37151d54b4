"""``accelerate launch [--multi_gpu --num_processes N] -m train -c CONFIG``: ``eyas train``, on one or several devices."""

import sys

from eyas.cli import main

if __name__ == "__main__":
    main(["train", *sys.argv[1:]])
