"""Special tokens that users spell out in a chat, such as <|im_end|>, are text; only the template's own are tokens.

A rendered chat does not show who wrote which part. So special-token text in messages, tools and template variables is
replaced by single characters before the template runs and put back afterwards, with its positions. A chat without such
text is rendered and encoded as it is, exactly as transformers does it.
"""

import json
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from anabranch.text.chat_template import ChatTemplate
from anabranch.text.special_text import Spans
from anabranch.text.tokenizer import Tokenizer

MARKS = range(0xF0000, 0xFFFFE)
"""Characters without a meaning: a private-use plane of Unicode. Templates trim, split and cut at none of them."""
END_MARKS = range(0x100000, 0x10FFFE)
"""The same in another plane, for the end of a message that is continued."""
MAX_DEPTH = 400
"""Lists and objects within each other. Templates and JSON filters recurse over them."""


@dataclass(frozen=True, slots=True)
class Rendered:
    text: str
    plain: Spans = ()
    """[begin, end) of text that spells a special token but is text."""


def render_chat(
    template: ChatTemplate,
    tokenizer: Tokenizer,
    /,
    messages: Any,
    tools: Any = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    **variables: Any,
) -> Rendered:
    """A chat as `template` writes it. Encode it with `tokenizer.encode(text, False, plain)`.
    `continue_final_message`: the text ends where the content of the last message does."""
    if continue_final_message:
        content = messages[-1]["content"]
        text = content if isinstance(content, str) else content[-1]["text"]
        mark = next(mark for mark in map(chr, END_MARKS) if mark not in text)
        ended = text + mark if isinstance(content, str) else [*content[:-1], {"type": "text", "text": text + mark}]
        messages = [*messages[:-1], {**messages[-1], "content": ended}]
        return _cut(render_chat(template, tokenizer, messages, tools, False, **variables), mark)
    special = tokenizer.special_text
    try:
        strings = list(_strings((messages, tools, variables)))
        tokens = special.find(strings)
        if not tokens:
            return Rendered(template.render(messages, tools, add_generation_prompt, **variables))
        everything = "\n".join([*strings, *template.sources.values()])
        taken = {*everything}
        free = (mark for mark in map(chr, MARKS) if mark not in taken and json.dumps(mark)[1:-1] not in everything)
        marks = dict(zip(tokens, free, strict=False))
        sought = {token for token in tokens if any(token in text for text in template.sought)}

        def replace(value: Any, kept: Collection[str] = ()) -> Any:
            """A copy in which marks replace the tokens in all strings, except tokens in `kept`."""
            if isinstance(value, str):
                return special.pattern.sub(lambda found: found[0] if found[0] in kept else marks[found[0]], value)
            if isinstance(value, Mapping):
                return {replace(name, kept): replace(inner, kept) for name, inner in value.items()}
            return [replace(inner, kept) for inner in value] if isinstance(value, list | tuple) else value

        given = messages
        messages, tools, variables = replace(messages), replace(tools), replace(variables)
        if sought and isinstance(messages, list):
            for message, old in zip(messages, given, strict=True):
                if isinstance(message, dict) and message.get("role") == "assistant" and "content" in message:
                    # A template takes thoughts out of earlier answers by their tags, and must find them.
                    message["content"] = replace(old["content"], sought)
    except RecursionError:
        raise ValueError("the messages are nested too deeply, or contain themselves") from None
    return _unmark(template.render(messages, tools, add_generation_prompt, **variables), marks)


def _cut(rendered: Rendered, mark: str) -> Rendered:
    """What comes before the last mark."""
    text, found, _ = rendered.text.rpartition(mark)
    if not found:
        raise ValueError("the chat template does not write the last message, so it cannot be continued")
    return Rendered(text, [span for span in rendered.plain if span[1] <= len(text)])


def _strings(value: Any) -> Iterator[str]:
    """All strings within a value, names of members too. Without recursion: the cost does not grow with the depth."""
    todo = [(value, 0)]
    while todo:
        value, depth = todo.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, Mapping | list | tuple):
            if depth == MAX_DEPTH:
                raise RecursionError
            parts = (*value, *value.values()) if isinstance(value, Mapping) else value
            todo += [(part, depth + 1) for part in parts]


def _unmark(text: str, marks: Mapping[str, str]) -> Rendered:
    """Replaces marks by the text they stand for, as JSON escapes where the template has escaped them."""
    spelled = {mark: token for token, mark in marks.items()}
    spelled |= {json.dumps(mark)[1:-1]: json.dumps(token)[1:-1] for token, mark in marks.items()}
    pieces: list[str] = []
    plain: list[tuple[int, int]] = []
    length = 0
    for number, piece in enumerate(re.split(f"({'|'.join(map(re.escape, spelled))})", text)):
        if number % 2:
            piece = spelled[piece]
            plain.append((length, length + len(piece)))
        pieces.append(piece)
        length += len(piece)
    return Rendered("".join(pieces), plain)
