"""Where a call must come: whatever the logits say, the output is one, in the model's notation and by the schema."""

import json
import random
import re
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer

from anabranch.sampling_params import Grammar
from anabranch.server.parsers.choose import Parsers, find_parsers
from anabranch.server.parsers.parts import Named, ToolChoice, ToolSpec
from anabranch.text.grammar import GrammarCompiler, Matcher
from tests.server.notations import WRITERS
from tests.server.test_parsers import calls_of, content_of, read, reasoning_of, start
from tests.text.test_grammar import make_tokenizer

pytest.importorskip("llguidance")

TAGS = ("<tool_call>", "</tool_call>", "<think>", "</think>", "<|tool_call>", "<tool_call|>", '<|"|>', "<|channel>")
TAGS += ("<channel|>", "<|tool_response>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]")
TAGS += ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<minimax:tool_call>", "</minimax:tool_call>")
TAGS += (
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
)
TAGS += ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_end|>")
TAGS += ("<|tool_call_argument_begin|>",)
MISTRAL = {"mistral": "[TOOL_CALLS]", "mistral, by name": "[TOOL_CALLS] [ARGS]"}
MISTRAL["mistral, with ids"] = "[TOOL_CALLS] [CALL_ID] [ARGS]"
TEMPLATES = MISTRAL | {"deepseek, fenced": "```json", "glm45, without line breaks": "</arg_key><arg_value>"}

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "minLength": 1, "maxLength": 8},
        "unit": {"enum": ["C", "Fé", None, 7]},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
        "hours": {"type": "array", "items": {"type": "number", "minimum": 0, "maximum": 24}, "maxItems": 2},
        "place": {"$ref": "#/$defs/place"},
        "exact": {"type": ["boolean", "null"]},
    },
    "required": ["city", "days", "place"],
    "additionalProperties": False,
    "$defs": {
        "place": {
            "type": "object",
            "properties": {
                "within": {"anyOf": [{"$ref": "#/$defs/place"}, {"type": "null"}]},
                "kind": {"type": "string", "pattern": "^[a-z]{2,4}$"},
            },
            "required": ["kind"],
            "additionalProperties": False,
        }
    },
}
TRAVEL = ToolSpec(
    "go.to-x", {"properties": {"why": {"type": "string", "maxLength": 20}}, "additionalProperties": False}
)
TOOLS = (ToolSpec("weather", WEATHER), ToolSpec("now"), TRAVEL)


def fits(name: str, arguments: dict[str, Any]) -> bool:
    if name == "now":
        return arguments == {}
    if name == "go.to-x":
        return isinstance(arguments.get("why", ""), str)
    return (
        set(arguments) <= set(WEATHER["properties"])
        and 1 <= len(arguments["city"]) <= 8
        and arguments.get("unit") in ("C", "Fé", None, 7)
        and type(arguments["days"]) is int
        and 1 <= arguments["days"] <= 14
        and len(arguments.get("hours", [])) <= 2
        and all(0 <= hour <= 24 for hour in arguments.get("hours", []))
        and is_place(arguments["place"])
        and arguments.get("exact") in (True, False, None)
    )


def is_place(place: dict[str, Any]) -> bool:
    within = place.get("within")
    kind = re.fullmatch("[a-z]{2,4}", place["kind"])
    return bool(kind) and set(place) <= {"within", "kind"} and (within is None or is_place(within))


@pytest.fixture(scope="module", params=["tags are tokens", "tags are text"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    tokenizer = make_tokenizer()
    if request.param == "tags are tokens":  # not all of them special, as in Qwen's tokenizer
        plain = ("<tool_call>", "</tool_call>", "<think>", "</think>")
        tokenizer.add_special_tokens([AddedToken(tag, special=True) for tag in TAGS if tag not in plain])
        tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in plain])
    return tokenizer


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, tokenizer.get_vocab_size(), [tokenizer.token_to_id("<eos>")])


