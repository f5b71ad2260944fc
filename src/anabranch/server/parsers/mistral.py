"""Calls as Mistral's models write them, by generation:

    [TOOL_CALLS][{"name": "weather", "arguments": {"city": "Rome"}, "id": "a1B2c3D4e"}]
    [TOOL_CALLS]weather[CALL_ID]a1B2c3D4e[ARGS]{"city": "Rome"}
    [TOOL_CALLS]weather[ARGS]{"city": "Rome"}

All are read; the template tells which is to be written. Ids that a model made up are not used: nobody knows whether
they are unique.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from anabranch.server.parsers.json_calls import JsonCalls, object_grammar
from anabranch.server.parsers.lark import Rules, alternatives
from anabranch.server.parsers.parts import ToolSpec
from anabranch.server.parsers.reader import Output
from anabranch.server.parsers.source import Source, Wait

OPENS, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
WORD = re.compile(r"[\w.:-]+")


class Mistral:
    opens = (OPENS,)
    tags = (OPENS, CALL_ID, ARGS)
    tagged = True

    def __init__(self, template: str) -> None:
        self._calls = JsonCalls()
        self._by_name = ARGS in template
        self._with_id = CALL_ID in template

    def read(self, source: Source, out: Output) -> Wait[None]:
        source.take(len(OPENS))
        yield from source.space()
        if (yield from source.peek()) in ("[", "{"):
            yield from self._calls.read(source, out)
            return
        name = yield from source.run(WORD)
        if (yield from source.literal(CALL_ID)):
            yield from source.run(WORD)
        yield from source.literal(ARGS)  # the first models that put the name in front did without
        yield from source.space()
        if name:
            yield from self._calls.arguments(source, out, name)

    def grammar(self, rules: Rules, tools: Sequence[ToolSpec], many: bool) -> str:
        if not self._by_name:
            call = rules.rule(alternatives([object_grammar(rules, tool) for tool in tools]))
            more = f"({rules.text(', ')} {call})*" if many else ""
            return f"{rules.tag(OPENS)} {rules.text('[')} {call} {more} {rules.text(']')}"
        id = f"{rules.tag(CALL_ID)} /[a-zA-Z0-9]{{9}}/" if self._with_id else ""
        calls = [f"{rules.text(tool.name)} {id} {rules.tag(ARGS)} {rules.arguments(tool)}" for tool in tools]
        return f"({rules.tag(OPENS)} {alternatives(calls)}){'+' if many else ''}"
