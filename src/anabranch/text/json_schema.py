"""JSON schemas made ready for a grammar: limits on depth, which keys objects have, what oneOf means.

The result of `prepare` allows a subset of what the schema allows: objects are closed (Closing), and oneOf becomes anyOf
where no value can fit two options (Overlap). A schema comes from a client and may be anything: what is not a schema is
passed over. Of llguidance this file knows only the options.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

WHITESPACE = r"\x20|\r?\n[\x20\t]{0,20}"
"""Between two tokens of JSON: nothing, one space, or a new line and its indentation."""
ESCAPES = 'nrbtf"\\'
"""In strings. Not \\u: a key spelled with it could repeat one that the schema names."""

MAX_NESTING = 100
"""Brackets within brackets; llguidance's own limit is 127."""
MAX_DEPTH = 400
"""Schemas within schemas, references followed: llguidance recurses over them, about 5 kB of stack each."""
MAX_COPIES = 1000
"""Definitions that are written a second time, because they are part of an allOf."""
MAX_LEVELS = 8
"""Schemas within schemas that are compared for overlap."""
MAX_ALTERNATIVES = 64
MAX_STEPS = 50_000
"""Schemas that are compared for overlap; what is not compared counts as overlapping."""

ANNOTATIONS = {"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment"}
ANNOTATIONS |= {"$schema", "$id", "x-guidance", "discriminator"}
CHOICES = ("anyOf", "oneOf")
CONDITIONS = ("not", "if", "then", "else")
STATED = ("additionalProperties", "unevaluatedProperties")
"""With one of these an object states itself which other keys it may have."""
ONE = ("items", "additionalItems", "contains", "propertyNames", "unevaluatedItems", *CONDITIONS, *STATED)
LISTS = ("allOf", *CHOICES, "prefixItems", "items")
DEFINITIONS = ("$defs", "definitions")
MAPS = ("properties", "patternProperties", "dependentSchemas", *DEFINITIONS)
TYPES = frozenset({"string", "integer", "fraction", "boolean", "null", "array", "object"})


def prepare(schema: Any, open_objects: bool = False) -> Any:
    """The schema as a grammar can enforce it; ValueError, without a subject, if there is none."""
    check_nesting(schema)
    if not isinstance(schema, dict):
        return schema
    check_depth(schema)
    try:
        if not open_objects:
            schema = Closing(schema).result()
        return Overlap(schema).without_one_of(schema)
    except TypeError as error:  # such as {"properties": 3}
        raise ValueError(f"is not a JSON schema: {error}") from None


def for_llguidance(schema: Any, open_objects: bool = False) -> Any:
    """`prepare`, with llguidance's options added; those in the schema's own "x-guidance" take precedence."""
    schema = prepare({} if schema is True else schema, open_objects)
    if not isinstance(schema, dict) or not isinstance(given := schema.get("x-guidance", {}), dict):
        return schema
    options = {"whitespace_pattern": WHITESPACE, "json_allowed_escapes": ESCAPES}
    if given.get("whitespace_flexible") is False:  # none at all; a pattern would override it
        del options["whitespace_pattern"]
    return {**schema, "x-guidance": {**options, **given}}


# -- structure ---------------------------------------------------------------------------------------------------------


def rewrite(schema: dict[str, Any], change: Callable[[Any, str, str], Any]) -> dict[str, Any]:
    """A copy with `change(inner schema, keyword, path below the keyword)` for every schema directly inside."""
    result = dict(schema)
    for word, value in schema.items():
        if word in LISTS and isinstance(value, list):
            result[word] = [change(one, word, f"/{i}") for i, one in enumerate(value)]
        elif word in MAPS and isinstance(value, dict):
            result[word] = {name: change(one, word, f"/{name}") for name, one in value.items()}
        elif word in ONE:
            result[word] = change(value, word, "")
    return result


def follow(reference: str, root: dict[str, Any]) -> Any:
    """The target of a reference within the schema; None if there is none, or if it is outside."""
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
    level: list[Any] = [[value]]
    for _ in range(MAX_NESTING + 1):
        inner = [part for one in level for part in (one.values() if isinstance(one, dict) else one)]
        level = [part for part in inner if isinstance(part, dict | list)]
    if level:
        raise ValueError(f"is nested too deeply: at most {MAX_NESTING} brackets within brackets")


def _inside(schema: dict[str, Any]) -> list[Any]:
    """The schemas directly inside, except definitions."""
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


