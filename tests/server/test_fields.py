"""Fields inside bodies: misspelt ones are refused by path, those that clients send along are known."""

from __future__ import annotations

import typing
from typing import Any

import anthropic.types as anthropic_types
import anthropic.types.beta as anthropic_beta
import msgspec
import openai.types.chat as openai_types
import openai.types.responses as response_types
import openai.types.shared_params as openai_shared
import pytest
from anthropic.types import message_create_params
from anthropic.types.beta import message_create_params as beta_create
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_openai.chat_models.base import _convert_message_to_dict
from openai.types import completion_create_params as openai_completion
from openai.types import embedding_create_params
from openai.types.chat import completion_create_params as openai_create
from openai.types.responses import response_create_params, response_input_param

from anabranch.server import anthropic, protocol, responses
from anabranch.server.body import decode
from anabranch.server.chat import Chat
from anabranch.server.errors import ApiError
from anabranch.server.protocol import ChatCompletion

HELLO: list[Any] = [{"role": "user", "content": "hello"}]
FUNCTION = {"name": "f", "parameters": {"type": "object"}}
TOOL = {"type": "function", "function": FUNCTION}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def read(schema: type[Any], **fields: Any) -> Any:
    needed = {"max_tokens": 5} if schema is anthropic.Messages else {}
    return decode(msgspec.json.encode({"messages": HELLO, **needed, **fields}), schema)


def assistant(**fields: Any) -> dict[str, Any]:
    return {"messages": [*HELLO, {"role": "assistant", "content": "hi", **fields}, *HELLO]}


CHAT, MESSAGES = ChatCompletion, anthropic.Messages
MISSPELT: list[tuple[type[Any], dict[str, Any], str, str]] = [
    (CHAT, {"temprature": 1}, "temprature", "temperature"),
    (CHAT, {"messages": [{"role": "user", "content": "x", "nam": "y"}]}, "messages[0].nam", "name"),
    (CHAT, {"messages": [*HELLO, {"role": "user", "content": "x", "foo": 1}]}, "messages[1].foo", ""),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "txt": "x", "text": "y"}]}]},
     "messages[0].content[0].txt", "text"),
    (CHAT, assistant(tool_calls=[CALL | {"indx": 0}]), "messages[1].tool_calls[0].indx", "index"),
    (CHAT, assistant(tool_calls=[CALL | {"function": {"name": "f", "argumnts": "{}"}}]),
     "messages[1].tool_calls[0].function.argumnts", "arguments"),
    (CHAT, {"tools": [TOOL | {"function": FUNCTION | {"descripton": "x"}}]}, "tools[0].function.descripton",
     "description"),
    (CHAT, {"tools": [TOOL | {"name": "f"}]}, "tools[0].name", ""),
    (CHAT, {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f", "nme": "g"}}},
     "tool_choice.function.nme", "name"),
    (CHAT, {"response_format": {"type": "json_object", "strct": True}}, "response_format.strct", ""),
    (CHAT, {"response_format": {"type": "json_object", "schema": {}}}, "response_format.schema", "json_schema"),
    (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {}, "strct": True}}},
     "response_format.json_schema.strct", "strict"),
    (CHAT, {"stream": True, "stream_options": {"include_usge": True}}, "stream_options.include_usge", "include_usage"),
    (CHAT, {"structured_outputs": {"regx": "a"}}, "structured_outputs.regx", "regex"),
    (protocol.Tokenize, {"messages": [{"role": "user", "content": "x", "nam": "y"}]}, "messages[0].nam", "name"),
    (MESSAGES, {"messages": [{"role": "user", "content": "x", "id": "y"}]}, "messages[0].id", ""),
    (MESSAGES, {"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "cache_contrl": {}}]}]},
     "messages[0].content[0].cache_contrl", "cache_control"),
    (MESSAGES, {"messages": [{"role": "user", "content": [
        {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "x", "txt": "y"}]}]}]},
     "messages[0].content[0].content[0].txt", "text"),
    (MESSAGES, {"system": [{"type": "text", "text": "x", "foo": 1}]}, "system[0].foo", ""),
    (MESSAGES, {"tools": [{"name": "f", "input_schem": {}}]}, "tools[0].input_schem", "input_schema"),
    (MESSAGES, {"tool_choice": {"type": "auto", "disable_parallel": True}}, "tool_choice.disable_parallel",
     "disable_parallel_tool_use"),
    (MESSAGES, {"thinking": {"type": "enabled", "budget": 5}}, "thinking.budget", "budget_tokens"),
    (MESSAGES, {"output_config": {"format": {"type": "json_schema", "shema": {}}}}, "output_config.format.shema",
     "schema"),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "fields", "param", "near"), MISSPELT, ids=[case[2] for case in MISSPELT])
