"""OpenAI's Responses with its own client, on a model whose every word is known beforehand."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import openai
import pydantic
import pytest

from anabranch.server import responses
from anabranch.server.protocol import Message
from anabranch.server.response_events import ResponseOutput
from anabranch.server.responses import CreateResponse, Item, Kept, Responses, TextPart, chat_completion, read_items
from tests.server.serving import NAME, QUICK, Running, running
from tests.server.test_anthropic_api import CONTEXT, CYCLE, SCHEMA, write_speaker

pytestmark = pytest.mark.usefixtures("unharmed")

HELLO = "Where does the river go?"
RENDERED = f"<|user|>{HELLO}\n<|assistant|>"
WEATHER: Any = {"type": "function", "name": "get_weather", "description": "w", "parameters": SCHEMA, "strict": True}
TEXT = (CYCLE * 3)[:30]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    model: Path = write_speaker(tmp_path_factory.mktemp("model") / NAME)
    flags = ("--max-num-seqs", "8", "--num-pages", "600", "--max-model-len", str(CONTEXT))
    with running(model, *flags) as server:
        yield server


@pytest.fixture
def client(server: Running) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=QUICK, max_retries=0) as client:
        yield client


def ask(**options: Any) -> dict[str, Any]:
    return {"model": NAME, "input": HELLO, "max_output_tokens": 30, "temperature": 0, **options}


def shape(response: Any) -> Any:
    """A response without what differs from one time to the next."""
    found = response.model_dump()
    for name in ("id", "created_at", "usage"):
        found.pop(name)
    for item in found["output"]:
        for name in ("id", "call_id", "parsed_arguments"):
            item.pop(name, None)
        for part in item.get("content") or ():
            part.pop("parsed", None)
    return found


def test_a_response(client: Any) -> None:
    answer = client.responses.create(**ask(metadata={"a": "b"}))
    assert answer.output_text == TEXT and answer.id.startswith("resp_") and answer.model == NAME
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert answer.usage.input_tokens == len(RENDERED) and answer.usage.output_tokens == 30
    assert answer.metadata == {"a": "b"} and answer.error is None
    system = client.responses.create(**ask(instructions="Be brief.", max_output_tokens=1))
    assert system.usage.input_tokens == len("<|system|>Be brief.\n" + RENDERED)


def test_a_stream_is_the_response_in_pieces(client: Any) -> None:
    """Long enough to come in pieces, however fast the engine is."""
    options = ask(extra_body={"chat_template_kwargs": {"enable_thinking": True}}, max_output_tokens=330)
    whole = client.responses.create(**options)
    assert [item.type for item in whole.output] == ["reasoning", "message"]
    assert whole.output[0].content[0].text == "Hum" and whole.output_text == (CYCLE * 30)[len(CYCLE) : 330]
    events = list(client.responses.create(**options, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    names = [event.type.removeprefix("response.") for event in events]
    squeezed = [name for number, name in enumerate(names) if number == 0 or names[number - 1] != name]
    begins, ends = ["output_item.added", "content_part.added"], ["content_part.done", "output_item.done"]
    assert squeezed == [
        *("created", "in_progress"),
        *(*begins, "reasoning_text.delta", "reasoning_text.done", *ends),
        *(*begins, "output_text.delta", "output_text.done", *ends),
        "incomplete",
    ]
    assert names.count("output_text.delta") > 10, "it comes as it grows"
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text
    assert shape(events[-1].response) == shape(whole)


def test_a_conversation_goes_on_by_its_id(client: Any) -> None:
    first = client.responses.create(**ask(instructions="Be brief."))
    second = client.responses.create(**ask(input="And?", previous_response_id=first.id))
    rendered = f"{RENDERED}{TEXT}\n<|user|>And?\n<|assistant|>"
    assert second.usage.input_tokens == len(rendered), "instructions are those of one request"
    assert second.previous_response_id == first.id
    asked = ask(input="So?", previous_response_id=second.id, max_output_tokens=3, stream=True)
    third = list(client.responses.create(**asked))[-1].response
    assert third.usage.input_tokens == len(f"{rendered}{second.output_text}\n<|user|>So?\n<|assistant|>")
    assert client.responses.retrieve(third.id).output_text == third.output_text
    # The same by hand, as clients do it that keep the items themselves.
    items = [{"role": "user", "content": HELLO}, *first.output, {"role": "user", "content": "And?"}]
    mine = client.responses.create(**ask(input=items, store=False, include=["reasoning.encrypted_content"]))
    assert mine.usage.input_tokens == len(rendered) and mine.output_text == second.output_text
    for id in (mine.id, "resp_x"):
        with pytest.raises(openai.BadRequestError) as caught:
            client.responses.create(**ask(previous_response_id=id))
        assert (caught.value.code, caught.value.param) == ("previous_response_not_found", "previous_response_id")
    client.responses.delete(third.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(third.id)


def test_tools(client: Any) -> None:
    options = ask(tools=[{"type": "web_search"}, WEATHER], tool_choice="required", parallel_tool_calls=False)
    options |= {"max_output_tokens": 300}
    answer = client.responses.create(**options)
    *thoughts, call = answer.output
    assert all(item.type == "reasoning" for item in thoughts)
    assert (call.type, call.name) == ("function_call", "get_weather")
    assert call.status == answer.status == "completed"
    assert json.loads(call.arguments)["city"] in ("Basel", "Bern")
    named = client.responses.create(**options | {"tool_choice": {"type": "function", "name": "get_weather"}})
    assert named.output[-1].name == "get_weather"
    with client.responses.stream(**options) as stream:
        events = list(stream)
        final = stream.get_final_response()
    deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert "".join(deltas) == call.arguments and shape(final)["output"] == shape(answer)["output"]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    items = [{"role": "user", "content": HELLO}, *answer.output, result]
    first = client.responses.create(**ask(input=items, tools=[WEATHER]))
    second = client.responses.create(**ask(input=[result], previous_response_id=answer.id, tools=[WEATHER]))
    assert first.usage.input_tokens == second.usage.input_tokens and first.output_text == second.output_text == TEXT


class Trip(pydantic.BaseModel):
    city: Literal["Basel", "Bern"]
    days: Literal[1, 2]


def test_structured_output(client: Any) -> None:
    answer = client.responses.parse(**ask(max_output_tokens=100), text_format=Trip)
    assert isinstance(answer.output_parsed, Trip) and answer.status == "completed"
    with client.responses.stream(**ask(max_output_tokens=100), text_format=Trip) as stream:
        assert stream.until_done().get_final_response().output_parsed == answer.output_parsed


def test_what_is_refused(server: Running) -> None:
    image = {"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}
    cases: list[tuple[dict[str, Any], str]] = [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": [image]}, "input[0].content[0]"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input[0]"),
        ({"input": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
        ({"background": True}, "background"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temprature": 1}, "temprature"),
        ({"conversation": "x"}, "conversation"),
        ({"tools": [{"type": "custom", "name": "f"}]}, "tools[0]"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0]"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
    ]
    for fields, param in cases:
        for stream in (False, True):
            answer = server.post("/v1/responses", ask(stream=stream) | fields)
            assert answer.status_code == 400, answer.text
            assert answer.json()["error"]["param"] == param, answer.text


def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(responses, "MAX_KEPT", 3)
    monkeypatch.setattr(responses, "MAX_KEPT_BYTES", 100)
    kept = Responses()
    for number in range(4):
        kept.add(Kept({"id": str(number)}, [], 10))
        if number == 2:
            kept.get("0")
    assert [*kept.kept] == ["2", "0", "3"] and kept.num_bytes == 30
    kept.add(Kept({"id": "large"}, [], 85))
    assert [*kept.kept] == ["3", "large"] and kept.num_bytes == 95
    kept.add(Kept({"id": "too large"}, [], 101))
    assert not kept.kept and not kept.num_bytes


def answered(id: str, **item: Any) -> dict[str, Any]:
    return {"id": id, "output": [{"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}", **item}]}


def test_a_conversations_earlier_messages_count() -> None:
    kept, earlier, asked = Responses(), Kept({}, [], 0), []
    for number in range(20):
        asked = [*earlier.messages, Message(role="user", content="x" * 1000)]
        kept.keep(answered(str(number)), asked, earlier, 1000)
        earlier = kept.get(str(number))
        kept.remove(str(number))  # what a client forgets of it frees nothing
    assert earlier.num_bytes > 20 * 1000 and len(earlier.messages) == 40


def test_an_answer_that_no_client_could_send_back_is_not_kept() -> None:
    kept = Responses()
    kept.keep(answered("a", name="f" * 600), [], Kept({}, [], 0), 1)
    assert not kept.kept


def test_one_message_of_the_system() -> None:
    """Codex sends instructions and a message of the developer; many templates take one message of the system."""
    body = CreateResponse(instructions="i", input="x")
    asked = [Message(role="developer", content="d"), Message(role="user", content="u")]
    found = chat_completion(body, asked).messages or []
    assert [(message.role, message.content) for message in found] == [("system", "i\n\nd"), ("user", "u")]


def test_an_error_in_a_stream_is_an_event() -> None:
    output = ResponseOutput({"id": "a", "output": []})
    events = output.fail({"message": "gone", "type": "server_error", "code": None})
    assert [event["type"] for event in events] == ["response.created", "response.in_progress", "response.failed"]
    failed = events[-1]["response"]
    assert (failed["status"], failed["error"]) == ("failed", {"code": "server_error", "message": "gone"})


def test_items_of_one_turn_are_one_message() -> None:
    thought = [TextPart(type="reasoning_text", text="hm")]
    call = {"name": "f", "arguments": "{}"}
    read = read_items(
        [
            Item(role="developer", content="d"),
            Item(type="reasoning", summary=[], content=thought),
            Item(type="reasoning", summary=[TextPart(type="summary_text", text="so")]),
            Item(role="assistant", content="a"),
            Item(type="function_call", call_id="1", **call),
            Item(type="function_call", call_id="2", **call),
            Item(type="function_call_output", call_id="1", output="x"),
            Item(type="function_call_output", call_id="2", output=[TextPart(type="input_text", text="y")]),
            Item(type="reasoning", summary=thought),
            Item(role="assistant", content="b"),
        ]
    )
    assert [message.role for message in read] == ["developer", "assistant", "tool", "tool", "assistant"]
    assert (read[1].reasoning_content, read[1].content) == ("hm\nso", "a")
    assert [one.id for one in read[1].tool_calls or []] == ["1", "2"]
    assert [(message.content, message.tool_call_id) for message in read[2:4]] == [("x", "1"), ("y", "2")]
    assert (read[4].reasoning_content, read[4].content) == ("hm", "b")
