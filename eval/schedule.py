"""The order of measuring: legs, each of them one server.

An engine that switches speculation per request (the embedded one) needs a single leg, PAIRS: all variants of a prompt run one after the
other in an order rotated from prompt to prompt, so that a machine that slows down slows all of them.

SGLang and vLLM do what they were started with. There a leg is one server start and the schedule is A-B-A: the baseline BEFORE, every
drafter BETWEEN, the baseline AFTER. The baseline's time of a prompt is the mean of the two, and how far they lie apart is the drift,
against which everything that is claimed of the drafters has to be seen.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eval.clients import BASELINE
from eval.measurement import AFTER, BEFORE, BETWEEN, PAIRS, BenchPrompt, Place
from eyas.config import Config


@dataclass(frozen=True)
class Leg:
    """One server and what is measured on it."""

    name: str
    variants: dict[str, str | None]
    """Variant -> value of the request field that asks for it, None for a server with one behaviour."""
    serve: str | None
    """The variant that the server is started with; None for one that holds all drafters, or that somebody else started."""


@dataclass(frozen=True)
class Ask:
    """One request that a leg has to make."""

    prompt: BenchPrompt
    variant: str
    order: int


def switches(config: Config) -> bool:
    """True when one server of the configured engine serves every variant, chosen per request."""
    return config.engine.kind == "embedded"


def legs(config: Config, drafters: dict[str, str]) -> list[Leg]:
    """The legs of a whole bench of the configured engine."""
    if switches(config):
        return [Leg(PAIRS, {name: name for name in (BASELINE, *drafters)}, None)]
    between = [Leg(BETWEEN, {name: None}, name) for name in drafters]
    return [Leg(BEFORE, {BASELINE: None}, BASELINE), *between, Leg(AFTER, {BASELINE: None}, BASELINE)]


def leg_of_server(info: dict[str, Any], drafters: dict[str, str], done: set[Place]) -> Leg:
    """The leg that a server started by somebody else can serve now.

    A baseline server is the leg BEFORE until some drafter was measured, then AFTER.
    """
    variants = server_variants(info, drafters)
    if isinstance(info.get("eyas"), dict):
        return Leg(PAIRS, variants, None)
    if BASELINE not in variants:
        return Leg(BETWEEN, variants, None)
    drafted = any(variant != BASELINE for _, variant, _, _ in done)
    return Leg(AFTER if drafted else BEFORE, variants, None)


def server_variants(info: dict[str, Any], drafters: dict[str, str]) -> dict[str, str | None]:
    """What a running server can be asked for: variant name -> value of the request field, None for a server with one behaviour.

    The embedded server switches per request between its drafters. Others do what they were started with: "none" without speculation, else
    the name that ``drafters`` gives to its draft model, or that folder's own name.
    """
    embedded = info.get("eyas")
    if isinstance(embedded, dict):
        return {name: name for name in (BASELINE, *embedded.get("drafters", []))}
    if not info.get("speculative_algorithm"):
        return {BASELINE: None}
    path = str(info.get("speculative_draft_model_path") or "drafter").rstrip("/")
    named = next((name for name, folder in drafters.items() if _same_drafter(folder, path)), None)
    return {named or path.rsplit("/", 1)[-1]: None}


def _same_drafter(one: str, other: str) -> bool:
    plain = [name.removeprefix("hub:").partition("@")[0].rstrip("/") for name in (one, other)]
    return plain[0] == plain[1] or Path(plain[0]).resolve() == Path(plain[1]).resolve()


def missing(leg: Leg, prompts: Sequence[BenchPrompt], concurrency: int, done: set[Place]) -> list[Ask]:
    """What a leg still has to ask at one level of concurrency, in the order of asking."""
    return [ask for ask in _rotated(prompts, list(leg.variants)) if (ask.prompt.key, ask.variant, leg.name, concurrency) not in done]


def _rotated(prompts: Sequence[BenchPrompt], variants: list[str]) -> Iterator[Ask]:
    for number, prompt in enumerate(prompts):
        turn = number % len(variants)
        for order, variant in enumerate(variants[turn:] + variants[:turn]):
            yield Ask(prompt, variant, order)
