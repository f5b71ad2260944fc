"""What a model wrote becomes the same parts however it is cut into pieces; nothing is lost; it takes linear time."""

import copy
import json
import random
import re
import sys
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.sampling_params import Grammar
from anabranch.server import parsers as package
from anabranch.server.parsers.choose import Parsers, find_parsers
from anabranch.server.parsers.parts import Content, Part, Reasoning, ToolCallArguments, ToolCallBegin, ToolSpec
from anabranch.server.parsers.reader import Reader
from anabranch.server.parsers.source import Source
from anabranch.text.chat_template import ChatTemplate
from tests.server.notations import THOUGHTS, WRITERS, Call
from tests.text import tiny_tokenizers
from tests.text.test_chat_template import REAL_TEMPLATES, needs

TOOLS = (
    ToolSpec("f"),
    ToolSpec(
        "weather",
        {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "integer"},
                "exact": {"type": "boolean"},
                "heights": {"type": "array", "items": {"type": "number"}},
                "place": {"$ref": "#/$defs/place"},
                "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                "unit": {"enum": ["C", "F"]},
            },
            "$defs": {"place": {"type": "object"}},
        },
    ),
)
TOOL_PARSERS = ("hermes", "qwen3_coder", "gemma4", "mistral", "deepseek", "glm45", "kimi_k2", "minimax_m2", "json")
REASONING_PARSERS = ("think", "gemma4", "mistral", "none")


def make(tool_parser: str, reasoning_parser: str = "none") -> Parsers:
    return find_parsers(None, tool_parser, reasoning_parser)


def start(parsers: Parsers, prompt: str = "", **options: Any) -> Reader:
    options = {"tools": TOOLS, "tool_choice": "auto", "reasoning": True} | options
    return parsers.start(prompt=prompt, random=random.Random(0), **options)


def join(parts: Iterable[Part]) -> list[Part]:
    """Neighbours of a kind become one."""
    joined: list[Part] = []
    for part in parts:
        match joined[-1:], part:
            case [Content(before)], Content(text):
                joined[-1] = Content(before + text)
            case [Reasoning(before)], Reasoning(text):
                joined[-1] = Reasoning(before + text)
            case [ToolCallArguments(index, before)], ToolCallArguments(same, text):
                assert same == index
                joined[-1] = ToolCallArguments(index, before + text)
            case _:
                joined.append(part)
    return joined


def read(reader: Reader, pieces: Sequence[str]) -> list[Part]:
    parts = []
    for piece in pieces:
        parts += reader.feed(piece)
        reader.check()
    parts += reader.feed("", final=True)
    reader.check()
    assert all(not hasattr(part, "text") or part.text for part in parts), "an empty part"
    return join(parts)


def check_order(parts: Sequence[Part]) -> None:
    """Calls are counted, have ids of their own, and their arguments follow at once."""
    num_calls, ids = 0, set()
    for i, part in enumerate(parts):
        match part:
            case ToolCallBegin(index, id, name):
                assert index == num_calls and name
                num_calls += 1
                ids.add(id)
            case ToolCallArguments(index, _):
                assert index == num_calls - 1 and isinstance(parts[i - 1], ToolCallBegin)
    assert len(ids) == num_calls


def calls_of(parts: Iterable[Part]) -> list[tuple[str, str]]:
    calls: list[tuple[str, str]] = []
    for part in parts:
        match part:
            case ToolCallBegin(_, _, name):
                calls.append((name, ""))
            case ToolCallArguments(index, text):
                calls[index] = (calls[index][0], calls[index][1] + text)
    return calls


def content_of(parts: Iterable[Part]) -> str:
    return "".join(part.text for part in parts if isinstance(part, Content))


def reasoning_of(parts: Iterable[Part]) -> str:
    return "".join(part.text for part in parts if isinstance(part, Reasoning))


def briefly(parts: Iterable[Part]) -> list[Any]:
    """Content as text, reasoning as [text], calls as (name, arguments)."""
    brief: list[Any] = []
    for part in parts:
        match part:
            case Content(text):
                brief.append(text)
            case Reasoning(text):
                brief.append([text])
            case ToolCallBegin(_, _, name):
                brief.append((name, ""))
            case ToolCallArguments(_, text):
                brief[-1] = (brief[-1][0], text)
    return brief


def cut(text: str, places: Iterable[int]) -> list[str]:
    ends = sorted({0, len(text), *(place % (len(text) + 1) for place in places)})
    return [text[begin:end] for begin, end in pairwise(ends)]


def answer(parsers: Parsers, text: str, prompt: str = "", **options: Any) -> list[Part]:
    """All at once; and the same one by one, and in pieces of three."""
    parts = read(start(parsers, prompt, **options), [text])
    check_order(parts)
    assert read(start(parsers, prompt, **options), list(text)) == parts
    assert read(start(parsers, prompt, **options), [text[i : i + 3] for i in range(0, len(text), 3)]) == parts
    return parts


# What is meant comes out.

WELL_WRITTEN: list[Call] = [
    ("weather", {"city": 'Zü"rich\n"</tool_call>"\\', "days": 3, "exact": True, "note": None}),
    ("f", {}),
    ("weather", {"place": {"a": [1, {"b": "}]"}], "c": {}}, "heights": [-1.5, 2e-7], "exact": False}),
]


@pytest.mark.parametrize("with_thought", [True, False])
@pytest.mark.parametrize("content", ["", "Let me see: {x} [y] < z."])
@pytest.mark.parametrize("writer", WRITERS)
def test_calls_are_read(writer: str, content: str, with_thought: bool) -> None:
    parser, write = WRITERS[writer]
    thoughts = {"gemma4": "gemma4", "mistral": "mistral"}.get(parser, "think")
    thought = THOUGHTS[thoughts].format("I wonder.\n\nWell.") if with_thought else ""
    between = "\n" if content else ""
    parts = answer(make(parser, thoughts), thought + content + between + write(WELL_WRITTEN))
    assert [(name, json.loads(arguments)) for name, arguments in calls_of(parts)] == WELL_WRITTEN
    assert content_of(parts) == content
    assert reasoning_of(parts) == ("I wonder.\n\nWell." if with_thought else "")


WORDS = st.text(st.characters(exclude_characters="<>[]{}", exclude_categories=["Cs"]), max_size=12)
KEYS = st.from_regex("[a-z_]{1,5}", fullmatch=True)
SCALARS = st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.floats(allow_nan=False, allow_infinity=False)
VALUES = st.recursive(
    SCALARS | WORDS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3)
)
WEATHER = st.fixed_dictionaries(
    {},
    optional={
        "city": WORDS,
        "days": st.integers(),
        "exact": st.booleans(),
        "heights": st.lists(st.floats(allow_nan=False, allow_infinity=False), max_size=3),
        "place": st.dictionaries(WORDS, VALUES, max_size=3),
        "note": st.none() | WORDS.filter(lambda text: text.strip() not in ("null", "None")),
    },
)
TURN = st.tuples(WORDS.map(str.strip), st.lists(WEATHER.map(lambda arguments: ("weather", arguments)), max_size=3))


