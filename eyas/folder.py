"""Drafter folders: config.json beside model.safetensors, in the format that SGLang and vLLM serve and SpecForge and its kin write.

Engines skip tensors they do not know and go on without those they miss. Here names, shapes and numbers must add up, both ways.
"""

import hashlib
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import EntryNotFoundError, HTTPError  # type: ignore[attr-defined] # of whichever library it asks with
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from eyas import vocab
from eyas.conventions import Family
from eyas.drafter import Drafter, DrafterShape
from eyas.drafter_config import ReadConfig, build_shape, drafter_config, read_config
from eyas.errors import EyasError, first_line
from eyas.files import atomic_path, read_object, write_json
from eyas.shard import read_header
from eyas.weights import INDEX, weight_files

__all__ = ["DrafterFolder", "drafter_config", "drafter_digest", "read_drafter", "tensor_contract", "write_drafter"]

WEIGHTS = "model.safetensors"
CONFIG = "config.json"
HUB = "hub:"
_HUB_ID = re.compile(r"(?P<repository>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(@(?P<revision>[\w./-]+))?")
_EMBEDDING = "embed_tokens.weight"
_FLOATS = {"F64", "F32", "F16", "BF16"}
_INTEGERS = {"I64", "I32", "I16", "I8", "U8", "BOOL"}


@dataclass(frozen=True)
class DrafterFolder:
    """A drafter as read.

    drafter: with its own embedding if the folder has one of full size (engines use the target's), else without.
    layers: k of HF ``hidden_states[k]`` that it was trained on; None when the config does not tell.
    notes: what was decided while reading, and how. raw_config: config.json as it is.
    candidates: what the config's layer ids can mean, likeliest first; ``[layers]`` when they tell.
    """

    drafter: Drafter
    layers: tuple[int, ...] | None
    notes: list[str]
    raw_config: dict[str, Any]
    candidates: list[tuple[int, ...]] = field(default_factory=list)


@dataclass(frozen=True)
class _Stored:
    file: Path
    name: str
    shape: tuple[int, ...]
    kind: str


def tensor_contract(shape: DrafterShape) -> dict[str, tuple[int, ...]]:
    """Names and shapes of exactly the tensors in an export: weights in one float dtype, d2t int64 offsets, t2d bool."""
    hidden, inner, queries, keys = (
        shape.hidden_size,
        shape.intermediate_size,
        shape.num_heads * shape.head_dim,
        shape.num_kv_heads * shape.head_dim,
    )
    return {
        "fc.weight": (hidden, shape.num_aux * hidden),
        "midlayer.input_layernorm.weight": (hidden,),
        "midlayer.hidden_norm.weight": (hidden,),
        "midlayer.self_attn.q_proj.weight": (queries, 2 * hidden),
        "midlayer.self_attn.k_proj.weight": (keys, 2 * hidden),
        "midlayer.self_attn.v_proj.weight": (keys, 2 * hidden),
        "midlayer.self_attn.o_proj.weight": (hidden, queries),
        "midlayer.post_attention_layernorm.weight": (hidden,),
        "midlayer.mlp.gate_proj.weight": (inner, hidden),
        "midlayer.mlp.up_proj.weight": (inner, hidden),
        "midlayer.mlp.down_proj.weight": (hidden, inner),
        "norm.weight": (hidden,),
        "lm_head.weight": (shape.draft_vocab_size, hidden),
        "d2t": (shape.draft_vocab_size,),
        "t2d": (shape.vocab_size,),
    }


def read_drafter(path_or_hub: str | Path, dtype: torch.dtype = torch.float32, family: Family | None = None) -> DrafterFolder:
    """Read a drafter folder of any of the known styles.

    Args:
        path_or_hub: a folder, or ``hub:owner/name[@revision]`` (config and safetensors alone are fetched).
        dtype: of the weights in memory.
        family: of the target (``conventions.family_of``), to order the readings of ambiguous layer ids.

    Raises:
        EyasError: naming what is missing, does not fit, or is unsupported mathematics.
    """
    folder = _resolve(str(path_or_hub))
    config = read_object(folder / CONFIG)
    try:
        read = read_config(config, family)
    except EyasError as error:
        raise EyasError(f"{folder / CONFIG}: {error}") from None
    stored = _headers(folder)
    try:
        drafter, notes = _assemble(read, stored, dtype)
    except EyasError as error:
        raise EyasError(f"{folder}: {error}") from None
    return DrafterFolder(drafter, read.layers, read.notes + notes, config, read.candidates)


