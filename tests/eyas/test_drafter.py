"""The drafter network against the formulas, written the slow way."""

import copy
import math

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from eyas.drafter import Drafter, DrafterShape, RMSNorm, rope_table, rotate

SHAPE = DrafterShape(
    hidden_size=12,
    intermediate_size=20,
    num_heads=4,
    num_kv_heads=2,
    head_dim=6,
    vocab_size=31,
    draft_vocab_size=9,
    rms_norm_eps=1e-5,
    rope_theta=500.0,
    max_position=64,
)
ROPES = {
    "default": None,
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 32.0, "beta_slow": 1.0},
    "yarn with magnitudes": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "mscale": 1.0,
        "mscale_all_dim": 0.5,
    },
}


def random_drafter(dtype: torch.dtype = torch.float64, shape: DrafterShape = SHAPE) -> Drafter:
    torch.manual_seed(3)
    drafter = Drafter(shape)
    for weight in drafter.parameters():
        torch.nn.init.normal_(weight, std=0.4)
    drafter.to(dtype)
    drafter.set_embedding(torch.randn(shape.vocab_size, shape.hidden_size, dtype=dtype))
    return drafter.requires_grad_(False)


def norm(x: list[float], weight: Tensor) -> list[float]:
    root = math.sqrt(sum(value * value for value in x) / len(x) + SHAPE.rms_norm_eps)
    return [value / root * float(w) for value, w in zip(x, weight, strict=True)]


def times(weight: Tensor, x: list[float]) -> list[float]:
    return [sum(float(w) * value for w, value in zip(row, x, strict=True)) for row in weight]


def turned(head: list[float], position: int) -> list[float]:
    half = len(head) // 2
    out = list(head)
    for i in range(half):
        angle = position / SHAPE.rope_theta ** (2 * i / len(head))
        out[i] = head[i] * math.cos(angle) - head[i + half] * math.sin(angle)
        out[i + half] = head[i + half] * math.cos(angle) + head[i] * math.sin(angle)
    return out


def heads_of(flat: list[float], position: int | None) -> list[list[float]]:
    heads = [flat[i : i + SHAPE.head_dim] for i in range(0, len(flat), SHAPE.head_dim)]
    return heads if position is None else [turned(head, position) for head in heads]


def slow_step(drafter: Drafter, tokens: list[int], hidden: list[list[float]], start: int) -> tuple[list[float], list[float]]:
    """Last position's next hidden state and logits, by the formulas of EAGLE-3, one number at a time."""
    layer, attention = drafter.midlayer, drafter.midlayer.self_attn
    keys, values, query = [], [], []
    for place, (token, state) in enumerate(zip(tokens, hidden, strict=True)):
        x = norm(drafter.embedding_VH[token].tolist(), layer.input_layernorm.weight) + norm(state, layer.hidden_norm.weight)
        query = heads_of(times(attention.q_proj.weight, x), start + place)
        keys.append(heads_of(times(attention.k_proj.weight, x), start + place))
        values.append(heads_of(times(attention.v_proj.weight, x), None))
    attended: list[float] = []
    for head, q in enumerate(query):
        shared = head // (SHAPE.num_heads // SHAPE.num_kv_heads)
        scores = [math.exp(sum(a * b for a, b in zip(q, k[shared], strict=True)) / math.sqrt(SHAPE.head_dim)) for k in keys]
        attended += [sum(s * v[shared][i] for s, v in zip(scores, values, strict=True)) / sum(scores) for i in range(SHAPE.head_dim)]
    middle = [a + b for a, b in zip(hidden[-1], times(attention.o_proj.weight, attended), strict=True)]
    normed = norm(middle, layer.post_attention_layernorm.weight)
    gates, ups = times(layer.mlp.gate_proj.weight, normed), times(layer.mlp.up_proj.weight, normed)
    inner = [g / (1 + math.exp(-g)) * u for g, u in zip(gates, ups, strict=True)]
    last = [a + b for a, b in zip(middle, times(layer.mlp.down_proj.weight, inner), strict=True)]
    return last, times(drafter.lm_head.weight, norm(last, drafter.norm.weight))


