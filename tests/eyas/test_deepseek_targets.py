"""The DeepSeek-V3 family as published: Kimi-K2.5 with its text model nested, K2-Instruct and DeepSeek-V3 without, quantised builds."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from eyas.errors import EyasError
from eyas.files import read_object
from eyas.initial import fresh_drafter
from eyas.target import Target
from eyas.weights import INDEX
from tests.kimi import EOS, HIDDEN, IM_END, LAYERS, PAD, TEXT, VOCABULARY, write_tiny_deepseek, write_tiny_kimi

LAST = LAYERS - 1


@pytest.fixture(scope="module")
def k2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """K2-Instruct's layout."""
    return write_tiny_deepseek(tmp_path_factory.mktemp("k2"))


def rewritten(folder: Path, place: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]], **config: Any) -> Target:
    """A copy with other weights and config entries (None takes one out)."""
    shutil.copytree(folder, place)
    weights: dict[str, Tensor] = {}
    for path in place.glob("*.safetensors"):
        weights |= load_file(path)
        path.unlink()
    (place / INDEX).unlink()
    save_file(change(weights), place / "model.safetensors", metadata={"format": "pt"})
    values = {name: value for name, value in (read_object(place / "config.json") | config).items() if value is not None}
    (place / "config.json").write_text(json.dumps(values))
    return Target(place, "rewritten")