def parsers_of(notation: str, tokenizer: Tokenizer, thoughts: str = "none") -> Parsers:
    added = {token.content: id for id, token in tokenizer.get_added_tokens_decoder().items()}
    return find_parsers(TEMPLATES.get(notation), notation.split(",")[0], thoughts, added_tokens=added)


def allowed(matcher: Matcher) -> list[int]:
    words = [word & 0xFFFFFFFF for word in matcher.mask().tolist()]
    return [32 * i + bit for i, word in enumerate(words) for bit in range(32) if word >> bit & 1]


ENDINGS = ("\n</parameter>", "\n</arg_value>", '<|"|>', "</think>", "<channel|>", "[/THINK]", *'"}]:,1n')


def walk(compiler: GrammarCompiler, grammar: Grammar, tokenizer: Tokenizer, seed: int, patience: int = 100) -> str:
    """A random output that the grammar allows; after some tokens it makes for the end."""
    eos, rng = tokenizer.token_to_id("<eos>"), random.Random(seed)
    matcher, tokens = compiler.compile(grammar), list[int]()
    while True:
        open_to = allowed(matcher)
        text = tokenizer.decode(tokens, skip_special_tokens=False)
        assert open_to and len(tokens) < 20 * patience, f"{len(open_to)} tokens can follow {text!r}"
        token = rng.choice(open_to)
        if len(tokens) > patience:
            # An ending that is one token, else the next character of the ending that is furthest along.
            begun = {end: max(n for n in range(len(end)) if text.endswith(end[:n])) for end in ENDINGS}
            nexts = [end[n] for end, n in sorted(begun.items(), key=lambda item: (-item[1], rng.random()))]
            ids = [eos, *map(tokenizer.token_to_id, TAGS), *(tokenizer.encode(character).ids[0] for character in nexts)]
            token = next((id for id in ids if id in open_to), token)
        assert matcher.accept(token), matcher.error
        if token == eos:
            return text
        tokens.append(token)


NOTATIONS = ("hermes", "qwen3_coder", "gemma4", "glm45", "minimax_m2", "deepseek", "kimi_k2", "json", *TEMPLATES)


VARIANTS = {"deepseek, fenced", "glm45, without line breaks"}
EACH = [pytest.param(name, marks=[pytest.mark.slow] * (name in VARIANTS)) for name in NOTATIONS]


@pytest.mark.parametrize("choice", ["required", Named("weather")], ids=["required", "named"])
@pytest.mark.parametrize("notation", EACH)
def test_any_output_is_a_call(
    notation: str, choice: ToolChoice, tokenizer: Tokenizer, compiler: GrammarCompiler
) -> None:
    parsers = parsers_of(notation, tokenizer)
    grammar = parsers.tool_grammar(TOOLS, choice)
    assert grammar is not None
    most, names = 0, set()
    for seed in range(12):
        text = walk(compiler, grammar, tokenizer, seed)
        parts = read(start(parsers, tools=TOOLS, tool_choice=choice), [text])
        calls = calls_of(parts)
        assert calls and content_of(parts) == "", text
        assert all(fits(name, json.loads(arguments)) for name, arguments in calls), text
        most, names = max(most, len(calls)), names | {name for name, _ in calls}
    if choice == "required":
        assert names > {"weather"} and (most > 1) == (notation != "json")
    else:
        assert names == {"weather"} and most == 1


WRITERS_OF = {"json": "plain JSON", "mistral": "mistral, a list"}


