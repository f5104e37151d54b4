"""DESIGN's central promise in the dtype of serving. A file of its own, so that it runs beside the one in float32."""

from pathlib import Path

import pytest
import torch

from tests.acceptance.served_walks import serve


def test_in_bfloat16_the_acceptance_length_is_the_offline_one_within_a_hundredth(smollm2: Path):
    served = serve(smollm2, torch.bfloat16, with_baseline=False)
    tokens = sum(len(generation.output_ids) - 1 for generation in served.speculative)
    steps = sum(generation.verify_ct for generation in served.speculative)
    offline = sum(cycle.emitted for cycles in served.walks for cycle in cycles) / sum(map(len, served.walks))
    assert offline == pytest.approx(tokens / steps, rel=0.01)
