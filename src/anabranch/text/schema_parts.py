"""The structure of JSON schemas: where schemas stand in schemas, where references lead, and how deep that may be.

A schema comes from a client and may be anything: what is no schema is passed over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

MAX_NESTING = 100
"""Brackets within brackets; llguidance's own limit is 127."""
MAX_DEPTH = 400
"""Schemas within schemas, references followed: llguidance recurses over them, about 5 kB of stack each."""

ANNOTATIONS = {"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment"}
ANNOTATIONS |= {"$schema", "$id", "x-guidance", "discriminator"}
CONDITIONS = ("not", "if", "then", "else")
UNEVALUATED = ("unevaluatedProperties", "unevaluatedItems")
ONE = ("items", "additionalItems", "additionalProperties", "contains", "propertyNames", *CONDITIONS, *UNEVALUATED)
LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
DEFINITIONS = ("$defs", "definitions")
MAPS = ("properties", "patternProperties", "dependentSchemas", *DEFINITIONS)


def rewrite(schema: dict[str, Any], change: Callable[[Any, str, str], Any]) -> dict[str, Any]:
    """A copy with `change(inner schema, keyword, place below the keyword)` for every schema directly inside."""
    result = dict(schema)
    for word, value in schema.items():
        if word in LISTS and isinstance(value, list):
            result[word] = [change(one, word, f"/{i}") for i, one in enumerate(value)]
        elif word in MAPS and isinstance(value, dict):
            result[word] = {name: change(one, word, f"/{name}") for name, one in value.items()}
        elif word in ONE:
            result[word] = change(value, word, "")
    return result


def is_reference(schema: dict[str, Any]) -> bool:
    """A reference and nothing that holds beside it."""
    return isinstance(schema.get("$ref"), str) and not set(schema) - ANNOTATIONS - {"$ref", *DEFINITIONS}


def follow(reference: str, root: dict[str, Any]) -> Any:
    """What a reference within the schema leads to; None if that is nothing, or elsewhere."""
    place: Any = root
    if reference != "#" and not reference.startswith("#/"):
        return None
    for step in reference.split("/")[1:]:
        step = step.replace("~1", "/").replace("~0", "~")
        if isinstance(place, dict):
            place = place.get(step)
        elif isinstance(place, list) and step.isdecimal() and int(step) < len(place):
            place = place[int(step)]
        else:
            return None
    return place


def check_nesting(value: Any) -> None:
    level, depth = [value], 0
    while level:
        depth += 1
        if depth > MAX_NESTING:
            raise ValueError(f"is nested too deeply: at most {MAX_NESTING} brackets within brackets")
        inner: list[Any] = []
        for one in level:
            inner += one.values() if isinstance(one, dict) else one if isinstance(one, list) else ()
        level = [one for one in inner if isinstance(one, dict | list)]


def _inside(schema: dict[str, Any]) -> list[Any]:
    """The schemas directly inside, definitions aside."""
    found: list[Any] = []
    rewrite(schema, lambda one, word, _: None if word in DEFINITIONS else found.append(one))
    return found


def check_depth(root: dict[str, Any]) -> None:
    """Follows references, each once, as llguidance does."""
    seen: set[str] = set()
    path: list[Iterator[Any]] = [iter((root,))]
    while path:
        schema = next(path[-1], None)
        if schema is None:
            path.pop()
            continue
        if len(path) > MAX_DEPTH:
            raise ValueError(f"is nested too deeply: at most {MAX_DEPTH} schemas within schemas, references included")
        inner = _inside(schema)
        reference = schema.get("$ref")
        if isinstance(reference, str) and reference not in seen:
            seen.add(reference)
            inner.append(follow(reference, root))
        path.append(one for one in inner if isinstance(one, dict))
