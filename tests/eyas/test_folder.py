"""Drafter folders: what is read, what is refused by name, and that what is written is what was there."""

import json
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM

from eyas import vocab
from eyas.drafter import Drafter, DrafterShape
from eyas.errors import EyasError
from eyas.folder import drafter_config, read_drafter, tensor_contract, write_drafter
from eyas.target import Target

HIDDEN, VOCAB = 16, 40
IDS = torch.tensor([1, 2, 5, 6, 9, 17, 18, 30, 39])
SHAPE = DrafterShape(
    hidden_size=HIDDEN,
    intermediate_size=24,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    vocab_size=VOCAB,
    draft_vocab_size=len(IDS),
    rms_norm_eps=1e-5,
    rope_theta=123456.0,
    max_position=512,
)
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=24,
        num_hidden_layers=30,
        num_attention_heads=2,
        tie_word_embeddings=True,
        bos_token_id=3,
        eos_token_id=[4, 7],
    )
    place = tmp_path_factory.mktemp("target")
    LlamaForCausalLM(config).save_pretrained(place)
    return Target(place, "tiny")


def random_drafter(shape: DrafterShape = SHAPE, ids: Tensor = IDS) -> Drafter:
    torch.manual_seed(1)
    drafter = Drafter(shape).to(torch.bfloat16)
    drafter.d2t.copy_(vocab.offsets(ids))
    drafter.t2d.copy_(vocab.membership(ids, shape.vocab_size))
    return drafter


def foreign_config(**changes: Any) -> dict[str, Any]:
    """As AQ-MedAI's folder has it, in small."""
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "hidden_act": "silu",
        "vocab_size": VOCAB,
        "draft_vocab_size": len(IDS),
        "rms_norm_eps": 1e-5,
        "rope_theta": 123456.0,
        "rope_scaling": None,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [2, 15, 27]},
        # what ordinary configs also carry
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "pretraining_tp": 1,
        "use_cache": True,
        "transformers_version": "4.51.0",
        "use_sliding_window": False,
        "sliding_window": 4096,
        "max_window_layers": 28,
        "bos_token_id": 3,
        "eos_token_id": 4,
        "layer_types": ["full_attention"],
    } | changes
    return {key: value for key, value in config.items() if value != "absent"}


def foreign_folder(
    place: Path, tensors: dict[str, Tensor | None] | None = None, config: dict[str, Any] | None = None, drafter: Drafter | None = None
) -> Path:
    """A folder of somebody else's: a drafter's tensors, some replaced or (None) left out."""
    place.mkdir(parents=True, exist_ok=True)
    state = dict((drafter or random_drafter()).state_dict()) | (tensors or {})
    save_file({name: tensor for name, tensor in state.items() if tensor is not None}, place / "model.safetensors")
    (place / "config.json").write_text(json.dumps(foreign_config() if config is None else config))
    return place


def same_weights(one: Drafter, other: Drafter) -> bool:
    mine, yours = one.state_dict(), other.state_dict()
    return mine.keys() == yours.keys() and all(torch.equal(mine[name], yours[name]) for name in mine)


@pytest.mark.parametrize("scaling", [None, YARN])
def test_a_drafter_comes_back_bit_for_bit_with_shape_and_layers(tmp_path: Path, target: Target, scaling: dict | None) -> None:
    shape = SHAPE.model_copy(update={"rope_scaling": scaling})
    drafter = random_drafter(shape)
    write_drafter(tmp_path / "out", drafter, drafter_config(shape, (2, 15, 27), target))
    back = read_drafter(str(tmp_path / "out"), dtype=torch.bfloat16)
    assert same_weights(drafter, back.drafter)
    assert back.drafter.shape == shape
    assert back.layers == (2, 15, 27)
    assert back.drafter.embedding_VH is None
    assert back.notes == ["d2t holds offsets"]


