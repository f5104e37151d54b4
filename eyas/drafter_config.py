"""A drafter folder's config.json: the shape it describes, what in it is refused, and the one we write.

Engines skip what they do not know; here a field that would change the mathematics is an error that names it.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError
from transformers import LlamaConfig

from eyas import conventions
from eyas.drafter import DrafterShape
from eyas.errors import EyasError
from eyas.target import Target

ARCHITECTURE = "LlamaForCausalLMEagle3"
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
# Our record in config.json and the field in it that says which HF hidden_states were captured.
RECORD = "eyas"
CAPTURED = "captured_hidden_states"

_ARCHITECTURES = (ARCHITECTURE, "Eagle3LlamaForCausalLM", "LlamaForCausalLM")
_EAGLE_31 = ("norm_before_fc", "fc_norm", "use_aux_norm", "norm_output")
_MLA = ("kv_lora_rank", "q_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim")
_BIASES = ("attention_bias", "mlp_bias", "bias", "qkv_bias")
_SPECULATORS = ("speculators_config", "transformer_layer_config", "norm_before_residual")
_READ = {
    *(LAYER_IDS, *_EAGLE_31, *_MLA, *_BIASES, *_SPECULATORS),
    *("eagle_config", "num_aux_hidden_states", "draft_vocab_size", "target_hidden_size", "rope_theta", "rope_scaling", "rope_parameters"),
    *("quantization_config", "sliding_window", "use_sliding_window", "layer_types", "partial_rotary_factor", "rope_is_neox_style"),
}
# Fields that change nothing in this network although their names match _MATHEMATICAL: of newer and older transformers, and left over
# from the config of a mixture-of-experts target.
_HARMLESS = {
    *LlamaConfig().to_dict(),
    *("torch_dtype", "output_attentions", "output_hidden_states", "max_window_layers", "attn_implementation"),
    *("norm_topk_prob", "routed_scaling_factor", "moe_layer_freq", "mlp_only_layers", "router_aux_loss_coef", "aux_loss_alpha", "seq_aux"),
}
_MATHEMATICAL = re.compile(
    "norm|scal|bias|multiplier|softcap|rope|rotary|residual|window|alibi|attention|attn|lora|layer|hidden|activation|act_fn|aux|logit|quant"
    "|parallel_draft|embed"
)


@dataclass(frozen=True)
class ReadConfig:
    """What a config.json says. ``draft_vocab_size`` and ``num_aux`` are None when it is silent: the tensors tell.

    layers: HF hidden_states ids if recorded by us or unmistakable; candidates: every reading of the ids, likeliest first.
    """

    sizes: dict[str, Any]
    draft_vocab_size: int | None
    num_aux: int | None
    layers: tuple[int, ...] | None
    candidates: list[tuple[int, ...]]
    notes: list[str]


def read_config(config: Mapping[str, Any], family: conventions.Family | None = None) -> ReadConfig:
    """Understand a drafter's config.json. Raises EyasError naming the field that is missing, wrong or unsupported."""
    notes: list[str] = []
    eagle = config.get("eagle_config") or {}
    if not isinstance(eagle, Mapping):
        raise EyasError(f"eagle_config is {eagle!r}, expected an object")
    _refuse_other_networks(config)
    _refuse_unsupported({**config, **eagle})
    notes += _unknown_fields(config, _READ | _HARMLESS)
    notes += [f"eagle_config.{note}" for note in _unknown_fields(eagle, {"use_aux_hidden_state", LAYER_IDS})]
    hidden, heads = _integer(config, "hidden_size"), _integer(config, "num_attention_heads")
    rope_theta, rope_scaling, rope_notes = read_rope(config)
    sizes = {
        "hidden_size": hidden,
        "intermediate_size": _integer(config, "intermediate_size"),
        "num_heads": heads,
        "num_kv_heads": _integer(config, "num_key_value_heads", heads),
        "head_dim": _integer(config, "head_dim", hidden // heads),
        "vocab_size": _integer(config, "vocab_size"),
        "rms_norm_eps": _default(config, "rms_norm_eps", 1e-6, notes),
        "rope_theta": rope_theta,
        "rope_scaling": rope_scaling,
        "max_position": _default(config, "max_position_embeddings", 2048, notes),
    }
    if config.get("tie_word_embeddings"):
        notes.append("tie_word_embeddings is true, which makes SGLang throw the draft head away; the file's own lm_head is used")
    layers, candidates, layer_notes = _layers(config, eagle, family)
    draft_vocab_size = _integer(config, "draft_vocab_size") if config.get("draft_vocab_size") is not None else None
    num_aux = _integer(config, "num_aux_hidden_states") if config.get("num_aux_hidden_states") is not None else None
    if num_aux is None and candidates:
        num_aux = len(candidates[0])
    if layers is not None and num_aux != len(layers):
        raise EyasError(f"num_aux_hidden_states is {num_aux}, but {len(layers)} layers are named")
    return ReadConfig(sizes, draft_vocab_size, num_aux, layers, candidates, notes + rope_notes + layer_notes)


def read_rope(config: Mapping[str, Any]) -> tuple[float, dict[str, Any] | None, list[str]]:
    """Rotary base, scaling (None: plain) and notes, from ``rope_parameters`` or ``rope_theta`` and ``rope_scaling``, wherever they stand.

    Raises EyasError when two places disagree, or the positions are not rotated one by one over the whole head.
    """
    places = {name: config[name] for name in ("rope_parameters", "rope_scaling") if config.get(name)}
    for name, place in places.items():
        if not isinstance(place, Mapping):
            raise EyasError(f"{name} is {place!r}, expected an object")
    thetas = {f"{name}.rope_theta": place["rope_theta"] for name, place in places.items() if place.get("rope_theta") is not None}
    if config.get("rope_theta") is not None:
        thetas["rope_theta"] = config["rope_theta"]
    _agree(thetas)
    scalings = {name: scaling for name, place in places.items() if (scaling := _scaling(name, place)) or name == "rope_parameters"}
    _agree(scalings)
    scaling = next(iter(scalings.values()), None)
    if thetas:
        return float(next(iter(thetas.values()))), scaling, []
    return 10000.0, scaling, ["no rope_theta anywhere: 10000, which is what engines take too; check that it was not lost"]


def drafter_config(
    shape: DrafterShape, layers: Sequence[int], target: Target, sglang: str = conventions.SGLANG, vllm: str = conventions.VLLM
) -> dict[str, Any]:
    """The config.json of an export for ``target`` (``write_drafter`` adds the dtype).

    Args:
        shape: the drafter's.
        layers: k of HF ``hidden_states[k]``, as captured; written in each engine's own convention where it looks for it.
        target: gives the special tokens and the family by which engines read the ids.
        sglang: version that is to serve it.
        vllm: version that is to serve it.

    Raises:
        EyasError: the drafter does not fit the target, or no id list makes an engine capture these layers.
    """
    if len(layers) != shape.num_aux:
        raise EyasError(f"the drafter takes {shape.num_aux} aux states, {len(layers)} layers are named: {list(layers)}")
    for name in ("hidden_size", "vocab_size"):
        if getattr(shape, name) != getattr(target.shape, name):
            raise EyasError(f"{name} is {getattr(shape, name)} in the drafter and {getattr(target.shape, name)} in {target.name}")
    family = conventions.family_of(target.shape.model_type)
    eos = list(target.shape.eos_ids)
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": shape.rms_norm_eps,
        "vocab_size": shape.vocab_size,
        "draft_vocab_size": shape.draft_vocab_size,
        "max_position_embeddings": shape.max_position,
        # both ways of writing it: transformers 5 reads rope_parameters, older engines the other two
        "rope_theta": shape.rope_theta,
        "rope_scaling": shape.rope_scaling,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta, **(shape.rope_scaling or {})},
        "attention_bias": False,
        "mlp_bias": False,
        # true, as tied targets have it, makes engines replace the draft head by the embedding
        "tie_word_embeddings": False,
        "bos_token_id": target.shape.bos_id,
        "eos_token_id": eos[0] if len(eos) == 1 else eos,
        "pad_token_id": target.shape.pad_id,
        "num_aux_hidden_states": shape.num_aux,
        "eagle_config": {"use_aux_hidden_state": True, LAYER_IDS: list(conventions.written_ids(layers, "sglang", sglang, family))},
        LAYER_IDS: list(conventions.written_ids(layers, "vllm", vllm, family)),
        RECORD: {
            CAPTURED: list(layers),
            "written_for": {"sglang": sglang, "vllm": vllm, "family": family},
            # a folder's path says nothing elsewhere; its name and digest do
            "target": target.folder.name if target.revision is None and ":" not in target.name else target.name,
            "target_digest": target.digest,
            "tokenizer_digest": target.tokenizer_digest,
        },
    }


