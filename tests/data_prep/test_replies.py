import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch

from data_prep.prompts import split_prompts
from data_prep.replies import QUARANTINE, SETS, read_rows, write_replies
from data_prep.rows import build_rows
from data_prep.template import prompt_ids
from eyas.attention_hf import NAME
from eyas.errors import EyasError
from eyas.files import read_jsonl
from eyas.manifest import read_manifest

# Answers slowly, so that the test can kill it in the middle.
SLOW_RUN = """
import sys, time, torch
from pathlib import Path
from data_prep.prompts import split_prompts
from data_prep.replies import write_replies
from eyas.attention_hf import NAME
from eyas.config import Config
from eyas.target import open_target
config = Config.model_validate_json(Path(sys.argv[1]).read_text())
target = open_target(config.target)
def load():
    model = target.load_model(torch.float32, "cpu", NAME)
    model.register_forward_pre_hook(lambda *_: time.sleep(0.05))
    return model
write_replies(config, target, split_prompts(config.prep, config.seed), load)
"""


def run(config, target):
    return write_replies(config, target, split_prompts(config.prep, config.seed), lambda: target.load_model(torch.float32, "cpu", NAME))


def lines(folder, name):
    return {record["key"]: record for _, record in read_jsonl(folder / f"{name}.jsonl")}


def test_every_prompt_is_answered_once_in_its_set(make_config, tiny):
    config = make_config()
    split, folder = split_prompts(config.prep, config.seed), run(config, tiny)
    for name, prompts in (("train", split.train), ("greedy", split.heldout), ("sampled", split.heldout)):
        keys = [record["key"] for _, record in read_jsonl(folder / f"{name}.jsonl")]
        assert sorted(keys) == sorted(prompt.key for prompt in prompts)
    assert read_manifest(folder, "replies").complete


def test_a_line_holds_the_rendered_prompt_and_the_temperature_of_its_set(make_config, tiny):
    config = make_config(replies={"serving_temperature": 0.5})
    folder, tokenizer = run(config, tiny), tiny.tokenizer()
    for name, temperature in (("train", 1.0), ("greedy", 0.0), ("sampled", 0.5)):
        for record in lines(folder, name).values():
            assert record["prompt_ids"] == prompt_ids(tokenizer, record["messages"])
            assert record["temperature"] == temperature
            assert 1 <= len(record["reply_ids"]) <= 12
            assert record["finished"] == (record["reply_ids"][-1] in tiny.shape.eos_ids)


def test_a_run_killed_twice_loses_and_doubles_nothing(make_config, tiny, tmp_path):
    config = make_config("killed")
    (tmp_path / "config.json").write_text(config.model_dump_json())
    train = config.folder("replies") / "train.jsonl"
    for wanted in (3, 9):
        process = subprocess.Popen([sys.executable, "-c", SLOW_RUN, tmp_path / "config.json"], stderr=subprocess.PIPE)
        while not train.exists() or train.read_bytes().count(b"\n") < wanted:
            assert process.poll() is None, process.stderr.read().decode()
            time.sleep(0.01)
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
        with train.open("ab") as file:
            file.write(b'{"key": "torn')  # as if killed in the middle of a line
    survived = train.read_bytes().count(b"\n")
    folder = run(config, tiny)
    assert 9 <= survived < len(lines(folder, "train"))
    whole = run(make_config("whole"), tiny)
    for name in SETS:
        assert sum(1 for _ in read_jsonl(folder / f"{name}.jsonl")) == len(lines(folder, name))
        assert lines(folder, name) == lines(whole, name)


def test_a_current_folder_needs_no_model(make_config, tiny):
    config = make_config()
    run(config, tiny)
    assert write_replies(config, tiny, split_prompts(config.prep, config.seed), lambda: pytest.fail("model loaded"))


def test_other_settings_in_the_same_folder_are_refused_by_name(make_config, tiny):
    run(make_config(), tiny)
    with pytest.raises(EyasError, match=r"temperatures is \[1.0\] there and \[0.3\] here; use another output folder or remove this one"):
        run(make_config(replies={"temperatures": [0.3]}), tiny)


def test_batch_size_changes_no_reply_and_no_identity(make_config, tiny):
    first = run(make_config(), tiny)
    assert run(make_config(replies={"batch_size": 1}), tiny) == first
    other = run(make_config("other", replies={"batch_size": 1}), tiny)
    assert all(lines(first, name) == lines(other, name) for name in SETS)


def test_given_replies_train_as_they_are_and_held_out_prompts_are_answered_by_the_target(make_config, tiny, tmp_path):
    source = tmp_path / "talks.jsonl"
    talks = [[{"role": "user", "content": f"{word} {word[::-1]}"}, {"role": "assistant", "content": f"about {word}"}] for word in WORDS]
    source.write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks))
    config = make_config(sources=[{"source": str(source)}], heldout={"prompts": 2}, replies={"mode": "given"})
    folder, tokenizer = run(config, tiny), tiny.tokenizer()
    for record in lines(folder, "train").values():
        (row,) = record["rows"]
        reply = [token for token, flag in zip(row["ids"], row["supervised"], strict=True) if flag]
        assert tokenizer.decode(reply) == record["messages"][-1]["content"] + "<|im_end|>"
    for record in lines(folder, "greedy").values():
        assert record["messages"][-1]["role"] == "user"
        assert record["temperature"] == 0.0