@settings(max_examples=150)
@given(
    st.sampled_from(list(WRITERS)),
    st.tuples(WORDS.map(str.strip), st.lists(TURN, max_size=3)),
    st.lists(st.integers(0, 10**6), max_size=12),
)
def test_whatever_is_called_is_read(writer: str, chat: tuple[str, list[Any]], places: list[int]) -> None:
    parser, write = WRITERS[writer]
    thoughts = {"gemma4": "gemma4", "mistral": "mistral"}.get(parser, "think")
    thought, turns = chat
    text = THOUGHTS[thoughts].format(thought) if thought else ""
    expected: list[Any] = [[thought]] if thought else []
    for content, calls in turns:
        if parser == "gemma4":  # whose keys are bare
            calls = [(name, {k: v for k, v in arguments.items() if k != "place"}) for name, arguments in calls]
        text += f"{content}\n{write(calls)}\n" if calls else content
        if content and any(isinstance(item, str) for item in expected):
            content = content if isinstance(expected[-1], str) else f"\n{content}"
        if content and expected and isinstance(expected[-1], str):
            content = expected.pop() + content
        expected += ([content] if content else []) + calls
    parts = read(start(make(parser, thoughts)), cut(text, places))
    if not any(calls for _, calls in turns) and not thought:
        assert content_of(parts) == text
        return
    assert [
        item if isinstance(item, str | list) else (item[0], json.loads(item[1])) for item in briefly(parts)
    ] == expected


# Any text, any pieces.

CLOSING = {"gemma4": "<tool_call|>", "qwen3_coder": "\n</parameter>\n</function>\n</tool_call>"}
CLOSING["glm45"] = "</arg_value>\n</tool_call>"
CLOSING["minimax_m2"] = "</parameter>\n</invoke>\n</minimax:tool_call>"

FRAGMENTS = {
    "hermes": [
        "<tool_call>",
        "</tool_call>",
        "<tool_call>\n",
        '{"name": "f", "arguments": ',
        '{"name": "weather"',
        "}\n",
    ],
    "qwen3_coder": [
        "<tool_call>\n",
        "<function=f>\n",
        "<function=no>",
        "<parameter=city>\n",
        "<parameter=days>",
        "<parameter=place>\n",
        "3",
    ]
    + ["\n</parameter>\n", "</parameter>", "</function>\n", "</tool_call>"],
    "gemma4": [
        "<|tool_call>",
        "call:f{",
        "call:",
        "<tool_call|>",
        '<|"|>',
        "a:",
        "b:[",
        "<|tool_response>",
        "12",
        "null",
    ],
    "mistral": ["[TOOL_CALLS]", "[", "]", "f[ARGS]", "f", "[CALL_ID]", '{"name": "f", "arguments": '],
    "deepseek": ["<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "function", "f", "<｜tool▁sep｜>", "f\n```json\n"]
    + ["\n```", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>", "f<｜tool▁sep｜>{", "{}"],
    "glm45": [
        "<tool_call>",
        "</tool_call>",
        "f",
        "weather\n",
        "<arg_key>city</arg_key>",
        "<arg_key>days",
        "<arg_key>place</arg_key>",
    ]
    + ["<arg_key>", "</arg_key>\n", "<arg_value>", "</arg_value>\n", "3"],
    "kimi_k2": ["<|tool_calls_section_begin|>", "<|tool_call_begin|>", "functions.f:0", "f", "{}", "<|tool_call_end|>"]
    + ["<|tool_call_argument_begin|>", "<|tool_call_argument_begin|>{", "<|tool_calls_section_end|>"],
    "minimax_m2": ["<minimax:tool_call>\n", '<invoke name="f">\n', '<invoke name="no">', '<parameter name="city">']
    + [
        '<parameter name="days">',
        '<parameter name="place">',
        "3",
        "</parameter>\n",
        "</parameter>",
        "</invoke>\n",
        "</minimax:tool_call>",
    ],
    "json": ['{"name": "f", "parameters": ', '{"name": "no", ', "<|python_tag|>", "[", "]", "; "],
}
THOUGHT_FRAGMENTS = {
    "think": ["<think>", "</think>"],
    "gemma4": ["<|channel>thought", "<channel|>", "<|channel>"],
    "mistral": ["[THINK]", "[/THINK]"],
    "none": [],
}
JSON_FRAGMENTS = [
    "{",
    "}",
    "[",
    "]",
    "{}",
    '"',
    ":",
    ",",
    "\\",
    '"a": ',
    '{"a": 1}',
    '"\\"x"',
    "\\u00e9",
    "null",
    "1.5",
]
JSON_FRAGMENTS += ['{"b": [{}]}', '"name": ', '"arguments": ', '"id": "x"', '{"arguments": {}, "name": "f"}']
JSON_FRAGMENTS += ['"{\\"a\\": 1}"', '{"name": "f"}']
TEXT_FRAGMENTS = [" ", "\n", "\n\n", "é漢", "👩‍👧", "word", "<", ">", "|", "\t \r\n", "\u2028"]


@st.composite
def outputs(draw: st.DrawFn, parsers: Sequence[str] = TOOL_PARSERS) -> tuple[str, str, str, list[str]]:
    """A parser of each kind, a text for them, and its pieces. Words in it can be told apart."""
    tools, thoughts = draw(st.sampled_from(parsers)), draw(st.sampled_from(REASONING_PARSERS))
    own = FRAGMENTS[tools] + THOUGHT_FRAGMENTS[thoughts]
    fragment = st.one_of(
        *[st.sampled_from(own)] * 4,  # else calls are rare
        st.sampled_from(own).flatmap(lambda tag: st.integers(1, len(tag)).map(lambda n: tag[:n])),
        st.sampled_from(JSON_FRAGMENTS),
        st.sampled_from(TEXT_FRAGMENTS),
        st.just("mark"),
        st.text(max_size=4),
    )
    fragments = draw(st.lists(fragment, max_size=16))
    text = "".join(f"w{i}w" if piece == "mark" else piece for i, piece in enumerate(fragments))
    places = draw(st.lists(st.integers(0, len(text)), max_size=8))
    return tools, thoughts, text, cut(text, places)


@settings(max_examples=200)
@given(outputs(), st.booleans())
def test_any_pieces_give_the_same_parts(output: tuple[str, str, str, list[str]], thinks: bool) -> None:
    tools, thoughts, text, pieces = output
    parsers = make(tools, thoughts)
    prompt = parsers.thinking.opens + "\n" if thinks and parsers.thinking else ""
    whole = read(start(parsers, prompt), [text])
    check_order(whole)
    assert read(start(parsers, prompt), pieces) == whole
    assert read(start(parsers, prompt), list(text)) == whole
    if not calls_of(whole) and not reasoning_of(whole) and thoughts == "none":
        assert content_of(whole) == text


