"""The best checkpoint as a folder that SGLang loads, read back and compared: SGLang itself would skip a wrong name without a word."""

import sys
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from eyas import conventions
from eyas.attention_hf import grouped_attention
from eyas.config import Config
from eyas.conventions import Family, family_of
from eyas.drafter import Drafter
from eyas.errors import EyasError
from eyas.files import digest_file
from eyas.folder import DrafterFolder, drafter_config, read_drafter, tensor_contract, write_drafter
from eyas.initial import with_positions
from eyas.manifest import NAME, Manifest, finish, is_current, read_manifest, write_manifest
from eyas.target import Target, open_target

_PROBES = 16


def export(config: Config) -> Path:
    """Write ``output/export`` from ``output/train/best`` and return it; a folder that is current is left as it is.

    The weights keep their dtype. ``max_position`` is raised to the serving context and to the target's positions: engines refuse or crash
    below them. Layer ids are written for SGLang and for vLLM, each where it looks for them, as ``engine.version`` reads them; versions
    that would read them otherwise are named on stderr. Raises EyasError when training is not finished, was for another target, or the
    written folder is not what was meant.
    """
    source, folder = config.folder("train"), config.folder("export")
    target = open_target(config.target)
    trained = _finished(source, target)
    engines = served_by(config)
    part = {"context": config.engine.context, "target": target.name, "written_for": engines}
    inputs = {"weights": digest_file(source / "best" / "model.safetensors"), "config": digest_file(source / "best" / "config.json")}
    if is_current(folder, "export", part, inputs):
        return folder
    family = family_of(target.shape.model_type)
    best = read_drafter(source / "best", _stored_dtype(source / "best"), family)
    layers = tuple(trained.holds["layers"])
    if best.layers != layers:
        raise EyasError(f"{source / 'best'} says it reads layers {best.layers}, its training run says {layers}: train again")
    dtype = best.drafter.fc.weight.dtype
    drafter = with_positions(best.drafter, max(best.drafter.shape.max_position, config.engine.context, target.shape.max_position))
    write_manifest(folder, Manifest(kind="export", config=part, inputs=inputs))
    write_drafter(folder, drafter, drafter_config(drafter.shape, layers, target, **engines), dtype)
    _compare(folder, best, layers, target, dtype)
    finish(folder, _holds(drafter, layers, target, dtype, trained))
    for misread in misread_by(engines, layers, family):
        print(f"export: {misread}: it needs an export of its own (engine.kind, engine.version)", file=sys.stderr)
    return folder


def served_by(config: Config) -> dict[str, str]:
    """The versions of sglang and vllm that an export is written for: ``engine.version`` for its kind, else the newest that is known."""
    newest = {"sglang": conventions.SGLANG, "vllm": conventions.VLLM}
    return newest | ({config.engine.kind: config.engine.version} if config.engine.version else {})


def misread_by(engines: dict[str, str], layers: tuple[int, ...], family: Family) -> list[str]:
    """Versions that one folder cannot serve beside those in ``engines``, and what they would feed the drafter."""
    told = []
    for engine in ("sglang", "vllm"):
        ids = conventions.written_ids(layers, engine, engines[engine], family)
        told += conventions.misreadings(ids, engine, family, layers)
    return told


def _finished(source: Path, target: Target) -> Manifest:
    if not (source / NAME).is_file():
        raise EyasError(f"{source} does not exist: run `eyas train` first")
    trained = read_manifest(source, "checkpoint")
    if not trained.complete:
        raise EyasError(f"{source}: training has not finished, run `eyas train` again (it resumes)")
    if trained.inputs.get("target") != target.digest:
        raise EyasError(
            f"{source} was trained for another target than {target.name} (digest {trained.inputs.get('target')}, now {target.digest}): "
            "remove it and train again, or use another output folder"
        )
    return trained


