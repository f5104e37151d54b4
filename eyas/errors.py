"""The one exception a user sees as a message instead of a traceback, and what other libraries' errors say in it."""


class EyasError(Exception):
    """Something the user can mend: the message says what is wrong, where, and what to do.

    Raised where the fault is known; only ``eyas.cli`` turns it into one line and an exit code.
    """


def first_line(error: BaseException) -> str:
    """What a library's error says, cut to the one line that fits into an EyasError; its type when it says nothing."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
