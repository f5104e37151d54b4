import pytest
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from eyas.attention_hf import FEW_QUERIES, NAME, attention_forward, grouped_attention
from eyas.errors import EyasError

B, H, K, D, T = 2, 6, 2, 8, 40


def naive(query, key, value, allowed, scale):
    """Softmax of q.k over the allowed keys, head by head, in float64."""
    output = torch.zeros(B, query.shape[2], H, D, dtype=torch.float64)
    for b in range(B):
        for h in range(H):
            for m in range(query.shape[2]):
                keys, values = key[b, h // (H // K)].double(), value[b, h // (H // K)].double()
                scores = (keys @ query[b, h, m].double()) * scale
                weights = scores.masked_fill(~allowed[b, m], float("-inf")).softmax(0)
                output[b, m, h] = weights @ values
    return output


def inputs(queries):
    torch.manual_seed(0)
    return torch.randn(B, H, queries, D), torch.randn(B, K, T, D), torch.randn(B, K, T, D)


def causal(queries):
    return torch.ones(queries, T, dtype=torch.bool).tril(T - queries).expand(B, -1, -1)


@pytest.mark.parametrize("queries", [1, 5])
def test_queries_without_a_mask_are_the_last_positions_and_look_back(queries):
    query, key, value = inputs(queries)
    expected = naive(query, key, value, causal(queries), 0.3)
    torch.testing.assert_close(grouped_attention(query, key, value, None, 0.3).double(), expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("additive", [False, True])
def test_a_mask_hides_keys_sequence_by_sequence(additive):
    query, key, value = inputs(3)
    allowed = torch.rand(B, 3, T) < 0.5
    mask = allowed[:, None]
    if additive:
        mask = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    expected = naive(query, key, value, allowed, 0.3)
    torch.testing.assert_close(grouped_attention(query, key, value, mask, 0.3).double(), expected, atol=1e-6, rtol=1e-5)


def test_many_queries_over_a_longer_cache_look_back_from_the_last_positions():
    query, key, value = inputs(FEW_QUERIES + 1)
    output, _ = attention_forward(torch.nn.Module(), query, key, value, None, scaling=0.3)
    torch.testing.assert_close(output.double(), naive(query, key, value, causal(FEW_QUERIES + 1), 0.3), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("name", ["softcap", "s_aux", "position_bias"])
def test_mathematics_that_it_lacks_is_refused(name):
    query, key, value = inputs(1)
    with pytest.raises(EyasError, match=name):
        attention_forward(torch.nn.Module(), query, key, value, None, **{name: torch.ones(1)})


@pytest.fixture
def models():
    config = LlamaConfig(
        vocab_size=50, hidden_size=48, intermediate_size=64, num_hidden_layers=3, num_attention_heads=H, num_key_value_heads=K
    )
    torch.manual_seed(0)
    eager = LlamaForCausalLM._from_config(config, attn_implementation="eager").eval()
    grouped = LlamaForCausalLM._from_config(config, attn_implementation=NAME).eval()
    grouped.load_state_dict(eager.state_dict())
    return eager, grouped


@torch.no_grad()
def test_a_model_fed_in_pieces_of_any_length_gives_eager_logits(models):
    eager, grouped = models
    ids = torch.randint(50, (2, 60))
    cache = DynamicCache(config=grouped.config)
    pieces = [grouped(part, past_key_values=cache).logits for part in ids.split([20, 1, 4, 30, 1, 4], dim=1)]
    torch.testing.assert_close(torch.cat(pieces, dim=1), eager(ids).logits, atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_padding_masks_work_as_in_eager_attention(models):
    eager, grouped = models
    ids, mask = torch.randint(50, (2, 30)), torch.ones(2, 30, dtype=torch.long)
    mask[0, :7] = 0
    expected, found = eager(ids, attention_mask=mask).logits, grouped(ids, attention_mask=mask).logits
    torch.testing.assert_close(found[0, 7:], expected[0, 7:], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(found[1], expected[1], atol=1e-5, rtol=1e-4)
