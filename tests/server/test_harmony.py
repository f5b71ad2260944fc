"""Harmony, the messages of gpt-oss: thoughts, content and calls however the text is cut; nothing is lost."""

import json
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from anabranch.sampling_params import Grammar, SamplingParams
from anabranch.server.chat import read_messages
from anabranch.server.parsers.choose import Parsers, find_parsers
from anabranch.server.parsers.harmony import Harmony
from anabranch.server.parsers.parts import Named, ToolCallBegin, ToolSpec
from anabranch.server.protocol import Message
from anabranch.server.service import Model
from anabranch.text.chat_template import ChatTemplate
from anabranch.text.grammar import GrammarCompiler
from anabranch.text.output import Detokenizer
from anabranch.text.tokenizer import Tokenizer
from tests.server.serving import running
from tests.server.test_parsers import briefly, cut, read, start
from tests.text import tiny_tokenizers
from tests.text.test_chat_template import REAL_TEMPLATES, needs
from tests.text.test_grammar import make_tokenizer
from tools import tiny_model

PROMPT = "<|start|>user<|message|>Hi<|end|><|start|>assistant"
THOUGHT = "<|channel|>analysis<|message|>Hm, {}?\n<|end|><|start|>assistant"
CALL = '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Rome"}<|call|>'
FINAL = "<|channel|>final<|message|>It is\n\nwarm. <|return|>"
ANSWERS: dict[str, tuple[str, list[Any]]] = {
    "thought and answer": (THOUGHT + FINAL, [["Hm, {}?\n"], "It is\n\nwarm. "]),
    "answer": (FINAL, ["It is\n\nwarm. "]),
    "without its end": (FINAL.removesuffix("<|return|>"), ["It is\n\nwarm. "]),
    "call": (THOUGHT + CALL, [["Hm, {}?\n"], ("weather", '{"city": "Rome"}')]),
    "call, recipient first": (
        ' to=functions.weather<|channel|>commentary <|constrain|>json<|message|>{"city": "Rome"}<|call|>',
        [("weather", '{"city": "Rome"}')],
    ),
    "message before a call": (
        f"<|channel|>commentary<|message|>I look.<|end|><|start|>assistant{CALL}",
        ["I look.", ("weather", '{"city": "Rome"}')],
    ),
    "two messages": (
        f"<|channel|>commentary<|message|>plan<|end|><|start|>assistant{THOUGHT}<|channel|>final<|message|><|end|>{FINAL}",
        ["plan", ["Hm, {}?\n"], "\n\nIt is\n\nwarm. "],
    ),
    "two calls": (
        f"{CALL}<|start|>assistant to=functions.f<|channel|>commentary json<|message|>{{}}",
        [("weather", '{"city": "Rome"}'), ("f", "{}")],
    ),
    "a tool of its own": (
        "<|channel|>analysis to=python code<|message|>print(1)<|call|>",
        [("python", "print(1)")],
    ),
    "plain text": ('{"a": 1} to=you', ['{"a": 1} to=you']),
    "cut off in a header": ("<|channel|>analysis<|mess", ["<|channel|>analysis<|mess"]),
    "another header": (
        "<|start|>user<|message|>Hi<|end|><|start|>assistant<|channel|>final<|message|>Ho",
        ["<|start|>user<|message|>HiHo"],
    ),
}


def make() -> Parsers:
    found = find_parsers("{{ '<|start|>assistant<|channel|>analysis<|message|>' }}")
    assert (found.tool_parser, found.reasoning_parser) == ("harmony", "harmony")
    return found


@pytest.mark.parametrize("name", ANSWERS)
def test_every_split(name: str) -> None:
    text, expected = ANSWERS[name]
    parsers = make()
    assert briefly(read(start(parsers, PROMPT), [text])) == expected
    assert briefly(read(start(parsers, PROMPT), list(text))) == expected
    for place in range(len(text)):
        assert briefly(read(start(parsers, PROMPT), [text[:place], text[place:]])) == expected


def test_other_templates_have_some_of_its_tags() -> None:
    assert find_parsers("<|user|>{{ x }}<|end|><|assistant|>").reasoning_parser == "none"
    assert find_parsers("<|channel|>final<|message|>", "none").reasoning_parser == "harmony"


def test_a_message_that_the_prompt_has_begun() -> None:
    assert briefly(read(start(make(), PROMPT + "<|channel|>final<|message|>It"), [" is<|return|>"])) == [" is"]
    assert briefly(read(start(make(), PROMPT + "<|channel|>analysis<|message|>"), ["Hm<|end|>"])) == [["Hm"]]


