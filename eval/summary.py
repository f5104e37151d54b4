"""The numbers of a report: from measurements to rates with confidence intervals. No rendering here.

Three acceptance lengths that must not be mixed:
``length``               ours, for headlines and break-even: (completion tokens - 1) / verify steps, the tokens a verify step emitted;
``cross_engine_length``  1 + correct drafts / verify steps, for comparing engines with each other;
``engine_length``        what the engine itself reports (SGLang: all completion tokens / verify steps), weighted by verify steps.

Only prompts measured under every variant count, so that all variants are compared on the same text.
"""

import itertools
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from eval.bench import RESULT, STARTER, Measurement, first_difference
from eval.clients import BASELINE
from eval.economics import CycleCost, Prediction, best, predict
from eval.statistics import Interval, bootstrap, paired_difference, paired_quotient, quotient, ratio
from eyas.acceptance import context_bucket
from eyas.errors import EyasError

PREDICTED_STEPS = tuple(range(1, 9))


@dataclass(frozen=True)
class Differences:
    """Greedy replies compared with the baseline's, token by token."""

    requests: int
    differing: int
    first: dict[str, int]
    """Prompt key -> index of the first differing token."""


@dataclass(frozen=True)
class Parts:
    """Where the time of a cycle goes, milliseconds a cycle; they add up to the client's cycle time.

    ``prompt_ms`` is the drafter's pass over the prompt, once a request, spread over its cycles; ``overhead_ms`` is what is left: the
    engine's own bookkeeping, HTTP and the client.
    """

    cycle_ms: float
    verify_ms: float
    extend_ms: float
    draft_ms: float
    prompt_ms: float
    overhead_ms: float


@dataclass(frozen=True)
class Variant:
    """Everything measured about one variant. Speculation's numbers are None for the baseline."""

    name: str
    requests: int
    completion_tokens: int
    tokens_per_second: Interval
    decode_tokens_per_second: Interval
    first_token_ms: Interval
    speedup: Interval | None
    """End-to-end tokens a second over the baseline's, paired by prompt."""
    decode_speedup: Interval | None
    verify_steps: int
    draft_steps: int | None
    length: Interval | None
    cross_engine_length: Interval | None
    engine_length: float | None
    low_repetition_length: Interval | None
    """``length`` on the prompts that no variant answered with a looping reply."""
    cycle_ms: Interval | None
    break_even: Interval | None
    """``length`` at which this variant's cycle time equals the baseline's decoding."""
    histogram: list[int]
    unconditional: list[float | None]
    """Share of verify steps that accepted the draft at each position."""
    conditional: list[float | None]
    """The same among the steps that had accepted all before it."""
    parts: Parts | None
    looping: int
    differences: Differences | None


@dataclass(frozen=True)
class Group:
    """One category or context length: acceptance length and speed-up of every speculating variant there."""

    name: str
    prompts: int
    lengths: dict[str, Interval]
    speedups: dict[str, Interval]


@dataclass(frozen=True)
class Summary:
    """All numbers of a bench folder."""

    prompts: int
    incomplete: int
    """Prompts left out because some variant was not measured on them."""
    looping_prompts: int
    cached_tokens: int
    """Prompt tokens that an engine took from its prefix cache in spite of the flush; should be 0."""
    variants: list[Variant]
    main: str | None
    """The variant that the headline is about: the result, or the only drafter there is."""
    pays: bool | None
    """End-to-end speed-up of ``main`` above 1 (its interval excludes 1), below, or None: cannot be told."""
    gain: Interval | None
    """Acceptance length of ``main`` minus the warm start's, paired by prompt."""
    categories: list[Group]
    contexts: list[Group]
    cost: CycleCost | None
    predictions: list[Prediction]
    best_steps: int | None

    def variant(self, name: str | None) -> Variant | None:
        """The variant of that name, if it was measured."""
        return next((variant for variant in self.variants if variant.name == name), None)


def summarise(measurements: Sequence[Measurement], temperature: float, resamples: int, seed: int) -> Summary:
    """All numbers of a set of measurements. Raises EyasError when no prompt was measured under every variant."""
    table, incomplete = _complete(measurements)
    return _Summariser(table, incomplete, temperature, resamples, seed).summary()


