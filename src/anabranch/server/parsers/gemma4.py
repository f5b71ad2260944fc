"""Calls as Gemma 4 writes them, in a notation of its own:

    <|tool_call>call:weather{city:<|"|>Rome<|"|>,days:[1,2],exact:true}<tool_call|>

Keys are bare, strings stand between <|"|> and have no escapes; numbers, true, false and null are as in JSON. It becomes
JSON on the way. Text that does not fit ends the arguments, and what follows up to the closing tag is content.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, TypeAlias

from anabranch.server.parsers.call_grammar import NUMBERS, Rules, Schema, ToolGrammar, alternatives, options
from anabranch.server.parsers.json_calls import quoted
from anabranch.server.parsers.parts import ToolSpec
from anabranch.server.parsers.reader import EnclosedNotation, Output
from anabranch.server.parsers.source import Source, Tags, Wait

OPENS, CLOSES, QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
RESPONSE = "<|tool_response>"
"""The model ends its turn with it to wait for results; a server that does not stop there finds it in the text."""

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


class Gemma4(EnclosedNotation):
    OPENS, CLOSES = OPENS, CLOSES
    opens = (OPENS,)
    tags = (OPENS, CLOSES, QUOTE, RESPONSE)

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
        yield from self.read_rest(source, out)
        if source.is_blank:
            yield from source.space()
            if (yield from source.literal(RESPONSE)):
                source.drop()

    def call_grammar(self, rules: Rules, tool: ToolSpec) -> str:
        return f"{rules.text(f'call:{tool.name}')} {Gemma4Grammar(rules, tool).arguments()}"


class Arguments:
    """One call's arguments, after their opening bracket."""

    def __init__(self, source: Source, out: Output) -> None:
        self._source, self._out = source, out
        self._open: list[str] = []
        """The closing brackets that are still to come."""
        self._comma = ""
        """What separates the next part from the last one."""

    def read(self) -> Wait[None]:
        """Up to the closing bracket, or as far as the text fits. A call that is cut off stays open; one that only its
        tag closes is closed."""
        step = self._enter("{")
        while self._open and (next_step := (yield from step())):
            step = next_step
        if self._open and (yield from self._source.peek()):
            self._out.arguments("".join(reversed(self._open)))

    # Each step reads one thing, and returns the step that comes next, or None where the text does not fit.

    def _key(self) -> Wait[Step | None]:
        word, mark = yield from self._word(AFTER_KEY)
        if not mark:
            if word:
                self._write(quoted(word)[:-1])
            return None
        if mark == "}" and not word:
            return self._leave()
        if mark == QUOTE and not word:
            self._source.take(len(QUOTE))
            word, _ = yield from self._source.text_until(IN_STRING)
            if not (yield from self._source.literal(QUOTE)):
                return None
            yield from self._source.space()
        elif not word:
            return None
        if not (yield from self._source.literal(":")):
            return None
        self._write(quoted(word) + ": ", then="")
        return self._value

    def _value(self) -> Wait[Step | None]:
        word, mark = yield from self._word(AFTER_VALUE)
        if not mark:
            if word:
                self._write(word)
            return None
        if word or (mark == "," if self._open[-1] == "]" else mark in ENDS):
            known = word if NUMBER.fullmatch(word) else CONSTANTS.get(word)
            self._write(known or quoted(word))
            return self._more
        if mark in ENDS:
            return self._leave() if mark == "]" else None
        if mark == QUOTE:
            return (yield from self._string())
        self._source.take(1)
        return self._enter(mark)

    def _string(self) -> Wait[Step | None]:
        source = self._source
        source.take(len(QUOTE))
        self._write('"')
        mark = yield from source.until(IN_STRING, lambda piece: self._out.arguments(quoted(piece)[1:-1]))
        source.skip(len(QUOTE) if mark == QUOTE else 0)
        if not mark:
            return None
        self._out.arguments('"')
        return self._more

    def _more(self) -> Wait[Step | None]:
        word, mark = yield from self._word(AFTER_VALUE)
        if word:
            return None
        if mark == ",":
            self._source.skip(1)
            return self._key if self._open[-1] == "}" else self._value
        return self._leave() if mark == self._open[-1] else None

    def _word(self, marks: Tags) -> Wait[tuple[str, str]]:
        """Bare text, and the mark after it, which is not read."""
        word, mark = yield from self._source.text_until(marks)
        return word.strip(), mark

    def _write(self, text: str, then: str = ", ") -> None:
        """A key, a value or the beginning of one; drops what was read for it."""
        self._source.drop()
        self._out.arguments(self._comma + text)
        self._comma = then

    def _enter(self, bracket: str) -> Step:
        self._write(bracket, then="")
        self._open.append("}" if bracket == "{" else "]")
        return self._key if bracket == "{" else self._value

    def _leave(self) -> Step:
        self._source.skip(1)
        self._out.arguments(self._open.pop())
        self._comma = ", "
        return self._more