def test_an_export_holds_exactly_the_contract(tmp_path: Path, target: Target) -> None:
    write_drafter(tmp_path / "out", random_drafter(), drafter_config(SHAPE, (2, 15, 27), target))
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == tensor_contract(SHAPE)
    assert tensors.pop("d2t").dtype == torch.int64
    assert tensors.pop("t2d").dtype == torch.bool
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["config.json", "model.safetensors"]
    with safe_open(tmp_path / "out" / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_d2t_in_an_export_is_target_id_minus_row_number(tmp_path: Path, target: Target) -> None:
    write_drafter(tmp_path / "out", random_drafter(), drafter_config(SHAPE, (2, 15, 27), target))
    d2t = load_file(tmp_path / "out" / "model.safetensors")["d2t"]
    assert [row + int(offset) for row, offset in enumerate(d2t)] == IDS.tolist()


def test_the_config_says_what_engines_need(tmp_path: Path, target: Target) -> None:
    write_drafter(tmp_path / "out", random_drafter(), drafter_config(SHAPE, (2, 15, 27), target))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["eagle_config"] == {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [1, 14, 26]}
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 15, 27]
    assert config["eyas"]["captured_hidden_states"] == [2, 15, 27]
    assert config["eyas"]["target_digest"] == target.digest
    assert config["draft_vocab_size"] == 9
    assert config["max_position_embeddings"] == 512
    assert (config["bos_token_id"], config["eos_token_id"]) == (3, [4, 7])
    assert config["dtype"] == config["torch_dtype"] == "bfloat16"
    assert config["tie_word_embeddings"] is False  # although the target is tied
    assert target.shape.tied


@pytest.mark.parametrize("left", ["rope_parameters", "rope_theta and rope_scaling"])
@pytest.mark.parametrize("scaling", [None, YARN])
def test_either_way_of_writing_rope_alone_says_everything_to_transformers_and_to_us(
    tmp_path: Path, target: Target, scaling: dict | None, left: str
) -> None:
    shape = SHAPE.model_copy(update={"rope_scaling": scaling})
    write_drafter(tmp_path, random_drafter(shape), drafter_config(shape, (2, 15, 27), target))
    config = json.loads((tmp_path / "config.json").read_text())
    for key in ("rope_theta", "rope_scaling") if left == "rope_parameters" else ("rope_parameters",):
        del config[key]
    (tmp_path / "config.json").write_text(json.dumps(config))
    loaded = AutoConfig.from_pretrained(tmp_path).rope_parameters
    assert loaded["rope_theta"] == 123456.0
    assert loaded["rope_type"] == ("yarn" if scaling else "default")
    assert read_drafter(str(tmp_path)).drafter.shape == shape


def test_writing_again_replaces_the_drafter_and_keeps_other_files(tmp_path: Path, target: Target) -> None:
    (tmp_path / "manifest.json").write_text("{}")
    drafter = random_drafter()
    write_drafter(tmp_path, drafter, drafter_config(SHAPE, (2, 15, 27), target))
    drafter.norm.weight.data.mul_(2)
    write_drafter(tmp_path, drafter, drafter_config(SHAPE, (3, 15, 27), target))
    back = read_drafter(str(tmp_path), dtype=torch.bfloat16)
    assert same_weights(back.drafter, drafter)
    assert back.layers == (3, 15, 27)
    assert (tmp_path / "manifest.json").exists()


def test_a_fused_drafter_is_written_like_a_plain_one(tmp_path: Path, target: Target) -> None:
    config = drafter_config(SHAPE, (2, 15, 27), target)
    write_drafter(tmp_path / "plain", random_drafter(), config)
    write_drafter(tmp_path / "fused", random_drafter().fuse(), config)
    assert (tmp_path / "plain" / "model.safetensors").read_bytes() == (tmp_path / "fused" / "model.safetensors").read_bytes()


def test_a_float32_drafter_is_rounded_to_bf16_never_to_fp16(tmp_path: Path, target: Target) -> None:
    drafter = random_drafter().float()
    drafter.norm.weight.data.fill_(1e30)  # infinite in fp16
    write_drafter(tmp_path, drafter, drafter_config(SHAPE, (2, 15, 27), target))
    assert torch.equal(read_drafter(str(tmp_path)).drafter.norm.weight, drafter.norm.weight.bfloat16().float())


def test_a_diverged_drafter_is_not_written(tmp_path: Path, target: Target) -> None:
    drafter = random_drafter()
    drafter.fc.weight.data[0, 0] = float("nan")
    with pytest.raises(EyasError, match=r"fc\.weight holds values that are not finite"):
        write_drafter(tmp_path / "out", drafter, drafter_config(SHAPE, (2, 15, 27), target))
    assert not list((tmp_path).rglob("*.safetensors"))


