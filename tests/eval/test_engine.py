"""The embedded engine: speculation changes nothing but speed, and its drafts are those that the formulas give."""

import math
from collections import Counter
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor
from transformers import LlamaConfig, PreTrainedModel

from eval.acceptance_rule import AcceptanceRule, RejectionRule, Rule, RuleName
from eval.engine import Draft, DraftChain, Engine, Generation, Request, TargetRunner, decode
from eval.kv_cache import cache_for
from eyas.drafter import Drafter
from eyas.errors import EyasError
from eyas.folder import DrafterFolder
from eyas.target import Target
from tests.eval.tiny import LAYERS, tiny_drafter, tiny_folder, tiny_target

STEPS = 3


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return tiny_target(tmp_path_factory.mktemp("target"), vocab_size=12)


@pytest.fixture(scope="module")
def engine(target: Target) -> Engine:
    drafters = {"full": tiny_folder(target), "reduced": tiny_folder(target, 8, seed=2)}
    return Engine(target, drafters, torch.float32, context=128, draft_steps=STEPS)


def prompts(count: int, vocab_size: int = 12) -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(1, vocab_size, (3 + 2 * index,), generator=generator).tolist() for index in range(count)]


def test_greedy_speculation_emits_the_baselines_tokens(engine: Engine) -> None:
    accepted: Counter[int] = Counter()
    for prompt in prompts(12):
        baseline = engine.generate(prompt, 60)
        for drafter in engine.drafters:
            speculative = engine.generate(prompt, 60, drafter=drafter)
            assert speculative.output_ids == baseline.output_ids
            assert speculative.finish_reason == baseline.finish_reason
            accepted.update(speculative.accepted)
    assert set(accepted) == {0, 1, 2, 3}  # the test has seen every length of accepted run


def test_baseline_emits_what_transformers_generates_greedily(engine: Engine, target: Target) -> None:
    model = target.load_model(torch.float32, "cpu", "eager")
    for prompt in prompts(6):
        expected = model.generate(torch.tensor([prompt]), max_new_tokens=40, do_sample=False, pad_token_id=0)[0, len(prompt) :].tolist()
        assert engine.generate(prompt, 40).output_ids == expected


def test_counts_add_up_to_the_emitted_tokens(engine: Engine) -> None:
    for prompt, limit in product(prompts(6), (1, 2, 5, 17)):
        done = engine.generate(prompt, limit, drafter="full", stop_ids=())
        assert len(done.output_ids) == limit
        assert done.verify_ct == len(done.accepted)
        assert 1 + sum(done.accepted) + done.verify_ct - done.trimmed == limit
        assert done.counts.get("verify", 0) == done.verify_ct
        assert done.counts.get("draft", 0) == (STEPS - 1) * done.verify_ct
        assert done.counts.get("extend", 0) == max(done.verify_ct - 1, 0)
        assert sum(done.seconds.values()) == pytest.approx(done.first_token_s + done.decode_s)


def test_baseline_counts_decode_steps_and_no_verify_cycles(engine: Engine) -> None:
    done = engine.generate([3, 4], 9, stop_ids=())
    assert (done.verify_ct, done.accepted, done.trimmed, done.counts["decode"]) == (0, [], 0, 8)


def test_a_stop_token_inside_an_accepted_run_ends_the_reply_there(engine: Engine) -> None:
    cut = 0
    for prompt in prompts(4):
        whole = engine.generate(prompt, 30, stop_ids=())
        for stop in range(12):
            speculative = engine.generate(prompt, 30, drafter="full", stop_ids=[stop])
            if stop in whole.output_ids:
                end = whole.output_ids.index(stop) + 1
                assert (speculative.output_ids, speculative.finish_reason) == (whole.output_ids[:end], "stop")
            else:
                assert (speculative.output_ids, speculative.finish_reason) == (whole.output_ids, "length")
            cut += speculative.trimmed > 0
    assert cut  # some stop was followed by more accepted tokens, which were dropped


def test_the_targets_own_end_token_is_the_default_stop(engine: Engine) -> None:
    done = [engine.generate(prompt, 100, temperature=2.0, seed=index, drafter="full") for index, prompt in enumerate(prompts(12))]
    assert any(one.finish_reason == "stop" for one in done)
    assert all((one.output_ids[-1] == 0) == (one.finish_reason == "stop") and 0 not in one.output_ids[:-1] for one in done)


def test_the_context_ends_a_reply_and_changes_no_token(target: Target) -> None:
    folder = tiny_folder(target)
    long = Engine(target, {"d": folder}, torch.float32, context=200, draft_steps=STEPS)
    short = Engine(target, {"d": tiny_folder(target)}, torch.float32, context=20, draft_steps=STEPS)
    for prompt in prompts(6):
        for drafter in (None, "d"):
            done = short.generate(prompt, 1000, drafter=drafter, stop_ids=())
            assert len(prompt) + len(done.output_ids) == 20
            assert done.output_ids == long.generate(prompt, 20 - len(prompt), stop_ids=()).output_ids


