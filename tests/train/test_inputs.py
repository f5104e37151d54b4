"""A warm start that comes from elsewhere: whose layers prep measured, and whose positions are fewer than the target's."""

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from eyas.config import Config, load_config
from eyas.distribution import top_log_probs
from eyas.errors import EyasError
from eyas.files import read_object, write_json
from eyas.folder import drafter_digest, read_drafter
from eyas.states import StateStore, StateWriter, finish_store
from eyas.target import Target
from eyas.vocab import drafter_vocab, vocab_digest
from tests.k2_drafter import write_twin
from train.checkpoint import latest
from train.inputs import open_inputs
from train.trainer import train


@pytest.fixture
def init(tiny_target: Target, tmp_path: Path) -> Path:
    """Its ids mean layers 0, 1, 2 or 1, 2, 3; the states are those of 1, 2, 3."""
    return write_twin(tmp_path / "twin", tiny_target, [0, 1, 2])


def measured(config: Config, record: dict[str, Any]) -> Config:
    """The states as prep leaves them after measuring."""
    store = config.folder("states") / "train"
    real = store.resolve()
    store.unlink()
    shutil.copytree(real, store)
    manifest = read_object(store / "manifest.json")
    write_json(store / "manifest.json", {**manifest, "holds": {**manifest["holds"], "warm_start": record}})
    return config


def record_of(drafter: str) -> dict[str, Any]:
    return {"drafter": drafter, "layers": [1, 2, 3], "reason": "layers [1, 2, 3], by measurement: 2.1 against 1.2", "readings": []}


def test_positions_are_raised_to_the_targets_and_it_is_said(make_run, init: Path) -> None:
    inputs = open_inputs(load_config(make_run("raised", init=str(init))))
    assert inputs.drafter.shape.max_position == 128
    assert any("max_position 64 raised to the target's 128" in note for note in inputs.notes)


def test_positions_beyond_the_targets_stay(make_run, init: Path) -> None:
    write_json(init / "config.json", read_object(init / "config.json") | {"max_position_embeddings": 500})
    inputs = open_inputs(load_config(make_run("kept", init=str(init))))
    assert inputs.drafter.shape.max_position == 500
    assert not any("max_position" in note for note in inputs.notes)


def test_layers_that_prep_measured_for_this_drafter_are_taken_whatever_its_config_says(make_run, init: Path) -> None:
    nested = {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [0, 2, 3]}
    write_json(init / "config.json", read_object(init / "config.json") | {"eagle_config": nested})
    config = load_config(make_run("measured", init=str(init)))
    with pytest.raises(EyasError, match=r"reads layers \[0, 2, 3\] or \[1, 3, 4\], states/train holds \[1, 2, 3\]"):
        open_inputs(config)
    record = record_of(drafter_digest(read_drafter(init).drafter))
    inputs = open_inputs(measured(config, record))
    assert (inputs.layers, inputs.measured) == ((1, 2, 3), record)
    assert any("by measurement: 2.1 against 1.2" in note for note in inputs.notes)


def test_what_was_measured_with_another_drafter_says_nothing_about_this_one(make_run, init: Path) -> None:
    inputs = open_inputs(measured(load_config(make_run("other", init=str(init))), record_of("another")))
    assert inputs.measured is None
    assert any("does not tell which layers it was trained on; the states are those of [1, 2, 3]" in note for note in inputs.notes)


def test_log_probabilities_in_another_draft_vocabulary_are_refused_with_both_digests(make_run, tiny_target: Target) -> None:
    config = load_config(make_run("vocabulary"))
    rewrite_with_top(config, tiny_target, config.drafter.draft_vocab_size, 8)
    assert open_inputs(config).train.spec.top_logprobs == 8
    other = config.model_copy(update={"drafter": config.drafter.model_copy(update={"draft_vocab_size": 20})})
    own, wanted = (vocab_digest(chosen_ids(config, size))[:12] for size in (20, 32))
    with pytest.raises(EyasError, match=f"in the draft vocabulary {wanted}, the drafter drafts in {own} \\(20 tokens\\)"):
        open_inputs(other)


def test_held_out_states_of_another_kind_are_refused(make_run, tiny_target: Target) -> None:
    config = load_config(make_run("kinds"))
    rewrite_with_top(config, tiny_target, 32, 8, names=("train", "greedy"))
    with pytest.raises(EyasError, match="states/sampled holds final states, states/train 8 log-probabilities a token"):
        open_inputs(config)


def test_training_on_all_log_probabilities_is_training_on_final_states_and_reads_no_target_head(
    make_run, init: Path, tiny_target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids_D = read_drafter(init).drafter.draft_ids_D
    with_final, with_top = (load_config(make_run(name, init=str(init), max_steps=3)) for name in ("final", "top"))
    rewrite_with_top(with_top, tiny_target, None, len(ids_D), ids_D=ids_D)
    expected = latest(train(with_final) / "checkpoints")
    monkeypatch.setattr(Target, "lm_head", lambda *_: pytest.fail("the target's lm_head was read"))
    found = latest(train(with_top) / "checkpoints")
    assert found is not None
    assert expected is not None
    start = read_drafter(init).drafter.state_dict()
    for name, weight in expected.tensors("model").items():
        if weight.is_floating_point():
            moved = weight - start[name]
            assert float((found.tensors("model")[name] - weight).norm()) < 0.05 * float(moved.norm()), (
                name
            )  # Adam enlarges the rounding of small gradients


def chosen_ids(config: Config, size: int | None) -> Tensor:
    return drafter_vocab(load_file(config.folder("states") / "token_counts.safetensors")["counts"], size, None)


def rewrite_with_top(
    config: Config,
    target: Target,
    size: int | None,
    k: int,
    names: Sequence[str] = ("train", "greedy", "sampled"),
    ids_D: Tensor | None = None,
) -> None:
    """Put stores of the same rows with log-probabilities in place of those with final states."""
    ids_D = chosen_ids(config, size) if ids_D is None else ids_D
    for name in names:
        folder = config.folder("states") / name
        store = StateStore(folder.resolve())
        folder.unlink()
        with StateWriter(folder, replace(store.spec, top_logprobs=k, vocab_digest=vocab_digest(ids_D)), 1 << 20) as writer:
            for row in map(store.read, range(len(store))):
                top = top_log_probs(row.final_TH, target.lm_head(torch.float32), ids_D, k)
                writer.add(replace(row, final_TH=row.final_TH[:, :0], top=top))
        finish_store(folder, {})