NOTATION = re.compile(
    r"""</?tool_call> | <\|python_tag\|> | </?think> | <\|channel>thought | <channel\|> | \[/?THINK\]
    | \[TOOL_CALLS\]\s*([\w.:-]+(\[CALL_ID\][\w.:-]*)?(\[ARGS\])?)?
    | \s | [\[\]{}:,;] | "([^"\\]|\\.)*" | true | false | null | -?\d+(\.\d+)?([eE][+-]?\d+)?""",
    re.VERBOSE | re.DOTALL,
)
"""Of calls in JSON, and of thoughts."""


@settings(max_examples=200)
@given(outputs(), st.booleans())
def test_nothing_is_lost(output: tuple[str, str, str, list[str]], thinks: bool) -> None:
    """Every word comes out once, unless it stood in a call's own notation: a member that is neither name nor arguments,
    an id. And what is dropped is such notation."""
    tools, thoughts, text, _ = output
    parsers = make(tools, thoughts)
    prompt = parsers.thinking.opens + "\n" if thinks and parsers.thinking else ""
    dropped: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        plain = Source.drop

        def drop(source: Source) -> None:
            dropped.append("".join(source._held))
            plain(source)

        patch.setattr(Source, "drop", drop)
        parts = read(start(parsers, prompt), [text])
    given_out = "".join(part.name if isinstance(part, ToolCallBegin) else part.text for part in parts)
    words = re.findall(r"w\d+w", text)
    found = re.findall(r"w\d+w", given_out)
    missing = [word for word in words if word not in found]
    assert len(found) == len(set(found)) and set(found) <= set(words)
    for word in missing:
        assert tools in ("hermes", "mistral", "json"), word
        (place,) = [piece for piece in dropped if word in piece]
        assert not NOTATION.sub("", place), (word, place)
    if tools in ("hermes", "mistral", "json"):
        assert not [piece for piece in dropped if NOTATION.sub("", piece)]


@settings(max_examples=150)
@given(outputs(parsers=list(CLOSING)))
def test_what_becomes_json_is_json(output: tuple[str, str, str, list[str]]) -> None:
    """Where arguments are not written as JSON, they are JSON all the same once the call is closed."""
    tools, _, text, _ = output
    for _, arguments in calls_of(read(start(make(tools)), [text + CLOSING[tools]])):
        assert isinstance(json.loads(arguments), dict)


# Texts that are not quite calls, by parser, and what comes out: content as text, a call as (name, arguments).

