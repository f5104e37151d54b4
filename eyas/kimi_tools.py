"""Tools as Kimi-K2.5 reads them: OpenAI's JSON schemas rewritten as TypeScript types.

The rules are those of the published tool_declaration_ts.py, which K2.5's tokenizer calls for every chat with tools: a namespace with a type
a function; required parameters before optional ones, each by name; descriptions, bounds and defaults as comments above what they are of;
``$defs`` as interfaces. What it cannot express it leaves to the template, which then writes the schemas as JSON (``declare`` gives None).
"""

import json
from collections.abc import Sequence
from typing import Any

INDENT = "  "
SCALARS = {"integer": "number"}
UNION = {"integer": "number", "object": "{}", "array": "Array<any>"}
KNOWN_IN_UNION = ("string", "number", "integer", "boolean", "null", "object", "array")
BOUNDS: dict[str, tuple[str, ...]] = {
    "string": ("maxLength", "minLength", "pattern"),
    "number": ("maximum", "minimum"),
    "integer": ("maximum", "minimum"),
    "array": ("maxItems", "minItems"),
}
Schema = dict[str, Any] | bool


class _NoTypeScript(Exception):
    """A schema that the rules do not cover."""


def declare(tools: Sequence[dict[str, Any]]) -> str | None:
    """The declaration of ``tools`` (each {"type": "function", "function": {...}}), None where a schema cannot be expressed."""
    functions = [tool["function"] for tool in tools if tool.get("type") == "function" and tool.get("function")]
    if not functions:
        return ""
    try:
        types = "\n".join(_Function(function).text() for function in functions)
    except (_NoTypeScript, AttributeError, KeyError, TypeError):
        return None
    return f"# Tools\n\n## functions\nnamespace functions {{\n{types}\n}}\n"


def sort_keys(value: Any) -> Any:
    """The same JSON with the keys of every object in order."""
    if isinstance(value, dict):
        return {key: sort_keys(value[key]) for key in sorted(value)}
    return [sort_keys(item) for item in value] if isinstance(value, list) else value


class _Function:
    """One function; ``definitions`` are the ``$defs`` met so far, and ``recursive`` says whether one refers to the whole (``#``)."""

    def __init__(self, function: dict[str, Any]) -> None:
        self.function = function
        self.definitions: dict[str, Schema] = {}
        self.recursive = False

    def text(self) -> str:
        """Interfaces, the function's description, and its type."""
        parameters = self.function.get("parameters") or {}
        self._register(parameters)
        whole = self._object(parameters, "")
        recursive = self.recursive
        fields = ",\n".join(self._field(name, schema, parameters, INDENT) for name, schema in parameters.get("properties", {}).items())
        interfaces = [_interface("parameters", f"{{\n{fields}\n}}" if fields else "{}")] if recursive else []
        for name, schema in list(self.definitions.items()):
            described = _comment(schema.get("description", ""), "") if isinstance(schema, dict) else ""
            interfaces.append(described + _interface(name, self._type(schema, "")))
        taken = "parameters" if recursive else whole
        described = _comment(self.function.get("description") or "", "")
        name = self.function.get("name", "function")
        return "".join(f"{text}\n" for text in interfaces) + f"{described}type {name} = (_: {taken}) => any;"

    def _register(self, schema: dict[str, Any]) -> None:
        self.definitions.update(schema.get("$defs") or {})

    def _type(self, schema: Schema, indent: str) -> str:
        """The type of a schema, its lines after the first indented by ``indent``."""
        if isinstance(schema, bool):
            return "any" if schema else "null"
        if "$ref" in schema:
            return self._reference(schema["$ref"])
        if "anyOf" in schema:
            return " | ".join(self._type(choice, indent) for choice in schema["anyOf"])
        if "enum" in schema:
            return " | ".join(f'"{value}"' if isinstance(value, str) else str(value) for value in _checked_enum(schema))
        kind = schema.get("type", None if schema else "any")
        if isinstance(kind, list):
            if not set(kind) <= set(KNOWN_IN_UNION):
                raise _NoTypeScript(f"type {kind}")
            return " | ".join(UNION.get(str(choice), str(choice)) for choice in kind)
        if kind == "object":
            self._register(schema)
            return self._object(schema, indent)
        if kind == "array":
            return self._array(schema, indent)
        if not isinstance(kind, str):
            raise _NoTypeScript("a schema without a type")
        return SCALARS.get(kind, kind)

    def _reference(self, reference: str) -> str:
        if reference == "#":
            self.recursive = True
            return "parameters"
        name = reference.removeprefix("#/$defs/").split("/")[-1]
        if not reference.startswith("#/$defs/") or name not in self.definitions:
            raise _NoTypeScript(f"reference {reference}")
        return name

    def _object(self, schema: dict[str, Any], indent: str) -> str:
        properties, required = schema.get("properties", {}), set(schema.get("required", []))
        in_order = sorted(properties, key=lambda name: (name not in required, name))
        lines = [self._field(name, properties[name], schema, indent + INDENT) for name in in_order]
        more = schema.get("additionalProperties")
        if more is not None:
            kind = "never" if more is False else self._type(more, indent + INDENT)
            lines.append(f"{indent}{INDENT}[k: string]: {kind}")
        return "{\n" + ",\n".join(lines) + f"\n{indent}}}" if lines else "{}"

    def _field(self, name: str, schema: Schema, parent: dict[str, Any], indent: str) -> str:
        optional = "" if name in parent.get("required", []) else "?"
        default = schema.get("default") if isinstance(schema, dict) else None
        said = "" if default is None else f"{indent}// Default: {_default(default)}\n"
        return f"{_documentation(schema, indent)}{said}{indent}{name}{optional}: {self._type(schema, indent)}"

    def _array(self, schema: dict[str, Any], indent: str) -> str:
        item: Schema = schema.get("items") or True
        if comments := _documentation(item, indent + INDENT):
            return f"Array<\n{comments}{indent}{INDENT}{self._type(item, indent + INDENT)}\n{indent}>"
        return f"Array<{self._type(item, indent)}>"


def _interface(name: str, body: str) -> str:
    return f"interface {name} {body}"


def _documentation(schema: Schema, indent: str) -> str:
    """Description and bounds as comment lines."""
    if isinstance(schema, bool):
        return ""
    kind = "" if {"$ref", "anyOf", "enum"} & set(schema) else schema.get("type")
    bounds = BOUNDS.get(kind, ()) if isinstance(kind, str) else ()
    told = ", ".join(f"{name}: {schema[name]}" for name in bounds if name in schema)
    return _comment(schema.get("description", ""), indent) + (f"{indent}// {told}\n" if told else "")


def _comment(text: str, indent: str) -> str:
    return "".join(f"{indent}// {line}\n" if line else "\n" for line in text.split("\n")) if text else ""


def _default(value: Any) -> str:
    return repr(value) if isinstance(value, int | float) else json.dumps(value, ensure_ascii=False)


def _checked_enum(schema: dict[str, Any]) -> list[Any]:
    """The values of an enum, all of them of the type that it names."""
    kind = schema.get("type")
    if isinstance(kind, list):
        others = [choice for choice in kind if choice != "null"]
        if len(kind) > 2 or (len(kind) == 2 and "null" not in kind):
            raise _NoTypeScript(f"enum of type {kind}")
        kind = others[0] if others else "null"
    wanted = {"string": str, "number": int | float, "integer": int, "boolean": bool}.get(kind or "")
    if wanted and not all(value is None or isinstance(value, wanted) for value in schema["enum"]):
        raise _NoTypeScript(f"enum values that are no {kind}")
    return schema["enum"]
