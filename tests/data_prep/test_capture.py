from dataclasses import replace

import pytest
import torch
from torch.nn import functional

from data_prep.capture_hf import batches, capture
from data_prep.rows import Row
from data_prep.template import reply_row
from eyas.attention_hf import NAME
from eyas.config import StatesConfig
from eyas.errors import EyasError
from eyas.states import StateSpec, StateStore, finish_store, row_key
from eyas.vocab import vocab_digest

LAYERS = (1, 3, 5)
RARE = 260  # a token that only the rows of one test use


@pytest.fixture
def model(tiny):
    return tiny.load_model(torch.float32, "cpu", NAME)


@pytest.fixture
def spec(tiny):
    return StateSpec(LAYERS, tiny.shape.hidden_size, "bfloat16", tiny.shape.vocab_size, tiny.digest, tiny.tokenizer_digest)


def make_row(ids):
    tokens = reply_row(ids[:2], ids[2:])
    return Row(row_key(tokens.ids, tokens.supervised), f"prompt {ids[:3]}", "chat", tokens)


@pytest.fixture
def rows():
    generator = torch.Generator().manual_seed(0)
    return [make_row(torch.randint(250, (length,), generator=generator).tolist()) for length in (5, 60, 12, 33, 34, 7, 60, 21, 50, 3)]


@pytest.fixture
def run(model, tiny, spec, tmp_path):
    def run(rows, folder="store", spec=spec, model=model, **states):
        options = StatesConfig(**{"batch_tokens": 128, "recheck": 1.0, **states})
        return capture(model, tiny, rows, tmp_path / folder, spec, options, "test")

    return run


def finished(folder):
    finish_store(folder, {})
    return StateStore(folder)


@torch.no_grad()
def test_aux_and_final_are_the_models_hidden_states_at_every_token(run, model, rows, tmp_path):
    run(rows)
    store = finished(tmp_path / "store")
    assert store.keys == sorted(row.key for row in rows)
    by_key = {row.key: row for row in rows}
    for index, key in enumerate(store.keys):
        found = store.read(index)
        assert found.ids_T.tolist() == by_key[key].tokens.ids
        assert found.supervised_T.tolist() == by_key[key].tokens.supervised
        output = model(found.ids_T[None], output_hidden_states=True)
        aux_TA = torch.cat([output.hidden_states[layer][0] for layer in LAYERS], dim=-1)
        torch.testing.assert_close(found.aux_TA, aux_TA.bfloat16(), atol=1e-6, rtol=2**-7)
        torch.testing.assert_close(found.final_TH, output.hidden_states[-1][0].bfloat16(), atol=1e-6, rtol=2**-7)


@torch.no_grad()
def test_lm_head_of_the_stored_final_state_is_the_models_distribution(run, model, tiny, rows, tmp_path):
    run(rows)
    store = finished(tmp_path / "store")
    row = store.read(0)
    logits = functional.linear(row.final_TH.float(), tiny.lm_head(torch.float32))
    torch.testing.assert_close(logits.softmax(-1), model(row.ids_T[None]).logits[0].softmax(-1), atol=0.02, rtol=0)


def test_batches_hold_every_row_once_within_their_tokens_and_with_little_padding(rows):
    made = list(batches(rows, 128))
    assert sorted(row.key for batch in made for row in batch) == sorted(row.key for row in rows)
    assert all(len(batch) * len(batch[0].tokens.ids) <= 128 for batch in made)
    padded = sum(len(batch) * len(batch[0].tokens.ids) for batch in made)
    assert padded < 1.2 * sum(len(row.tokens.ids) for row in rows)


def test_a_row_longer_than_the_batch_budget_goes_alone(rows):
    assert [len(batch) for batch in batches(rows, 1)] == [1] * len(rows)


def test_the_report_counts_padding_and_proved_rows(run, rows):
    report = run(rows)
    padded = sum(len(batch) * len(batch[0].tokens.ids) for batch in batches(rows, 128))
    assert report.tokens == sum(len(row.tokens.ids) for row in rows)
    assert report.tokens + report.padding == padded
    assert report.rechecked == len(rows)
    assert report.worst_state < 1e-5