def _complete(measurements: Sequence[Measurement]) -> tuple[dict[str, list[Measurement]], int]:
    """Variant -> measurements of the prompts that all variants have, in one order; and how many prompts were left out."""
    by_variant: dict[str, dict[str, Measurement]] = defaultdict(dict)
    for measured in measurements:
        by_variant[measured.variant][measured.key] = measured
    if not by_variant:
        raise EyasError("there are no measurements: run `eyas bench` first")
    common = sorted(set.intersection(*(set(rows) for rows in by_variant.values())))
    everything = {measured.key for measured in measurements}
    if not common:
        raise EyasError(f"no prompt was measured under all of {', '.join(sorted(by_variant))}: run `eyas bench` to its end")
    order = sorted(by_variant, key=_display_order)
    return {name: [by_variant[name][key] for key in common] for name in order}, len(everything) - len(common)


def _display_order(name: str) -> tuple[int, str]:
    known = [BASELINE, STARTER, RESULT]
    return (known.index(name) if name in known else len(known), name)


class _Summariser:
    """Holds what every number needs: the paired table, the resamples, the seed."""

    def __init__(self, table: dict[str, list[Measurement]], incomplete: int, temperature: float, resamples: int, seed: int) -> None:
        self.table, self.incomplete, self.greedy = table, incomplete, temperature == 0
        self.resamples, self.seed = resamples, seed
        self.keys = [measured.key for measured in next(iter(table.values()))]
        self.looping = {measured.key for rows in table.values() for measured in rows if measured.looping}

    def summary(self) -> Summary:
        variants = [self.variant(name) for name in self.table]
        drafters = [name for name in self.table if name != BASELINE]
        main = RESULT if RESULT in drafters else (drafters[0] if drafters else None)
        main_variant = next((variant for variant in variants if variant.name == main), None)
        cost = self.cost(main_variant)
        rates = known_rates(main_variant.conditional) if main_variant else []
        predictions = predict(cost, rates, PREDICTED_STEPS) if cost and rates else []
        rows = [measured for rows in self.table.values() for measured in rows]
        return Summary(
            prompts=len(self.keys),
            incomplete=self.incomplete,
            looping_prompts=len(self.looping),
            cached_tokens=sum(measured.cached_tokens for measured in rows),
            variants=variants,
            main=main,
            pays=_pays(main_variant),
            gain=self.gain(main),
            categories=self.groups(lambda measured: measured.category, drafters),
            contexts=self.groups(lambda measured: context_bucket(measured.prompt_tokens), drafters),
            cost=cost,
            predictions=predictions,
            best_steps=best(predictions).steps if predictions else None,
        )

    def variant(self, name: str) -> Variant:
        rows = self.table[name]
        speculating = name != BASELINE
        base = self.table.get(BASELINE)
        tokens, seconds = _column(rows, "completion_tokens"), _column(rows, "total_s")
        decoded, decode_s = _column(rows, "decode_tokens"), _column(rows, "decode_s")
        draft_steps = _draft_steps(rows) if speculating else None
        histogram = _histogram(rows, draft_steps or 0)
        steps = sum(measured.verify_ct or 0 for measured in rows)
        calm = [measured for measured in rows if measured.key not in self.looping]
        return Variant(
            name=name,
            requests=len(rows),
            completion_tokens=sum(measured.completion_tokens for measured in rows),
            tokens_per_second=self.ratio(tokens, seconds),
            decode_tokens_per_second=self.ratio(decoded, decode_s),
            first_token_ms=self.ratio([1000 * measured.first_token_s for measured in rows], [1.0] * len(rows)),
            speedup=self.speedup(rows, base, "completion_tokens", "total_s") if speculating else None,
            decode_speedup=self.speedup(rows, base, "decode_tokens", "decode_s") if speculating else None,
            verify_steps=steps,
            draft_steps=draft_steps,
            length=self.length(rows) if speculating else None,
            cross_engine_length=self.ratio([_verified(m) + (m.correct or 0) for m in rows], [_verified(m) for m in rows])
            if speculating
            else None,
            engine_length=_engine_length(rows) if speculating else None,
            low_repetition_length=self.length(calm) if speculating else None,
            cycle_ms=self.ratio([1000 * second for second in decode_s], [_verified(m) for m in rows]) if speculating else None,
            break_even=self.break_even(rows, base) if speculating else None,
            histogram=histogram,
            unconditional=_unconditional(histogram),
            conditional=_conditional(histogram),
            parts=_parts(rows) if speculating else None,
            looping=sum(measured.looping for measured in rows),
            differences=_differences(rows, base) if speculating and base and self.greedy else None,
        )

    def ratio(self, numerator: Sequence[float], denominator: Sequence[float]) -> Interval:
        return ratio(numerator, denominator, self.resamples, self.seed)

    def length(self, rows: Sequence[Measurement]) -> Interval:
        return self.ratio(_column(rows, "emitted"), [_verified(measured) for measured in rows])

    def speedup(self, rows: Sequence[Measurement], base: Sequence[Measurement] | None, tokens: str, seconds: str) -> Interval | None:
        if base is None:
            return None
        columns = (_column(rows, tokens), _column(rows, seconds), _column(base, tokens), _column(base, seconds))
        return paired_quotient(*columns, self.resamples, self.seed)

    def break_even(self, rows: Sequence[Measurement], base: Sequence[Measurement] | None) -> Interval | None:
        """Cycle time x baseline decoding rate, both resampled together."""
        if base is None:
            return None
        columns = (_column(rows, "decode_s"), [_verified(m) for m in rows], _column(base, "decode_tokens"), _column(base, "decode_s"))
        return bootstrap(
            columns,
            lambda sums: quotient(sums[..., 0], sums[..., 1]) * quotient(sums[..., 2], sums[..., 3]),
            self.resamples,
            self.seed,
        )

    def gain(self, main: str | None) -> Interval | None:
        if main is None or main == STARTER or STARTER not in self.table:
            return None
        ours, theirs = self.table[main], self.table[STARTER]
        columns = (_column(ours, "emitted"), [_verified(m) for m in ours], _column(theirs, "emitted"), [_verified(m) for m in theirs])
        return paired_difference(*columns, self.resamples, self.seed)

    def groups(self, name_of: Callable[[Measurement], str], drafters: Sequence[str]) -> list[Group]:
        """By category or context length of the prompt; both are the same for every variant of a prompt."""
        members: dict[str, list[int]] = defaultdict(list)
        for place, measured in enumerate(next(iter(self.table.values()))):
            members[name_of(measured)].append(place)
        base = self.table.get(BASELINE)
        groups = []
        for name, places in sorted(members.items(), key=lambda item: _group_order(item[0])):
            lengths, speedups = {}, {}
            for drafter in drafters:
                rows = [self.table[drafter][place] for place in places]
                lengths[drafter] = self.length(rows)
                speedup = self.speedup(rows, [base[place] for place in places] if base else None, "completion_tokens", "total_s")
                if speedup is not None:
                    speedups[drafter] = speedup
            groups.append(Group(name, len(places), lengths, speedups))
        return groups

    def cost(self, main: Variant | None) -> CycleCost | None:
        """The cost model, when the engine tells its parts (the embedded one does) and the baseline decoded anything."""
        base = self.table.get(BASELINE)
        if main is None or main.parts is None or main.draft_steps is None or base is None:
            return None
        baseline_tokens = sum(_column(base, "decode_tokens"))
        if not baseline_tokens:
            return None
        baseline_ms = 1000 * sum(_column(base, "decode_s")) / baseline_tokens
        decode_s, decoded = _part(base, "decode")
        extend_s, extends = _part(self.table[main.name], "extend")
        return CycleCost(
            steps=main.draft_steps,
            baseline_ms=baseline_ms,
            single_ms=1000 * decode_s / decoded if decoded else baseline_ms,
            verify_ms=main.parts.verify_ms,
            # A request's first extension is the prompt's, so there is one less than there are cycles.
            extend_ms=1000 * extend_s / extends if extends else main.parts.extend_ms,
            draft_ms=main.parts.draft_ms / (main.draft_steps - 1) if main.draft_steps > 1 else None,
            overhead_ms=main.parts.prompt_ms + main.parts.overhead_ms,
        )


