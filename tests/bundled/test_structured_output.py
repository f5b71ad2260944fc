"""Structured output of the bundled model, which is small enough to run into every gap that a grammar leaves."""

import json

import pytest

from anabranch.llm import LLM, Grammar, SamplingParams

pytest.importorskip("llguidance")

BOOK = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "maxLength": 24},
        "pages": {"type": "integer", "minimum": 1, "maximum": 999},
        "author": {
            "type": "object",
            "properties": {"name": {"type": "string", "maxLength": 12}},
            "required": ["name"],
        },
    },
    "required": ["title", "pages", "author"],
}


def test_every_answer_is_complete_and_has_no_key_of_its_own() -> None:
    """Ten seeds; none of them came to an end while whitespace and keys were free."""
    with LLM() as llm:
        grammar = Grammar(json_schema=json.dumps(BOOK))
        params = [SamplingParams(grammar=grammar, max_tokens=200, seed=seed) for seed in range(10)]
        outputs = llm.generate(["Tell me about a book as JSON: "] * 10, params)
    for output in outputs:
        completion = output.completions[0]
        assert completion.finish_reason == "stop", completion.text
        book = json.loads(completion.text)
        assert list(book) == list(BOOK["properties"]) and list(book["author"]) == ["name"]  # type: ignore[arg-type]
