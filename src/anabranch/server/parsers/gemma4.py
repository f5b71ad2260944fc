"""Calls as Gemma 4 writes them, in a notation of its own:

    <|tool_call>call:weather{city:<|"|>Rome<|"|>,days:[1,2],exact:true}<tool_call|>

Keys are bare, strings stand between <|"|> and have no escapes; numbers, true, false and null are as in JSON. It becomes
JSON on the way. Text that does not fit ends the arguments, and what follows up to the closing tag is content.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from anabranch.server.parsers.lark import Rules, alternatives
from anabranch.server.parsers.parts import ToolSpec
from anabranch.server.parsers.reader import Output, read_rest
from anabranch.server.parsers.schema import NUMBERS, Schema, ToolSchema, options
from anabranch.server.parsers.source import Source, Tags, Wait

OPENS, CLOSES, QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
RESPONSE = "<|tool_response>"
"""With it the model hands over to the tools; a server that does not stop there finds it in the text."""

AFTER = Tags(OPENS, CLOSES)
AFTER_KEY = Tags(":", ",", "{", "}", "[", "]", QUOTE, CLOSES)
AFTER_VALUE = Tags(",", "{", "}", "[", "]", QUOTE, CLOSES)
IN_STRING = Tags(QUOTE, CLOSES)
ENDS = (",", "}", "]", CLOSES)
"""What ends a value."""
NAME = re.compile(r"[^\s{}<>]+")
BARE_KEY = re.compile(r"[^\s:,{}\[\]<>]+")
NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?", re.ASCII)
CONSTANTS = {"true": "true", "false": "false", "null": "null", "": "null"}
CONSTANTS |= {"True": "true", "False": "false", "None": "null"}  # the template itself writes None


Step: TypeAlias = "Callable[[], Wait[Step | None]]"


class Gemma4:
    opens = (OPENS,)
    tags = (OPENS, CLOSES, QUOTE, RESPONSE)
    tagged = True

    def read(self, source: Source, out: Output) -> Wait[None]:
        source.take(len(OPENS))
        if not (yield from source.literal("call:")):
            return
        name = yield from source.run(NAME)
        if not name or not (yield from source.literal("{")):
            return
        source.drop()
        out.begin(name)
        yield from Arguments(source, out).read()
        yield from read_rest(source, out, AFTER, CLOSES)
        if source.is_blank:
            yield from source.space()
            if (yield from source.literal(RESPONSE)):
                source.drop()

    def grammar(self, rules: Rules, tools: Sequence[ToolSpec], many: bool) -> str:
        calls = []
        for tool in tools:
            calls.append(f"{rules.text(f'call:{tool.name}')} {Values(rules, tool).arguments()}")
        call = rules.rule(f"{rules.tag(OPENS)} {alternatives(calls)} {rules.tag(CLOSES)}")
        return f"{call}+" if many else call


class Arguments:
    """One call's arguments, after their opening bracket."""

    def __init__(self, source: Source, out: Output) -> None:
        self._source = source
        self._out = out
        self._open: list[str] = []
        """The closing brackets that are due."""
        self._empty = True
        """Nothing stands yet between the innermost brackets."""

    def read(self) -> Wait[None]:
        """Up to the closing bracket, or as far as it goes. A call that is cut off stays open, one that is closed by its
        tag alone is closed."""
        self._enter("{")
        step = self._key
        while self._open and (next_step := (yield from step())):
            step = next_step
        if self._open and (yield from self._source.peek()):
            self._out.arguments("".join(reversed(self._open)))

    # Each step reads one thing, and gives the step that comes next, or None where the text does not fit.

    def _key(self) -> Wait[Step | None]:
        word, mark = yield from self._word(AFTER_KEY)
        if not mark:
            if word:
                self._write(json.dumps(word, ensure_ascii=False)[:-1])
            return None
        if mark == "}" and not word:
            return self._leave()
        if mark == QUOTE and not word:
            self._source.take(len(QUOTE))
            pieces = []
            while piece := (yield from self._source.until(IN_STRING)):
                pieces.append(piece)
            word = "".join(pieces)
            if not (yield from self._source.literal(QUOTE)):
                return None
            yield from self._source.space()
        elif not word:
            return None
        if not (yield from self._source.literal(":")):
            return None
        self._write(json.dumps(word, ensure_ascii=False) + ": ")
        return self._value

    def _value(self) -> Wait[Step | None]:
        word, mark = yield from self._word(AFTER_VALUE)
        in_list = self._open[-1] == "]"
        if not mark:
            if word:
                self._write(word, in_list)
            return None
        if word or (mark == "," if in_list else mark in ENDS):
            known = word if NUMBER.fullmatch(word) else CONSTANTS.get(word)
            self._write(known or json.dumps(word, ensure_ascii=False), in_list)
            return self._more
        if mark in ENDS:
            return self._leave() if mark == "]" else None
        if mark == QUOTE:
            return (yield from self._string(in_list))
        self._source.take(1)
        self._write("", in_list)
        self._enter(mark)
        return self._key if mark == "{" else self._value

    def _string(self, in_list: bool) -> Wait[Step | None]:
        source = self._source
        source.take(len(QUOTE))
        self._write('"', in_list)
        while piece := (yield from source.until(IN_STRING)):
            source.drop()
            self._out.arguments(json.dumps(piece, ensure_ascii=False)[1:-1])
        mark = source.which(IN_STRING)
        if not mark:
            return None
        if mark == QUOTE:
            source.take(len(QUOTE))
            source.drop()
        self._out.arguments('"')
        return self._more

    def _more(self) -> Wait[Step | None]:
        word, mark = yield from self._word(AFTER_VALUE)
        if word:
            return None
        if mark == ",":
            self._source.take(1)
            self._source.drop()
            return self._key if self._open[-1] == "}" else self._value
        return self._leave() if mark == self._open[-1] else None

    def _word(self, marks: Tags) -> Wait[tuple[str, str]]:
        """Bare text, and the mark after it, which is not read."""
        pieces = []
        while piece := (yield from self._source.until(marks)):
            pieces.append(piece)
        return "".join(pieces).strip(), self._source.which(marks)

    def _write(self, text: str, in_list: bool = True) -> None:
        """The beginning of a member or an item, or a value after its key. What was read for it is done with."""
        self._source.drop()
        self._out.arguments(text if self._empty or not in_list else f", {text}")
        self._empty = False

    def _enter(self, bracket: str) -> None:
        self._out.arguments(bracket)
        self._open.append("}" if bracket == "{" else "]")
        self._empty = True

    def _leave(self) -> Step:
        self._source.take(1)
        self._source.drop()
        self._out.arguments(self._open.pop())
        self._empty = False
        return self._more


