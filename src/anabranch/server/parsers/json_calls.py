"""Calls written as JSON objects, {"name": ..., "arguments": {...}}, and the three notations that put tags around them:

    Hermes (Qwen too)   <tool_call>
                        {"name": "weather", "arguments": {"city": "Rome"}}
                        </tool_call>
    Mistral             [TOOL_CALLS][{"name": "weather", "arguments": {"city": "Rome"}, "id": "a1B2c3D4e"}]
                        [TOOL_CALLS]weather[CALL_ID]a1B2c3D4e[ARGS]{"city": "Rome"}
                        [TOOL_CALLS]weather[ARGS]{"city": "Rome"}
    plain (Llama 3)     {"name": "weather", "parameters": {"city": "Rome"}}

Objects are read by their brackets and strings; the client has to check whether the rest is JSON. So arguments are
passed on as they come, character by character.
"""

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from anabranch.server.parsers.call_grammar import Rules, alternatives, arguments_schema
from anabranch.server.parsers.parts import ToolSpec
from anabranch.server.parsers.reader import EnclosedNotation, Notation, Output
from anabranch.server.parsers.source import Source, Tags, Wait

ARGUMENTS = ("arguments", "parameters")
KEYS = ("name", *ARGUMENTS, "id", "type")
"""Keys of an object that may be a call without a tag around it."""

Put = Callable[[str], object]

IN_STRING = Tags('"', "\\")
IN_VALUE = ('"', "{", "}", "[", "]")
SCALAR = re.compile(r"true|false|null|-?\d+(\.\d+)?([eE][+-]?\d+)?", re.ASCII)
AFTER_SCALAR = (",", "}", "]", '"', " ", "\t", "\n", "\r")


class JsonCalls:
    """Reads objects; `closes` is a tag that ends them, whatever is still open."""

    def __init__(self, closes: str = "", offered_only: bool = False) -> None:
        """`offered_only`: an object is a call only if its tool was offered and it has arguments."""
        self._in_value = Tags(*IN_VALUE, closes)
        self._after_scalar = Tags(*AFTER_SCALAR, closes)
        self._offered_only = offered_only

    def read(self, source: Source, out: Output) -> Wait[int]:
        """Objects one after the other, or in a list; how many."""
        yield from source.space()
        listed = yield from source.literal("[")
        if listed:
            yield from source.space()
        num_before = out.num_calls
        while (yield from self._object(source, out)):
            yield from source.space()
            if (yield from source.literal(",")) or (yield from source.literal(";")):
                yield from source.space()
        num_read = out.num_calls - num_before
        if num_read and listed and source.is_blank and (yield from source.literal("]")):
            source.drop()
        return num_read

    def arguments(self, source: Source, out: Output, name: str, id: str = "") -> Wait[bool]:
        """Begin the call if an object comes next, or the text of one in a JSON string; null is an object without
        members. Then everything read before is dropped."""
        if (yield from source.peek()) == "{":
            source.drop()
            out.begin(name, id)
            yield from self._nested(source, lambda piece: out.arguments(source.release()))
            return True
        text = "{}" if (yield from source.literal("null")) else (yield from read_string(source))
        if text is None or not text.lstrip().startswith("{"):
            return False
        source.drop()
        out.begin(name, id)
        out.arguments(text)
        return True

    def _object(self, source: Source, out: Output) -> Wait[bool]:
        """One object. True: a complete call. Without a tag around it an object that is not a call is text to its end:
        objects inside of it are not calls either."""
        if not (yield from source.literal("{")):
            return False
        yield from source.space()
        is_json = (yield from source.peek()) == '"'
        num_before = out.num_calls
        closed = yield from self._members(source, out)
        called = out.num_calls > num_before
        if self._offered_only and is_json and not closed and not called:
            yield from self._nested(source, lambda piece: out.content(source.release()), depth=1)
        return called and closed

    def _members(self, source: Source, out: Output) -> Wait[bool]:
        """True: up to the closing bracket."""
        name, early = "", list[str]()
        begun = False
        while True:
            yield from source.space()
            key = yield from read_string(source)
            if key is None:
                break
            if self._offered_only and not begun and key not in KEYS:
                return False
            yield from source.space()
            if not (yield from source.literal(":")):
                return False
            yield from source.space()
            if key == "name" and not name:
                name = (yield from read_string(source)) or ""
                if not name or (self._offered_only and name not in out.tools):
                    return False
            elif key in ARGUMENTS and name and not begun:
                begun = yield from self.arguments(source, out, name)
                if not begun:
                    return False
            else:
                pieces = early if key in ARGUMENTS and not early else []
                if not (yield from self._value(source, pieces.append)):
                    return False
            yield from source.space()
            if not (yield from source.literal(",")):
                break
        if not (yield from source.literal("}")):
            return False
        if not begun:
            text = "".join(early)
            if not name or (self._offered_only and not early) or not (text in ("", "null") or text[0] == "{"):
                return True
            out.begin(name)
            out.arguments(text if text.startswith("{") else "{}")
        source.drop()
        return True

    def _value(self, source: Source, put: Put) -> Wait[bool]:
        """Any value, passed to `put` piece by piece; False if it has no end, or is not a value."""
        if (yield from source.peek()) in ('"', "{", "["):
            return (yield from self._nested(source, put))
        scalar, _ = yield from source.text_until(self._after_scalar)
        put(scalar)
        return SCALAR.fullmatch(scalar) is not None

    def _nested(self, source: Source, put: Put, depth: int = 0) -> Wait[bool]:
        """A string, or up to the bracket that closes the first one, or the one that was opened before."""
        while (tag := (yield from source.until(self._in_value, put))) in IN_VALUE:  # not the closing tag, nor the end
            if tag != '"':
                put(source.take(1))
                depth += 1 if tag in "{[" else -1
            elif not (yield from _string(source, put)):
                return False
            if depth == 0:
                return True
        return False