def test_a_misspelt_field_is_refused_by_path(schema: type[Any], fields: Any, param: str, near: str) -> None:
    with pytest.raises(ApiError) as caught:
        read(schema, **fields)
    error = caught.value
    assert (error.status, error.code, error.param) == (400, "unknown_parameter", param), error.message
    assert repr(param) in error.message and (not near or f"did you mean {near!r}?" in error.message)


@pytest.mark.parametrize(
    ("schema", "fields", "param", "words"),
    [
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
         "messages[0].content[0]", "'image_url' cannot be read: this model takes text only"),
        (MESSAGES, {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
         "messages[0].content[0]", "'image' cannot be read here"),
        (MESSAGES, {"tools": [{"type": "web_search_20250305", "name": "web_search", "max_uses": 5}]}, "tools[0]",
         "Anthropic's servers"),
    ],
)  # fmt: skip
def test_what_is_of_another_kind_is_refused_by_its_kind(schema: type[Any], fields: Any, param: str, words: str) -> None:
    with pytest.raises(ApiError, match=words) as caught:
        read(schema, **fields)
    assert caught.value.param == param


def test_null_means_not_given_inside_too() -> None:
    body = read(CHAT, **assistant(audio=None, function_call=None, tool_calls=None, unheard_of=None))
    assert body.messages[1].content == "hi"


HARMLESS: list[tuple[type[Any], dict[str, Any]]] = [
    (CHAT, {"user": "me", "metadata": {"a": "b"}, "moderation": {"model": "m"}, "service_tier": "auto"}),
    (CHAT, {"length_penalty": 1.0, "use_beam_search": False, "truncate_prompt_tokens": -1, "echo": False}),
    (CHAT, {"add_special_tokens": False, "return_tokens_as_token_ids": False, "mm_processor_kwargs": {}}),
    (CHAT, {"separate_reasoning": True, "stream_reasoning": True, "no_stop_trim": False, "rid": "1"}),
    (protocol.Completion, {"prompt": "x", "suffix": "", "length_penalty": 0.5, "rid": ["1"], "messages": None}),
    (CHAT, {"custom_params": {"a": 1}, "early_stopping": True, "use_audio_in_video": False}),
    (protocol.Completion, {"prompt": "x", "messages": None, "early_stopping": "never", "custom_params": {}}),
    (CHAT, {"return_prompt_token_ids": False}),
    (MESSAGES, {"user_profile_id": "x", "metadata": {"user_id": "x"}}),
    (MESSAGES, {"mcp_servers": [], "fallbacks": [{"model": "m"}], "fallback_credit_token": "x"}),
]


@pytest.mark.parametrize(("schema", "fields"), HARMLESS)
def test_harmless_fields_are_accepted(schema: type[Any], fields: dict[str, Any]) -> None:
    read(schema, **fields)


