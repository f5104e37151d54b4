"""The one exception a user sees as a message instead of a traceback."""


class EyasError(Exception):
    """Something the user can mend: the message says what is wrong, where, and what to do.

    Raised where the fault is known; only ``eyas.cli`` turns it into one line and an exit code.
    """
