"""A request's body: read within its limits, taken as strict JSON, held against a schema.

Nothing is coerced: true is no number, "16" no integer, NaN no JSON. A null at the top means "not given". A field that
the schema does not know, at the top or inside, is an error that names the nearest known one (fields.py): an option that
is silently ignored misleads.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import re
from collections.abc import Iterator
from typing import Any, TypeVar

import msgspec
from fastapi import Request

from anabranch.server.errors import ApiError, bad_request
from anabranch.server.fields import check_fields

Schema = TypeVar("Schema", bound=msgspec.Struct)

_PATH = re.compile(r" - at `\$\.?(.*)`$")


async def read_json(request: Request, schema: type[Schema]) -> Schema:
    """The request's body as an object of the schema; a large one is decoded in a thread. `request.state.num_bytes` is
    its size afterwards."""
    service = request.app.state.service
    body = await read_body(request, service.max_body_bytes, service.settings.body_timeout)
    request.state.num_bytes = len(body)
    result: Schema = await service.run(lambda: decode(body, schema), len(body))
    return result


async def read_body(request: Request, limit: int, timeout: float) -> bytearray:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":  # a web page of another origin can post anything else without asking
        raise ApiError(415, f"Content-Type must be application/json, not {kind!r}", code="invalid_json")
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.lower() != "identity":
        raise ApiError(415, f"Content-Encoding {encoding!r} is not supported: send plain JSON", code="invalid_json")
    too_large = ApiError(413, f"the body is larger than the limit of {limit} bytes", code="body_too_large")
    declared = request.headers.get("content-length", "0")
    if declared.isdigit() and int(declared[:19]) > limit:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(timeout):
            while True:
                message = await request.receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone
                body += message.get("body", b"")
                if len(body) > limit:
                    raise too_large
                if not message.get("more_body", False):
                    return body
    except TimeoutError:
        error = ApiError(408, f"the body did not arrive within {timeout:g} s", code="request_timeout")
        error.headers["connection"] = "close"
        raise error from None


class ClientGone(Exception):
    """Nobody is left to answer."""


@contextlib.contextmanager
def collections_paused() -> Iterator[None]:
    """No garbage collection meanwhile: millions of new objects would start many, each of which looks at all of them,
    and the interpreter's lock is held throughout."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@collections_paused()
def decode(body: bytes | bytearray, schema: type[Schema]) -> Schema:
    try:
        raw = msgspec.json.decode(body, type=dict[str, Any])
    except msgspec.ValidationError as error:
        reason = "holds a number that is out of range" if _PATH.search(str(error)) else "must be a JSON object"
        raise bad_request(f"the body {reason}", code="invalid_json") from None
    except UnicodeDecodeError:
        raise bad_request("the body is not valid UTF-8", code="invalid_json") from None
    except (msgspec.DecodeError, RecursionError) as error:
        reason = "too deeply nested" if isinstance(error, RecursionError) else str(error)
        raise bad_request(f"the body is not valid JSON: {reason}", code="invalid_json") from None
    raw = {name: value for name, value in raw.items() if value is not None}
    try:
        try:
            return msgspec.convert(raw, schema, strict=True)
        except msgspec.ValidationError as error:
            if "unknown field" not in str(error):
                raise
            check_fields(raw, schema)
            return msgspec.convert(raw, schema, strict=True)  # without the unknown ones that are null
    except RecursionError:
        raise bad_request("the body is too deeply nested", code="invalid_json") from None
    except (msgspec.ValidationError, OverflowError) as error:
        text = str(error)
        found = _PATH.search(text)
        param = found[1] if found else _named_field(text)
        message = f"{param}: {_PATH.sub('', text)}" if found else text.replace("Object missing", "missing")
        raise bad_request(message.replace("`", ""), param, "invalid_type") from None


def _named_field(text: str) -> str | None:
    """A missing field is named in the message, not in a path."""
    found = re.search("required field `(.+?)`", text)
    return found[1] if found else None
