"""Calls whose arguments are bare text between tags:

    Qwen3-Coder, Qwen3.5    <tool_call>
                            <function=weather>
                            <parameter=city>
                            Rome
                            </parameter>
                            </function>
                            </tool_call>
    MiniMax-M2              <minimax:tool_call>
                            <invoke name="weather">
                            <parameter name="city">Rome</parameter>
                            </invoke>
                            </minimax:tool_call>
    GLM-4.5                 <tool_call>weather
                            <arg_key>city</arg_key>
                            <arg_value>Rome</arg_value>
                            </tool_call>

Only the tool's schema tells whether 12 is a number: text where the schema allows text or says nothing, else JSON if it
is JSON of the right type (or Python's True, False and None, which Qwen's template writes). A closing tag in a string
of JSON is text, unless the string has no end. Text that does not fit ends the arguments, and what follows up to the
closing tag is content. Some of these models forget the outer tag: where the inner ones name the function, a function
that was offered is called without it too.
"""

import json
import re
from collections.abc import Sequence
from typing import Any, ClassVar

from anabranch.server.parsers.call_grammar import Rules, Schema, ToolGrammar, alternatives, json_types, options
from anabranch.server.parsers.json_calls import quoted, strict_json
from anabranch.server.parsers.parts import ToolSpec
from anabranch.server.parsers.reader import EnclosedNotation, Output
from anabranch.server.parsers.source import Source, Tags, Wait
from anabranch.text.json_schema import json_type

NEWLINE = "\n"
IN_STRING = Tags('"', "\\", NEWLINE)
"""A line break is escaped in a string of JSON."""
CONSTANTS = {"True": "true", "False": "false", "None": "null"}
WORDS = {"boolean": ("true", "false", "True", "False"), "null": ("null", "None")}