@pytest.mark.parametrize("notation", NOTATIONS)
def test_what_models_write_is_allowed(notation: str, tokenizer: Tokenizer, compiler: GrammarCompiler) -> None:
    place = (
        {"kind": "abc", "within": {"kind": "de"}} if notation == "gemma4" else {"within": {"kind": "de"}, "kind": "abc"}
    )
    arguments = {"city": "Zü rich", "unit": "C", "days": 3, "hours": [1.5, 2], "place": place, "exact": True}
    if notation == "gemma4":  # whose template sorts them
        arguments = dict(sorted(arguments.items()))
    parsers = parsers_of(notation, tokenizer, "think")
    write = WRITERS[WRITERS_OF.get(notation, notation)][1]
    least = {"city": "x", "days": 14, "hours": [], "place": {"kind": "ab"}}
    for calls in ([("weather", arguments)], [("weather", least)], [("weather", arguments), ("now", {})]):
        if notation == "json" and len(calls) > 1:
            continue
        text = write(calls).replace('"parameters"', '"arguments"').replace(', "id": "a1B2c3D4e"', "")
        for thought in ("", "<think>\nOh <b>!\n</think>\n\n"):
            grammar = parsers.tool_grammar(TOOLS, "required" if len(calls) > 1 else Named("weather"))
            assert grammar is not None
            matcher = compiler.compile(grammar)
            for token in tokenizer.encode(thought + text).ids:
                assert matcher.accept(token), (tokenizer.id_to_token(token), text)
            assert tokenizer.token_to_id("<eos>") in allowed(matcher)


@pytest.mark.parametrize(
    ("notation", "text"),
    [
        ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=v>\nab\n<parameter="),
        ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=v>\nab\n</function>"),
        ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=v>\nab</parameter>"),
        ("gemma4", '<|tool_call>call:f{v:<|"|>ab<tool_call|>'),
        ("glm45", "<tool_call>f\n<arg_key>v</arg_key>\n<arg_value>ab</arg_value>x"),
        ("minimax_m2", '<minimax:tool_call>\n<invoke name="f">\n<parameter name="v">ab</parameter>x'),
    ],
)
def test_free_text_has_nothing_in_it_that_would_end_it(notation: str, text: str) -> None:
    """Even spelled character by character, as no tag is a token here."""
    tokenizer = make_tokenizer()
    eos = tokenizer.token_to_id("<eos>")
    tool = ToolSpec("f", {"properties": {"v": {"type": "string"}}, "required": ["v"]})
    grammar = parsers_of(notation, tokenizer).tool_grammar([tool], "required")
    assert grammar is not None
    matcher = GrammarCompiler(tokenizer, tokenizer.get_vocab_size(), [eos]).compile(grammar)
    *most, last = tokenizer.encode(text).ids
    assert all(matcher.accept(token) for token in most) and not matcher.accept(last)


@pytest.mark.parametrize("notation", ["qwen3_coder", "glm45", "minimax_m2"])
def test_tags_in_strings_of_json_are_allowed_and_read(notation: str) -> None:
    tokenizer = make_tokenizer()
    schema = {"type": "object", "properties": {"s": {"type": "string"}}, "required": ["s"]}
    tool = ToolSpec("f", {"properties": {"v": schema}, "required": ["v"]})
    parsers = parsers_of(notation, tokenizer)
    grammar = parsers.tool_grammar([tool], "required")
    assert grammar is not None
    matcher = GrammarCompiler(tokenizer, tokenizer.get_vocab_size(), [tokenizer.token_to_id("<eos>")]).compile(grammar)
    arguments = {"v": {"s": "a</arg_value></parameter>\n</parameter>b"}}
    text = WRITERS[notation][1]([("f", arguments)])
    assert all(matcher.accept(token) for token in tokenizer.encode(text).ids)
    ((name, found),) = calls_of(read(start(parsers, tools=[tool], tool_choice="required"), [text]))
    assert (name, json.loads(found)) == ("f", arguments)


@pytest.mark.parametrize("notation", ["hermes", "qwen3_coder", "gemma4", "mistral, by name", "json"])
def test_a_thought_may_come_first(notation: str, tokenizer: Tokenizer, compiler: GrammarCompiler) -> None:
    thoughts = {"gemma4": "gemma4", "mistral, by name": "mistral"}.get(notation, "think")
    parsers = parsers_of(notation, tokenizer, thoughts)
    thinking = parsers.thinking
    assert thinking is not None
    prompts = {"open": f"model\n{thinking.opens}\n", "over": f"{thinking.opens}\n{thinking.closes}\n\n", "neither": ""}
    thought_of = {state: set[bool]() for state in prompts}
    for state, prompt in prompts.items():
        grammar = parsers.tool_grammar(TOOLS[1:2], "required", prompt=prompt, parallel=False)
        assert grammar is not None
        for seed in range(8):
            text = walk(compiler, grammar, tokenizer, seed, patience=30)
            parts = read(start(parsers, prompt, tools=TOOLS, tool_choice="required"), [text])
            ((name, arguments),) = calls_of(parts)
            assert name == "now" and json.loads(arguments) == {} and content_of(parts) == "", text
            thought_of[state].add(bool(reasoning_of(parts)))
    assert True in thought_of["open"]
    assert thought_of["over"] == {False}
    assert thought_of["neither"] == {True, False}


