"""What a model wrote → what a client gets: answer, reasoning, tool calls, piece by piece while it is written.

    parsers = find_parsers(template_text, added_tokens={"<tool_call>": 151657, ...})   # once a server
    reader = parsers.start(tools, "auto", reasoning=True, prompt=rendered)             # once a completion
    for text in stream:
        for part in reader.feed(text): ...
    for part in reader.feed("", final=True): ...

However the text is cut into pieces, the parts joined are the same. Nothing is lost: text that is not a call after all
comes out as content, as it was written. What is left out is notation only: the tags and the words of a call around its
name and arguments, and white space beside tags. White space after a call or a thought stays where it stands between
content and content.

A call's arguments follow its beginning at once and without anything between. They are JSON as the model wrote it, or
made of what it wrote where a notation is not JSON. They are not repaired: a model that writes broken JSON there, or is
cut off, leaves broken arguments, as clients of this API have to expect. A call of a tool that was not offered is passed
on, for the client to refuse; only without any tag around it (plain JSON) it is text.

Rooms: `parts` (the vocabulary), `source` (text in pieces), `reader` (thought, text, calls), the notations of calls
(`json_calls`, `gemma4`, `qwen3_coder`), `thinking`, `choose` (which of them a model needs), `lark` and `schema` (the
grammar of a call that must come). Nothing here knows HTTP or tokens.
"""

from anabranch.server.parsers.choose import Parsers, find_parsers
from anabranch.server.parsers.parts import (
    Content,
    Named,
    Part,
    Reasoning,
    ToolCallArguments,
    ToolCallBegin,
    ToolChoice,
    ToolSpec,
)
from anabranch.server.parsers.reader import Reader

__all__ = [
    "Content",
    "Named",
    "Parsers",
    "Part",
    "Reader",
    "Reasoning",
    "ToolCallArguments",
    "ToolCallBegin",
    "ToolChoice",
    "ToolSpec",
    "find_parsers",
]