WORDS = ("apple", "stone", "river", "cloud", "tiger", "piano", "horse", "bread")


def test_prompts_that_leave_no_room_are_quarantined_with_the_reason(make_config, tiny):
    config = make_config(max_length=100, max_quarantine=1.0)
    folder = run(config, tiny)
    faults = [record for _, record in read_jsonl(folder / QUARANTINE)]
    long = [fault for fault in faults if fault["reason"] == "prompt over prep.max_length"]
    split = split_prompts(config.prep, config.seed)
    over = {prompt.key for prompt in split.train if len(prompt_ids(tiny.tokenizer(), prompt.messages)) >= 100}
    assert over
    assert {fault["key"] for fault in long if fault["set"] == "train"} == over == set(_keys(split.train)) - set(lines(folder, "train"))
    assert read_manifest(folder).holds["quarantined"]["prompt over prep.max_length"] == len(long)


def _keys(prompts):
    return [prompt.key for prompt in prompts]


def test_too_many_unusable_rows_stop_the_run_naming_the_counts(make_config, tiny):
    with pytest.raises(EyasError, match=r"\d+ of 28 rows are unusable \(\d+ prompt over prep.max_length"):
        run(make_config(max_length=100, max_quarantine=0.05), tiny)


def test_too_many_rows_without_a_reply_stop_a_run_on_given_replies(make_config, tiny, tmp_path):
    source = tmp_path / "talks.jsonl"
    talks = [[{"role": "user", "content": f"{word} {word[::-1]}"}, {"role": "assistant", "content": f"about {word}"}] for word in WORDS]
    talks += [[{"role": "user", "content": f"unanswered {number} {'x' * number}"}] for number in range(4)]
    source.write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks))
    with pytest.raises(EyasError, match=r"4 of 14 rows are unusable \(4 no reply given\), above prep.max_quarantine = 0.1"):
        run(make_config(sources=[{"source": str(source)}], heldout={"prompts": 2}, replies={"mode": "given"}), tiny)


def record(key, prompt, reply, finished=True):
    return {"key": key, "category": "chat", "prompt_ids": prompt, "reply_ids": reply, "finished": finished}


def given(key, ids, supervised):
    return {"key": key, "category": "chat", "rows": [{"ids": ids, "supervised": supervised}], "finished": True}


@pytest.mark.parametrize(
    ("faulty", "reason"),
    [
        (record("x", [1, 2], []), "empty reply"),
        (record("x", [1, 2], [9]), "reply is only an end token"),
        (record("x", [1] * 100, [5] * 61), "row over prep.max_length"),
        (given("x", [1, 2], [0, 0]), "no supervised token"),
        (given("x", [1, 2], [1, 1]), "everything supervised"),
        (record("x", [1, 2], [3, 4, 9]), "duplicate row"),
    ],
)
def test_a_row_that_cannot_be_trained_on_is_quarantined_with_the_reason(make_config, faulty, reason):
    rows = build_rows([record("good", [1, 2], [3, 4, 9]), faulty], make_config().prep, eos_ids=[9])
    assert [row.prompt_key for row in rows.usable] == ["good"]
    assert [(fault.prompt_key, fault.reason) for fault in rows.quarantined] == [("x", reason)]


def test_each_row_of_a_given_conversation_stands_for_itself(make_config):
    talk = given("x", [1, 2, 9], [0, 1, 1])
    talk["rows"] += given("", [5] * 161, [0] + [1] * 160)["rows"] + given("", [1, 3, 9], [0, 1, 1])["rows"]
    rows = build_rows([talk], make_config().prep, eos_ids=[9])
    assert [(row.prompt_key, row.tokens.ids) for row in rows.usable] == [("x", [1, 2, 9]), ("x", [1, 3, 9])]
    assert [fault.reason for fault in rows.quarantined] == ["row over prep.max_length"]


@pytest.mark.parametrize(("option", "kept", "omitted"), [("keep", 2, 0), ("drop", 1, 1)])
def test_unfinished_replies_are_kept_or_left_out_by_option_and_are_no_fault(make_config, option, kept, omitted):
    records = [record("a", [1, 2], [3, 9]), record("b", [1, 2], [4, 5], finished=False)]
    rows = build_rows(records, make_config(replies={"unfinished": option}).prep, eos_ids=[9])
    assert (len(rows.usable), rows.omitted, rows.quarantined) == (kept, omitted, [])


def test_read_rows_supervises_the_reply_alone(make_config, tiny):
    config = make_config()
    folder = run(config, tiny)
    found = {row.prompt_key: row.tokens for row in read_rows(config, tiny, "train").usable}
    for key, tokens in found.items():
        answered = lines(folder, "train")[key]
        assert tokens.ids == answered["prompt_ids"] + answered["reply_ids"]
        assert tokens.supervised == [False] * len(answered["prompt_ids"]) + [True] * len(answered["reply_ids"])
