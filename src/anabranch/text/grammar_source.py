"""Turns a request's grammar into llguidance's own form and refuses what would take unbounded time or memory. Text only.

Runs in the child processes of grammar_process, so that the engine spends no time on large grammars.
"""

import json
import re
from collections.abc import Iterator
from decimal import Decimal, InvalidOperation
from typing import Any

from anabranch.text.json_schema import for_llguidance

MAX_REMAINDERS = 50_000
"""A multipleOf costs a lexer state for every remainder, which none of llguidance's limits count."""
MAX_RULES = 1000
"""Rules within rules of a Lark grammar: llguidance recurses over them, about 3 kB of stack each."""

LITERAL = re.compile(r'"(?:\\.|[^"\\\n])*"|/(?![/*])(?:\\.|[^/\\\n])+/|//[^\n]*|%json\s*')
RULE = re.compile(r"^[ \t]*[?!]?([A-Za-z_]\w*)(?:\.-?\d+)?[ \t]*(?:\[[^\n]*?\])?[ \t]*:", re.MULTILINE)
NAME = re.compile(r"[A-Za-z_]\w*")


def make_source(kind: str, text: str, open_objects: bool) -> str:
    """`kind`: json_schema, regex, lark or choice (given as Lark). ValueError: why it cannot be used."""
    from llguidance import LLMatcher

    source: str
    if kind == "regex":
        source = LLMatcher.grammar_from_regex(text)
    elif kind == "json_schema":
        try:
            schema = json.loads(text)
            json.dumps(schema, allow_nan=False)
        except RecursionError:
            raise ValueError(f"{kind} is nested too deeply") from None
        except ValueError as error:
            raise ValueError(f"{kind} is not JSON: {error}") from None
        text = _schema(kind, schema, open_objects)
        try:
            source = LLMatcher.grammar_from_json_schema(text)
        except ValueError as error:
            raise ValueError(f"{kind} cannot be used: {error}") from None
    else:
        source = LLMatcher.grammar_from_lark(_lark(text, open_objects) if kind == "lark" else text)
    return source


def _schema(what: str, schema: Any, open_objects: bool) -> str:
    try:
        schema = for_llguidance(schema, open_objects)
        _check_remainders(schema)
    except RecursionError:
        raise ValueError(f"{what} is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"{what} {error}") from None
    return json.dumps(schema, allow_nan=False)


def _lark(text: str, open_objects: bool) -> str:
    """The JSON schemas inside are prepared like others."""
    decoder, pieces, plain, place = json.JSONDecoder(), list[str](), list[str](), 0
    while (literal := LITERAL.search(text, place)) is not None:
        plain.append(text[place : literal.start()])
        pieces += [plain[-1], literal[0]]
        place = literal.end()
        if literal[0].startswith("%json"):
            try:
                schema, place = decoder.raw_decode(text, place)
            except RecursionError:
                raise ValueError("a JSON schema in lark is nested too deeply") from None
            except ValueError:
                continue  # llguidance reports what is wrong with it
            pieces.append(_schema("a JSON schema in lark", schema, open_objects))
    _check_rules(" ".join([*plain, text[place:]]))
    return "".join([*pieces, text[place:]])


def _check_rules(text: str) -> None:
    """How deep rules are within rules. `text`: a Lark grammar without its literals."""
    heads = list(RULE.finditer(text))
    ends = [head.start() for head in heads[1:]] + [len(text)]
    inside = {head[1]: NAME.findall(text, head.end(), end) for head, end in zip(heads, ends)}
    seen = {"start"}
    path: list[Iterator[str]] = [iter(inside.get("start", ()))]
    while path:
        name = next((name for name in path[-1] if name in inside and name not in seen), None)
        if name is None:
            path.pop()
            continue
        seen.add(name)
        path.append(iter(inside[name]))
        if len(path) > MAX_RULES:
            raise ValueError(f"lark is nested too deeply: at most {MAX_RULES} rules within rules")


def _check_remainders(schema: object) -> None:
    """How many states all multipleOf together take."""
    total, todo = 0, [schema]
    while todo:
        value = todo.pop()
        if isinstance(value, list):
            todo += value
        elif isinstance(value, dict):
            todo += value.values()
            try:
                digits = Decimal(str(value.get("multipleOf", 0))).as_tuple().digits
            except InvalidOperation:
                continue  # not a number: llguidance refuses it
            number = int("".join(map(str, digits)))
            for factor in (2, 5):  # of the base ten: only a number's last digits decide about the remainder
                while number and number % factor == 0:
                    number //= factor
            total += number
    if total > MAX_REMAINDERS:
        raise ValueError(f"is too complex: multipleOf needs {total} remainders, at most {MAX_REMAINDERS} are allowed")
