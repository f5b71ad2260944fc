"""Calls with a name and JSON, each between two tags, all of them in a section:

    DeepSeek-V3, R1     <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather
                        ```json
                        {"city": "Rome"}
                        ```<｜tool▁call▁end｜><｜tool▁calls▁end｜>
    DeepSeek-V3.1       <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{"city": "Rome"}
                        <｜tool▁call▁end｜><｜tool▁calls▁end｜>
    Kimi-K2             <|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0
                        <|tool_call_argument_begin|>{"city": "Rome"}<|tool_call_end|><|tool_calls_section_end|>

A call without a section is read too.
"""

import re
from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from anabranch.server.parsers.call_grammar import Rules, alternatives, arguments_schema
from anabranch.server.parsers.json_calls import JsonCalls
from anabranch.server.parsers.parts import ToolSpec
from anabranch.server.parsers.reader import Notation, Output
from anabranch.server.parsers.source import Source, Tags, Wait

WORD = re.compile(r"[^\s<{`]+")


class SectionNotation(Notation):
    OPENS: ClassVar[str]
    CLOSES: ClassVar[str]
    """Of the section."""
    CALL: ClassVar[str]
    ARGUMENTS: ClassVar[str]
    CALL_ENDS: ClassVar[str]
    between = ""
    """Written between calls."""

    def __init__(self) -> None:
        self.calls = JsonCalls(self.CALL_ENDS)
        self._after_call = Tags(self.CALL, self.CALL_ENDS, self.CLOSES)
        self._next_call = Tags(self.CALL, self.CLOSES)

    @abstractmethod
    def read_call(self, source: Source, out: Output, word: str) -> Wait[bool]:
        """A call, after its first word and the tag that follows it. False: it is none."""

    @abstractmethod
    def call_grammar(self, rules: Rules, tool: ToolSpec) -> str:
        """The expression of a call of this tool, without the tags around it."""

    def read(self, source: Source, out: Output) -> Wait[None]:
        in_section = yield from source.literal(self.OPENS)
        while (yield from source.spaced(self.CALL)):
            yield from source.space()
            word = yield from source.run(WORD)
            if not word or not (yield from source.spaced(self.ARGUMENTS)):
                return
            yield from source.space()
            if not (yield from self.read_call(source, out, word)):
                return
            tag = yield from self._read_rest(source, out, self._after_call)
            if tag == self.CALL_ENDS and in_section:
                tag = yield from self._read_rest(source, out, self._next_call)
            if tag != self.CALL:
                return

    def _read_rest(self, source: Source, out: Output, tags: Tags) -> Wait[str]:
        """What a model wrote before one of the tags is text. A tag that ends something is read."""
        source.settle(out.content)
        tag = yield from source.until(tags, lambda piece: source.settle(out.content))
        if tag and tag != self.CALL:
            source.skip(len(tag))
        return tag

    def grammar(self, rules: Rules, tools: Sequence[ToolSpec], many: bool) -> str:
        calls = alternatives([self.call_grammar(rules, tool) for tool in tools])
        call = rules.rule(f"{rules.tag(self.CALL)} {calls} {rules.tag(self.CALL_ENDS)}")
        between = rules.text(self.between) if self.between else ""
        more = f"({between} {call})*" if many else ""
        return f"{rules.tag(self.OPENS)} {call} {more} {rules.tag(self.CLOSES)}"


class DeepSeek(SectionNotation):
    """Both notations are read; the template decides which one a grammar writes."""

    OPENS, CLOSES = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
    CALL, ARGUMENTS, CALL_ENDS = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
    TYPE, FENCE, FENCE_ENDS = "function", "```json", "```"
    opens = (OPENS, CALL)
    tags = (OPENS, CLOSES, CALL, ARGUMENTS, CALL_ENDS)

    def __init__(self, template: str) -> None:
        super().__init__()
        self._fenced = self.FENCE in template
        self.between = "\n" if self._fenced else ""

    def read_call(self, source: Source, out: Output, word: str) -> Wait[bool]:
        if (yield from source.peek()) == "{":
            return (yield from self.calls.arguments(source, out, word))
        name = (yield from source.run(WORD)) if word == self.TYPE else ""
        fenced = yield from source.spaced(self.FENCE)
        yield from source.space()
        if not name or not (yield from self.calls.arguments(source, out, name)):
            return False
        if fenced and (yield from source.spaced(self.FENCE_ENDS)):
            source.drop()
        return True

    def call_grammar(self, rules: Rules, tool: ToolSpec) -> str:
        arguments = rules.json(arguments_schema(tool))
        if not self._fenced:
            return f"{rules.text(tool.name)} {rules.tag(self.ARGUMENTS)} {arguments}"
        name, ends = rules.text(f"{tool.name}\n{self.FENCE}\n"), rules.text(f"\n{self.FENCE_ENDS}")
        return f"{rules.text(self.TYPE)} {rules.tag(self.ARGUMENTS)} {name} {arguments} {ends}"


class KimiK2(SectionNotation):
    """A call begins with its id, which holds the name and counts the calls of a chat. Clients get the same id: some
    templates write it as it comes back."""

    OPENS, CLOSES = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
    CALL, ARGUMENTS, CALL_ENDS = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
    ID = re.compile(r"(?:functions\.)?(.+?)(?::\d+)?")
    opens = (OPENS, CALL)
    tags = (OPENS, CLOSES, CALL, ARGUMENTS, CALL_ENDS)

    def read_call(self, source: Source, out: Output, word: str) -> Wait[bool]:
        match = self.ID.fullmatch(word)
        assert match is not None
        return (yield from self.calls.arguments(source, out, match[1], id=word))

    def call_grammar(self, rules: Rules, tool: ToolSpec) -> str:
        id = f"{rules.text(f'functions.{tool.name}:')} /[0-9]{{1,3}}/"
        return f"{id} {rules.tag(self.ARGUMENTS)} {rules.json(arguments_schema(tool))}"