ODD = {
    "hermes": {
        "Use <tool_call> for calls, </tool_call> after.": ["Use <tool_call> for calls, </tool_call> after."],
        '<tool_call>{"name": "unheard", "arguments": {}}</tool_call>': [("unheard", "{}")],
        '<tool_call>{"name": "f"}</tool_call>': [("f", "{}")],
        '<tool_call>{"name": "f", "arguments": null}</tool_call>': [("f", "{}")],
        '<tool_call>{"id": "x", "arguments": {"a": 1}, "name": "f"}</tool_call>': [("f", '{"a": 1}')],
        r'<tool_call>{"name": "f", "arguments": "{\"a\": \"\\n\"}"}</tool_call>': [("f", r'{"a": "\n"}')],
        '<tool_call>{"name": "f", "arguments": [1]}</tool_call>': [
            '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'
        ],
        '<tool_call>{"arguments": {"a": 1}}</tool_call> no': ['<tool_call>{"arguments": {"a": 1}}</tool_call> no'],
        '<tool_call>{"name": "", "arguments": {}}</tool_call>': [
            '<tool_call>{"name": "", "arguments": {}}</tool_call>'
        ],
        '<tool_call>\n{"name": "f", "arguments": {"a": 1}\n</tool_call>\nok': [("f", '{"a": 1}'), "ok"],
        '<tool_call>{"name": "f", "arguments": {}}}\n</tool_call>': [("f", "{}"), "}"],
        '<tool_call>{"name": "f", "arguments": {}, "x" 1}</tool_call>': [("f", "{}"), ', "x" 1}'],
        '<tool_call>{"name": "f"}, </tool_call>': [("f", "{}"), ","],
        '<tool_call>{"id": oops, "name": "f"}</tool_call>': ['<tool_call>{"id": oops, "name": "f"}</tool_call>'],
        '<tool_call>{"name": "f"}\n{"name": "g"}</tool_call>': [("f", "{}"), ("g", "{}")],
        '<tool_call>[{"name": "f"}, {"name": "g"}]</tool_call>': [("f", "{}"), ("g", "{}")],
        '<tool_call>[{"name": "f"}, {"x": 1}]</tool_call>': [("f", "{}"), ', {"x": 1}]'],
        '<tool_call>{"name": "f", "arguments": {a: \'x\', tru}}</tool_call>': [("f", "{a: 'x', tru}")],
        '<tool_call>{"name": "f", "arguments": {"a": 1</tool_call> Hi': [("f", '{"a": 1'), "Hi"],
        '<tool_call> <tool_call>{"name": "f"}</tool_call>': ["<tool_call>", ("f", "{}")],
        'One.\n\n<tool_call>{"name": "f"}</tool_call>\n\nTwo.\n': ["One.", ("f", "{}"), "\n\nTwo.\n"],
        '<tool_call>{"name": "f"}<tool_call>{"name": "g"}': [("f", "{}"), ("g", "{}")],
        # cut off
        "So <tool_c": ["So <tool_c"],
        '<tool_call>\n{"name": "f", "argum': ['<tool_call>\n{"name": "f", "argum'],
        '<tool_call>{"name": "f", "arguments": {"a": "b\\': [("f", '{"a": "b\\')],
        '<tool_call>{"name": "f", "arguments": {}}': [("f", "{}")],
        '<tool_call>{"name": "f", "arguments": {}}\n</tool': [("f", "{}"), "\n</tool"],
    },
    "qwen3_coder": {
        "<tool_call>\n<function=unheard>\n</function>\n</tool_call>": [("unheard", "{}")],
        "<function=f>\n</function>": [("f", "{}")],
        "<function=unheard>\n</function>": ["<function=unheard>\n</function>"],
        '<tool_call>\n{"name": "f"}\n</tool_call>': ['<tool_call>\n{"name": "f"}\n</tool_call>'],
        "<function=weather><parameter=city>Rome</parameter><parameter=days> 3 </parameter></function>": [
            ("weather", '{"city": "Rome", "days": 3}')
        ],
        "<function=weather>\n<parameter=days>\nthree\n</parameter>\n<parameter=exact>True</parameter>\n</function>": [
            ("weather", '{"days": "three", "exact": true}')
        ],
        "<function=weather><parameter=days>1.5</parameter><parameter=exact>0</parameter></function>": [
            ("weather", '{"days": "1.5", "exact": "0"}')
        ],
        "<function=weather><parameter=note>\nNone\n</parameter><parameter=unit>\nnull\n</parameter></function>": [
            ("weather", '{"note": null, "unit": "null"}')
        ],
        "<function=weather><parameter=heights>[1, NaN]</parameter><parameter=place>{}</parameter></function>": [
            ("weather", '{"heights": "[1, NaN]", "place": {}}')
        ],
        "<function=weather><parameter=other>\n\n 1 \n\n</parameter></function>": [("weather", r'{"other": "\n 1 \n"}')],
        "<function=weather>\n<parameter=city>\nRome\n<parameter=days>\n3\n</function>": [
            ("weather", '{"city": "Rome", "days": 3}')
        ],
        '<function=weather>\n<parameter=place>\n{"a": "b"\n<parameter=days>\n3\n</function>': [
            ("weather", '{"place": "{\\"a\\": \\"b\\"", "days": 3}')
        ],
        "<tool_call>\n<function=f>\noh\n</function>\n</tool_call> ok": [("f", "{}"), "\noh\n</function> ok"],
        "<tool_call>\n<function=f>\n</tool_call>": [("f", "{}")],
        "<tool_call><function=f><parameter=a <function=f></function></tool_call>": [
            ("f", "{}"),
            "<parameter=a",
            ("f", "{}"),
        ],
        # cut off
        "<tool_call>\n<function=wea": ["<tool_call>\n<function=wea"],
        "<function=f>\n": [("f", "")],
        "<function=weather>\n<parameter=city>\nRo": [("weather", '{"city": "Ro')],
        "<function=weather>\n<parameter=days>\n1": [("weather", '{"days": 1')],
    },
    "glm45": {
        "<tool_call>unheard\n</tool_call>": [("unheard", "{}")],
        "<tool_call>f</tool_call>": [("f", "{}")],
        "Use <tool_call> for calls, </tool_call> after.": ["Use <tool_call> for calls, </tool_call> after."],
        '<tool_call>\n{"name": "f"}\n</tool_call>': ['<tool_call>\n{"name": "f"}\n</tool_call>'],
        "<tool_call>weather<arg_key>city</arg_key><arg_value>\nRome </arg_value><arg_key>days</arg_key>\n"
        "<arg_value>3</arg_value></tool_call>": [("weather", '{"city": "\\nRome ", "days": 3}')],
        "<tool_call>weather\n<arg_key>days</arg_key>\n<arg_value>three</arg_value>\n</tool_call> ok": [
            ("weather", '{"days": "three"}'),
            "ok",
        ],
        "<tool_call>f\n<arg_key>a</arg_key>\noh\n</tool_call> ok": [("f", "{}"), "<arg_key>a</arg_key>\noh ok"],
        "<tool_call>weather\n<arg_key>city</arg_key><arg_value>Rome</arg_value> oh </tool_call>": [
            ("weather", '{"city": "Rome"}'),
            " oh",
        ],
        "<tool_call>f oh</tool_call>": ["<tool_call>f oh</tool_call>"],
        "<tool_call><tool_call>f</tool_call>": ["<tool_call>", ("f", "{}")],
        # cut off
        "<tool_call>weath": ["<tool_call>weath"],
        "<tool_call>f\n": ["<tool_call>f\n"],
        "<tool_call>weather\n<arg_key>ci": [("weather", ""), "<arg_key>ci"],
        "<tool_call>weather\n<arg_key>city</arg_key><arg_value>Ro": [("weather", '{"city": "Ro')],
        "<tool_call>weather\n<arg_key>days</arg_key><arg_value>1": [("weather", '{"days": 1')],
    },
    "minimax_m2": {
        '<minimax:tool_call>\n<invoke name="unheard">\n</invoke>\n</minimax:tool_call>': [("unheard", "{}")],
        '<invoke name="f"></invoke>': [("f", "{}")],
        '<invoke name="unheard">\n</invoke>': ['<invoke name="unheard">\n</invoke>'],
        "<minimax:tool_call> is a tag": ["<minimax:tool_call> is a tag"],
        '<minimax:tool_call><invoke name="weather"><parameter name="city"> a\n<b> </parameter><parameter name="exact">'
        "true</parameter></invoke></minimax:tool_call>": [("weather", '{"city": " a\\n<b> ", "exact": true}')],
        '<minimax:tool_call>\n<invoke name="f">\noh\n</invoke>\n</minimax:tool_call> ok': [
            ("f", "{}"),
            "\noh\n</invoke> ok",
        ],
        # cut off
        '<minimax:tool_call>\n<invoke name="wea': ['<minimax:tool_call>\n<invoke name="wea'],
        '<invoke name="weather"><parameter name="days">1': [("weather", '{"days": 1')],
    },
    "deepseek": {
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>": [
            ("f", "{}")
        ],
        "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁end｜> ok": [("f", "{}"), "ok"],
        "<｜tool▁calls▁begin｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n{}<｜tool▁call▁end｜>": [("f", "{}")],
        "<｜tool▁call▁begin｜>tool<｜tool▁sep｜>f\n```json\n{}\n```": [
            "<｜tool▁call▁begin｜>tool<｜tool▁sep｜>f\n```json\n{}\n```"
        ],
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{} oh\n```<｜tool▁call▁end｜>": [
            ("f", "{}"),
            " oh\n```",
        ],
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁end｜> a <｜tool▁calls▁end｜>": [
            ("f", "{}"),
            " a",
        ],
        "<｜tool▁call▁begin｜>f<｜tool▁sep｜>[1]": ["<｜tool▁call▁begin｜>f<｜tool▁sep｜>[1]"],
        # cut off
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁s": [
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁s"
        ],
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a': [("f", '{"a')],
    },
    "kimi_k2": {
        "<|tool_call_begin|>f<|tool_call_argument_begin|>{}<|tool_call_end|>": [("f", "{}")],
        "<|tool_call_begin|> functions.a.b:x:12 <|tool_call_argument_begin|> {} <|tool_call_end|>": [("a.b:x", "{}")],
        "<|tool_calls_section_begin|><|tool_call_begin|>f:0<|tool_call_argument_begin|>{}"
        "<|tool_call_begin|>f:1<|tool_call_argument_begin|>{}<|tool_calls_section_end|> ok": [
            ("f", "{}"),
            ("f", "{}"),
            "ok",
        ],
        "<|tool_calls_section_begin|> none <|tool_calls_section_end|>": [
            "<|tool_calls_section_begin|> none <|tool_calls_section_end|>"
        ],
    },
    "gemma4": {
        "<|tool_call>call:unheard{}<tool_call|>": [("unheard", "{}")],
        "<|tool_call>f{}<tool_call|>": ["<|tool_call>f{}<tool_call|>"],
        "<|tool_call>call:f{}<tool_call|><|tool_response>": [("f", "{}")],
        '<|tool_call>call:f{a:<|"|>x\n"y"<|"|>,<|"|>b c<|"|>:[1,-2.5e3,None,True,[],{}]}<tool_call|>': [
            ("f", r'{"a": "x\n\"y\"", "b c": [1, -2.5e3, null, true, [], {}]}')
        ],
        "<|tool_call>call:f{ a : bare word , b : 12:30 , c : 007 }<tool_call|>": [
            ("f", '{"a": "bare word", "b": "12:30", "c": "007"}')
        ],
        "<|tool_call>call:f{a:,b:}<tool_call|>": [("f", '{"a": null, "b": null}')],
        "<|tool_call>call:f{a:1,}<tool_call|>": [("f", '{"a": 1}')],
        "<|tool_call>call:f{a:[1,{b:2<tool_call|>ok": [("f", '{"a": [1, {"b": 2}]}'), "ok"],
        '<|tool_call>call:f{a:<|"|>x<tool_call|>ok': [("f", '{"a": "x"}'), "ok"],
        "<|tool_call>call:f{a:[1}]}<tool_call|>": [("f", '{"a": [1]}'), "}]}"],
        '<|tool_call>call:f{a:<|"|>x<|"|> y, b:1}<tool_call|> z': [("f", '{"a": "x"}'), " y, b:1} z"],
        "<|tool_call>call:f{oh}<tool_call|>": [("f", "{}"), "oh}"],
        # cut off
        "<|tool_call>call:f": ["<|tool_call>call:f"],
        "<|tool_call>call:f{a:[1,2": [("f", '{"a": [1, 2')],
        '<|tool_call>call:f{a:<|"|>x<|': [("f", '{"a": "x<|')],
        "<|tool_call>call:f{ab": [("f", '{"ab')],
    },
    "mistral": {
        '[TOOL_CALLS] [{"name": "f", "arguments": {}}]': [("f", "{}")],
        '[TOOL_CALLS]{"name": "f", "arguments": {}}': [("f", "{}")],
        '[TOOL_CALLS]f{"a": 1}': [("f", '{"a": 1}')],
        "[TOOL_CALLS] is a tag": ["[TOOL_CALLS] is a tag"],
        "[TOOL_CALLS][1]": ["[TOOL_CALLS][1]"],
        '[TOOL_CALLS]f[ARGS]{"a": [}[TOOL_CALLS]g[ARGS]{}': [("f", '{"a": [}[TOOL_CALLS]g[ARGS]{}')],
        "[TOOL_CALLS]f[ARGS]{} Done.": [("f", "{}"), "Done."],
    },
    "json": {
        '{"name": "unheard", "parameters": {}}': ['{"name": "unheard", "parameters": {}}'],
        '{"name": "f"}': ['{"name": "f"}'],
        'Well: {"name": "f", "parameters": {"a": 1}} ok?': ["Well:", ("f", '{"a": 1}'), " ok?"],
        '{"type": "function", "name": "f", "arguments": {}}': [("f", "{}")],
        '<|python_tag|>{"name": "f", "parameters": {}}': [("f", "{}")],
        '[1, {"a": 2}] {"x": {"name": "f", "parameters": {}}}': [
            '[1, {"a": 2}] {"x": {"name": "f", "parameters": {}}}'
        ],
        '[{"name": "f", "parameters": {}}, {"name": "unheard", "parameters": {}}]': [
            ("f", "{}"),
            ', {"name": "unheard", "parameters": {}}',
        ],
        '{"name": "f", "parameters": {}, "id": 7, "why": [1]}': [("f", "{}")],
    },
    "none": {'<tool_call>{"name": "f"}</tool_call>': ['<tool_call>{"name": "f"}</tool_call>']},
}


