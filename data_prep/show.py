"""One row in the terminal: what the target reads, with the tokens it is trained to draft in colour."""

from itertools import groupby

from rich.console import Console
from rich.text import Text

from data_prep.replies import SETS, read_rows
from data_prep.rows import Row, Rows
from data_prep.template import Tokens
from eyas.config import Config
from eyas.errors import EyasError
from eyas.target import open_target
from eyas.tokenizer import ChatTokenizer

SUPERVISED = "bold green"
CONTEXT = "dim"


def show(config: Config, row: str, split: str = "train", console: Console | None = None) -> None:
    """Print one row; ``row`` is its number, or the beginning of its key or of its prompt's key.

    Raises EyasError when there is no such set or row, or when the row is quarantined (with the reason).
    """
    if split not in SETS:
        raise EyasError(f"{split} is no set of rows: {', '.join(SETS)}")
    target = open_target(config.target)
    found = _find(read_rows(config, target, split), row, split)
    count = sum(found.tokens.supervised)
    console = console or Console()
    console.print(f"{split} row {found.key[:12]}, prompt {found.prompt_key[:12]}, {found.category}", highlight=False, markup=False)
    console.print(coloured(target.tokenizer(), found.tokens), soft_wrap=True)
    console.print(f"{len(found.tokens.ids)} tokens, {count} supervised (in colour)", highlight=False)


def coloured(tokenizer: ChatTokenizer, tokens: Tokens) -> Text:
    """The row's text, special tokens included, supervised stretches in SUPERVISED and the rest in CONTEXT."""
    text = Text()
    for flag, pairs in groupby(zip(tokens.ids, tokens.supervised, strict=True), key=lambda pair: pair[1]):
        text.append(str(tokenizer.decode([token for token, _ in pairs])), style=SUPERVISED if flag else CONTEXT)
    return text


def _find(rows: Rows, wanted: str, split: str) -> Row:
    if wanted.isdecimal() and int(wanted) < len(rows.usable):
        return rows.usable[int(wanted)]
    for row in rows.usable:
        if row.key.startswith(wanted) or row.prompt_key.startswith(wanted):
            return row
    for fault in rows.quarantined:
        if fault.prompt_key.startswith(wanted):
            raise EyasError(f"the reply to prompt {fault.prompt_key[:12]} is quarantined: {fault.reason}")
    raise EyasError(f"{split} has no row {wanted}: give a number from 0 to {len(rows.usable) - 1}, or the beginning of a key")