class Gemma4Grammar(ToolGrammar):
    def arguments(self) -> str:
        return self._object(self.root)

    def expression(self, schema: Schema) -> str:
        if choice := self.choice(schema):
            return choice
        if alike := options(schema):
            self.check(schema, "anyOf", "oneOf")
            return alternatives([self.value(option) for option in alike])
        return alternatives([self._of_type(name, schema) for name in self.types(schema)])

    def _of_type(self, name: str, schema: Schema) -> str:
        rules = self.rules
        if name == "string":
            return f"{rules.tag(QUOTE)} {self.text_before(QUOTE, schema, [CLOSES])}"
        if name == "array":
            return self._array(schema)
        if name == "object":
            return self._object(schema)
        return rules.json({"type": name, **{word: schema[word] for word in NUMBERS if word in schema}})

    def _array(self, schema: Schema) -> str:
        rules, items = self.rules, ""
        low, high = self.get(schema, "minItems", int, 0), self.get(schema, "maxItems", int, -1)
        if high != 0:
            item = self.value(schema.get("items", True))
            times = f"{{{max(low - 1, 0)},{high - 1 if high > 0 else ''}}}"
            more = f"({rules.text(',')} {item}){times}" if high != 1 else ""
            items = f"({item} {more}){'?' if low <= 0 else ''}"
        return f"{rules.text('[')} {items} {rules.text(']')}"

    def _object(self, schema: Schema) -> str:
        rules = self.rules
        if members := self.members(schema):
            body = self._members(members)
        elif schema.get("additionalProperties") is False:
            body = ""
        else:
            key = rules.terminal(r"/[A-Za-z_][A-Za-z0-9_.\-]*/")
            value = self.value(schema.get("additionalProperties", True))
            member = rules.rule(f"{key} {rules.text(':')} {value}")
            body = f"({member} ({rules.text(',')} {member})*)?"
        return f"{rules.text('{')} {body} {rules.text('}')}"

    def _members(self, members: list[tuple[str, Any, bool]]) -> str:
        """With commas between. `first`: what may come before any member, `rest`: after one."""
        rules = self.rules
        first = rest = ""
        # In the order that the model was trained on: its template sorts them.
        for key, schema, required in sorted(members, key=lambda member: member[0].lower(), reverse=True):
            member = rules.rule(f"{self._key(key)} {rules.text(':')} {self.value(schema)}")
            following = f"{rules.text(',')} {member}"
            first = (
                f"{member} {rest}" if required else f"({member} {rest} | {first})" if first else f"({member} {rest})?"
            )
            rest = rules.rule(f"{following if required else f'({following})?'} {rest}")
            first = rules.rule(first)
        return first

    def _key(self, key: str) -> str:
        return self.rules.text(key) if BARE_KEY.fullmatch(key) else self.literal(key)

    def literal(self, value: Any) -> str:
        rules, comma = self.rules, f" {self.rules.text(',')} "
        if isinstance(value, str):
            if QUOTE in value or CLOSES in value:
                raise self.refuse(f"has {value!r}, which cannot be written in this model's notation of calls")
            return f"{rules.tag(QUOTE)} {rules.text(value)} {rules.tag(QUOTE)}"
        if isinstance(value, list):
            return f"({rules.text('[')} {comma.join(map(self.literal, value))} {rules.text(']')})"
        if isinstance(value, dict):
            pairs = [f"{self._key(key)} {rules.text(':')} {self.literal(item)}" for key, item in value.items()]
            return f"({rules.text('{')} {comma.join(pairs)} {rules.text('}')})"
        return rules.text(json.dumps(value, allow_nan=False))
