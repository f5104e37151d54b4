"""A fresh drafter begins as the target's own last layer."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, LlamaConfig, LlamaForCausalLM

from eyas.drafter import rope_table
from eyas.errors import EyasError
from eyas.folder import read_drafter
from eyas.initial import fresh_drafter, with_positions, with_vocab
from eyas.target import Target
from eyas.vocab import reselect

IDS = torch.tensor([0, 3, 4, 20, 36])
STARTER = Path(__file__).parents[2] / "checkpoints" / "starter-smollm2"
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}


def llama(place: Path, **changes: object) -> Target:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=37,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        rope_parameters={"rope_theta": 500.0, **LLAMA3},
        **changes,
    )
    model = LlamaForCausalLM(config)
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    model.save_pretrained(place)
    return Target(place, "tiny")


@pytest.mark.parametrize("tied", [False, True])
def test_it_does_to_the_high_aux_state_what_the_targets_last_layer_does(tmp_path: Path, tied: bool) -> None:
    target = llama(tmp_path, tie_word_embeddings=tied)
    model = target.load_model(torch.float32, "cpu")
    drafter = fresh_drafter(target, IDS, (1, 2, 3))
    drafter.set_embedding(target.embedding(torch.float32))
    states = model(torch.arange(7)[None], output_hidden_states=True)
    aux = torch.cat([states.hidden_states[k][0] for k in (1, 2, 3)], -1)
    with torch.no_grad():
        hidden = drafter.combine(aux)
        q, k, v = drafter.queries_keys_values(drafter.layer_input(torch.arange(7) + 5, hidden), torch.arange(7))
        attention = torch.nn.functional.scaled_dot_product_attention(
            q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), is_causal=True, scale=drafter.shape.scale, enable_gqa=True
        )
        logits = drafter.logits(drafter.finish(attention.transpose(0, 1), hidden))
    # hidden_states[3] is the input of the last of four layers, so the drafter is the rest of the target
    assert torch.allclose(logits, states.logits[0][:, IDS], rtol=1e-4, atol=1e-4)


def test_the_draft_vocabulary_is_as_asked(tmp_path: Path) -> None:
    drafter = fresh_drafter(llama(tmp_path), IDS, (1, 2, 3))
    assert torch.equal(drafter.draft_ids_D, IDS)
    assert drafter.t2d.nonzero().flatten().tolist() == IDS.tolist()


def test_another_draft_vocabulary_changes_no_logit_of_a_token_that_stays(tmp_path: Path) -> None:
    target = llama(tmp_path)
    old = fresh_drafter(target, IDS, (1, 2, 3))
    torch.nn.init.normal_(old.lm_head.weight)
    torch.nn.init.normal_(old.fc.weight)
    chosen = torch.tensor([2, 3, 20, 30])
    new = with_vocab(old, chosen, target)
    hidden = torch.randn(6, 16)
    expected = old.logits(hidden)
    found = new.logits(hidden)
    assert torch.equal(new.draft_ids_D, chosen)
    torch.testing.assert_close(found[:, [1, 2]], expected[:, [1, 3]])
    fresh = reselect(old.lm_head.weight, old.draft_ids_D, torch.tensor([2, 30]), target.lm_head(torch.float32))
    torch.testing.assert_close(found[:, [0, 3]], torch.nn.functional.linear(new.norm(hidden), fresh))
    assert torch.equal(new.fc.weight, old.fc.weight)
    assert torch.equal(new.midlayer.mlp.down_proj.weight, old.midlayer.mlp.down_proj.weight)
    assert new.t2d.nonzero().flatten().tolist() == chosen.tolist()


def test_the_starters_kept_rows_predict_the_same_bits_in_another_draft_vocabulary(smollm2: Path) -> None:
    target, old = Target(smollm2, "smollm2"), read_drafter(STARTER).drafter
    generator = torch.Generator().manual_seed(0)
    others_N = (~old.t2d).nonzero()[:, 0]
    chosen_E = torch.cat([old.draft_ids_D[::2], others_N[torch.randperm(len(others_N), generator=generator)[:3000]]]).sort().values
    new = with_vocab(old, chosen_E, target)
    kept = torch.isin(chosen_E, old.draft_ids_D)
    rows_K = torch.searchsorted(old.draft_ids_D, chosen_E[kept])
    assert kept.sum() == len(old.draft_ids_D[::2])
    normed = old.norm(torch.randn(50, 576, generator=generator))
    said = [torch.nn.functional.linear(normed, rows) for rows in (old.lm_head.weight[rows_K], new.lm_head.weight[kept])]
    assert torch.equal(*said)
    before, after = dict(old.named_parameters()), dict(new.named_parameters())
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before if name != "lm_head.weight")


def test_more_positions_change_no_weight_and_no_factor_of_a_position_that_was_there(tmp_path: Path) -> None:
    drafter = fresh_drafter(llama(tmp_path), IDS, (1, 2, 3))
    longer = with_positions(drafter, 200)
    assert longer.shape == drafter.shape.model_copy(update={"max_position": 200})
    assert all(torch.equal(tensor, longer.state_dict()[name]) for name, tensor in drafter.state_dict().items())
    assert torch.equal(rope_table(longer.shape)[:64], rope_table(drafter.shape))


def test_another_mlp_size_begins_at_random_and_the_rest_as_the_target(tmp_path: Path) -> None:
    target = llama(tmp_path)
    drafter = fresh_drafter(target, IDS, (1, 2, 3), intermediate_size=40)
    last = target.layer_tensors(3, torch.float32)
    assert drafter.midlayer.mlp.up_proj.weight.shape == (40, 16)
    assert 0.01 < drafter.midlayer.mlp.up_proj.weight.std().item() < 0.03
    assert torch.equal(drafter.midlayer.self_attn.o_proj.weight, last["self_attn.o_proj.weight"])


def test_random_parts_follow_the_seed(tmp_path: Path) -> None:
    target = llama(tmp_path)
    weights = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        weights.append(fresh_drafter(target, IDS, (1, 2, 3), intermediate_size=40).midlayer.mlp.up_proj.weight)
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_a_target_with_mla_and_experts_gives_head_norms_and_shape(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = DeepseekV3Config(
        vocab_size=37,
        hidden_size=16,
        intermediate_size=24,
        moe_intermediate_size=8,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=2,
        n_routed_experts=4,
        n_group=1,
        topk_group=1,
        num_experts_per_tok=2,
        kv_lora_rank=8,
        q_lora_rank=8,
        qk_rope_head_dim=4,
        qk_nope_head_dim=8,
        v_head_dim=8,
        first_k_dense_replace=1,
        tie_word_embeddings=False,
    )
    DeepseekV3ForCausalLM(config).save_pretrained(tmp_path)
    target = Target(tmp_path, "tiny-mla")
    drafter = fresh_drafter(target, IDS, (0, 1, 2))
    assert torch.equal(drafter.lm_head.weight, target.lm_head(torch.float32)[IDS])
    assert drafter.midlayer.self_attn.q_proj.weight.shape == (2 * 8, 32)
    assert all(bool(weight.isfinite().all()) for weight in drafter.parameters())


@pytest.mark.parametrize("unusual", [{"rope_type": "dynamic"}, {"rope_type": "yarn", "truncate": False}])
def test_a_target_with_positions_that_no_drafter_can_have_gives_plain_ones(tmp_path: Path, unusual: dict) -> None:
    target = llama(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    rope = {"rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 32, **unusual}
    (tmp_path / "config.json").write_text(json.dumps({**config, "rope_parameters": rope}))
    assert fresh_drafter(target, IDS, (1, 2, 3)).shape.rope_scaling is not None
    shape = fresh_drafter(Target(tmp_path, "tiny"), IDS, (1, 2, 3)).shape
    assert (shape.rope_theta, shape.rope_scaling) == (500.0, None)


def test_weights_that_lie_quantised_beside_their_scales_are_not_taken_for_numbers(tmp_path: Path) -> None:
    llama(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    up, down = (f"model.layers.3.mlp.{name}_proj.weight" for name in ("up", "down"))
    weights[up] = (weights[up] * 400).to(torch.float8_e4m3fn)
    weights[f"{up}_scale_inv"] = torch.full((1, 1), 1 / 400)
    save_file(weights, tmp_path / "model.safetensors")
    mlp = fresh_drafter(Target(tmp_path, "fp8"), IDS, (1, 2, 3)).midlayer.mlp
    assert 0.01 < mlp.up_proj.weight.std().item() < 0.03
    assert not torch.equal(mlp.down_proj.weight, weights[down])  # a MLP is taken over whole or not at all


def test_a_token_outside_the_vocabulary_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EyasError, match="has token 37"):
        fresh_drafter(llama(tmp_path), torch.tensor([1, 37]), (1, 2, 3))
