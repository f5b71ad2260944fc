"""Calls without any tag, as Llama 3 writes them: {"name": "weather", "parameters": {"city": "Rome"}}

Such an object is a call if it has the name of a tool that was offered, and arguments; anywhere in the text, alone or in
a list. This is also the notation for models whose template says nothing of calls.
"""

from __future__ import annotations

from collections.abc import Sequence

from anabranch.server.parsers.json_calls import JsonCalls, object_grammar
from anabranch.server.parsers.lark import Rules, alternatives
from anabranch.server.parsers.parts import ToolSpec
from anabranch.server.parsers.reader import Output
from anabranch.server.parsers.source import Source, Wait

PYTHON_TAG = "<|python_tag|>"


class PlainJson:
    opens = ("{", "[", PYTHON_TAG)
    tags = (PYTHON_TAG,)
    tagged = False

    def __init__(self, template: str) -> None:
        self._calls = JsonCalls(offered_only=True)
        self._arguments = (
            "parameters" if '"parameters":' in template and '"arguments":' not in template else "arguments"
        )

    def read(self, source: Source, out: Output) -> Wait[None]:
        if (yield from source.peek()) == PYTHON_TAG[0]:
            source.take(len(PYTHON_TAG))
        yield from self._calls.read(source, out)

    def grammar(self, rules: Rules, tools: Sequence[ToolSpec], many: bool) -> str:
        # One call even where many are allowed: no template says what would stand between them.
        return alternatives([object_grammar(rules, tool, self._arguments) for tool in tools])
