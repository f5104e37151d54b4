"""Capture through vLLM itself: what its worker writes is what transformers computes. In float32."""

from pathlib import Path

import pytest

from eyas.errors import EyasError
from eyas.target import Target
from tests.engines.captures import (
    captured_by,
    captured_by_transformers,
    config_of,
    contents,
    require_same,
    row_of,
    rows_of,
    spec_of,
)
from tests.engines.served import VLLM, VLLM_ENGINE, need

pytestmark = need(VLLM)


def test_vllm_writes_what_transformers_computes(target: Target, chats: list[list[dict[str, str]]], tmp_path: Path):
    rows = rows_of(target, chats)
    wanted = captured_by_transformers(target, rows, tmp_path / "hf")
    # prefills in chunks of 96 tokens, several rows at a time
    flags = VLLM_ENGINE["flags"] | {"max-num-batched-tokens": 96, "max-num-seqs": 8}
    config = config_of(VLLM_ENGINE | {"flags": flags}, tmp_path / "out")
    with captured_by(config, target) as run:
        report = run(rows, tmp_path / "out" / "states" / "train", spec_of(target), "train")
        assert run(rows, tmp_path / "out" / "states" / "train", spec_of(target), "train").tokens == 0
        with pytest.raises(EyasError, match=r"answered 400: .*vocabulary"):
            run([row_of([5] * 8 + [60_000])], tmp_path / "out" / "states" / "greedy", spec_of(target), "greedy")
    assert report.tokens == sum(len(row.tokens.ids) for row in rows)
    assert report.rechecked >= 1
    assert report.worst_state < 1e-3
    assert report.worst_logit < 0.01
    require_same(contents(tmp_path / "out" / "states" / "train"), wanted, 3)
