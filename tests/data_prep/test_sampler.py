import pytest
import torch
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, MistralConfig, MistralForCausalLM

from data_prep.sampler import Request, Sampling, choose, is_looping, sample
from eyas.attention_hf import NAME
from eyas.errors import EyasError

GREEDY = Sampling((0.0,), 1.0, seed=0)
WARM = Sampling((0.9,), 1.0, seed=0)


@pytest.fixture
def model(tiny):
    return tiny.load_model(torch.float32, "cpu", NAME)


@pytest.fixture
def requests(tiny):
    """Prompts of many lengths and limits, so that slots end and refill at different times."""
    generator = torch.Generator().manual_seed(0)
    lengths = [2, 90, 5, 33, 70, 17, 4, 51, 12]
    return [
        Request(f"prompt-{length}", torch.randint(tiny.shape.vocab_size, (length,), generator=generator).tolist(), 3 + length % 11)
        for length in lengths
    ]


def answers(model, requests, sampling, slots, stop_ids=()):
    return {reply.key: reply for reply in sample(model, requests, sampling, slots=slots, stop_ids=stop_ids)}


@torch.no_grad()
def recomputed(model, request):
    """The greedy reply, each token from a fresh forward over everything before it."""
    ids = list(request.prompt_ids)
    for _ in range(request.max_new_tokens):
        ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[len(request.prompt_ids) :]


def test_greedy_replies_equal_recomputation_without_a_cache(model, requests):
    found = answers(model, requests, GREEDY, slots=3)
    assert {key: reply.ids for key, reply in found.items()} == {request.key: recomputed(model, request) for request in requests}


def test_targets_with_latent_attention_are_sampled_right(requests):
    torch.manual_seed(0)
    config = DeepseekV3Config(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        n_routed_experts=4,
        n_group=1,
        topk_group=1,
        num_experts_per_tok=2,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=12,
        initializer_range=0.3,
    )
    model = DeepseekV3ForCausalLM._from_config(config, attn_implementation=NAME).eval()
    found = answers(model, requests[:5], GREEDY, slots=2)
    assert {key: reply.ids for key, reply in found.items()} == {request.key: recomputed(model, request) for request in requests[:5]}


@pytest.mark.parametrize("slots", [1, 4, 64])
def test_a_sampled_reply_does_not_depend_on_the_batch(model, requests, slots):
    assert answers(model, requests, WARM, slots) == answers(model, list(reversed(requests)), WARM, 2)


def test_seed_stream_and_key_each_change_the_draws(requests):
    first, second = requests[1], Request("other", requests[1].prompt_ids, requests[1].max_new_tokens)
    draws = WARM.draws(first)
    assert torch.equal(draws, WARM.draws(first))
    for other in (Sampling((0.9,), 1.0, 1).draws(first), Sampling((0.9,), 1.0, 0, "sampled").draws(first), WARM.draws(second)):
        assert not torch.equal(draws, other)


def test_an_end_token_ends_the_reply_and_belongs_to_it(model, requests):
    free = answers(model, requests, WARM, 3)
    stop = free["prompt-90"].ids[1]
    for key, reply in answers(model, requests, WARM, 3, stop_ids=[stop]).items():
        cut = free[key].ids.index(stop) + 1 if stop in free[key].ids else None
        assert (reply.ids, reply.finished) == (free[key].ids[:cut], cut is not None)


def test_every_step_is_full_while_prompts_wait_and_has_no_idle_rows_afterwards(model, requests):
    sizes = []
    model.register_forward_pre_hook(lambda _, __, named: sizes.append(len(named["input_ids"])), with_kwargs=True)
    total = sum(len(reply.ids) for reply in sample(model, requests, WARM, slots=3, stop_ids=()))
    assert sum(sizes) == total  # one row computed is one token generated
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] == 3


def test_sliding_windows_are_refused(requests):
    shape = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = MistralConfig(**shape, num_key_value_heads=2, sliding_window=16)
    model = MistralForCausalLM._from_config(config, attn_implementation=NAME).eval()
    with pytest.raises(EyasError, match="full attention"):
        answers(model, requests, GREEDY, 2)


def test_evenly_spread_draws_give_the_softmax_at_the_temperature():
    logits_1V, count = torch.randn(1, 50, generator=torch.Generator().manual_seed(0)) * 2, 20000
    draws = (torch.arange(count) + 0.5) / count
    tokens = choose(logits_1V.expand(count, -1), torch.full((count,), 0.7), 1.0, draws)
    expected = (logits_1V[0].double() / 0.7).softmax(0)
    torch.testing.assert_close(tokens.bincount(minlength=50).double() / count, expected, atol=1e-4, rtol=0)


def test_a_token_of_probability_zero_is_never_chosen():
    logits = torch.full((2, 1000), float("-inf"))
    logits[:, 400:500] = torch.randn(100)
    draws = torch.tensor([0.0, torch.nextafter(torch.tensor(1.0), torch.tensor(0.0))])
    first, last = choose(logits, torch.ones(2), 1.0, draws).tolist()
    assert (first, last) == (400, 499)


@pytest.mark.parametrize(("spread", "top_p"), [(8.0, 0.8), (0.1, 0.95)])  # few tokens, and more than the first look takes
def test_top_p_keeps_the_smallest_set_of_that_mass(spread, top_p):
    torch.manual_seed(0)
    logits_V, count = torch.randn(600) * spread, 50000
    order = logits_V.double().softmax(0).sort(descending=True)
    kept = order.indices[: int((order.values.cumsum(0) < top_p).sum()) + 1]
    draws = (torch.arange(count) + 0.5) / count
    tokens = choose(logits_V.expand(count, -1), torch.ones(count), top_p, draws)
    assert set(tokens.tolist()) == set(kept.tolist())


def test_a_text_that_repeats_itself_forever_is_a_loop():
    assert is_looping([5, 6, 7, *[1, 2, 3] * 20])
    assert is_looping([9] * 60)
    assert is_looping([*range(100), *list(range(20)) * 4])


def test_a_text_that_repeats_itself_a_little_is_no_loop():
    assert not is_looping(list(range(200)))
    assert not is_looping([9] * 20)
    assert not is_looping([*range(30), *range(30)])
    assert not is_looping([*[1, 2, 3] * 20, 4])


def test_a_request_keeps_its_own_temperature_among_others(model, requests):
    mixed = Sampling((0.0, 0.9), 1.0, seed=0)
    alone = {True: answers(model, requests, GREEDY, 3), False: answers(model, requests, WARM, 3)}
    together = answers(model, requests, mixed, 3)
    greedy = {request.key: mixed.temperature(request) == 0 for request in requests}
    assert set(greedy.values()) == {True, False}
    assert together == {key: alone[greedy[key]][key] for key in together}
