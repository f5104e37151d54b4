"""`eyas plan -c CONFIG`: the user's node from nothing but its config, and a run that has measured already."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from eval.measurement import MEASUREMENTS
from eyas.cli import main
from eyas.files import JsonlAppender
from eyas.manifest import begin, finish
from tests.eval.points import request

KIMI = str(Path(__file__).parents[1] / "configs" / "kimi-k2.5.yaml")


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def planned(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    """All figures of a plan, by key."""
    with pytest.raises(SystemExit) as ended:
        main(["plan", "--json", *arguments])
    assert ended.value.code == 0
    topics = json.loads(capsys.readouterr().out)
    return {key: figure for topic in topics.values() for key, figure in topic["figures"].items()}


def values(figures: dict[str, Any], *keys: str) -> list[Any]:
    return [figures[key]["value"] for key in keys]


def test_kimi_is_planned_without_its_weights_or_the_hub(capsys, tmp_path):
    found = planned(capsys, "-c", KIMI, "--set", f"output={tmp_path}", "--set", "node.disk_gb=400")
    assert values(found, "hidden", "vocabulary", "draft_vocabulary", "parameters") == [7168, 163840, 32000, 1_190_948_864]
    assert values(found, "token_bytes_bfloat16", "token_bytes_fp8") == [57_349, 29_125]
    assert found["states_gb"]["value"] == pytest.approx(20e6 * 29_125 / 1e9)
    assert found["write_mb_per_s"]["value"] == pytest.approx(4000 * 29_125 / 1e6)
    assert found["windows"]["value"] == 2  # 582.5 GB of states in 400 - 45.3 GB
    assert found["pair_gmac"]["value"] == pytest.approx(1.04, abs=0.005)
    assert found["even_length"]["value"] == pytest.approx(2.466)
    assert found["even_gain"]["value"] == pytest.approx(0.466)
    assert values(found, "want_length", "want_rate") == [pytest.approx(4.5), "impossible"]
    assert found["ddp_held_gib"]["value"] - found["fsdp2_held_gib"]["value"] == pytest.approx(16 * 1_190_948_864 * 7 / 8 / 2**30)
    assert found["ddp_peak_gib"]["value"] == pytest.approx(found["ddp_held_gib"]["value"] + found["batch_peak_gib"]["value"])
    assert found["ddp_fits"]["value"] == (found["ddp_peak_gib"]["value"] <= 0.9 * 95.6)
    phases = sum(values(found, "replies_h", "capture_h", "prep_starts_h", "training_h", "bench_h"))
    assert found["total_h"]["value"] == pytest.approx(phases)


def test_top_log_probabilities_make_the_states_smaller(capsys, run):
    found = planned(capsys, "-c", str(run), "--set", "prep.states.top_logprobs=64", "--set", "prep.states.dtype=fp8")
    assert found["token_bytes"]["value"] == found["token_bytes_fp8_top64"]["value"] < found["token_bytes_fp8"]["value"]
    assert found["gmac_target's_lm_head"]["value"] == 0


def test_what_is_not_known_is_left_open_and_asked_for(capsys, tmp_path):
    unknown = [f"--set=node.{key}=null" for key in ("gpu_memory_gib", "prefill_tps", "reply_tokens", "cycle_ms")]
    found = planned(capsys, "-c", KIMI, "--set", f"output={tmp_path}", *unknown)
    for key, needs in (
        ("disk_fits", "node.disk_gb"),
        ("capture_h", "node.prefill_tps"),
        ("rows", "node.reply_tokens"),
        ("batch_peak_gib", "node.reply_tokens"),
        ("even_gain", "node.cycle_ms"),
        ("total_h", "node.prefill_tps"),
        ("needed", "three validations of eyas train"),
    ):
        assert found[key]["value"] is None
        assert needs in found[key]["missing"]
        assert needs in found[key]["formula"]
    assert found["token_bytes"]["value"] == 29_125


def test_the_tables_tell_formulas_and_where_sizes_are_from(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit):
        main(["plan", "-c", KIMI, "--set", f"output={tmp_path}"])
    text = capsys.readouterr().out
    for part in (
        "ids 4 + aux_scale 336 + final_scale 112 + aux 21,504 + final 7,168 + supervised 1",
        "moonshotai/Kimi-K2.5, sizes as published",
        "30 ms x 82.2 tokens/s",
        "memory of a rank, FSDP2 over 8",
        "not known: needs node.disk_gb",
    ):
        assert part in text


@pytest.fixture
def run(tmp_path: Path, smollm2: Path) -> Path:
    """The config of a run for SmolLM2 from scratch, on one GPU."""
    path = tmp_path / "run.yaml"
    given = {
        "output": str(tmp_path / "out"),
        "target": {"model": str(smollm2)},
        "prep": {"sources": [{"source": "unused.jsonl"}]},
        "drafter": {"init": "scratch", "draft_vocab_size": 8192},
        "train": {"epochs": 2},
        "engine": {"draft_steps": 2},
        "node": {"training_tokens": 1000, "reply_tokens": 100, "reply_share": 0.5, "prefill_tps": 10, "baseline_tps": 5},
    }
    path.write_text(yaml.safe_dump(given))
    return path


def test_what_the_run_has_measured_goes_before_what_the_config_says(capsys, run, tmp_path):
    output = tmp_path / "out"
    begin(output / "states" / "train", "states", {}, {})
    finish(output / "states" / "train", {"rows": 40, "tokens": 8000, "supervised": 6000, "tokens_per_second": 500})
    with JsonlAppender(output / "train" / "log.jsonl") as log:
        for step, tokens, length in ((1, 1000, 2.0), (2, 2000, 2.1), (3, 4000, 2.2)):
            log.append({"kind": "train", "step": step, "tokens_per_second": 100.0 * step})
            log.append({"kind": "validation", "step": step, "supervised_tokens": tokens, "greedy": {"length": length}})
    with JsonlAppender(output / "bench" / MEASUREMENTS) as rows:
        for key in ("a", "b"):
            for measured in (request(key, "none", 100, 2.0), request(key, "starter", 100, 1.0, (0, 50))):
                rows.append(vars(measured))
    found = planned(capsys, "-c", str(run))
    assert values(found, "training_tokens", "reply_tokens", "reply_share", "prefill_tps", "training_tps") == [8000, 150, 0.75, 500, 200]
    assert values(found, "baseline_tps", "cycle_ms", "acceptance_length") == [pytest.approx(50), pytest.approx(20), pytest.approx(2)]
    assert found["training_h"]["value"] == pytest.approx(2 * 8000 / 200 / 3600)
    assert all(found[key]["formula"].startswith("measured: ") for key in ("training_tokens", "prefill_tps", "training_tps", "baseline_tps"))
    assert found["even_length"]["value"] == pytest.approx(1.0)
    assert found["doubling"]["value"] == pytest.approx(0.1)
    assert found["needed"]["value"] == 4000  # one token a cycle is enough: reached


def test_with_one_gpu_there_is_neither_fsdp2_nor_an_exchange(capsys, run):
    found = planned(capsys, "-c", str(run), "--set", "node.training_tflops=0.1", "--set", "node.bandwidth_gb_per_s=5")
    assert found["exchange_h"]["value"] == 0
    assert found["one_process_held_gib"]["value"] > 0
    assert not [key for key in found if key.startswith(("ddp", "fsdp2"))]
    assert found["training_h"]["value"] == pytest.approx(
        2000 * (found["token_gflop"]["value"] / 100 + found["token_mb"]["value"] / 5000) / 3600
    )


def test_rates_on_the_command_line_go_before_the_configs(capsys, tmp_path):
    found = planned(capsys, "-c", KIMI, "--set", f"output={tmp_path}", "--cycle-ms", "20", "--baseline-tps", "90")
    assert found["even_length"]["value"] == pytest.approx(1.8)


def test_the_break_even_alone_needs_no_config(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["plan", "--baseline-tps", "82.2", "--cycle-ms", "30"])
    assert ended.value.code == 0
    assert "2.466" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--baseline-tps", "82.2"], "give --config of a run, or --baseline-tps and --cycle-ms"),
        (["--baseline-tps", "82.2", "--cycle-ms", "30", "--json"], "give its --config"),
        (["-c", KIMI, "--cycle-ms", "0.03"], "if you meant 0.03 seconds, give 30"),
        (["-c", KIMI, "--set", "target.model=nobody/nothing"], "target.model: nobody/nothing is no folder"),
    ],
)
def test_what_cannot_be_planned_is_said_in_one_line(capsys, arguments, said):
    with pytest.raises(SystemExit) as ended:
        main(["plan", *arguments])
    assert ended.value.code == 1
    assert said in capsys.readouterr().err