@pytest.mark.parametrize(("parser", "text"), [(parser, text) for parser, texts in ODD.items() for text in texts])
def test_odd_texts(parser: str, text: str) -> None:
    assert briefly(answer(make(parser), text)) == ODD[parser][text]


CALL = '<tool_call>{"name": "f"}</tool_call>'
THOUGHT = {
    ("", "<think>\nhm\n</think>\n\nHi\n"): [["hm"], "Hi\n"],
    ("", "\n <think>hm</think> Hi"): [["hm"], "Hi"],
    ("", "<think>\n\n</think>\n\nHi"): ["Hi"],
    ("", "Hi <think>hm</think>"): ["Hi <think>hm</think>"],
    ("", "hm</think>Hi"): ["hm</think>Hi"],
    ("", "<thin"): ["<thin"],
    ("", f"{CALL}\n<think>hm</think>Hi"): [("f", "{}"), ["hm"], "Hi"],
    ("", "<think>a</think> <think>b</think>c"): [["ab"], "c"],
    ("assistant\n<think>\n", "hm\n</think>\n\nHi"): [["hm"], "Hi"],
    ("assistant\n<think>\n", "hm\n</thin"): [["hm\n</thin"]],
    ("assistant\n<think>\n\n</think>\n\n", "Hi"): ["Hi"],
    # A call in a thought is a draft, unless the thought never ends.
    ("<think>", f"Maybe {CALL}?\n</think>\n{CALL}"): [[f"Maybe {CALL}?"], ("f", "{}")],
    ("<think>", f"Now.\n{CALL}"): [["Now."], ("f", "{}")],
    ("<think>", f"The tag <tool_call> is good.\n{CALL} ok"): [["The tag <tool_call> is good."], ("f", "{}"), "ok"],
    ("", f"{CALL} <think>The tag <tool_call> is"): [("f", "{}"), ["The tag <tool_call> is"]],
    ("<think>", "The tag <tool_call> is good. "): [["The tag <tool_call> is good. "]],
}


@pytest.mark.parametrize(("prompt", "text"), THOUGHT)
def test_thoughts(prompt: str, text: str) -> None:
    assert briefly(answer(make("hermes", "think"), text, prompt)) == THOUGHT[prompt, text]


CONTINUED = {
    ("", "<think>\nLet me"): [[" see"], "Hi"],
    ("", "\n<think>"): [["see"], "Hi"],
    ("", "<think>a</think>\n<think>The tag <think> is"): [[" see"], "Hi"],
    ("<think>", "Let me"): [[" see"], "Hi"],
    ("<think>", "Hm</think>Let me"): [" see</think> Hi"],
    ("", "<think>Hm</think>Let me"): [" see</think> Hi"],
    ("", "The tag is <think>"): [" see</think> Hi"],
    ("<|user|><think>\n<|assistant|>", "Let me"): [" see</think> Hi"],
}


@pytest.mark.parametrize(("before", "continued"), CONTINUED)
def test_a_message_that_is_continued_may_have_begun_a_thought(before: str, continued: str) -> None:
    parsers, prompt = make("hermes", "think"), before + continued.lstrip()  # as some templates write it
    found = briefly(answer(parsers, " see</think> Hi", prompt, continued=continued))
    assert found == CONTINUED[before, continued]
    grammar = Grammar(choice=["Hi"])
    is_open = len(found) == 2
    assert (parsers.after_thought(grammar, prompt, continued) == grammar) == (not is_open)


