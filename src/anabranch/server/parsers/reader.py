"""One completion, read while it is written: thoughts, text and calls. How a call is written is up to the notations.

A call inside of a thought is a draft if the thought is closed after it, and a call if it never is: some models forget
to close a thought before they call. So what follows the tag of a call in a thought waits for the end of the thought.
"""

import string
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import ClassVar

from anabranch.server.parsers.call_grammar import Rules, alternatives
from anabranch.server.parsers.parts import Content, Part, Reasoning, ToolCallArguments, ToolCallBegin, ToolSpec
from anabranch.server.parsers.source import Source, Tags, Wait


@dataclass(frozen=True, slots=True)
class Thinking:
    """The tags between which a model thinks."""

    tag: str
    closes: str
    label: str = ""
    """Follows the tag."""
    anywhere: bool = False
    """A thought may begin in the middle of a text. Otherwise it begins an answer or follows a call: a tag in the middle
    of prose is prose about tags."""

    @property
    def opens(self) -> str:
        return self.tag + self.label

    def is_open(self, prompt: str, continued: str = "") -> bool:
        """The prompt has begun a thought for the model to continue. `continued`: the text of the prompt's last message
        if the model continues that; it ends the prompt."""
        by_template = prompt.removesuffix(continued.lstrip()).rstrip().endswith(self.opens)
        begun = (self.opens if by_template else "") + continued
        rest = begun.rpartition(self.closes)[2].lstrip()
        return self.opens in rest if self.anywhere else rest.startswith(self.opens)

    def is_over(self, prompt: str, continued: str = "") -> bool:
        """The prompt has ended the model's thought for it, or begun its answer."""
        if continued.strip():
            return not self.is_open(prompt, continued)
        return prompt.rstrip().endswith(self.closes)

    def grammar(self, rules: Rules, prompt: str, continued: str = "") -> str:
        """The expression of a thought before the rest of the output."""
        if self.is_over(prompt, continued):
            return ""
        thought = f"{rules.text_before(self.closes)} /\\s{{0,2}}/"
        if self.is_open(prompt, continued):
            return thought
        label = rules.text(self.label) if self.label else ""
        return f"({rules.tag(self.tag)} {label} {thought})?"

    def answer_grammar(self, rules: Rules, prompt: str, continued: str = "") -> str:
        """The expression of all that comes before an answer that is not a call."""
        return self.grammar(rules, prompt, continued)


class Output:
    """Parts as they become certain; adjacent ones of the same type become one part."""

    def __init__(self, tools: Mapping[str, ToolSpec], random: Random, short_ids: bool = False) -> None:
        self.tools = tools
        self.num_calls = 0
        self.has_content = False
        self._random = random
        self._short_ids = short_ids
        self._ids = set[str]()
        self._parts: list[Part] = []
        self._make: Callable[[str], Part] = Content
        self._texts: list[str] = []
        """Of the last part, which `_make` makes of them and which may still grow."""

    def content(self, text: str) -> None:
        self.has_content = self.has_content or bool(text)
        self._add(Content, text)

    def reasoning(self, text: str) -> None:
        self._add(Reasoning, text)

    def begin(self, name: str, id: str = "") -> None:
        """`id`: what the model wrote, if that is to be used."""
        self._close()
        if not id or id in self._ids:
            id = self._new_id()
        self._ids.add(id)
        self._parts.append(ToolCallBegin(self.num_calls, id, name))
        self._arguments = partial(ToolCallArguments, self.num_calls)
        self.num_calls += 1

    def arguments(self, text: str) -> None:
        self._add(self._arguments, text)

    def take(self) -> list[Part]:
        self._close()
        parts, self._parts = self._parts, []
        return parts

    def _add(self, make: Callable[[str], Part], text: str) -> None:
        if make is not self._make:
            self._close()
            self._make = make
        self._texts.append(text)

    def _close(self) -> None:
        if text := "".join(self._texts):
            self._parts.append(self._make(text))
        self._texts.clear()

    def _new_id(self) -> str:
        if self._short_ids:  # Mistral's templates refuse all others when the call comes back with the chat
            return "".join(self._random.choices(string.ascii_letters + string.digits, k=9))
        return "call_" + "".join(self._random.choices(string.ascii_lowercase + string.digits, k=24))


class Notation(ABC):
    """How a family of models writes calls."""

    opens: ClassVar[tuple[str, ...]]
    """Texts with which a call may begin."""
    tags: ClassVar[tuple[str, ...]]
    """Texts that may be single tokens."""
    tagged: ClassVar[bool] = True
    """A call cannot be mistaken for text."""

    @abstractmethod
    def read(self, source: Source, out: Output) -> Wait[None]:
        """At one of `opens`: read as many calls as there are. What is held afterwards is text.

        Nothing is dropped before it is certain that a call has begun.
        """

    @abstractmethod
    def grammar(self, rules: Rules, tools: Sequence[ToolSpec], many: bool) -> str:
        """The expression of one call of these tools, or of one or more."""


