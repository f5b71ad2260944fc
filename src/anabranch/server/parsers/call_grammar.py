"""Grammars of tool calls that must come, in llguidance's dialect of Lark: rules, and the JSON schemas of tools.

`Rules` collects a grammar rule by rule. `ToolGrammar` is for notations that are not JSON: such a grammar allows a part
of what the tool's schema allows (members in one order, and none that the schema does not name). A keyword that it
cannot enforce is refused; `format` is an annotation, as JSON Schema has it by default. A schema comes from a client
and may be anything.
"""

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from anabranch.sampling_params import Grammar
from anabranch.server.parsers.parts import ToolSpec
from anabranch.text.json_schema import CHOICES, follow, json_type, list_of, prepare

Schema = dict[str, Any]
T = TypeVar("T")

TYPES = ("string", "integer", "number", "boolean", "null", "array", "object")
ANNOTATIONS = {"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "format"}
ANNOTATIONS |= {"$schema", "$id", "$comment", "$defs", "definitions", "additionalProperties"}
NUMBERS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
ENFORCED = {
    "string": {"minLength", "maxLength", "pattern"},
    "integer": NUMBERS,
    "number": NUMBERS,
    "array": {"items", "minItems", "maxItems"},
    "object": {"properties", "required"},
}
MAX_REFERENCES = 32
"""Length of a chain of references."""


class Rules:
    def __init__(self, added_tokens: Mapping[str, int]) -> None:
        self._added_tokens = added_tokens
        self._lines: dict[str, str] = {}
        """By the rule's name, which ends with a number."""
        self._names: dict[str, str] = {}
        """By line: equal lines are written once."""

    def text(self, text: str) -> str:
        """Exactly this text; not for tags."""
        return json.dumps(text)

    def tag(self, text: str) -> str:
        """A tag. For llguidance many tokens that a tokenizer has added are not text, even if they are not special."""
        token = self._added_tokens.get(text)
        return self.text(text) if token is None else f"<[{token}]>"

    def rule(self, expression: str) -> str:
        return self._name("r", expression)

    def terminal(self, expression: str) -> str:
        return self._name("T", expression)

    def json(self, schema: Mapping[str, Any]) -> str:
        return self.rule(f"%json {json.dumps(schema, allow_nan=False)}")

    def text_before(
        self, tag: str, without: Sequence[str] = (), pattern: str = "", low: int = 0, high: int | None = None
    ) -> str:
        """Free text and the tag that ends it. The text contains neither the tag nor any of `without`, matches the
        pattern as a whole, and has from `low` to `high` characters."""
        length = "*" if (low, high) == (0, None) else f"{{{low},{'' if high is None else high}}}"
        wanted = [f"/{_in_slashes(pattern)}/"] if pattern else []
        forbidden = [f"~/(?s:.*){_in_slashes(re.escape(text))}(?s:.*)/" for text in dict.fromkeys([tag, *without])]
        text = self.terminal(" & ".join([f"/(?s:.{length})/", *wanted, *forbidden]))
        if tag in self._added_tokens:
            return f"{text} {self.tag(tag)}"
        # Free text would swallow the tag's first characters; as a suffix the tag ends it.
        return self._name("r", text, f"[suffix={self.text(tag)}]")

    def of(self, grammar: Grammar) -> str:
        """A request's own grammar as a part of this one."""
        if grammar.json_schema is not None:
            try:
                schema = json.loads(grammar.json_schema)
                if schema is not True and not isinstance(schema, dict):
                    raise ValueError("grammar: json_schema must be an object")
                return self.json({} if schema is True else schema)
            except json.JSONDecodeError as error:
                raise ValueError(f"grammar: json_schema is not JSON: {error}") from None
            except RecursionError:
                raise ValueError("grammar: json_schema is nested too deeply") from None
        if grammar.regex is not None:
            return self.terminal(f"/{_in_slashes(grammar.regex)}/")
        if grammar.choice is not None:
            return self.terminal(" | ".join(map(self.text, grammar.choice)))
        raise ValueError(
            "a grammar in Lark cannot follow a thought: turn thinking off, as in "
            '"chat_template_kwargs": {"enable_thinking": false}, or use a regex or a JSON schema'
        )

    def reserve(self) -> str:
        """The name of a rule that is defined later, because it may refer to itself."""
        name = f"r{len(self._lines)}"
        self._lines[name] = ""
        return name

    def define(self, name: str, expression: str) -> None:
        self._lines[name] = f": {expression}"

    def source(self, start: str) -> str:
        return "\n".join([f"start: {start}", *(name + line for name, line in self._lines.items())])

    def _name(self, prefix: str, expression: str, options: str = "") -> str:
        line = f"{options}: {expression}"
        name = self._names.setdefault(line, f"{prefix}{len(self._lines)}")
        self._lines[name] = line
        return name


def alternatives(expressions: Sequence[str]) -> str:
    return f"({' | '.join(expressions)})"


def _in_slashes(pattern: str) -> str:
    """A regex as it may stand between slashes, in one line."""
    escapes = {"/": r"\/", "\n": r"\n", "\r": r"\r"}
    return re.sub(r"\\.|[/\n\r]", lambda match: escapes.get(match[0][-1], match[0]), pattern, flags=re.DOTALL)


class ToolGrammar(ABC):
    """The grammar of one tool's arguments in a notation that is not JSON. Errors name the tool."""

    def __init__(self, rules: Rules, tool: ToolSpec) -> None:
        self.rules, self.name, self.root = rules, tool.name, arguments_schema(tool)
        try:
            prepare(self.root)  # for its checks of depth and oneOf; objects are closed in these notations anyway
        except ValueError as error:
            raise self.refuse(str(error)) from None
        self._values: dict[int, tuple[Schema, str]] = {}
        """By a schema's id(); the schema is kept so that no other gets the same id()."""
        self.check(self.root, "type", "properties", "required")

    @abstractmethod
    def expression(self, schema: Schema) -> str:
        """The expression of a value; `schema` is no reference."""

    @abstractmethod
    def literal(self, value: Any) -> str:
        """The expression of exactly this value."""

    def value(self, schema: Any) -> str:
        """The rule of a schema within this one, made once for each: schemas may refer to each other in circles."""
        schema = resolve(schema, self.root)
        if id(schema) not in self._values:
            name = self.rules.reserve()
            self._values[id(schema)] = schema, name
            self.rules.define(name, self.expression(schema))
        return self._values[id(schema)][1]

    def choice(self, schema: Schema) -> str:
        """The expression of the values that an enum or const lists; empty where the schema has neither."""
        if "const" not in schema and "enum" not in schema:
            return ""
        values = [schema["const"]] if "const" in schema else self.get(schema, "enum", list, [])
        self.check(schema, "type", "enum", "const")
        return alternatives([self.literal(value) for value in values])

    def get(self, schema: Schema, word: str, type: type[T], default: T) -> T:
        """The keyword's value, which must be of this type."""
        value = schema.get(word, default)
        if not isinstance(value, type) or isinstance(value, bool):
            raise self.refuse(f"has {value!r} as {word}, which is not valid JSON Schema")
        return value

    def members(self, schema: Schema) -> list[tuple[str, Any, bool]]:
        """Of an object: name, schema and whether it is required."""
        properties, required = self.get(schema, "properties", dict, {}), self.get(schema, "required", list, [])
        if missing := [name for name in required if name not in properties]:
            raise self.refuse(f"requires {missing[0]!r} without describing it; add it to properties")
        return [(name, value, name in required) for name, value in properties.items()]

    def types(self, schema: Schema) -> list[str]:
        types = schema.get("type", list(TYPES))
        types = types if isinstance(types, list) else [types]
        if unknown := [word for word in types if word not in TYPES]:
            raise self.refuse(f"has {unknown[0]!r} as type, which is not valid JSON Schema")
        self.check(schema, "type", *(word for name in types for word in ENFORCED.get(name, ())))
        return types

    def text_before(self, tag: str, schema: Schema, without: Sequence[str]) -> str:
        """A string's characters, in which none of these texts occurs, and the tag that ends them."""
        low, high = self.get(schema, "minLength", int, 0), self.get(schema, "maxLength", int, -1)
        pattern = self.get(schema, "pattern", str, "")
        begins, ends = pattern.startswith("^"), pattern.endswith("$") and not pattern.endswith(r"\$")
        body = pattern[begins : len(pattern) - ends]
        if (begins or ends) and _has_choice(body):  # "^a|b$" is two patterns with one anchor each
            raise self.refuse(f"has the pattern {pattern!r}; put its alternatives in brackets")
        if pattern:  # JSON Schema searches the text for the pattern, a grammar matches all of it
            body = f"{'' if begins else '(?s:.*)'}(?:{body}){'' if ends else '(?s:.*)'}"
        return self.rules.text_before(tag, without, body, low, None if high < 0 else high)

    def check(self, schema: Schema, *allowed: str) -> None:
        if others := sorted(set(schema) - ANNOTATIONS - {*allowed}):
            reason = f"has {others[0]!r}, which cannot be enforced in this model's notation of calls"
            raise self.refuse(f"{reason}; leave it out, or set tool_choice to auto")

    def refuse(self, why: str) -> ValueError:
        return ValueError(f"tools: the schema of {self.name!r} {why}")


def arguments_schema(tool: ToolSpec) -> dict[str, Any]:
    """The schema of an object, whatever the client left out."""
    if not tool.parameters:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    return {"type": "object", **tool.parameters}


def json_types(schema: Any, root: Schema) -> frozenset[str]:
    """The types that a value may have; empty if the schema does not restrict them, or is not valid."""
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
            found.add(json_type(schema["const"]))
        elif isinstance(values, list):
            found.update(map(json_type, values))
        elif types is not None:
            found.update(word for word in TYPES if word == types or (isinstance(types, list) and word in types))
        elif alike := options(schema):
            todo += alike
        else:
            return frozenset()
    return frozenset(found)


def resolve(schema: Any, root: Schema) -> Schema:
    """The schema that references and an allOf of one lead to."""
    for _ in range(MAX_REFERENCES):
        if not isinstance(schema, dict):
            return {"not": {}} if schema is False else {}
        reference, parts = schema.get("$ref"), schema.get("allOf")
        if isinstance(reference, str):
            if (schema := follow(reference, root)) is None:
                raise ValueError(f"tools: a schema's $ref {reference!r} leads to nothing within the schema")
        elif isinstance(parts, list) and len(parts) == 1 and set(schema) - ANNOTATIONS == {"allOf"}:
            schema = parts[0]
        else:
            return schema
    raise ValueError("tools: a schema's $ref leads back to itself")


def options(schema: Schema) -> list[Any]:
    """The schemas of which one must fit."""
    return [option for word in CHOICES for option in list_of(schema, word)]


def _has_choice(pattern: str) -> bool:
    """A | outside of all brackets."""
    depth = 0
    for part in re.findall(r"\\.|\[(?:\\.|[^]\\])*|[()|]", pattern, re.DOTALL):  # an escape, a class, or a character
        if part == "|" and depth == 0:
            return True
        depth += (part == "(") - (part == ")")
    return False
