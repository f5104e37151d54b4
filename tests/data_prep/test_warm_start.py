"""Layers that a warm start's config leaves open are found by measuring it."""

import json
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from data_prep.capture_hf import capture
from data_prep.rows import Row
from data_prep.template import reply_row
from data_prep.warm_start import REPLY_TOKENS, candidate_layers, measure_warm_start, probe_rows, readings_table, serving_note
from eyas.attention_hf import NAME
from eyas.config import Config, TargetConfig
from eyas.conventions import family_of
from eyas.errors import EyasError
from eyas.files import read_object
from eyas.folder import DrafterFolder, read_drafter
from eyas.states import row_key
from eyas.target import Target, open_target
from tests.fitted import PROMPTS, Fitted, fitted_drafter
from tests.k2_drafter import write_twin

ROOT = Path(__file__).parents[2]
REPLY = 16
Rows = dict[str, list[Row]]


def as_row(prompt_ids: list[int], reply_ids: list[int]) -> Row:
    tokens = reply_row(prompt_ids, reply_ids)
    return Row(row_key(tokens.ids, tokens.supervised), f"prompt {prompt_ids}", "chat", tokens)


def config_of(output: Path, target: Target, init: Path, draft_vocab_size: int | None = None, **states: Any) -> Config:
    return Config.model_validate(
        {
            "output": output,
            "target": {"model": target.name, "dtype": "float32", "device": "cpu"},
            "prep": {"sources": [{"source": "none.jsonl"}], "states": states},
            "drafter": {"init": str(init), "draft_vocab_size": draft_vocab_size},
            "engine": {"draft_steps": 2},
        }
    )


def ambiguous(folder: Path, drafter: Path, nested: list[int] | None, top: list[int] | None) -> Path:
    """The drafter's folder as others write it: without our record, with these ids."""
    shutil.copytree(drafter, folder)
    config = read_object(folder / "config.json")
    for key in ("eyas", "eagle_config", "eagle_aux_hidden_state_layer_ids"):
        del config[key]
    config |= {} if nested is None else {"eagle_config": {"eagle_aux_hidden_state_layer_ids": nested}}
    config |= {} if top is None else {"eagle_aux_hidden_state_layer_ids": top}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def read(target: Target, folder: Path) -> DrafterFolder:
    return read_drafter(folder, family=family_of(target.shape.model_type))


def measure(config: Config, target: Target, rows: Rows, candidates: list[tuple[int, ...]] | None = None) -> dict[str, Any]:
    """As prep does it, with a target that is loaded only where there is something to measure."""
    folder = read(target, Path(config.drafter.init))

    def run_capture(rows: Any, place: Path, spec: Any, name: str) -> Any:
        model = target.load_model(torch.float32, "cpu", NAME)
        return capture(model, target, rows, place, spec, config.prep.states, name)

    return measure_warm_start(config, target, folder, candidates or candidate_layers(config, target, folder), rows, run_capture)


@pytest.fixture(scope="module")
def k2(kimi: Path) -> Target:
    """The tiny Kimi-K2.5: 8 layers, read as DeepSeek's by engines."""
    return Target(kimi, str(kimi))


@pytest.fixture(scope="module")
def make_fitted(k2: Target, tmp_path_factory: pytest.TempPathFactory) -> Callable[[tuple[int, ...]], Fitted]:
    """A drafter that is right on its own layers, and on their neighbours hardly ever."""
    return lambda layers: fitted_drafter(tmp_path_factory.mktemp("fitted") / "drafter", k2, PROMPTS, REPLY, layers)


@pytest.mark.parametrize(("trained_on", "reading"), [((2, 4, 5), 0), ((3, 5, 6), 1)], ids=["as written", "shifted by one"])
def test_the_layers_that_a_drafter_was_trained_on_are_recognised(
    k2: Target, make_fitted: Callable[..., Fitted], tmp_path: Path, trained_on: tuple[int, ...], reading: int
) -> None:
    fitted = make_fitted(trained_on)
    init = ambiguous(tmp_path / "init", fitted.folder, [2, 4, 5], None)
    rows = {"greedy": [as_row(text.prompt_ids, text.reply_ids) for text in fitted.texts], "train": []}
    config = config_of(tmp_path / "out", k2, init)
    assert candidate_layers(config, k2, read(k2, init)) == [(2, 4, 5), (3, 5, 6)]
    record = measure(config, k2, rows)
    assert record["layers"] == list(trained_on)
    lengths = [part["length"] for part in record["readings"]]
    assert lengths[reading] > 1.5 > 1.2 > lengths[1 - reading]
    assert record["readings"][1]["to_first"]["value"] == pytest.approx(lengths[1] - lengths[0])
    assert "by measurement" in record["reason"]
    assert (record["tokens"], record["replies"]) == (sum(len(row.tokens.ids) for row in rows["greedy"]), len(PROMPTS))
    # the states have served their turn, the record stays and is read instead of measuring again
    assert not (tmp_path / "out" / "states" / "probe").exists()
    again = measure_warm_start(config, k2, read(k2, init), [(2, 4, 5), (3, 5, 6)], rows, lambda *_: pytest.fail("measured again"))
    assert again == record
    assert readings_table(record).row_count == 2


