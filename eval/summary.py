"""The numbers of a report: from measurements to rates with confidence intervals. No rendering here.

Three acceptance lengths that must not be mixed:
``length``               ours, for headlines and break-even: (completion tokens - 1) / verify steps, the tokens a verify step emitted;
``cross_engine_length``  1 + correct drafts / verify steps, for comparing engines with each other;
``engine_length``        what the engine itself reports (SGLang: all completion tokens / verify steps), weighted by verify steps.

Only prompts measured under every variant count, so that all variants are compared on the same text. A baseline that was measured before
and after the drafters counts with the mean of the two, prompt by prompt; what lies between the two is the drift.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from eval.bench import RESULT, STARTER
from eval.clients import BASELINE
from eval.concurrency import shares
from eval.contexts import Contexts, by_context
from eval.economics import CycleCost, Prediction, best, predict
from eval.measurement import AFTER, BEFORE, Measurement, first_difference
from eyas.acceptance import context_bucket
from eyas.errors import EyasError
from eyas.statistics import Interval, bootstrap, paired_difference, paired_quotient, quotient, ratio

PREDICTED_STEPS = tuple(range(1, 9))


@dataclass(frozen=True)
class Timed:
    """A measurement with the seconds of the server's time that it took (``eval.concurrency.shares``)."""

    measured: Measurement
    share_s: float


Rows = Sequence[Sequence[Timed]]
"""One entry a prompt, in one order for all variants: its measurements, one a leg."""


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
class Drift:
    """The baseline after the drafters beside the baseline before them, on the same prompts."""

    prompts: int
    before: Interval
    after: Interval
    """Tokens a second, end to end."""
    change: Interval
    """After over before, paired by prompt: 1 is no drift."""
    differing: int | None
    """Greedy replies that differ between the two: how far this engine agrees with itself. None for sampled ones."""
    hides: list[str]
    """Drafters whose speed-up is not larger than the drift: nothing can be said of them."""


@dataclass(frozen=True)
class Variant:
    """Everything measured about one variant. Speculation's numbers are None for the baseline."""

    name: str
    requests: int
    completion_tokens: int
    tokens_per_second: Interval
    """All requests in flight together, end to end."""
    request_tokens_per_second: Interval
    """What one of them sees; the same with one in flight."""
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
class Level:
    """All variants with so many requests in flight."""

    concurrency: int
    prompts: int
    variants: list[Variant]
    drift: Drift | None


@dataclass(frozen=True)
class Summary:
    """All numbers of a bench folder. Those beside ``levels`` are of the lowest level of concurrency."""

    concurrency: int
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
    drift: Drift | None
    """None where the baseline was measured once, or every prompt had all variants side by side."""
    levels: list[Level]
    """By level of concurrency, lowest first."""
    categories: list[Group]
    prompt_lengths: list[Group]
    contexts: Contexts
    cost: CycleCost | None
    predictions: list[Prediction]
    best_steps: int | None

    def variant(self, name: str | None) -> Variant | None:
        """The variant of that name, if it was measured."""
        return next((variant for variant in self.variants if variant.name == name), None)


def summarise(measurements: Sequence[Measurement], temperature: float, resamples: int, seed: int) -> Summary:
    """All numbers of a set of measurements. Raises EyasError when no prompt was measured under every variant."""
    if not measurements:
        raise EyasError("there are no measurements: run `eyas bench` first")
    levels: dict[int, list[Timed]] = defaultdict(list)
    for measured, share_s in zip(measurements, shares(measurements), strict=True):
        levels[measured.concurrency].append(Timed(measured, share_s))
    tables = {level: _Summariser(levels[level], temperature, resamples, seed) for level in sorted(levels)}
    lowest, first = next(iter(tables.items()))
    return first.summary(lowest, [table.level(level) for level, table in tables.items()])


