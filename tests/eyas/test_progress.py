"""Progress: plain lines where nobody watches, a bar in a terminal, right numbers in both."""

import io

import pytest
from rich.console import Console

import eyas.progress
from eyas.progress import Status, Task


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(eyas.progress.time, "monotonic", clock)
    return clock


def plain() -> Console:
    return Console(file=io.StringIO(), width=40)


def lines(console: Console) -> list[str]:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def test_without_a_terminal_a_line_comes_every_ten_seconds_and_at_the_end(clock):
    console = plain()
    with Task("capture", total=4000, unit="tokens", console=console) as task:
        for _ in range(40):
            clock.now += 1.0
            task.advance(100)
    assert len(lines(console)) == 5
    assert lines(console)[0] == "capture: 1,000/4,000 tokens, 100 tokens/s, ETA 0:00:30"
    assert lines(console)[-1] == "capture: 4,000/4,000 tokens, 100 tokens/s, ETA 0:00:00"


def test_a_resumed_task_counts_only_its_own_work_in_the_rate(clock):
    console = plain()
    with Task("capture", total=2000, unit="tokens", done=1000, console=console) as task:
        clock.now += 10
        task.advance(100)
    assert task.rate() == pytest.approx(10)
    assert lines(console)[0] == "capture: 1,100/2,000 tokens, 10 tokens/s, ETA 0:01:30"


def test_an_eta_beyond_a_day_goes_on_counting_hours(clock):
    console = plain()
    with Task("capture", total=1000, unit="tokens", console=console) as task:
        clock.now += 100
        task.advance(1)
    assert lines(console)[0].endswith("ETA 27:45:00")


def test_work_beyond_the_total_has_no_time_left(clock):
    console = plain()
    with Task("capture", total=10, unit="rows", console=console) as task:
        clock.now += 10
        task.advance(20)
    assert lines(console)[0] == "capture: 20/10 rows, 2 rows/s, ETA 0:00:00"


def test_big_rates_are_written_in_full(clock):
    console = plain()
    with Task("read", total=1e9, unit="tokens", console=console) as task:
        clock.now += 10
        task.advance(12_345_670)
    assert "1,234,567 tokens/s" in lines(console)[0]


def test_before_any_work_the_eta_is_unknown(clock):
    console = plain()
    with Task("capture", total=10, unit="rows", console=console):
        pass
    assert lines(console) == ["capture: 0/10 rows, 0 rows/s, ETA unknown"]


def test_the_note_is_kept_until_the_next_one_and_may_hold_brackets(clock):
    console = plain()
    with Task("train [/x]", total=10, unit="steps", console=console) as task:
        task.advance(1, note="loss [/] 0.3 [red]")
        clock.now += 10
        task.advance(1)
    assert lines(console)[0].startswith("train [/x]: 2/10 steps")
    assert lines(console)[0].endswith("loss [/] 0.3 [red]")


def test_the_final_line_comes_when_the_work_fails(clock):
    console = plain()

    def fail() -> None:
        with Task("capture", total=10, unit="rows", console=console) as task:
            task.advance(3)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert lines(console)[-1].startswith("capture: 3/10 rows")


def test_in_a_terminal_a_bar_shows_counts_rate_and_note():
    console = Console(file=io.StringIO(), width=200, force_terminal=True)
    with Task("capture", total=10, unit="rows", done=2, console=console) as task:
        task.advance(3, note="[/] fine")
    text = "".join(lines(console))
    assert "5/10" in text
    assert "rows/s" in text
    assert "[/] fine" in text


def test_what_is_waited_for_is_told_at_turns_and_every_ten_seconds(clock):
    console = plain()
    with Status(console) as status:
        for second in range(25):
            clock.now = 1000.0 + second
            status.show(f"loading for {second} s", "weights" if second < 12 else "graphs")
        status.print("a line [that] stays")
    assert lines(console) == ["loading for 0 s", "loading for 10 s", "loading for 12 s", "loading for 22 s", "a line [that] stays"]


def test_in_a_terminal_the_line_is_rewritten_in_place():
    console = Console(file=io.StringIO(), force_terminal=True, width=80)
    with Status(console) as status:
        status.show("loading [1] of 2", "weights")
        status.show("loading [2] of 2", "weights")
        status.print("a line that stays")
    written = console.file.getvalue()
    assert "a line that stays\n" in written
    assert written.count("\n") <= 3
