"""JSON schemas on their way to a grammar: how deep they may be, which keys their objects have, what their oneOf means.

What `prepare` gives allows a part of what the original allows: objects are closed (schema_closing), and oneOf is anyOf
where no value fits two options (schema_overlap). Of llguidance this file knows the options alone.
"""

from __future__ import annotations

from typing import Any

from anabranch.text.schema_closing import Closing
from anabranch.text.schema_overlap import Overlap
from anabranch.text.schema_parts import check_depth, check_nesting

WHITESPACE = r"\x20|\r?\n[\x20\t]{0,20}"
"""Between two tokens of JSON: nothing, one space, or a new line and its indentation."""
ESCAPES = 'nrbtf"\\'
"""In strings. Not \\u: a key spelled with it could repeat one that the schema names."""


def prepare(schema: Any, open_objects: bool = False) -> Any:
    """The schema as a grammar can hold to it; ValueError, without a subject, if there is none."""
    check_nesting(schema)
    if not isinstance(schema, dict):
        return schema
    check_depth(schema)
    if not open_objects:
        schema = Closing(schema).result()
    return Overlap(schema).without_one_of()


def for_llguidance(schema: Any, open_objects: bool = False) -> Any:
    """`prepare`, with llguidance's options inside; the schema's own "x-guidance" has the last word."""
    schema = prepare({} if schema is True else schema, open_objects)
    if not isinstance(schema, dict):
        return schema
    options = {"whitespace_pattern": WHITESPACE, "json_allowed_escapes": ESCAPES}
    given = schema.get("x-guidance", {})
    if not isinstance(given, dict):
        return schema
    if given.get("whitespace_flexible") is False:  # none at all; a pattern would count for more
        del options["whitespace_pattern"]
    return {**schema, "x-guidance": {**options, **given}}