class Values:
    """The grammar of one tool's arguments in this notation."""

    def __init__(self, rules: Rules, tool: ToolSpec) -> None:
        self._rules = rules
        self._tool = ToolSchema(tool)

    def arguments(self) -> str:
        root = self._tool.root
        self._tool.check(root, "type", "properties", "required")
        return self._object(root)

    def _value(self, schema: Any) -> str:
        return self._tool.rule(self._rules, schema, self._expression)

    def _expression(self, schema: Schema) -> str:
        if (values := self._tool.choices(schema)) is not None:
            self._tool.check(schema, "type", "enum", "const")
            return alternatives([self._literal(value) for value in values])
        if alike := options(schema):
            self._tool.check(schema, "anyOf", "oneOf")
            return alternatives([self._value(option) for option in alike])
        return alternatives([self._of_type(kind, schema) for kind in self._tool.types(schema)])

    def _of_type(self, kind: str, schema: Schema) -> str:
        rules = self._rules
        if kind == "string":
            return f"{rules.tag(QUOTE)} {self._tool.text_before(QUOTE, rules, schema, [CLOSES])}"
        if kind == "array":
            return self._array(schema)
        if kind == "object":
            return self._object(schema)
        return rules.json({"type": kind, **{word: schema[word] for word in NUMBERS if word in schema}})

    def _array(self, schema: Schema) -> str:
        low, high = self._tool.get(schema, "minItems", int, 0), self._tool.get(schema, "maxItems", int, -1)
        rules = self._rules
        items = ""
        if high != 0:
            item = self._value(schema.get("items", True))
            more = (
                f"({rules.text(',')} {item}){{{max(low - 1, 0)},{high - 1 if high > 0 else ''}}}" if high != 1 else ""
            )
            items = f"({item} {more}){'?' if low <= 0 else ''}"
        return f"{rules.text('[')} {items} {rules.text(']')}"

    def _object(self, schema: Schema) -> str:
        rules = self._rules
        members = self._tool.members(schema)
        if members:
            body = self._members(members)
        elif schema.get("additionalProperties") is False:
            body = ""
        else:
            key = rules.terminal(r"/[A-Za-z_][A-Za-z0-9_.\-]*/")
            value = self._value(schema.get("additionalProperties", True))
            member = rules.rule(f"{key} {rules.text(':')} {value}")
            body = f"({member} ({rules.text(',')} {member})*)?"
        return f"{rules.text('{')} {body} {rules.text('}')}"

    def _members(self, members: list[tuple[str, Any, bool]]) -> str:
        """With commas between. `first`: what may come where no member is yet, `rest`: after one."""
        rules = self._rules
        first = rest = ""
        # In the order that the model was trained on: its template sorts them.
        for key, schema, required in sorted(members, key=lambda member: member[0].lower(), reverse=True):
            member = rules.rule(f"{self._key(key)} {rules.text(':')} {self._value(schema)}")
            following = f"{rules.text(',')} {member}"
            first = (
                f"{member} {rest}" if required else f"({member} {rest} | {first})" if first else f"({member} {rest})?"
            )
            rest = rules.rule(f"{following if required else f'({following})?'} {rest}")
            first = rules.rule(first)
        return first

    def _key(self, key: str) -> str:
        return self._rules.text(key) if BARE_KEY.fullmatch(key) else self._quoted(key)

    def _quoted(self, text: str) -> str:
        if QUOTE in text or CLOSES in text:
            raise self._tool.refuse(f"has {text!r}, which cannot be written in this model's notation of calls")
        quote = self._rules.tag(QUOTE)
        return f"{quote} {self._rules.text(text)} {quote}"

    def _literal(self, value: Any) -> str:
        rules = self._rules
        if isinstance(value, str):
            return self._quoted(value)
        if isinstance(value, list):
            items = f" {rules.text(',')} ".join(map(self._literal, value))
            return f"({rules.text('[')} {items} {rules.text(']')})"
        if isinstance(value, dict):
            pairs = [f"{self._key(key)} {rules.text(':')} {self._literal(item)}" for key, item in value.items()]
            return f"({rules.text('{')} {f' {rules.text(chr(44))} '.join(pairs)} {rules.text('}')})"
        return rules.text(json.dumps(value, allow_nan=False))