def fast_step(drafter: Drafter, tokens: Tensor, hidden_NH: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    x = drafter.layer_input(tokens, hidden_NH)
    q, k, v = drafter.queries_keys_values(x, positions)
    attention = torch.nn.functional.scaled_dot_product_attention(
        q[-1:].transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), scale=drafter.shape.scale, enable_gqa=True
    )
    last = drafter.finish(attention.transpose(0, 1), hidden_NH[-1:])
    return last[0], drafter.logits(last)[0]


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_equals_the_formulas_computed_number_by_number(fused: bool) -> None:
    drafter = random_drafter()
    if fused:
        drafter.fuse()
    hidden_NH = torch.randn(5, 12, dtype=torch.float64)
    tokens = [3, 30, 0, 7, 11]
    last, logits = fast_step(drafter, torch.tensor(tokens), hidden_NH, torch.arange(20, 25))
    slow_last, slow_logits = slow_step(drafter, tokens, hidden_NH.tolist(), 20)
    # the rotary table is float32, the rest float64
    assert torch.allclose(last, torch.tensor(slow_last, dtype=torch.float64), rtol=0, atol=2e-6)
    assert torch.allclose(logits, torch.tensor(slow_logits, dtype=torch.float64), rtol=0, atol=2e-6)


def test_combine_is_one_matrix_over_the_concatenated_states() -> None:
    drafter = random_drafter()
    aux = torch.randn(2, 3, 12, dtype=torch.float64)
    by_hand = sum(aux[:, i] @ drafter.fc.weight[:, 12 * i : 12 * i + 12].T for i in range(3))
    assert torch.allclose(drafter.combine(aux.flatten(1)), by_hand, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ROPES)
def test_rotary_positions_are_those_of_transformers(name: str) -> None:
    shape = SHAPE.model_copy(update={"rope_scaling": ROPES[name], "head_dim": 16, "max_position": 128})
    config = LlamaConfig(
        hidden_size=64,
        num_attention_heads=4,
        head_dim=16,
        max_position_embeddings=128,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0, **(ROPES[name] or {})},
    )
    q_TQd = torch.randn(128, 4, 16)
    cosines, sines = LlamaRotaryEmbedding(config)(q_TQd, torch.arange(128)[None])
    expected, _ = apply_rotary_pos_emb(q_TQd[None].transpose(1, 2), q_TQd[None].transpose(1, 2), cosines, sines)
    assert torch.allclose(rotate(q_TQd, rope_table(shape)[torch.arange(128)]), expected[0].transpose(0, 1), rtol=0, atol=1e-5)


def test_linear_scaling_and_theta_change_the_rotation() -> None:
    tables = [rope_table(SHAPE), rope_table(SHAPE.model_copy(update={"rope_theta": 1000.0}))]
    tables.append(rope_table(SHAPE.model_copy(update={"rope_scaling": ROPES["linear"]})))
    assert not torch.allclose(tables[0], tables[1])
    assert torch.allclose(tables[2][4], tables[0][1])


def test_leading_dimensions_are_free() -> None:
    drafter = random_drafter(torch.float32)
    tokens, hidden, positions = torch.randint(0, 31, (6,)), torch.randn(6, 12), torch.arange(6)
    flat = drafter.layer_input(tokens, hidden)
    folded = drafter.layer_input(tokens.view(2, 3), hidden.view(2, 3, 12))
    assert torch.allclose(folded.view(6, 24), flat)
    keys, values = drafter.keys_values(folded, positions.view(2, 3))
    assert keys.shape == values.shape == (2, 3, 2, 6)
    assert torch.allclose(keys.view(6, 2, 6), drafter.keys_values(flat, positions)[0], atol=1e-6)
    assert torch.allclose(drafter.queries(folded, positions.view(2, 3)).view(6, 4, 6), drafter.queries(flat, positions), atol=1e-6)