def test_thoughts_of_gemma_may_come_at_any_time() -> None:
    text = "Hi <|channel>thought\nhm\n<channel|> you <|channel>final"
    assert briefly(answer(make("gemma4", "gemma4"), text)) == ["Hi", ["hm"], " you <|channel>final"]
    prompt = "<|turn>model\n<|channel>thought\n<channel|>"
    assert briefly(answer(make("gemma4", "gemma4"), "thought\nHi", prompt)) == ["thought\nHi"]


def test_what_is_not_wanted_stays_in_the_text() -> None:
    text = f"<think>hm</think>\n{CALL}"
    parsers = make("hermes", "think")
    assert briefly(answer(parsers, text, tool_choice="none")) == [["hm"], CALL]
    assert briefly(answer(parsers, text, tools=())) == [["hm"], CALL]
    assert briefly(answer(parsers, text, reasoning=False)) == ["<think>hm</think>", ("f", "{}")]
    assert briefly(answer(parsers, text, tool_choice="none", reasoning=False)) == [text]


@pytest.mark.parametrize("writer", WRITERS)
def test_two_pieces_give_the_same_parts(writer: str) -> None:
    """Wherever the text is cut."""
    parser, write = WRITERS[writer]
    text = f"<think>hm</think>\nSee: {write([('weather', {'city': 'Rome', 'days': 3}), ('f', {})])}\nOk"
    parsers = make(parser, "think")
    whole = read(start(parsers), [text])
    assert briefly(whole)[:2] == [["hm"], "See:"] and len(calls_of(whole)) == 2
    for place in range(len(text)):
        assert read(start(parsers), [text[:place], text[place:]]) == whole


TAGGED = ("qwen3_coder", "glm45", "glm45, without line breaks", "minimax_m2")


@pytest.mark.parametrize("writer", TAGGED)
def test_tags_in_strings_of_json_are_text(writer: str) -> None:
    """Wherever the text is cut. They may look like the end of the call, with another one after it."""
    parser, write = WRITERS[writer]
    parsers, tags = make(parser), CLOSING[parser]
    inner = write([("weather", {"days": 3})])
    for text in (
        tags,
        f'"{tags.strip()}"',
        f"\\{tags}",
        "a" + tags.replace("\n", "") + "b",
        inner,
        inner.replace("\n", ""),
    ):
        for place in ({"s": text}, {text: [text, {"t": text}], "u": [{}, text]}):
            calls: list[Call] = [("weather", {"place": place, "heights": [1.5], "city": "Rome"}), ("f", {})]
            whole = write(calls)
            parts = answer(parsers, f"See: {whole} ok")
            assert [(name, json.loads(arguments)) for name, arguments in calls_of(parts)] == calls
            assert content_of(parts) == "See: ok"
            parts = read(start(parsers), [whole])
            for cut_at in range(0, len(whole), 3):
                assert read(start(parsers), [whole[:cut_at], whole[cut_at:]]) == parts


BROKEN_STRINGS = {
    '{"a": "b': '{"a": "b',
    '{"a": "b" c': '{"a": "b" c',
    '{"a": "b\nc", "d': '{"a": "b\nc", "d',
    '{"a": "b\\': '{"a": "b\\',
    '{\\"a": "b': '{\\"a": "b',
    '["': '["',
    '{"a": "b"': '{"a": "b"',
    '{"a": ["b"\n c': '{"a": ["b"\n c',
    '"a': '"a',
    'a {"b': 'a {"b',
}
"""Values that are not JSON, and what is read."""


@pytest.mark.parametrize("value", BROKEN_STRINGS)
@pytest.mark.parametrize("writer", TAGGED)
def test_a_string_without_end_does_not_swallow_the_tag(writer: str, value: str) -> None:
    parser, write = WRITERS[writer]
    whole = write([("weather", {"place": 7, "days": 3})]).replace("7", value) + " ok"
    parts = answer(make(parser), whole)
    assert content_of(parts) == "ok"
    ((name, arguments),) = calls_of(parts)
    assert json.loads(arguments) == {"place": BROKEN_STRINGS[value], "days": 3}
    for cut_at in range(len(whole)):
        assert read(start(make(parser)), [whole[:cut_at], whole[cut_at:]]) == parts


def test_arguments_stream() -> None:
    for writer, (parser, write) in WRITERS.items():
        reader = start(make(parser))
        text = write([("weather", {"city": "Rome wasn't built in a day"})])
        parts = [part for character in text for part in reader.feed(character)]
        pieces = [part.text for part in parts if isinstance(part, ToolCallArguments)]
        assert len(pieces) > 20 and max(map(len, pieces)) < 14, writer
        assert not [part for part in parts if isinstance(part, Content)]


def test_text_waits_only_while_it_may_be_a_tag() -> None:
    reader = start(make("hermes", "think"))
    assert reader.feed("Hello") == [Content("Hello")]
    assert reader.feed(" world <") == [Content(" world")]
    assert reader.feed("b> <tool") == [Content(" <b>")]
    assert reader.feed("box>\n") == [Content(" <toolbox>")]
    assert reader.feed("", final=True) == [Content("\n")]


# Ids, names, templates.


def test_ids_are_random_and_of_the_kind_the_template_takes() -> None:
    text = "\n".join([CALL] * 50)

    def ids(parsers: Parsers, seed: int) -> list[str]:
        parts = parsers.start(TOOLS, "auto", True, random=random.Random(seed)).feed(text, True)
        return [part.id for part in parts if isinstance(part, ToolCallBegin)]

    parsers = find_parsers("<tool_call> {'arguments'}", "hermes")
    assert ids(parsers, 1) == ids(parsers, 1) != ids(parsers, 2)
    assert len(set(ids(parsers, 1) + ids(parsers, 2))) == 100
    assert all(re.fullmatch("call_[a-z0-9]{24}", id) for id in ids(parsers, 1))
    picky = find_parsers("{%- if tool_call.id|length != 9 %}", "hermes")
    assert all(re.fullmatch("[a-zA-Z0-9]{9}", id) for id in ids(picky, 1))
    unseeded = [parsers.start(TOOLS, "auto", True).feed(CALL, True)[0] for _ in range(2)]
    assert unseeded[0] != unseeded[1]


def test_ids_of_kimi_are_those_that_it_wrote() -> None:
    """They count the calls of a chat. One that comes twice is replaced."""
    call = "<|tool_call_begin|>functions.f:{}<|tool_call_argument_begin|>{{}}<|tool_call_end|>"
    parts = answer(make("kimi_k2"), "".join(map(call.format, (7, 8, 7))))
    ids = [part.id for part in parts if isinstance(part, ToolCallBegin)]
    assert ids[:2] == ["functions.f:7", "functions.f:8"] and ids[2].startswith("call_")