def write_drafter(folder: Path, drafter: Drafter, config: dict[str, Any], dtype: torch.dtype = torch.bfloat16) -> None:
    """Write model.safetensors and config.json, replacing those of an earlier drafter; nothing half-written is ever seen.

    Args:
        folder: made if missing; other files in it stay.
        drafter: on any device; the embedding is not written.
        config: from ``drafter_config``; its dtype is set to ``dtype``.
        dtype: of the weights in the file.

    Raises:
        EyasError: the folder holds other weights, a weight is not finite, config and drafter disagree, or the disk refuses.
    """
    folder = Path(folder)
    others = sorted(path.name for path in folder.glob("*.safetensors*") if path.name != WEIGHTS)
    if others:
        raise EyasError(f"{folder} already holds {others[0]}, which an engine would load too: choose another folder")
    _check_written(drafter, config)
    tensors = {name: _prepared(name, tensor, dtype) for name, tensor in drafter.state_dict().items()}
    name = str(dtype).removeprefix("torch.")
    # Both files are ready before either takes its place, so a killed run leaves the old drafter or the new one.
    with atomic_path(folder / CONFIG) as config_file, atomic_path(folder / WEIGHTS) as weights_file:
        save_file(tensors, weights_file, metadata={"format": "pt"})
        write_json(config_file, {**config, "dtype": name, "torch_dtype": name})


def drafter_digest(drafter: Drafter) -> str:
    """SHA-256 over shape and weights as loaded: the same digest, the same computation."""
    total = hashlib.sha256(drafter.shape.model_dump_json().encode())
    for name, tensor in sorted(drafter.state_dict().items()):
        total.update(name.encode())
        total.update(memoryview(tensor.contiguous().numpy()).cast("B"))
    return total.hexdigest()


def _check_written(drafter: Drafter, config: dict[str, Any]) -> None:
    shape = drafter.shape
    read = read_config(config)
    if build_shape(read.sizes, read.draft_vocab_size or shape.vocab_size, read.num_aux or 3) != shape:
        raise EyasError("the config to be written describes another drafter than the weights")
    found = {name: tuple(tensor.shape) for name, tensor in drafter.state_dict().items()}
    if found != tensor_contract(shape):
        raise EyasError("the drafter's tensors are not those of the export format")
    if not vocab.is_offset(drafter.d2t.cpu(), shape.vocab_size, drafter.t2d.cpu()):
        raise EyasError("the drafter's d2t holds target ids, not offsets")


