"""What a training run starts from: target, state stores and drafter, opened and checked against each other."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from eyas.config import Config
from eyas.drafter import Drafter
from eyas.errors import EyasError
from eyas.files import digest_file
from eyas.folder import DrafterFolder, drafter_digest, read_drafter
from eyas.initial import fresh_drafter, with_positions, with_vocab
from eyas.manifest import NAME as MANIFEST
from eyas.states import StateStore
from eyas.target import Target, open_target
from eyas.vocab import coverage, drafter_vocab, vocab_digest

HELD_OUT = ("greedy", "sampled")


@dataclass(frozen=True)
class Inputs:
    """Everything training reads.

    drafter: float32, without its embedding. layers: HF hidden_states ids of the aux states. digests: name -> digest, for the manifest.
    notes: what the user should know about the start. measured: what prep found with the untouched drafter and which layers it kept for it
    (data_prep.warm_start); None where it had nothing to find out.
    """

    target: Target
    train: StateStore
    held_out: dict[str, StateStore]
    layers: tuple[int, ...]
    drafter: Drafter
    digests: dict[str, str]
    notes: list[str] = field(default_factory=list)
    measured: dict[str, Any] | None = None


def open_inputs(config: Config) -> Inputs:
    """Open and check the inputs of ``config``. Raises EyasError naming what does not fit, with both values."""
    target = open_target(config.target)
    stores = {name: _open_store(config.folder(f"states/{name}"), target) for name in ("train", *HELD_OUT)}
    layers = stores["train"].spec.layers
    for name in HELD_OUT:
        if stores[name].spec.layers != layers:
            raise EyasError(
                f"states/{name} holds layers {list(stores[name].spec.layers)}, states/train {list(layers)}: run `eyas prep` again"
            )
        kinds = [stores[part].spec.top_logprobs for part in (name, "train")]
        if kinds[0] != kinds[1]:
            said = ["final states" if k is None else f"{k} log-probabilities a token" for k in kinds]
            raise EyasError(f"states/{name} holds {said[0]}, states/train {said[1]}: run `eyas prep` again")
    digests = {f"states/{name}": digest_file(store.folder / MANIFEST) for name, store in stores.items()}
    measured = None
    if config.drafter.init == "scratch":
        drafter, digest, notes = _from_scratch(config, target, layers)
    else:
        found = read_drafter(config.drafter.init, dtype=torch.float32)
        measured = _measured(stores["train"], found.drafter)
        drafter, digest, notes = _warm_start(config, target, found, layers, measured)
    for store in stores.values():
        _check_shape(drafter, store, target)
        _check_vocab(drafter, store)
    held_out = {name: stores[name] for name in HELD_OUT}
    digests |= {"target": target.digest, "init": digest}
    return Inputs(target, stores["train"], held_out, layers, drafter, digests, notes, measured)


def _open_store(folder: Path, target: Target) -> StateStore:
    if not (folder / MANIFEST).is_file():
        raise EyasError(f"{folder} does not exist: run `eyas prep` first")
    store = StateStore(folder)
    for name in ("target_digest", "tokenizer_digest"):
        stored, own = getattr(store.spec, name), getattr(target, name.removeprefix("target_"))
        if stored != own:
            raise EyasError(f"{folder} was captured with another target: {name} {stored[:12]} there, {own[:12]} in {target.name}")
    return store


def _from_scratch(config: Config, target: Target, layers: tuple[int, ...]) -> tuple[Drafter, str, list[str]]:
    size = config.drafter.draft_vocab_size or target.shape.vocab_size
    counts_V, digest = _token_counts(config, size, target)
    torch.manual_seed(config.seed)
    drafter = fresh_drafter(target, drafter_vocab(counts_V, size, None), layers, config.drafter.intermediate_size)
    return drafter.float(), digest, [f"fresh drafter, draft vocabulary of {size:,} tokens"]


def _warm_start(
    config: Config, target: Target, found: DrafterFolder, layers: tuple[int, ...], measured: dict[str, Any] | None
) -> tuple[Drafter, str, list[str]]:
    init, size = config.drafter.init, config.drafter.draft_vocab_size
    notes = [f"{init}: {note}" for note in found.notes]
    notes += _layer_notes(init, found, layers, measured)
    drafter = found.drafter
    positions = target.shape.max_position
    if drafter.shape.max_position < positions:
        notes.append(
            f"{init}: max_position {drafter.shape.max_position:,} raised to the target's {positions:,} (rotary: no table to train)"
        )
        drafter = with_positions(drafter, positions)
    if size is None:
        return drafter, drafter_digest(drafter), notes
    counts_V, _ = _token_counts(config, size, target)
    own_ids_D = drafter.draft_ids_D
    ids_E = drafter_vocab(counts_V, size, own_ids_D)
    drafter = with_vocab(drafter, ids_E, target)
    kept = int(torch.isin(ids_E, own_ids_D).sum())
    notes.append(
        f"draft vocabulary chosen anew: {len(own_ids_D):,} tokens covered {coverage(counts_V, own_ids_D):.2%} of the training text, "
        f"{size:,} cover {coverage(counts_V, ids_E):.2%}; {kept:,} keep their rows, {size - kept:,} start from the target's, moved alike"
    )
    return drafter, drafter_digest(drafter), notes


def _measured(store: StateStore, drafter: Drafter) -> dict[str, Any] | None:
    """How prep chose the store's layers for this very drafter, if it measured."""
    record = store.manifest.holds.get("warm_start")
    return record if record is not None and record["drafter"] == drafter_digest(drafter) else None


