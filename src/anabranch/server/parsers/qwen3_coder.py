"""Calls as Qwen3-Coder, Qwen3.5 and later write them:

    <tool_call>
    <function=weather>
    <parameter=city>
    Rome
    </parameter>
    </function>
    </tool_call>

A value is bare text, and only the tool's schema tells whether 12 is a number: text where the schema allows text or says
nothing, else JSON if it is JSON of the right type (or Python's True, False and None, which the template writes).
Text that does not fit ends the arguments, and what follows up to the closing tag is content. Some of these models
forget the outer tag: a function that was offered is called without it too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from anabranch.server.parsers.lark import Rules, alternatives
from anabranch.server.parsers.parts import ToolSpec
from anabranch.server.parsers.reader import Output, read_rest
from anabranch.server.parsers.schema import Schema, ToolSchema, kind, kinds, options, strict_json
from anabranch.server.parsers.source import Source, Tags, Wait

OPENS, CLOSES = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_ENDS = "<function=", "</function>"
PARAMETER, PARAMETER_ENDS = "<parameter=", "</parameter>"
AFTER = Tags(OPENS, CLOSES)
# The line break before the tag is not the value's. The last two are for models that forget to close a parameter.
NEWLINE = "\n"
VALUE_ENDS = NEWLINE + PARAMETER_ENDS
AFTER_VALUE = Tags(VALUE_ENDS, PARAMETER_ENDS, f"\n{PARAMETER}", f"\n{FUNCTION_ENDS}")
NAME = re.compile(r"[^<>\n]+")
CONSTANTS = {"True": "true", "False": "false", "None": "null"}
WORDS = {"boolean": ("true", "false", "True", "False"), "null": ("null", "None")}


class Qwen3Coder:
    opens = (OPENS, FUNCTION)
    tags = (OPENS, CLOSES)
    tagged = True

    def read(self, source: Source, out: Output) -> Wait[None]:
        wrapped = yield from source.literal(OPENS)
        if wrapped:
            yield from source.space()
        num_before = out.num_calls
        while (yield from source.literal(FUNCTION)):
            name = (yield from source.run(NAME)).strip()
            if not name or not (yield from source.literal(">")) or not (wrapped or name in out.tools):
                return
            source.drop()
            out.begin(name)
            yield from self._parameters(source, out, out.tools.get(name, ToolSpec(name)))
            if not source.is_blank:
                source.settle(out.content)
            yield from source.space()
        if wrapped and out.num_calls > num_before:
            yield from read_rest(source, out, AFTER, CLOSES)

    def _parameters(self, source: Source, out: Output, tool: ToolSpec) -> Wait[None]:
        before, after = "{", "{}"
        while True:
            yield from source.space()
            if (yield from source.literal(FUNCTION_ENDS)):
                source.drop()
                break
            key = (yield from source.literal(PARAMETER)) and (yield from source.run(NAME))
            if not key or not (yield from source.literal(">")):
                if (yield from source.peek()):
                    break
                return  # cut off: the arguments stay open
            source.drop()
            out.arguments(f"{before}{json.dumps(key, ensure_ascii=False)}: ")
            before, after = ", ", "}"
            if not (yield from self._value(source, out, *_allowed(tool, key))):
                return
        out.arguments(after)

    def _value(self, source: Source, out: Output, allowed: frozenset[str], named: Sequence[str]) -> Wait[bool]:
        """False if it was cut off."""
        yield from source.literal("\n")
        source.drop()
        is_text = allowed <= {"string"}
        pieces = list[str]()
        if is_text:  # goes out as it comes in
            out.arguments('"')
        while piece := (yield from source.until(AFTER_VALUE)):
            if is_text:
                out.arguments(json.dumps(piece, ensure_ascii=False)[1:-1])
            else:
                pieces.append(piece)
            source.drop()
        tag = source.which(AFTER_VALUE)
        if is_text:
            out.arguments('"' if tag else "")
        else:
            out.arguments(to_json("".join(pieces), allowed, named) if tag else "".join(pieces))
        source.take(len(tag) if tag.endswith(PARAMETER_ENDS) else min(len(tag), 1))
        source.drop()
        return bool(tag)

    def grammar(self, rules: Rules, tools: Sequence[ToolSpec], many: bool) -> str:
        functions = []
        for tool in tools:
            head, tail = rules.text(f"{FUNCTION}{tool.name}>\n"), rules.text(FUNCTION_ENDS)
            functions.append(f"{head} {Values(rules, tool).parameters()} {tail}")
        newline = rules.text(NEWLINE)
        call = rules.rule(f"{rules.tag(OPENS)} {newline} {alternatives(functions)} {newline} {rules.tag(CLOSES)}")
        return f"{call} ({newline} {call})*" if many else call


def _allowed(tool: ToolSpec, key: str) -> tuple[frozenset[str], list[str]]:
    """What the tool's schema, which may be anything, says of a parameter: types, and values other than text by name."""
    root = tool.parameters or {}
    properties = root.get("properties")
    schema = properties.get(key) if isinstance(properties, Mapping) else None
    values = schema.get("enum") if isinstance(schema, Mapping) else None
    named = [json.dumps(value) for value in values if not isinstance(value, str)] if isinstance(values, list) else []
    return kinds(schema, root), named