def _is_reference(schema: dict[str, Any]) -> bool:
    """Whether the schema is a reference and nothing else that constrains a value."""
    return isinstance(schema.get("$ref"), str) and not set(schema) - ANNOTATIONS - {"$ref", *DEFINITIONS}


def _is_closed(schema: dict[str, Any]) -> bool:
    return schema.get("additionalProperties") is False and not schema.get("patternProperties")


def list_of(schema: dict[str, Any], word: str) -> list[Any]:
    """The keyword's value if it is a list; otherwise empty."""
    return value if isinstance(value := schema.get(word), list) else []


def _map(schema: dict[str, Any], word: str) -> dict[str, Any]:
    return value if isinstance(value := schema.get(word), dict) else {}


def _required(schema: dict[str, Any]) -> list[str]:
    return [name for name in list_of(schema, "required") if isinstance(name, str)]


# -- which keys objects have -------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Keys:
    """What schemas that apply to the same object say about its keys."""

    names: dict[str, None] = field(default_factory=dict)
    patterns: dict[str, None] = field(default_factory=dict)
    listed: bool = False
    """Some of them list properties."""
    stated: bool = False
    """Some of them state whether there may be others."""
    inner_choice: bool = False
    """A part has an anyOf or oneOf."""

    def form(self) -> object:
        """Distinguishes the copies of a definition that are closed with different keys."""
        return tuple(self.names), tuple(self.patterns), self.listed


class Closing:
    """Closes the objects of one schema: they have the keys they name and no others.

    An object that lists its properties has no others, unless it states additionalProperties. In an allOf, or next to a
    $ref, anyOf or oneOf, the properties of all parts count, and each part by itself stays open. A discriminator's
    property is required. References stay references: a definition that is needed in another form is copied.
    """

    def __init__(self, root: dict[str, Any]) -> None:
        self.root = root
        self.copies: dict[Any, str] = {}
        self.definitions: dict[str, Any] = {}
        self.taken = set(_map(root, "$defs"))

    def result(self) -> dict[str, Any]:
        result: dict[str, Any] = self.close(self.root)
        if self.definitions:
            result["$defs"] = {**result.get("$defs", {}), **self.definitions}
        return result

    def close(self, schema: Any, outer: Keys | None = None) -> Any:
        """A schema that alone, or together with one that has the `outer` keys, describes a value."""
        if not isinstance(schema, dict):
            if schema is not True or outer is None:
                return schema
            schema = {}
        if _is_reference(schema):
            if outer is None:
                return self._rewrite(schema, self.close)
            return self._copy(schema, outer.form(), lambda one: self.close(one, outer))
        # Older generators write an allOf with a single part around a reference.
        parts = [one for one in list_of(schema, "allOf") if not isinstance(one, dict) or set(one) - ANNOTATIONS]
        if len(parts) == 1 and parts[0] is not None and set(schema) - ANNOTATIONS == {"allOf"}:
            return {**schema, "allOf": [self.close(parts[0], outer)]}
        keys = Keys() if outer is None else Keys(dict(outer.names), dict(outer.patterns), outer.listed)
        self._collect({word: value for word, value in schema.items() if word not in CHOICES}, keys, set())
        choices = [word for word in CHOICES if isinstance(schema.get(word), list)]
        if keys.stated:
            return self._rewrite(schema, self.keep_open, "open")
        if not keys.listed or (len(choices) == 1 and not keys.inner_choice):
            named = keys if keys.listed or keys.names else None
            return self._rewrite(schema, lambda option: self.close(option, named), keys.form())
        for word in choices:
            for option in schema[word]:
                self._collect(option, keys, set())
        result = self._rewrite(schema, self.keep_open, "open")
        for word, names in (("properties", keys.names), ("patternProperties", keys.patterns)):
            known = result.get(word, {})
            if names:
                result[word] = {**known, **{name: True for name in names if name not in known}}
        result["additionalProperties"] = False
        return result

    def keep_open(self, schema: Any) -> Any:
        """A schema that applies together with others, which decide about the keys."""
        if not isinstance(schema, dict):
            return schema
        if _is_reference(schema):
            return self._copy(schema, "open", self.keep_open)
        return self._rewrite(schema, self.keep_open, "open")

    def _rewrite(self, schema: dict[str, Any], option: Callable[[Any], Any], form: object = None) -> dict[str, Any]:
        """With everything inside rewritten: the parts of an allOf stay open, the options of anyOf and oneOf become
        what `option` returns, all others are closed. `form` names what `option` makes of a definition."""
        tag = _map(schema, "discriminator").get("propertyName")

        def tagged(one: Any) -> Any:
            """An option whose discriminator property is required."""
            if not isinstance(tag, str) or not isinstance(one, dict):
                return option(one)
            if _is_reference(one) and isinstance(target := follow(one["$ref"], self.root), dict):
                if tag in list_of(target, "required"):
                    return option(one)
                return self._copy(one, (tag, form), tagged)
            return option({**one, "required": [*dict.fromkeys([*list_of(one, "required"), tag])]})

        def change(one: Any, word: str, path: str) -> Any:
            if word in CONDITIONS:
                return one
            if word in CHOICES:
                return tagged(one) if word == "oneOf" else option(one)
            return self.keep_open(one) if word == "allOf" else self.close(one)

        result = rewrite(schema, change)
        if isinstance(schema.get("$ref"), str) and not _is_reference(schema):
            del result["$ref"]
            result["allOf"] = [self.keep_open({"$ref": schema["$ref"]}), *list_of(result, "allOf")]
        return result

    def _collect(self, schema: Any, keys: Keys, seen: set[str]) -> None:
        if not isinstance(schema, dict):
            return
        keys.stated |= any(word in schema for word in STATED)
        for word, found in (("properties", keys.names), ("patternProperties", keys.patterns)):
            keys.listed |= isinstance(schema.get(word), dict)
            found.update(dict.fromkeys(_map(schema, word)))
        keys.names.update(dict.fromkeys(_required(schema)))
        reference = schema.get("$ref")
        if isinstance(reference, str) and reference not in seen:
            seen.add(reference)
            self._collect(follow(reference, self.root), keys, seen)
        for word in ("allOf", *CHOICES):
            for one in list_of(schema, word):
                keys.inner_choice |= word != "allOf"
                self._collect(one, keys, seen)

    def _copy(self, schema: dict[str, Any], form: object, change: Callable[[Any], Any]) -> dict[str, Any]:
        """A reference to another form of the definition that the schema refers to."""
        target = follow(schema["$ref"], self.root)
        if target is None:
            return dict(schema)
        key = schema["$ref"], form
        if key not in self.copies:
            if len(self.copies) >= MAX_COPIES:
                raise ValueError(f"is too complex: allOf needs more than {MAX_COPIES} copies of definitions")
            name = next(n for i in range(len(self.taken) + 1) if (n := f"copy{i}") not in self.taken)
            self.taken.add(name)
            self.copies[key] = name
            self.definitions[name] = None
            self.definitions[name] = change(target)
        return {**schema, "$ref": f"#/$defs/{self.copies[key]}"}


