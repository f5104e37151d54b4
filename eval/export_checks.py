"""An export beside what was trained: weights, d2t, layers, rope and config of the folder that an engine is given. No engine runs here."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from eval.checks import Check, fault, not_checked, ok
from eyas import conventions, vocab
from eyas.config import Config
from eyas.conventions import Engine, Family
from eyas.drafter import Drafter
from eyas.drafter_config import CAPTURED, LAYER_IDS, RECORD, read_rope
from eyas.errors import EyasError, first_line
from eyas.files import read_object
from eyas.folder import CONFIG, read_drafter
from eyas.manifest import NAME, read_manifest
from eyas.target import Target
from eyas.weights import weight_files


@dataclass(frozen=True)
class Trained:
    """What a run trained: ``drafter`` and the ``layers`` it was trained on, from ``folder``; digests of target and tokenizer then.

    Without a training run all of it is what the export says of itself, and there is nothing to compare its weights with.
    """

    folder: Path
    drafter: Drafter
    layers: tuple[int, ...]
    target_digest: str | None
    tokenizer_digest: str | None


@dataclass(frozen=True)
class Read:
    """An export as ``engine`` in ``version`` reads it: tensors as they lie in the files, the config as it stands.

    engine: None for the embedded one, which goes by the record in the config.
    """

    folder: Path
    config: dict[str, Any]
    tensors: dict[str, Tensor]
    engine: Engine | None
    version: str
    family: Family


def read_trained(config: Config, export: Path, family: Family) -> Trained | None:
    """The run's best drafter; without a training run the export itself; None when neither can be read or tells its layers."""
    best, run = config.folder("train") / "best", config.folder("train")
    own = (best / CONFIG).exists() and (run / NAME).exists()
    folder = best if own else export
    try:
        found = read_drafter(folder, family=family)
        record = found.raw_config.get(RECORD) or {}
        held = read_manifest(run, "checkpoint").holds if own else {}
    except EyasError:
        return None
    layers = tuple(held.get("layers") or found.layers or ())
    if not layers:
        return None
    return Trained(folder, found.drafter, layers, record.get("target_digest"), record.get("tokenizer_digest"))


def read_export(export: Path, engine: Engine | None, version: str, family: Family) -> Read:
    """Read config and tensors without judging them. Raises EyasError when there are none."""
    tensors: dict[str, Tensor] = {}
    for file in weight_files(export):
        try:
            with safe_open(file, framework="pt") as shard:
                tensors |= {name: shard.get_tensor(name) for name in shard.keys()}  # noqa: SIM118 (no mapping)
        except (OSError, SafetensorError) as error:
            raise EyasError(f"cannot read {file}: {first_line(error)}") from None
    return Read(export, read_object(export / CONFIG), tensors, engine, version, family)


def check_export(read: Read, trained: Trained, target: Target, context: int) -> list[Check]:
    """Everything about the folder that can be seen without an engine."""
    return [
        *_weights(read, trained),
        _d2t(read, trained),
        *_layers(read, trained),
        _rope(read, trained),
        _config(read, trained, context),
        _tokenizer(trained, target),
    ]


def fed_layers(read: Read, target: Target) -> tuple[int, ...] | None:
    """The layers that the engine will feed this drafter; None when they are not to be known."""
    record = (read.config.get(RECORD) or {}).get(CAPTURED)
    if read.engine is None:
        return tuple(record) if record else None
    fed = conventions.fed_layers(*_ids(read), read.engine, read.version, read.family)
    return fed or target.default_layers()


def chunk_order(written: Tensor, own: Tensor, count: int) -> tuple[int, ...] | None:
    """The order in which ``written`` has the ``count`` chunks of the fc weight ``own``; None when it holds others."""
    parts = own.to(written.dtype).chunk(count, dim=1)
    for order in permutations(range(count)):
        if torch.equal(written, torch.cat([parts[place] for place in order], dim=1)):
            return order
    return None


def _weights(read: Read, trained: Trained) -> Iterator[Check]:
    name = "export: weights"
    if trained.folder == read.folder:
        yield not_checked(name, "there is no training run to compare with (train/best below output)")
        return
    own = trained.drafter.state_dict()
    weights = [tensor for tensor in own if tensor not in ("d2t", "t2d")]
    written = {_plain(tensor): value for tensor, value in read.tensors.items()}
    missing = [tensor for tensor in weights if tensor not in written]
    unknown = [tensor for tensor in written if tensor not in own and not tensor.endswith("embed_tokens.weight")]
    other = [tensor for tensor in weights if tensor in written and not _same(written[tensor], own[tensor])]
    order = chunk_order(written["fc.weight"], own["fc.weight"], trained.drafter.shape.num_aux) if "fc.weight" in other else None
    if order is not None:
        other.remove("fc.weight")
        places = ", ".join(str(place + 1) for place in order)
        yield fault("export: fc", f"fc.weight has the trained chunks in the order {places}: export again from {trained.folder}")
    wrong = [
        *(f"{tensor} is missing" for tensor in missing),
        *(f"{tensor} is unknown, engines skip it" for tensor in unknown),
        *(f"{tensor} differs" for tensor in other),
    ]
    if wrong:
        yield fault(name, f"{'; '.join(wrong)}: not those of {trained.folder}, export again")
    else:
        yield ok(name, f"{len(weights) - bool(order)} tensors as in {trained.folder}")