def test_a_config_of_another_drafter_is_not_written(tmp_path: Path, target: Target) -> None:
    config = drafter_config(SHAPE, (2, 15, 27), target)
    with pytest.raises(EyasError, match="another drafter"):
        write_drafter(tmp_path, random_drafter(), {**config, "rope_theta": 1.0, "rope_parameters": None})


def test_a_drafter_with_target_ids_for_d2t_is_not_written(tmp_path: Path, target: Target) -> None:
    drafter = random_drafter()
    drafter.d2t.copy_(IDS)
    with pytest.raises(EyasError, match="not offsets"):
        write_drafter(tmp_path, drafter, drafter_config(SHAPE, (2, 15, 27), target))


def test_a_folder_with_other_weights_is_not_written_into(tmp_path: Path, target: Target) -> None:
    save_file({"a": torch.zeros(1)}, tmp_path / "model-00001-of-00002.safetensors")
    with pytest.raises(EyasError, match="already holds model-00001"):
        write_drafter(tmp_path, random_drafter(), drafter_config(SHAPE, (2, 15, 27), target))


def test_a_drafter_of_another_target_gets_no_config(target: Target) -> None:
    with pytest.raises(EyasError, match="vocab_size is 41"):
        drafter_config(SHAPE.model_copy(update={"vocab_size": 41}), (2, 15, 27), target)
    with pytest.raises(EyasError, match="3 aux states, 2 layers"):
        drafter_config(SHAPE, (2, 15), target)


def test_both_name_styles_and_prefixes_are_read(tmp_path: Path) -> None:
    drafter = random_drafter()
    for place, style in (("a", "midlayer."), ("b", "layers.0."), ("c", "model.layers.0.")):
        renamed = {name.replace("midlayer.", style): tensor for name, tensor in drafter.state_dict().items() if "midlayer" in name}
        old = {name: None for name in drafter.state_dict() if "midlayer" in name}
        found = read_drafter(str(foreign_folder(tmp_path / place, {**old, **renamed})), dtype=torch.bfloat16)
        assert same_weights(found.drafter, drafter), style


def test_a_sharded_folder_is_read_and_a_missing_shard_named(tmp_path: Path) -> None:
    drafter = random_drafter()
    foreign_folder(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    files = {}
    for number, (name, tensor) in enumerate(drafter.state_dict().items()):
        file = f"model-{number % 2 + 1:05d}-of-00002.safetensors"
        files.setdefault(file, {})[name] = tensor
    for file, tensors in files.items():
        save_file(tensors, tmp_path / file)
    index = {"weight_map": {name: file for file, tensors in files.items() for name in tensors}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert same_weights(read_drafter(str(tmp_path), dtype=torch.bfloat16).drafter, drafter)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(EyasError, match="lacks 1 of its 2 shards, the first is model-00002"):
        read_drafter(str(tmp_path))


def test_d2t_with_target_ids_is_read_as_such_and_told(tmp_path: Path) -> None:
    for t2d in (vocab.membership(IDS, VOCAB), None):
        found = read_drafter(str(foreign_folder(tmp_path, {"d2t": IDS.to(torch.int32), "t2d": t2d})))
        assert torch.equal(found.drafter.draft_ids_D, IDS)
        assert torch.equal(found.drafter.t2d, vocab.membership(IDS, VOCAB))
        assert any("not offsets" in note for note in found.notes)


def test_a_d2t_of_zeros_is_told_of_even_where_its_mask_agrees(tmp_path: Path) -> None:
    tensors = {"d2t": torch.zeros(9, dtype=torch.int64), "t2d": vocab.membership(torch.arange(9), VOCAB)}
    notes = read_drafter(str(foreign_folder(tmp_path, tensors))).notes
    assert "d2t is all zeros: the first 9 tokens; a d2t that was never filled looks the same" in notes


def test_a_full_vocabulary_needs_no_d2t(tmp_path: Path) -> None:
    drafter = random_drafter(SHAPE.model_copy(update={"draft_vocab_size": VOCAB}), torch.arange(VOCAB))
    for said in (VOCAB, None, "absent"):
        place = foreign_folder(tmp_path, {"d2t": None, "t2d": None}, foreign_config(draft_vocab_size=said), drafter)
        found = read_drafter(str(place), dtype=torch.bfloat16)
        assert found.drafter.draft_ids_D.tolist() == list(range(VOCAB))
        assert same_weights(found.drafter, drafter)


def test_its_own_embedding_is_used_only_when_of_full_size(tmp_path: Path) -> None:
    own = torch.randn(VOCAB, HIDDEN)
    found = read_drafter(str(foreign_folder(tmp_path, {"embed_tokens.weight": own})))
    assert found.drafter.embedding_VH is not None
    assert torch.equal(found.drafter.embedding_VH, own)
    assert any("own embed_tokens" in note for note in found.notes)
    found = read_drafter(str(foreign_folder(tmp_path, {"embed_tokens.weight": own[:30]})))
    assert found.drafter.embedding_VH is None
    assert any("ignored" in note for note in found.notes)


def test_foreign_layer_ids_come_with_every_reading(tmp_path: Path) -> None:
    found = read_drafter(str(foreign_folder(tmp_path)), family="llama")
    assert found.layers is None
    assert found.candidates == [(3, 16, 28), (2, 15, 27)]
    assert any("the numbers alone do not tell" in note for note in found.notes)
    ids = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 14, 26]}}
    assert read_drafter(str(foreign_folder(tmp_path, config=foreign_config(**ids)))).layers == (2, 15, 27)