def _complete(rows: Sequence[Timed]) -> tuple[dict[str, list[list[Timed]]], int]:
    """Variant -> measurements of the prompts that all variants have, in one order; and how many prompts were left out."""
    by_variant: dict[str, dict[str, list[Timed]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        by_variant[row.measured.variant][row.measured.key].append(row)
    common = sorted(set.intersection(*(set(found) for found in by_variant.values())))
    everything = {row.measured.key for row in rows}
    if not common:
        raise EyasError(f"no prompt was measured under all of {', '.join(sorted(by_variant))}: run `eyas bench` to its end")
    order = sorted(by_variant, key=_display_order)
    return {name: [by_variant[name][key] for key in common] for name in order}, len(everything) - len(common)


def _display_order(name: str) -> tuple[int, str]:
    known = [BASELINE, STARTER, RESULT]
    return (known.index(name) if name in known else len(known), name)


class _Summariser:
    """One level of concurrency. Holds what every number needs: the paired table, the resamples, the seed."""

    def __init__(self, rows: Sequence[Timed], temperature: float, resamples: int, seed: int) -> None:
        self.table, self.incomplete = _complete(rows)
        self.greedy = temperature == 0
        self.resamples, self.seed = resamples, seed
        self.prompts = len(next(iter(self.table.values())))
        self.looping = {row.measured.key for row in rows if row.measured.looping}

    def level(self, concurrency: int) -> Level:
        """The variants at this level."""
        variants = [self.variant(name) for name in self.table]
        return Level(concurrency, self.prompts, variants, self.drift(variants))

    def summary(self, concurrency: int, levels: list[Level]) -> Summary:
        """Everything that is told of one level alone, beside all levels."""
        variants, drift = levels[0].variants, levels[0].drift
        drafters = [name for name in self.table if name != BASELINE]
        main = RESULT if RESULT in drafters else (drafters[0] if drafters else None)
        main_variant = next((variant for variant in variants if variant.name == main), None)
        cost = self.cost(main_variant)
        rates = known_rates(main_variant.conditional) if main_variant else []
        predictions = predict(cost, rates, PREDICTED_STEPS) if cost and rates else []
        singles = {name: [legs[0].measured for legs in self.table[name]] for name in drafters}
        return Summary(
            concurrency=concurrency,
            prompts=self.prompts,
            incomplete=self.incomplete,
            looping_prompts=len(self.looping & {legs[0].measured.key for legs in next(iter(self.table.values()))}),
            cached_tokens=sum(measured.cached_tokens for rows in self.table.values() for measured in _all(rows)),
            variants=variants,
            main=main,
            pays=_pays(main_variant, drift),
            gain=self.gain(main),
            drift=drift,
            levels=levels,
            categories=self.groups(lambda measured: measured.category, drafters),
            prompt_lengths=self.groups(lambda measured: context_bucket(measured.prompt_tokens), drafters),
            contexts=by_context(singles, self.resamples, self.seed),
            cost=cost,
            predictions=predictions,
            best_steps=best(predictions).steps if predictions else None,
        )

    def variant(self, name: str) -> Variant:
        rows = self.table[name]
        speculating = name != BASELINE
        base = self.table.get(BASELINE)
        tokens, alone = _column(rows, "completion_tokens"), _column(rows, "total_s")
        decoded, decode_s = _column(rows, "decode_tokens"), _column(rows, "decode_s")
        draft_steps = _draft_steps(rows) if speculating else None
        histogram = _histogram(rows, draft_steps or 0)
        calm = [legs for legs in rows if legs[0].measured.key not in self.looping]
        verified = _column(rows, "verify_ct")
        return Variant(
            name=name,
            requests=len(_all(rows)),
            completion_tokens=sum(measured.completion_tokens for measured in _all(rows)),
            tokens_per_second=self.ratio(tokens, _shares(rows)),
            request_tokens_per_second=self.ratio(tokens, alone),
            decode_tokens_per_second=self.ratio(decoded, decode_s),
            first_token_ms=self.ratio([1000 * second for second in _column(rows, "first_token_s")], [1.0] * len(rows)),
            speedup=self.speedup(rows, base) if speculating else None,
            decode_speedup=self.decode_speedup(rows, base) if speculating else None,
            verify_steps=sum(measured.verify_ct or 0 for measured in _all(rows)),
            draft_steps=draft_steps,
            length=self.length(rows) if speculating else None,
            cross_engine_length=self.ratio([v + c for v, c in zip(verified, _column(rows, "correct"), strict=True)], verified)
            if speculating
            else None,
            engine_length=_engine_length(rows) if speculating else None,
            low_repetition_length=self.length(calm) if speculating else None,
            cycle_ms=self.ratio([1000 * second for second in decode_s], verified) if speculating else None,
            break_even=self.break_even(rows, base) if speculating else None,
            histogram=histogram,
            unconditional=_unconditional(histogram),
            conditional=_conditional(histogram),
            parts=_parts(rows) if speculating else None,
            looping=sum(measured.looping for measured in _all(rows)),
            differences=_differences(rows, base) if speculating and base and self.greedy else None,
        )

    def ratio(self, numerator: Sequence[float], denominator: Sequence[float]) -> Interval:
        return ratio(numerator, denominator, self.resamples, self.seed)

    def length(self, rows: Rows) -> Interval:
        return self.ratio(_column(rows, "emitted"), _column(rows, "verify_ct"))

    def speedup(self, rows: Rows, base: Rows | None) -> Interval | None:
        """Tokens a second end to end, over the baseline's."""
        if base is None:
            return None
        columns = (_column(rows, "completion_tokens"), _shares(rows), _column(base, "completion_tokens"), _shares(base))
        return paired_quotient(*columns, self.resamples, self.seed)

    def decode_speedup(self, rows: Rows, base: Rows | None) -> Interval | None:
        """The same without the time to the first token."""
        if base is None:
            return None
        columns = (_column(rows, "decode_tokens"), _column(rows, "decode_s"), _column(base, "decode_tokens"), _column(base, "decode_s"))
        return paired_quotient(*columns, self.resamples, self.seed)

    def break_even(self, rows: Rows, base: Rows | None) -> Interval | None:
        """Cycle time x baseline decoding rate, both resampled together."""
        if base is None:
            return None
        columns = (_column(rows, "decode_s"), _column(rows, "verify_ct"), _column(base, "decode_tokens"), _column(base, "decode_s"))
        return bootstrap(
            columns,
            lambda sums: quotient(sums[..., 0], sums[..., 1]) * quotient(sums[..., 2], sums[..., 3]),
            self.resamples,
            self.seed,
        )

    def drift(self, variants: Sequence[Variant]) -> Drift | None:
        """The baseline after the drafters over the baseline before them; None when it was not measured twice."""
        by_leg = [{row.measured.leg: row for row in legs} for legs in self.table.get(BASELINE, [])]
        both = [(legs[BEFORE], legs[AFTER]) for legs in by_leg if {BEFORE, AFTER} <= set(legs)]
        if not both:
            return None
        (before_tokens, before_s), (after_tokens, after_s) = (
            ([float(pair[side].measured.completion_tokens) for pair in both], [pair[side].share_s for pair in both]) for side in (0, 1)
        )
        change = paired_quotient(after_tokens, after_s, before_tokens, before_s, self.resamples, self.seed)
        differing = sum(before.measured.output_ids != after.measured.output_ids for before, after in both)
        return Drift(
            prompts=len(both),
            before=self.ratio(before_tokens, before_s),
            after=self.ratio(after_tokens, after_s),
            change=change,
            differing=differing if self.greedy else None,
            hides=[variant.name for variant in variants if _is_hidden(variant.speedup, change)],
        )

    def gain(self, main: str | None) -> Interval | None:
        if main is None or main == STARTER or STARTER not in self.table:
            return None
        ours, theirs = self.table[main], self.table[STARTER]
        columns = (_column(ours, "emitted"), _column(ours, "verify_ct"), _column(theirs, "emitted"), _column(theirs, "verify_ct"))
        return paired_difference(*columns, self.resamples, self.seed)

    def groups(self, name_of: Callable[[Measurement], str], drafters: Sequence[str]) -> list[Group]:
        """By category or context length of the prompt; both are the same for every variant of a prompt."""
        members: dict[str, list[int]] = defaultdict(list)
        for place, legs in enumerate(next(iter(self.table.values()))):
            members[name_of(legs[0].measured)].append(place)
        base = self.table.get(BASELINE)
        groups = []
        for name, places in sorted(members.items(), key=lambda item: _group_order(item[0])):
            lengths, speedups = {}, {}
            for drafter in drafters:
                rows = [self.table[drafter][place] for place in places]
                lengths[drafter] = self.length(rows)
                speedup = self.speedup(rows, [base[place] for place in places] if base else None)
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


def _all(rows: Rows) -> list[Measurement]:
    return [row.measured for legs in rows for row in legs]


def _column(rows: Rows, name: str) -> list[float]:
    """One value a prompt, the mean over its legs; what an engine did not count is 0."""
    return [sum(float(getattr(row.measured, name) or 0) for row in legs) / len(legs) for legs in rows]


def _shares(rows: Rows) -> list[float]:
    return [sum(row.share_s for row in legs) / len(legs) for legs in rows]


def _pays(main: Variant | None, drift: Drift | None) -> bool | None:
    if main is None or main.speedup is None or main.speedup.value is None or not main.speedup.excludes(1.0):
        return None
    if drift is not None and main.name in drift.hides:
        return None
    return main.speedup.value > 1


def _is_hidden(speedup: Interval | None, change: Interval) -> bool:
    """True when the machine moved by itself as far as the speed-up claims to have moved it."""
    if speedup is None or not speedup.value or not change.value:
        return False
    return abs(math.log(change.value)) >= abs(math.log(speedup.value))


def _histogram(rows: Rows, draft_steps: int) -> list[int]:
    """Summed over requests. Engines leave out the entries behind the last one that occurred: they are 0. Empty where no engine gave any."""
    longest = max((len(measured.histogram) for measured in _all(rows)), default=0)
    total = [0] * max(longest, draft_steps + 1 if longest else 0)
    for measured in _all(rows):
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


def _draft_steps(rows: Rows) -> int | None:
    """Drafts a cycle: from what was proposed, else the longest histogram (its last entry may be missing where it never happened)."""
    known = [measured for measured in _all(rows) if measured.proposed is not None]
    cycles = sum(measured.verify_ct or 0 for measured in known)
    if cycles:
        return round(sum(measured.proposed or 0 for measured in known) / cycles)
    return max((len(measured.histogram) - 1 for measured in _all(rows) if measured.histogram), default=None)


def _engine_length(rows: Rows) -> float | None:
    known = [measured for measured in _all(rows) if measured.engine_length is not None and measured.verify_ct]
    cycles = sum(measured.verify_ct or 0 for measured in known)
    return sum((measured.engine_length or 0.0) * (measured.verify_ct or 0) for measured in known) / cycles if cycles else None


def _differences(rows: Rows, base: Rows) -> Differences:
    """Against the baseline's first leg."""
    first = {}
    for legs, baseline in zip(rows, base, strict=True):
        index = first_difference(legs[0].measured.output_ids, baseline[0].measured.output_ids)
        if index is not None:
            first[legs[0].measured.key] = index
    return Differences(len(rows), len(first), first)


def _part(rows: Rows, name: str) -> tuple[float, int]:
    """Seconds and count of a part over all requests, as the embedded engine gives them."""
    parts = [measured.parts for measured in _all(rows)]
    seconds = sum(float(part.get("seconds", {}).get(name, 0.0)) for part in parts)
    return seconds, sum(int(part.get("counts", {}).get(name, 0)) for part in parts)


def _parts(rows: Rows) -> Parts | None:
    cycles = sum(measured.verify_ct or 0 for measured in _all(rows))
    if not cycles or not _part(rows, "verify")[1]:
        return None
    cycle_ms = 1000 * sum(measured.decode_s for measured in _all(rows)) / cycles
    verify, extend, draft, prompt = (1000 * _part(rows, name)[0] / cycles for name in ("verify", "extend", "draft", "prefill_draft"))
    return Parts(cycle_ms, verify, extend, draft, prompt, cycle_ms - verify - extend - draft - prompt)