def test_a_context_as_long_as_the_models_positions_works_to_its_last_token(target: Target) -> None:
    engine = Engine(target, {"d": tiny_folder(target)}, torch.float32, context=256, draft_steps=5)
    prompt = prompts(1)[0]
    speculative = engine.generate(prompt, 1000, drafter="d", stop_ids=())
    assert len(prompt) + len(speculative.output_ids) == 256
    assert speculative.output_ids == engine.generate(prompt, 1000, stop_ids=()).output_ids


def test_one_draft_a_cycle_works(target: Target) -> None:
    engine = Engine(target, {"d": tiny_folder(target)}, torch.float32, context=64, draft_steps=1)
    speculative = engine.generate([5, 6, 7], 40, drafter="d", stop_ids=())
    assert speculative.output_ids == engine.generate([5, 6, 7], 40, stop_ids=()).output_ids
    assert set(speculative.accepted) == {0, 1}


def test_a_request_leaves_nothing_behind_for_the_next(engine: Engine) -> None:
    first, second = prompts(4)[1], prompts(4)[3]
    alone = engine.generate(first, 30, drafter="full")
    engine.generate(second, 50, temperature=1.5, drafter="reduced")
    again = engine.generate(first, 30, drafter="full")
    assert (again.output_ids, again.accepted) == (alone.output_ids, alone.accepted)


def test_tokens_are_reported_as_they_come_and_an_exception_ends_decoding(engine: Engine) -> None:
    pieces: list[list[int]] = []
    done = engine.generate([3, 4, 5], 30, drafter="full", on_tokens=pieces.append)
    assert [token for piece in pieces for token in piece] == done.output_ids
    assert len(pieces) == done.verify_ct + 1

    def hang_up(new: list[int]) -> None:
        raise ConnectionError

    with pytest.raises(ConnectionError):
        engine.generate([3, 4, 5], 30, on_tokens=hang_up)
    assert engine.generate([3, 4, 5], 30, drafter="full").output_ids == done.output_ids


def test_the_seed_decides_what_is_sampled(engine: Engine) -> None:
    def sample(seed: int) -> Generation:
        return engine.generate([3, 4, 5], 30, temperature=1.0, seed=seed, drafter="full", stop_ids=())

    assert sample(1).output_ids == sample(1).output_ids
    assert sample(1).output_ids != sample(2).output_ids


@pytest.mark.parametrize("rule", ["sglang", "rejection"])
def test_sampled_speculation_has_the_targets_distribution(tmp_path: Path, rule: RuleName) -> None:
    """Whole replies of three tokens over four words, counted against the product of the target's own probabilities."""
    target = tiny_target(tmp_path, vocab_size=4, sharpness=0.12)
    engine = Engine(target, {"d": tiny_folder(target)}, torch.float32, context=32, draft_steps=2, rule=rule)
    prompt, temperature, draws = [2, 3, 1], 0.8, 1500
    expected = sequence_probabilities(target.load_model(torch.float32, "cpu", "eager"), prompt, 3, temperature)
    assert min(expected.values()) * draws > 5  # chi-square holds
    accepted: Counter[int] = Counter()
    for drafter in ("d", None):
        found: Counter[tuple[int, ...]] = Counter()
        for seed in range(draws):
            done = engine.generate(prompt, 3, temperature, seed, drafter, stop_ids=())
            found[tuple(done.output_ids)] += 1
            accepted.update(done.accepted)
        observed = [found[sequence] for sequence in expected]
        assert chisquare(observed, [draws * p for p in expected.values()]).pvalue > 1e-3
    assert set(accepted) == {0, 1, 2}


def sequence_probabilities(model: PreTrainedModel, prompt: list[int], length: int, temperature: float) -> dict[tuple[int, ...], float]:
    found = {}
    for tokens in product(range(4), repeat=length):
        with torch.no_grad():
            logits_TV = model(torch.tensor([[*prompt, *tokens]])).logits[0].double() / temperature
        logs_TV = logits_TV.log_softmax(-1)
        found[tokens] = math.exp(sum(float(logs_TV[len(prompt) - 1 + i, token]) for i, token in enumerate(tokens)))
    return found


def test_a_draft_is_accepted_with_the_targets_probability_of_it() -> None:
    p_V, draws = [0.55, 0.3, 0.1, 0.05], 20000
    logits_MV = torch.tensor([p_V, [0.25] * 4]).log() * 0.5  # at temperature 0.5 it is p
    for draft in range(4):
        rule = AcceptanceRule(0.5, seed=draft)
        first: Counter[int] = Counter()
        accepted = 0
        for _ in range(draws):
            tokens = rule.accept(logits_MV, torch.tensor([draft]))
            accepted += len(tokens) == 2
            first[tokens[0]] += 1
        assert abs(accepted / draws - p_V[draft]) < 4 * math.sqrt(p_V[draft] / draws)
        assert chisquare([first[token] for token in range(4)], [draws * p for p in p_V]).pvalue > 1e-3


