"""pydantic-ai, in three dialects. It asks for an output by a tool that must be called: that is the case `tools`."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field
from pydantic_ai import Agent, ModelHTTPError, NativeOutput
from pydantic_ai.models import Model
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

from tests.clients import harness
from tests.clients.harness import EXPECTED, MODEL, NUM_PROMPT_TOKENS, NUM_TOKENS, PROMPT, URL


class GetWeather(BaseModel):
    city: Literal["Paris", "Oslo"]


class Person(BaseModel):
    name: Annotated[str, Field(max_length=8)]
    age: Annotated[int, Field(ge=0, le=99)]


def cases(make: Any) -> dict[str, harness.Case]:
    def agent(name: str = MODEL, max_tokens: int = NUM_TOKENS, url: str = URL, **options: Any) -> Agent[None, Any]:
        model: Model = make(name, url)
        return Agent(model, retries=0, model_settings={"temperature": 0, "max_tokens": max_tokens}, **options)

    def chat() -> None:
        assert agent().run_sync(PROMPT).output == EXPECTED

    async def streamed() -> None:
        async with agent().run_stream(PROMPT) as answer:
            texts = [text async for text in answer.stream_text(delta=True, debounce_by=None)]
            assert "".join(texts) == EXPECTED and len(texts) > 3, texts
            found = answer.usage
            assert (found.input_tokens, found.output_tokens) == (NUM_PROMPT_TOKENS, NUM_TOKENS), found

    def tools() -> None:
        wanted = agent(max_tokens=harness.CALL_TOKENS, output_type=GetWeather)
        answer = wanted.run_sync(PROMPT)
        assert answer.output.city in harness.CITIES, answer.output
        assert agent(max_tokens=8).run_sync("And then?", message_history=answer.all_messages()).output

    def structured() -> None:
        output = agent(max_tokens=harness.SCHEMA_TOKENS, output_type=NativeOutput(Person)).run_sync(PROMPT).output
        harness.check_person(output.name, output.age)

    def errors() -> None:
        error = harness.refused(lambda: agent("no-such-model").run_sync(PROMPT), ModelHTTPError)
        assert isinstance(error, ModelHTTPError) and error.status_code == 404, error
        error = harness.refused(lambda: agent().run_sync(harness.LONG), ModelHTTPError)
        assert isinstance(error, ModelHTTPError) and error.status_code == 400, error

    async def left() -> None:
        async with agent(max_tokens=harness.MANY_TOKENS, url=harness.ENDLESS).run_stream(PROMPT) as answer:
            async for _ in answer.stream_text(delta=True, debounce_by=None):
                await answer.cancel()
                break

    def usage() -> None:
        found = agent().run_sync(PROMPT).usage
        assert (found.input_tokens, found.output_tokens) == (NUM_PROMPT_TOKENS, NUM_TOKENS), found

    def stream() -> None:
        asyncio.run(streamed())

    def abort() -> None:
        harness.check_abort(lambda: asyncio.run(left()))

    return harness.named(chat, stream, tools, structured, errors, abort, usage)


def openai(url: str) -> OpenAIProvider:
    return OpenAIProvider(base_url=f"{url}/v1", api_key="none")


def anthropic(url: str) -> AnthropicProvider:
    return AnthropicProvider(base_url=url, api_key="none")


messages = cases(lambda name, url: AnthropicModel(name, provider=anthropic(url)))
del messages["structured"]  # it knows by their names which models can, and asks the others by a tool
harness.run(
    "pydantic-ai-slim",
    {
        "pydantic-ai, chat": cases(lambda name, url: OpenAIChatModel(name, provider=openai(url))),
        "pydantic-ai, responses": cases(lambda name, url: OpenAIResponsesModel(name, provider=openai(url))),
        "pydantic-ai, Anthropic": messages,
    },
)