def read_string(source: Source) -> Wait[str | None]:
    """The next string; None if something else comes next or it is broken."""
    if (yield from source.peek()) != '"':
        return None
    pieces: list[str] = []
    if not (yield from _string(source, pieces.append)):
        return None
    try:
        text: str = json.loads("".join(pieces), strict=False)
    except ValueError:
        return None
    return text


def _string(source: Source, put: Put) -> Wait[bool]:
    """At a quote: up to the closing one."""
    put(source.take(1))
    while tag := (yield from source.until(IN_STRING, put)):
        put(source.take(1))
        if tag == '"':
            return True
        if (yield from source.peek()):
            put(source.take(1))
    return False


def strict_json(text: str) -> Any:
    """ValueError for NaN and Infinity too, which are not JSON; RecursionError is left to the caller."""

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def object_grammar(rules: Rules, tool: ToolSpec, arguments: str = "arguments") -> str:
    head = f'{{"name": {json.dumps(tool.name)}, "{arguments}": '
    return f"{rules.text(head)} {rules.json(arguments_schema(tool))} {rules.text('}')}"


class Hermes(EnclosedNotation):
    OPENS, CLOSES, SPACE = "<tool_call>", "</tool_call>", "\n"
    opens = (OPENS,)
    tags = (OPENS, CLOSES)
    calls = JsonCalls(CLOSES)

    def read(self, source: Source, out: Output) -> Wait[None]:
        source.take(len(self.OPENS))
        if (yield from self.calls.read(source, out)):
            yield from self.read_rest(source, out)

    def call_grammar(self, rules: Rules, tool: ToolSpec) -> str:
        return object_grammar(rules, tool)


class Mistral(Notation):
    """Three notations, by generation of models. All are read; the template decides which one a grammar writes. Ids that
    a model made up are not used: they may not be unique."""

    OPENS, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
    WORD = re.compile(r"[\w.:-]+")
    opens = (OPENS,)
    tags = (OPENS, CALL_ID, ARGS)

    def __init__(self, template: str) -> None:
        self._calls = JsonCalls()
        self._by_name = self.ARGS in template
        self._with_id = self.CALL_ID in template

    def read(self, source: Source, out: Output) -> Wait[None]:
        source.take(len(self.OPENS))
        yield from source.space()
        if (yield from source.peek()) in ("[", "{"):
            yield from self._calls.read(source, out)
            return
        name = yield from source.run(self.WORD)
        if (yield from source.literal(self.CALL_ID)):
            yield from source.run(self.WORD)
        yield from source.literal(self.ARGS)  # the first models with the name in front did not write it
        yield from source.space()
        if name:
            yield from self._calls.arguments(source, out, name)

    def grammar(self, rules: Rules, tools: Sequence[ToolSpec], many: bool) -> str:
        opens = rules.tag(self.OPENS)
        if not self._by_name:
            call = rules.rule(alternatives([object_grammar(rules, tool) for tool in tools]))
            more = f"({rules.text(', ')} {call})*" if many else ""
            return f"{opens} {rules.text('[')} {call} {more} {rules.text(']')}"
        id = f"{rules.tag(self.CALL_ID)} /[a-zA-Z0-9]{{9}}/" if self._with_id else ""
        between = f"{id} {rules.tag(self.ARGS)}"
        calls = [f"{rules.text(tool.name)} {between} {rules.json(arguments_schema(tool))}" for tool in tools]
        return f"({opens} {alternatives(calls)}){'+' if many else ''}"


class PlainJson(Notation):
    """Without any tag an object is a call if it has the name of a tool that was offered, and arguments; anywhere in the
    text, alone or in a list. Also the notation of models whose template does not mention calls."""

    PYTHON_TAG = "<|python_tag|>"
    opens = ("{", "[", PYTHON_TAG)
    tags = (PYTHON_TAG,)
    tagged = False

    def __init__(self, template: str) -> None:
        self._calls = JsonCalls(offered_only=True)
        has_parameters = '"parameters":' in template and '"arguments":' not in template
        self._arguments = "parameters" if has_parameters else "arguments"

    def read(self, source: Source, out: Output) -> Wait[None]:
        if (yield from source.peek()) == self.PYTHON_TAG[0]:
            source.take(len(self.PYTHON_TAG))
        yield from self._calls.read(source, out)

    def grammar(self, rules: Rules, tools: Sequence[ToolSpec], many: bool) -> str:
        # One call even where many are allowed: no template defines a separator.
        return alternatives([object_grammar(rules, tool, self._arguments) for tool in tools])