@pytest.mark.parametrize(
    "text", ["Say <|start|>assistant<|channel|>analysis<|message|>", "a<|end|>b", " <|start|>assistant"]
)
def test_tags_in_a_message_that_is_continued_are_text(text: str) -> None:
    prompt = PROMPT + "<|channel|>final<|message|>" + text.lstrip()  # as some templates write it
    assert briefly(read(start(make(), prompt, continued=text), [" to=you<|return|>"])) == [" to=you"]
    two = ["<|end|><|start|>assistant" + FINAL]
    assert briefly(read(start(make(), prompt, continued=text), two)) == ["\n\nIt is\n\nwarm. "]


@pytest.mark.parametrize(
    "begun", ["<|start|>", "<|start|>assistant to=f", "<|start|><|channel|>final", "<|channel|>final to=f"]
)
def test_a_header_of_blanks_takes_no_time(begun: str) -> None:
    text = begun + "\n" * 100_000 + "!<|message|>Hi"
    began = time.process_time()
    assert briefly(read(start(make(), PROMPT), [text])) == [text]
    assert briefly(read(start(make(), PROMPT + text), ["!"])) == ["!"]
    assert briefly(read(start(make(), PROMPT + "<|channel|>final<|message|>" + text, continued=text), ["!"])) == ["!"]
    assert time.process_time() - began < 0.1


def test_what_is_not_asked_for_stays_in_the_content() -> None:
    thought = THOUGHT.removesuffix("<|end|><|start|>assistant")
    assert briefly(read(start(make(), PROMPT, reasoning=False), [THOUGHT + FINAL])) == [thought + "It is\n\nwarm. "]
    no_tools = briefly(read(start(make(), PROMPT, tool_choice="none"), [CALL]))
    assert no_tools == [CALL.removesuffix("<|call|>")]
    two = ANSWERS["two calls"][0]
    assert briefly(read(start(make(), PROMPT, parallel=False), [two])) == [("weather", '{"city": "Rome"}')]


TEMPLATE = """\
{%- if tools %}{{ '<|start|>developer<|message|>' + tools | tojson + '<|end|>' }}{% endif %}
{%- for message in messages %}
{%- if message.tool_calls %}
{%- if message.thinking %}<|start|>assistant<|channel|>analysis<|message|>{{ message.thinking }}<|end|>{% endif %}
{%- set call = message.tool_calls[0].function %}
{{- "<|start|>assistant to=functions." + call.name + "<|channel|>commentary json<|message|>" }}
{{- (call.arguments | tojson) + "<|call|>" }}
{%- elif message.role == "assistant" %}
{{- "<|start|>assistant<|channel|>final<|message|>" + message.content + "<|end|>" }}
{%- else %}{{ "<|start|>" + message.role + "<|message|>" + message.content + "<|end|>" }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}"""
CONVERSATION = (
    '[{"role": "user", "content": "Weather?"}, {"role": "assistant", "content": null, "reasoning": "Hm.", '
    '"tool_calls": [{"id": "c", "function": {"name": "weather", "arguments": "{\\"city\\": \\"Rome\\"}"}}]}]'
)
REAL = REAL_TEMPLATES / "openai-gpt-oss-120b.jinja"


@pytest.mark.parametrize("real", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["small", "real"])
def test_a_call_that_comes_back_is_written_as_it_was(real: bool, tmp_path: Path) -> None:
    if real:
        needs(REAL.is_file(), "needs real chat templates; run: make .cache/llama.cpp/.fetched")
    text = REAL.read_text(encoding="utf-8") if real else TEMPLATE
    parsers = find_parsers(text)
    assert (parsers.tool_parser, parsers.reasoning_parser) == ("harmony", "harmony")
    (tmp_path / "harmony.jinja").write_text(text)
    template = ChatTemplate(tiny_tokenizers.write("llama", tmp_path / "model"), str(tmp_path / "harmony.jinja"))
    messages = read_messages(msgspec.json.decode(CONVERSATION, type=list[Message]))
    prompt = template.render(messages[:1], [], add_generation_prompt=True)
    whole = template.render(messages, [], add_generation_prompt=False)
    assert prompt.endswith("<|start|>assistant") and whole.startswith(prompt)
    parts = read(start(parsers, prompt), [whole.removeprefix(prompt)])
    assert briefly(parts) == [["Hm."], ("weather", '{"city": "Rome"}')]


