"""Grammars of calls that must come, written rule by rule in llguidance's dialect of Lark."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from anabranch.sampling_params import Grammar
from anabranch.server.parsers.parts import ToolSpec


class Rules:
    def __init__(self, added_tokens: Mapping[str, int]) -> None:
        self._added_tokens = added_tokens
        self._lines: dict[str, str] = {}
        """By name, which is counted."""
        self._names: dict[str, str] = {}
        """By line: equal ones are written once."""

    def text(self, text: str) -> str:
        """Exactly this text, tags aside."""
        return json.dumps(text)

    def tag(self, text: str) -> str:
        """A tag. To llguidance many tokens that a tokenizer has added are no text, even if they are not special."""
        token = self._added_tokens.get(text)
        return self.text(text) if token is None else f"<[{token}]>"

    def rule(self, expression: str) -> str:
        return self._name("r", expression)

    def terminal(self, expression: str) -> str:
        return self._name("T", expression)

    def json(self, schema: Mapping[str, Any]) -> str:
        return self.rule(f"%json {json.dumps(schema, allow_nan=False)}")

    def arguments(self, tool: ToolSpec) -> str:
        return self.json(arguments_schema(tool))

    def text_before(
        self, tag: str, without: Sequence[str] = (), pattern: str = "", low: int = 0, high: int | None = None
    ) -> str:
        """Free text and the tag that ends it. The text has neither the tag nor any of `without` in it, is matched by
        the pattern, all of it, and has so many characters."""
        length = "*" if (low, high) == (0, None) else f"{{{low},{'' if high is None else high}}}"
        wanted = [f"/{_in_slashes(pattern)}/"] if pattern else []
        forbidden = [f"~/(?s:.*){_in_slashes(re.escape(text))}(?s:.*)/" for text in dict.fromkeys([tag, *without])]
        text = self.terminal(" & ".join([f"/(?s:.{length})/", *wanted, *forbidden]))
        if tag in self._added_tokens:
            return f"{text} {self.tag(tag)}"
        # Free text would swallow the tag's first characters; as a suffix the tag ends it.
        return self._name("r", text, f"[suffix={self.text(tag)}]")

    def of(self, grammar: Grammar) -> str:
        """What a request's grammar says, as a part of these."""
        if grammar.json_schema is not None:
            try:
                schema = json.loads(grammar.json_schema)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"grammar: json_schema is not JSON: {error}") from None
            if schema is not True and not isinstance(schema, dict):
                raise ValueError("grammar: json_schema must be an object")
            try:
                return self.json({} if schema is True else schema)
            except RecursionError:
                raise ValueError("grammar: json_schema is nested too deeply") from None
        if grammar.regex is not None:
            return self.terminal(f"/{_in_slashes(grammar.regex)}/")
        if grammar.choice is not None:
            return self.terminal(" | ".join(map(self.text, grammar.choice)))
        raise ValueError(
            "a grammar in Lark cannot follow a thought: turn thinking off, as in "
            '"chat_template_kwargs": {"enable_thinking": false}, or use a regex or a JSON schema'
        )

    def reserve(self) -> str:
        """A name for a rule that comes later, because it may have to name itself."""
        name = f"r{len(self._lines)}"
        self._lines[name] = ""
        return name

    def define(self, name: str, expression: str) -> None:
        self._lines[name] = f": {expression}"

    def source(self, start: str) -> str:
        return "\n".join([f"start: {start}", *(name + line for name, line in self._lines.items())])

    def _name(self, prefix: str, expression: str, options: str = "") -> str:
        line = f"{options}: {expression}"
        name = self._names.setdefault(line, f"{prefix}{len(self._lines)}")
        self._lines[name] = line
        return name


def arguments_schema(tool: ToolSpec) -> dict[str, Any]:
    """Of an object, whatever the client left out."""
    if not tool.parameters:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    return {"type": "object", **tool.parameters}


def alternatives(expressions: Sequence[str]) -> str:
    return f"({' | '.join(expressions)})"


def _in_slashes(pattern: str) -> str:
    """A regex as it may stand between slashes, in one line."""

    def spell(match: re.Match[str]) -> str:
        return {"/": r"\/", "\n": r"\n", "\r": r"\r"}.get(match[0][-1], match[0])

    return re.sub(r"\\.|[/\n\r]", spell, pattern, flags=re.DOTALL)
