"""How two other packages render Kimi-K2.5's chats, recorded for test_kimi_peers.py.

    pip install --no-deps --target PEERS -r requirements/peers-template.txt
    PYTHONPATH=PEERS:. python tests/data_prep/record_kimi_peers.py

Both are imported as published; only the tokenizer is ours. They bring 130 MB, most of it needed for nothing here, so tests read the record.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

from swift.template import TEMPLATE_MAPPING
from swift.template.template_inputs import StdTemplateInputs
from tinker_cookbook.renderers.base import ToolCall, TrainOnWhat
from tinker_cookbook.renderers.kimi_k2_5_tool_declaration_ts import encode_tools_to_typescript_style
from tinker_cookbook.renderers.kimi_k25 import KimiK25DisableThinkingRenderer, KimiK25Renderer

from eyas.kimi_tokenizer import KimiTokenizer
from tests.data_prep.kimi_chats import CHATS, SCHEMAS, START
from tests.kimi_vocabulary import write_kimi_tokenizer

RECORD = Path(__file__).parent / "recorded" / "kimi_peers.json"


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = KimiTokenizer(write_kimi_tokenizer(Path(folder), START), START + 256, thinks=True)
    chats = {}
    for name, messages in CHATS.items():
        chats[name] = {
            "tinker": {
                "prompts": {
                    thinking: [tinker_prompt(tokenizer, messages[:count], thinking == "on") for count in prompts(messages)]
                    for thinking in ("on", "off")
                },
                "rows": tinker_rows(tokenizer, messages),
            },
            "swift": {
                thinking: [swift_prompt(messages[:count], thinking == "on") for count in prompts(messages)] for thinking in ("on", "off")
            }
            if not any(message.get("tool_calls") for message in messages)
            else None,
        }
    tools = {name: encode_tools_to_typescript_style([tool(schema)]) for name, schema in SCHEMAS.items()}
    RECORD.write_text(json.dumps({"chats": chats, "tools": tools}, indent=1, ensure_ascii=False) + "\n")


def prompts(messages: list[dict[str, Any]]) -> list[int]:
    """How many messages come before each reply."""
    return [place for place, message in enumerate(messages) if message["role"] == "assistant"]


def tool(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "description": "Does.\nIt.", "parameters": schema}}


def tinker_message(message: dict[str, Any]) -> dict[str, Any]:
    told = {name: value for name, value in message.items() if name not in ("reasoning_content", "tool_calls")}
    if message.get("reasoning_content"):
        told["content"] = [
            {"type": "thinking", "thinking": message["reasoning_content"]},
            {"type": "text", "text": message["content"]},
        ]
    if message.get("tool_calls"):
        told["tool_calls"] = [ToolCall(id=call["id"], function=ToolCall.FunctionBody(**call["function"])) for call in message["tool_calls"]]
    return told


def tinker_prompt(tokenizer: KimiTokenizer, messages: list[dict[str, Any]], thinks: bool) -> str:
    renderer = (KimiK25Renderer if thinks else KimiK25DisableThinkingRenderer)(tokenizer)
    prompt = renderer.build_generation_prompt([tinker_message(message) for message in messages])
    return tokenizer.decode(prompt.to_ints())


def tinker_rows(tokenizer: KimiTokenizer, messages: list[dict[str, Any]]) -> list[str]:
    examples = KimiK25Renderer(tokenizer).build_supervised_examples(
        [tinker_message(message) for message in messages], TrainOnWhat.ALL_ASSISTANT_MESSAGES
    )
    return [tokenizer.decode(tokens.to_ints()) for tokens, _ in examples]


def swift_prompt(messages: list[dict[str, Any]], thinks: bool) -> str:
    """ms-swift's context of a chat whose last reply is still to come. It takes thinking within the text."""
    meta = TEMPLATE_MAPPING["kimi_k25"]
    template = meta.template_cls(None, meta, enable_thinking=thinks)
    system = [message["content"] for message in messages if message["role"] == "system"]
    turns = [
        {
            "role": message["role"],
            "content": (f"<think>{message['reasoning_content']}</think>" if message.get("reasoning_content") else "") + message["content"],
        }
        for message in messages
        if message["role"] != "system"
    ]
    inputs = StdTemplateInputs([*turns, {"role": "assistant", "content": None}], system=system[0] if system else None)
    context, *_ = template._swift_encode(inputs)
    return "".join(part if isinstance(part, str) else "".join(part) for part in context)


if __name__ == "__main__":
    main()