def same(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return weights


@torch.inference_mode()
def logits(target: Target) -> Tensor:
    return target.load_model(torch.float32, "cpu")(torch.arange(12)[None]).logits


def test_shape_is_that_of_the_text_model_in_every_layout(kimi: Path, k2: Path) -> None:
    for folder, model_type in ((kimi, "kimi_k25"), (k2, "kimi_k2")):
        shape = Target(folder, "tiny").shape
        assert shape.model_type == model_type
        assert (shape.hidden_size, shape.num_layers, shape.vocab_size, shape.num_heads) == (HIDDEN, LAYERS, VOCABULARY, 4)
        assert (shape.head_dim, shape.intermediate_size) == (TEXT["v_head_dim"], TEXT["intermediate_size"])
        assert (shape.rope_theta, shape.max_position, shape.tied) == (50000.0, 2048, False)
        assert (shape.eos_ids, shape.pad_id) == ((IM_END, EOS), PAD)


@pytest.mark.parametrize("vision", [True, False])
def test_embedding_head_and_norm_come_straight_from_the_shards(kimi: Path, tmp_path: Path, vision: bool) -> None:
    target = Target(kimi if vision else write_tiny_kimi(tmp_path / "text", vision=False), "tiny")
    weights: dict[str, Tensor] = {}
    for path in target.folder.glob("*.safetensors"):
        weights |= load_file(path)
    assert any(name.startswith("vision_tower.") for name in weights) == vision
    assert torch.equal(target.embedding(torch.bfloat16), weights["language_model.model.embed_tokens.weight"])
    assert torch.equal(target.lm_head(torch.bfloat16), weights["language_model.lm_head.weight"])
    assert torch.equal(target.final_norm(torch.bfloat16), weights["language_model.model.norm.weight"])
    assert "mlp.experts.7.down_proj.weight" in target.layer_names(LAST)


def test_the_same_weights_compute_the_same_in_every_layout(kimi: Path, tmp_path: Path) -> None:
    """Kimi-K2.5's text model alone, as K2-Instruct and DeepSeek-V3 have it. No code that the config names is there, and none is needed."""

    def text(weights: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name.removeprefix("language_model."): weight for name, weight in weights.items() if name.startswith("language_model.")}

    nested = logits(Target(kimi, "kimi"))
    for model_type in ("kimi_k2", "deepseek_v3"):
        alone = rewritten(kimi, tmp_path / model_type, text, text_config=None, vision_config=None, **TEXT | {"model_type": model_type})
        assert torch.equal(logits(alone), nested)


def test_a_config_that_is_silent_on_it_does_not_tie_the_head(kimi: Path, tmp_path: Path) -> None:
    """transformers' own class for Kimi-K2.5 would."""
    text = {name: value for name, value in TEXT.items() if name != "tie_word_embeddings"}
    silent = rewritten(kimi, tmp_path / "silent", same, tie_word_embeddings=None, text_config=text)
    assert not silent.shape.tied
    assert torch.equal(logits(silent), logits(Target(kimi, "kimi")))


def test_loading_the_model_leaves_the_targets_digest_as_it_is(kimi: Path) -> None:
    target = Target(kimi, "kimi")
    target.load_model(torch.float32, "cpu")
    assert target.digest == Target(kimi, "kimi").digest


def test_weights_that_the_files_lack_are_named_instead_of_taken_at_random(k2: Path, tmp_path: Path) -> None:
    def without_norm(weights: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: weight for name, weight in weights.items() if name != "model.layers.3.input_layernorm.weight"}

    with pytest.raises(EyasError, match=r"lacks 1 weights that DeepseekV3ForCausalLM needs.*layers\.3\.input_layernorm"):
        rewritten(k2, tmp_path / "lacking", without_norm).load_model(torch.float32, "cpu")


@pytest.mark.parametrize("all_of_it", [False, True])
def test_layers_of_the_nvfp4_build_are_found_under_their_own_prefix(kimi: Path, tmp_path: Path, all_of_it: bool) -> None:
    """``language_model.layers.*``, with the embedding where the others have it, or beside them."""
    before = "language_model.model." if all_of_it else "language_model.model.layers."

    def moved(weights: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name.replace(before, before.replace("model.model.", "model.")): weight for name, weight in weights.items()}

    plain, nvfp4 = Target(kimi, "kimi"), rewritten(kimi, tmp_path / "nvfp4", moved)
    assert sorted(nvfp4.layer_names(LAST)) == sorted(plain.layer_names(LAST))
    assert torch.equal(nvfp4.embedding(torch.bfloat16), plain.embedding(torch.bfloat16))
    assert torch.equal(nvfp4.final_norm(torch.bfloat16), plain.final_norm(torch.bfloat16))
    drafter = fresh_drafter(nvfp4, torch.tensor([1, 5]), plain.default_layers())
    assert torch.equal(drafter.midlayer.hidden_norm.weight, plain.layer_tensors(LAST, torch.float32)["input_layernorm.weight"])


def packed(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Experts of int4 in compressed-tensors' names, and one matrix packed under its plain name as NVFP4 has it."""
    found = {}
    for name, weight in weights.items():
        if ".mlp.experts." in name:
            rows, columns = weight.shape
            numbers = torch.arange(rows * columns // 8, dtype=torch.int32).view(rows, columns // 8)
            scales, shape = torch.ones(rows, columns // 32, dtype=torch.bfloat16), torch.tensor([rows, columns])
            found |= {f"{name}_packed": numbers, f"{name}_scale": scales, f"{name}_shape": shape}
        elif name.endswith(f"layers.{LAST}.mlp.shared_experts.up_proj.weight"):
            found |= {name: torch.zeros(weight.shape[0], weight.shape[1] // 2, dtype=torch.uint8), f"{name}_scale": torch.ones(1)}
        else:
            found[name] = weight
    return found


def test_packed_experts_are_read_as_they_are_and_no_drafter_begins_from_them(kimi: Path, tmp_path: Path) -> None:
    target = rewritten(kimi, tmp_path / "packed", packed)
    layer = target.layer_tensors(LAST, torch.float32)
    kinds = {name: layer[f"mlp.experts.0.up_proj.{name}"].dtype for name in ("weight_packed", "weight_scale", "weight_shape")}
    assert kinds == {"weight_packed": torch.int32, "weight_scale": torch.float32, "weight_shape": torch.int64}
    assert layer["mlp.shared_experts.up_proj.weight"].dtype == torch.uint8
    drafter = fresh_drafter(target, torch.tensor([1, 5]), target.default_layers())
    assert torch.equal(drafter.midlayer.hidden_norm.weight, layer["input_layernorm.weight"])
    assert 0.01 < drafter.midlayer.mlp.up_proj.weight.std().item() < 0.03


def test_a_model_of_packed_experts_is_refused_in_one_line_where_nothing_unpacks_them(kimi: Path, tmp_path: Path) -> None:
    quantization = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {}}
    target = rewritten(kimi, tmp_path / "packed", packed, text_config=TEXT | {"quantization_config": quantization})
    with pytest.raises(EyasError, match=r"^cannot load rewritten from .*: ") as refused:
        target.load_model(torch.float32, "cpu")
    assert "\n" not in str(refused.value)


def test_of_a_layer_only_the_tensors_that_are_asked_for_are_read(kimi: Path) -> None:
    names = ["input_layernorm.weight", "self_attn.q_proj.weight"]  # the second is not in a layer with latent attention
    assert list(Target(kimi, "kimi").layer_tensors(LAST, torch.float32, names)) == ["input_layernorm.weight"]


def test_the_tokenizers_of_both_layouts_give_the_same_ids(kimi: Path, k2: Path) -> None:
    first, second = Target(kimi, "kimi").tokenizer(), Target(k2, "k2").tokenizer()
    text = "Hällo, <|im_middle|>2 + 2"
    assert first.encode(text) == second.encode(text)
    assert first.decode(second.encode(text)) == text