def test_nothing_is_forced_unless_asked_for() -> None:
    parsers = find_parsers(None, "hermes")
    assert parsers.tool_grammar(TOOLS, "auto") is None
    assert parsers.tool_grammar(TOOLS, "none") is None
    with pytest.raises(ValueError, match="this server runs with tool parser 'none'"):
        find_parsers(None, "none").tool_grammar(TOOLS, "required")


DEEP: dict[str, Any] = {"type": "integer"}
for _ in range(900):
    DEEP = {"anyOf": [DEEP]}
REFUSED = {
    "'not'": ({"properties": {"a": {"not": {"type": "string"}}}}, "has 'not', which cannot be enforced"),
    "a keyword of the whole": ({"properties": {}, "minProperties": 1}, "has 'minProperties', which cannot be enforced"),
    "nothing": ({"properties": {"a": False}}, "has 'not', which cannot be enforced"),
    "undescribed": ({"properties": {}, "required": ["a"]}, "requires 'a' without describing it; add it"),
    "lost reference": ({"properties": {"a": {"$ref": "#/$defs/b"}}}, "'#/$defs/b' leads to nothing"),
    "foreign reference": ({"properties": {"a": {"$ref": "http://x/y"}}}, "'http://x/y' leads to nothing"),
    "circle": ({"properties": {"a": {"$ref": "#/properties/a"}}}, "leads back to itself"),
    "depth": ({"properties": {"a": DEEP}}, "nested too deeply"),
    "pattern": ({"properties": {"a": {"type": "string", "pattern": "^a|b$"}}}, "put its alternatives in brackets"),
    "no properties": ({"properties": [1]}, "as properties, which is not valid JSON Schema"),
    "no length": (
        {"properties": {"a": {"type": "string", "minLength": "x"}}},
        "as minLength, which is not valid JSON Schema",
    ),
}


@pytest.mark.parametrize("notation", ["gemma4", "qwen3_coder"])
@pytest.mark.parametrize("case", REFUSED)
def test_a_schema_that_cannot_be_held_to_is_refused(case: str, notation: str) -> None:
    schema, reason = REFUSED[case]
    with pytest.raises(ValueError, match="^tools: .*" + re.escape(reason)):
        grammar = find_parsers(None, notation).tool_grammar([ToolSpec("f", schema)], "required")
        # Parameters that are JSON are left to the compiler of grammars.
        if notation == "qwen3_coder" and grammar is not None:
            tokenizer = make_tokenizer()
            GrammarCompiler(tokenizer, tokenizer.get_vocab_size(), [tokenizer.token_to_id("<eos>")]).compile(grammar)


def test_circles_of_alternatives_take_no_time() -> None:
    both = [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}]
    definitions = {"a": {"anyOf": [*both, {"type": "string", "maxLength": 2}]}, "b": {"anyOf": [*both, {"const": "x"}]}}
    tool = ToolSpec("f", {"properties": {"v": {"anyOf": both}}, "$defs": definitions})
    for notation in ("gemma4", "qwen3_coder"):
        grammar = find_parsers(None, notation).tool_grammar([tool], "required")
        assert grammar is not None and grammar.lark is not None and len(grammar.lark) < 2000
    text = "<function=f><parameter=v>\nx\n</parameter></function>"
    assert calls_of(read(start(find_parsers(None, "qwen3_coder"), tools=[tool]), [text])) == [("f", '{"v": "x"}')]