def to_json(text: str, allowed: frozenset[str], named: Sequence[str] = ()) -> str:
    """A value that need not be a string."""
    bare = text.strip()
    bare = CONSTANTS.get(bare, bare)
    if bare in named:
        return bare
    if bare != "null" and "string" in allowed:
        return json.dumps(text, ensure_ascii=False)
    try:
        value = strict_json(bare)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    fits = kind(value) in allowed or (kind(value) == "integer" and "number" in allowed)
    return bare if fits else json.dumps(text, ensure_ascii=False)


class Values:
    """The grammar of one tool's parameters in this notation."""

    def __init__(self, rules: Rules, tool: ToolSpec) -> None:
        self._rules = rules
        self._tool = ToolSchema(tool)

    def parameters(self) -> str:
        rules, tool = self._rules, self._tool
        tool.check(tool.root, "type", "properties", "required")
        expressions = []
        for key, schema, required in tool.members(tool.root):
            if not NAME.fullmatch(key) or key != key.strip():
                raise tool.refuse(f"has a parameter {key!r}, which cannot be written in this model's notation of calls")
            head, value = rules.text(f"{PARAMETER}{key}>\n"), tool.rule(rules, schema, self._value)
            expressions.append(f"({head} {value} {rules.text(NEWLINE)}){'' if required else '?'}")
        return " ".join(expressions)

    def _value(self, schema: Schema) -> str:
        """A value and the tag that ends it."""
        rules, tool = self._rules, self._tool
        allowed = kinds(schema, tool.root)
        if (values := tool.choices(schema)) is not None:
            tool.check(schema, "type", "enum", "const")
            return f"{alternatives([self._literal(value) for value in values])} {rules.text(VALUE_ENDS)}"
        if "type" in schema and allowed and allowed <= WORDS.keys():
            words = [rules.text(word) for name in tool.types(schema) for word in WORDS[name]]
            return f"{alternatives(words)} {rules.text(VALUE_ENDS)}"
        if allowed and "string" not in allowed:
            definitions = {word: value for word, value in tool.root.items() if word in ("$defs", "definitions")}
            return f"{rules.json({**schema, **definitions})} {rules.text(VALUE_ENDS)}"
        # Where text is allowed all is read as text, but for null: other types are left out.
        if alike := options(schema):
            tool.check(schema, "anyOf", "oneOf")
            texts = [option for option in alike if "string" in kinds(option, tool.root)]
            return alternatives([tool.rule(rules, option, self._value) for option in texts or alike])
        tool.types(schema)  # for its checks
        return tool.text_before(VALUE_ENDS, rules, schema, AFTER_VALUE.texts)

    def _literal(self, value: Any) -> str:
        text = value if isinstance(value, str) else json.dumps(value, allow_nan=False)
        if any(tag in text for tag in AFTER_VALUE.texts):
            raise self._tool.refuse(f"has {text!r}, which cannot be written in this model's notation of calls")
        return self._rules.text(text)
