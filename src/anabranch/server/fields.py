"""Fields that a schema does not know, wherever in a body they are: found by path, with the nearest known name.

msgspec refuses such a body without saying what would have been right; only then is it searched here.
"""

from __future__ import annotations

import difflib
from functools import cache
from typing import Any

from msgspec import Struct, inspect

from anabranch.server.errors import bad_request

LONGEST = 100  # characters of an unknown name that an error repeats


def check_fields(raw: dict[str, Any], schema: type[Struct]) -> None:
    """400 for the first field that `schema` does not know. Those that are null are removed: null means not given."""
    _check(raw, _type_info(schema), "")


@cache
def _type_info(schema: type[Struct]) -> inspect.Type:
    return inspect.type_info(schema)


def _check(value: Any, kind: inspect.Type, path: str) -> None:
    match kind:
        case inspect.UnionType(types=types):
            for one in types:
                _check(value, one, path)
        case inspect.ListType(item_type=item) if isinstance(value, list):
            for number, inner in enumerate(value):
                _check(inner, item, f"{path}[{number}]")
        case inspect.StructType() if isinstance(value, dict):
            _check_struct(value, kind, path)


def _check_struct(value: dict[str, Any], kind: inspect.StructType, path: str) -> None:
    known = {field.encode_name: field.type for field in kind.fields}
    kinds: tuple[str, ...] = getattr(kind.cls, "KINDS", ())
    if kinds and value.get("type") is not None and value["type"] not in kinds:
        raise bad_request(f"{path}: {str(value['type'])[:LONGEST]!r} {kind.cls.OTHER_KINDS}", path)  # type: ignore[attr-defined]
    for name in list(value):
        place = f"{path}.{name[:LONGEST]}".lstrip(".")
        if name in known:
            _check(value[name], known[name], place)
        elif value[name] is None:
            del value[name]
        else:
            near = difflib.get_close_matches(name[:LONGEST], known, 1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; known are {', '.join(known)}" if path else ""
            raise bad_request(f"unknown field {place!r}{hint}", place, "unknown_parameter")