# -- whether the options of a oneOf overlap ----------------------------------------------------------------------------


class Alternative(list[dict[str, Any]]):
    """One way to fit a schema: schemas without a choice, all of which apply."""

    def types(self) -> frozenset[str]:
        types = TYPES
        for part in self:
            if (values := _values(part)) is not None:
                types &= {json_type(_whole(value)).replace("number", "fraction") for value in values}
            if "type" in part:
                stated = part["type"] if isinstance(part["type"], list) else [part["type"]]
                words = {word for word in stated if isinstance(word, str)}
                types &= words | ({"integer", "fraction"} if "number" in words else set())
        return types

    def values(self) -> set[str] | None:
        """The values that it names one by one, as canonical JSON; None if it does not."""
        found = [set(map(_canonical, values)) for part in self if (values := _values(part)) is not None]
        return set.intersection(*found) if found else None

    def required(self) -> set[str]:
        return {name for part in self for name in _required(part)}

    def member(self, name: str) -> list[Any]:
        return [properties[name] for part in self if name in (properties := _map(part, "properties"))]

    def can_have(self, names: set[str]) -> bool:
        return all(names <= _map(part, "properties").keys() for part in self if _is_closed(part))

    def range(self, low: str, high: str) -> tuple[float, float]:
        """The bounds that some keywords state, separated by spaces."""
        lows = [part[word] for part in self for word in low.split() if type(part.get(word)) in (int, float)]
        highs = [part[word] for part in self for word in high.split() if type(part.get(word)) in (int, float)]
        return max(lows, default=float("-inf")), min(highs, default=float("inf"))