@pytest.mark.parametrize(
    ("template", "tools", "thoughts"),
    [
        (None, "json", "none"),
        ("{{ messages }}", "json", "none"),
        (
            '<tool_call>\\n{\\"name\\": <function-name>, \\"arguments\\": <args>}\\n</tool_call> </think>',
            "hermes",
            "think",
        ),
        ('<tool_call>{"name": "x", "arguments": {}}</tool_call>', "hermes", "none"),
        ("<tool_call>\n<function=a>\n<parameter=b>\n", "qwen3_coder", "none"),
        ("<|tool_call>call: <|channel>thought <channel|>", "gemma4", "gemma4"),
        ("[TOOL_CALLS] [THINK] [/THINK]", "mistral", "mistral"),
        ("<tool_call>{function-name}\n<arg_key>", "json", "none"),
        ("<tool_call>{name}\n<arg_key>a</arg_key>\n<arg_value>b</arg_value>\n</tool_call> </think>", "glm45", "think"),
        ("<tool_calls><tool_call>a<tool_sep><arg_key>a</arg_key><arg_value>b</arg_value>", "json", "none"),
        ("<minimax:tool_call>\n<invoke name=", "minimax_m2", "none"),
        ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>", "deepseek", "none"),
        ("<|tool_calls_section_begin|>{% for call", "kimi_k2", "none"),
    ],
)
def test_the_template_tells_the_parsers(template: str | None, tools: str, thoughts: str) -> None:
    found = find_parsers(template)
    assert (found.tool_parser, found.reasoning_parser) == (tools, thoughts)
    forced = find_parsers(template, "none", "none")
    assert (forced.tool_parser, forced.reasoning_parser, forced.notation, forced.thinking) == (
        "none",
        "none",
        None,
        None,
    )


def test_parsers_by_name() -> None:
    others = {"glm47": "glm45", "deepseek_v3": "deepseek", "deepseek_v31": "deepseek", "kimi_k2": "kimi_k2"}
    for name, ours in ({"qwen3_xml": "qwen3_coder", "llama3_json": "json", "hermes": "hermes"} | others).items():
        assert find_parsers("[TOOL_CALLS]", name).tool_parser == ours
    assert find_parsers("", reasoning_parser="deepseek_r1").reasoning_parser == "think"
    with pytest.raises(
        ValueError, match="unknown tool parser 'nope'; known are auto, hermes, qwen3_coder, gemma4, mist"
    ):
        find_parsers("", "nope")
    with pytest.raises(
        ValueError, match="unknown reasoning parser 'nope'; known are auto, think, gemma4, mistral, harmony, none, q"
    ):
        find_parsers("", reasoning_parser="nope")


def test_tags_that_are_tokens_must_stay_in_the_text() -> None:
    tokens = {"<|tool_call>": 48, "<tool_call|>": 49, "<|channel>": 100, "<eos>": 1, "<think>": 7}
    assert find_parsers(None, "gemma4", "gemma4", added_tokens=tokens).kept_tokens == {48, 49, 100}
    assert find_parsers(None, "none", "think", added_tokens=tokens).kept_tokens == {7}
    assert find_parsers(None, "gemma4").kept_tokens == set()


# Time.

