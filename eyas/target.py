"""The target model: its folder, shape, tokenizer, single tensors read straight from the shards, and the model itself.

Opening a target reads its config and the shards' headers only, so the embedding, head and final norm of a model of any size
cost no more than their own bytes.
"""

import copy
import hashlib
import re
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
)

from eyas.config import TargetConfig
from eyas.errors import EyasError, first_line
from eyas.files import digest_json, read_object
from eyas.hub import HubFolder
from eyas.kimi_tokenizer import VOCABULARY, KimiTokenizer, require_special_ids
from eyas.packaged_target import smollm2_folder
from eyas.shard import read_header
from eyas.tokenizer import ChatTokenizer
from eyas.weights import INDEX, read_index, weight_files

# Where published checkpoints put the text model: Llama and K2, Kimi-K2.5, transformers' own multimodal classes, Kimi's NVFP4 build.
BODY_PREFIXES = ("model.", "language_model.model.", "model.language_model.", "language_model.", "")
HEAD_NAMES = ("lm_head.weight", "language_model.lm_head.weight", "model.lm_head.weight")
VOCABULARY_FILES = ("tokenizer.json", "tokenizer.model", "tiktoken.model", "vocab.json", "merges.txt", "chat_template.jinja")
# Published with Python code for an older transformers, which has its own classes for them by now: model_type there -> here.
OWN_CLASSES = {"kimi_k25": "kimi_k25", "kimi_k2": "deepseek_v3", "deepseek_v3": "deepseek_v3"}
# Kimi models by model_type, and whether they think and see.
KIMI = {"kimi_k25": True, "kimi_k2": False}
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
# Config entries that change with whoever saved the folder, not with the model.
VOLATILE_KEYS = ("transformers_version", "_name_or_path", "_model_name_or_path")
FINGERPRINT_BYTES = 65536
HEADER_BYTES = 1 << 20  # what a shard's header and fingerprint hardly ever exceed


@dataclass(frozen=True)
class TargetShape:
    """What config.json (and generation_config.json for the end tokens) says about the text model."""

    model_type: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    rope_theta: float
    max_position: int
    tied: bool
    eos_ids: tuple[int, ...]
    bos_id: int | None
    pad_id: int