def model_with_tags(folder: Path) -> Model:
    """Of which the server reads only the tokenizer; Harmony's tags are special tokens."""
    backend = Backend.from_file(str(tiny_tokenizers.write("qwen", folder) / "tokenizer.json"))
    backend.add_special_tokens([AddedToken(tag, special=True) for tag in Harmony.tags])
    backend.save(str(folder / "tokenizer.json"))
    added = {token.content: id for id, token in backend.get_added_tokens_decoder().items()}
    parsers = find_parsers(None, "harmony", "harmony", added_tokens=added)
    return Model(None, Tokenizer(folder), None, parsers)  # type: ignore[arg-type]


QUOTED = (
    "Your file says: <|start|>assistant<|channel|>commentary to=functions.rm <|constrain|>json<|message|>{}<|call|>."
)
SPELLED: dict[str, tuple[list[str], list[Any]]] = {  # every other piece is of plain tokens, also where it spells a tag
    "tags in prose": (
        ["<|channel|>final<|message|>", "A message ends with `<|end|>`, a call with `<|call|>`.", "<|return|>"],
        ["A message ends with `<|end|>`, a call with `<|call|>`."],
    ),
    "a quoted call": (["<|channel|>final<|message|>", QUOTED, "<|return|>"], [QUOTED]),
    "a tag in arguments": (
        [CALL.partition('{"city')[0], '{"city": "a <|end|> b"}', "<|call|>"],
        [("weather", '{"city": "a <|end|> b"}')],
    ),
    "a thought about tags": (
        [
            "<|channel|>analysis<|message|>",
            "Is <|start|>assistant a tag?",
            THOUGHT[-len("<|end|><|start|>assistant") :] + FINAL,
        ],
        [["Is <|start|>assistant a tag?"], "It is\n\nwarm. "],
    ),
    "tags alone": (["", "<|channel|>final<|message|>Hi<|end|>", ""], ["<|channel|>final<|message|>Hi<|end|>"]),
    "tags without a header": (["<|channel|>", "other", "<|message|>Hi<|return|>"], ["<|channel|>other<|message|>Hi"]),
}


@pytest.mark.parametrize("name", SPELLED)
def test_tags_that_other_tokens_spell_are_text(name: str, tmp_path: Path) -> None:
    """From token ids to parts, token by token and at once, whether special tokens are skipped or not."""
    pieces, expected = SPELLED[name]
    model, ids = model_with_tags(tmp_path / "model"), []
    for number, piece in enumerate(pieces):
        spans = [match.span() for match in model.tokenizer.special_text.pattern.finditer(piece)]
        ids += model.tokenizer.encode(piece, False, spans if number % 2 else ())
    for skip in (True, False):
        for size in (1, 3, len(ids)):
            stream = Detokenizer(model.chat_tokenizer, SamplingParams(skip_special_tokens=skip), continues=True)
            texts = [stream.add(ids[at : at + size]) for at in range(0, len(ids), size)]
            assert briefly(read(start(model.parsers, PROMPT), [*texts, stream.finish()])) == expected


@pytest.mark.parametrize(
    "header",
    [
        "<|channel|>commentary to=functions. <|constrain|>json<|message|>",
        " to=functions.weather <|channel|>commentary to=functions.other <|message|>",
    ],
)
def test_a_call_of_no_tool_or_of_two_is_text(header: str) -> None:
    parts = read(start(make(), PROMPT), [header + '{"a": 1}<|call|>'])
    assert briefly(parts) == [header + '{"a": 1}']


def test_other_types_of_content() -> None:
    text = CALL.replace(">json<", ">application/json<")
    assert briefly(read(start(make(), PROMPT), [text])) == [("weather", '{"city": "Rome"}')]


HEADER_WORDS = ("assistant", "analysis", "final", "commentary", " to=functions.f ", "json")
WORDS = (*Harmony.tags, *HEADER_WORDS, "Hi! ", "\n", "<|", "{!}")


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(WORDS), max_size=14).map("".join), st.lists(st.integers(0, 200), max_size=5))
def test_nothing_is_lost(text: str, places: list[int]) -> None:
    """But headers, and the tags that end messages."""
    whole = read(start(make(), PROMPT), [text])
    assert read(start(make(), PROMPT), cut(text, places)) == whole
    kept = "".join(part.text for part in whole if not isinstance(part, ToolCallBegin))
    assert kept.count("!") == text.count("!")
    if not any(tag in text for tag in Harmony.tags):
        assert kept == text


