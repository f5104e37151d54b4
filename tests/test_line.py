"""The whole line on the real model, as a user runs it: prompts to report, in miniature."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from eyas.config import load_config
from eyas.folder import read_drafter
from eyas.manifest import read_manifest

ROOT = Path(__file__).parents[1]


def eyas(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command line from the repository's root."""
    return subprocess.run([sys.executable, "-m", "eyas", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=500)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, smollm2: Path) -> Path:
    """The default config cut down to minutes: a few prompts, two dozen tokens a reply; returns its output folder."""
    folder = tmp_path_factory.mktemp("line")
    values = yaml.safe_load((ROOT / "configs" / "smollm2.yaml").read_text())
    values["output"] = str(folder / "out")
    values["prep"]["sources"][0]["limit"] = 30
    values["prep"]["heldout"] = {"prompts": 4}
    values["prep"]["replies"] |= {"max_new_tokens": 24, "batch_size": 8}
    values["train"] |= {"ttt_steps": 3, "epochs": 1, "batch_tokens": 2048, "evaluate_every": 2}
    values["eval"] |= {"prompts": 4, "max_new_tokens": 16, "warmup_prompts": 1}
    (folder / "config.yaml").write_text(yaml.safe_dump(values))
    for command in ("prep", "train", "eval"):
        ended = eyas(command, "-c", str(folder / "config.yaml"))
        assert ended.returncode == 0, f"{command}: {ended.stdout[-2000:]}{ended.stderr[-2000:]}"
    return folder / "out"


def test_every_stage_leaves_a_complete_folder(run: Path):
    for stage in ("replies", "states/train", "states/greedy", "states/sampled", "train", "export", "bench", "report"):
        assert read_manifest(run / stage).complete, stage


def test_the_export_is_a_drafter_that_reads_the_layers_it_was_trained_on(run: Path):
    assert read_drafter(run / "export").layers == tuple(read_manifest(run / "states/train").config["layers"])


def test_every_variant_answers_every_held_out_prompt_as_the_baseline_does_or_the_report_counts_it(run: Path):
    measured = [json.loads(line) for line in (run / "bench" / "measurements.jsonl").read_text().splitlines()]
    by_variant = {name: {row["key"] for row in measured if row["variant"] == name} for name in ("none", "starter", "result")}
    assert len(by_variant["none"]) == 4
    assert by_variant["starter"] == by_variant["result"] == by_variant["none"]
    report = json.loads((run / "report" / "report.json").read_text())
    assert {variant["name"] for variant in report["summary"]["variants"]} == {"none", "starter", "result"}


def test_the_same_commands_again_change_nothing(run: Path):
    config = str(run.parent / "config.yaml")
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*.safetensors")}
    for command in ("prep", "train", "export"):
        assert eyas(command, "-c", config).returncode == 0
    after = {path: path.stat().st_mtime_ns for path in run.rglob("*.safetensors") if path.name != "token_counts.safetensors"}
    assert after == {path: time for path, time in before.items() if path.name != "token_counts.safetensors"}


def test_a_row_is_shown_with_its_prompt_and_reply(run: Path):
    shown = eyas("show", "0", "-c", str(run.parent / "config.yaml"))
    assert shown.returncode == 0
    assert "<|im_start|>" in shown.stdout


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.name)
def test_every_shipped_config_is_valid(path: Path):
    load_config(path)