def test_a_sampled_draft_is_accepted_as_far_as_the_distributions_agree() -> None:
    p_V, q_D, ids_D, draws = [0.55, 0.3, 0.1, 0.05], [0.2, 0.7, 0.1], torch.tensor([0, 1, 3]), 40000
    logits_MV = torch.tensor([p_V, [0.25] * 4]).log() * 0.5
    logits_1D = torch.tensor([q_D]).log() * 0.5
    rule = RejectionRule(0.5, 0, ids_D)
    drafted: Counter[int] = Counter()
    first: Counter[int] = Counter()
    accepted = 0
    for _ in range(draws):
        draft_1 = ids_D[rule.pick(logits_1D)]
        drafted[int(draft_1)] += 1
        tokens = rule.accept(logits_MV, draft_1)
        accepted += len(tokens) == 2
        first[tokens[0]] += 1
    agreed = min(0.55, 0.2) + min(0.3, 0.7) + min(0.05, 0.1)
    assert abs(accepted / draws - agreed) < 4 * math.sqrt(agreed / draws)
    assert chisquare([drafted[int(token)] for token in ids_D], [draws * q for q in q_D]).pvalue > 1e-3
    assert chisquare([first[token] for token in range(4)], [draws * p for p in p_V]).pvalue > 1e-3


class RecordedChain(DraftChain):
    """Keeps what every cycle drafted, and from what."""

    def __init__(self, drafter: Drafter, capacity: int) -> None:
        super().__init__(drafter, LAYERS, STEPS, capacity)
        self.cycles: list[tuple[int, Tensor, list[int]]] = []

    def draft(self, first: Draft, rule: Rule) -> Tensor:
        ids_S = super().draft(first, rule)
        self.cycles.append((self.length - 1, first.hidden_1H[0].clone(), ids_S.tolist()))
        return ids_S


@pytest.mark.parametrize("draft_vocab_size", [None, 8])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_draft_equals_the_slow_recomputation_in_float64(target: Target, draft_vocab_size: int | None, temperature: float) -> None:
    drafter = tiny_drafter(target, draft_vocab_size).double()
    drafter.set_embedding(target.embedding(torch.float64))
    model = target.load_model(torch.float64, "cpu", "eager")
    chain, runner = RecordedChain(drafter, 100), TargetRunner(model, LAYERS, 100)
    prompt = prompts(4)[2]
    done = decode(runner, chain, Request(prompt, 40, temperature, 3, frozenset()))
    text = [*prompt, *done.output_ids]
    assert len(set(done.accepted)) > 1
    with torch.no_grad():
        states = model(torch.tensor([text]), output_hidden_states=True).hidden_states
        aux_TA = torch.cat([states[layer][0] for layer in LAYERS], -1)
        for t, hidden_H, drafts in chain.cycles:
            expected, first_H = slow_chain(drafter, aux_TA, text, t)
            assert drafts == expected
            assert torch.allclose(hidden_H, first_H, rtol=0, atol=1e-5 * float(first_H.abs().max()))  # rotary and softmax are float32
    ends = [len(prompt) - 1]
    for accepted in done.accepted[:-1]:
        ends.append(ends[-1] + accepted + 1)
    assert [t for t, _, _ in chain.cycles] == ends


def slow_chain(drafter: Drafter, aux_TA: Tensor, text: Sequence[int], t: int) -> tuple[list[int], Tensor]:
    """DESIGN's contract, one position after the other: the drafts at t and the pre-norm state of step 0."""
    keys, values = [], []
    for i in range(t + 1):
        hidden_H = drafter.fc.weight @ aux_TA[i]
        query, key, value = slow_projections(drafter, text[i + 1], hidden_H, i)
        keys.append(key)
        values.append(value)
    drafts, first_H = [], None
    for j in range(STEPS):
        if j:
            query, key, value = slow_projections(drafter, drafts[-1], hidden_H, t + j)
            keys.append(key)
            values.append(value)
        hidden_H = slow_layer(drafter, query, keys, values, hidden_H)
        first_H = hidden_H if first_H is None else first_H
        row = int((drafter.lm_head.weight @ slow_norm(hidden_H, drafter.norm.weight)).argmax())
        drafts.append(row + int(drafter.d2t[row]))
    assert first_H is not None
    return drafts, first_H


