"""What a training run starts from: target, state stores and drafter, opened and checked against each other."""

import hashlib
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from eyas.config import Config
from eyas.drafter import Drafter
from eyas.errors import EyasError
from eyas.files import digest_file
from eyas.folder import read_drafter
from eyas.initial import fresh_drafter, with_vocab
from eyas.manifest import NAME as MANIFEST
from eyas.states import StateStore
from eyas.target import Target, open_target
from eyas.vocab import choose_vocab, coverage

HELD_OUT = ("greedy", "sampled")


@dataclass(frozen=True)
class Inputs:
    """Everything training reads.

    drafter: float32, without its embedding. layers: HF hidden_states ids of the aux states. digests: name -> digest, for the manifest.
    notes: what the user should know about the start.
    """

    target: Target
    train: StateStore
    held_out: dict[str, StateStore]
    layers: tuple[int, ...]
    drafter: Drafter
    digests: dict[str, str]
    notes: list[str] = field(default_factory=list)


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
    digests = {f"states/{name}": digest_file(store.folder / MANIFEST) for name, store in stores.items()}
    if config.drafter.init == "scratch":
        drafter, digest, notes = _from_scratch(config, target, layers)
    else:
        drafter, digest, notes = _warm_start(config, target, layers)
    for store in stores.values():
        _check_shape(drafter, store, target)
    held_out = {name: stores[name] for name in HELD_OUT}
    return Inputs(target, stores["train"], held_out, layers, drafter, {**digests, "target": target.digest, "init": digest}, notes)


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
    drafter = fresh_drafter(target, choose_vocab(counts_V, size), layers, config.drafter.intermediate_size)
    return drafter.float(), digest, [f"fresh drafter, draft vocabulary of {size:,} tokens"]


def _warm_start(config: Config, target: Target, layers: tuple[int, ...]) -> tuple[Drafter, str, list[str]]:
    init, size = config.drafter.init, config.drafter.draft_vocab_size
    found = read_drafter(init, dtype=torch.float32)
    notes = [f"{init}: {note}" for note in found.notes]
    if found.candidates and layers not in found.candidates:
        readings = " or ".join(str(list(candidate)) for candidate in found.candidates)
        raise EyasError(f"{init} reads layers {readings}, states/train holds {list(layers)}: capture its layers (prep.states.layers)")
    if found.layers is None:
        notes.append(f"{init} does not tell which layers it was trained on; the states are those of {list(layers)}")
    if size is None:
        return found.drafter, drafter_digest(found.drafter), notes
    counts_V, _ = _token_counts(config, size, target)
    own_ids_D = found.drafter.draft_ids_D
    ids_E = choose_vocab(counts_V, size, own_ids_D)
    drafter = with_vocab(found.drafter, ids_E, target)
    kept = int(torch.isin(ids_E, own_ids_D).sum())
    notes.append(
        f"draft vocabulary chosen anew: {len(own_ids_D):,} tokens covered {coverage(counts_V, own_ids_D):.2%} of the training text, "
        f"{size:,} cover {coverage(counts_V, ids_E):.2%}; {kept:,} keep their rows, {size - kept:,} start from the target's, moved alike"
    )
    return drafter, drafter_digest(drafter), notes


def _token_counts(config: Config, size: int, target: Target) -> tuple[Tensor, str]:
    """How often each token is supervised, int64 [V], and the digest of the file; raises EyasError where ``size`` does not fit."""
    path = config.folder("states") / "token_counts.safetensors"
    if not path.is_file():
        raise EyasError(f"{path} does not exist: run `eyas prep` first")
    if size > target.shape.vocab_size:
        raise EyasError(f"drafter.draft_vocab_size is {size}, the target's vocabulary has {target.shape.vocab_size} tokens")
    return load_file(path)["counts"], digest_file(path)


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


def drafter_digest(drafter: Drafter) -> str:
    """SHA-256 over shape and weights as loaded: the same digest, the same computation."""
    total = hashlib.sha256(drafter.shape.model_dump_json().encode())
    for name, tensor in sorted(drafter.state_dict().items()):
        total.update(name.encode())
        total.update(memoryview(tensor.contiguous().numpy()).cast("B"))
    return total.hexdigest()
