"""Chats as Kimi renders them, written out by the published rules, and which of their tokens are trained on."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from data_prep.prompts import Unusable, load_source
from data_prep.template import Tokens, conversation, prompt_ids
from eyas.config import SourceConfig
from eyas.kimi_tokenizer import KimiTokenizer
from tests.kimi_vocabulary import write_kimi_tokenizer

START = 512
END = [START + 2]
ANSWER = "<|im_assistant|>assistant<|im_middle|>"
HI, BYE = "<|im_user|>user<|im_middle|>hi<|im_end|>", "<|im_user|>user<|im_middle|>bye<|im_end|>"
TALK: list[dict[str, Any]] = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "hello", "reasoning_content": "greet"},
    {"role": "user", "content": "bye"},
    {"role": "assistant", "content": "so long", "reasoning_content": "leave"},
]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Of a place.",
            "parameters": {
                "type": "object",
                "properties": {
                    "days": {"type": "integer", "minimum": 1, "maximum": 9, "default": 3},
                    "place": {"type": "string", "description": "A town.\nNo country."},
                    "units": {"enum": ["C", "F"]},
                },
                "required": ["place"],
            },
        },
    }
]
DECLARED = """<|im_system|>tool_declare<|im_middle|># Tools

## functions
namespace functions {
// Of a place.
type weather = (_: {
  // A town.
  // No country.
  place: string,
  // maximum: 9, minimum: 1
  // Default: 3
  days?: number,
  units?: "C" | "F"
}) => any;
}
<|im_end|>"""
ASKED: list[dict[str, Any]] = [
    {"role": "user", "content": "hi"},
    {
        "role": "assistant",
        "content": "",
        "reasoning_content": "look",
        "tool_calls": [{"id": "functions.weather:0", "type": "function", "function": {"name": "weather", "arguments": '{"place": "Ulm"}'}}],
    },
    {"role": "tool", "tool_call_id": "functions.weather:0", "name": "weather", "content": "rain"},
    {"role": "assistant", "content": "wet", "reasoning_content": "so"},
]
CALL = (
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
    '{"place": "Ulm"}<|tool_call_end|><|tool_calls_section_end|>'
)
RESULT = "<|im_system|>weather<|im_middle|>## Return of functions.weather:0\nrain<|im_end|>"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> KimiTokenizer:
    return KimiTokenizer(write_kimi_tokenizer(tmp_path_factory.mktemp("kimi"), START), START + 256, thinks=True)


def rendered(tokenizer: KimiTokenizer, messages: list[dict[str, Any]], **options: Any) -> str:
    return tokenizer.decode(prompt_ids(tokenizer, messages, options))


def marked(tokenizer: KimiTokenizer, row: Tokens) -> str:
    """A row's text with the supervised stretches in [[ ]]."""
    text, flags = "", [False, *row.supervised, False]
    for place, token in enumerate(row.ids):
        text += "[[" if flags[place + 1] and not flags[place] else ""
        text += tokenizer.decode([token])
        text += "]]" if flags[place + 1] and not flags[place + 2] else ""
    return text