def _layer_notes(init: str, found: DrafterFolder, layers: tuple[int, ...], measured: dict[str, Any] | None) -> list[str]:
    """Why these layers. Raises EyasError when they are none that the drafter can have been trained on."""
    if measured is not None:
        return [f"{init}: {measured['reason']}"]
    if found.candidates and layers not in found.candidates:
        readings = " or ".join(str(list(candidate)) for candidate in found.candidates)
        raise EyasError(f"{init} reads layers {readings}, states/train holds {list(layers)}: capture its layers (prep.states.layers)")
    if found.layers is None:
        return [f"{init} does not tell which layers it was trained on; the states are those of {list(layers)}"]
    return []


def _token_counts(config: Config, size: int, target: Target) -> tuple[Tensor, str]:
    """How often each token is supervised, int64 [V], and the digest of the file; raises EyasError where ``size`` does not fit."""
    path = config.folder("states") / "token_counts.safetensors"
    if not path.is_file():
        raise EyasError(f"{path} does not exist: run `eyas prep` first")
    if size > target.shape.vocab_size:
        raise EyasError(f"drafter.draft_vocab_size is {size}, the target's vocabulary has {target.shape.vocab_size} tokens")
    return load_file(path)["counts"], digest_file(path)


def _check_vocab(drafter: Drafter, store: StateStore) -> None:
    """Log-probabilities are counted in rows of one lm_head: in another draft vocabulary they would be those of other tokens."""
    stored, own = store.spec.vocab_digest, vocab_digest(drafter.draft_ids_D)
    if store.spec.top_logprobs is not None and stored != own:
        raise EyasError(
            f"{store.folder} holds log-probabilities in the draft vocabulary {str(stored)[:12]}, the drafter drafts in {own[:12]} "
            f"({drafter.shape.draft_vocab_size:,} tokens): set drafter.init and drafter.draft_vocab_size as they were for `eyas prep`, or "
            "capture anew"
        )


def _check_shape(drafter: Drafter, store: StateStore, target: Target) -> None:
    shape, spec = drafter.shape, store.spec
    for what, own, other in (
        ("hidden size", shape.hidden_size, spec.hidden_size),
        ("number of aux states", shape.num_aux, len(spec.layers)),
        ("vocabulary", shape.vocab_size, target.shape.vocab_size),
        ("hidden size of the target", shape.hidden_size, target.shape.hidden_size),
    ):
        if own != other:
            raise EyasError(f"the drafter does not fit {store.folder}: {what} {own} in the drafter, {other} there")
    if max(store.lengths) > shape.max_position:
        raise EyasError(f"{store.folder} has a row of {max(store.lengths):,} tokens, the drafter {shape.max_position:,} positions")
