import pytest
import torch

from benchmarks.train_step import synthetic_batch
from eyas.drafter import Drafter
from eyas.drafter_config import build_shape, read_config
from tests.k2_drafter import FULL, FULL_IDS, published_config
from tests.train.test_memory import SMALL
from train.costs import Work, multiply_adds, parameters, per_pair, planned_work, total, work_of
from train.ttt import TrainingTimeTest


def kimi():
    read = read_config(published_config(FULL, FULL_IDS))
    return build_shape(read.sizes, read.draft_vocab_size, read.num_aux)


def test_kimis_drafter_has_1_19_billion_parameters_and_takes_1_04_billion_multiply_adds_a_pair():
    assert parameters(kimi()) == 1_190_948_864
    assert per_pair(kimi()) == 1_036_779_520


def test_seven_steps_of_every_token_are_facts_43_5_gflop_a_token_and_fc_and_attention_come_on_top():
    parts = multiply_adds(kimi(), Work(1, (1,) * 7, 0, 0, 1))
    of_pairs = total([part for part in parts if part.what in ("k_proj, v_proj", "q_proj, o_proj", "MLP", "lm_head")])
    assert 2 * of_pairs == 6 * 7 * per_pair(kimi())
    assert 2 * of_pairs == pytest.approx(43.5e9, rel=2e-3)
    assert parts[0].amount == 2 * 3 * 7168**2


def test_parameters_are_those_that_train():
    assert parameters(SMALL) == sum(parameter.numel() for parameter in Drafter(SMALL).parameters())


def test_the_plan_counts_what_training_counts_on_rows_that_are_all_alike():
    drafter = Drafter(SMALL)
    batch = synthetic_batch(SMALL, [40, 40, 40], torch.float32)
    chains = TrainingTimeTest(drafter, torch.zeros(SMALL.draft_vocab_size, SMALL.hidden_size), 4, 0.8).chains(batch)
    measured, planned = work_of(batch, chains), planned_work(120, 30, 0.75, 1.0, 4)
    assert planned.counted_J == measured.counted_J == (87, 84, 81, 78)
    assert (planned.labels, planned.longest) == (measured.labels, measured.longest) == (87, 40)
    assert planned.context == pytest.approx(measured.context, rel=0.1)


def test_tokens_outside_the_draft_vocabulary_end_chains():
    assert planned_work(100, 50, 0.5, 0.5, 2).counted_J == (24.5, 12.0)
