"""A server's behaviour beside the trained drafter's: the states it hands over, and the verify steps it took, replayed offline."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from eval.checks import Check, fault, not_checked, ok
from eval.export_checks import Read, Trained, chunk_order, fed_layers
from eval.replay import EXPLAINED, Diagnosis, Reading, Replay, diagnose, misreadings
from eval.served import Requests
from eval.served_states import Followed, FromStore, FromTarget, recognised, source_of_states
from eyas.config import Config
from eyas.drafter import Drafter
from eyas.drafter_config import read_rope
from eyas.errors import EyasError
from eyas.target import Target, pick_device

LEAST_STEPS = 20
OTHER_TARGET = 0.7
"""Below this share of served tokens that are our target's own choice, the server runs another model."""
NO_LOWER = 0.95
"""From this share of the replayed acceptance length on, steps that differ are put down to rounding."""


@dataclass
class Behaviour:
    """Findings, and tokens a verify step (the cut-off last step of each request aside) as served and as the trained drafter replays it."""

    checks: list[Check] = field(default_factory=list)
    served_length: float | None = None
    replayed_length: float | None = None

    @property
    def lengths(self) -> str:
        """Both, in words."""
        replayed = "" if self.replayed_length is None else f", {self.replayed_length:.2f} as trained"
        return f"acceptance length {self.served_length:.2f} served{replayed}"


def examine_behaviour(
    config: Config,
    target: Target,
    trained: Trained,
    read: Read,
    requests: Requests,
    draft_steps: int,
    states_of: Sequence[int],
    states_TA: Tensor | None,
) -> Behaviour:
    """Look at what a server did.

    Args:
        config: where the held-out store is, dtype and device of the replays.
        target: whose states are replayed with, if it fits into memory.
        trained: the drafter as it should be.
        read: the export as the engine reads it: faults that the folder shows are taken into account.
        requests: the served verify steps.
        draft_steps: drafts of a step.
        states_of: tokens whose aux states ``states_TA`` [T, A] the server returned, if it did.
        states_TA: those.
    """
    found = Behaviour(served_length=_length([count for request in requests.served for count in request.accepted]))
    try:
        source = source_of_states(config, target)
    except EyasError as error:
        found.checks.append(not_checked("served: steps", str(error)))
        return found
    fed = fed_layers(read, target) or trained.layers
    check, seen = _states(source, trained.layers, fed, states_of, states_TA)
    found.checks.append(check)
    steps = sum(len(request.accepted) for request in requests.served)
    if steps < LEAST_STEPS:
        found.checks.append(not_checked("served: steps", requests.reason or f"{steps} verify steps are too few to tell anything"))
        return found
    try:
        supposed = as_read(read, trained, seen or fed)
        followed = source.follow(requests.served, sorted(_layers_of_interest(supposed, trained, target)))
        found.checks += _steps(found, config, target, trained, supposed, followed, draft_steps)
    except EyasError as error:
        found.checks.append(not_checked("served: steps", str(error)))
    return found


def as_read(read: Read, trained: Trained, fed: tuple[int, ...]) -> Reading:
    """The trained drafter on the layers ``fed``, under the faults that the folder shows. Raises EyasError when its weights are others."""
    own, written = trained.drafter.state_dict(), read.tensors
    if len(fed) != trained.drafter.shape.num_aux:
        raise EyasError(f"the engine feeds {len(fed)} layers, the drafter takes {trained.drafter.shape.num_aux}")
    order = chunk_order(written["fc.weight"], own["fc.weight"], len(fed)) if "fc.weight" in written else None
    if order is None or any(name not in written for name in own if name not in ("d2t", "t2d")):
        raise EyasError("the export's weights are not those that were trained, there is nothing to replay")
    theta, scaling, _ = read_rope(read.config)
    in_own_order = tuple(fed[order.index(place)] for place in range(len(fed)))
    reading = Reading(in_own_order, "offsets", theta, None if scaling is None else tuple(sorted(scaling.items())))
    if read.engine is None:  # the embedded engine tells offsets from ids itself
        return reading
    d2t = written.get("d2t")
    if d2t is None and trained.drafter.d2t.any():
        return replace(reading, draft_ids="lost")
    same = d2t is None or torch.equal(d2t, own["d2t"])
    return reading if same else replace(reading, draft_ids="absolute")