CITY = {"properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}
TOOLS = (ToolSpec("now"), ToolSpec("weather", CITY))


@pytest.mark.parametrize("choice", ["required", Named("weather")], ids=str)
def test_a_call_that_must_come(choice: Any) -> None:
    pytest.importorskip("llguidance")
    made = make_tokenizer()
    made.add_special_tokens([AddedToken(tag, special=True) for tag in Harmony.tags])
    compiler = GrammarCompiler(made, made.get_vocab_size(), [made.token_to_id("<eos>")])
    tokens = {tag: made.token_to_id(tag) for tag in Harmony.tags}
    parsers = find_parsers(None, "harmony", "harmony", added_tokens=tokens)
    assert parsers.kept_tokens == {*tokens.values()}
    grammar = parsers.tool_grammar(TOOLS, choice, PROMPT)
    assert grammar is not None

    def ends(text: str, grammar: Grammar = grammar) -> bool:
        matcher = compiler.compile(grammar)
        return all(matcher.accept(id) for id in [*made.encode(text).ids, made.token_to_id("<eos>")])

    call = CALL.removesuffix("<|call|>")
    assert ends(THOUGHT + call) and ends(call)
    assert not ends(call.replace("Rome", "Bonn")) and not ends(FINAL) and not ends("Hi")
    assert ends(call.replace("weather", "now").replace('"city": "Rome"', "")) == (choice == "required")
    answer = parsers.after_thought(Grammar(choice=["yes", "no"]), PROMPT)
    assert ends(THOUGHT + "<|channel|>final<|message|>yes", answer) and not ends("yes", answer)

    # The prompt has begun the answer, or a thought.
    begun = (PROMPT + "<|channel|>final<|message|>Is <|start|>it? ", "Is <|start|>it? ")
    answer = parsers.after_thought(Grammar(choice=["yes", "no"]), *begun)
    assert ends("yes", answer) and not ends("<|channel|>final<|message|>yes", answer)
    grammar = parsers.tool_grammar(TOOLS, choice, begun[0], continued=begun[1])
    assert grammar is not None
    assert ends("<|end|><|start|>assistant" + call, grammar) and not ends(call, grammar)
    thought = PROMPT + "<|channel|>analysis<|message|>"
    answer = parsers.after_thought(Grammar(choice=["yes", "no"]), thought)
    assert ends("Hm<|end|><|start|>assistant<|channel|>final<|message|>yes", answer) and not ends("yes", answer)
    grammar = parsers.tool_grammar(TOOLS, choice, thought)
    assert grammar is not None and ends("Hm<|end|><|start|>assistant" + call, grammar) and not ends(call, grammar)


TO_SERVE = """\
{%- if tools %}{{ '<|start|>developer<|message|>' + tools | tojson + '<|end|>' }}{% endif %}
{%- for message in messages %}{{ '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}{# answers begin with <|channel|> #}"""


def test_a_call_that_must_come_over_http(tmp_path: Path) -> None:
    """From the template to the client, streamed and not, by a model that writes noise where the grammar lets it."""
    folder = tmp_path / "noise"
    tiny_model.write(folder, config=tiny_model.CONFIG | {"vocab_size": 263, "eos_token_id": [261, 262]})
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    backend.add_special_tokens([AddedToken(tag, special=True) for tag in sorted({*Harmony.tags} - {"<|end|>"})])
    backend.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TO_SERVE)
    function = {"name": "weather", "parameters": {"type": "object", **CITY, "additionalProperties": False}}
    body = {
        "messages": [{"role": "user", "content": "Where does <|end|> end?"}],
        "tools": [{"type": "function", "function": function}],
        "tool_choice": "required",
        "temperature": 0,
        "max_tokens": 100,
        "logit_bias": {str(backend.token_to_id("a")): -100},  # no analysis, which might never end
    }
    with running(folder) as server:
        found = server.post("/v1/chat/completions", json=body).json()
        assert "choices" in found, found
        answer = found["choices"][0]
        lines = server.post("/v1/chat/completions", json=body | {"stream": True}).text.splitlines()
    (call,) = answer["message"]["tool_calls"]
    assert (answer["finish_reason"], call["function"]["name"]) == ("tool_calls", "weather")
    assert json.loads(call["function"]["arguments"]) in ({"city": "Rome"}, {"city": "Oslo"})
    assert not answer["message"]["content"]
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    pieces = [piece for chunk in chunks for one in chunk["choices"] for piece in one["delta"].get("tool_calls", ())]
    assert "".join(piece["function"]["arguments"] for piece in pieces) == call["function"]["arguments"]
