"""``python -m eyas COMMAND``: the same as ``eyas COMMAND``."""

from eyas.cli import main

main()