def test_unknown_fields_that_say_nothing_mathematical_are_noted(tmp_path: Path) -> None:
    config = foreign_config(dataset="sharegpt", training_note="x", rope_scaling={"rope_type": "default"}, n_routed_experts=384)
    notes = read_drafter(str(foreign_folder(tmp_path, config=config))).notes
    assert "config field dataset is unknown and ignored" in notes


def test_a_missing_theta_is_told(tmp_path: Path) -> None:
    found = read_drafter(str(foreign_folder(tmp_path, config=foreign_config(rope_theta="absent"))))
    assert found.drafter.shape.rope_theta == 10000.0
    assert any("no rope_theta" in note for note in found.notes)


REFUSED_CONFIGS: list[tuple[dict[str, Any], str]] = [
    ({"architectures": ["Eagle3DeepseekV2ForCausalLM"]}, "Eagle3DeepseekV2ForCausalLM.*MLA"),
    ({"architectures": ["Eagle3Speculator"]}, "Eagle3Speculator"),
    ({"speculators_config": {"algorithm": "eagle3"}}, "speculators_config"),
    ({"kv_lora_rank": 512}, "kv_lora_rank"),
    ({"norm_before_fc": True}, "norm_before_fc"),
    ({"fc_norm": True}, "fc_norm"),
    ({"use_aux_norm": True}, "use_aux_norm"),
    ({"norm_output": True}, "norm_output"),
    ({"eagle_config": {"norm_before_fc": True}}, "norm_before_fc"),
    ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state"),
    ({"attention_bias": True}, "attention_bias"),
    ({"bias": True}, "bias"),
    ({"target_hidden_size": 32}, "target_hidden_size is 32"),
    ({"num_hidden_layers": 2}, "num_hidden_layers is 2"),
    ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
    ({"use_sliding_window": True}, "sliding_window"),
    ({"layer_types": ["sliding_attention"]}, "layer_types"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ({"rope_is_neox_style": False}, "rope_is_neox_style"),
    ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "'dynamic'"),
    ({"rope_scaling": {"rope_type": "default", "mrope_section": [1, 1, 2]}}, "mrope_section"),
    (
        {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "attention_factor": 0.7}},
        "attention_factor",
    ),
    ({"rope_parameters": {"rope_type": "default", "rope_theta": 5.0}}, "must agree"),
    ({"rope_parameters": {**YARN, "rope_theta": 123456.0}, "rope_scaling": {**YARN, "factor": 8.0}}, "must agree"),
    ({"logits_scaling": 8.0}, "logits_scaling = 8.0 is unknown"),
    ({"residual_multiplier": 0.3}, "residual_multiplier"),
    ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
    ({"use_qk_norm": True}, "use_qk_norm"),
    ({"eagle_config": {"norm_embed": True}}, "norm_embed"),
    ({"hidden_size": "absent"}, "hidden_size is missing"),
    ({"vocab_size": "many"}, "vocab_size is 'many'"),
    ({"vocab_size": 50}, r"t2d is \[40\], the config makes it \[50\]"),
    ({"draft_vocab_size": 8}, r"lm_head.weight is \[9, 16\], the config makes it \[8, 16\]"),
    ({"num_key_value_heads": 4}, r"k_proj.weight is \[16, 32\], the config makes it \[32, 32\]"),
    ({"num_aux_hidden_states": 2}, "fc.weight takes 48 values, the config has 2 states of 16"),
    ({"eyas": {"captured_hidden_states": [2, 15]}, "num_aux_hidden_states": 3}, "3, but 2 layers"),
    ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": "2,15,27"}}, "expected a list of layer numbers"),
]


