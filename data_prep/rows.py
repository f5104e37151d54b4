"""Rows: tokens and loss mask of each answered conversation, and which of them cannot be used."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from data_prep.prompts import Unusable
from data_prep.template import Tokens, reply_row
from eyas.config import PrepConfig
from eyas.errors import EyasError
from eyas.states import row_key


@dataclass(frozen=True)
class Row:
    """What capture runs through the target; ``key`` is the state store's (of ids and mask), ``prompt_key`` the prompt's."""

    key: str
    prompt_key: str
    category: str
    tokens: Tokens


@dataclass(frozen=True)
class Quarantined:
    """A prompt or row that cannot be used, and why."""

    prompt_key: str
    category: str
    reason: str

    def to_json(self) -> dict[str, str]:
        """As a line of quarantine.jsonl."""
        return {"key": self.prompt_key, "category": self.category, "reason": self.reason}


@dataclass(frozen=True)
class Rows:
    """Usable rows of one set, the quarantined ones, and how many an option left out (``omitted``, no fault of theirs)."""

    usable: list[Row] = field(default_factory=list)
    quarantined: list[Quarantined] = field(default_factory=list)
    omitted: int = 0


def build_rows(records: Iterable[dict[str, Any]], prep: PrepConfig, eos_ids: Sequence[int]) -> Rows:
    """Turn records of a replies file into rows; the first of equal rows stays."""
    usable: dict[str, Row] = {}
    quarantined: list[Quarantined] = []
    omitted = 0
    for record in records:
        if not record["finished"] and prep.replies.unfinished == "drop":
            omitted += 1
            continue
        try:
            found = _tokens(record, eos_ids)
        except Unusable as reason:
            quarantined.append(Quarantined(record["key"], record["category"], str(reason)))
            continue
        for tokens in found:
            try:
                tokens.check(prep.max_length)
                key = row_key(tokens.ids, tokens.supervised)
                if key in usable:
                    raise Unusable("duplicate row")
            except Unusable as reason:
                quarantined.append(Quarantined(record["key"], record["category"], str(reason)))
                continue
            usable[key] = Row(key, record["key"], record["category"], tokens)
    return Rows(list(usable.values()), quarantined, omitted)


def require_share(quarantined: int, total: int, reasons: dict[str, int], prep: PrepConfig) -> None:
    """Raise EyasError, naming the counts, when more than ``prep.max_quarantine`` of the rows are unusable."""
    if quarantined > prep.max_quarantine * total:
        named = ", ".join(f"{count} {reason}" for reason, count in sorted(reasons.items(), key=lambda item: -item[1]))
        raise EyasError(
            f"{quarantined} of {total} rows are unusable ({named}), above prep.max_quarantine = {prep.max_quarantine}: "
            "see quarantine.jsonl, mend the sources or raise the limit"
        )


def _tokens(record: dict[str, Any], eos_ids: Sequence[int]) -> list[Tokens]:
    if "rows" in record:
        return [Tokens(row["ids"], [bool(flag) for flag in row["supervised"]]) for row in record["rows"]]
    reply = record["reply_ids"]
    if not reply:
        raise Unusable("empty reply")
    if all(token in eos_ids for token in reply):
        raise Unusable("reply is only an end token")
    return [reply_row(record["prompt_ids"], reply)]
