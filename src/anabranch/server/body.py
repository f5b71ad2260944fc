"""A request's body: read within its limits, parsed as strict JSON, checked against a schema.

Nothing is coerced: true is not a number, "16" not an integer, NaN not JSON. A null at the top means "not given". An
unknown field, at the top or inside, is an error that names its path and the nearest known field: an option that is
silently ignored misleads. Known fields without effect are logged, each once.
"""

import asyncio
import difflib
import gc
import logging
import re
from functools import cache
from typing import Any, TypeVar

import msgspec
from fastapi import Request
from msgspec import inspect

from anabranch.server.errors import ApiError, bad_request
from anabranch.server.protocol import Body, JsonObject, StrictObject
from anabranch.server.service import Service

log = logging.getLogger("anabranch.server")
Decoded = TypeVar("Decoded", bound=Body)

LONGEST = 100  # characters of an unknown name that an error repeats
DEEPEST = 100  # levels of known fields; Python's own limit differs with what else the process runs
_PATH = re.compile(r" - at `\$\.?(.*)`$")
_logged: set[str] = set()  # fields whose being ignored was logged


class ClientGone(Exception):
    """The client has closed its connection."""


async def read_json(request: Request, schema: type[Decoded], ready: bool = False) -> tuple[Service, Decoded]:
    """The service, and the request's body as an object of the schema; a large one is decoded in a thread. Sets
    `request.state.num_bytes` to its size. Checks the model's name, and with `ready` that requests are taken."""
    service: Service = request.app.state.service
    data = await read_body(request, service.max_body_bytes, service.settings.body_timeout)
    request.state.num_bytes = len(data)
    body = await service.run(lambda: decode(data, schema), len(data))
    if ready:
        service.check_ready()
    service.check_model(body.model)
    return service, body


async def read_body(request: Request, limit: int, timeout: float) -> bytearray:
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    # A web page of another origin can post anything but JSON without asking, and its browser names the origin. Ollama's
    # clients leave the type out, and curl -d gives a form's.
    is_typed = media_type == "application/json"
    if not is_typed and (request.state.dialect != "ollama" or "origin" in request.headers):
        raise ApiError(415, f"Content-Type must be application/json, not {media_type!r}", code="invalid_json")
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
        reason, headers = f"the body did not arrive within {timeout:g} s", {"connection": "close"}
        raise ApiError(408, reason, code="request_timeout", headers=headers) from None


def decode(body: bytes | bytearray, schema: type[Decoded]) -> Decoded:
    """No garbage collection meanwhile: millions of new objects would start many, each of which looks at all of them
    while it holds the interpreter's lock."""
    gc.disable()
    try:
        decoded = _decode(body, schema)
    finally:
        gc.enable()
    for name, (value, reason) in schema.ONLY.items():
        if (given := getattr(decoded, name)) is not None and (given != value or type(given) is not type(value)):
            raise bad_request(f"{name}: only {msgspec.json.encode(value).decode()} is possible here: {reason}", name)
    return decoded


def _decode(body: bytes | bytearray, schema: type[Decoded]) -> Decoded:
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
    for name in (raw.keys() & schema.IGNORED) - _logged:
        log.warning("requests come with %r, which has no effect here (logged once)", name)
    _logged.update(raw.keys() & schema.IGNORED)
    try:
        try:
            return msgspec.convert(raw, schema, strict=True)
        except msgspec.ValidationError as error:
            if "unknown field" not in str(error):
                raise
            _check_fields(raw, _type_info(schema), "")
            return msgspec.convert(raw, schema, strict=True)  # without the unknown fields that are null
    except RecursionError:
        raise bad_request("the body is too deeply nested", code="invalid_json") from None
    except (msgspec.ValidationError, OverflowError) as error:
        text = str(error)
        if path := _PATH.search(text):
            param, message = path[1], f"{path[1]}: {_PATH.sub('', text)}"
        else:  # a missing field is named in the message, not in a path
            missing = re.search("required field `(.+?)`", text)
            param, message = missing and missing[1], text.replace("Object missing", "missing")
        raise bad_request(message.replace("`", ""), param, "invalid_type") from None


_type_info = cache(inspect.type_info)


def _check_fields(value: Any, known: inspect.Type, path: str) -> None:
    """400 for the first unknown field, wherever it is; msgspec would not say which field was meant. Removes unknown
    fields that are null: null means not given."""
    if path.count(".") > DEEPEST:
        raise RecursionError
    match known:
        case inspect.UnionType(types=types):
            for one in types:
                _check_fields(value, one, path)
        case inspect.ListType(item_type=item) if isinstance(value, list):
            for number, inner in enumerate(value):
                _check_fields(inner, item, f"{path}[{number}]")
        case inspect.StructType(cls=schema) if isinstance(value, dict) and issubclass(schema, StrictObject):
            _check_object(value, schema, {field.encode_name: field.type for field in known.fields}, path)


def _check_object(value: JsonObject, schema: type[StrictObject], fields: dict[str, inspect.Type], path: str) -> None:
    if schema.TYPES and value.get("type") is not None and value["type"] not in schema.TYPES:
        raise bad_request(f"{path}: {str(value['type'])[:LONGEST]!r} {schema.OTHER_TYPES}", path)
    for name in list(value):
        place = f"{path}.{name[:LONGEST]}".lstrip(".")
        if name in fields:
            _check_fields(value[name], fields[name], place)
        elif value[name] is None:
            del value[name]
        elif name in schema.OTHER_FIELDS:
            raise bad_request(f"{place}: {schema.OTHER_FIELDS[name]}", place, "unsupported_parameter")
        else:
            near = difflib.get_close_matches(name[:LONGEST], fields, 1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; known are {', '.join(fields)}" if path else ""
            raise bad_request(f"unknown field {place!r}{hint}", place, "unknown_parameter")
