"""Chats and tool schemas that our rendering for Kimi-K2.5 is compared with other packages' on. All begin with a system turn: one of those
packages would put a default one there otherwise, which K2.5's own template does not."""

from typing import Any

START = 512
SYSTEM = {"role": "system", "content": "Be brief.\n"}
HI, BYE = {"role": "user", "content": "hi"}, {"role": "user", "content": "bye 你好"}
HELLO = {"role": "assistant", "content": "hello", "reasoning_content": "greet\nthem"}
SO_LONG = {"role": "assistant", "content": "so long", "reasoning_content": "leave"}


def _call(place: int, arguments: str) -> dict[str, Any]:
    return {"id": f"functions.weather:{place}", "type": "function", "function": {"name": "weather", "arguments": arguments}}


LOOK = {"role": "assistant", "content": "", "reasoning_content": "look", "tool_calls": [_call(0, '{"place": "Ulm"}'), _call(1, "{}")]}
RAIN = {"role": "tool", "tool_call_id": "functions.weather:0", "name": "weather", "content": "rain"}
SUN = {"role": "tool", "tool_call_id": "functions.weather:1", "name": "weather", "content": "sun"}
CHATS: dict[str, list[dict[str, Any]]] = {
    "one reply": [SYSTEM, HI, HELLO],
    "two replies": [SYSTEM, HI, HELLO, BYE, SO_LONG],
    "without thinking": [SYSTEM, HI, {"role": "assistant", "content": "hello"}, BYE, {"role": "assistant", "content": "so long"}],
    "thinking at the end": [SYSTEM, HI, {"role": "assistant", "content": "hello"}, BYE, SO_LONG],
    "tools": [SYSTEM, HI, LOOK, RAIN, SUN, HELLO],
    "tools in history": [SYSTEM, HI, LOOK, RAIN, SUN, HELLO, BYE, SO_LONG],
}
SCHEMAS: dict[str, dict[str, Any]] = {
    "empty": {},
    "no properties": {"type": "object", "properties": {}},
    "scalars": {
        "type": "object",
        "properties": {
            "z": {"type": "string", "description": "Two\n\nparts.", "minLength": 1, "maxLength": 5, "pattern": "^a"},
            "b": {"type": "integer", "minimum": 0, "maximum": 3, "default": 2},
            "a": {"type": "number", "default": 0.5},
            "c": {"type": "boolean", "default": True},
            "d": {"type": "null"},
            "e": {},
        },
        "required": ["z", "b"],
    },
    "choices": {
        "type": "object",
        "properties": {
            "e": {"enum": ["x", 1, None], "description": "One of."},
            "f": {"enum": ["x"], "type": ["string", "null"]},
            "g": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "integer"}}]},
            "h": {"type": ["integer", "null", "object", "array"], "default": "ü"},
        },
    },
    "nested": {
        "type": "object",
        "properties": {
            "list": {"type": "array", "minItems": 1, "maxItems": 2, "items": {"type": "string", "description": "An item."}},
            "any": {"type": "array"},
            "inner": {
                "type": "object",
                "properties": {"b": {"type": "string", "description": "B."}, "a": {"type": "integer"}},
                "required": ["b"],
                "additionalProperties": False,
            },
            "deep": {"type": "array", "items": {"type": "object", "properties": {"x": {"type": "array", "items": {"type": "number"}}}}},
        },
        "additionalProperties": {"type": "string"},
    },
    "open": {"type": "object", "additionalProperties": True},
    "definitions": {
        "type": "object",
        "$defs": {"Point": {"type": "object", "description": "A point.", "properties": {"x": {"type": "number"}}, "required": ["x"]}},
        "properties": {
            "at": {"$ref": "#/$defs/Point", "description": "Where."},
            "all": {"type": "array", "items": {"$ref": "#/$defs/Point"}},
        },
    },
    "recursive": {
        "type": "object",
        "properties": {"value": {"type": "string"}, "child": {"$ref": "#"}, "also": {"type": "integer", "description": "Too."}},
        "required": ["value"],
    },
}