LONG = {
    "text": ("hermes", "think", "A word < and {more}. "),
    "white space": ("hermes", "think", " \n"),
    "white space after text": ("hermes", "think", ("A ", "\n")),
    "white space after a call": ("hermes", "none", (CALL + " ", "\n")),
    "half tags": ("hermes", "think", "<tool_cal <think "),
    "tags": ("hermes", "think", "<tool_call>"),
    "failed calls": ("hermes", "think", '<tool_call>{"name": "f", "arguments": 1}'),
    "a thought with a draft": ("hermes", "think", ("<think>hm <tool_call>", "x ")),
    "arguments": ("hermes", "none", ('<tool_call>{"name": "f", "arguments": {"a": "', "\\n é")),
    "nesting": ("hermes", "none", ('<tool_call>{"name": "f", "arguments": ', '{"a": [')),
    "arguments first": ("hermes", "none", ('<tool_call>{"arguments": {"a": "', "x")),
    "a name without end": ("hermes", "none", ('<tool_call>{"name": "', "x")),
    "brackets": ("json", "none", '[{"name": "'),
    "strings": ("gemma4", "gemma4", ('<|tool_call>call:f{a:<|"|>', '<|"x')),
    "lists": ("gemma4", "gemma4", ("<|tool_call>call:f{a:", "[1,")),
    "bare words": ("gemma4", "gemma4", ("<|tool_call>call:f{a:", "word ")),
    "parameters": ("qwen3_coder", "think", ("<function=weather>", "<parameter=days>\n12\n</parameter>\n")),
    "a parameter": ("qwen3_coder", "think", ("<function=weather><parameter=place>", "\n<param ")),
    "keys": ("glm45", "think", ("<tool_call>f", "<arg_key>a</arg_key><arg_value>12</arg_value>")),
    "strings of JSON": (
        "glm45",
        "think",
        ("<tool_call>weather<arg_key>place</arg_key><arg_value>[", '"</arg_value>",'),
    ),
    "a string of tags": ("glm45", "think", ('<tool_call>weather<arg_key>place</arg_key><arg_value>["', "</arg_value>")),
    "strings without end": (
        "glm45",
        "think",
        (
            '<tool_call>weather<arg_key>place</arg_key><arg_value>["',
            '</arg_value><arg_key>place</arg_key><arg_value>{\\"',
        ),
    ),
    "invocations": ("minimax_m2", "think", ("<minimax:tool_call>", '<invoke name="f">\n</invoke>')),
    "a section": ("kimi_k2", "think", ("<|tool_calls_section_begin|>", "<|tool_call_begin|>f:0<|tool_call_begin|>")),
    "a section of calls": ("deepseek", "think", ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{}")),
}
LONGEST = ("text", "white space after text", "failed calls", "arguments", "strings")
MOST_LINES = 400
"""Of code that one character may take: the longest way through all the generators, and as much again."""


@pytest.mark.parametrize("case", LONG)
def test_each_character_costs_the_same(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted in lines of code run, on some characters all along the text, and in characters given out; and no text is
    left unread but a tag's length."""
    tools, thoughts, text = LONG[case]
    first, again = ("", text) if isinstance(text, str) else text
    text = first + again * ((200_000 if case in LONGEST else 20_000) // len(again))
    folder = str(Path(package.__file__).parent)
    num_lines = num_released = 0

    def trace(frame: Any, event: str, argument: Any) -> Any:
        nonlocal num_lines
        if not frame.f_code.co_filename.startswith(folder):
            return None
        num_lines += event == "line"
        return trace

    def release(source: Source) -> str:
        nonlocal num_released
        text = plain_release(source)
        num_released += len(text)
        return text

    plain_release = Source.release
    monkeypatch.setattr(Source, "release", release)
    parsers = make(tools, thoughts)
    assert parsers.notation is not None
    reader, longest = start(parsers), max(20, *map(len, parsers.notation.tags))
    most = 0
    for i, character in enumerate(text):
        if i % 1000 >= 20:  # tracing is slow
            reader.feed(character)
            continue
        num_lines = 0
        sys.settrace(trace)
        try:
            reader.feed(character)
        finally:
            sys.settrace(None)
        most = max(most, num_lines)
        assert len(reader._source._text) - reader._source._at < longest
    assert 0 < most < MOST_LINES
    num_lines = 0
    sys.settrace(trace)
    reader.feed("", final=True)
    sys.settrace(None)
    assert num_lines < 10 * len(text)
    assert num_released < 3 * len(text)
    reader.check()


# Real templates.

# Name → parsers, where the assistant's part begins, and whether it has content and reasoning beside calls.
CHATML, INST = "<|im_start|>assistant\n", "[/INST]"
ROUND_TRIPS = {
    "Qwen-Qwen2.5-7B-Instruct": ("hermes", "none", CHATML, "content"),
    "Qwen-Qwen3-0.6B": ("hermes", "think", CHATML, "content reasoning"),
    "Qwen-QwQ-32B": ("hermes", "think", CHATML, "content"),
    "MiMo-VL": ("hermes", "none", CHATML, "content"),
    "Bielik-11B-v3.0-Instruct": ("hermes", "think", CHATML, "content reasoning"),
    "ibm-granite-granite-4.0": ("hermes", "none", "<|start_of_role|>assistant<|end_of_role|>", "content"),
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use": ("hermes", "none", "<|im_start|>assistant", ""),
    "Qwen3-Coder": ("qwen3_coder", "none", "<|im_start|>assistant", "content"),
    "Qwen3.5-4B": ("qwen3_coder", "think", CHATML, "content reasoning"),
    "StepFun3.5-Flash": ("qwen3_coder", "think", CHATML, "content reasoning"),
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": ("qwen3_coder", "think", CHATML, "content reasoning"),
    "google-gemma-4-31B-it": ("gemma4", "gemma4", "<|turn>model\n", "content reasoning"),
    "google-gemma-4-31B-it-interleaved": ("gemma4", "gemma4", "<|turn>model\n", "content reasoning"),
    "mistralai-Mistral-Nemo-Instruct-2407": ("mistral", "none", INST, ""),
    "Mistral-Small-3.2-24B-Instruct-2506": ("mistral", "none", INST, ""),
    "unsloth-mistral-Devstral-Small-2507": ("mistral", "none", INST, "content"),
    "mistralai-Ministral-3-14B-Reasoning-2512": ("mistral", "mistral", INST, "content"),
    "GLM-4.6": ("glm45", "think", "<|assistant|>", "content reasoning"),
    "GLM-4.7-Flash": ("glm45", "think", "<|assistant|>", "content reasoning"),
    "Spark2.5": ("glm45", "think", "<|Bot|>", "content reasoning"),
    "MiniMax-M2": ("minimax_m2", "think", "]~b]ai\n", "content reasoning"),
    "moonshotai-Kimi-K2": ("kimi_k2", "none", "assistant<|im_middle|>", "content"),
    "deepseek-ai-DeepSeek-V3.1": ("deepseek", "think", "<｜Assistant｜>", "content"),
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": ("deepseek", "think", "Hi<｜Assistant｜>", ""),
    "meta-llama-Llama-3.1-8B-Instruct": ("json", "none", "assistant<|end_header_id|>\n\n", "single"),
    "meta-llama-Llama-3.3-70B-Instruct": ("json", "none", "assistant<|end_header_id|>\n\n", "single"),
}
ENDS = re.compile(
    r"<\|im_end\|>|</s>|<turn\|>|<\|eot_id\|>|<\|end_of_text\|>|<\|tool_response>|\[e~\[|<｜end▁of▁sentence｜>|<end>"
)


@pytest.mark.slow
@pytest.mark.parametrize("name", ROUND_TRIPS)
def test_what_real_templates_write_is_read(name: str, tmp_path: Path) -> None:
    path = REAL_TEMPLATES / f"{name}.jinja"
    needs(path.is_file(), "needs real chat templates; run: make .cache/llama.cpp/.fetched")
    tools, thoughts, begins, has = ROUND_TRIPS[name]
    parsers = find_parsers(path.read_text(encoding="utf-8"))
    assert (parsers.tool_parser, parsers.reasoning_parser) == (tools, thoughts)
    template = ChatTemplate(tiny_tokenizers.write("llama", tmp_path), str(path))
    offered: list[dict[str, Any]] = [
        {
            "type": "function",
            "function": {"name": t.name, "description": "Does it.", "parameters": copy.deepcopy(t.parameters or {})},
        }
        for t in TOOLS[1:]
    ]
    offered[0]["function"]["parameters"]["properties"] |= {"note": {"type": "string"}, "unit": {"type": "string"}}
    calls = [(name, {k: v for k, v in arguments.items() if v is not None}) for name, arguments in WELL_WRITTEN]
    calls = [call for call in calls if call[0] == "weather"][: 1 if has == "single" else None]
    for content in ("", "Let me see."):
        for thought in ("", "I wonder.\n\nWell."):
            written = [
                {"id": f"call0000{i}", "type": "function", "function": {"name": name, "arguments": arguments}}
                for i, (name, arguments) in enumerate(calls)
            ]
            said = {"role": "assistant", "content": content, "reasoning_content": thought, "tool_calls": written}
            text = template.render([{"role": "user", "content": "Hi"}, said], offered, add_generation_prompt=False)
            prompt, text = text[: (place := text.rindex(begins) + len(begins))], text[place:]
            if parsers.thinking and text.startswith(
                parsers.thinking.closes
            ):  # the prompt has it where nothing is thought
                text = text.removeprefix(parsers.thinking.closes)
            parts = answer(parsers, ENDS.split(text)[0].removeprefix("\n"), prompt)
            assert [(name, json.loads(arguments)) for name, arguments in calls_of(parts)] == calls
            assert content_of(parts) == (content if "content" in has else "")
            assert reasoning_of(parts) == (thought if "reasoning" in has else "")


@pytest.mark.slow
def test_real_templates_tell_their_parsers() -> None:
    paths = sorted(REAL_TEMPLATES.glob("*.jinja"))
    needs(len(paths) > 60, "needs real chat templates; run: make .cache/llama.cpp/.fetched")
    found = {path.stem: find_parsers(path.read_text(encoding="utf-8")) for path in paths}
    assert {name for name, parsers in found.items() if parsers.tool_parser != "json"} - set(ROUND_TRIPS) == {
        "ibm-granite-granite-4.1",
        "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use",
        "Kimi-K2-Instruct",  # which changes lists, as no sandbox allows
        "Kimi-K2-Thinking",
        "Reka-Edge",
        "deepseek-ai-DeepSeek-R1-Distill-Llama-8B",
        "inclusionai-ling-3.0-flash",
        "llama-cpp-deepseek-r1",
        "poolside-Laguna-S-2.1",
        "poolside-Laguna-XS-2.1",
        "poolside-Laguna-XS.2",
        "openai-gpt-oss-120b",  # in test_harmony
    }
    assert {name for name, parsers in found.items() if parsers.short_ids} == {
        "Mistral-Small-3.2-24B-Instruct-2506",
        "mistralai-Mistral-Nemo-Instruct-2407",
    }
