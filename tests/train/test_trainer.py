"""Whole runs in miniature: what they write, that stopping them changes nothing, and that what does not fit is refused."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from eyas.config import load_config
from eyas.errors import EyasError
from eyas.files import read_json, read_jsonl
from eyas.folder import read_drafter
from eyas.manifest import read_manifest
from eyas.states import StateRow, StateStore, StateWriter, finish_store, row_key
from train.batches import Position, plan_epoch
from train.checkpoint import latest
from train.inputs import open_inputs
from train.trainer import train

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def log_of(folder: Path, kind: str) -> list[dict[str, Any]]:
    return [record for _, record in read_jsonl(folder / "log.jsonl") if record["kind"] == kind]


def without_clock(folder: Path) -> list[dict[str, Any]]:
    clock = {"seconds", "tokens_per_second"}
    return [{key: value for key, value in record.items() if key not in clock} for _, record in read_jsonl(folder / "log.jsonl")]


def final_state(folder: Path) -> dict[str, torch.Tensor]:
    found = latest(folder / "checkpoints")
    assert found is not None
    return {**found.tensors("model"), **found.tensors("optimizer")}


def assert_same_run(folder: Path, other: Path) -> None:
    state, expected = final_state(folder), final_state(other)
    assert state.keys() == expected.keys()
    assert [name for name in state if not torch.equal(state[name], expected[name])] == []
    assert without_clock(folder) == without_clock(other)
    best, expected = (load_file(run / "best" / "model.safetensors") for run in (folder, other))
    assert [name for name in expected if not torch.equal(best[name], expected[name])] == []


def command(config: Path, *before: str) -> list[str]:
    return [sys.executable, *before, "-m", "train", "-c", str(config)]


@pytest.fixture(scope="module")
def whole(make_module_run) -> tuple[Path, Path]:
    """A run that was never stopped: its config and its folder."""
    config = make_module_run("whole", epochs=4)
    return config, train(load_config(config))


def test_a_run_raises_acceptance_and_writes_what_it_promises(whole) -> None:
    _, folder = whole
    validations, records = log_of(folder, "validation"), log_of(folder, "train")
    steps = records[-1]["step"]
    assert [record["step"] for record in records] == [*range(3, steps, 3), steps]
    assert [record["step"] for record in validations] == [*range(0, steps, 5), steps]
    assert records[-1]["loss"] < 0.95 * records[0]["loss"]
    assert max(record["acceptance_length"] for record in validations) > validations[0]["acceptance_length"]
    first = validations[0]
    assert first["acceptance_length"] == (first["greedy"]["length"] + first["sampled"]["length"]) / 2
    assert len(first["greedy"]["unconditional_J"]) == 2
    assert set(first["greedy"]["by_category"]) == {"category0", "category1"}
    assert len(records[0]["loss_J"]) == 3
    manifest = read_manifest(folder, "checkpoint")
    assert manifest.complete
    assert set(manifest.inputs) == {"states/train", "states/greedy", "states/sampled", "target", "init"}
    assert manifest.holds["tokens"] == records[-1]["tokens"]
    kept = sorted(path.name for path in (folder / "checkpoints").iterdir())
    assert len(kept) == 2
    assert kept[-1] == f"step-{steps:06d}"


def test_the_best_drafter_is_the_one_accepted_most_and_can_be_read(whole) -> None:
    _, folder = whole
    validations = log_of(folder, "validation")
    top = max(validations, key=lambda record: record["acceptance_length"])
    best = read_manifest(folder).holds["best"]
    assert best == {"step": top["step"], "length": top["acceptance_length"]}
    drafter = read_drafter(str(folder / "best"))
    assert drafter.layers == (1, 2, 3)
    assert all(tensor.isfinite().all() for tensor in drafter.drafter.parameters())


def test_every_token_of_every_epoch_is_counted_once(whole, tiny_states) -> None:
    _, folder = whole
    holds = read_json(tiny_states / "train" / "manifest.json")["holds"]
    assert read_manifest(folder).holds["tokens"] == 4 * holds["tokens"]
    assert read_manifest(folder).holds["supervised_tokens"] == 4 * holds["supervised"]


def test_a_finished_run_is_left_as_it_is_and_another_config_is_refused(whole) -> None:
    config, folder = whole
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}
    train(load_config(config, ["train.log_every=1"]))
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()} == before
    with pytest.raises(EyasError, match=r"learning_rate is 0.003 there and 0.1 here"):
        train(load_config(config, ["train.learning_rate=0.1"]))


def wait_for_step(folder: Path, step: int, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        assert process.poll() is None, process.stderr.read() if process.stderr else ""
        log = folder / "log.jsonl"
        if log.exists() and any(f'"step": {number},' in log.read_text() for number in range(step, step + 3)):
            return
        time.sleep(0.01)
    raise AssertionError(f"step {step} was not reached")


def test_a_run_killed_before_and_after_its_first_checkpoint_ends_bit_for_bit_as_if_it_never_was(whole, make_run) -> None:
    config = make_run("killed", epochs=4)
    folder = load_config(config).folder("train")
    for step in (0, 6):
        process = subprocess.Popen(command(config), env=ENVIRONMENT, stderr=subprocess.PIPE, text=True)
        wait_for_step(folder, step, process)
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert 4 <= latest(folder / "checkpoints").counters.step < 56
    with (folder / "log.jsonl").open("a") as log:
        log.write('{"kind": "train", "st')  # what a kill in the middle of a write leaves
    train(load_config(config))
    assert_same_run(folder, whole[1])


def test_ctrl_c_writes_a_checkpoint_exits_130_and_says_how_to_resume(whole, make_run) -> None:
    config = make_run("stopped", epochs=4, checkpoint_every=1000)
    folder = load_config(config).folder("train")
    process = subprocess.Popen(command(config), env=ENVIRONMENT, stderr=subprocess.PIPE, text=True)
    wait_for_step(folder, 6, process)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 130
    assert re.search(r"^eyas: interrupted, checkpoint of step \d+ is written; the same command resumes$", errors, re.MULTILINE)
    assert "Traceback" not in errors
    assert latest(folder / "checkpoints").counters.step >= 6
    train(load_config(config))
    assert_same_run(folder, whole[1])


def launch(processes: int, config: Path) -> Path:
    # on CPUs too: with --cpu accelerate starts one process, whatever number is asked for
    before = ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", str(processes), "--num_machines", "1"]
    before += ["--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"]
    result = subprocess.run(command(config, *before), env=ENVIRONMENT, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    return load_config(config).folder("train")


def test_two_processes_one_of_them_idle_now_and_then_have_the_gradients_of_one(make_run, tiny_states) -> None:
    lengths = StateStore(tiny_states / "train").lengths
    idle = [budget for budget in range(100, 400) if plan_epoch(lengths, 0, Position(), budget, 2, 1)[-1].of_rank(1) == [()]]
    # at a rate of nothing AdamW's first moments are a sum of gradients, with no sign of a tiny one blown up to a step
    same = {"batch_tokens": idle[0], "learning_rate": 1e-12, "log_every": 1}
    alone = train(load_config(make_run("alone", accumulation=2, **same)))
    together = launch(2, make_run("together", **same))
    ours, theirs = final_state(alone), final_state(together)
    for name in (name for name in ours if name.startswith("exp_avg.")):
        assert torch.linalg.vector_norm(theirs[name] - ours[name]) < 1e-4 * torch.linalg.vector_norm(ours[name]), name
    for one, two in zip(log_of(alone, "train"), log_of(together, "train"), strict=True):
        assert (one["step"], one["tokens"], one["supervised_tokens"]) == (two["step"], two["tokens"], two["supervised_tokens"])
        assert one["loss"] == pytest.approx(two["loss"], rel=1e-5)
        assert one["gradient_norm"] == pytest.approx(two["gradient_norm"], rel=1e-4)
    ours, theirs = (log_of(folder, "validation")[0] for folder in (alone, together))
    assert [ours[name]["accepted_J"] for name in ("greedy", "sampled")] == [theirs[name]["accepted_J"] for name in ("greedy", "sampled")]
    assert read_manifest(together).holds["processes"] == 2


def test_a_warm_start_is_measured_untouched_and_its_layers_are_checked(whole, make_run, tmp_path) -> None:
    _, folder = whole
    best = read_manifest(folder).holds["best"]
    config = make_run("warm", init=str(folder / "best"), max_steps=3)
    warm = train(load_config(config))
    assert log_of(warm, "validation")[0]["acceptance_length"] == best["length"]
    assert log_of(warm, "train")[-1]["step"] == 3
    before, after = (read_drafter(run / "best").drafter for run in (folder, warm))
    assert torch.equal(after.draft_ids_D, before.draft_ids_D)  # rows of the head that keep their places keep their tokens

    wider = train(load_config(make_run("wider", init=str(folder / "best"), max_steps=1), ["drafter.draft_vocab_size=40"]))
    after = read_drafter(wider / "best").drafter
    assert len(after.draft_ids_D) == 40
    assert set(before.draft_ids_D.tolist()) < set(after.draft_ids_D.tolist())

    other = tmp_path / "other"
    other.mkdir()
    save_file(load_file(folder / "best" / "model.safetensors"), other / "model.safetensors")
    raw = read_json(folder / "best" / "config.json")
    recorded = json.loads(json.dumps(raw).replace("[1, 2, 3]", "[0, 1, 2]"))
    assert recorded != raw
    guessed = {**raw, "eyas": {}, "eagle_config": {}, "eagle_aux_hidden_state_layer_ids": [2, 3, 4]}
    config = load_config(make_run("layers", init=str(other)))
    for drafter, readings in ((recorded, r"\[0, 1, 2\]"), (guessed, r"\[2, 3, 4\] or \[3, 4, 5\]")):
        (other / "config.json").write_text(json.dumps(drafter))
        with pytest.raises(EyasError, match=rf"reads layers {readings}, states/train holds \[1, 2, 3\]"):
            open_inputs(config)


def test_an_environment_that_names_micro_batches_divides_no_gradient(make_run, monkeypatch) -> None:
    plain = train(load_config(make_run("plain", max_steps=1)))
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    named = train(load_config(make_run("named", max_steps=1)))
    assert log_of(named, "train")[0]["gradient_norm"] == log_of(plain, "train")[0]["gradient_norm"]


def test_a_log_of_an_earlier_start_is_cut_whatever_its_lines_hold(make_run) -> None:
    config = load_config(make_run("separator", max_steps=1))
    folder = config.folder("train")
    folder.mkdir()
    (folder / "log.jsonl").write_text('{"kind": "validation", "step": 0, "by_category": {"a\u2028b": 1}}\n', encoding="utf-8")
    train(config)
    assert [record["step"] for record in log_of(folder, "validation")] == [0, 1]
    assert "by_category" not in log_of(folder, "validation")[0]


def test_a_held_out_row_beyond_the_drafters_positions_is_refused(make_run, tiny_states) -> None:
    config = load_config(make_run("long"))
    spec = StateStore(tiny_states / "greedy").spec
    ids = torch.arange(130) % 48
    supervised = ids > 3
    states = torch.zeros(130, 32)
    (config.folder("states") / "greedy").unlink()
    with StateWriter(config.folder("states") / "greedy", spec, 1 << 20) as writer:
        writer.add(StateRow(row_key(ids.tolist(), supervised.tolist()), "chat", ids, supervised, states.repeat(1, 3), states))
    finish_store(config.folder("states") / "greedy", {})
    with pytest.raises(EyasError, match="greedy has a row of 130 tokens, the drafter 128 positions"):
        open_inputs(config)


def test_a_time_budget_ends_with_the_schedule_at_its_end(make_run) -> None:
    config = make_run("timed", epochs=1000, max_minutes=0.05, final_rate_share=0.1, log_every=1, evaluate_every=10_000)
    began = time.monotonic()
    folder = train(load_config(config))
    records = log_of(folder, "train")
    assert time.monotonic() - began < 30
    assert records[-1]["seconds"] >= 1.5
    assert records[-1]["step"] < 14_000
    assert records[-1]["learning_rate"] == pytest.approx(0.1 * 3e-3)
    assert log_of(folder, "validation")[-1]["step"] == records[-1]["step"]


def test_steps_in_which_nothing_counts_move_nothing(make_run) -> None:
    config = load_config(make_run("nothing", max_steps=2), ["drafter.draft_vocab_size=1"])
    path = config.folder("states") / "token_counts.safetensors"
    unused_V = (load_file(path)["counts"] == 0).long()
    assert unused_V.any()
    path.unlink()
    save_file({"counts": unused_V}, path)
    folder = train(config)
    assert log_of(folder, "train")[-1]["loss"] is None
    first, last = log_of(folder, "validation")
    assert first["greedy"] == last["greedy"]
    assert first["sampled"] == last["sampled"]


def test_states_of_another_target_are_refused(make_run, tiny_target, tmp_path) -> None:
    other = shutil.copytree(tiny_target.folder, tmp_path / "other")
    raw = read_json(other / "config.json")
    (other / "config.json").write_text(json.dumps({**raw, "rms_norm_eps": 1e-3}))
    with pytest.raises(EyasError, match="captured with another target: target_digest"):
        train(load_config(make_run("foreign"), [f"target.model={other}"]))


def test_missing_states_say_which_command_makes_them(make_run) -> None:
    config = load_config(make_run("missing"))
    (config.folder("states") / "sampled").unlink()
    with pytest.raises(EyasError, match="states/sampled does not exist: run `eyas prep` first"):
        train(config)


def test_a_tracker_that_is_not_installed_names_its_extra(make_run, monkeypatch) -> None:
    monkeypatch.setattr("train.tracking.find_spec", lambda name: None)
    with pytest.raises(EyasError, match=r"wandb is not installed; pip install 'eyas\[wandb\]'"):
        train(load_config(make_run("tracked", trackers=["wandb"])))