def _same(written: Tensor, own: Tensor) -> bool:
    return written.shape == own.shape and torch.equal(written, own.to(written.dtype))


def _plain(name: str) -> str:
    return name.removeprefix("model.").replace("layers.0.", "midlayer.", 1)


def _d2t(read: Read, trained: Trained) -> Check:
    name, own = "export: d2t", trained.drafter.d2t
    written = read.tensors.get("d2t")
    if written is None:
        if not bool(own.any()):
            return ok(name, "none, and none is needed: draft ids are token ids")
        return fault(name, "there is none: engines take row r of the head for token r; export again")
    same = written.shape == own.shape
    if same and torch.equal(written, own):
        return ok(name, f"{len(own):,} offsets, those that were trained")
    if same and torch.equal(written, vocab.absolute(own)):
        return fault(name, "it holds target ids, engines add row numbers to it: export again, with offsets")
    return fault(name, f"it is not the d2t that was trained ({trained.folder}): export again")


def _layers(read: Read, trained: Trained) -> Iterator[Check]:
    name, layers = "export: layers", list(trained.layers)
    record = (read.config.get(RECORD) or {}).get(CAPTURED)
    wrong = []
    if record is not None and record != layers:
        wrong.append(f"{RECORD}.{CAPTURED} says hidden_states{record}")
    nested, top = _ids(read)
    engines: Sequence[tuple[Engine, str]] = (
        [(read.engine, read.version)] if read.engine else [("sglang", conventions.SGLANG), ("vllm", conventions.VLLM)]
    )
    for engine, version in engines:
        fed = conventions.fed_layers(nested, top, engine, version, read.family)
        if fed is None:
            wrong.append(f"{engine} {version} finds no ids and takes its default")
        elif fed != trained.layers:
            wrong.append(f"{engine} {version} feeds it hidden_states{list(fed)}")
    if wrong:
        yield fault(name, f"trained on hidden_states{layers}, but {'; '.join(wrong)}: export for this version (engine.version)")
    else:
        yield ok(name, f"hidden_states{layers} for {', '.join(f'{engine} {version}' for engine, version in engines)}")


def _rope(read: Read, trained: Trained) -> Check:
    name, shape = "export: rope", trained.drafter.shape
    try:
        theta, scaling, notes = read_rope(read.config)
    except EyasError as error:
        return fault(name, f"{error}: export again")
    lacking = [key for key in ("rope_theta", "rope_parameters") if read.config.get(key) is None and _ours(read)]
    trained_as = _told(shape.rope_theta, shape.rope_scaling)
    if (theta, scaling) != (shape.rope_theta, shape.rope_scaling):
        said = _told(theta, scaling) + (" (the config has none)" if notes else "")
        return fault(name, f"{said}; trained with {trained_as}: export again")
    if lacking:
        return fault(name, f"{' and '.join(lacking)} is missing, and some engines read no other: export again")
    return ok(name, trained_as)


def _told(theta: float, scaling: dict[str, Any] | None) -> str:
    return f"theta {theta:g}, " + ("no scaling" if scaling is None else f"scaling {scaling}")


def _config(read: Read, trained: Trained, context: int) -> Check:
    name, shape, config = "export: config", trained.drafter.shape, read.config
    wanted = {
        "hidden_size": shape.hidden_size,
        "vocab_size": shape.vocab_size,
        "draft_vocab_size": shape.draft_vocab_size,
        "num_aux_hidden_states": shape.num_aux,
        "rms_norm_eps": shape.rms_norm_eps,
        "num_key_value_heads": shape.num_kv_heads,
        "tie_word_embeddings": False,
    }
    silent = {key for key in wanted if config.get(key) is None and not _ours(read)}  # engines then have defaults of their own
    wrong = [
        f"{key} is {config.get(key)}, must be {value}" for key, value in wanted.items() if key not in silent and config.get(key) != value
    ]
    positions = config.get("max_position_embeddings") or 0
    if positions < context:
        wrong.append(f"max_position_embeddings is {positions:,}, below the context of {context:,}")
    if wrong:
        return fault(name, f"{'; '.join(wrong)}: export again")
    return ok(name, f"draft vocabulary {shape.draft_vocab_size:,}, {shape.num_aux} aux states, {positions:,} positions")


def _tokenizer(trained: Trained, target: Target) -> Check:
    name = "tokenizer: files"
    if trained.tokenizer_digest is None:
        return not_checked(name, "the drafter does not say with which tokenizer it was trained")
    if trained.tokenizer_digest != target.tokenizer_digest:
        return fault(
            name,
            f"vocabulary or template of {target.folder} are not those of the training "
            f"(digest {target.tokenizer_digest[:12]}, then {trained.tokenizer_digest[:12]}): serve the target that was trained for",
        )
    return ok(name, f"vocabulary and template of {target.name} are those of the training")


def _ours(read: Read) -> bool:
    """Written by eyas, which writes every field."""
    return RECORD in read.config


def _ids(read: Read) -> tuple[list[int] | None, list[int] | None]:
    eagle = read.config.get("eagle_config") or {}
    return eagle.get(LAYER_IDS), read.config.get(LAYER_IDS)
