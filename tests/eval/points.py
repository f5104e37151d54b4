"""Points of a sweep with known numbers, as a server of known costs and acceptance would give them."""

from collections.abc import Sequence
from typing import Any

from eval.cost_model import Setting
from eval.measurement import Measurement
from eval.sweep_points import Forecast, PairedPoint, Point, pair

CYCLES = 400


def request(key: str, variant: str, tokens: int, seconds: float, histogram: Sequence[int] = (), parts: dict[str, Any] | None = None):
    """One request that decoded ``tokens`` tokens in ``seconds``."""
    return Measurement(
        key=key,
        category="chat",
        variant=variant,
        order=0,
        prompt_tokens=5,
        completion_tokens=tokens + 1,
        cached_tokens=0,
        finish_reason="length",
        first_token_s=0.1,
        first_tokens=1,
        total_s=0.1 + seconds,
        verify_ct=sum(histogram) or None,
        correct=sum(accepted * count for accepted, count in enumerate(histogram)),
        proposed=None,
        histogram=list(histogram),
        engine_length=None,
        looping=False,
        output_ids=[],
        parts=parts or {},
    )


def baseline(tokens_per_second: float, start: int = 0, prompts: int = 6) -> Point:
    """300 tokens a prompt, some prompts a little faster than others."""
    rates = [tokens_per_second * (1 + 0.01 * ((number % 3) - 1)) for number in range(prompts)]
    return Point("none", None, None, start, "x", 9.0, None, [request(f"p{n}", "none", 300, 300 / rate) for n, rate in enumerate(rates)])


def chain(
    variant: str,
    conditional: Sequence[float],
    cycle_s: float,
    start: int = 1,
    prompts: int = 6,
    parts: dict[str, float] | None = None,
    setting: Setting | None = None,
    forecast: Forecast | None = None,
    simulated: float | None = None,
) -> Point:
    """One draft for each conditional acceptance rate; prompts differ by a tenth in how far they are accepted.

    ``parts`` are the engine's seconds a cycle.
    """
    samples = []
    for number in range(prompts):
        ease = 1 + 0.1 * ((number % 3) - 1)
        reached = [CYCLES]
        for rate in conditional:
            reached.append(round(reached[-1] * min(rate * ease, 1.0)))
        histogram = [reached[place] - (reached[place + 1] if place + 1 < len(reached) else 0) for place in range(len(reached))]
        told = {"seconds": {name: CYCLES * value for name, value in parts.items()}} if parts else None
        samples.append(request(f"p{number}", variant, sum(reached), CYCLES * cycle_s, histogram, told))
    steps = len(conditional)
    return Point(variant, setting or Setting(steps, 1, steps + 1), simulated, start, "x", 9.0, forecast, samples)


def paired(points: Sequence[Point]) -> list[PairedPoint]:
    """Beside their baselines, with few resamples."""
    return pair(points, 200, 0)
