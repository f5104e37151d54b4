"""Held-out prompts alone: what measuring takes when nothing is trained."""

import json
from pathlib import Path

import pytest

from data_prep.heldout import write_heldout
from data_prep.prompts import heldout_prompts, split_prompts
from eyas.config import load_config
from eyas.errors import EyasError
from eyas.files import read_jsonl
from eyas.manifest import read_manifest
from eyas.target import open_target

ROOT = Path(__file__).parents[2]


def rows(folder):
    return [row for _, row in read_jsonl(folder / "heldout.jsonl")]


def test_the_prompts_are_those_that_a_whole_prep_holds_out_with_the_tokens_it_would_send(make_config):
    config = make_config()
    found = rows(write_heldout(config))
    held = split_prompts(config.prep, config.seed).heldout
    assert [row["key"] for row in found] == [prompt.key for prompt in held]
    tokenizer = open_target(config.target).tokenizer()
    for row, prompt in zip(found, held, strict=True):
        text = tokenizer.apply_chat_template(prompt.messages, tokenize=False, add_generation_prompt=True)
        assert tokenizer.decode(row["prompt_ids"]) == text
        assert row["messages"] == prompt.messages
    holds = read_manifest(config.folder("prompts"), "prompts").holds
    assert holds == {"prompts": 4, "categories": {"chat": 4}, "quarantined": {}}


def test_arguments_of_the_template_are_kept_with_the_prompts_that_they_rendered(make_config, tmp_path):
    source, tools = tmp_path / "tools.jsonl", [{"type": "function", "function": {"name": "look"}}]
    source.write_text("".join(json.dumps({"prompt": f"{number} is what?", "tools": tools}) + "\n" for number in range(4)))
    config = make_config(sources=[{"source": str(source)}], heldout={"prompts": 2})
    config = config.model_copy(update={"target": config.target.model_copy(update={"template": {"style": "brief"}})})
    assert [row["template"] for row in rows(write_heldout(config))] == [{"style": "brief", "tools": tools}] * 2


def test_a_second_time_writes_nothing_and_other_prompts_are_written_anew(make_config):
    folder = write_heldout(make_config())
    before = (folder / "heldout.jsonl").stat().st_mtime_ns
    write_heldout(make_config())
    assert (folder / "heldout.jsonl").stat().st_mtime_ns == before
    assert len(rows(write_heldout(make_config(heldout={"prompts": 6})))) == 6


def test_prompts_that_leave_no_room_for_a_reply_are_left_out_and_too_many_of_them_stop(make_config, tmp_path):
    long = tmp_path / "long.jsonl"
    long.write_text(json.dumps({"prompt": "far " * 60}) + "\n")
    extra = {"prompts": 4, "extra": [{"source": str(long)}]}
    config = make_config(heldout=extra, max_quarantine=0.5)
    assert len(rows(write_heldout(config))) == 4
    assert read_manifest(config.folder("prompts")).holds["quarantined"] == {"prompt over prep.max_length": 1}
    with pytest.raises(EyasError, match="1 of 5 rows are unusable"):
        write_heldout(make_config("other", heldout=extra))


def test_the_categories_config_measures_the_starter_on_prompts_that_its_training_held_out():
    measured = heldout_prompts(load_config(ROOT / "configs" / "categories.yaml").prep, 0)
    training = load_config(ROOT / "configs" / "starter-smollm2.yaml")
    held = {prompt.key for prompt in heldout_prompts(training.prep, training.seed)}
    by_category = {category: [p.key for p in measured if p.category == category] for category in sorted({p.category for p in measured})}
    assert {category: len(keys) for category, keys in by_category.items()} == dict.fromkeys(by_category, 16)
    assert set(by_category) == {"chat", "code", "general", "languages", "math", "tools"}
    assert {*by_category["chat"], *by_category["general"]} <= held