def test_readings_that_differ_within_noise_leave_the_likelier_one(k2: Target, tmp_path: Path) -> None:
    init = write_twin(tmp_path / "twin", k2, [2, 4, 5])
    generator = torch.Generator().manual_seed(0)
    rows = {"greedy": [as_row([1, 2, 3], torch.randint(33, 90, (12,), generator=generator).tolist()) for _ in range(3)], "train": []}
    record = measure(config_of(tmp_path / "out", k2, init), k2, rows)
    assert record["layers"] == [2, 4, 5]
    assert "within noise, so the likelier reading" in record["reason"]


def test_another_drafter_in_the_same_folder_is_measured_anew(k2: Target, tmp_path: Path) -> None:
    init = write_twin(tmp_path / "twin", k2, [2, 4, 5])
    rows = {"greedy": [as_row([1, 2, 3], [40, 41, 42, 43])], "train": []}
    config = config_of(tmp_path / "out", k2, init)
    before = measure(config, k2, rows)
    drafter = read(k2, init)
    drafter.drafter.norm.weight.data.mul_(2)
    with pytest.raises(ZeroDivisionError):
        measure_warm_start(config, k2, drafter, [(2, 4, 5), (3, 5, 6)], rows, lambda *_: 1 / 0)
    assert measure(config, k2, rows) == before


def test_the_starter_without_its_record_is_found_to_read_what_it_was_trained_on(tmp_path: Path) -> None:
    target = open_target(TargetConfig(model="package:smollm2"))
    starter = ROOT / "checkpoints" / "starter-smollm2"
    init = ambiguous(tmp_path / "init", starter, None, [2, 15, 27])
    with tarfile.open(starter / "replies-2.tar.xz") as archive:
        file = archive.extractfile("replies/greedy.jsonl")
        assert file is not None
        replies = [json.loads(line) for line in file]
    rows = {"greedy": [as_row(reply["prompt_ids"], reply["reply_ids"]) for reply in replies], "train": []}
    record = measure(config_of(tmp_path / "out", target, init, probe_tokens=1500), target, rows)
    # the reading that engines would have for a Llama comes first, and is the wrong one
    assert [part["layers"] for part in record["readings"]] == [[3, 16, 28], [2, 15, 27]]
    assert record["layers"] == [2, 15, 27]
    assert record["readings"][1]["length"] > 1.7
    assert record["readings"][1]["to_first"]["low"] > 0
    assert 1500 <= record["tokens"] < 1500 + 600


def test_an_engine_that_would_feed_the_untouched_drafter_other_layers_is_named(k2: Target, tmp_path: Path) -> None:
    init = write_twin(tmp_path / "twin", k2, [2, 4, 5])
    config, drafter = config_of(tmp_path, k2, init), read(k2, init)
    served = {version: {"kind": "sglang", "version": version} for version in ("0.5.12", "0.5.23")}
    configs = {version: Config.model_validate(config.model_dump() | {"engine": engine}) for version, engine in served.items()}
    assert serving_note(configs["0.5.23"], drafter, [2, 4, 5], "deepseek") is None
    assert serving_note(configs["0.5.12"], drafter, [3, 5, 6], "deepseek") is None
    assert "0.5.23 feeds the untouched" in (serving_note(configs["0.5.23"], drafter, [3, 5, 6], "deepseek") or "")
    assert "hidden_states[3, 5, 6], not those" in (serving_note(configs["0.5.12"], drafter, [2, 4, 5], "deepseek") or "")
    assert serving_note(config, drafter, [3, 5, 6], "deepseek") is None