def build_shape(sizes: Mapping[str, Any], draft_vocab_size: int, num_aux: int) -> DrafterShape:
    """The shape, or EyasError naming the first value that cannot be."""
    try:
        return DrafterShape(**sizes, draft_vocab_size=draft_vocab_size, num_aux=num_aux)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise EyasError((f"{where}: " if where else "") + first["msg"].removeprefix("Value error, ")) from None


def _refuse_other_networks(config: Mapping[str, Any]) -> None:
    architectures = config.get("architectures") or [ARCHITECTURE]
    for name in _SPECULATORS:
        if config.get(name):
            raise EyasError(f"{name} is set: a drafter in speculators' format is not supported")
    for name in _MLA:
        if config.get(name):
            raise EyasError(f"{name} is set: MLA drafters are not supported")
    unknown = [name for name in architectures if name not in _ARCHITECTURES]
    if unknown:
        kind = " (MLA)" if "Deepseek" in unknown[0] else ""
        raise EyasError(f"architecture {unknown[0]}{kind} is not supported, only {ARCHITECTURE}")


def _refuse_unsupported(config: Mapping[str, Any]) -> None:
    for name in _EAGLE_31:
        if config.get(name):
            raise EyasError(f"{name} is set: EAGLE-3.1's extra norms are not supported")
    for name in _BIASES:
        if config.get(name):
            raise EyasError(f"{name} is set: biases are not supported")
    layer_types = config.get("layer_types") or []
    windowed = bool(config.get("use_sliding_window", config.get("sliding_window")))
    expected = (
        ("num_hidden_layers", config.get("num_hidden_layers", 1), 1),
        ("target_hidden_size", config.get("target_hidden_size") or config.get("hidden_size"), config.get("hidden_size")),
        ("hidden_act", config.get("hidden_act", "silu"), "silu"),
        ("use_aux_hidden_state", config.get("use_aux_hidden_state", True), True),
        ("quantization_config", config.get("quantization_config") or None, None),
        ("partial_rotary_factor", config.get("partial_rotary_factor") or 1, 1),
        ("rope_is_neox_style", config.get("rope_is_neox_style", True), True),
        ("sliding_window", windowed, False),
        ("layer_types", sorted({*layer_types, "full_attention"}), ["full_attention"]),
    )
    for name, found, wanted in expected:
        if found != wanted:
            raise EyasError(f"{name} is {found!r}, only {wanted!r} is supported")


