"""Capture of a tiny random Kimi-K2.5 through both engines' own classes, latent attention and experts: the states are transformers'."""

from pathlib import Path
from typing import Any

import pytest

from data_prep.rows import Row
from data_prep.template import reply_row
from eyas.config import Config
from eyas.state_row import StateRow
from eyas.states import row_key
from tests.engines.captures import captured_by, captured_by_transformers, contents, require_same, spec_of
from tests.engines.kimi_run import Run
from tests.engines.served import SGLANG, VLLM, VLLM_ENGINE, need


@pytest.fixture(scope="module")
def rows(kimi_run: Run) -> list[Row]:
    tokens = [reply_row(prompt, reply) for prompt, reply in kimi_run.texts]
    return [Row(row_key(row.ids, row.supervised), str(number), "chat", row) for number, row in enumerate(tokens)]


@pytest.fixture(scope="module")
def wanted(kimi_run: Run, rows: list[Row], tmp_path_factory: pytest.TempPathFactory) -> dict[str, StateRow]:
    return captured_by_transformers(kimi_run.target, rows, tmp_path_factory.mktemp("hf") / "store")


@pytest.mark.parametrize("kind", [pytest.param("sglang", marks=need(SGLANG)), pytest.param("vllm", marks=need(VLLM))])
def test_the_engine_writes_what_transformers_computes(
    kind: str, kimi_run: Run, rows: list[Row], wanted: dict[str, StateRow], sglang: dict[str, Any], tmp_path: Path
):
    # SGLang's first request on its own account has an image in it, which the stand-in for the processor does not know
    engine = VLLM_ENGINE if kind == "vllm" else sglang | {"flags": sglang["flags"] | {"skip-server-warmup": True}}
    values = kimi_run.on(engine, tmp_path / "out").model_dump()
    values["prep"]["states"] |= {"backend": kind, "recheck": 0.3}
    with captured_by(Config.model_validate(values), kimi_run.target) as run:
        report = run(rows, tmp_path / "out" / "states" / "train", spec_of(kimi_run.target), "train")
    assert report.rechecked >= 1
    assert report.worst_state < 1e-3
    require_same(contents(tmp_path / "out" / "states" / "train"), wanted, 3)