def _group_order(name: str) -> tuple[int, str]:
    """Context buckets by size, categories by name."""
    digits = name.partition("-")[0]
    return (int(digits) if digits.isdigit() else 0, name)


def _column(rows: Sequence[Measurement], name: str) -> list[float]:
    return [float(getattr(measured, name)) for measured in rows]


def _verified(measured: Measurement) -> float:
    return float(measured.verify_ct or 0)


def _pays(main: Variant | None) -> bool | None:
    if main is None or main.speedup is None or main.speedup.value is None or not main.speedup.excludes(1.0):
        return None
    return main.speedup.value > 1


def _histogram(rows: Sequence[Measurement], draft_steps: int) -> list[int]:
    """Summed over requests. Engines leave out the entries behind the last one that occurred: they are 0. Empty where no engine gave any."""
    longest = max((len(measured.histogram) for measured in rows), default=0)
    total = [0] * max(longest, draft_steps + 1 if longest else 0)
    for measured in rows:
        for accepted, cycles in enumerate(measured.histogram):
            total[accepted] += cycles
    return total


def _unconditional(histogram: Sequence[int]) -> list[float | None]:
    cycles = sum(histogram)
    return [sum(histogram[position + 1 :]) / cycles if cycles else None for position in range(len(histogram) - 1)]