def _prepared(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """On the CPU, contiguous and finite, weights in ``dtype``."""
    if not tensor.is_floating_point():
        return tensor.detach().cpu().contiguous()
    ready = tensor.detach().to("cpu", dtype).contiguous()
    if not bool(ready.isfinite().all()):
        raise EyasError(f"{name} holds values that are not finite in {dtype}: training diverged, or the dtype is too narrow")
    return ready


def _resolve(name: str) -> Path:
    if not name.startswith(HUB):
        folder = Path(name).expanduser()
        if not folder.is_dir():
            raise EyasError(f"drafter folder {name} does not exist; a drafter on the hub is written {HUB}owner/name[@revision]")
        return folder
    match = _HUB_ID.fullmatch(name.removeprefix(HUB))
    if match is None:
        raise EyasError(f"{name} is no hub id, expected {HUB}owner/name[@revision]")
    try:
        # Never more than this: some repositories hold gigabytes of pickled training state as well, or other checkpoints in folders.
        patterns = [CONFIG, "*.safetensors", INDEX]
        return Path(snapshot_download(match["repository"], revision=match["revision"], allow_patterns=patterns, ignore_patterns="*/*"))
    except (OSError, ValueError, EntryNotFoundError, HTTPError) as error:
        raise EyasError(f"the hub does not give {name.removeprefix(HUB)}: {first_line(error)}") from error


def _headers(folder: Path) -> dict[str, _Stored]:
    """Every tensor by its name here, without reading data: midlayer.* for layers.0.*, no leading 'model.'."""
    stored: dict[str, _Stored] = {}
    for file in weight_files(folder):
        for name, entry in read_header(file).tensors.items():
            ours = re.sub(r"^layers\.0\.", "midlayer.", name.removeprefix("model."))
            if ours in stored:
                raise EyasError(f"{folder}: {stored[ours].name} and {name} are the same tensor")
            stored[ours] = _Stored(file, name, entry.shape, entry.dtype)
    return stored


def _assemble(read: ReadConfig, stored: dict[str, _Stored], dtype: torch.dtype) -> tuple[Drafter, list[str]]:
    """Check names and shapes, then read the tensors into a drafter."""
    notes: list[str] = []
    for name in [name for name in stored if name.endswith("rotary_emb.inv_freq")]:
        del stored[name]  # old checkpoints keep what the config says anyway
    _refuse_names(stored)
    shape = _complete(read, stored, notes)
    contract = tensor_contract(shape)
    missing = [name for name in contract if name not in stored and name not in ("d2t", "t2d")]
    unknown = [name for name in stored if name not in contract and name != _EMBEDDING]
    if missing or unknown:
        told = [f"{name} is missing" for name in missing] + [f"{stored[name].name} is unknown" for name in unknown]
        raise EyasError("; ".join(told[:4]) + (f" and {len(told) - 4} more" if len(told) > 4 else ""))
    for name, wanted in contract.items():
        if name in stored and stored[name].shape != wanted:
            raise EyasError(f"{stored[name].name} is {list(stored[name].shape)}, the config makes it {list(wanted)}")
    ids_D = _draft_ids(stored, shape, notes)
    tensors = {name: _load(stored[name]).to(dtype) for name in contract if name not in ("d2t", "t2d")}
    tensors["d2t"], tensors["t2d"] = vocab.offsets(ids_D), vocab.membership(ids_D, shape.vocab_size)
    with torch.device("meta"):
        drafter = Drafter(shape)
    drafter.load_state_dict(tensors, assign=True)
    if _EMBEDDING in stored:
        if stored[_EMBEDDING].shape == (shape.vocab_size, shape.hidden_size):
            drafter.set_embedding(_load(stored[_EMBEDDING]))
            notes.append("has its own embed_tokens; engines take the target's embedding instead")
        else:
            notes.append(f"its embed_tokens {list(stored[_EMBEDDING].shape)} is not of the target's size and is ignored, as engines do")
    return drafter, notes


def _refuse_names(stored: dict[str, _Stored]) -> None:
    reasons = {
        "kv_a_proj": "MLA drafters are not supported",
        "kv_b_proj": "MLA drafters are not supported",
        "fc_norm": "EAGLE-3.1's norms before fc are not supported",
        "aux_norm": "EAGLE-3.1's norms before fc are not supported",
        "input_norm": "norm_before_fc is not supported",
        ".experts": "mixture-of-experts drafters are not supported",
        "layers.1.": "only one decoder layer is supported",
    }
    for tensor in stored.values():
        for part, reason in reasons.items():
            if part in tensor.name:
                raise EyasError(f"{tensor.name}: {reason}")
        if tensor.name.endswith(".bias"):
            raise EyasError(f"{tensor.name}: biases are not supported")
        if tensor.kind not in _FLOATS | _INTEGERS or (tensor.kind in _INTEGERS and tensor.name.split(".")[-1] not in ("d2t", "t2d")):
            raise EyasError(f"{tensor.name} is {tensor.kind}: quantised drafters are not supported")


def _complete(read: ReadConfig, stored: dict[str, _Stored], notes: list[str]) -> DrafterShape:
    """The shape, with draft vocabulary and number of aux states taken from the tensors where the config is silent."""
    for name in ("lm_head.weight", "fc.weight"):
        if name not in stored or len(stored[name].shape) != 2:
            raise EyasError(f"{name} is missing" if name not in stored else f"{name} is {list(stored[name].shape)}, no matrix")
    rows = stored["lm_head.weight"].shape[0]
    if read.draft_vocab_size is None:
        notes.append(f"no draft_vocab_size in the config: lm_head has {rows} rows, so that many draft tokens")
    hidden = read.sizes["hidden_size"]
    num_aux, rest = divmod(stored["fc.weight"].shape[1], hidden)
    if rest or num_aux != (read.num_aux or num_aux):
        wanted = f"{read.num_aux} states" if read.num_aux else "states"
        raise EyasError(f"fc.weight takes {stored['fc.weight'].shape[1]} values, the config has {wanted} of {hidden}")
    return build_shape(read.sizes, read.draft_vocab_size or rows, num_aux)


def _draft_ids(stored: dict[str, _Stored], shape: DrafterShape, notes: list[str]) -> Tensor:
    t2d_V = _load(stored["t2d"]).bool() if "t2d" in stored else None
    if "d2t" not in stored:
        if shape.draft_vocab_size < shape.vocab_size:
            raise EyasError(f"d2t is missing, and lm_head has {shape.draft_vocab_size} of {shape.vocab_size} tokens: nothing says which")
        notes.append("no d2t: the draft vocabulary is the target's")
        return torch.arange(shape.vocab_size)
    if stored["d2t"].kind not in _INTEGERS - {"BOOL"}:
        raise EyasError(f"d2t is {stored['d2t'].kind}, expected integers")
    d2t_D = _load(stored["d2t"]).to(torch.int64)
    offset = vocab.is_offset(d2t_D, shape.vocab_size, t2d_V)
    notes.append("d2t holds offsets" if offset else "d2t holds target ids, not offsets as engines want; exports write offsets")
    if offset and not d2t_D.any() and shape.draft_vocab_size < shape.vocab_size:
        notes.append(f"d2t is all zeros: the first {shape.draft_vocab_size} tokens; a d2t that was never filled looks the same")
    if t2d_V is None:
        notes.append("no t2d: made from d2t")
    return vocab.absolute(d2t_D) if offset else d2t_D


def _load(tensor: _Stored) -> Tensor:
    try:
        with safe_open(tensor.file, framework="pt") as shard:
            return shard.get_tensor(tensor.name)
    except (OSError, SafetensorError) as error:
        raise EyasError(f"cannot read {tensor.name} from {tensor.file.name}: {first_line(error)}") from None
