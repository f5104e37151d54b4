"""Kimi-K2.5's chats beside what tinker-cookbook 0.6.1 and ms-swift 4.6.0 make of them (recorded: record_kimi_peers.py says how)."""

import json
from pathlib import Path
from typing import Any

import pytest

from data_prep.template import conversation, prompt_ids
from eyas.kimi_tokenizer import KimiTokenizer
from eyas.kimi_tools import declare
from tests.data_prep.kimi_chats import CHATS, SCHEMAS, START
from tests.kimi_vocabulary import write_kimi_tokenizer

RECORD: dict[str, Any] = json.loads((Path(__file__).parent / "recorded" / "kimi_peers.json").read_text())
OPTIONS: dict[str, dict[str, Any]] = {"on": {}, "off": {"thinking": False}}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> KimiTokenizer:
    return KimiTokenizer(write_kimi_tokenizer(tmp_path_factory.mktemp("kimi"), START), START + 256, thinks=True)


def test_the_record_is_of_these_chats_and_schemas() -> None:
    assert (set(RECORD["chats"]), set(RECORD["tools"])) == (set(CHATS), set(SCHEMAS))


@pytest.mark.parametrize("thinking", OPTIONS)
@pytest.mark.parametrize("name", CHATS)
def test_prompts_are_those_of_both_packages(tokenizer: KimiTokenizer, name: str, thinking: str) -> None:
    messages, told = CHATS[name], RECORD["chats"][name]
    counts = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
    ours = [tokenizer.decode(prompt_ids(tokenizer, messages[:count], OPTIONS[thinking])) for count in counts]
    if not (thinking == "off" and name.startswith("tools")):  # tinker keeps thinking before a tool call all the same, the template does not
        assert ours == told["tinker"]["prompts"][thinking]
    if told["swift"] is not None:
        assert ours == told["swift"][thinking]


@pytest.mark.parametrize("name", CHATS)
def test_the_last_row_is_the_one_that_tinker_trains_on(tokenizer: KimiTokenizer, name: str) -> None:
    rows = [tokenizer.decode(row.ids) for row in conversation(tokenizer, CHATS[name], [START + 2])]
    theirs = RECORD["chats"][name]["tinker"]["rows"]
    assert rows == [row for row in theirs if row in rows]
    assert rows[-1] == theirs[-1]
    assert all(any(row.startswith(other) for row in rows) for other in theirs)


@pytest.mark.parametrize("name", SCHEMAS)
def test_tools_are_declared_as_the_published_code_does(name: str) -> None:
    function = {"name": "f", "description": "Does.\nIt.", "parameters": SCHEMAS[name]}
    assert declare([{"type": "function", "function": function}]) == RECORD["tools"][name]


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"a": {"$ref": "#/$defs/None"}}},
        {"properties": {"a": {"enum": ["x"], "type": "integer"}}},
        {"properties": {"a": {"x": 1}}},
    ],
)
def test_a_schema_that_typescript_cannot_say_is_left_to_the_template(tokenizer: KimiTokenizer, schema: dict[str, Any]) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    assert declare(tools) is None
    told = tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tools=tools, tokenize=False)
    assert told.startswith('<|im_system|>tool_declare<|im_middle|>[{"function":{"name":"f","parameters":{"properties":')