@pytest.mark.parametrize(
    ("schema", "name", "value", "words"),
    [
        (CHAT, "use_beam_search", True, "only false is possible here: beams are not searched"),
        (CHAT, "use_beam_search", 0, "only false"),
        (CHAT, "truncate_prompt_tokens", 5, "only -1 is possible here: prompts are never truncated"),
        (CHAT, "separate_reasoning", False, "only true"),
        (CHAT, "echo", True, "only false"),
        (CHAT, "return_prompt_token_ids", True, "only false is possible here: give return_token_ids"),
        (MESSAGES, "mcp_servers", [{"type": "url", "name": "x"}], "only \\[\\] is possible here: MCP servers"),
        (protocol.Completion, "suffix", "fin", 'only "" is possible here: text between a prompt and a suffix'),
    ],
)
def test_fields_with_one_possible_value(schema: type[Any], name: str, value: Any, words: str) -> None:
    with pytest.raises(ApiError, match=words) as caught:
        read(schema, **{name: value, **({"prompt": "x", "messages": None} if schema is protocol.Completion else {})})
    assert (caught.value.status, caught.value.param) == (400, name)


@pytest.mark.parametrize(
    ("schema", "name", "value", "words"),
    [
        (CHAT, "web_search_options", {}, "does not search the web; give a tool of your own"),
        (CHAT, "functions", [FUNCTION], "give tools"),
        (CHAT, "function_call", "auto", "give tool_choice"),
        (CHAT, "audio", {"voice": "x", "format": "wav"}, "answers in text"),
        (CHAT, "thinking", {"type": "disabled"}, "chat_template_kwargs.*enable_thinking.*reasoning_effort"),
        (CHAT, "enable_thinking", False, "chat_template_kwargs.*enable_thinking.*reasoning_effort"),
        (CHAT, "reasoning", {"effort": "low"}, "chat_template_kwargs.*enable_thinking.*reasoning_effort"),
        (CHAT, "regex", "a", "structured_outputs"),
        (CHAT, "custom_logit_processor", "x", "not run"),
        (MESSAGES, "container", "x", "Anthropic's servers"),
        (MESSAGES, "thread", {"type": "create"}, "send all messages"),
    ],
)
def test_fields_of_other_servers_are_refused_with_what_to_send(
    schema: type[Any], name: str, value: Any, words: str
) -> None:
    with pytest.raises(ApiError, match=f"^{name}: .*{words}") as caught:
        read(schema, **{name: value})
    assert (caught.value.status, caught.value.code, caught.value.param) == (400, "unsupported_parameter", name)
    read(schema, **{name: None})


