"""instructor, which asks for objects: by a tool, by JSON, and by a JSON schema."""

from __future__ import annotations

from typing import Annotated, Any

import instructor
import openai
from instructor.core import IncompleteOutputException, InstructorRetryException
from pydantic import BaseModel, Field

from tests.clients import harness
from tests.clients.harness import MODEL, PROMPT, URL


class Person(BaseModel):
    name: Annotated[str, Field(max_length=8)]
    age: Annotated[int, Field(ge=0, le=99)]


def cases(mode: instructor.Mode) -> dict[str, harness.Case]:
    client = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
    patched: Any = instructor.from_openai(client, mode=mode)

    def ask(content: str = PROMPT, **options: Any) -> Any:
        messages = [{"role": "user", "content": content}]
        given = {"model": MODEL, "messages": messages, "max_tokens": harness.CALL_TOKENS, "temperature": 0}
        return patched.chat.completions.create_with_completion(response_model=Person, max_retries=0, **given | options)

    def structured() -> None:
        person, completion = ask()
        harness.check_person(person.name, person.age)
        assert completion.usage.completion_tokens <= harness.CALL_TOKENS

    def stream() -> None:
        messages = [{"role": "user", "content": PROMPT}]
        given: dict[str, Any] = {"model": MODEL, "messages": messages, "max_tokens": harness.CALL_TOKENS}
        partial = list(patched.chat.completions.create_partial(response_model=Person, temperature=0, **given))
        harness.check_person(partial[-1].name, partial[-1].age)

    def errors() -> None:
        for options in ({"model": "no-such-model"}, {"content": harness.LONG}):
            error = harness.refused(lambda o=options: ask(**o), InstructorRetryException, openai.APIStatusError)  # type: ignore[misc]
            assert "no-such-model" in str(error) or "maximum context length" in str(error), error

    return harness.named(structured, stream, errors)


def free(cases: dict[str, harness.Case]) -> dict[str, harness.Case]:
    """JSON mode binds the answer to an object alone, and the model does not know the schema: it is asked, and fails
    instructor's own check."""
    ask = cases["structured"]

    def structured() -> None:
        harness.refused(ask, IncompleteOutputException, InstructorRetryException)

    return {"structured": structured, "errors": cases["errors"]}


harness.run(
    "instructor",
    {
        "instructor, tools": cases(instructor.Mode.TOOLS),
        "instructor, JSON": free(cases(instructor.Mode.JSON)),
        "instructor, JSON schema": cases(instructor.Mode.JSON_SCHEMA),
    },
)