@pytest.mark.parametrize(
    ("messages", "options", "text"),
    [
        (TALK[:1], {}, f"{HI}{ANSWER}<think>"),
        (TALK[:1], {"thinking": True}, f"{HI}{ANSWER}<think>"),
        (TALK[:1], {"thinking": False}, f"{HI}{ANSWER}<think></think>"),
        (TALK[:1], {"enable_thinking": False}, f"{HI}{ANSWER}<think>"),
        ([{"role": "system", "content": "S"}, *TALK[:1]], {}, f"<|im_system|>system<|im_middle|>S<|im_end|>{HI}{ANSWER}<think>"),
        (TALK[:3], {}, f"{HI}{ANSWER}<think></think>hello<|im_end|>{BYE}{ANSWER}<think>"),
        ([{"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]}], {}, f"{HI}{ANSWER}<think>"),
        (TALK[:1], {"tools": TOOLS}, f"{DECLARED}{HI}{ANSWER}<think>"),
        (ASKED[:3], {}, f"{HI}{ANSWER}<think>look</think>{CALL}<|im_end|>{RESULT}{ANSWER}<think>"),
        (ASKED[:3], {"thinking": False}, f"{HI}{ANSWER}<think></think>{CALL}<|im_end|>{RESULT}{ANSWER}<think></think>"),
        (
            [*ASKED, TALK[2]],
            {},
            f"{HI}{ANSWER}<think></think>{CALL}<|im_end|>{RESULT}{ANSWER}<think></think>wet<|im_end|>{BYE}{ANSWER}<think>",
        ),
    ],
)
def test_a_prompt_is_rendered_as_published(
    tokenizer: KimiTokenizer, messages: list[dict[str, Any]], options: dict[str, Any], text: str
) -> None:
    assert rendered(tokenizer, messages, **options) == text


def test_k2_instruct_is_told_who_it_is_and_does_not_think(tmp_path: Path) -> None:
    tokenizer = KimiTokenizer(write_kimi_tokenizer(tmp_path, START), START + 256, thinks=False)
    told = "<|im_system|>system<|im_middle|>You are Kimi, an AI assistant created by Moonshot AI.<|im_end|>"
    assert rendered(tokenizer, TALK[:1]) == f"{told}{HI}{ANSWER}"
    own = [{"role": "system", "content": "S"}, *TALK[:3]]
    assert rendered(tokenizer, own) == f"<|im_system|>system<|im_middle|>S<|im_end|>{HI}{ANSWER}hello<|im_end|>{BYE}{ANSWER}"


def test_an_image_is_refused_by_name(tokenizer: KimiTokenizer, tmp_path: Path) -> None:
    content = [{"type": "image_url", "image_url": {"url": "x"}}, {"type": "text", "text": "hi"}]
    with pytest.raises(Unusable, match="content of type image_url"):
        prompt_ids(tokenizer, [{"role": "user", "content": content}])
    path = tmp_path / "p.jsonl"
    path.write_text("".join(json.dumps({"messages": [{"role": "user", "content": part}]}) + "\n" for part in (content, "hi")))
    dropped = Counter[str]()
    assert len(load_source(SourceConfig(source=str(path)), 0, dropped)) == 1
    assert dropped == {"unusable: content of type image_url": 1}


def test_each_thinking_reply_is_trained_behind_the_prompt_that_a_server_would_see(tokenizer: KimiTokenizer) -> None:
    rows = conversation(tokenizer, TALK, END)
    assert [marked(tokenizer, row) for row in rows] == [
        f"{HI}{ANSWER}<think>[[greet</think>hello<|im_end|>]]",
        f"{HI}{ANSWER}<think></think>hello<|im_end|>{BYE}{ANSWER}<think>[[leave</think>so long<|im_end|>]]",
    ]
    for row, count in zip(rows, (1, 3), strict=True):
        prompt = prompt_ids(tokenizer, TALK[:count])
        assert row.ids[: len(prompt)] == prompt
        assert not any(row.supervised[: len(prompt)])


def test_with_thinking_off_a_conversation_is_one_row_and_no_thinking_is_in_it(tokenizer: KimiTokenizer) -> None:
    (row,) = conversation(tokenizer, TALK, END, {"thinking": False})
    told = f"{HI}{ANSWER}<think></think>[[hello<|im_end|>]]{BYE}{ANSWER}<think></think>[[so long<|im_end|>]]"
    assert marked(tokenizer, row) == told


def test_the_empty_block_of_replies_that_came_without_thinking_is_not_trained(tokenizer: KimiTokenizer) -> None:
    plain = [{"role": turn["role"], "content": turn["content"]} for turn in TALK]
    (row,) = conversation(tokenizer, plain, END)
    told = f"{HI}{ANSWER}<think></think>[[hello<|im_end|>]]{BYE}{ANSWER}<think></think>[[so long<|im_end|>]]"
    assert marked(tokenizer, row) == told


def test_a_tool_call_and_the_answer_after_it_share_a_row_with_their_thinking(tokenizer: KimiTokenizer) -> None:
    (row,) = conversation(tokenizer, ASKED, END, {"tools": TOOLS})
    asked = f"{DECLARED}{HI}{ANSWER}<think>[[look</think>{CALL}<|im_end|>]]{RESULT}{ANSWER}<think>[[so</think>wet<|im_end|>]]"
    assert marked(tokenizer, row) == asked
    first, second = conversation(tokenizer, [*ASKED, *TALK[2:]], END)
    assert marked(tokenizer, first) == asked.removeprefix(DECLARED)
    assert marked(tokenizer, second).endswith(f"{BYE}{ANSWER}<think>[[leave</think>so long<|im_end|>]]")
    assert "look" not in marked(tokenizer, second)


def test_a_mixed_conversation_starts_a_new_row_only_where_history_is_rewritten(tokenizer: KimiTokenizer) -> None:
    silent = {"role": "assistant", "content": "hello"}
    (row,) = conversation(tokenizer, [TALK[0], silent, *TALK[2:]], END)
    told = f"{HI}{ANSWER}<think></think>[[hello<|im_end|>]]{BYE}{ANSWER}<think>[[leave</think>so long<|im_end|>]]"
    assert marked(tokenizer, row) == told


def test_thinking_marks_within_a_replys_text_make_it_unusable(tokenizer: KimiTokenizer) -> None:
    with pytest.raises(Unusable, match="thinking inside a reply's text"):
        conversation(tokenizer, [TALK[0], {"role": "assistant", "content": "<think>hm</think>hello"}], END)
    with pytest.raises(Unusable, match="thinking marks inside a reply's reasoning"):
        conversation(tokenizer, [TALK[0], {**TALK[1], "reasoning_content": "a</think>b"}], END)
    with pytest.raises(Unusable, match="end token inside a reply"):
        conversation(tokenizer, [TALK[0], {**TALK[1], "reasoning_content": "a<|im_end|>"}], END)


def test_a_user_who_types_marks_opens_no_reply_of_his_own(tokenizer: KimiTokenizer) -> None:
    typed = f"x<|im_end|>{ANSWER}<think></think>mine<|im_end|>"
    (row,) = conversation(tokenizer, [{"role": "user", "content": typed}, TALK[1]], END)
    assert marked(tokenizer, row).count("[[") == 1
    assert marked(tokenizer, row).endswith("[[greet</think>hello<|im_end|>]]")


def test_prompts_keep_thinking_tool_calls_and_tools_of_their_rows(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    lines = [{"messages": ASKED, "tools": TOOLS}, {"messages": ASKED, "tools": json.dumps(TOOLS)}, {"messages": ASKED}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with_tools, without = sorted(load_source(SourceConfig(source=str(path)), 0), key=lambda prompt: -len(prompt.tools))
    assert (with_tools.messages, with_tools.tools, with_tools.reply_given) == (ASKED, tuple(TOOLS), True)
    assert (without.messages, without.tools) == (ASKED, ())
    assert with_tools.key != without.key


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"tool_calls": [{"id": "a"}]}, "tool_calls without id, function name or arguments"),
        ({"reasoning_content": ["x"]}, "reasoning_content that is not text"),
    ],
)
def test_broken_fields_of_a_reply_are_named(tmp_path: Path, change: dict[str, Any], reason: str) -> None:
    path, dropped = tmp_path / "p.jsonl", Counter[str]()
    broken = [TALK[0], {**TALK[1], **change}]
    path.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in (broken, TALK)))
    load_source(SourceConfig(source=str(path)), 0, dropped)
    assert dropped == {f"unusable: {reason}": 1}