class EnclosedNotation(Notation):
    """Calls that stand between two tags."""

    OPENS: ClassVar[str]
    CLOSES: ClassVar[str]
    SPACE: ClassVar[str] = ""
    """Written after and before the tags, and between calls."""

    def __init__(self) -> None:
        self._tags = Tags(self.OPENS, self.CLOSES)

    @abstractmethod
    def call_grammar(self, rules: Rules, tool: ToolSpec) -> str:
        """The expression of a call of this tool, without tags."""

    def grammar(self, rules: Rules, tools: Sequence[ToolSpec], many: bool) -> str:
        calls = alternatives([self.call_grammar(rules, tool) for tool in tools])
        space = rules.text(self.SPACE) if self.SPACE else ""
        call = rules.rule(f"{rules.tag(self.OPENS)} {space} {calls} {space} {rules.tag(self.CLOSES)}")
        return f"{call} ({space} {call})*" if many else call

    def read_rest(self, source: Source, out: Output) -> Wait[None]:
        """After a call, up to its closing tag or the next opening one: what a model wrote there, such as a superfluous
        bracket, is text."""
        source.settle(out.content)
        tag = yield from source.until(self._tags, lambda piece: source.settle(out.content))
        if tag == self.CLOSES:
            source.skip(len(tag))


class Reader:
    def __init__(
        self,
        notation: Notation | None,
        thinking: Thinking | None,
        out: Output,
        thinks: bool,
        parallel: bool,
        within: bool = False,
    ) -> None:
        """`thinks`: the text begins with a thought, or `within` one, where white space belongs to it. `parallel`: give
        all calls, not only the first."""
        self._notation, self._thinking, self._thinks, self._out = notation, thinking, thinks, out
        self._parallel, self._within = parallel, within
        self._after = False
        """A thought or a call has come: white space at the beginning of what follows may belong to it."""
        self._source = Source()
        calls = notation.opens if notation else ()
        anywhere = (thinking.opens,) if thinking and thinking.anywhere else ()
        self._text_tags = Tags(*calls, *anywhere)
        if thinking:
            drafts = calls if notation and notation.tagged else ()
            self._thought_tags, self._call_tags = Tags(thinking.closes, *drafts), Tags(*drafts)
            self._closing = Tags(thinking.closes)
        self._parser = self._read()

    def feed(self, text: str, final: bool = False) -> list[Part]:
        """The parts that became certain with this text. `final`: nothing comes after it."""
        if self._notation is None and self._thinking is None:
            return [Content(text)] if text else []
        self._source.add(text, final)
        next(self._parser, None)
        parts = self._out.take()
        return parts if self._parallel else [part for part in parts if getattr(part, "index", 0) == 0]

    @property
    def num_calls(self) -> int:
        return self._out.num_calls

    def check(self) -> None:
        self._source.check()

    def _read(self) -> Wait[None]:
        while (yield from self._source.peek()):
            if self._thinks:
                yield from self._thought()
                self._after = True
            self._thinks = yield from self._text()

    def _text(self) -> Wait[bool]:
        """Text and calls, up to the beginning of a thought (True) or the end (False)."""
        source, out, thinking = self._source, self._out, self._thinking
        begins = True  # only white space so far since the beginning, a thought or a call
        while True:
            if begins:
                yield from source.space()
                if self._after and not (out.has_content and (yield from source.peek())):
                    source.drop()
                if thinking and (yield from source.literal(thinking.opens)):
                    source.drop()
                    return True
            tag = yield from source.until(self._text_tags, lambda piece: source.settle(out.content))
            if not tag:
                out.content(source.release())
                return False
            if thinking and tag == thinking.opens:
                source.skip(len(tag))
                return True
            begins = yield from self._calls(out.content)

    def _thought(self) -> Wait[None]:
        source, out = self._source, self._out
        if not self._within:
            yield from source.space()
            source.drop()
        self._within = False
        tag = yield from source.until(self._thought_tags, lambda piece: source.settle(out.reasoning))
        if tag in self._call_tags.texts:
            tag = yield from source.until(self._closing)
            if not tag:
                source.unread()
                yield from self._thought_without_end()
                return
            source.settle(out.reasoning)
        if not tag:
            out.reasoning(source.release())
        source.skip(len(tag))

    def _thought_without_end(self) -> Wait[None]:
        """All text is there: it is a thought up to the first call."""
        source, out = self._source, self._out
        num_before = out.num_calls
        while out.num_calls == num_before:
            tag = yield from source.until(self._call_tags)
            source.settle(out.reasoning)
            if not tag:
                out.reasoning(source.release())
                return
            yield from self._calls(out.reasoning)

    def _calls(self, otherwise: Callable[[str], None]) -> Wait[bool]:
        """At the tag of a call: calls, or text that looked like one. True: none of it was text."""
        source, out = self._source, self._out
        assert self._notation is not None
        num_before = out.num_calls
        yield from self._notation.read(source, out)
        called = out.num_calls > num_before
        self._after = self._after or called
        if called and source.is_blank:
            return True
        source.settle(out.content if called else otherwise)
        return False