class Overlap:
    """Whether a value can fit two schemas at once, which decides whether a oneOf may be taken as an anyOf.

    The answer is "no" only where that can be shown: by type, by the values named, by the range of a number or the
    length of a string, by a required property whose schemas do not overlap (a tag), or by one that the other object
    cannot have.
    """

    def __init__(self, root: dict[str, Any]) -> None:
        self.root = root
        self.num_steps = 0

    def without_one_of(self, schema: Any, path: str = "#") -> Any:
        """The schema with anyOf for oneOf; ValueError if a value may fit two options."""
        if not isinstance(schema, dict):
            return schema
        least = schema.get("minProperties")
        if isinstance(least, int) and not _is_closed(schema) and least - len(list_of(schema, "required")) > 1:
            raise ValueError(
                f"has minProperties {least} at {path} where keys are not named, and a grammar cannot exclude that one "
                f"of them is repeated to reach it; name the keys in properties and required"
            )
        result = rewrite(schema, lambda one, word, place: self.without_one_of(one, f"{path}/{word}{place}"))
        if isinstance(schema.get("oneOf"), list):
            common = {word: value for word, value in schema.items() if word != "oneOf"}
            for (i, one), (j, other) in combinations(enumerate(schema["oneOf"]), 2):
                if not self.disjoint([one, common], [other, common]):
                    raise ValueError(
                        f"has a oneOf at {path} whose options {i} and {j} may both fit a value, which a grammar cannot "
                        f"exclude; use anyOf, or give each option a required property with a const of its own"
                    )
            options = {"anyOf": result.pop("oneOf")}
            result.pop("discriminator", None)
            result |= {"allOf": [*result.get("allOf", []), options]} if "anyOf" in result else options
        return result

    def disjoint(self, ones: list[Any], others: list[Any], level: int = 0) -> bool:
        """No value fits all of the ones and all of the others; False if that cannot be shown."""
        if level > MAX_LEVELS:
            return False
        left, right = self._alternatives(ones), self._alternatives(others)
        if left is None or right is None:
            return False
        return all(self._pair_disjoint(one, other, level) for one in left for other in right)

    def _pair_disjoint(self, one: Alternative, other: Alternative, level: int) -> bool:
        self.num_steps += 1
        if self.num_steps > MAX_STEPS:
            return False
        types = one.types() & other.types()
        values, other_values = one.values(), other.values()
        if not types or (values is not None and other_values is not None and not values & other_values):
            return True
        if types == {"object"}:
            required, other_required = one.required(), other.required()
            if not other.can_have(required) or not one.can_have(other_required):
                return True
            return any(
                self.disjoint(one.member(name), other.member(name), level + 1)
                for name in sorted(required & other_required)
                if one.member(name) and other.member(name)
            )
        if types <= {"integer", "fraction"}:
            words = "minimum exclusiveMinimum", "maximum exclusiveMaximum"
        elif types == {"string"}:
            words = "minLength", "maxLength"
        else:
            return False
        (least, most), (other_least, other_most) = one.range(*words), other.range(*words)
        return most < other_least or other_most < least

    def _alternatives(self, schemas: list[Any], level: int = 0) -> list[Alternative] | None:
        """None: too many, or a schema of which nothing is known."""
        found, todo = [Alternative()], list(schemas)
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
            todo += list_of(schema, "allOf")
            found = [Alternative([*one, schema]) for one in found]
            for word in CHOICES:
                if isinstance(options := schema.get(word), list):
                    inner: list[Alternative] = []
                    for option in options:
                        if (more := self._alternatives([option], level + 1)) is None:
                            return None
                        inner += more
                    if len(found) * len(inner) > MAX_ALTERNATIVES:
                        return None
                    found = [Alternative([*one, *more]) for one in found for more in inner]
        return found


def _values(part: dict[str, Any]) -> list[Any] | None:
    if "const" in part:
        return [part["const"]]
    return part["enum"] if isinstance(part.get("enum"), list) else None


def json_type(value: Any) -> str:
    names = {bool: "boolean", str: "string", int: "integer", float: "number", type(None): "null", list: "array"}
    return names.get(type(value), "object")


def _whole(value: Any) -> Any:
    """A float without a fraction as an int."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _canonical(value: Any) -> str:
    """The same text for equal values, such as 1 and 1.0."""
    value = _whole(value)
    if isinstance(value, list):
        return f"[{','.join(map(_canonical, value))}]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{json.dumps(key)}:{_canonical(value[key])}" for key in sorted(value)) + "}"
    return json.dumps(value)