class TaggedValues(EnclosedNotation):
    FUNCTION: ClassVar[str]
    NAME_ENDS: ClassVar[str]
    """Around the name of the function; then come the parameters."""
    FUNCTION_ENDS: ClassVar[str]
    PARAMETER: ClassVar[str]
    KEY_ENDS: ClassVar[tuple[str, ...]]
    """What follows a key; a line break may stand between these."""
    PARAMETER_ENDS: ClassVar[str]
    AROUND: ClassVar[str] = ""
    """White space around a value that is not the value's."""
    FORGOTTEN: ClassVar[tuple[str, ...]] = ()
    """Line breaks and tags that end a value of a model which has forgotten to close it."""
    NAME: ClassVar[re.Pattern[str]]
    """Of functions and keys."""
    newline = NEWLINE
    """Stands between tags."""

    def __init__(self) -> None:
        super().__init__()
        self.value_ends = self.AROUND + self.PARAMETER_ENDS
        self.after_value = Tags(*dict.fromkeys([self.value_ends, self.PARAMETER_ENDS, *self.FORGOTTEN]))
        self.in_json = Tags(*self.after_value.texts, '"', "\\")

    def read(self, source: Source, out: Output) -> Wait[None]:
        wrapped = yield from source.literal(self.OPENS)
        if wrapped:
            yield from source.space()
        num_before = out.num_calls
        while (yield from source.literal(self.FUNCTION)):
            name = (yield from source.run(self.NAME)).strip()
            if not name or not (yield from source.literal(self.NAME_ENDS)) or not (wrapped or name in out.tools):
                return
            source.drop()
            out.begin(name)
            yield from self._parameters(source, out, out.tools.get(name, ToolSpec(name)))
            source.settle(out.content)
            yield from source.space()
        if wrapped and out.num_calls > num_before:
            yield from self.read_rest(source, out)

    def _parameters(self, source: Source, out: Output, tool: ToolSpec) -> Wait[bool]:
        """Up to the end of the function; False: that has not come."""
        before, after = "{", "{}"
        while not (yield from source.spaced(self.FUNCTION_ENDS)):
            key = (yield from source.literal(self.PARAMETER)) and (yield from source.run(self.NAME))
            for text in self.KEY_ENDS if key else ():
                key = (yield from source.spaced(text)) and key
            if not key:
                if (yield from source.peek()):
                    out.arguments(after)
                return False  # the arguments stay open if they were cut off
            source.drop()
            out.arguments(f"{before}{quoted(key)}: ")
            before, after = ", ", "}"
            if not (yield from self._value(source, out, *_allowed(tool, key))):
                return False
        source.drop()
        out.arguments(after)
        return True

    def _value(self, source: Source, out: Output, allowed: frozenset[str], named: Sequence[str]) -> Wait[bool]:
        """False if it was cut off."""
        yield from source.literal(self.AROUND)
        source.drop()
        if allowed <= {"string"}:  # text, passed on piece by piece
            out.arguments('"')
            tag = yield from source.until(self.after_value, lambda piece: out.arguments(quoted(piece)[1:-1]))
            out.arguments('"' if tag else "")
        else:
            before = "" if "string" in allowed else (yield from self._before_tag(source))
            text, tag = yield from source.text_until(self.after_value)
            out.arguments(to_json(before + text, allowed, named) if tag else before + text)
        source.skip(len(tag) if tag.endswith(self.PARAMETER_ENDS) else min(len(tag), 1))
        return bool(tag)

    def _before_tag(self, source: Source) -> Wait[str]:
        """The part of a value in which tags are in strings of an object or an array: all of it, if it is JSON."""
        yield from source.until(self.in_json)
        pieces = [source.release()]
        is_json = pieces[0].lstrip().startswith(("{", "["))
        while is_json and (yield from source.until(self.in_json)) == '"':
            is_json = yield from _json_string(source)
            text = source.release()
            if not is_json:  # then a tag in it counts; what is put back never has a string in it that would be put back
                pieces.append(text.partition(self.PARAMETER_ENDS)[0].rstrip())
                source.put_back(text[len(pieces[-1]) :])
            else:
                pieces.append(text)
        return "".join([*pieces, source.release()])

    def call_grammar(self, rules: Rules, tool: ToolSpec) -> str:
        parameters = TaggedGrammar(rules, tool, self).parameters()
        head = f"{rules.tag(self.FUNCTION)} {rules.text(tool.name + self.NAME_ENDS + self.newline)}"
        return f"{head} {parameters} {rules.tag(self.FUNCTION_ENDS)}"


class Qwen3Coder(TaggedValues):
    OPENS, CLOSES, SPACE = "<tool_call>", "</tool_call>", NEWLINE
    FUNCTION, NAME_ENDS, FUNCTION_ENDS = "<function=", ">", "</function>"
    PARAMETER, KEY_ENDS, PARAMETER_ENDS, AROUND = "<parameter=", (">",), "</parameter>", NEWLINE
    FORGOTTEN = NEWLINE + PARAMETER, NEWLINE + FUNCTION_ENDS
    NAME = re.compile(r"[^<>\n]+")
    opens = (OPENS, FUNCTION)
    tags = (OPENS, CLOSES)


class MiniMaxM2(TaggedValues):
    OPENS, CLOSES, SPACE = "<minimax:tool_call>", "</minimax:tool_call>", NEWLINE
    FUNCTION, NAME_ENDS, FUNCTION_ENDS = '<invoke name="', '">', "</invoke>"
    PARAMETER, KEY_ENDS, PARAMETER_ENDS = '<parameter name="', ('">',), "</parameter>"
    NAME = re.compile(r'[^"<>\n]+')
    opens = (OPENS, FUNCTION)
    tags = (OPENS, CLOSES)

    def grammar(self, rules: Rules, tools: Sequence[ToolSpec], many: bool) -> str:
        """All calls stand between one pair of tags."""
        call = f"({alternatives([self.call_grammar(rules, tool) for tool in tools])} {rules.text(NEWLINE)})"
        return f"{rules.tag(self.OPENS)} {rules.text(NEWLINE)} {call}{'+' if many else ''} {rules.tag(self.CLOSES)}"