def slow_projections(drafter: Drafter, token: int, hidden_H: Tensor, position: int) -> tuple[Tensor, Tensor, Tensor]:
    assert drafter.embedding_VH is not None
    layer, attention, d = drafter.midlayer, drafter.midlayer.self_attn, drafter.shape.head_dim
    embedded_H = slow_norm(drafter.embedding_VH[token], layer.input_layernorm.weight)
    x_2H = torch.cat([embedded_H, slow_norm(hidden_H, layer.hidden_norm.weight)])
    query, key, value = (projection.weight @ x_2H for projection in (attention.q_proj, attention.k_proj, attention.v_proj))
    return slow_rope(query.view(-1, d), position), slow_rope(key.view(-1, d), position), value.view(-1, d)


def slow_rope(heads_hd: Tensor, position: int) -> Tensor:
    half = heads_hd.shape[1] // 2
    turned = torch.empty_like(heads_hd)
    for i in range(half):
        angle = position * 5000.0 ** (-i / half)
        turned[:, i] = heads_hd[:, i] * math.cos(angle) - heads_hd[:, i + half] * math.sin(angle)
        turned[:, i + half] = heads_hd[:, i + half] * math.cos(angle) + heads_hd[:, i] * math.sin(angle)
    return turned


def slow_layer(drafter: Drafter, query_Qd: Tensor, keys: list[Tensor], values: list[Tensor], hidden_H: Tensor) -> Tensor:
    layer, group = drafter.midlayer, drafter.shape.num_heads // drafter.shape.num_kv_heads
    heads = []
    for head, query_d in enumerate(query_Qd):
        scores = torch.stack([query_d @ key[head // group] for key in keys]) / math.sqrt(len(query_d))
        heads.append(sum(weight * value[head // group] for weight, value in zip(scores.softmax(0), values, strict=True)))
    hidden_H = hidden_H + layer.self_attn.o_proj.weight @ torch.cat(heads)
    normed_H = slow_norm(hidden_H, layer.post_attention_layernorm.weight)
    gate = layer.mlp.gate_proj.weight @ normed_H
    return hidden_H + layer.mlp.down_proj.weight @ (gate * torch.sigmoid(gate) * (layer.mlp.up_proj.weight @ normed_H))


def slow_norm(x_H: Tensor, weight_H: Tensor) -> Tensor:
    return x_H / torch.sqrt((x_H**2).mean() + 1e-5) * weight_H


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"prompt_ids": []}, "0 tokens"),
        ({"prompt_ids": [1] * 128}, "128 tokens; 1 to 127 fit"),
        ({"prompt_ids": [1, 12]}, "0 to 11"),
        ({"prompt_ids": [-1]}, "0 to 11"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"drafter": "other"}, "no drafter 'other'"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused_with_the_reason(engine: Engine, arguments: dict[str, object], told: str) -> None:
    with pytest.raises(EyasError, match=told):
        engine.generate(**({"prompt_ids": [1], "max_new_tokens": 4} | arguments))


def test_a_drafter_that_does_not_fit_is_refused_with_the_reason(target: Target, tmp_path: Path) -> None:
    other = tiny_folder(tiny_target(tmp_path, vocab_size=13))
    with pytest.raises(EyasError, match="drafter other: vocab_size is 13, the target's is 12"):
        Engine(target, {"other": other}, torch.float32, 64, STEPS)
    outside = DrafterFolder(tiny_drafter(target), (1, 3, 5), [], {})
    with pytest.raises(EyasError, match=r"hidden_states\[5\] is no layer input of this target, it has 0 to 4"):
        Engine(target, {"outside": outside}, torch.float32, 64, STEPS)
    two = DrafterFolder(tiny_drafter(target), (1, 3), [], {})
    with pytest.raises(EyasError, match="names 2 aux layers, its fc takes 3"):
        Engine(target, {"two": two}, torch.float32, 64, STEPS)
    with pytest.raises(EyasError, match="context is 300"):
        Engine(target, {}, torch.float32, 300, STEPS)


def test_a_target_with_other_than_full_attention_is_refused_by_name() -> None:
    config = LlamaConfig(num_hidden_layers=2)
    config.layer_types = ["full_attention", "linear_attention"]
    with pytest.raises(EyasError, match="llama has linear_attention layers"):
        cache_for(config, 8)


def test_cropping_the_cache_copies_nothing_and_forgets_what_came_after() -> None:
    cache = cache_for(LlamaConfig(num_hidden_layers=1), 8)
    first, second = torch.randn(2, 1, 2, 3, 4)
    keys, _ = cache.update(first, -first, 0)
    buffer = keys.data_ptr()
    cache.keep(1)
    keys, values = cache.update(second, -second, 0)
    assert keys.data_ptr() == buffer
    assert torch.equal(keys, torch.cat([first[:, :, :1], second], 2))
    assert torch.equal(values, -keys)
    assert cache.get_seq_length() == 4