@pytest.mark.parametrize(("changes", "told"), REFUSED_CONFIGS, ids=[told for _, told in REFUSED_CONFIGS])
def test_a_config_that_changes_the_mathematics_is_refused_by_name(tmp_path: Path, changes: dict, told: str) -> None:
    with pytest.raises(EyasError, match=told):
        read_drafter(str(foreign_folder(tmp_path, config=foreign_config(**changes))))


REFUSED_TENSORS: list[tuple[dict[str, Tensor | None], str]] = [
    ({"d2t": None}, "d2t is missing, and lm_head has 9 of 40 tokens"),
    ({"d2t": torch.full((9,), 38)}, "neither offsets nor target ids"),
    ({"d2t": torch.zeros(9, dtype=torch.int64)}, "t2d marks other tokens"),
    ({"d2t": torch.zeros(8, dtype=torch.int64)}, r"d2t is \[8\]"),
    ({"d2t": torch.zeros(9)}, "d2t is F32, expected integers"),
    ({"t2d": torch.zeros(VOCAB, dtype=torch.bool)}, "t2d marks other tokens"),
    ({"lm_head.weight": None}, "lm_head.weight is missing"),
    ({"midlayer.hidden_norm.weight": None}, "midlayer.hidden_norm.weight is missing"),
    ({"midlayer.self_attn.q_norm.weight": torch.ones(8)}, "q_norm.weight is unknown"),
    ({"midlayer.self_attn.kv_a_proj_with_mqa.weight": torch.ones(8, 8)}, "MLA"),
    ({"midlayer.self_attn.q_proj.bias": torch.ones(32)}, "biases are not supported"),
    ({"fc.bias": torch.ones(HIDDEN)}, "fc.bias: biases"),
    ({"fc_norm.0.weight": torch.ones(HIDDEN)}, "EAGLE-3.1"),
    ({"layers.1.mlp.up_proj.weight": torch.ones(24, HIDDEN)}, "only one decoder layer"),
    ({"layers.0.mlp.up_proj.weight": torch.ones(24, HIDDEN)}, "are the same tensor"),
    ({"midlayer.self_attn.q_proj.weight": torch.ones(32, HIDDEN)}, r"q_proj.weight is \[32, 16\], the config makes it \[32, 32\]"),
    ({"norm.weight": torch.ones(HIDDEN, dtype=torch.int8)}, "norm.weight is I8: quantised"),
]


@pytest.mark.parametrize(("tensors", "told"), REFUSED_TENSORS, ids=[told for _, told in REFUSED_TENSORS])
def test_tensors_that_do_not_add_up_are_refused_by_name(tmp_path: Path, tensors: dict, told: str) -> None:
    with pytest.raises(EyasError, match=told):
        read_drafter(str(foreign_folder(tmp_path, tensors)))


@pytest.mark.parametrize(("name", "told"), [("pytorch_model.bin", "pickle"), ("training_state.pt", "pickle"), ("README.md", "has no")])
def test_a_folder_without_safetensors_is_refused_and_nothing_is_unpickled(tmp_path: Path, name: str, told: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(foreign_config()))
    (tmp_path / name).write_bytes(b"cos\nsystem\n(S'exit 1'\ntR.")
    with pytest.raises(EyasError, match=told):
        read_drafter(str(tmp_path))


def test_broken_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(EyasError, match="does not exist; a drafter on the hub is written hub:"):
        read_drafter(str(tmp_path / "nowhere"))
    with pytest.raises(EyasError, match=r"config\.json does not exist"):
        read_drafter(str(tmp_path))
    foreign_folder(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not safetensors at all")
    with pytest.raises(EyasError, match=r"model\.safetensors: not a safetensors file"):
        read_drafter(str(tmp_path))


def test_a_hub_that_does_not_answer_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(EyasError, match="the hub does not give owner/no-such-drafter"):
        read_drafter("hub:owner/no-such-drafter")
    with pytest.raises(EyasError, match="is no hub id"):
        read_drafter("hub:justaname")
