"""A small recorded bench, as the bench writes it: what the tests of summary, report and comparison read."""

from dataclasses import asdict, replace

from eval.conditions import CONDITIONS
from eval.measurement import LOOP_RULE, MEASUREMENTS, Measurement
from eyas.config import Config
from eyas.files import JsonlAppender
from eyas.manifest import begin, finish

TOKENS = 61
BASELINE_S, CYCLE_S, FIRST_S = 0.020, 0.026, 0.1


def request(number, variant, histogram=None, ids=None, cycle_s=CYCLE_S, looping=False):
    """A greedy request of 61 tokens: ``histogram`` cycles that emit exactly the 60 after the first."""
    ids = list(range(number, number + TOKENS)) if ids is None else ids
    cycles = sum(histogram) if histogram else None
    decode_s = cycles * cycle_s if histogram else (TOKENS - 1) * BASELINE_S
    parts = {"seconds": {"decode": (TOKENS - 1) * 0.019}, "counts": {"decode": TOKENS - 1}}
    if histogram:
        seconds = {
            "verify": cycles * 0.021,
            "extend": (cycles - 1) * 0.001,
            "draft": cycles * 0.002,
            "prefill_draft": 0.003,
            "overhead": 0.0,
        }
        parts = {"seconds": seconds, "counts": {"verify": cycles, "extend": cycles - 1, "draft": 2 * cycles, "prefill_draft": 1}}
    return Measurement(
        key=f"key-{number:02}",
        category="code" if number % 2 else "chat <b>",
        variant=variant,
        order=0,
        prompt_tokens=100 + 20 * number,
        completion_tokens=TOKENS,
        cached_tokens=0,
        finish_reason="length",
        first_token_s=FIRST_S,
        first_tokens=1,
        total_s=FIRST_S + decode_s,
        verify_ct=cycles,
        correct=sum(accepted * count for accepted, count in enumerate(histogram)) if histogram else None,
        proposed=3 * cycles if histogram else None,
        histogram=histogram or [],
        engine_length=TOKENS / cycles if histogram else None,
        looping=looping,
        output_ids=ids,
        parts=parts,
    )


STARTER = ([30, 12, 2, 0], [33, 12, 1, 0], [27, 15, 1, 0])
RESULT = ([8, 8, 8, 3], [12, 9, 6, 3], [10, 10, 10, 0])


def measurements(prompts=24, starter=STARTER, result=RESULT):
    """A small recorded set: every histogram emits 60 tokens."""
    return [
        found
        for number in range(prompts)
        for found in (
            request(number, "none"),
            request(number, "starter", starter[number % 3]),
            request(number, "result", result[number % 3]),
        )
    ]


def config_at(output):
    return Config.model_validate(
        {
            "output": str(output),
            "target": {"model": "some/<target>"},
            "prep": {"sources": [{"source": "prompts.jsonl"}]},
            "drafter": {"init": "some/starter"},
            "eval": {"bootstrap": 300},
        }
    )


def in_turn(found):
    """The same request with the accepted drafts of each cycle in turn, as the embedded engine tells them: most accepted first."""
    if not found.histogram:
        return found
    accepted = [drafts for drafts, count in reversed(list(enumerate(found.histogram))) for _ in range(count)]
    return replace(found, parts=found.parts | {"accepted": accepted})


def apart(prompts=24, drift=1.0, cycle_s=CYCLE_S, level=1):
    """The same set from servers with one behaviour each: the baseline before and after, the latter ``drift`` times as fast.

    With ``level`` requests in flight, as many are sent at the same moment, and each takes as long as alone.
    """
    found, clock = [], 1000.0
    for leg, variant in (("before", "none"), ("between", "starter"), ("between", "result"), ("after", "none")):
        histograms = {"starter": STARTER, "result": RESULT}.get(variant, (None,))
        for first in range(0, prompts, level):
            sent = [
                request(number, variant, histograms[number % len(histograms)], cycle_s=cycle_s) for number in range(first, first + level)
            ]
            for measured in sent:
                total_s = measured.total_s / (drift if leg == "after" else 1.0)
                found.append(
                    replace(
                        measured,
                        leg=leg,
                        concurrency=level,
                        sent_at=clock,
                        total_s=total_s,
                        first_token_s=FIRST_S * total_s / measured.total_s,
                    )
                )
            clock += max(measured.total_s for measured in sent)
    return found


def condition(leg, variant, moment, at, gpus=(), environment=None, load=1.0):
    """A line of conditions.jsonl; ``gpus``: (clock, temperature, watts) of each."""
    during = {"load": load, "cpu_mhz": 2600.0}
    for index, (clock, temperature, power) in enumerate(gpus):
        during |= {f"gpu{index}.sm_clock_mhz": clock, f"gpu{index}.temperature_c": temperature, f"gpu{index}.power_w": power}
        during[f"gpu{index}.throttled"] = 0.0
    machine = {"load": load, "cpu_mhz": 2600.0, "governor": None}
    machine["gpus"] = [
        {"index": index, "name": "GPU", "driver": "580.1", "pcie": "gen 5 x16", "power_limit_w": 600.0} for index in range(len(gpus))
    ]
    return {
        "leg": leg,
        "variants": [variant],
        "moment": moment,
        "at": at,
        "versions": {"python": "3.11", "torch": "2.13.0"},
        "engine": "0.5.23",
        "flags": {},
        "environment": environment or {},
        "machine": machine,
        "during": during,
    }


def conditions(gpus=(), environment=None, load=1.0):
    """Lines of the three legs of a schedule with one drafter."""
    legs = (("before", "none"), ("between", "result"), ("after", "none"))
    return [
        condition(leg, variant, moment, 1000.0 + 600 * place + 300 * (moment == "end"), gpus, environment, load)
        for place, (leg, variant) in enumerate(legs)
        for moment in ("start", "end")
    ]


def record(config, found, temperature=0.0, lines=(), inputs=None, **holds):
    """Write a finished bench folder below ``config.output`` and return it; ``lines`` go to conditions.jsonl, ``holds`` to the manifest."""
    folder = config.folder("bench")
    evaluated = config.eval.model_dump(mode="json") | {"temperature": temperature}
    part = {"target": {"model": config.target.model}, "engine": config.engine.model_dump(mode="json"), "seed": config.seed}
    begin(folder, "bench", {**part, "eval": evaluated}, inputs or {})
    for name, rows in ((MEASUREMENTS, map(asdict, found)), (CONDITIONS, lines)):
        with JsonlAppender(folder / name) as file:
            for row in rows:
                file.append(row)
    finish(folder, {"loop_rule": LOOP_RULE, "machine": {"processor": "some", "cores": 2}, "servers": {"none": {"eyas": {}}}, **holds})
    return folder


def record_training(config):
    with JsonlAppender(config.folder("train") / "log.jsonl") as file:
        for step in range(0, 101, 10):
            rate = 0.3 + 0.003 * step
            sets = {"length": 1 + rate + rate**2, "unconditional_J": [rate, rate**2], "conditional_J": [rate, rate]}
            file.append({"kind": "validation", "step": step, "acceptance_length": sets["length"], "greedy": sets})
            file.append({"kind": "train", "step": step, "loss": 12 - 0.02 * step})
