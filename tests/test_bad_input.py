"""What a user gets wrong ends in one clear line on stderr, exit code 1 and no traceback."""

import json
import socket
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import save_file

from eyas.cli import main


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Run the command line, which must fail with exit code 1; return the one line it said."""
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    assert ended.value.code == 1
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("eyas: ")]
    assert len(lines) == 1
    return lines[0]


@pytest.fixture
def write_config(tmp_path: Path, smollm2: Path):
    def write(**sections: object) -> str:
        prompts = tmp_path / "prompts.jsonl"
        if not prompts.exists():
            prompts.write_text(
                "".join(json.dumps({"prompt": f"Tell me about the number {n} and its {n % 7} friends."}) + "\n" for n in range(20))
            )
        values = {
            "output": str(tmp_path / "out"),
            "target": {"model": str(smollm2)},
            "prep": {"sources": [{"source": str(prompts)}], "heldout": {"prompts": 2}},
            "drafter": {"init": "scratch"},
        } | sections
        path = tmp_path / "config.yaml"
        path.write_text(yaml.safe_dump(values))
        return str(path)

    return write


def test_a_missing_config_is_named(capsys):
    assert "nowhere.yaml does not exist" in run(capsys, "prep", "-c", "nowhere.yaml")


def test_a_misspelt_key_is_named_with_the_right_one(capsys, write_config):
    said = run(capsys, "train", "-c", write_config(train={"learning_rat": 1e-3}))
    assert "train.learning_rat" in said
    assert "learning_rate" in said


def test_a_missing_model_is_named(capsys, write_config, tmp_path):
    missing = str(tmp_path / "no-model")
    assert missing in run(capsys, "prep", "-c", write_config(target={"model": missing}))


def test_a_model_of_unsafe_weights_is_refused(capsys, write_config, tmp_path, smollm2):
    folder = tmp_path / "pickled"
    folder.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((smollm2 / name).read_bytes())
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04anything")
    said = run(capsys, "prep", "-c", write_config(target={"model": str(folder)}))
    assert "pytorch_model.bin" in said or ".bin" in said


def test_a_drafter_of_unsafe_weights_is_refused(capsys, write_config, tmp_path):
    folder = tmp_path / "drafter"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLMEagle3"]}))
    (folder / "training_state.pt").write_bytes(b"\x80\x04anything")
    assert str(folder) in run(capsys, "prep", "-c", write_config(drafter={"init": str(folder)}))


def test_an_empty_prompt_file_is_named(capsys, write_config, tmp_path):
    (tmp_path / "prompts.jsonl").write_text("")
    assert "prompts.jsonl" in run(capsys, "prep", "-c", write_config())


def test_a_broken_line_is_named_by_number(capsys, write_config, tmp_path):
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "fine"}\n{"prompt": \n')
    assert "prompts.jsonl, line 2" in run(capsys, "prep", "-c", write_config())


def test_rows_without_a_reply_stop_a_run_on_given_replies(capsys, write_config, tmp_path):
    config = write_config(
        prep={"sources": [{"source": str(tmp_path / "prompts.jsonl")}], "heldout": {"prompts": 2}, "replies": {"mode": "given"}}
    )
    said = run(capsys, "prep", "-c", config)
    assert "reply" in said or "replies" in said


def test_training_without_states_says_what_to_run_first(capsys, write_config):
    assert "eyas prep" in run(capsys, "train", "-c", write_config())


def test_an_export_without_a_checkpoint_says_what_to_run_first(capsys, write_config):
    assert "eyas train" in run(capsys, "export", "-c", write_config())


def test_a_measurement_without_an_export_says_what_is_missing(capsys, write_config):
    assert "eyas" in run(capsys, "bench", "-c", write_config())


def test_a_taken_port_is_named(capsys, write_config, tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        said = run(capsys, "serve", "-c", write_config(), "--port", str(port))
    assert f"127.0.0.1:{port}" in said


def test_an_output_that_cannot_be_written_is_named(capsys, write_config, tmp_path):
    (tmp_path / "file").write_text("in the way")
    assert str(tmp_path / "file") in run(capsys, "prep", "-c", write_config(output=str(tmp_path / "file" / "out")))


def test_a_folder_of_no_known_kind_is_said_so(capsys, tmp_path):
    save_file({"x": torch.zeros(1)}, tmp_path / "x.safetensors")
    assert str(tmp_path) in run(capsys, "inspect", str(tmp_path))


def test_nonsense_for_the_plan_is_refused(capsys):
    assert "cycle" in run(capsys, "plan", "--baseline-tps", "82.2", "--cycle-ms", "0")
