"""A random target small enough to decode in milliseconds, with a tokenizer and a chat template, and drafters for it."""

from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from eyas import vocab
from eyas.config import Config
from eyas.drafter import Drafter, DrafterShape
from eyas.folder import DrafterFolder, drafter_config, write_drafter
from eyas.target import Target

LAYERS = (1, 3, 4)
TEMPLATE = "{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }}\n{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
BYTES = list(pre_tokenizers.ByteLevel.alphabet())


def tiny_target(folder: Path, vocab_size: int = 300, seed: int = 0, sharpness: float = 1.0) -> Target:
    """Llama with 5 layers, random; ``sharpness`` scales the head. Token 0 ends replies, the others are bytes as far as they reach."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        rope_theta=5000.0,
        tie_word_embeddings=False,
        eos_token_id=0,
        bos_token_id=1,
        pad_token_id=0,
        initializer_range=0.3,
    )
    model = LlamaForCausalLM(config)
    model.lm_head.weight.data.mul_(sharpness)
    model.save_pretrained(folder)
    words = {"<end>": 0, "<start>": 1} | {byte: index + 2 for index, byte in enumerate(sorted(BYTES))}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<end>"))
    split = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False), split])
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", bos_token="<start>", chat_template=TEMPLATE)
    fast.save_pretrained(folder)
    return Target(folder, str(folder))


def tiny_drafter(target: Target, draft_vocab_size: int | None = None, seed: int = 1) -> Drafter:
    """A random drafter; its head is the target's, so that it is right more often than by chance."""
    torch.manual_seed(seed)
    shape = target.shape
    drafter = Drafter(
        DrafterShape(
            hidden_size=shape.hidden_size,
            intermediate_size=40,
            num_heads=4,
            num_kv_heads=2,
            head_dim=8,
            vocab_size=shape.vocab_size,
            draft_vocab_size=draft_vocab_size or shape.vocab_size,
            rms_norm_eps=1e-5,
            rope_theta=5000.0,
            max_position=256,
        )
    )
    ids_D = torch.randperm(shape.vocab_size)[: drafter.shape.draft_vocab_size].sort().values
    drafter.d2t.copy_(vocab.offsets(ids_D))
    drafter.t2d.copy_(vocab.membership(ids_D, shape.vocab_size))
    drafter.lm_head.weight.data.copy_(target.lm_head(torch.float32)[ids_D])
    with torch.no_grad():
        for norm in (drafter.norm, drafter.midlayer.hidden_norm, drafter.midlayer.input_layernorm):
            norm.weight.uniform_(0.5, 1.5)
        drafter.fc.weight[:, 2 * shape.hidden_size :] += torch.eye(shape.hidden_size)
    drafter.set_embedding(target.embedding(torch.float32))
    return drafter


def tiny_folder(target: Target, draft_vocab_size: int | None = None, seed: int = 1) -> DrafterFolder:
    """The drafter as ``read_drafter`` gives it."""
    return DrafterFolder(tiny_drafter(target, draft_vocab_size, seed), LAYERS, [], {})


def write_tiny_drafter(folder: Path, target: Target, seed: int = 1) -> Path:
    """A drafter folder on disk."""
    drafter = tiny_drafter(target, target.shape.vocab_size // 2, seed)
    write_drafter(folder, drafter, drafter_config(drafter.shape, LAYERS, target))
    return folder


def tiny_config(output: Path, target: Target, **engine: object) -> Config:
    """A run's config around a tiny target."""
    return Config.model_validate(
        {
            "output": output,
            "target": {"model": str(target.folder), "device": "cpu"},
            "prep": {"sources": [{"source": "none.jsonl"}]},
            "drafter": {"init": "scratch"},
            "engine": {"context": 128, "dtype": "float32"} | engine,
        }
    )