def _stored_dtype(folder: Path) -> torch.dtype:
    kinds = {dtype for name, (_, dtype) in _stored(folder).items() if name not in ("d2t", "t2d")}
    if len(kinds) != 1:
        raise EyasError(f"{folder}: weights in {len(kinds)} dtypes ({', '.join(map(str, kinds))}), expected one")
    return kinds.pop()


def _stored(folder: Path) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of every tensor in the folder's one weights file."""
    path = folder / "model.safetensors"
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
    except (OSError, SafetensorError) as error:
        raise EyasError(f"cannot read {path}: {error}") from None
    return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}


def _compare(folder: Path, best: DrafterFolder, layers: tuple[int, ...], target: Target, dtype: torch.dtype) -> None:
    """Read the export back; raise EyasError naming the first thing that is not as in the checkpoint."""
    shape = best.drafter.shape
    wanted = {name: (size, dtype) for name, size in tensor_contract(shape).items()}
    wanted |= {"d2t": (wanted["d2t"][0], torch.int64), "t2d": (wanted["t2d"][0], torch.bool)}
    found = _stored(folder)
    for name in sorted(wanted.keys() | found.keys()):
        if found.get(name) != wanted.get(name):
            raise EyasError(f"{folder}: {name} is {found.get(name)}, must be {wanted.get(name)}: do not use this export")
    again = read_drafter(folder, dtype, family_of(target.shape.model_type))
    if again.layers != layers:
        raise EyasError(f"{folder}: reads layers {again.layers}, must be {layers}: do not use this export")
    if not torch.equal(again.drafter.draft_ids_D, best.drafter.draft_ids_D):
        raise EyasError(f"{folder}: its draft vocabulary is not the checkpoint's: do not use this export")
    embedding_VH = target.embedding(dtype)
    if not torch.equal(_probe(again.drafter, embedding_VH), _probe(best.drafter, embedding_VH)):
        raise EyasError(f"{folder}: gives other logits than the checkpoint on the same aux states: do not use this export")


@torch.inference_mode()
def _probe(drafter: Drafter, embedding_VH: Tensor) -> Tensor:
    """Logits of a draft step over random aux states and tokens, the same ones in every call."""
    shape, random = drafter.shape, torch.Generator().manual_seed(0)
    drafter.set_embedding(embedding_VH)
    aux_NA = torch.randn(_PROBES, shape.num_aux * shape.hidden_size, generator=random).to(drafter.fc.weight.dtype)
    ids_N = torch.randint(0, shape.vocab_size, (_PROBES,), generator=random)
    positions_N = torch.arange(_PROBES).clamp(max=shape.max_position - 1)
    hidden_NH = drafter.combine(aux_NA)
    inputs_N2H = drafter.layer_input(ids_N, hidden_NH)
    keys_NKd, values_NKd = drafter.keys_values(inputs_N2H, positions_N)
    heads = [part.transpose(0, 1)[None] for part in (drafter.queries(inputs_N2H, positions_N), keys_NKd, values_NKd)]
    attention_1NQd = grouped_attention(heads[0], heads[1], heads[2], None, shape.scale)
    return drafter.logits(drafter.finish(attention_1NQd[0], hidden_NH))


def _holds(drafter: Drafter, layers: tuple[int, ...], target: Target, dtype: torch.dtype, trained: Manifest) -> dict[str, Any]:
    return {
        "layers": list(layers),
        "warm_start": trained.holds.get("warm_start"),
        "layer_convention": "k means HF hidden_states[k], the input of decoder layer k",
        "target": target.name,
        "target_digest": target.digest,
        "tokenizer_digest": target.tokenizer_digest,
        "dtype": str(dtype).removeprefix("torch."),
        "shape": drafter.shape.model_dump(mode="json"),
        "tensors": {name: list(size) for name, size in tensor_contract(drafter.shape).items()},
        "parameters": sum(parameter.numel() for parameter in drafter.parameters()),
        "checkpoint": trained.holds.get("best"),
        "verified": "names, shapes, dtypes, draft vocabulary, layers and logits read back",
    }