def _unknown_fields(config: Mapping[str, Any], known: set[str]) -> list[str]:
    """Notes on fields that mean nothing to us; EyasError for one that is set and sounds like mathematics."""
    notes = []
    for name, value in config.items():
        # our own records, private fields, and what acts in training only
        if name in known or name.startswith(("_", RECORD)) or "drop" in name or "initializer" in name:
            continue
        if not value or (value == 1 and value is not True):  # switched off, or a factor of one
            continue
        if _MATHEMATICAL.search(name):
            raise EyasError(
                f"config field {name} = {value!r} is unknown and may change what the drafter computes: remove it if it does not"
            )
        notes.append(f"config field {name} is unknown and ignored")
    return notes


def _layers(
    config: Mapping[str, Any], eagle: Mapping[str, Any], family: conventions.Family | None
) -> tuple[tuple[int, ...] | None, list[tuple[int, ...]], list[str]]:
    record = config.get(RECORD)
    if isinstance(record, Mapping) and record.get(CAPTURED) is not None:
        recorded = _ids(record[CAPTURED], f"{RECORD}.{CAPTURED}")
        return recorded, [recorded], []
    nested, top = (_ids(place.get(LAYER_IDS), LAYER_IDS) if place.get(LAYER_IDS) else None for place in (eagle, config))
    candidates = conventions.readings(nested, top, family)
    if not candidates:
        return None, [], ["no layer ids in the config"]
    written = list(nested or top or ())
    if len(candidates) == 1:
        return candidates[0], candidates, [f"layer ids {written} read as inputs of layers {list(candidates[0])}"]
    told = " or ".join(str(list(layers)) for layers in candidates)
    return None, candidates, [f"layer ids {written} may mean inputs of layers {told}: the numbers alone do not tell, measure both"]


def _ids(value: Any, name: str) -> tuple[int, ...]:
    good = isinstance(value, list) and value and all(isinstance(k, int) and not isinstance(k, bool) and k >= 0 for k in value)
    if not good:
        raise EyasError(f"{name} is {value!r}, expected a list of layer numbers")
    return tuple(value)


def _scaling(name: str, place: Mapping[str, Any]) -> dict[str, Any] | None:
    kinds = {place[key] for key in ("rope_type", "type") if place.get(key) is not None}
    if len(kinds) > 1:
        raise EyasError(f"{name} has rope_type {place['rope_type']!r} and type {place['type']!r}")
    neutral = {"partial_rotary_factor": 1, "extrapolation_factor": 1, "attn_factor": 1, "truncate": True}
    rest = {key: value for key, value in place.items() if key not in ("rope_type", "type", "rope_theta") and value is not None}
    rest = {key: value for key, value in rest.items() if not (key in neutral and value == neutral[key])}
    kind = next(iter(kinds), "default")
    if kind == "default":
        if rest:
            raise EyasError(f"{name}: {sorted(rest)[0]} without a rope_type that uses it is not supported")
        return None
    return {"rope_type": kind, **rest}


def _agree(values: Mapping[str, Any]) -> None:
    (first, one), *others = values.items() or [("", None)]
    for name, other in others:
        if other != one:
            raise EyasError(f"{first} is {one!r} and {name} is {other!r}: they must agree")


def _integer(config: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = config.get(name)
    value = default if value is None else value
    if value is None:
        raise EyasError(f"{name} is missing")
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise EyasError(f"{name} is {value!r}, expected a positive integer")
    return value


def _default(config: Mapping[str, Any], name: str, value: Any, notes: list[str]) -> Any:
    if config.get(name) is not None:
        return config[name]
    notes.append(f"{name} is missing: {value}, which is what engines take")
    return value
