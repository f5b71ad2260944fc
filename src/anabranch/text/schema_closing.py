"""Objects that have the keys they name and no others: what a JSON schema leaves open is closed.

An object that lists its properties has no others, unless it says additionalProperties. In an allOf, or beside a $ref,
anyOf or oneOf, the properties of all parts count, and each part alone stays open. A discriminator's property is
required.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from anabranch.text.schema_parts import ANNOTATIONS, CONDITIONS, follow, is_reference, rewrite

CHOICES = ("anyOf", "oneOf")
STATED = ("additionalProperties", "unevaluatedProperties")
"""An object with one of these has said itself which keys it has."""
MAX_COPIES = 1000
"""Definitions that are written a second time, because they are part of an allOf."""


@dataclass(slots=True)
class Keys:
    """What some schemas, which hold together, say of an object's keys."""

    names: dict[str, None] = field(default_factory=dict)
    patterns: dict[str, None] = field(default_factory=dict)
    listed: bool = False
    """Some of them list properties."""
    stated: bool = False
    """Some of them say whether there may be others."""
    inner_choice: bool = False
    """A part has an anyOf or oneOf."""

    def copy(self) -> Keys:
        return Keys(dict(self.names), dict(self.patterns), self.listed)

    def form(self) -> object:
        """Of a definition that is closed with these keys."""
        return tuple(self.names), tuple(self.patterns), self.listed


class Closing:
    """One schema. References stay references: a definition that is needed in another form gets a copy of its own."""

    def __init__(self, root: dict[str, Any]) -> None:
        self.root = root
        self.copies: dict[Any, str] = {}
        self.definitions: dict[str, Any] = {}
        self.taken = set(root["$defs"]) if isinstance(root.get("$defs"), dict) else set[str]()

    def result(self) -> dict[str, Any]:
        result: dict[str, Any] = self.whole(self.root)
        if self.definitions:
            result["$defs"] = {**result.get("$defs", {}), **self.definitions}
        return result

    def whole(self, schema: Any, outer: Keys | None = None) -> Any:
        """A schema that alone, or together with one that has the `outer` keys, describes a value."""
        if not isinstance(schema, dict):
            if schema is not True or outer is None:
                return schema
            schema = {}
        if is_reference(schema):
            if outer is None:
                return self._rewrite(schema, self.whole)
            return self._copy(schema, outer.form(), lambda one: self.whole(one, outer))
        if (only := _only_part(schema)) is not None:
            return {**schema, "allOf": [self.whole(only, outer)]}
        keys = self._keys(schema, Keys() if outer is None else outer.copy())
        choices = [word for word in CHOICES if isinstance(schema.get(word), list)]
        if keys.stated:
            return self._rewrite(schema, self.part, "open")
        if not keys.listed or (len(choices) == 1 and not keys.inner_choice):
            named = keys if keys.listed or keys.names else None
            return self._rewrite(schema, lambda option: self.whole(option, named), keys.form())
        for word in choices:
            for option in schema[word]:
                self._collect(option, keys, set())
        result = self._rewrite(schema, self.part, "open")
        for word, names in (("properties", keys.names), ("patternProperties", keys.patterns)):
            known = result.get(word, {})
            if names:
                result[word] = {**known, **{name: True for name in names if name not in known}}
        result["additionalProperties"] = False
        return result

    def part(self, schema: Any) -> Any:
        """A schema that holds together with others: what keys there are is not for it to say."""
        if not isinstance(schema, dict):
            return schema
        if is_reference(schema):
            return self._copy(schema, "open", self.part)
        return self._rewrite(schema, self.part, "open")

    def _rewrite(self, schema: dict[str, Any], option: Callable[[Any], Any], form: object = None) -> dict[str, Any]:
        """With everything inside rewritten: parts of an allOf as parts, options as told, all others as wholes. `form`
        is what `option` makes of a definition."""
        tag = _discriminator(schema)

        def tagged(one: Any) -> Any:
            """An option with the property required that tells it from others."""
            if tag is None or not isinstance(one, dict):
                return option(one)
            if is_reference(one) and isinstance(target := follow(one["$ref"], self.root), dict):
                if tag in _list(target, "required"):
                    return option(one)
                return self._copy(one, (tag, form), tagged)
            return option({**one, "required": [*dict.fromkeys([*_list(one, "required"), tag])]})

        def change(one: Any, word: str, place: str) -> Any:
            if word in CONDITIONS:
                return one
            if word in CHOICES:
                return tagged(one) if word == "oneOf" else option(one)
            return self.part(one) if word == "allOf" else self.whole(one)

        result = rewrite(schema, change)
        if isinstance(schema.get("$ref"), str) and not is_reference(schema):
            del result["$ref"]
            result["allOf"] = [self.part({"$ref": schema["$ref"]}), *_list(result, "allOf")]
        return result

    def _keys(self, schema: dict[str, Any], keys: Keys) -> Keys:
        """Of a schema and what holds together with it: all but the options of its own anyOf or oneOf."""
        self._collect({word: value for word, value in schema.items() if word not in CHOICES}, keys, set())
        return keys

    def _collect(self, schema: Any, keys: Keys, seen: set[str]) -> None:
        if not isinstance(schema, dict):
            return
        keys.stated |= any(word in schema for word in STATED)
        for word, found in (("properties", keys.names), ("patternProperties", keys.patterns)):
            if isinstance(value := schema.get(word), dict):
                keys.listed = True
                found.update(dict.fromkeys(value))
        keys.names.update(dict.fromkeys(name for name in _list(schema, "required") if isinstance(name, str)))
        reference = schema.get("$ref")
        if isinstance(reference, str) and reference not in seen:
            seen.add(reference)
            self._collect(follow(reference, self.root), keys, seen)
        for one in _list(schema, "allOf"):
            self._collect(one, keys, seen)
        for word in CHOICES:
            for one in _list(schema, word):
                keys.inner_choice = True
                self._collect(one, keys, seen)

    def _copy(self, schema: dict[str, Any], form: object, change: Callable[[Any], Any]) -> dict[str, Any]:
        """A reference to another form of what the schema refers to."""
        target = follow(schema["$ref"], self.root)
        if target is None:
            return dict(schema)
        place = schema["$ref"], form
        if place not in self.copies:
            if len(self.copies) >= MAX_COPIES:
                raise ValueError(f"is too complex: allOf needs more than {MAX_COPIES} copies of definitions")
            name = next(n for i in range(len(self.taken) + 1) if (n := f"copy{i}") not in self.taken)
            self.taken.add(name)
            self.copies[place] = name
            self.definitions[name] = None
            self.definitions[name] = change(target)
        return {**schema, "$ref": f"#/$defs/{self.copies[place]}"}


def _only_part(schema: dict[str, Any]) -> Any:
    """The part of an allOf that has no other, as older generators write around a reference; None if there are more."""
    parts = [one for one in _list(schema, "allOf") if not isinstance(one, dict) or set(one) - ANNOTATIONS]
    return parts[0] if len(parts) == 1 and set(schema) - ANNOTATIONS == {"allOf"} else None


def _list(schema: dict[str, Any], word: str) -> list[Any]:
    return value if isinstance(value := schema.get(word), list) else []


def _discriminator(schema: dict[str, Any]) -> str | None:
    stated = schema.get("discriminator")
    name = stated.get("propertyName") if isinstance(stated, dict) else None
    return name if isinstance(name, str) else None
