"""JSON schemas on their way to a grammar: closed objects, oneOf, whitespace, keys that repeat, depth."""

import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Optional, Union

import pytest

pytest.importorskip("llguidance")
pytest.importorskip("pydantic")

from pydantic import BaseModel, Field

from anabranch.sampling_params import Grammar
from anabranch.text.grammar import GrammarCompiler
from anabranch.text.json_schema import prepare
from tests.text.test_grammar import EOS, PADDED, TOKENIZER, allowed

INT, TEXT = {"type": "integer"}, {"type": "string"}
POINT = {"type": "object", "properties": {"x": INT, "y": INT}, "required": ["x"]}


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(TOKENIZER, PADDED, [EOS])
    yield compiler
    compiler.close()


def takes(compiler: GrammarCompiler, schema: Any, text: str, **options: Any) -> bool:
    matcher = compiler.compile(Grammar(json_schema=json.dumps(schema), **options))
    return all(matcher.accept(token) for token in TOKENIZER.encode(text).ids) and EOS in allowed(matcher)


BASE = {"$defs": {"Base": {"type": "object", "properties": {"id": INT}, "required": ["id"]}}}
REFERENCE = {"$ref": "#/$defs/Base"}
RECURSIVE = {
    "$defs": {
        "Node": {
            "type": "object",
            "properties": {"v": INT, "next": {"allOf": [{"$ref": "#/$defs/Node"}, {"title": "n"}]}},
        }
    },
    "$ref": "#/$defs/Node",
}
# schema, texts that fit, texts that do not
CLOSED: dict[str, tuple[Any, list[str], list[str]]] = {
    "by default": (POINT, ['{"x": 1}', '{"x": 1, "y": 2}'], ['{"x": 1, "z": 2}', '{"y": 2}']),
    "no properties": ({"type": "object", "properties": {}}, ["{}"], ['{"a": 1}']),
    "nothing listed": ({"type": "object"}, ["{}", '{"a": {"b": 1}}'], ["[]"]),
    "inside": ({"type": "array", "items": POINT}, ['[{"x": 1}]'], ['[{"x": 1, "z": 2}]']),
    "said to be open": ({**POINT, "additionalProperties": True}, ['{"x": 1, "z": [2]}'], ['{"z": 2}']),
    "open for some": ({**POINT, "additionalProperties": TEXT}, ['{"x": 1, "z": "2"}'], ['{"x": 1, "z": 2}']),
    "patterns": (
        {"type": "object", "patternProperties": {"^a": INT}},
        ["{}", '{"ab": 1}', '{"ab": 1, "ac": 2}'],
        ['{"b": 1}', '{"ab": "1"}'],
    ),
    "required but not described": (
        {"type": "object", "properties": {"a": INT}, "required": ["a", "b"]},
        ['{"a": 1, "b": [null]}'],
        ['{"a": 1}', '{"a": 1, "b": 1, "c": 1}'],
    ),
    "allOf": (
        {"allOf": [{**POINT}, {"type": "object", "properties": {"z": INT}, "required": ["z"]}]},
        ['{"x": 1, "z": 2}', '{"x": 1, "y": 2, "z": 3}'],
        ['{"x": 1}', '{"x": 1, "z": "2"}', '{"x": 1, "z": 2, "w": 3}'],
    ),
    "allOf with a reference": (
        {**BASE, "allOf": [REFERENCE, {"properties": {"z": INT}}], "properties": {"base": REFERENCE}},
        ['{"id": 2, "z": 3, "base": {"id": 1}}', '{"id": 2}'],
        ['{"id": 2, "base": {"id": 1, "z": 2}}', '{"id": 1, "w": 1}', '{"z": 1}'],
    ),
    "a reference and more": (
        {**BASE, **REFERENCE, "properties": {"z": INT}, "required": ["z"]},
        ['{"z": 1, "id": 2}'],
        ['{"id": 2}', '{"z": 1}', '{"z": 1, "id": 2, "w": 3}'],
    ),
    "allOf of one": (
        {**BASE, "type": "object", "properties": {"a": {"allOf": [REFERENCE], "title": "A"}}},
        ['{"a": {"id": 1}}', "{}"],
        ['{"a": {"id": 1, "b": 2}}'],
    ),
    "anyOf beside properties": (
        {**POINT, "anyOf": [{"properties": {"a": INT}, "required": ["a"]}, {"properties": {"b": TEXT}}]},
        ['{"x": 1, "a": 2}', '{"x": 1, "b": "2"}', '{"x": 1}'],
        ['{"x": 1, "a": 2, "b": "2"}', '{"x": 1, "c": 2}', '{"a": 2}'],
    ),
    "anyOf and oneOf": (
        {
            **POINT,
            "anyOf": [{"required": ["a"], "properties": {"a": INT}}, {}],
            "oneOf": [{"required": ["t"], "properties": {"t": {"const": i}}} for i in (1, 2)],
        },
        ['{"x": 1, "a": 2, "t": 1}', '{"x": 1, "t": 2}'],
        ['{"x": 1}', '{"x": 1, "t": 3}', '{"x": 1, "t": 1, "w": 2}'],
    ),
    "recursive": (RECURSIVE, ['{"v": 1, "next": {"next": {}}}'], ['{"next": {"w": 1}}']),
    "a property called properties": (
        {"type": "object", "properties": {"properties": {"type": "object", "properties": {"oneOf": INT}}}},
        ['{"properties": {"oneOf": 1}}'],
        ['{"properties": {"anyOf": 1}}'],
    ),
}