def test_probe_rows_are_greedy_ones_first_and_enough(k2: Target) -> None:
    greedy, train = ([as_row([number], [number, 7, place]) for number in range(5)] for place in (8, 9))
    rows = {"greedy": greedy, "train": [*train, greedy[0]]}
    assert probe_rows(rows, 9) == sorted(greedy, key=lambda row: row.key)[:3]
    assert probe_rows(rows, 24) == sorted(greedy, key=lambda row: row.key) + sorted(train, key=lambda row: row.key)[:1]
    assert len(probe_rows(rows, 10**6)) == 10


def test_long_replies_are_cut_so_that_there_are_more_of_them() -> None:
    long, short = as_row([1, 2, 3], list(range(4, 1000))), as_row([1, 2], [3] * REPLY_TOKENS)
    (cut,) = probe_rows({"greedy": [long], "train": []}, 100)
    assert cut.tokens.ids == long.tokens.ids[: 3 + REPLY_TOKENS]
    assert sum(cut.tokens.supervised) == REPLY_TOKENS
    assert cut.key == row_key(cut.tokens.ids, cut.tokens.supervised)
    assert probe_rows({"greedy": [short], "train": []}, 100) == [short]


def test_replies_too_short_to_measure_on_are_a_clear_error(k2: Target, tmp_path: Path) -> None:
    init = write_twin(tmp_path / "twin", k2, [2, 4, 5])
    with pytest.raises(EyasError, match=r"no reply has two tokens .* prep\.states\.layers"):
        measure(config_of(tmp_path / "out", k2, init), k2, {"greedy": [as_row([1, 2], [3])], "train": []})


@pytest.mark.parametrize(
    ("states", "found"),
    [
        ({}, [(2, 4, 5), (3, 5, 6)]),
        ({"layers": [3, 5, 6]}, [(3, 5, 6)]),
        ({"candidates": [[1, 2, 3], [4, 5, 6]]}, [(1, 2, 3), (4, 5, 6)]),
    ],
)
def test_candidates_are_the_configs_else_the_drafters_readings(k2: Target, tmp_path: Path, states: Any, found: list[Any]) -> None:
    init = write_twin(tmp_path / "twin", k2, [2, 4, 5])
    assert candidate_layers(config_of(tmp_path, k2, init, **states), k2, read(k2, init)) == found


def test_from_scratch_the_layers_are_the_configs_else_the_targets(k2: Target, tmp_path: Path) -> None:
    assert candidate_layers(config_of(tmp_path, k2, Path("scratch"), layers=[1, 2]), k2, None) == [(1, 2)]
    assert candidate_layers(config_of(tmp_path, k2, Path("scratch")), k2, None) == [k2.default_layers()]


def test_a_drafter_that_tells_its_layers_is_believed(smollm2: Path, tmp_path: Path) -> None:
    target, starter = Target(smollm2, "smollm2"), ROOT / "checkpoints" / "starter-smollm2"
    assert candidate_layers(config_of(tmp_path, target, starter), target, read(target, starter)) == [(2, 15, 27)]


def test_a_reading_that_the_target_does_not_have_is_none(k2: Target, tmp_path: Path) -> None:
    init = write_twin(tmp_path / "twin", k2, [2, 4, 7])
    assert candidate_layers(config_of(tmp_path, k2, init), k2, read(k2, init)) == [(2, 4, 7)]


def test_layers_that_the_drafter_cannot_have_been_trained_on_are_refused_before_anything_is_captured(k2: Target, tmp_path: Path) -> None:
    init = write_twin(tmp_path / "twin", k2, [2, 4, 5])
    with pytest.raises(EyasError, match=r"layers is \[2, 4, 6\], .*twin reads layers \[2, 4, 5\] or \[3, 5, 6\]"):
        candidate_layers(config_of(tmp_path, k2, init, layers=[2, 4, 6]), k2, read(k2, init))
    with pytest.raises(EyasError, match=r"names layers \[2, 4\], .*twin takes 3 states"):
        candidate_layers(config_of(tmp_path, k2, init, candidates=[[2, 4, 5], [2, 4]]), k2, read(k2, init))


def test_a_drafter_of_another_target_is_refused(k2: Target, tmp_path: Path) -> None:
    starter = ROOT / "checkpoints" / "starter-smollm2"
    with pytest.raises(EyasError, match=r"no drafter for .*: hidden size 576 in the drafter, 192 in the target"):
        candidate_layers(config_of(tmp_path, k2, starter), k2, read(k2, starter))
