"""AQ-MedAI's Kimi-K2-Instruct-eagle3 as its folder is published: config and tensors of the full size, and a twin in small.

The twin keeps what could break a reader: an attention wider than the hidden state, as many key as query heads, an MLP of 18/7 its width, a
draft vocabulary of a fifth, layer ids as one engine counted them, rope in the old style, half of the target's positions.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from eyas import vocab
from eyas.target import Target

FULL = {
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "head_dim": 128,
    "vocab_size": 163840,
    "draft_vocab_size": 32000,
    "max_position_embeddings": 131072,
}
FULL_IDS = [2, 30, 58]
FULL_TENSORS = {
    "midlayer.input_layernorm.weight": (7168,),
    "midlayer.hidden_norm.weight": (7168,),
    "midlayer.post_attention_layernorm.weight": (7168,),
    "midlayer.self_attn.q_proj.weight": (8192, 14336),
    "midlayer.self_attn.k_proj.weight": (8192, 14336),
    "midlayer.self_attn.v_proj.weight": (8192, 14336),
    "midlayer.self_attn.o_proj.weight": (7168, 8192),
    "midlayer.mlp.gate_proj.weight": (18432, 7168),
    "midlayer.mlp.up_proj.weight": (18432, 7168),
    "midlayer.mlp.down_proj.weight": (7168, 18432),
    "fc.weight": (7168, 21504),
    "norm.weight": (7168,),
    "lm_head.weight": (32000, 7168),
    "d2t": (32000,),
    "t2d": (163840,),
}


def published_config(sizes: dict[str, int], ids: list[int]) -> dict[str, Any]:
    """config.json with the fields and constants of the published one."""
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "rope_scaling": None,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "pretraining_tp": 1,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": ids},
        **sizes,
    }


def twin_sizes(target: Target) -> dict[str, int]:
    """The published sizes, as large beside ``target``'s as they are beside Kimi-K2's."""
    shape = target.shape
    scale = shape.hidden_size / FULL["hidden_size"]
    heads = 4
    return {
        "hidden_size": shape.hidden_size,
        "intermediate_size": round(FULL["intermediate_size"] * scale),
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": 2 * round(FULL["num_attention_heads"] * FULL["head_dim"] * scale / heads / 2),
        "vocab_size": shape.vocab_size,
        "draft_vocab_size": shape.vocab_size * FULL["draft_vocab_size"] // FULL["vocab_size"],
        "max_position_embeddings": shape.max_position // 2,
    }


def write_twin(folder: Path, target: Target, ids: list[int], with_embedding: bool = False) -> Path:
    """A folder with the published names and dtypes and random weights, for ``target``; beside it a pickle that nobody may touch."""
    folder.mkdir(parents=True)
    sizes = twin_sizes(target)
    hidden, inner, wide = sizes["hidden_size"], sizes["intermediate_size"], sizes["num_attention_heads"] * sizes["head_dim"]
    generator = torch.Generator().manual_seed(0)

    def matrix(*size: int) -> torch.Tensor:
        return (torch.randn(size, generator=generator) * 0.02).bfloat16()

    def ones() -> torch.Tensor:
        return torch.ones(hidden, dtype=torch.bfloat16)

    norms = ("midlayer.input_layernorm", "midlayer.hidden_norm", "midlayer.post_attention_layernorm", "norm")
    ids_D = 2 * torch.arange(sizes["draft_vocab_size"])
    tensors = {
        **{f"{name}.weight": ones() for name in norms},
        **{f"midlayer.self_attn.{name}_proj.weight": matrix(wide, 2 * hidden) for name in "qkv"},
        "midlayer.self_attn.o_proj.weight": matrix(hidden, wide),
        "midlayer.mlp.gate_proj.weight": matrix(inner, hidden),
        "midlayer.mlp.up_proj.weight": matrix(inner, hidden),
        "midlayer.mlp.down_proj.weight": matrix(hidden, inner),
        "fc.weight": matrix(hidden, len(ids) * hidden),
        "lm_head.weight": target.lm_head(torch.bfloat16)[ids_D].contiguous(),
        "d2t": vocab.offsets(ids_D),
        "t2d": vocab.membership(ids_D, sizes["vocab_size"]),
        **({"embed_tokens.weight": target.embedding(torch.bfloat16)} if with_embedding else {}),
    }
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(published_config(sizes, ids)))
    (folder / "training_state.pt").write_bytes(b"cos\nsystem\n(S'exit 1'\ntR.")
    return folder
