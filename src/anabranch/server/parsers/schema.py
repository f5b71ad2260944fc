"""JSON schemas for notations that are not JSON: which types a value may have, and what a grammar can be held to.

A grammar allows a part of what the schema allows: members in one order, and none that the schema does not name. A
keyword that it cannot hold to is refused; `format` says nothing, as JSON Schema has it by default. A schema comes from
a client and may be anything.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from anabranch.server.parsers.lark import Rules, arguments_schema
from anabranch.server.parsers.parts import ToolSpec
from anabranch.text.json_schema import prepare

Schema = Mapping[str, Any]
T = TypeVar("T")

TYPES = ("string", "integer", "number", "boolean", "null", "array", "object")
SILENT = {"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "format"}
SILENT |= {"$schema", "$id", "$comment", "$defs", "definitions", "additionalProperties"}
NUMBERS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
ENFORCED = {
    "string": {"minLength", "maxLength", "pattern"},
    "integer": NUMBERS,
    "number": NUMBERS,
    "array": {"items", "minItems", "maxItems"},
    "object": {"properties", "required"},
}
MAX_REFERENCES = 32
"""Of a reference to a reference."""


def strict_json(text: str) -> Any:
    """ValueError for NaN and Infinity too, which are no JSON; RecursionError is left to the caller."""

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


def kind(value: Any) -> str:
    """A value's type, as schemas name it."""
    if isinstance(value, bool):
        return "boolean"
    names = {str: "string", int: "integer", float: "number", type(None): "null", list: "array"}
    return names.get(type(value), "object")


def kinds(schema: Any, root: Schema) -> frozenset[str]:
    """The types that a value may have; empty if the schema does not say, or is none."""
    found, todo, seen = set[str](), [schema], set[int]()
    while todo:
        try:
            schema = resolve(todo.pop(), root)
        except ValueError:
            return frozenset()
        if id(schema) in seen:
            continue
        seen.add(id(schema))
        types, values = schema.get("type"), schema.get("enum")
        if "const" in schema:
            found.add(kind(schema["const"]))
        elif isinstance(values, list):
            found.update(map(kind, values))
        elif types is not None:
            found.update(word for word in TYPES if word == types or (isinstance(types, list) and word in types))
        elif alike := options(schema):
            todo += alike
        else:
            return frozenset()
    return frozenset(found)


def resolve(schema: Any, root: Schema) -> Schema:
    """The schema behind references and an allOf of one."""
    for _ in range(MAX_REFERENCES):
        if not isinstance(schema, Mapping):
            return {"not": {}} if schema is False else {}
        reference, parts = schema.get("$ref"), schema.get("allOf")
        if isinstance(reference, str):
            schema = _follow(reference, root)
        elif isinstance(parts, list) and len(parts) == 1 and set(schema) - SILENT == {"allOf"}:
            schema = parts[0]
        else:
            return schema
    raise ValueError("tools: a schema's $ref leads back to itself")


class ToolSchema:
    """One tool's schema on its way to a grammar. Errors name the tool."""

    def __init__(self, tool: ToolSpec) -> None:
        self.name = tool.name
        self.root = arguments_schema(tool)
        try:
            prepare(self.root)  # its depth and its oneOf; objects are closed in these notations anyway
        except ValueError as error:
            raise self.refuse(str(error)) from None
        self._rules: dict[int, tuple[Schema, str]] = {}
        """By a schema's identity; the schema is kept so that no other gets its identity."""

    def rule(self, rules: Rules, schema: Any, expression: Callable[[Schema], str]) -> str:
        """The rule of a schema within this one: one for each, because schemas may refer to each other in circles."""
        schema = resolve(schema, self.root)
        if id(schema) not in self._rules:
            name = rules.reserve()
            self._rules[id(schema)] = schema, name
            rules.define(name, expression(schema))
        return self._rules[id(schema)][1]

    def get(self, schema: Schema, word: str, kind: type[T], default: T) -> T:
        """The keyword's value, which must be of this type."""
        value = schema.get(word, default)
        if not isinstance(value, kind) or isinstance(value, bool):
            raise self.refuse(f"has {value!r} as {word}, which no JSON schema has")
        return value

    def members(self, schema: Schema) -> list[tuple[str, Any, bool]]:
        """Of an object: name, schema and whether it must be there."""
        properties, required = self.get(schema, "properties", dict, {}), self.get(schema, "required", list, [])
        if missing := [name for name in required if name not in properties]:
            raise self.refuse(f"requires {missing[0]!r} without describing it; add it to properties")
        return [(name, value, name in required) for name, value in properties.items()]

    def types(self, schema: Schema) -> list[str]:
        types = schema.get("type", list(TYPES))
        types = types if isinstance(types, list) else [types]
        if unknown := [word for word in types if word not in TYPES]:
            raise self.refuse(f"has {unknown[0]!r} as type, which no JSON schema has")
        self.check(schema, "type", *(word for name in types for word in ENFORCED.get(name, ())))
        return types

    def choices(self, schema: Schema) -> list[Any] | None:
        """The values that it names one by one."""
        if "const" in schema:
            return [schema["const"]]
        return self.get(schema, "enum", list, []) if "enum" in schema else None

    def text_before(self, tag: str, rules: Rules, schema: Schema, without: Sequence[str]) -> str:
        """The grammar of a string's characters, in which none of these texts occurs, and of the tag that ends them."""
        low, high = self.get(schema, "minLength", int, 0), self.get(schema, "maxLength", int, -1)
        pattern = self.get(schema, "pattern", str, "")
        begins, ends = pattern.startswith("^"), pattern.endswith("$") and not pattern.endswith(r"\$")
        body = pattern[begins : len(pattern) - ends]
        if (begins or ends) and _has_choice(body):  # "^a|b$" is two patterns with one anchor each
            raise self.refuse(f"has the pattern {pattern!r}; put its alternatives in brackets")
        if pattern:  # to be found in the text → to match all of it
            body = f"{'' if begins else '(?s:.*)'}(?:{body}){'' if ends else '(?s:.*)'}"
        return rules.text_before(tag, without, body, low, None if high < 0 else high)

    def check(self, schema: Schema, *allowed: str) -> None:
        if others := sorted(set(schema) - SILENT - {*allowed}):
            raise self.refuse(
                f"has {others[0]!r} where a call in this model's notation cannot be held to it; leave it out, or let "
                f"tool_choice be auto"
            )

    def refuse(self, why: str) -> ValueError:
        return ValueError(f"tools: the schema of {self.name!r} {why}")


def options(schema: Schema) -> list[Any]:
    """The schemas of which one must fit."""
    found = [schema[word] for word in ("anyOf", "oneOf") if isinstance(schema.get(word), list)]
    return [option for alike in found for option in alike]


def _has_choice(pattern: str) -> bool:
    """A | outside of all brackets."""
    depth, in_class, escaped = 0, False, False
    for character in pattern:
        if escaped:
            escaped = False
        elif character == "\\":
            escaped = True
        elif in_class or character == "[":
            in_class = character != "]"
        elif character in "()":
            depth += 1 if character == "(" else -1
        elif character == "|" and depth == 0:
            return True
    return False


def _follow(reference: str, root: Schema) -> Any:
    place: Any = root
    try:
        if not reference.startswith("#"):
            raise KeyError
        for step in reference[1:].split("/")[1:]:
            step = step.replace("~1", "/").replace("~0", "~")
            place = place[int(step)] if isinstance(place, list) else place[step]
    except (KeyError, IndexError, ValueError, TypeError):
        raise ValueError(f"tools: a schema's $ref {reference!r} leads to nothing within the schema") from None
    return place