def _conditional(histogram: Sequence[int]) -> list[float | None]:
    reached = [sum(histogram[position:]) for position in range(len(histogram))]
    return [after / before if before else None for before, after in itertools.pairwise(reached)]


def known_rates(rates: Sequence[float | None]) -> list[float]:
    """Rates by position up to the first one that was never reached."""
    known = []
    for rate in rates:
        if rate is None:
            break
        known.append(rate)
    return known


def _draft_steps(rows: Sequence[Measurement]) -> int | None:
    """Drafts a cycle: from what was proposed, else the longest histogram (its last entry may be missing where it never happened)."""
    proposed = sum(measured.proposed or 0 for measured in rows if measured.proposed is not None)
    cycles = sum(measured.verify_ct or 0 for measured in rows if measured.proposed is not None)
    if cycles:
        return round(proposed / cycles)
    return max((len(measured.histogram) - 1 for measured in rows if measured.histogram), default=None)


def _engine_length(rows: Sequence[Measurement]) -> float | None:
    known = [measured for measured in rows if measured.engine_length is not None and measured.verify_ct]
    cycles = sum(_verified(measured) for measured in known)
    return sum((measured.engine_length or 0.0) * _verified(measured) for measured in known) / cycles if cycles else None


def _differences(rows: Sequence[Measurement], base: Sequence[Measurement]) -> Differences:
    first = {}
    for measured, baseline in zip(rows, base, strict=True):
        index = first_difference(measured.output_ids, baseline.output_ids)
        if index is not None:
            first[measured.key] = index
    return Differences(len(rows), len(first), first)


def _part(rows: Sequence[Measurement], name: str) -> tuple[float, int]:
    """Seconds and count of a part over all requests, as the embedded engine gives them."""
    seconds = sum(float(measured.parts.get("seconds", {}).get(name, 0.0)) for measured in rows)
    return seconds, sum(int(measured.parts.get("counts", {}).get(name, 0)) for measured in rows)


def _parts(rows: Sequence[Measurement]) -> Parts | None:
    cycles = sum(measured.verify_ct or 0 for measured in rows)
    if not cycles or not _part(rows, "verify")[1]:
        return None
    cycle_ms = 1000 * sum(_column(rows, "decode_s")) / cycles
    verify, extend, draft, prompt = (1000 * _part(rows, name)[0] / cycles for name in ("verify", "extend", "draft", "prefill_draft"))
    return Parts(cycle_ms, verify, extend, draft, prompt, cycle_ms - verify - extend - draft - prompt)
