"""Tiny random targets of the DeepSeek-V3 family, in the layout that Kimi-K2.5 and K2-Instruct are published in.

Structure as the real ones have it: latent attention, one dense layer and then experts with a shared one, yarn, an untied head, weights in
bfloat16 over several shards, a config in the published style with the text model nested in it, Kimi's special tokens as the last of the
vocabulary. The sizes are small, and such that both engines' CPU attention takes them: vLLM's wants a latent of 512 and 64 rotary numbers.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from eyas.kimi_tokenizer import RESERVED, SPECIAL
from eyas.weights import INDEX
from tests.kimi_vocabulary import write_kimi_tokenizer

HIDDEN, LAYERS = 192, 8
FIRST_SPECIAL = 512
VOCABULARY = FIRST_SPECIAL + RESERVED
SURENESS = 4.0
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
"""Token id -> the letter that byte-level tokenizers write for its byte; printable ASCII stands for itself."""
IDS = {name: FIRST_SPECIAL + place for name, place in SPECIAL.items()}
BOS, EOS, IM_END, PAD = (IDS[name] for name in ("[BOS]", "[EOS]", "<|im_end|>", "[PAD]"))
TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_' + message['role'] + '|>' + message['role'] + '<|im_middle|>' }}"
    "{% if message['role'] == 'assistant' %}{{ '<think></think>' }}{% endif %}"
    "{{ message['content'] + '<|im_end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}"
    "{{ '<|im_assistant|>assistant<|im_middle|>' + ('<think></think>' if thinking is defined and thinking is false else '<think>') }}"
    "{% endif %}"
)
YARN = {
    "type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 512,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
TEXT: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "auto_map": {
        "AutoConfig": "configuration_deepseek.DeepseekV3Config",
        "AutoModel": "modeling_deepseek.DeepseekV3Model",
        "AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM",
    },
    "model_type": "kimi_k2",
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": 256,
    "moe_intermediate_size": 64,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 48,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,
    "v_head_dim": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.827,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "num_nextn_predict_layers": 0,
    "max_position_embeddings": 2048,
    "rope_theta": 50000.0,
    "rope_scaling": YARN,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "initializer_range": 0.08,
    "tie_word_embeddings": False,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
    "use_cache": True,
    "dtype": "bfloat16",
}
VISION: dict[str, Any] = {
    "patch_size": 14,
    "merge_kernel_size": [2, 2],
    "merge_type": "sd2_tpool",
    "mm_hidden_size": 64,
    "mm_projector_type": "patchmerger",
    "pos_emb_type": "divided_fixed",
    "projector_hidden_act": "gelu",
    "projector_ln_eps": 1e-5,
    "text_hidden_size": HIDDEN,
    "video_attn_type": "spatial_temporal",
    **{f"init_pos_emb_{side}": size for side, size in (("height", 8), ("width", 8), ("time", 4))},
    **{f"vt_{name}": size for name, size in (("hidden_size", 64), ("intermediate_size", 96))},
    **{f"vt_num_{name}": size for name, size in (("attention_heads", 2), ("hidden_layers", 2))},
    # the same under the names by which SGLang and transformers know them; the published sizes are their defaults
    **{f"pos_emb_{side}": size for side, size in (("height", 8), ("width", 8), ("time", 4))},
    **{"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2, "num_hidden_layers": 2},
}
# What save_pretrained of transformers 5.19 calls otherwise than the published files do.
PUBLISHED_NAMES = (
    ("language_model.model.blocks.", "language_model.model.layers."),
    ("model.mm_projector.pre_norm.", "mm_projector.pre_norm."),
    ("vision_tower.encoder.patch_embed.proj.", "vision_tower.patch_embed.proj."),
)


def write_tiny_kimi(folder: Path, vision: bool = True) -> Path:
    """Kimi-K2.5's layout: the text model in ``text_config`` and under ``language_model.*``, a vision tower beside it.

    Without ``vision`` the tower's weights are left out: enough to read tensors from it, but transformers would not load it.
    """
    config = {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "auto_map": {
            "AutoConfig": "configuration_kimi_k25.KimiK25Config",
            "AutoModel": "modeling_kimi_k25.KimiK25ForConditionalGeneration",
            "AutoModelForCausalLM": "modeling_kimi_k25.KimiK25ForConditionalGeneration",
        },
        "model_type": "kimi_k25",
        "text_config": TEXT,
        "vision_config": VISION,
        # transformers' own name for what the projector norms; the published size is its default
        "projection_hidden_size": VISION["hidden_size"],
        "tie_word_embeddings": False,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
        "ignore_index": -100,
        "media_placeholder_token_id": IDS["<|media_pad|>"],
        "use_unified_vision_chunk": True,
        "video_placeholder": "<|kimi_k25_video_placeholder|>",
        "dtype": "bfloat16",
    }
    _write_json(folder / "config.json", config)
    model = AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
    weights = _published(_saved(model, folder))
    if not vision:
        weights = {name: tensor for name, tensor in weights.items() if name.startswith("language_model.")}
    return _write(folder, config, weights)


def write_tiny_deepseek(folder: Path, model_type: str = "kimi_k2") -> Path:
    """The text model alone, as K2-Instruct ("kimi_k2") and DeepSeek-V3 ("deepseek_v3") are published."""
    folder.mkdir(parents=True, exist_ok=True)
    config = TEXT | {"model_type": model_type}
    own = {name: value for name, value in config.items() if name not in ("model_type", "auto_map", "dtype")}
    return _write(folder, config, _saved(DeepseekV3ForCausalLM(DeepseekV3Config(**own)), folder))


def _saved(model: PreTrainedModel, folder: Path) -> dict[str, Tensor]:
    """The model's tensors by the names that save_pretrained gives them, with random numbers where it would leave zeros."""
    generator = torch.Generator().manual_seed(0)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(torch.randn(buffer.shape, generator=generator) * 0.1)
    model.save_pretrained(folder)
    (path,) = folder.glob("*.safetensors")
    weights = load_file(path)
    path.unlink()
    _speak(next(tensor for name, tensor in weights.items() if name.endswith("lm_head.weight")))
    # the routers' biases are float32 in the published files, everything else that is not quantised is bfloat16
    return {name: tensor if name.endswith("_bias") else tensor.bfloat16() for name, tensor in weights.items()}


