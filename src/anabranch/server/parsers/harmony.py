"""Harmony, the notation of gpt-oss: an answer is a row of messages, each with a header that says what it is.

    <|channel|>analysis<|message|>The user wants ...<|end|><|start|>assistant<|channel|>commentary to=functions.weather
    <|constrain|>json<|message|>{"city": "Rome"}<|call|>

(one line). Messages of the channel `analysis` are thoughts, those with a recipient are calls, others are content. A
recipient may stand before the channel too. `<|call|>` and `<|return|>` end an answer. Text without a header, or with
one that is not understood, is content as it was written. An empty line separates two messages that are content.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from anabranch.server.parsers.call_grammar import Rules, alternatives, arguments_schema
from anabranch.server.parsers.parts import ToolSpec
from anabranch.server.parsers.reader import Notation, Output, Reader, Thinking
from anabranch.server.parsers.source import Source, Tags, Wait

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
ROLE, NAMESPACE = "assistant", "functions."
AFTER_HEADER = Tags(MESSAGE, START, *ENDS)
AFTER_BODY = Tags(START, *ENDS)
BEFORE_HEADER = Tags(START, CHANNEL, *ENDS)
HEADER = re.compile(
    rf"({re.escape(START)})?\s*+({ROLE})?\s*+(to=(?P<to>[^\s<]+))?\s*+"
    rf"({re.escape(CHANNEL)}\s*+(?P<channel>analysis|commentary|final)\s*+(to=(?P<then>[^\s<]+))?\s*+"
    rf"(({re.escape(CONSTRAIN)}\s*+|(?<=\s))\w+)?)?\s*+"
)
"""White space is matched once (`*+`): otherwise the cost is the fourth power of the number of blanks."""


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
    return HEADER.fullmatch(header) if opened and not any(end in body for end in ENDS) else None


ANALYSIS = Analysis(CHANNEL, ENDS[0], label=f"analysis{MESSAGE}")


class HarmonyReader(Reader):
    def __init__(
        self, out: Output, calls: bool, reasoning: bool, prompt: str, parallel: bool, continued: str = ""
    ) -> None:
        """`calls`, `reasoning`: give calls and thoughts; otherwise they stay in the content, with their tags.
        `prompt`: it may have begun a message, with the text `continued`."""
        super().__init__(None, ANALYSIS, out, False, parallel)
        self._gives_calls, self._gives_reasoning = calls, reasoning
        self._gap = ""
        """What comes before the next message that is content."""
        self._has_content = bool(continued)
        """Of messages that are content."""
        begun = _last_message(prompt, continued)
        self._parser = self._messages(begun == ROLE, _open_header(begun))

    def _messages(self, in_header: bool, header: re.Match[str] | None) -> Wait[None]:
        source, out = self._source, self._out
        if header:
            yield from self._body(header)
        while (yield from source.peek()):
            if in_header and (yield from source.literal(" to=")):
                yield from self._message()
            in_header = False
            tag = yield from source.until(BEFORE_HEADER, lambda piece: out.content(source.release()))
            if tag in ENDS:
                source.skip(len(tag))
            elif tag:
                yield from self._message()

    def _message(self) -> Wait[None]:
        """At a header, of which a part may be held."""
        source, out = self._source, self._out
        yield from source.literal(START)
        tag = yield from source.until(AFTER_HEADER)
        text = source.release()
        match = HEADER.fullmatch(text) if tag == MESSAGE else None
        if match is None or not self._is_given(match):
            out.content(text)
            if tag == MESSAGE:
                out.content(source.take(len(tag)))
                source.drop()
                yield from source.until(AFTER_BODY, lambda piece: out.content(source.release()))
            return
        source.skip(len(tag))
        yield from self._body(match)

    def _is_given(self, match: re.Match[str]) -> bool:
        if match["to"] or match["then"]:
            return self._gives_calls
        return self._gives_reasoning or match["channel"] != "analysis"

    def _body(self, match: re.Match[str]) -> Wait[None]:
        source, out = self._source, self._out
        recipient = match["to"] or match["then"]
        emit = out.reasoning if match["channel"] == "analysis" and self._gives_reasoning else self._content
        if recipient and self._gives_calls:
            out.begin(recipient.removeprefix(NAMESPACE))
            emit = out.arguments
        yield from source.until(AFTER_BODY, lambda piece: emit(source.release()))
        self._gap = "\n\n" if self._has_content else ""

    def _content(self, text: str) -> None:
        self._out.content(self._gap + text)
        self._gap, self._has_content = "", True
