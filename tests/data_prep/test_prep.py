import json
from io import StringIO

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from data_prep.prep import run_prep
from data_prep.replies import SETS, read_rows
from data_prep.show import SUPERVISED, coloured, show
from eyas.cli import main
from eyas.config import DrafterConfig
from eyas.errors import EyasError
from eyas.manifest import read_manifest
from eyas.states import StateStore
from eyas.target import Target
from eyas.vocab import vocab_digest
from train.inputs import open_inputs


def test_a_run_ends_with_three_verified_stores_of_the_replies_rows(make_config, tiny):
    config = make_config()
    run_prep(config)
    for name in SETS:
        store = StateStore(config.folder(f"states/{name}"))
        rows = read_rows(config, tiny, name).usable
        assert store.keys == sorted(row.key for row in rows)
        assert store.spec.layers == tiny.default_layers()
        assert store.verify() == []
        assert store.manifest.holds["rechecked"] >= 1


def test_token_counts_are_the_supervised_tokens_of_the_training_rows(make_config, tiny):
    config = make_config()
    run_prep(config)
    counts = load_file(config.folder("states") / "token_counts.safetensors")["counts"]
    store = StateStore(config.folder("states/train"))
    expected = torch.zeros(tiny.shape.vocab_size, dtype=torch.int64)
    for index in range(len(store)):
        row = store.read(index)
        for token in row.ids_T[row.supervised_T].tolist():
            expected[token] += 1
    assert torch.equal(counts, expected)


def test_a_second_run_loads_no_model_and_changes_no_file(make_config, monkeypatch):
    config = make_config()
    run_prep(config)
    before = {path: path.stat().st_mtime_ns for path in config.output.rglob("*.jsonl")} | {
        path: path.read_bytes() for path in config.output.rglob("manifest.json")
    }
    monkeypatch.setattr(Target, "load_model", lambda *_: pytest.fail("model loaded"))
    run_prep(config)
    after = {path: path.stat().st_mtime_ns for path in config.output.rglob("*.jsonl")} | {
        path: path.read_bytes() for path in config.output.rglob("manifest.json")
    }
    assert before == after


def test_the_summary_names_counts_quarantine_and_coverage(make_config, capsys):
    config = make_config(max_length=100, max_quarantine=1.0)
    run_prep(config)
    text = capsys.readouterr().out
    holds = read_manifest(config.folder("states/train")).holds
    assert f"{holds['tokens']:,}" in text
    assert f"{sum(read_manifest(config.folder('replies')).holds['quarantined'].values())} prompt over prep.max_length" in text
    assert "263 tokens cover 100.00% of the supervised training tokens" in text


def test_shown_rows_have_exactly_their_supervised_stretch_in_colour(make_config, tiny):
    config = make_config()
    run_prep(config)
    row = read_rows(config, tiny, "greedy").usable[1]
    text = coloured(tiny.tokenizer(), row.tokens)
    marked = "".join(text.plain[span.start : span.end] for span in text.spans if span.style == SUPERVISED)
    reply = [token for token, flag in zip(row.tokens.ids, row.tokens.supervised, strict=True) if flag]
    assert marked == tiny.tokenizer().decode(reply)
    for name in ("1", row.key[:16], row.prompt_key):
        output = StringIO()
        show(config, name, "greedy", Console(file=output, width=200))
        assert row.key[:12] in output.getvalue()
        assert f"{len(reply)} supervised" in output.getvalue()


def test_a_row_that_is_not_there_is_named_with_the_possible_numbers(make_config):
    config = make_config()
    run_prep(config)
    with pytest.raises(EyasError, match="greedy has no row 99: give a number from 0 to 3"):
        show(config, "99", "greedy")


def test_the_module_runs_a_yaml_config_and_says_user_errors_in_one_line(make_config, tmp_path, capsys):
    config = make_config()
    path = tmp_path / "run.yaml"
    path.write_text(json.dumps(config.model_dump(mode="json")))
    for arguments, code in (([], 0), (["--set", "prep.replies.temperatures=[0.2]"], 1)):
        with pytest.raises(SystemExit) as ended:
            main(["prep", "-c", str(path), *arguments])
        assert ended.value.code == code
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("eyas: ")
    assert "temperatures is [1.0] there and [0.2] here" in error


def test_log_probabilities_are_kept_in_the_vocabulary_that_training_will_choose(make_config, capsys):
    config = make_config(states={"top_logprobs": 5, "dtype": "fp8"}).model_copy(
        update={"drafter": DrafterConfig(init="scratch", draft_vocab_size=40)}
    )
    run_prep(config)
    assert "5 log-probabilities of the draft vocabulary, fp8" in " ".join(capsys.readouterr().out.split())
    inputs = open_inputs(config)
    digest = vocab_digest(inputs.drafter.draft_ids_D)
    for store in (inputs.train, *inputs.held_out.values()):
        assert (store.spec.top_logprobs, store.spec.vocab_digest) == (5, digest)
        assert store.read(0).top.index_NK.max() < 40


def test_more_log_probabilities_than_the_draft_vocabulary_has_are_refused(make_config):
    config = make_config(states={"top_logprobs": 41}).model_copy(update={"drafter": DrafterConfig(init="scratch", draft_vocab_size=40)})
    with pytest.raises(EyasError, match="top_logprobs is 41, of a draft vocabulary of 40 tokens"):
        run_prep(config)
