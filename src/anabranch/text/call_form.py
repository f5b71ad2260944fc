"""How earlier tool calls must be given to a chat template: most take arguments as an object and content as text, but
some concatenate the arguments' text, and some write calls only where the content is null. Found out by trying.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from anabranch.text.chat_template import ChatTemplate

ARGUMENTS = {"probed_city": "Zug"}
NAME, RESULT = "probed_tool", "probed result"
SCHEMA = {"type": "object", "properties": {}, "required": []}
TOOL = {"type": "function", "function": {"name": "other", "description": "d", "parameters": SCHEMA}}
CALL = {"id": "call00000", "type": "function", "function": {"name": NAME, "arguments": ARGUMENTS}}


def fit_calls(template: ChatTemplate, messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The messages, whose arguments are objects, with calls in the template's form. Where it needs content that is
    null, text beside a call becomes a message before it."""
    if not any(message.get("tool_calls") for message in messages):
        return list(messages)
    null, text = find_form(template)
    found: list[Mapping[str, Any]] = []
    for message in messages:
        if message.get("tool_calls"):
            if null and message["content"]:
                found.append({name: value for name, value in message.items() if name != "tool_calls"})
            message = _call(message, message["tool_calls"], None if null else message["content"], text)
        found.append(message)
    return found


def find_form(template: ChatTemplate) -> tuple[bool, bool]:
    """(content is null where calls are, arguments are text): the first form in which a call arrives whole, if any."""
    if template.call_form is None:
        forms = [(tools, null, text) for tools in ([TOOL], None) for null in (False, True) for text in (False, True)]
        whole = ((null, text) for tools, null, text in forms if _arrives(template, tools, null, text))
        template.call_form = next(whole, (False, False))
    return template.call_form


def _arrives(template: ChatTemplate, tools: Any, null: bool, text: bool) -> bool:
    messages = [
        {"role": "user", "content": "?"},
        _call({"role": "assistant"}, [CALL], None if null else "", text),
        {"role": "tool", "content": RESULT, "tool_call_id": CALL["id"], "name": NAME},
    ]
    try:
        written = template.render(messages, tools if template.writes_tools else None)
    except ValueError:
        return False
    wrong = (repr(ARGUMENTS), json.dumps(json.dumps(ARGUMENTS)))  # as Python writes it; JSON in JSON
    return all(part in written for part in (NAME, *ARGUMENTS, *ARGUMENTS.values(), RESULT)) and not any(
        part in written for part in wrong
    )


def _call(message: Mapping[str, Any], calls: Sequence[Any], content: str | None, text: bool) -> dict[str, Any]:
    if text:
        calls = [{**call, "function": _as_text(call["function"])} for call in calls]
    return {**message, "content": content, "tool_calls": calls}


def _as_text(function: Mapping[str, Any]) -> dict[str, Any]:
    arguments = function["arguments"]
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {**function, "arguments": text}
