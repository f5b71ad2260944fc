"""Whether a value can fit two JSON schemas at once: what a oneOf needs to know before it may be taken as an anyOf.

The answer is "no" only where that can be shown: by type, by the values named, by the range of a number or the length of
a string, by a required property whose schemas do not overlap (a tag), or by one that the other object cannot have.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

from anabranch.text.schema_parts import follow, rewrite

TYPES = frozenset({"string", "integer", "fraction", "boolean", "null", "array", "object"})
MAX_LEVELS = 8
"""Schemas within schemas that are compared."""
MAX_WAYS = 64
MAX_STEPS = 50_000
"""Schemas that are looked at; what is not compared counts as overlapping."""


@dataclass(slots=True)
class Way:
    """One of the ways in which a value can fit a schema: schemas that hold together and have no choice in them."""

    parts: list[dict[str, Any]] = field(default_factory=list)

    def types(self) -> frozenset[str]:
        types = TYPES
        for part in self.parts:
            if (values := _values(part)) is not None:
                types &= {_type(value) for value in values}
            if "type" in part:
                stated = part["type"] if isinstance(part["type"], list) else [part["type"]]
                words = {word for word in stated if isinstance(word, str)}
                types &= words | ({"integer", "fraction"} if "number" in words else set())
        return types

    def values(self) -> set[str] | None:
        """The values that it names one by one, as canonical JSON; None if it does not."""
        found = [set(map(_canonical, values)) for part in self.parts if (values := _values(part)) is not None]
        return set.intersection(*found) if found else None

    def required(self) -> set[str]:
        lists = [part["required"] for part in self.parts if isinstance(part.get("required"), list)]
        return {name for names in lists for name in names if isinstance(name, str)}

    def member(self, name: str) -> list[Any]:
        maps = [part["properties"] for part in self.parts if isinstance(part.get("properties"), dict)]
        return [properties[name] for properties in maps if name in properties]

    def can_have(self, name: str) -> bool:
        for part in self.parts:
            properties = part.get("properties")
            if part.get("additionalProperties") is False and not part.get("patternProperties"):
                if not isinstance(properties, dict) or name not in properties:
                    return False
        return True

    def range(self, low: tuple[str, ...], high: tuple[str, ...]) -> tuple[float, float]:
        lows = [part[word] for part in self.parts for word in low if _is_number(part.get(word))]
        highs = [part[word] for part in self.parts for word in high if _is_number(part.get(word))]
        return max(lows, default=float("-inf")), min(highs, default=float("inf"))


class Overlap:
    """Within one schema, whose references lead to its own definitions."""

    def __init__(self, root: dict[str, Any]) -> None:
        self.root = root
        self.num_steps = 0

    def without_one_of(self) -> dict[str, Any]:
        """The schema with anyOf for oneOf; ValueError if a value may fit two options."""
        result: dict[str, Any] = self._rewrite(self.root, "#")
        return result

    def _rewrite(self, schema: Any, path: str) -> Any:
        if not isinstance(schema, dict):
            return schema
        _check_count(schema, path)
        result = rewrite(schema, lambda one, word, place: self._rewrite(one, f"{path}/{word}{place}"))
        if isinstance(schema.get("oneOf"), list):
            self._check(schema, path)
            options = {"anyOf": result.pop("oneOf")}
            result.pop("discriminator", None)
            result |= {"allOf": [*result.get("allOf", []), options]} if "anyOf" in result else options
        return result

    def _check(self, schema: dict[str, Any], path: str) -> None:
        beside = {word: value for word, value in schema.items() if word != "oneOf"}
        for (i, one), (j, other) in combinations(enumerate(schema["oneOf"]), 2):
            if not self.disjoint([one, beside], [other, beside]):
                raise ValueError(
                    f"has a oneOf at {path} whose options {i} and {j} may both fit a value, which a grammar cannot "
                    f"exclude; use anyOf, or give each option a required property with a const of its own"
                )

    def disjoint(self, ones: list[Any], others: list[Any], level: int = 0) -> bool:
        """No value fits all of the ones and all of the others; False if that cannot be shown."""
        if level > MAX_LEVELS:
            return False
        ways, other_ways = self._ways(ones), self._ways(others)
        if ways is None or other_ways is None:
            return False
        return all(self._ways_disjoint(way, other, level) for way in ways for other in other_ways)

    def _ways_disjoint(self, one: Way, other: Way, level: int) -> bool:
        self.num_steps += 1
        if self.num_steps > MAX_STEPS:
            return False
        types = one.types() & other.types()
        if not types:
            return True
        values, other_values = one.values(), other.values()
        if values is not None and other_values is not None and not values & other_values:
            return True
        if types == {"object"}:
            return self._objects_disjoint(one, other, level)
        if types <= {"integer", "fraction"}:
            return _apart(one, other, ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum"))
        return types == {"string"} and _apart(one, other, ("minLength",), ("maxLength",))

    def _objects_disjoint(self, one: Way, other: Way, level: int) -> bool:
        required, other_required = one.required(), other.required()
        if any(not other.can_have(name) for name in required) or any(not one.can_have(name) for name in other_required):
            return True
        return any(
            self.disjoint(one.member(name), other.member(name), level + 1)
            for name in sorted(required & other_required)
            if one.member(name) and other.member(name)
        )

    def _ways(self, schemas: list[Any], level: int = 0) -> list[Way] | None:
        """None: too many, or a schema of which nothing is known."""
        ways, todo = [Way()], list(schemas)
        while todo:
            self.num_steps += 1
            schema = todo.pop()
            if schema is True:
                continue
            if schema is False:
                return []
            if not isinstance(schema, dict) or level > MAX_LEVELS or self.num_steps > MAX_STEPS:
                return None
            if isinstance(reference := schema.get("$ref"), str):
                level += 1
                todo.append(follow(reference, self.root))
            todo += schema["allOf"] if isinstance(schema.get("allOf"), list) else ()
            ways = [Way([*way.parts, schema]) for way in ways]
            for word in ("anyOf", "oneOf"):
                if isinstance(options := schema.get(word), list):
                    inner = [self._ways([option], level + 1) for option in options]
                    if any(some is None for some in inner):
                        return None
                    flat = [way for some in inner if some is not None for way in some]
                    if len(ways) * len(flat) > MAX_WAYS:
                        return None
                    ways = [Way(way.parts + more.parts) for way in ways for more in flat]
        return ways


def _check_count(schema: dict[str, Any], path: str) -> None:
    least = schema.get("minProperties")
    closed = schema.get("additionalProperties") is False and not schema.get("patternProperties")
    if closed or not isinstance(least, int):
        return
    required = schema.get("required")
    if least - (len(required) if isinstance(required, list) else 0) > 1:
        raise ValueError(
            f"has minProperties {least} at {path} where keys are not named, and a grammar cannot exclude that one of "
            f"them is repeated to reach it; name the keys in properties and required"
        )


def _apart(one: Way, other: Way, low: tuple[str, ...], high: tuple[str, ...]) -> bool:
    (least, most), (other_least, other_most) = one.range(low, high), other.range(low, high)
    return most < other_least or other_most < least


def _values(part: dict[str, Any]) -> list[Any] | None:
    if "const" in part:
        return [part["const"]]
    return part["enum"] if isinstance(part.get("enum"), list) else None


def _type(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, float):
        return "integer" if value.is_integer() else "fraction"
    names: dict[type, str] = {str: "string", int: "integer", type(None): "null", list: "array"}
    return names.get(type(value), "object")


def _canonical(value: Any) -> str:
    """Equal texts for equal values: 1 and 1.0 are."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, list):
        return f"[{','.join(map(_canonical, value))}]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{json.dumps(key)}:{_canonical(value[key])}" for key in sorted(value)) + "}"
    return json.dumps(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