def test_fusing_changes_no_bit_of_the_weights_and_nothing_but_rounding_in_the_outputs() -> None:
    drafter = random_drafter(torch.float32)
    fused = copy.deepcopy(drafter).fuse()
    assert all(torch.equal(a, b) for a, b in zip(drafter.state_dict().values(), fused.state_dict().values(), strict=True))
    inputs = (torch.randint(0, 31, (5,)), torch.randn(5, 12), torch.arange(5))
    for plain, packed in zip(fast_step(drafter, *inputs), fast_step(fused, *inputs), strict=True):
        assert torch.allclose(plain, packed, rtol=1e-5, atol=1e-5)


def test_new_weights_reach_a_fused_drafter_whether_loaded_or_converted() -> None:
    drafter, other = random_drafter(torch.float32).fuse(), random_drafter(torch.float32)
    inputs = (torch.randint(0, 31, (5,)), torch.randn(5, 12), torch.arange(5))
    for weight in other.parameters():
        weight.mul_(1.5)
    drafter.load_state_dict(other.state_dict())
    drafter.set_embedding(other.embedding_VH)
    assert torch.allclose(fast_step(drafter, *inputs)[1], fast_step(other, *inputs)[1], rtol=1e-4, atol=1e-4)
    drafter.double()
    drafter.midlayer.self_attn.q_proj.weight.data.zero_()
    x = drafter.layer_input(inputs[0], inputs[1].double())
    assert not drafter.queries_keys_values(x, inputs[2])[0].any()


def test_rms_norm_rounds_once_from_float32() -> None:
    layer = RMSNorm(256, 1e-6)
    layer.weight.data = torch.rand(256) + 0.5
    x = torch.randn(4, 256, dtype=torch.bfloat16) * 30
    exact = x.double() / (x.double().pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * layer.weight.double()
    assert torch.equal(layer(x), exact.float().to(torch.bfloat16))


def test_the_embedding_is_neither_saved_nor_trained_and_takes_the_dtype_of_the_states() -> None:
    drafter = random_drafter(torch.float32)
    drafter.set_embedding(torch.randn(31, 12, dtype=torch.bfloat16, requires_grad=True))
    assert drafter.embedding_VH is not None
    assert not drafter.embedding_VH.requires_grad
    assert "embedding_VH" not in drafter.state_dict()
    assert drafter.layer_input(torch.tensor([1]), torch.randn(1, 12)).dtype == torch.float32
    with pytest.raises(ValueError, match="31, 12"):
        drafter.set_embedding(torch.zeros(30, 12))


def test_gradients_reach_every_weight() -> None:
    drafter = random_drafter(torch.float32).requires_grad_(True)
    x = drafter.combine(torch.randn(5, 36))
    _, logits = fast_step(drafter, torch.tensor([1, 2, 3, 4, 5]), x, torch.arange(5))
    logits.square().sum().backward()
    assert all(weight.grad is not None and weight.grad.abs().sum() > 0 for weight in drafter.parameters())


def test_draft_ids_are_row_numbers_plus_d2t() -> None:
    drafter = random_drafter()
    drafter.d2t.copy_(torch.tensor([0, 0, 3, 3, 3, 10, 10, 10, 22]))
    assert drafter.draft_ids_D.tolist() == [0, 1, 5, 6, 7, 15, 16, 17, 30]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"num_kv_heads": 3}, "no multiple"),
        ({"head_dim": 5}, "odd"),
        ({"draft_vocab_size": 32}, "above vocab_size"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "'dynamic' is not supported"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "original_max_position_embeddings is missing"),
        ({"rope_scaling": {**ROPES["yarn"], "attention_factor": 1.2}}, "attention_factor is not supported"),
        ({"rope_scaling": {**ROPES["yarn"], "mscale": 1.0}}, "only count together"),
    ],
)
def test_impossible_shapes_are_refused(change: dict, told: str) -> None:
    with pytest.raises(ValidationError, match=told):
        DrafterShape(**{**SHAPE.model_dump(), **change})