@pytest.mark.parametrize("case", CLOSED)
def test_objects_are_closed_unless_they_say_otherwise(case: str, compiler: GrammarCompiler) -> None:
    schema, fitting, others = CLOSED[case]
    assert [text for text in fitting if not takes(compiler, schema, text)] == []
    assert [text for text in others if takes(compiler, schema, text)] == []


def test_an_option_leaves_objects_open(compiler: GrammarCompiler) -> None:
    assert takes(compiler, POINT, '{"x": 1, "z": [2]}', open_objects=True)
    assert not takes(compiler, {**POINT, "additionalProperties": False}, '{"x": 1, "z": [2]}', open_objects=True)


def test_the_schema_that_was_given_stays_as_it_was() -> None:
    for schema, _, _ in CLOSED.values():
        text = json.dumps(schema)
        prepare(schema)
        assert json.dumps(schema) == text


def test_keys_do_not_repeat_those_that_are_named(compiler: GrammarCompiler) -> None:
    schema = {**POINT, "additionalProperties": True}
    for repeated in ('"x"', '"y"', r'"\u0078"', r'"\u0079"'):
        assert not takes(compiler, schema, f'{{"x": 1, "z": 2, {repeated}: 3}}')
    assert takes(compiler, {"type": "object", "minProperties": 1}, '{"a": 1}')
    with pytest.raises(ValueError, match="minProperties 2 at # .* repeated"):
        takes(compiler, {"type": "object", "minProperties": 2}, "{}")


WHITE = {
    '{"x":1,"y":2}': True,
    '{"x": 1, "y": 2}': True,
    '{ "x" : 1 , "y" : 2 }': True,
    '{\n  "x": 1,\n  "y": 2\n}': True,
    '{\r\n\t"x": 1\r\n}': True,
    "{\n" + 20 * " " + '"x": 1}': True,
    "{\n" + 21 * " " + '"x": 1}': False,
    '{  "x": 1}': False,
    '{\n\n"x": 1}': False,
    '{"x":\t1}': False,
    ' {"x": 1}': False,
}


@pytest.mark.parametrize("text", WHITE)
def test_whitespace_is_bounded(text: str, compiler: GrammarCompiler) -> None:
    assert takes(compiler, POINT, text) == WHITE[text]
    compact = {**POINT, "x-guidance": {"whitespace_flexible": False}}
    assert takes(compiler, compact, text) == (text == '{"x":1,"y":2}')


class Cat(BaseModel):
    kind: Literal["cat"]
    name: str


class Dog(BaseModel):
    kind: Literal["dog"] = "dog"
    name: str
    friend: Optional["Owner"] = None


class Cow(BaseModel):
    kind: Literal["cow"] = "cow"
    name: str


class Pair(BaseModel):
    kind: Literal["pair"] = "pair"
    both: list[Annotated[Union["Pair", Cow], Field(discriminator="kind")]]


class Owner(BaseModel):
    pet: Annotated[Union[Cat, Dog, Cow], Field(discriminator="kind")]  # noqa: UP007


Dog.model_rebuild()
Pair.model_rebuild()


