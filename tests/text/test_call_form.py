"""Earlier tool calls reach the prompt whole, in the form that each chat template takes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from anabranch.text.call_form import find_form, fit_calls
from anabranch.text.chat_template import ChatTemplate
from tests.text import tiny_tokenizers
from tests.text.test_chat_template import REAL_TEMPLATES, TEMPLATES

OBJECT, TEXT, NULL_AND_TEXT = (False, False), (False, True), (True, True)
OTHERS = {"deepseek-ai-DeepSeek-R1-Distill-Llama-8B": NULL_AND_TEXT, "meetkai-functionary-medium-v3.2": TEXT}
"""Real templates that take no objects."""
DEEPSEEK = """\
{%- for message in messages %}
{%- if message.role == 'assistant' and message.content is none %}
{%- for call in message.tool_calls %}{{ '<call>' + call.function.name + '\\n' + call.function.arguments + '</call>' }}
{%- endfor %}{{ '<end>' }}
{%- elif message.role == 'assistant' %}{{ '<answer>' + message.content + '<end>' }}
{%- elif message.role == 'tool' %}{{ '<result>' + message.content + '</result>' }}
{%- else %}{{ '<user>' + message.content }}{% endif %}
{%- endfor %}
"""
CALLS = [{"id": "1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Zürich"}}}]
ARGUMENTS = '{"city": "Zürich"}'


def conversation(content: str) -> list[dict[str, Any]]:
    return [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": content, "tool_calls": CALLS},
        {"role": "tool", "content": "3 degrees", "tool_call_id": "1", "name": "weather"},
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_tokenizers.write("llama", tmp_path_factory.mktemp("calls") / "llama")


def test_null_content_and_arguments_as_text(folder: Path) -> None:
    template = ChatTemplate(folder, DEEPSEEK)
    assert find_form(template) == NULL_AND_TEXT
    rest = f"<call>weather\n{ARGUMENTS}</call><end><result>3 degrees</result>"
    given = conversation("")
    assert template.render(fit_calls(template, given)) == f"<user>Weather?{rest}"
    assert given == conversation(""), "what was given is as it was"
    assert template.render(fit_calls(template, conversation("I look."))) == f"<user>Weather?<answer>I look.<end>{rest}"


def test_others_get_objects(folder: Path) -> None:
    for text in TEMPLATES.values():
        template = ChatTemplate(folder, text)
        assert fit_calls(template, conversation("")) == conversation("") and find_form(template) == OBJECT


def test_a_request_is_rendered_so(folder: Path) -> None:
    pytest.importorskip("fastapi")
    from anabranch.server.chat import Chat, render
    from anabranch.server.protocol import ChatCompletion, FunctionCall, Message, ToolCall
    from anabranch.text.tokenizer import Tokenizer

    call = ToolCall(id="1", function=FunctionCall(name="weather", arguments=ARGUMENTS))
    messages = [Message(role="user", content="Weather?"), Message(role="assistant", tool_calls=[call])]
    messages.append(Message(role="tool", content="3 degrees", tool_call_id="1"))
    model: Any = SimpleNamespace(template=ChatTemplate(folder, DEEPSEEK), tokenizer=Tokenizer(folder))
    assert f"<call>weather\n{ARGUMENTS}</call><end>" in render(model, Chat(ChatCompletion(messages=messages))).text


@pytest.mark.skipif(not REAL_TEMPLATES.exists(), reason="needs the real templates")
@pytest.mark.parametrize("path", sorted(REAL_TEMPLATES.glob("*.jinja")), ids=lambda path: path.stem)
def test_real_templates(folder: Path, path: Path) -> None:
    template = ChatTemplate(folder, path.read_text(encoding="utf-8"))
    assert find_form(template) == OTHERS.get(path.stem, OBJECT)
    if path.stem in OTHERS or "deepseek" in path.stem.lower():
        written = template.render(fit_calls(template, conversation("")))
        assert "weather" in written and "city" in written and "3 degrees" in written
        if not path.stem.startswith(("deepseek-ai-DeepSeek-V3.2", "deepseek-ai-DeepSeek-V4")):  # values with tags
            assert ARGUMENTS in written
