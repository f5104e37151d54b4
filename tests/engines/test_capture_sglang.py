"""Capture through SGLang itself: what its workers write is what transformers computes, whatever happens to the server on the way.

SGLang is unchanged; its compiled CPU operators have the usual stand-in (sglang_cpu). In float32, prefills in chunks of 96 tokens.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from data_prep import capture_request, capture_server
from data_prep.capture_sglang import SglangCapture
from data_prep.engine_plugin.orders import CaptureJob
from data_prep.rows import Row
from eval.launcher import capturing
from eyas.cli import main
from eyas.errors import EyasError
from eyas.fp8 import dequantise, quantise
from eyas.state_row import StateRow
from eyas.states import StateStore
from eyas.target import Target
from tests.engines.captures import (
    captured_by,
    captured_by_transformers,
    config_of,
    contents,
    killed_at_the_first_shard,
    require_same,
    row_of,
    rows_of,
    spec_of,
)
from tests.engines.served import ROOT, SGLANG, need

POOL = 448
"""Tokens that the server has room for: fewer than its context."""

pytestmark = need(SGLANG)


@pytest.fixture(scope="module")
def engine(sglang: dict[str, Any]) -> dict[str, Any]:
    return sglang | {"flags": sglang["flags"] | {"chunked-prefill-size": 96, "max-total-tokens": POOL, "max-running-requests": 8}}


@pytest.fixture(scope="module")
def rows(target: Target, chats: list[list[dict[str, str]]]) -> list[Row]:
    return rows_of(target, chats)


@pytest.fixture(scope="module")
def wanted(target: Target, rows: list[Row], tmp_path_factory: pytest.TempPathFactory) -> dict[str, StateRow]:
    return captured_by_transformers(target, rows, tmp_path_factory.mktemp("hf") / "store")


def test_a_server_that_is_killed_costs_its_unwritten_rows_and_the_next_one_writes_what_transformers_computes(
    engine: dict[str, Any], target: Target, rows: list[Row], wanted: dict[str, StateRow], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(capture_server, "FIRST_ROUND", 4)
    monkeypatch.setattr(capture_request, "BACK_OFF_S", 0.05)
    config, folder = config_of(engine, tmp_path / "out"), tmp_path / "out" / "states" / "train"
    with (
        killed_at_the_first_shard(config, folder),
        pytest.raises(EyasError, match=r"does not answer any more.*killed from outside"),
        captured_by(config, target) as run,
    ):
        run(rows, folder, spec_of(target), "train")
    kept = set(StateStore(folder, incomplete=True).keys)
    assert len(rows) > len(kept) >= 4
    with captured_by(config, target) as run:
        report = run(rows, folder, spec_of(target), "train")
        # a row that fits the context and not the server's memory: SGLang says so, in one line
        with pytest.raises(EyasError, match=r"answered 400: .*tokens"):
            run([row_of([500] * (POOL + 20))], tmp_path / "out" / "states" / "greedy", spec_of(target), "greedy")
    assert report.tokens == sum(len(row.tokens.ids) for row in rows if row.key not in kept)
    assert report.rechecked >= 1
    assert report.worst_state < 1e-3
    assert report.worst_logit < 0.01
    found = contents(folder)
    require_same(found, wanted, 3)
    assert max(len(row.ids_T) for row in found.values()) > 2 * 96
    log = (config.folder("servers") / "capture" / "server.log").read_text()
    assert max(map(int, re.findall(r"Prefill batch, #new-seq: (\d+),", log))) > 1


def test_prep_captures_through_sglang_into_fp8(
    engine: dict[str, Any], target: Target, wanted: dict[str, StateRow], chats: list[list[dict[str, str]]], tmp_path: Path
):
    answered = [[*messages, {"role": "assistant", "content": f"Number {place} it is."}] for place, messages in enumerate(chats)]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in answered))
    config = config_of(engine, tmp_path / "out").model_dump(mode="json", exclude_unset=True)
    config["prep"] = {"sources": [{"source": str(tmp_path / "chats.jsonl")}], "replies": {"mode": "given"}, "heldout": {"prompts": 2}}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    with pytest.raises(SystemExit) as end:
        main(["prep", "-c", str(tmp_path / "run.yaml"), "-s", "prep.states.backend=sglang", "-s", "prep.states.dtype=fp8"])
    assert not end.value.code
    stores = {name: StateStore(tmp_path / "out" / "states" / name) for name in ("train", "greedy", "sampled")}
    assert stores["train"].spec == spec_of(target, "fp8")
    rows = [store.read(place) for store in stores.values() for place in range(len(store))]
    assert len(rows) >= 12
    # the prompt is the beginning of a row that transformers has captured: states do not depend on what follows
    prompts = {tuple(row.ids_T[:20].tolist()): row for row in wanted.values()}
    hidden, compared = target.shape.hidden_size, 0
    for row in rows:
        other = prompts.get(tuple(row.ids_T[:20].tolist()))
        if other is None:
            continue
        compared += 1
        for ours, theirs in ((row.aux_TA[:20], other.aux_TA[:20]), (row.final_TH[:20], other.final_TH[:20])):
            rounded = dequantise(*quantise(theirs, hidden), hidden)
            assert (ours == rounded).float().mean() > 0.99
    assert compared >= 3


def needs(target: Target, root: Path) -> Any:
    return SglangCapture.needs(target, CaptureJob(root, spec_of(target), 2**20), None)


def test_a_server_with_the_radix_cache_on_is_refused_as_it_starts(engine: dict[str, Any], target: Target, tmp_path: Path):
    asked = needs(target, tmp_path)
    flags = asked.flags | {"disable-radix-cache": False}
    with (
        pytest.raises(EyasError, match="disable_radix_cache=False is refused: a prefix found in the cache has no states"),
        capturing(config_of(engine, tmp_path / "out"), flags, asked.environment),
    ):
        pass


def test_an_sglang_whose_hook_point_has_moved_is_refused_as_it_starts(engine: dict[str, Any], target: Target, tmp_path: Path):
    asked = needs(target, tmp_path)
    moved = f"{ROOT / 'tests' / 'engines' / 'sglang_moved'}:{asked.environment['PYTHONPATH']}"
    environment = asked.environment | {"PYTHONPATH": moved, "SGLANG_PLUGINS": "moved,eyas_capture"}
    with (
        pytest.raises(EyasError, match=r"SGLang 0\.5\.23 has no .*_append_prefill_hidden_states, where eyas takes the states"),
        capturing(config_of(engine, tmp_path / "out"), asked.flags, environment),
    ):
        pass
