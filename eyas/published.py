"""Shapes of published models, for planning where the hub cannot be reached: the fields of their config.json that a plan needs.

Nothing but ``eyas plan`` reads them; prep, train and export read the model's own files.
"""

from typing import Any

_EAGLE3_FOR_KIMI: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "head_dim": 128,
    "vocab_size": 163840,
    "draft_vocab_size": 32000,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
    "eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [2, 30, 58]},
}
PUBLISHED: dict[str, dict[str, Any]] = {
    # https://huggingface.co/moonshotai/Kimi-K2.5
    "moonshotai/Kimi-K2.5": {
        "model_type": "kimi_k25",
        "text_config": {
            "model_type": "kimi_k2",
            "hidden_size": 7168,
            "intermediate_size": 18432,
            "num_hidden_layers": 61,
            "num_attention_heads": 64,
            "num_key_value_heads": 64,
            "kv_lora_rank": 512,
            "v_head_dim": 128,
            "vocab_size": 163840,
            "rms_norm_eps": 1e-5,
            "rope_theta": 50000.0,
            "max_position_embeddings": 262144,
            "tie_word_embeddings": False,
        },
    },
    # https://huggingface.co/AQ-MedAI/Kimi-K2-Instruct-eagle3 and .../Kimi-K25-eagle3
    "AQ-MedAI/Kimi-K2-Instruct-eagle3": _EAGLE3_FOR_KIMI,
    "AQ-MedAI/Kimi-K25-eagle3": {**_EAGLE3_FOR_KIMI, "max_position_embeddings": 262144},
}
