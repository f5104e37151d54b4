"""Requests in flight at the same time: how much of the server's time each of them took.

A server that answers n requests at once is as fast as all of them together. Its rate is the tokens of all replies over the time in which
anything was in flight. To have that as a sum over prompts (so that it can be resampled and paired like every other rate), each moment is
divided equally among the requests in flight: ``shares`` of a level add up to the time in which it was busy.
"""

from collections import defaultdict
from collections.abc import Sequence

from eval.measurement import Measurement


def shares(measurements: Sequence[Measurement]) -> list[float]:
    """Seconds of the server's time that each request took, in the order of ``measurements``.

    Requests share time only with those of the same variant, leg and level. A request alone takes its own duration.
    """
    found = [0.0] * len(measurements)
    groups: dict[tuple[str, str, int], list[int]] = defaultdict(list)
    for place, measured in enumerate(measurements):
        groups[measured.variant, measured.leg, measured.concurrency].append(place)
    for (_, _, level), places in groups.items():
        if level == 1:
            for place in places:
                found[place] = measurements[place].total_s
        else:
            for place, share in zip(places, _divided([_span(measurements[place]) for place in places]), strict=True):
                found[place] = share
    return found


def _span(measured: Measurement) -> tuple[float, float]:
    return measured.sent_at, measured.sent_at + measured.total_s


def _divided(spans: Sequence[tuple[float, float]]) -> list[float]:
    """Integral of 1 / (spans that hold the moment) over each span."""
    events = sorted([(start, 1) for start, _ in spans] + [(end, -1) for _, end in spans])
    passed: dict[float, float] = {}  # moment -> the integral up to it, from the first moment on
    total, flying, last = 0.0, 0, events[0][0]
    for moment, change in events:
        if flying:
            total += (moment - last) / flying
        passed[moment], last = total, moment
        flying += change
    return [passed[end] - passed[start] for start, end in spans]
