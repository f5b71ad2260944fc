"""Content in parts reaches the prompt as transformers writes it, or as lines where a template takes only text."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from anabranch.text.chat_template import ChatTemplate
from anabranch.text.tokenizer import Tokenizer
from tests.text import tiny_tokenizers
from tests.text.test_chat_template import REAL_TEMPLATES, TEMPLATES, auto_tokenizer

msgspec = pytest.importorskip("msgspec")

READS = """\
{%- macro write(content) -%}
{%- if content is string %}{{ content }}{% else %}{% for part in content %}{{ part.text }}{% endfor %}{% endif %}
{%- endmacro -%}
{%- for message in messages %}{{ '<' + message.role + '>' + write(message.content) }}
{%- for call in message.tool_calls or [] %}{{ '<call>' + call.function.name }}{{ call.function.arguments | tojson }}
{%- endfor %}{% endfor %}
{%- for tool in tools or [] %}{{ '<tool>' + tool.function.name }}{% endfor %}
"""
TRIMS = READS.replace("part.text", "part.text | trim")
BY_ROLE = READS.replace(
    "write(message.content)", "(write(message.content) if message.role == 'user' else message.content)"
)
"""Takes parts in the messages of users, and text in all others."""
AS_JSON = "{% for message in messages %}{{ message.role }}: {{ message.content | tojson }};{% endfor %}{{ tools }}"


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL = {"type": "function", "function": {"name": "weather", "description": "d", "parameters": SCHEMA}}
CALL = {"id": "call00001", "type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}
RESULT = {"role": "tool", "tool_call_id": "call00001", "name": "weather"}
CHATS: dict[str, list[dict[str, Any]]] = {
    "user": [{"role": "user", "content": parts("Hello", " world")}],
    "one part": [{"role": "user", "content": parts(" Hello\n")}],
    "system": [{"role": "system", "content": parts("Be", " brief.")}, {"role": "user", "content": "Hi"}],
    "assistant": [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": parts("Hel", "lo")},
        {"role": "user", "content": "And?"},
    ],
    "calls": [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": parts("I", " look."), "tool_calls": [CALL]},
        RESULT | {"content": "3"},
    ],
    "tool": [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        RESULT | {"content": parts("3", " degrees")},
    ],
}
"""Each has one message with parts."""
KINDS = ("user", "system", "assistant", "calls", "tool")
ALL_BUT_TOOL, ALL_BUT_SYSTEM = {"user", "system", "assistant", "calls"}, {"user", "assistant", "calls", "tool"}
REAL = {
    "GLM-4.6": ALL_BUT_TOOL,
    "GLM-4.7-Flash": ALL_BUT_TOOL,
    "Kimi-K2-Instruct": {"user", "system", "assistant"},
    "Kimi-K2-Thinking": {"user", "system", "assistant"},
    "moonshotai-Kimi-K2": {"user", "system", "assistant"},
    "MiniMax-M2": {*KINDS},
    "Qwen3.5-4B": {*KINDS},
    "google-gemma-4-31B-it": ALL_BUT_SYSTEM,
    "openai-gpt-oss-120b": set(),
    "deepseek-ai-DeepSeek-V3.2": set(),
    "Qwen-Qwen3-0.6B": set(),
    "meta-llama-Llama-3.1-8B-Instruct": set(),
}
"""Kinds of messages that a real template takes as parts. In all others transformers fails or writes a list's repr."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_tokenizers.write("llama", tmp_path_factory.mktemp("parts") / "llama")


@pytest.fixture(scope="module")
def judge(folder: Path) -> Any:
    return auto_tokenizer(folder)


def render(folder: Path, template: str, messages: list[dict[str, Any]], **members: Any) -> Any:
    """A request's prompt: its text, where that spells special tokens, and its tokens."""
    pytest.importorskip("fastapi")
    from anabranch.server import chat, protocol

    model: Any = SimpleNamespace(template=ChatTemplate(folder, template), tokenizer=Tokenizer(folder))
    body = msgspec.json.encode({"messages": messages, **members})
    read = chat.Chat(msgspec.json.decode(body, type=protocol.ChatCompletion))
    rendered = chat.render(model, read)
    assert rendered.text.endswith(read.begun)
    return rendered


def expect(judge: Any, template: str, messages: list[dict[str, Any]], **options: Any) -> Any:
    options = {"add_generation_prompt": True} | options
    return judge.apply_chat_template(messages, chat_template=template, tokenize=False, **options)


