"""Requests as coding agents write them, byte for byte what a schema must take: long lists of tools, system prompts in
blocks, caching marks, thoughts that come back, results of tools. The real clients are in tests/clients.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.serving import NAME, ROOT, Running, running

CACHED = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
NAMES = ("Task", "Bash", "Glob", "Grep", "Read", "Edit", "Write", "WebFetch", "TodoWrite", "mcp__files__list_all")
DRAFT = "http://json-schema.org/draft-07/schema#"
SCHEMA: dict[str, Any] = {
    "$schema": DRAFT,
    "type": "object",
    "properties": {
        "command": {"type": "string", "enum": ["ls", "pwd"], "description": "The command."},
        "timeout": {"type": "number", "exclusiveMinimum": 0, "maximum": 600000},
    },
    "required": ["command"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Running]:
    with running(
        model, "--chat-template", str(ROOT / "tests" / "clients" / "tools.jinja"), "--num-pages", "600"
    ) as one:
        yield one


def events(server: Running, path: str, body: dict[str, Any], **headers: str) -> list[dict[str, Any]]:
    answer = server.post(path, body, headers=headers)
    assert answer.status_code == 200, answer.text
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def claude_code(**options: Any) -> dict[str, Any]:
    """A turn in the middle of a session."""
    tools = [{"name": name, "description": "Does it. " * 200, "input_schema": SCHEMA} for name in NAMES]
    tools[-1] |= {**CACHED, "eager_input_streaming": True}
    thought = {"type": "thinking", "thinking": "I should look.", "signature": "EqQBCg=="}
    call = {"type": "tool_use", "id": "toolu_01A", "name": "Bash", "input": {"command": "ls"}}
    result = {"type": "tool_result", "tool_use_id": "toolu_01A", "content": "a.py\nb.py", "is_error": False, **CACHED}
    return {
        "model": NAME,
        "max_tokens": 32000,
        "stream": True,
        "system": [
            {"type": "text", "text": "x-billing-header: cc_version=2.1.0;"},
            {"type": "text", "text": "You are an agent.", **CACHED},
            {"type": "text", "text": "Be brief.", **CACHED},
        ],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "<system-reminder>Hi</system-reminder>"},
                                         {"type": "text", "text": "List the files.", **CACHED}]},
            {"role": "assistant", "content": [thought, {"type": "text", "text": "Let me see."}, call]},
            {"role": "user", "content": [result, {"type": "text", "text": "Go on."}]},
        ],
        "tools": tools,
        "thinking": {"type": "enabled", "budget_tokens": 31999},
        "metadata": {"user_id": "user_0_account__session_0"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
        "temperature": 1,
        **options,
    }  # fmt: skip


BETAS = {"anthropic-version": "2023-06-01", "anthropic-beta": "claude-code-20250219,context-management-2025-06-27"}


def test_claude_code(server: Running) -> None:
    found = events(server, "/v1/messages?beta=true", claude_code(max_tokens=4), **BETAS)
    assert found[0]["type"] == "message_start" and found[-1]["type"] == "message_stop"
    assert found[-2]["usage"]["output_tokens"] in range(1, 5)
    counted = {name: claude_code()[name] for name in ("model", "messages", "system", "tools")}
    answer = server.post("/v1/messages/count_tokens?beta=true", counted, headers=BETAS)
    usage = found[0]["message"]["usage"]
    assert answer.json()["input_tokens"] == usage["input_tokens"] + usage["cache_read_input_tokens"]
    assert server.request("HEAD", "/").status_code == 200  # is anyone there?


def test_claude_codes_tool_is_called(server: Running) -> None:
    tools = [{"name": "Bash", "input_schema": {**SCHEMA, "properties": {"command": {"const": "ls"}}}}]
    choice = {"type": "tool", "name": "Bash", "disable_parallel_tool_use": True}
    body = claude_code(max_tokens=600, tools=tools, tool_choice=choice, temperature=0, thinking={"type": "disabled"})
    found = events(server, "/v1/messages?beta=true", body, **BETAS)
    assert found[-2]["delta"]["stop_reason"] == "tool_use"
    (delta,) = [event["delta"] for event in found if event["type"] == "content_block_delta"]
    assert json.loads(delta["partial_json"]) == {"command": "ls"}


def codex(**options: Any) -> dict[str, Any]:
    """All items with every request, nothing stored, and tools as for a model that Codex does not know."""
    shell = {"type": "function", "name": "shell", "description": "Runs.", "strict": False, "parameters": SCHEMA}
    plan = {"type": "function", "name": "update_plan", "description": "Plans.", "strict": False,
            "parameters": {"type": "object", "properties": {"plan": {"type": "array", "items": SCHEMA}}}}  # fmt: skip
    return {
        "model": NAME,
        "instructions": "You are an agent.",
        "input": [
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Rules."}]},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "List the files."}]},
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": None, "encrypted_content": "gAAAA"},
            {"type": "function_call", "name": "shell", "arguments": '{"command": "ls"}', "call_id": "call_1"},
            {"type": "function_call_output", "call_id": "call_1", "output": [{"type": "input_text", "text": "a.py"}]},
        ],
        "tools": [shell, plan, {"type": "web_search", "external_web_access": False}],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "0199",
        "text": {"verbosity": "medium"},
        **options,
    }


def test_codex(server: Running) -> None:
    found = events(server, "/v1/responses", codex(max_output_tokens=4), originator="codex_cli_rs")
    assert [event["type"] for event in found[:2]] == ["response.created", "response.in_progress"]
    assert found[-1]["type"] == "response.incomplete" and found[-1]["response"]["usage"]["output_tokens"] == 4


def test_codexs_tool_is_called(server: Running) -> None:
    parameters = {**SCHEMA, "properties": {"command": {"const": "ls"}}}
    shell = {"type": "function", "name": "shell", "parameters": parameters, "strict": False}
    body = codex(
        tools=[shell], tool_choice="required", max_output_tokens=600, temperature=0, reasoning={"effort": "none"}
    )
    (item,) = events(server, "/v1/responses", body)[-1]["response"]["output"]
    assert (item["type"], item["name"], json.loads(item["arguments"])) == ("function_call", "shell", {"command": "ls"})


def test_aider(server: Running) -> None:
    """Through litellm: no tools, examples as turns, and a reminder at the end."""
    turns = [("system", "Act as an expert."), ("user", "Change it."), ("assistant", "a.py\n```\n"), ("user", "Ok?")]
    turns += [("assistant", "Ok."), ("user", "Fix a.py"), ("system", "# *SEARCH/REPLACE block* rules:")]
    messages = [{"role": role, "content": text} for role, text in turns]
    body = {"model": NAME, "messages": messages, "temperature": 0, "stream": True, "max_tokens": 4}
    extra = {"stream_options": {"include_usage": True}, "user": "aider", "metadata": {}}
    found = events(server, "/v1/chat/completions", body | extra)
    assert found[-1]["usage"]["completion_tokens"] == 4 and found[-2]["choices"][0]["finish_reason"] == "length"