def test_a_capture_that_broke_off_resumes_to_the_same_bits(run, model, rows, tmp_path):
    run(rows, "whole", recheck=0.0)
    calls = []

    def break_off(*_):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt

    hook = model.get_decoder().register_forward_pre_hook(break_off)
    with pytest.raises(KeyboardInterrupt):
        run(rows, recheck=0.0, shard_mb=1)
    hook.remove()
    assert run(rows, recheck=0.0).tokens < sum(len(row.tokens.ids) for row in rows)
    broken, whole = finished(tmp_path / "store"), finished(tmp_path / "whole")
    assert broken.keys == whole.keys
    for index in range(len(whole)):
        for name in ("aux_TA", "final_TH"):
            assert torch.equal(getattr(broken.read(index), name), getattr(whole.read(index), name))


def test_a_complete_store_is_not_computed_again(run, rows):
    run(rows)
    assert run(rows).tokens == 0


def test_a_head_that_does_not_give_the_models_logits_stops_the_capture(run, model, rows):
    model.lm_head.register_forward_hook(lambda _, __, logits: logits * 1.01)
    with pytest.raises(EyasError, match=r"lm_head\(hidden_states\[-1\]\) differs from the model's logits by 0.0099"):
        run(rows)


def test_states_that_depend_on_the_rest_of_the_batch_stop_the_capture_naming_the_layer(run, model, rows):
    def leak(_, __, output):
        return output + 0.1 * output.mean(dim=0, keepdim=True)

    model.get_decoder().layers[2].register_forward_hook(leak)
    with pytest.raises(EyasError, match=r"hidden_states\[3\] captured in a batch differs from the row alone"):
        run(rows)


def test_without_recheck_the_first_row_is_still_proved(run, model, rows):
    assert run(rows, recheck=0.0).rechecked == 1


def test_a_resumed_capture_proves_itself_again(run, model, rows):
    run([rows[1], rows[6]], recheck=0.0)  # the two longest: the whole first batch
    model.lm_head.register_forward_hook(lambda _, __, logits: logits * 1.01)
    with pytest.raises(EyasError, match="differs from the model's logits"):
        run(rows, recheck=0.0)


def test_rows_with_states_that_are_not_finite_are_quarantined_and_the_others_kept(run, model, rows, tmp_path):
    bad = make_row([5, 6, RARE, 7, 8])
    with torch.no_grad():
        model.get_input_embeddings().weight[RARE] = float("nan")
    report = run([*rows, bad])
    assert [(fault.prompt_key, fault.reason) for fault in report.quarantined] == [(bad.prompt_key, "states not finite")]
    assert finished(tmp_path / "store").keys == sorted(row.key for row in rows)


def test_a_layer_the_target_does_not_have_is_refused(run, rows, spec, tiny):
    wrong = StateSpec((1, 3, 8), spec.hidden_size, "bfloat16", spec.vocab_size, spec.target_digest, spec.tokenizer_digest)
    with pytest.raises(EyasError, match=r"hidden_states\[8\] is no layer input of this target, it has 0 to 7"):
        run(rows, spec=wrong)


def test_a_store_with_rows_of_other_replies_is_refused(run, rows):
    run(rows)
    with pytest.raises(EyasError, match="holds 1 rows that the replies do not have"):
        run(rows[1:])


@torch.no_grad()
def test_log_probabilities_are_the_models_in_the_draft_vocabulary(model, tiny, spec, rows, tmp_path):
    ids_D = torch.arange(0, tiny.shape.vocab_size, 3)
    spec = replace(spec, top_logprobs=10, vocab_digest=vocab_digest(ids_D))
    report = capture(model, tiny, rows, tmp_path / "store", spec, StatesConfig(batch_tokens=128, recheck=1.0), "test", ids_D)
    store = finished(tmp_path / "store")
    assert report.rechecked == len(rows)
    for row in map(store.read, range(len(store))):
        logprobs_TV = model(row.ids_T[None]).logits[0].log_softmax(-1)
        expected = logprobs_TV[:, ids_D].topk(10)
        torch.testing.assert_close(row.top.logprob_NK.float(), expected.values, atol=1e-4, rtol=2**-10)
        found_TK = logprobs_TV.gather(1, ids_D[row.top.index_NK.long()])
        torch.testing.assert_close(found_TK, expected.values, atol=1e-4, rtol=1e-4)
        inside_T = logprobs_TV[:, ids_D].exp().sum(-1)
        torch.testing.assert_close(row.top.outside_N, 1 - inside_T, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(row.top.rest_N, inside_T - expected.values.exp().sum(-1), atol=1e-5, rtol=1e-4)
