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

import json
import re
from collections.abc import Sequence
from typing import Any

from anabranch.server.parsers.call_grammar import Rules, Schema, ToolGrammar, alternatives, json_types, options
from anabranch.server.parsers.json_calls import quoted, strict_json
from anabranch.server.parsers.parts import ToolSpec
from anabranch.server.parsers.reader import EnclosedNotation, Output
from anabranch.server.parsers.source import Source, Tags, Wait
from anabranch.text.json_schema import json_type

OPENS, CLOSES = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_ENDS = "<function=", "</function>"
PARAMETER, PARAMETER_ENDS = "<parameter=", "</parameter>"
# The line break before the tag is not the value's. The last two are for models that forget to close a parameter.
NEWLINE = "\n"
VALUE_ENDS = NEWLINE + PARAMETER_ENDS
AFTER_VALUE = Tags(VALUE_ENDS, PARAMETER_ENDS, f"\n{PARAMETER}", f"\n{FUNCTION_ENDS}")
NAME = re.compile(r"[^<>\n]+")
CONSTANTS = {"True": "true", "False": "false", "None": "null"}
WORDS = {"boolean": ("true", "false", "True", "False"), "null": ("null", "None")}


class Qwen3Coder(EnclosedNotation):
    OPENS, CLOSES, SPACE = OPENS, CLOSES, NEWLINE
    opens = (OPENS, FUNCTION)
    tags = (OPENS, CLOSES)

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
            source.settle(out.content)
            yield from source.space()
        if wrapped and out.num_calls > num_before:
            yield from self.read_rest(source, out)

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
            out.arguments(f"{before}{quoted(key)}: ")
            before, after = ", ", "}"
            if not (yield from self._value(source, out, *_allowed(tool, key))):
                return
        out.arguments(after)

    def _value(self, source: Source, out: Output, allowed: frozenset[str], named: Sequence[str]) -> Wait[bool]:
        """False if it was cut off."""
        yield from source.literal("\n")
        source.drop()
        if allowed <= {"string"}:  # text, passed on piece by piece
            out.arguments('"')
            tag = yield from source.until(AFTER_VALUE, lambda piece: out.arguments(quoted(piece)[1:-1]))
            out.arguments('"' if tag else "")
        else:
            text, tag = yield from source.text_until(AFTER_VALUE)
            out.arguments(to_json(text, allowed, named) if tag else text)
        source.skip(len(tag) if tag.endswith(PARAMETER_ENDS) else min(len(tag), 1))
        return bool(tag)

    def call_grammar(self, rules: Rules, tool: ToolSpec) -> str:
        head, tail = rules.text(f"{FUNCTION}{tool.name}>\n"), rules.text(FUNCTION_ENDS)
        return f"{head} {Qwen3CoderGrammar(rules, tool).parameters()} {tail}"


def _allowed(tool: ToolSpec, key: str) -> tuple[frozenset[str], list[str]]:
    """What the tool's schema, which may be anything, allows for a parameter: types, and values that are not strings."""
    root = tool.parameters or {}
    properties = root.get("properties")
    schema = properties.get(key) if isinstance(properties, dict) else None
    values = schema.get("enum") if isinstance(schema, dict) else None
    named = [json.dumps(value) for value in values if not isinstance(value, str)] if isinstance(values, list) else []
    return json_types(schema, root), named


def to_json(text: str, allowed: frozenset[str], named: Sequence[str] = ()) -> str:
    """A value that need not be a string."""
    bare = text.strip()
    bare = CONSTANTS.get(bare, bare)
    if bare in named:
        return bare
    if bare != "null" and "string" in allowed:
        return quoted(text)
    try:
        value = strict_json(bare)
    except (ValueError, RecursionError):
        return quoted(text)
    fits = json_type(value) in allowed or (json_type(value) == "integer" and "number" in allowed)
    return bare if fits else quoted(text)


class Qwen3CoderGrammar(ToolGrammar):
    def parameters(self) -> str:
        rules, expressions = self.rules, []
        for key, schema, required in self.members(self.root):
            if not NAME.fullmatch(key) or key != key.strip():
                raise self.refuse(f"has a parameter {key!r}, which cannot be written in this model's notation of calls")
            head = rules.text(f"{PARAMETER}{key}>\n")
            expressions.append(f"({head} {self.value(schema)} {rules.text(NEWLINE)}){'' if required else '?'}")
        return " ".join(expressions)

    def expression(self, schema: Schema) -> str:
        """A value and the tag that ends it."""
        rules, ends = self.rules, self.rules.text(VALUE_ENDS)
        allowed = json_types(schema, self.root)
        if choice := self.choice(schema):
            return f"{choice} {ends}"
        if "type" in schema and allowed and allowed <= WORDS.keys():
            words = [rules.text(word) for name in self.types(schema) for word in WORDS[name]]
            return f"{alternatives(words)} {ends}"
        if allowed and "string" not in allowed:
            definitions = {word: value for word, value in self.root.items() if word in ("$defs", "definitions")}
            return f"{rules.json({**schema, **definitions})} {ends}"
        # Where text is allowed everything but null is read as text: other types are left out.
        if alike := options(schema):
            self.check(schema, "anyOf", "oneOf")
            texts = [option for option in alike if "string" in json_types(option, self.root)]
            return alternatives([self.value(option) for option in texts or alike])
        self.types(schema)  # for its checks
        return self.text_before(VALUE_ENDS, schema, AFTER_VALUE.texts)

    def literal(self, value: Any) -> str:
        text = value if isinstance(value, str) else json.dumps(value, allow_nan=False)
        if any(tag in text for tag in AFTER_VALUE.texts):
            raise self.refuse(f"has {text!r}, which cannot be written in this model's notation of calls")
        return self.rules.text(text)
