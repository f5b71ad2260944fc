"""Calls as Hermes began to write them and Qwen does:

<tool_call>
{"name": "weather", "arguments": {"city": "Rome"}}
</tool_call>
"""

from __future__ import annotations

from collections.abc import Sequence

from anabranch.server.parsers.json_calls import JsonCalls, object_grammar
from anabranch.server.parsers.lark import Rules, alternatives
from anabranch.server.parsers.parts import ToolSpec
from anabranch.server.parsers.reader import Output, read_rest
from anabranch.server.parsers.source import Source, Tags, Wait

OPENS, CLOSES = "<tool_call>", "</tool_call>"
AFTER = Tags(OPENS, CLOSES)


class Hermes:
    opens = (OPENS,)
    tags = (OPENS, CLOSES)
    tagged = True

    def __init__(self) -> None:
        self._calls = JsonCalls(CLOSES)

    def read(self, source: Source, out: Output) -> Wait[None]:
        source.take(len(OPENS))
        if (yield from self._calls.read(source, out)):
            yield from read_rest(source, out, AFTER, CLOSES)

    def grammar(self, rules: Rules, tools: Sequence[ToolSpec], many: bool) -> str:
        calls = alternatives([object_grammar(rules, tool) for tool in tools])
        newline = rules.text("\n")
        call = rules.rule(f"{rules.tag(OPENS)} {newline} {calls} {newline} {rules.tag(CLOSES)}")
        return f"{call} ({newline} {call})*" if many else call
