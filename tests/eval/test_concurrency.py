import random
from dataclasses import replace

import pytest

from eval.concurrency import shares
from tests.eval.recorded import request


def sent(start, seconds, variant="none", level=2, leg="before"):
    return replace(request(0, variant), sent_at=start, total_s=seconds, concurrency=level, leg=leg)


def test_a_request_alone_takes_its_own_time_and_two_at_once_half_of_it_each():
    assert shares([sent(0, 4), sent(2, 4)]) == pytest.approx([2 + 1, 1 + 2])


def test_shares_add_up_to_the_time_in_which_anything_was_in_flight():
    generator = random.Random(0)
    found = [sent(generator.uniform(0, 50), generator.uniform(0.1, 5)) for _ in range(200)]
    step, busy = 0.001, 0.0
    spans = [(m.sent_at, m.sent_at + m.total_s) for m in found]
    busy = step * sum(any(start <= step * tick < end for start, end in spans) for tick in range(56_000))
    assert sum(shares(found)) == pytest.approx(busy, abs=0.1)


def test_a_pause_between_two_runs_of_a_resumed_level_is_nobodys():
    assert shares([sent(0, 1), sent(1000, 3)]) == pytest.approx([1, 3])


def test_requests_of_other_legs_variants_and_levels_do_not_share():
    found = [sent(0, 4), sent(0, 4, leg="after"), sent(0, 4, variant="result"), sent(0, 4, level=3)]
    assert shares(found) == pytest.approx([4, 4, 4, 4])


def test_one_request_at_a_time_takes_its_duration_whatever_the_clock_says():
    assert shares([sent(0, 4, level=1), sent(1, 4, level=1)]) == [4, 4]