CLOSED = {"additionalProperties": False}
SCHEMAS = {
    "patterns": {"type": "string", "pattern": "^(a|b/c)[0-9]$"},
    "line breaks": {"type": "string", "pattern": "^a\n\\nb\\/c$"},
    "found anywhere": {"type": "string", "pattern": "ab|cd", "maxLength": 6},
    "constants": {"enum": ["a\n'b'", "C:\\x", 1.5, None, True, [1, "x"], {"k": ["v"], "two words": {}}]},
    "one constant": {"const": "é"},
    "alternatives": {
        "oneOf": [{"type": "integer", "minimum": 100}, {"type": "array", "items": {"const": "x"}, "minItems": 2}]
    },
    "text or null": {"anyOf": [{"type": "string", "maxLength": 3}, {"type": "null"}]},
    "lists of lists": {
        "type": "array",
        "items": {"type": "array", "items": {"type": "boolean"}, "maxItems": 1},
        "maxItems": 3,
    },
    "one item": {"type": "array", "items": {"type": "null"}, "minItems": 1, "maxItems": 1},
    "no items": {"type": "array", "maxItems": 0},
    "free members": {"type": "object", "additionalProperties": {"type": "integer", "minimum": 0, "maximum": 9}},
    "optional members": {
        "type": "object",
        "properties": {key: {"const": 1} for key in "abcd"},
        "required": ["c"],
        **CLOSED,
    },
    "odd names": {
        "type": "object",
        "properties": {"a b": {"const": 1}, "c:d": {"const": 2}},
        "required": ["a b", "c:d"],
        **CLOSED,
    },
    "wrapped": {"allOf": [{"$ref": "#/$defs/x"}], "description": "as pydantic writes it"},
}
JUDGES = {
    "patterns": lambda v: re.fullmatch("(a|b/c)[0-9]", v),
    "line breaks": lambda v: v == "a\n\nb/c",
    "found anywhere": lambda v: ("ab" in v or "cd" in v) and len(v) <= 6,
    "constants": lambda v: v in SCHEMAS["constants"]["enum"],
    "one constant": lambda v: v == "é",
    "alternatives": lambda v: v >= 100 if isinstance(v, int) else len(v) >= 2 and set(v) == {"x"},
    "text or null": lambda v: v is None or len(v) <= 3,
    "lists of lists": lambda v: len(v) <= 3 and all(inner in ([], [True], [False]) for inner in v),
    "one item": lambda v: v == [None],
    "no items": lambda v: v == [],
    "free members": lambda v: all(type(item) is int and 0 <= item <= 9 for item in v.values()),
    "optional members": lambda v: "c" in v and set(v) <= set("abcd") and set(v.values()) == {1},
    "odd names": lambda v: v == {"a b": 1, "c:d": 2},
    "wrapped": lambda v: v in (1, 2),
}


LIKE_QWEN = [pytest.param(name, marks=pytest.mark.slow) for name in ("glm45", "minimax_m2")]


@pytest.mark.parametrize("notation", ["gemma4", "qwen3_coder", "hermes", *LIKE_QWEN])
@pytest.mark.parametrize("case", SCHEMAS)
def test_schemas(case: str, notation: str, tokenizer: Tokenizer, compiler: GrammarCompiler) -> None:
    properties = {"value": SCHEMAS[case], "last": {"type": "boolean"}}
    schema = {"type": "object", "properties": properties, "required": ["value"], "additionalProperties": False}
    tools = [ToolSpec("f", schema | {"$defs": {"x": {"enum": [1, 2]}}})]
    parsers = parsers_of(notation, tokenizer)
    grammar = parsers.tool_grammar(tools, "required", parallel=False)
    assert grammar is not None
    for seed in range(3):
        text = walk(compiler, grammar, tokenizer, seed, patience=60)
        ((name, arguments),) = calls_of(read(start(parsers, tools=tools), [text]))
        value = json.loads(arguments)
        assert name == "f" and value.get("last") in (None, True, False) and set(value) <= {"value", "last"}
        assert JUDGES[case](value["value"]), text
