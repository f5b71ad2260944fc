"""llama-index's OpenAILike."""

from typing import Annotated, Any, Literal

import openai
from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel, Field

from tests.clients import harness
from tests.clients.harness import EXPECTED, MODEL, NUM_PROMPT_TOKENS, NUM_TOKENS, PROMPT, URL

USER = [ChatMessage(role="user", content=PROMPT)]


class Person(BaseModel):
    name: Annotated[str, Field(max_length=8)]
    age: Annotated[int, Field(ge=0, le=99)]


def get_weather(city: Literal["Paris", "Oslo"]) -> str:
    """The weather of a city"""
    return f"rain in {city}"


def llm(model: str = MODEL, max_tokens: int = NUM_TOKENS, **options: Any) -> OpenAILike:
    flags = {"is_chat_model": True, "is_function_calling_model": True, "context_window": 1024, "max_retries": 0}
    given = {"api_base": f"{URL}/v1", "api_key": "none", "temperature": 0, **flags}
    return OpenAILike(model=model, max_tokens=max_tokens, **given | options)


def chat() -> None:
    assert llm().chat(USER).message.content == EXPECTED
    assert llm().complete(PROMPT).text == EXPECTED


def stream() -> None:
    deltas = [answer.delta for answer in llm().stream_chat(USER)]
    assert "".join(filter(None, deltas)) == EXPECTED, deltas


def tools() -> None:
    tool = FunctionTool.from_defaults(get_weather)
    model = llm(max_tokens=harness.CALL_TOKENS)
    answer = model.chat_with_tools([tool], chat_history=USER, tool_required=True)
    call, *_ = model.get_tool_calls_from_response(answer)
    harness.check_call(call.tool_name, call.tool_kwargs)
    result = ChatMessage(role="tool", content="rain", additional_kwargs={"tool_call_id": call.tool_id})
    assert llm(max_tokens=8).chat([*USER, answer.message, result]).message.content


def structured() -> None:
    model = llm(max_tokens=harness.CALL_TOKENS, should_use_structured_outputs=True)
    person = model.structured_predict(Person, PromptTemplate(PROMPT))
    harness.check_person(person.name, person.age)


def errors() -> None:
    harness.refused(lambda: llm("no-such-model").chat(USER), openai.NotFoundError)
    long = [ChatMessage(role="user", content=harness.LONG)]
    error = harness.refused(lambda: llm().chat(long), openai.BadRequestError)
    assert isinstance(error, openai.BadRequestError) and error.code == "context_length_exceeded", error


def abort() -> None:
    def leave() -> None:
        answer = llm(max_tokens=harness.MANY_TOKENS, api_base=f"{harness.ENDLESS}/v1").stream_chat(USER)
        next(part for part in answer if part.delta)
        answer.close()  # the generators inside are not closed with it, but collected

    harness.check_abort(leave)


def usage() -> None:
    found = llm().chat(USER).raw.usage
    assert (found.prompt_tokens, found.completion_tokens) == (NUM_PROMPT_TOKENS, NUM_TOKENS), found


harness.run(
    "llama-index-llms-openai-like",
    {"llama-index, OpenAILike": harness.named(chat, stream, tools, structured, errors, abort, usage)},
)