def test_what_is_ignored_is_logged_once(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("anabranch.server.body._logged", set())
    for _ in range(2):
        read(CHAT, length_penalty=1.0, safety_identifier="x", temperature=1.0, use_beam_search=False)
    read(CHAT, user=None)
    logged = sorted(record.args[0] for record in caplog.records)  # type: ignore[index, misc]
    assert logged == ["length_penalty", "safety_identifier"]


# What clients send.

ECHOES: dict[str, dict[str, Any]] = {
    "openai": openai_types.ChatCompletionMessage.model_validate(
        {"role": "assistant", "content": "hi", "refusal": None, "annotations": [], "reasoning_content": "hm",
         "reasoning": "hm", "tool_calls": [CALL]}
    ).model_dump(),
    "openai, parsed": openai_types.ParsedChatCompletionMessage.model_validate(
        {"role": "assistant", "content": "hi", "parsed": {"a": 1},
         "tool_calls": [CALL | {"function": CALL["function"] | {"parsed_arguments": {}}}]}  # type: ignore[operator]
    ).model_dump(),
    "litellm": {
        "role": "assistant", "content": "hi", "function_call": None, "audio": None, "annotations": [],
        "provider_specific_fields": {"refusal": None}, "thinking_blocks": [], "reasoning_content": "hm",
        "tool_calls": [CALL | {"index": 0, "provider_specific_fields": {}}],
    },
    "langchain": _convert_message_to_dict(
        AIMessage("hi", tool_calls=[{"name": "f", "args": {}, "id": "1"}], additional_kwargs={"refusal": None})
    ),
    "langchain, blocks": _convert_message_to_dict(AIMessage([{"type": "text", "text": "hi", "annotations": []}])),
    "openrouter": {"role": "assistant", "content": "hi", "reasoning": "hm", "reasoning_details": [{"type": "x"}]},
    "cached": {"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}]},
}  # fmt: skip


@pytest.mark.parametrize("name", ECHOES)
def test_messages_as_clients_send_them_back(name: str) -> None:
    chat = Chat(read(CHAT, messages=[*HELLO, ECHOES[name], *HELLO]))
    assert chat.messages[1]["content"] in ("hi", [{"type": "text", "text": "hi"}])
    assert len(chat.messages[1].get("tool_calls", ())) == len(ECHOES[name].get("tool_calls") or ())


def test_a_request_as_an_agent_sends_it() -> None:
    """All items with every request, nothing stored, tools of its own and of OpenAI's servers."""
    call = {"type": "function_call", "id": "fc_1", "call_id": "1", "name": "shell", "arguments": '{"command": ["ls"]}'}
    items = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Rules."}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "List the files."}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}], "encrypted_content": None},
        {**call, "status": "completed"},
        {"type": "function_call_output", "call_id": "1", "output": '{"output": "a.py"}'},
    ]
    shell = {
        "type": "function",
        "name": "shell",
        "description": "Runs.",
        "strict": False,
        "parameters": {"type": "object"},
    }
    sent = {
        "model": "m", "instructions": "You are an agent.", "input": items, "tools": [shell, {"type": "web_search"}],
        "tool_choice": "auto", "parallel_tool_calls": False, "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False, "stream": True, "include": ["reasoning.encrypted_content"], "prompt_cache_key": "k",
        "text": {"verbosity": "low"}, "client_metadata": {"x": "y"}, "service_tier": "auto",
    }  # fmt: skip
    body = decode(msgspec.json.encode(sent), responses.CreateResponse)
    chat = Chat(responses.chat_completion(body, responses.read_items(body.input)))
    assert [message["role"] for message in chat.messages] == ["system", "user", "assistant", "tool"]
    assert chat.messages[0]["content"] == "You are an agent.\n\nRules."
    assert chat.messages[2]["reasoning_content"] == "hm" and chat.messages[3]["name"] == "shell"
    assert [tool.name for tool in chat.offered] == ["shell"] and not chat.parallel_tool_calls


def test_langchains_results_of_tools() -> None:
    sent = [HumanMessage("hello"), AIMessage("", tool_calls=[{"name": "f", "args": {}, "id": "1"}])]
    messages = [*map(_convert_message_to_dict, [*sent, ToolMessage("done", tool_call_id="1", name="f")])]
    assert Chat(read(CHAT, messages=messages)).messages[-1]["name"] == "f"


def test_a_function_call_of_old_is_a_tool_call() -> None:
    body = read(CHAT, **assistant(content=None, function_call={"name": "f", "arguments": '{"a": 1}'}))
    (call,) = Chat(body).messages[1]["tool_calls"]
    assert call["function"] == {"name": "f", "arguments": {"a": 1}}


def test_a_refusal_is_what_was_answered() -> None:
    assert Chat(read(CHAT, **assistant(content=None, refusal="no"))).messages[1]["content"] == "no"


def test_templates_see_of_a_tool_what_they_saw_before() -> None:
    given = FUNCTION | {"description": "d", "strict": True, "return": {"type": "string"}}
    tool = {"type": "function", "function": given, "cache_control": {"type": "ephemeral"}}
    assert Chat(read(CHAT, tools=[tool, TOOL])).tools == [{"type": "function", "function": given}, TOOL]


KNOWN: list[tuple[type[Any], Any, set[str]]] = [
    *[
        (protocol.Message, getattr(openai_types, f"ChatCompletion{role}MessageParam"), {"audio"})
        for role in ("Developer", "System", "User", "Assistant", "Tool", "Function")
    ],
    (protocol.Message, openai_types.ParsedChatCompletionMessage, {"audio"}),
    (protocol.ContentPart, openai_types.ChatCompletionContentPartTextParam, set()),
    (protocol.ContentPart, openai_types.ChatCompletionContentPartRefusalParam, set()),
    (protocol.ToolCall, openai_types.ChatCompletionMessageFunctionToolCallParam, set()),
    (protocol.Tool, openai_types.ChatCompletionFunctionToolParam, set()),
    (protocol.ToolFunction, openai_shared.FunctionDefinition, set()),
    (protocol.NamedTool, openai_types.ChatCompletionNamedToolChoiceParam, set()),
    (protocol.StreamOptions, openai_types.ChatCompletionStreamOptionsParam, set()),
    (protocol.ResponseFormat, openai_shared.ResponseFormatJSONSchema, set()),
    *[
        (anthropic.Block, getattr(types, prefix + name), set())
        for types, prefix in ((anthropic_types, ""), (anthropic_beta, "Beta"))
        for name in (
            *("TextBlockParam", "ThinkingBlockParam", "RedactedThinkingBlockParam", "ToolUseBlockParam"),
            *("ToolResultBlockParam", "TextBlock", "ThinkingBlock", "RedactedThinkingBlock", "ToolUseBlock"),
        )
    ],
    (CHAT, openai_create.CompletionCreateParamsNonStreaming, set()),
    (CHAT, openai_create.CompletionCreateParamsStreaming, set()),
    (protocol.Completion, openai_completion.CompletionCreateParamsStreaming, set()),
    (protocol.Embedding, embedding_create_params.EmbeddingCreateParams, set()),
    (MESSAGES, message_create_params.MessageCreateParamsStreaming, set()),
    (MESSAGES, beta_create.MessageCreateParamsStreaming, set()),
    (anthropic.CountTokens, anthropic_types.MessageCountTokensParams, set()),
    (anthropic.CountTokens, anthropic_beta.MessageCountTokensParams, set()),
    (responses.CreateResponse, response_create_params.ResponseCreateParamsBase, set()),
    *[
        (responses.Item, getattr(response_types, name), set())
        for name in ("EasyInputMessageParam", "ResponseOutputMessageParam", "ResponseFunctionToolCallParam")
    ],
    (responses.Item, response_types.ResponseReasoningItemParam, set()),
    (responses.Item, response_input_param.FunctionCallOutput, set()),
    (responses.TextPart, response_types.ResponseOutputTextParam, set()),
    (responses.TextPart, response_types.ResponseInputTextParam, set()),
    (responses.FunctionTool, response_types.FunctionToolParam, set()),
    (responses.TextFormat, response_types.ResponseFormatTextJSONSchemaConfigParam, set()),
    (responses.ReasoningConfig, openai_shared.Reasoning, set()),
    (anthropic.AnthropicTool, anthropic_beta.BetaToolParam, set()),
    (anthropic.AnthropicToolChoice, anthropic_types.ToolChoiceToolParam, set()),
    (anthropic.ThinkingConfig, anthropic_beta.BetaThinkingConfigEnabledParam, set()),
    (anthropic.OutputConfig, anthropic_beta.BetaOutputConfigParam, set()),
    (anthropic.OutputFormat, anthropic_types.JSONOutputFormatParam, set()),
    (anthropic.AnthropicMessage, anthropic_types.AssistantMessageParam, set()),
]


@pytest.mark.parametrize(("schema", "theirs", "other"), KNOWN)
def test_every_field_of_the_clients_types_is_known(schema: type[Any], theirs: Any, other: set[str]) -> None:
    """Understood, without effect or refused with a sentence of its own. `other`: what a model of text cannot take; null
    is all clients send there."""
    sent = set(getattr(theirs, "model_fields", None) or typing.get_type_hints(theirs))
    known = {field.encode_name for field in msgspec.structs.fields(schema)} | set(schema.OTHER_FIELDS)
    assert sent and sent - known == other & sent