def test_a_discriminated_union_of_pydantic(compiler: GrammarCompiler) -> None:
    schema = Owner.model_json_schema()
    assert "oneOf" in json.dumps(schema)
    good = ['{"pet": {"kind": "cat", "name": "a"}}', '{"pet": {"kind": "cow", "name": "a"}}']
    good.append('{"pet": {"kind": "dog", "name": "a", "friend": {"pet": {"kind": "cat", "name": "b"}}}}')
    for text in good:
        assert takes(compiler, schema, text), text
        Owner.model_validate_json(text)
    text = '{"kind": "pair", "both": [{"kind": "pair", "both": []}, {"kind": "cow", "name": "a"}]}'
    assert takes(compiler, Pair.model_json_schema(), text)
    assert not takes(compiler, Pair.model_json_schema(), '{"kind": "pair", "both": [{"both": []}]}')
    for text in ('{"pet": {"name": "a"}}', '{"pet": {"kind": "cow", "name": "a", "friend": null}}'):
        assert not takes(compiler, schema, text), text


TAGGED = [{"type": "object", "properties": {"t": {"const": i}}, "required": ["t"]} for i in range(3)]
APART: dict[str, list[Any]] = {
    "types": [TEXT, INT, {"type": "null"}, {"type": ["array", "boolean"]}],
    "values": [{"const": 1}, {"enum": [2, "1"]}, {"const": True}, {"const": None}],
    "ranges": [{"type": "integer", "maximum": 3}, {"type": "number", "minimum": 4}],
    "lengths": [{"type": "string", "maxLength": 3}, {"type": "string", "minLength": 4}],
    "tags": TAGGED,
    "keys": [{"type": "object", "properties": {k: INT}, "required": [k]} for k in "ab"],
    "options within": [{"anyOf": TAGGED[:2]}, TAGGED[2], {"allOf": [INT, {"maximum": 1}]}],
}
OVERLAPPING: dict[str, list[Any]] = {
    "integers are numbers": [INT, {"type": "number"}],
    "the same twice": [POINT, POINT],
    "a value of both": [{"enum": [1, 2]}, {"enum": [2.0, 3]}],
    "a type and a value": [TEXT, {"const": "a"}],
    "tags that need not be there": [{k: v for k, v in one.items() if k != "required"} for one in TAGGED],
    "patterns": [{"type": "string", "pattern": "^a"}, {"type": "string", "pattern": "b$"}],
    "required keys": [{"type": "object", "required": [k], "additionalProperties": True} for k in "ab"],
    "itself": [{"$ref": "#"}, {"$ref": "#"}],
    "nothing is said": [{}, INT],
}


@pytest.mark.parametrize("case", APART)
def test_a_one_of_whose_options_are_apart_is_an_any_of(case: str, compiler: GrammarCompiler) -> None:
    assert "oneOf" not in json.dumps(prepare({"oneOf": APART[case]}))
    compiler.compile(Grammar(json_schema=json.dumps({"oneOf": APART[case]})))


@pytest.mark.parametrize("case", OVERLAPPING)
def test_a_one_of_whose_options_overlap_is_refused(case: str, compiler: GrammarCompiler) -> None:
    schema = {"type": "object", "properties": {"a": {"oneOf": OVERLAPPING[case]}}}
    with pytest.raises(ValueError, match="^grammar: json_schema has a oneOf at #/properties/a whose options 0 and 1 "):
        compiler.compile(Grammar(json_schema=json.dumps(schema)))


def test_schemas_in_a_lark_grammar_are_prepared_too(compiler: GrammarCompiler) -> None:
    def fits(text: str, **options: Any) -> bool:
        lark = f'start: "%json {{}}" %json {json.dumps(POINT)} /a*/'
        matcher = compiler.compile(Grammar(lark=lark, **options))
        return all(matcher.accept(token) for token in TOKENIZER.encode(text).ids) and EOS in allowed(matcher)

    assert fits('%json {}{"x": 1}aa') and not fits('%json {}{"x": 1, "z": 1}') and not fits('%json {}{  "x": 1}')
    assert fits('%json {}{"x": 1, "z": 1}', open_objects=True)


NOT_A_MAP = {"properties": 3, "allOf": [{"properties": {"a": {}}}, {"type": "object"}]}


@pytest.mark.parametrize(
    "schema", [[], 5, None, {"allOf": 5}, {"properties": [1]}, {"oneOf": {}}, {"$ref": 5}, {"required": 1}, NOT_A_MAP]
)
def test_what_is_no_schema_is_left_to_llguidance(schema: Any, compiler: GrammarCompiler) -> None:
    try:
        compiler.compile(Grammar(json_schema=json.dumps(schema)))
    except ValueError as error:
        assert "Error:" not in str(error) and str(error).startswith("grammar: json_schema ")