def _states(
    source: FromTarget | FromStore, trained: tuple[int, ...], fed: tuple[int, ...], ids: Sequence[int], states_TA: Tensor | None
) -> tuple[Check, tuple[int, ...] | None]:
    """Which layers' states the server hands over, if it shows them."""
    name = "served: states"
    if states_TA is None:
        return not_checked(name, "the server returns no hidden states (SGLang does with --enable-return-hidden-states)"), None
    own = source.along(ids)
    if not own:
        return not_checked(name, "the store has no row that begins as the prompt"), None
    seen, error = recognised(states_TA, own)
    layers = tuple(layer for layer in seen if layer is not None)
    told = f"hidden_states{[layer if layer is not None else 'of no known layer' for layer in seen]}, relative error {error:.1g}"
    if seen == trained:
        return ok(name, f"the server hands over {told}"), layers
    expected = ", as its config tells this engine" if seen == fed else ""
    return fault(name, f"the server hands over {told}{expected}; trained on hidden_states{list(trained)}"), (
        layers if len(layers) == len(seen) else None
    )


def _steps(
    found: Behaviour, config: Config, target: Target, trained: Trained, supposed: Reading, followed: Followed, draft_steps: int
) -> Iterator[Check]:
    if followed.agreement is not None and followed.agreement < OTHER_TARGET:
        told = f"{followed.agreement:.0%} of the served tokens are what {target.name} would say: the server runs another model"
        yield fault("served: text", told)
        return
    drafter = _ready(trained.drafter, target, config)
    replay = Replay(drafter, draft_steps, max(len(case.ids) for case in followed.cases))
    healthy = replay.reading(trained.layers)
    if set(healthy.layers) <= set(followed.layers):
        found.replayed_length = _length([count for case in followed.cases for count in replay.accepted(healthy, case)])
    if not set(supposed.layers) <= set(followed.layers):
        yield not_checked("served: steps", f"the states of hidden_states{list(supposed.layers)} are not there to replay with")
        return
    explained = EXPLAINED[drafter.fc.weight.dtype]
    known = misreadings(supposed, _defaults(target, trained), followed.layers)
    diagnosis = diagnose(replay, followed.cases, supposed, known, explained)
    yield from _verdict(diagnosis, supposed != healthy, explained, found)
    if followed.agreement is None:
        yield not_checked("served: other layers", "the target does not fit into memory here, and the store has the trained layers only")


def _ready(drafter: Drafter, target: Target, config: Config) -> Drafter:
    dtype, device = getattr(torch, config.engine.dtype), pick_device(config.target.device)
    ready = drafter.to(device=device, dtype=dtype).eval()
    ready.set_embedding(target.embedding(dtype).to(device))
    return ready


def _verdict(found: Diagnosis, faulty: bool, explained: float, lengths: Behaviour) -> Iterator[Check]:
    name, told = "served: steps", f"{found.told} of {found.steps} verify steps"
    served, replayed = lengths.served_length or 0.0, lengths.replayed_length or 0.0
    for culprit in found.culprits:
        others = [" and ".join(one.told for one in group) for group in found.others]
        either = f" (as well: {'; or '.join(others)})" if others else ""
        told_else = f"so replayed, {told} are told, else {found.supposed}"
        yield fault(f"served: {culprit.kind}", f"{culprit.told}{either}: {told_else}; {lengths.lengths}")
    if found.culprits:
        return
    if found.share >= explained:
        whom = "a drafter with the faults above does" if faulty else "the trained drafter does offline"
        yield ok(name, f"{told} as {whom}; {lengths.lengths}")
    elif not faulty and served >= NO_LOWER * replayed:
        yield ok(name, f"{told} as the trained drafter does offline, the others by rounding: no lower, {lengths.lengths}")
    else:
        why = "nothing that is known explains the others (precision, attention, another build?)"
        yield fault(name, f"{lengths.lengths}; a replay tells {told}, {why}")


def _layers_of_interest(supposed: Reading, trained: Trained, target: Target) -> set[int]:
    around = {k + shift for k in {*supposed.layers, *trained.layers} for shift in (-1, 0, 1)}
    return {k for k in {*around, *_defaults(target, trained)} if 0 <= k < target.shape.num_layers}


def _defaults(target: Target, trained: Trained) -> tuple[int, ...]:
    """What engines feed a drafter without ids, where the target has so many layers."""
    try:
        defaults = target.default_layers()
    except EyasError:
        return trained.layers
    return defaults if len(defaults) == len(trained.layers) else trained.layers


def _length(accepted: Sequence[int]) -> float | None:
    return sum(accepted) / len(accepted) + 1 if accepted else None