class Glm45(TaggedValues):
    """The outer tag is the only one around the name. GLM-4.7 writes no line breaks."""

    OPENS, CLOSES = "<tool_call>", "</tool_call>"
    FUNCTION, NAME_ENDS, FUNCTION_ENDS = OPENS, "", CLOSES
    PARAMETER, KEY_ENDS, PARAMETER_ENDS = "<arg_key>", ("</arg_key>", "<arg_value>"), "</arg_value>"
    NAME = re.compile(r"[^<>\n]+")
    FUNCTION_NAME = re.compile(r"[^<>\s]+")
    opens = (OPENS,)
    tags = (OPENS, CLOSES, PARAMETER, *KEY_ENDS, PARAMETER_ENDS)

    def __init__(self, template: str) -> None:
        super().__init__()
        self.newline = "" if "</arg_key><arg_value>" in template else NEWLINE

    def read(self, source: Source, out: Output) -> Wait[None]:
        source.take(len(self.OPENS))
        yield from source.space()
        name = yield from source.run(self.FUNCTION_NAME)
        yield from source.space()
        if name and ((yield from source.at(self.PARAMETER)) or (yield from source.at(self.CLOSES))):
            source.drop()
            out.begin(name)
            if not (yield from self._parameters(source, out, out.tools.get(name, ToolSpec(name)))):
                yield from self.read_rest(source, out)

    def grammar(self, rules: Rules, tools: Sequence[ToolSpec], many: bool) -> str:
        call = rules.rule(alternatives([self.call_grammar(rules, tool) for tool in tools]))
        space = rules.text(self.newline) if self.newline else ""
        return f"{call} ({space} {call})*" if many else call


def _json_string(source: Source) -> Wait[bool]:
    """At a quote: read a string of JSON, and the space after it. False: it has no end, or what follows is not JSON."""
    source.take(1)
    while (tag := (yield from source.until(IN_STRING))) == "\\":
        source.take(1)
        if (yield from source.peek()) not in ("", NEWLINE):
            source.take(1)
    if tag != '"':
        return False
    source.take(1)
    yield from source.space()
    return (yield from source.peek()) in ("", ",", ":", "]", "}")


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


class TaggedGrammar(ToolGrammar):
    def __init__(self, rules: Rules, tool: ToolSpec, notation: TaggedValues) -> None:
        super().__init__(rules, tool)
        self.notation = notation

    def parameters(self) -> str:
        rules, notation, expressions = self.rules, self.notation, []
        space, around = (rules.text(text) if text else "" for text in (notation.newline, notation.AROUND))
        for key, schema, required in self.members(self.root):
            if not notation.NAME.fullmatch(key) or key != key.strip():
                raise self.refuse(f"has a parameter {key!r}, which cannot be written in this model's notation of calls")
            ends = f" {space} ".join(map(rules.tag, notation.KEY_ENDS))
            head = f"{rules.tag(notation.PARAMETER)} {rules.text(key)} {ends} {around}"
            expressions.append(f"({head} {self.value(schema)} {space}){'' if required else '?'}")
        return " ".join(expressions)

    def expression(self, schema: Schema) -> str:
        """A value and the tag that ends it."""
        rules, ends = self.rules, self.rules.tag(self.notation.value_ends)
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
        return self.text_before(self.notation.value_ends, schema, self.notation.after_value.texts)

    def literal(self, value: Any) -> str:
        text = value if isinstance(value, str) else json.dumps(value, allow_nan=False)
        if any(tag in text for tag in self.notation.after_value.texts):
            raise self.refuse(f"has {text!r}, which cannot be written in this model's notation of calls")
        return self.rules.text(text)
