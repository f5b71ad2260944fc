"""Content in parts: a list where a chat template reads lists, otherwise text, one line a part. Found out by trying."""

import re
from typing import Any

from anabranch.text.call_form import CALL, NAME, TOOL, fit_calls
from anabranch.text.chat_template import ChatTemplate
from anabranch.text.special_text import SpecialText

Messages = list[dict[str, Any]]
CHATS = ("user assistant user", "system user", "user calls tool assistant user")
"""A kind of message, a role or `calls` of the assistant's, is tried in the first chat that has it."""
ADDED: dict[str, dict[str, Any]] = {
    "calls": {"role": "assistant", "tool_calls": [CALL]},
    "tool": {"tool_call_id": CALL["id"], "name": NAME},
}


def fit_parts(template: ChatTemplate, special: SpecialText, messages: Messages, tools: bool) -> Messages:
    """The messages, whose content is text or a list of text parts, as the template takes them. `tools`: there are."""
    found = []
    for message in messages:
        if not isinstance(message["content"], str):
            kind = "calls" if message.get("tool_calls") else message["role"]
            texts = [part["text"] for part in message["content"]]
            if special.arises(texts) or not takes_parts(template, kind, tools):
                message = {**message, "content": "\n".join(texts)}
        found.append(message)
    return found


def takes_parts(template: ChatTemplate, kind: str, tools: bool) -> bool:
    if (kind, tools) not in template.part_form:
        chat = next(chat for chat in map(str.split, CHATS) if kind in chat)
        marks = [f"probed_{number}_{half}" for number in range(chat.count(kind)) for half in "ab"]
        parts = iter([{"type": "text", "text": mark} for mark in marks])
        contents = [[next(parts), next(parts)] if one == kind else "?" for one in chat]
        messages = [{"role": one, "content": content, **ADDED.get(one, {})} for one, content in zip(chat, contents)]
        try:
            written = template.render(fit_calls(template, messages), [TOOL] if tools else None)
        except ValueError:
            written = ""
        # A list written as Python or JSON has "text" and quotes before each text.
        arrives = (mark in written and not re.search(rf"text\W+{mark}", written) for mark in marks)
        template.part_form[kind, tools] = all(arrives)
    return template.part_form[kind, tools]
