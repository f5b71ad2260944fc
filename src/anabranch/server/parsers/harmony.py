"""Harmony, the notation of gpt-oss: an answer is a row of messages, each with a header that says what it is.

    <|channel|>analysis<|message|>The user wants ...<|end|><|start|>assistant<|channel|>commentary to=functions.weather
    <|constrain|>json<|message|>{"city": "Rome"}<|call|>

(one line). Messages of the channel `analysis` are thoughts, those with a recipient are calls, others are content. A
recipient may stand before the channel too. `<|call|>` and `<|return|>` end an answer. Text without a header, or with
one that is not understood, is content as it was written. An empty line separates two messages that are content.

A model can spell a tag by other tokens, in a text about tags or in one that it quotes: then it is text. So where tags
are tokens, a character stands before them in the text to be read, `mark`, which differs from process to process.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

from anabranch.server.parsers.call_grammar import Rules, alternatives, arguments_schema
from anabranch.server.parsers.parts import Part, ToolCallBegin, ToolSpec
from anabranch.server.parsers.reader import Notation, Output, Reader, Thinking
from anabranch.server.parsers.source import Source, Tags, Wait

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
ROLE, NAMESPACE = "assistant", "functions."


class Marked:
    """The tags where `mark` stands before each of them."""

    def __init__(self, mark: str) -> None:
        start, channel, constrain = (re.escape(mark + tag) for tag in (START, CHANNEL, CONSTRAIN))
        name = rf"[^\s<{mark}]+"
        self.start, self.message, self.ends = mark + START, mark + MESSAGE, tuple(mark + end for end in ENDS)
        self.after_header = Tags(self.message, self.start, *self.ends)
        self.after_body = Tags(self.start, *self.ends)
        self.before_header = Tags(self.start, mark + CHANNEL, *self.ends)
        # White space is matched once (`*+`): otherwise the cost is the fourth power of the number of blanks.
        self.header = re.compile(
            rf"({start})?\s*+({ROLE})?\s*+(to=(?P<to>{name}))?\s*+"
            rf"({channel}\s*+(?P<channel>analysis|commentary|final)\s*+(to=(?P<then>{name}))?\s*+"
            rf"(({constrain}\s*+|(?<=\s))[\w/.+-]+)?)?\s*+"
        )


marked = cache(Marked)


class Harmony(Notation):
    opens = (CHANNEL,)
    tags = (START, CHANNEL, MESSAGE, CONSTRAIN, *ENDS)

    def read(self, source: Source, out: Output) -> Wait[None]:
        raise NotImplementedError("HarmonyReader reads messages, calls among them")
        yield

    def grammar(self, rules: Rules, tools: Sequence[ToolSpec], many: bool) -> str:
        """One call: it ends the answer."""
        calls = [f"{rules.text(tool.name + ' ')} {self._arguments(rules, tool)}" for tool in tools]
        return f"{rules.tag(CHANNEL)} {rules.text(f'commentary to={NAMESPACE}')} {alternatives(calls)}"

    def _arguments(self, rules: Rules, tool: ToolSpec) -> str:
        return f"{rules.tag(CONSTRAIN)} {rules.text('json')} {rules.tag(MESSAGE)} {rules.json(arguments_schema(tool))}"


@dataclass(frozen=True, slots=True)
class Analysis(Thinking):
    """Thoughts of Harmony."""

    def is_open(self, prompt: str, continued: str = "") -> bool:
        header = _open_header(_last_message(prompt, continued))
        return header is not None and header["channel"] == "analysis"

    def is_over(self, prompt: str, continued: str = "") -> bool:
        """The prompt has begun the text of an answer."""
        header = _open_header(_last_message(prompt, continued))
        return header is not None and header["channel"] != "analysis"

    def grammar(self, rules: Rules, prompt: str, continued: str = "") -> str:
        next_header = f"{rules.tag(START)} {rules.text(ROLE)}"
        if self.is_over(prompt, continued):  # the message ends, so that another can come
            return f"{rules.tag(ENDS[0])} {next_header}"
        thought = f"{rules.text_before(self.closes)} {next_header}"
        if self.is_open(prompt, continued):
            return thought
        return f"({rules.tag(CHANNEL)} {rules.text('analysis')} {rules.tag(MESSAGE)} {thought})?"

    def answer_grammar(self, rules: Rules, prompt: str, continued: str = "") -> str:
        if self.is_over(prompt, continued):
            return ""
        thought = self.grammar(rules, prompt, continued)
        return f"{thought} {rules.tag(CHANNEL)} {rules.text('final')} {rules.tag(MESSAGE)}"


def _last_message(prompt: str, continued: str) -> str:
    """What the template wrote after the last <|start|>. In `continued`, the text that a client has begun, tags are
    text; templates may trim its beginning."""
    return prompt.removesuffix(continued.lstrip()).rpartition(START)[2]


def _open_header(message: str) -> re.Match[str] | None:
    """The header of a message whose body has begun and not ended."""
    header, opened, body = message.partition(MESSAGE)
    return marked("").header.fullmatch(header) if opened and not any(end in body for end in ENDS) else None


def _recipient(match: re.Match[str]) -> str:
    """The tool of a call; empty if there is none, or two."""
    first, second = match["to"], match["then"]
    return "" if first and second and first != second else (first or second or "").removeprefix(NAMESPACE)


ANALYSIS = Analysis(CHANNEL, ENDS[0], label=f"analysis{MESSAGE}")


class HarmonyReader(Reader):
    def __init__(
        self,
        out: Output,
        calls: bool,
        reasoning: bool,
        prompt: str,
        parallel: bool,
        continued: str = "",
        mark: str = "",
    ) -> None:
        """`calls`, `reasoning`: give calls and thoughts; otherwise they stay in the content, with their tags.
        `prompt`: it may have begun a message, with the text `continued`; no mark stands before its tags."""
        super().__init__(None, ANALYSIS, out, False, parallel)
        self._mark, self._tags = mark, marked(mark)
        self._gives_calls, self._gives_reasoning = calls, reasoning
        self._gap = ""
        """What comes before the next message that is content."""
        self._has_content = bool(continued)
        """Of messages that are content."""
        begun = _last_message(prompt, continued)
        self._parser = self._messages(begun == ROLE, _open_header(begun))

    def feed(self, text: str, final: bool = False) -> list[Part]:
        parts = super().feed(text, final)
        if self._mark:  # before tags that are given as text
            parts = [
                part if isinstance(part, ToolCallBegin) else replace(part, text=part.text.replace(self._mark, ""))
                for part in parts
            ]
        return [part for part in parts if isinstance(part, ToolCallBegin) or part.text]

    def _messages(self, in_header: bool, header: re.Match[str] | None) -> Wait[None]:
        source, out = self._source, self._out
        if header:
            yield from self._body(header)
        while (yield from source.peek()):
            if in_header and (yield from source.literal(" to=")):
                yield from self._message()
            in_header = False
            tag = yield from source.until(self._tags.before_header, lambda piece: out.content(source.release()))
            if tag in self._tags.ends:
                source.skip(len(tag))
            elif tag:
                yield from self._message()

    def _message(self) -> Wait[None]:
        """At a header, of which a part may be held."""
        source, out = self._source, self._out
        yield from source.literal(self._tags.start)
        tag = yield from source.until(self._tags.after_header)
        text = source.release()
        match = self._tags.header.fullmatch(text) if tag == self._tags.message else None
        if match is None or not self._is_given(match):
            out.content(text)
            if tag == self._tags.message:
                out.content(source.take(len(tag)))
                source.drop()
                yield from source.until(self._tags.after_body, lambda piece: out.content(source.release()))
            return
        source.skip(len(tag))
        yield from self._body(match)

    def _is_given(self, match: re.Match[str]) -> bool:
        if match["to"] or match["then"]:
            return self._gives_calls and bool(_recipient(match))
        return self._gives_reasoning or match["channel"] != "analysis"

    def _body(self, match: re.Match[str]) -> Wait[None]:
        source, out = self._source, self._out
        recipient = _recipient(match)
        emit = out.reasoning if match["channel"] == "analysis" and self._gives_reasoning else self._content
        if recipient and self._gives_calls:
            out.begin(recipient)
            emit = out.arguments
        yield from source.until(self._tags.after_body, lambda piece: emit(source.release()))
        self._gap = "\n\n" if self._has_content else ""

    def _content(self, text: str) -> None:
        self._out.content(self._gap + text)
        self._gap, self._has_content = "", True
