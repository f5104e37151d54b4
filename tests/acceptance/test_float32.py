"""DESIGN's central promise, on the real model: what the offline walk says is what a greedy server does, cycle by cycle."""

from pathlib import Path

import pytest
import torch

from tests.acceptance.served_walks import STEPS, Served, serve


@pytest.fixture(scope="module")
def exact(smollm2: Path) -> Served:
    """In float32, where nothing may differ."""
    return serve(smollm2, torch.float32, with_baseline=True)


def test_speculative_output_equals_the_baseline_token_for_token(exact: Served):
    assert [generation.output_ids for generation in exact.speculative] == [generation.output_ids for generation in exact.baseline]


def test_every_request_walks_offline_as_it_was_served(exact: Served):
    """Same verify count, same accepted counts cycle by cycle; the last cycle, which the end cuts off, aside."""
    for cycles, generation in zip(exact.walks, exact.speculative, strict=True):
        assert len(cycles) == generation.verify_ct
        assert [cycle.accepted for cycle in cycles[:-1]] == generation.accepted[:-1]
    # the promise would be empty if drafts never, or always, stood
    accepted = [count for generation in exact.speculative for count in generation.accepted[:-1]]
    assert len(accepted) > 500
    assert 0.1 < sum(accepted) / len(accepted) < STEPS - 0.1