def as_lines(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    def text(content: Any) -> str:
        return content if isinstance(content, str) else "\n".join(part["text"] for part in content)

    return [message | {"content": text(message["content"])} for message in messages]


@pytest.mark.parametrize("tools", [None, [TOOL]], ids=["no tools", "tools"])
@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("template", [READS, TRIMS, TEMPLATES["hermes"]], ids=["reads", "trims", "hermes"])
def test_parts_are_written_as_by_transformers(folder: Path, judge: Any, template: str, chat: str, tools: Any) -> None:
    expected = expect(judge, template, CHATS[chat], tools=tools)
    assert render(folder, template, CHATS[chat], tools=tools).text == expected


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize(
    "template", [TEMPLATES["chatml"], TEMPLATES["llama 3"], AS_JSON], ids=["chatml", "trim", "json"]
)
def test_other_templates_get_lines_of_text(folder: Path, judge: Any, template: str, chat: str) -> None:
    assert render(folder, template, CHATS[chat]).text == expect(judge, template, as_lines(CHATS[chat]))


def test_each_role_is_tried_by_itself(folder: Path) -> None:
    messages = [{"role": role, "content": parts("a", " b")} for role in ("system", "user", "assistant", "user")]
    assert render(folder, BY_ROLE, messages).text == "<system>a\n b<user>a b<assistant>a\n b<user>a b"


def test_a_template_for_tools_is_tried_by_itself(folder: Path, tmp_path: Path) -> None:
    from anabranch.text.part_form import takes_parts

    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text(AS_JSON)
    (tmp_path / "chat_template.jinja").write_text(READS)
    template = ChatTemplate(tmp_path)
    for kind in KINDS:
        assert takes_parts(template, kind, tools=False) and not takes_parts(template, kind, tools=True)


@pytest.mark.parametrize("template", [READS, TEMPLATES["chatml"]], ids=["parts", "text"])
def test_an_answer_in_parts_is_continued(folder: Path, judge: Any, template: str) -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": parts("Once", " upon")}]
    options = {"add_generation_prompt": False, "continue_final_message": True}
    expected = expect(judge, template, messages if template == READS else as_lines(messages), **options)
    assert expected.endswith(" upon")
    assert render(folder, template, messages, **options).text == expected


@pytest.mark.parametrize("template", [READS, TRIMS, TEMPLATES["chatml"]], ids=["parts", "trimmed parts", "text"])
@pytest.mark.parametrize(
    "texts", [("a</s>", "b"), ("a</", "s>"), ("<", "/", "s>"), (" </ ", " s> "), ("</s></", "s>"), ("</s>",)]
)
def test_special_tokens_in_parts_are_text(folder: Path, template: str, texts: tuple[str, ...]) -> None:
    rendered = render(folder, template, [{"role": "user", "content": parts(*texts)}])
    tokenizer = Tokenizer(folder)
    eos = tokenizer.backend.token_to_id("</s>")
    assert eos in tokenizer.encode("</s>", False)
    assert eos not in tokenizer.encode(rendered.text, False, rendered.plain)


def test_empty_parts_are_empty_text(folder: Path) -> None:
    for content in ([], parts("")):
        assert render(folder, READS, [{"role": "user", "content": content}]).text == "<user>"
        assert render(folder, AS_JSON, [{"role": "user", "content": content}]).text == 'user: "";None'


@pytest.mark.skipif(not REAL_TEMPLATES.exists(), reason="needs the real templates")
@pytest.mark.parametrize("tools", [None, [TOOL]], ids=["no tools", "tools"])
@pytest.mark.parametrize("name", REAL)
def test_real_templates(folder: Path, judge: Any, name: str, tools: Any) -> None:
    from anabranch.text.call_form import fit_calls

    template = (REAL_TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")
    for chat, messages in CHATS.items():
        taken = ("user" if chat == "one part" else chat) in REAL[name]
        given: Any = fit_calls(ChatTemplate(folder, template), messages if taken else as_lines(messages))
        if name.startswith("Kimi") and chat in ("calls", "tool"):
            with pytest.raises(ValueError, match="'append' of 'list' object is unsafe"):  # as in transformers
                render(folder, template, messages, tools=tools)
            continue
        assert render(folder, template, messages, tools=tools).text == expect(judge, template, given, tools=tools)
        if not taken:
            assert is_broken(judge, template, messages, tools), chat


def is_broken(judge: Any, template: str, messages: list[dict[str, Any]], tools: Any) -> bool:
    """Whether transformers fails, loses parts, or writes lists as Python or JSON."""
    try:
        text = expect(judge, template, messages, tools=tools)
    except Exception:
        return True
    (given,) = (message["content"] for message in messages if isinstance(message["content"], list))
    lost = any(part["text"].strip() not in text for part in given)
    return lost or "'text': " in text or '"text": ' in text