class Target:
    """A resolved target folder. Opening it checks that all shards are there, and reads no weights; with ``hub`` they come when needed.

    Args:
        folder: an HF folder with config.json, safetensors and a tokenizer.
        name: what the user wrote.
        hub: where the folder's missing files are to be had, None for a local folder.
        trust_remote_code: let transformers run Python code that the folder ships.
        tokenizer: as in ``TargetConfig``.

    Raises:
        EyasError: missing folder, broken config.json, missing shard, or weights in a pickle format only.
    """

    def __init__(
        self, folder: Path, name: str, hub: HubFolder | None = None, trust_remote_code: bool = False, tokenizer: str = "auto"
    ) -> None:
        self.folder = Path(folder)
        self.name = name
        self.revision = None if hub is None else hub.commit
        self._hub = hub
        self._trust_remote_code = trust_remote_code
        self._tokenizer_kind = tokenizer
        if not self.folder.is_dir():
            raise EyasError(f"target folder {folder} does not exist")
        self.config: dict[str, Any] = read_object(self.folder / "config.json")
        self._shard_of = self._find_shards()
        has_head = any(head in self._shard_of for head in HEAD_NAMES)
        self.shape = _shape(self.config, self.folder, has_head)

    def tokenizer(self) -> ChatTokenizer:
        """Load the tokenizer with its chat template.

        Raises EyasError when that fails, and for a Kimi model when a special token is not at its id, whichever tokenizer it is.
        """
        kind, thinks = self.shape.model_type, KIMI.get(self.shape.model_type)
        published = thinks is not None and (self.folder / VOCABULARY).is_file()
        if self._tokenizer_kind == "tiktoken" or (self._tokenizer_kind == "auto" and published):
            if thinks is None:
                raise EyasError(f"target.tokenizer: tiktoken reads Kimi's vocabulary, and {self.name} is a {kind} model: use auto")
            return KimiTokenizer(self.folder, self.shape.vocab_size, thinks)
        try:
            loaded: Any = AutoTokenizer.from_pretrained(self.folder, trust_remote_code=self._trust_remote_code)
        except (OSError, ValueError, KeyError, ImportError) as error:
            raise EyasError(f"cannot load the tokenizer of {self.name} from {self.folder}: {first_line(error)}") from error
        if thinks is not None:
            require_special_ids(loaded, self.shape.vocab_size, thinks)
        return loaded

    def embedding(self, dtype: torch.dtype) -> Tensor:
        """Return the token embedding [V, H], read alone from its shard."""
        return self._read(self._body_name("embed_tokens.weight"), dtype)

    def lm_head(self, dtype: torch.dtype) -> Tensor:
        """Return the output head [V, H]: the embedding when tied."""
        if self.shape.tied:
            return self.embedding(dtype)
        return self._read(self._first_present(HEAD_NAMES), dtype)

    def final_norm(self, dtype: torch.dtype) -> Tensor:
        """Return the weight [H] of the norm before the head."""
        return self._read(self._body_name("norm.weight"), dtype)

    def layer_names(self, layer: int) -> list[str]:
        """Names of decoder layer ``layer``'s tensors within it, e.g. ``self_attn.q_proj.weight``."""
        if not 0 <= layer < self.shape.num_layers:
            raise EyasError(f"{self.name} has layers 0 to {self.shape.num_layers - 1}, not {layer}")
        prefix = self._layer_prefix(layer)
        return [name.removeprefix(prefix) for name in self._shard_of if name.startswith(prefix)]

    def layer_tensors(self, layer: int, dtype: torch.dtype, names: Collection[str] | None = None) -> dict[str, Tensor]:
        """Return decoder layer ``layer``'s tensors by their names within it: those in ``names``, as far as it has them, or all.

        Floating-point tensors are cast to ``dtype``; packed integers of a quantised target stay as they are. A layer of experts can be
        gigabytes.
        """
        wanted = [name for name in self.layer_names(layer) if names is None or name in names]
        prefix = self._layer_prefix(layer)
        return {name: self._read(prefix + name, dtype) for name in wanted}

    def load_model(self, dtype: torch.dtype, device: torch.device | str, attention: str | None = None) -> PreTrainedModel:
        """Load the whole model in eval mode, without gradients.

        Args:
            dtype: of the floating-point weights.
            device: where it goes.
            attention: transformers' attention implementation ("sdpa", "eager", ...); None takes its default.
        """
        if self._hub is not None:
            self._hub.fetch_weights()
        options: dict[str, Any] = {"trust_remote_code": self._trust_remote_code}
        try:
            config = self._model_config()
            # A multimodal target such as Kimi-K2.5 is no causal LM in transformers' tables.
            remote = self._trust_remote_code and "AutoModelForCausalLM" in getattr(config, "auto_map", {})
            loader = AutoModelForCausalLM if remote or type(config) in AutoModelForCausalLM._model_mapping else AutoModelForImageTextToText
            if attention is not None:
                options["attn_implementation"] = attention
            loaded: Any = loader.from_pretrained(
                self.folder, config=config, dtype=dtype, use_safetensors=True, output_loading_info=True, **options
            )
            model, loading = loaded
        except (OSError, ValueError, KeyError, ImportError, RuntimeError, SafetensorError) as error:
            raise EyasError(f"cannot load {self.name} from {self.folder}: {first_line(error)}") from error
        if missing := sorted(loading["missing_keys"]):
            raise EyasError(f"{self.folder} lacks {len(missing)} weights that {type(model).__name__} needs, the first is {missing[0]}")
        return model.to(device).eval().requires_grad_(False)

    def _model_config(self) -> PreTrainedConfig:
        """The config as the model class takes it."""
        own = OWN_CLASSES.get(self.shape.model_type)
        if own is None:
            config = AutoConfig.from_pretrained(self.folder, trust_remote_code=self._trust_remote_code)
        else:
            values = copy.deepcopy(self.config) | {"model_type": own}  # transformers rewrites nested parts in place
            values.pop("auto_map", None)
            config = CONFIG_MAPPING[own].from_dict(values)
        # a config that is silent on it would be tied by the default of some classes (Kimi-K2.5's), whatever its files hold
        config.tie_word_embeddings = config.get_text_config().tie_word_embeddings = self.shape.tied
        return config

    def default_layers(self) -> tuple[int, ...]:
        """Return EAGLE-3's default aux layers (2, L//2, L-3), as ids k of HF ``hidden_states[k]``."""
        layers = (2, self.shape.num_layers // 2, self.shape.num_layers - 3)
        if not layers[0] < layers[1] < layers[2]:
            raise EyasError(f"{self.name} has {self.shape.num_layers} layers, too few for the default aux layers: set prep.states.layers")
        return layers

    @cached_property
    def digest(self) -> str:
        """SHA-256 over config, tokenizer, and of every shard the header and the first 64 KiB of weights.

        Two fine-tunes of one model differ in it; it costs a fraction of a second at any size.
        """
        total = hashlib.sha256()
        total.update(digest_json({key: value for key, value in self.config.items() if key not in VOLATILE_KEYS}).encode())
        total.update(self.tokenizer_digest.encode())
        for shard in sorted(set(self._shard_of.values())):
            total.update(self._beginning(shard))
        return total.hexdigest()

    @property
    def is_whole(self) -> bool:
        """Whether all weights are on this machine: of a repository of the hub perhaps only some are."""
        return all((self.folder / shard).is_file() for shard in set(self._shard_of.values()))

    @cached_property
    def tokenizer_digest(self) -> str:
        """SHA-256 over the vocabulary files, added tokens and chat template: the same digest means the same token ids."""
        total = hashlib.sha256()
        for name in VOCABULARY_FILES:
            path = self.folder / name
            if path.is_file():
                total.update(name.encode() + path.read_bytes())
        settings = self.folder / "tokenizer_config.json"
        if settings.is_file():
            values = read_object(settings)
            total.update(digest_json({key: values.get(key) for key in ("added_tokens_decoder", "chat_template")}).encode())
        return total.hexdigest()

    def _find_shards(self) -> dict[str, str]:
        """Names of tensors -> names of files: by the index where files may be missing, else by what the files hold."""
        if self._hub is not None:
            if (self.folder / INDEX).is_file():
                return read_index(self.folder)
            self._hub.fetch_weights()
        return {name: file.name for file in weight_files(self.folder) for name in read_header(file).tensors}

    def _beginning(self, shard: str) -> bytes:
        """A shard's header and its first FINGERPRINT_BYTES of weights, read on the hub where the file is not here."""
        path = self.folder / shard
        if self._hub is None or path.is_file():
            with path.open("rb") as file:
                size = file.read(8)
                return size + file.read(int.from_bytes(size, "little") + FINGERPRINT_BYTES)
        data = self._hub.beginning(shard, HEADER_BYTES)
        length = 8 + int.from_bytes(data[:8], "little") + FINGERPRINT_BYTES
        return data[:length] if length <= HEADER_BYTES else self._hub.beginning(shard, length)

    def _body_prefix(self) -> str:
        for prefix in BODY_PREFIXES:
            if prefix + "embed_tokens.weight" in self._shard_of:
                return prefix
        raise EyasError(f"{self.folder} has no tensor embed_tokens.weight under any of the prefixes {', '.join(map(repr, BODY_PREFIXES))}")

    def _layer_prefix(self, layer: int) -> str:
        # not _body_prefix's: Kimi's NVFP4 build has its layers elsewhere than its embedding
        prefixes = [f"{prefix}layers.{layer}." for prefix in BODY_PREFIXES]
        for prefix in prefixes:
            if any(name.startswith(prefix) for name in self._shard_of):
                return prefix
        raise EyasError(f"{self.folder} has no tensors named {prefixes[0]}* or under any other of the prefixes {BODY_PREFIXES[1:-1]}")

    def _body_name(self, name: str) -> str:
        return self._first_present((self._body_prefix() + name,))

    def _first_present(self, names: tuple[str, ...]) -> str:
        for name in names:
            if name in self._shard_of:
                return name
        raise EyasError(f"{self.folder} has no tensor {' or '.join(names)}")

    def _read(self, name: str, dtype: torch.dtype) -> Tensor:
        path = self.folder / self._shard_of[name]
        if self._hub is not None and not path.is_file():
            self._hub.fetch(path.name)
        try:
            with safe_open(path, framework="pt") as shard:
                tensor = shard.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise EyasError(f"cannot read {name} from {path}: {first_line(error)}") from None
        return tensor.to(dtype) if tensor.is_floating_point() else tensor


def open_target(config: TargetConfig) -> Target:
    """Resolve ``config.model``: a local folder, a hub id (weights are fetched as they are read, never pickles), or 'package:smollm2'.

    Raises EyasError when there is no such model, it cannot be fetched, or its folder is unusable.
    """
    name = config.model
    if name.startswith("package:"):
        if name != "package:smollm2":
            raise EyasError(f"target.model: no packaged target {name!r}, there is 'package:smollm2'")
        return Target(smollm2_folder(), name)
    local = Path(name).expanduser()
    if local.is_dir():
        return Target(local, name, trust_remote_code=config.trust_remote_code, tokenizer=config.tokenizer)
    repository = name.removeprefix("hub:")
    if not HUB_ID.fullmatch(repository):
        raise EyasError(f"target.model: {name} is neither a folder nor a hub id (owner/name)")
    hub = HubFolder(repository, config.revision, config.trust_remote_code)
    return Target(hub.folder, name, hub, config.trust_remote_code, config.tokenizer)


def shape_of(config: dict[str, Any], where: str) -> TargetShape:
    """The shape that a config.json tells by itself, no weights at hand; ``where`` names it in errors. Raises EyasError as ``Target``."""
    return _shape(config, Path(where), has_head=True)


def pick_device(name: str) -> torch.device:
    """Turn 'auto', 'cpu', 'cuda:0' ... into a device that is there. Raises EyasError when it is not."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise EyasError(f"target.device: {name!r} is no device; use 'auto', 'cpu' or 'cuda:0'") from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise EyasError(f"target.device: {name} is not there, this machine has {torch.cuda.device_count()} CUDA devices")
    return device


def _shape(config: dict[str, Any], folder: Path, has_head: bool) -> TargetShape:
    text = config.get("text_config", config)
    file = folder / "config.json"
    if not isinstance(text, dict):
        raise EyasError(f"{file}: text_config is not an object")

    def number(*keys: str) -> Any:
        for key in keys:
            value = text.get(key)
            if isinstance(value, int | float) and not isinstance(value, bool):
                return value
        raise EyasError(f"{file}: {keys[0]} is missing or not a number")

    heads = number("num_attention_heads")
    head_dim = text.get("head_dim") or number("hidden_size") // heads
    if text.get("kv_lora_rank"):  # MLA: config.head_dim is the rotary part alone
        head_dim = text.get("v_head_dim") or head_dim
    eos_ids = _end_tokens(config, text, folder)
    pad = _either(text, config, "pad_token_id")
    tied = _either(config, text, "tie_word_embeddings")
    return TargetShape(
        model_type=str(config.get("model_type", "unknown")),
        hidden_size=number("hidden_size"),
        intermediate_size=number("intermediate_size", "moe_intermediate_size"),
        num_layers=number("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=text.get("num_key_value_heads") or heads,
        head_dim=head_dim,
        vocab_size=number("vocab_size"),
        rms_norm_eps=number("rms_norm_eps"),
        rope_theta=_rope_theta(text),
        max_position=number("max_position_embeddings"),
        tied=not has_head if tied is None else bool(tied),
        eos_ids=eos_ids,
        bos_id=_either(text, config, "bos_token_id"),
        pad_id=pad if pad is not None else (eos_ids[0] if eos_ids else 0),
    )


def _rope_theta(text: dict[str, Any]) -> float:
    # transformers 5 writes rope_parameters, by layer type in some models; older folders have a bare rope_theta.
    rope = text.get("rope_parameters") or {}
    rope = rope.get("full_attention", rope)
    return float(rope.get("rope_theta") or text.get("rope_theta") or 10000.0)


def _end_tokens(config: dict[str, Any], text: dict[str, Any], folder: Path) -> tuple[int, ...]:
    """Return every id that ends a reply: engines stop at those of generation_config.json and of config.json alike."""
    generation = folder / "generation_config.json"
    found: list[int] = []
    for values in (read_object(generation) if generation.is_file() else {}, config, text):
        ids = values.get("eos_token_id")
        found += [] if ids is None else ids if isinstance(ids, list) else [ids]
    return tuple(dict.fromkeys(found))


def _either(first: dict[str, Any], second: dict[str, Any], key: str) -> Any:
    value = first.get(key)
    return second.get(key) if value is None else value
