import json
from io import StringIO

import pytest
from rich.console import Console

from eyas.sheet import Sheet, number


@pytest.fixture
def sheet() -> Sheet:
    made = Sheet()
    made.topic("disk")
    made.give("tokens", "text", 20_000_000, "tokens", "node.training_tokens", "node.training_tokens")
    made.give("rate", "rate", None, "tokens/s", "node.prefill_tps", "node.prefill_tps")
    made.compute("size", "all", "GB", "{tokens} x 5 B", lambda tokens: tokens * 5 / 1e9)
    made.compute("hours", "capture", "h", "{tokens} / {rate}", lambda tokens, rate: tokens / rate / 3600)
    made.compute("days", "capture", "d", "{hours} / 24", lambda hours: hours / 24)
    return made


def test_a_computed_figure_tells_its_formula_with_its_numbers(sheet: Sheet) -> None:
    assert sheet.known("size") == pytest.approx(0.1)
    assert sheet.figures["size"].how == "20,000,000 x 5 B"


def test_what_needs_an_unknown_figure_stays_open_and_names_it_however_far_away(sheet: Sheet) -> None:
    for key in ("rate", "hours", "days"):
        assert sheet.known(key) is None
        assert sheet.figures[key].how == "not known: needs node.prefill_tps"


def test_json_and_tables_tell_the_same_figures(sheet: Sheet) -> None:
    sheet.note("a note")
    told = json.loads(json.dumps(sheet.json()))["disk"]
    assert told["notes"] == ["a note"]
    assert told["figures"]["size"] == {"label": "all", "value": 0.1, "unit": "GB", "formula": "20,000,000 x 5 B"}
    assert told["figures"]["days"]["missing"] == ["node.prefill_tps"]
    console = Console(file=StringIO(), width=120)
    console.print(sheet.tables())
    for part in ("disk", "20,000,000 x 5 B", "not known: needs node.prefill_tps", "a note"):
        assert part in console.file.getvalue()


def test_numbers_are_written_as_people_do() -> None:
    assert [number(value) for value in (None, True, "none", 57349, 1234.5, 0.46612)] == ["open", "yes", "none", "57,349", "1,234", "0.4661"]