def _speak(head_VH: Tensor) -> None:
    """Leave the target printable ASCII and its end token to say, and make it sure of what it says: random heads are hardly ever."""
    said_V = torch.zeros(len(head_VH), dtype=torch.bool)
    said_V[[BYTES.index(chr(code)) for code in range(0x21, 0x7F)] + [IM_END]] = True
    head_VH.mul_(said_V[:, None] * SURENESS)


def _published(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    renamed = {}
    for name, tensor in weights.items():
        ours, theirs = next(((ours, theirs) for ours, theirs in PUBLISHED_NAMES if name.startswith(ours)), ("", ""))
        renamed[theirs + name.removeprefix(ours)] = tensor
    return renamed


def _write(folder: Path, config: dict[str, Any], weights: dict[str, Tensor]) -> Path:
    """Shards by layer with their index, the published config, generation config and tokenizer."""
    shards: list[dict[str, Tensor]] = [{}, {}, {}]
    for name, tensor in weights.items():
        layer = name.partition("layers.")[2].partition(".")[0]
        place = 0 if "embed_tokens" in name else 2 if not layer or int(layer) > LAYERS // 2 else 1
        shards[place][name] = tensor
    files = [f"model-{number:05}-of-{len(shards):05}.safetensors" for number in range(1, len(shards) + 1)]
    for file, shard in zip(files, shards, strict=True):
        save_file(shard, folder / file, metadata={"format": "pt"})
    places = {name: file for file, shard in zip(files, shards, strict=True) for name in shard}
    size = sum(tensor.nbytes for tensor in weights.values())
    _write_json(folder / INDEX, {"metadata": {"total_size": size}, "weight_map": places})
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", {"max_length": 2048, "eos_token_id": IM_END})
    _write_tokenizer(folder)
    return folder


def _write_tokenizer(folder: Path) -> None:
    """One token a byte, and the special tokens behind them: for transformers and the engines, and the same as published."""
    vocabulary = {letter: index for index, letter in enumerate(BYTES)} | IDS
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in IDS])
    named = {"bos_token": "[BOS]", "eos_token": "[EOS]", "pad_token": "[PAD]", "unk_token": "[UNK]"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=TEMPLATE, **named).save_pretrained(folder)
    write_kimi_tokenizer(folder, FIRST_SPECIAL, words=())


def _write_json(path: Path, values: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(values, indent=1))
