"""The FastAPI application: routes, their schemas, and every error as JSON of the route's dialect."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException

from anabranch import __version__
from anabranch.server import anthropic, openai_api, operations, page
from anabranch.server.errors import ApiError, internal
from anabranch.server.guard import Guard
from anabranch.server.service import Service


def make_app(service: Service) -> Guard:
    app = FastAPI(
        title="Anabranch",
        version=__version__,
        docs_url=None,  # FastAPI's pages load scripts from other sites
        redoc_url=None,
        redirect_slashes=False,
        exception_handlers={ApiError: _api_error, HTTPException: _http_error, Exception: _bug},
    )
    for module in (operations, page, openai_api, anthropic):
        app.include_router(module.router)
    _describe(app)
    guard = Guard(app, service.settings, encode_error)
    app.state.service, app.state.guard = service, guard
    return guard


def encode_error(error: ApiError, path: str, request_id: str) -> bytes:
    if path in anthropic.BODIES:
        return msgspec.json.encode(anthropic.error_body(error, request_id))
    return error.encoded()


def _respond(request: Request, error: ApiError) -> Response:
    body = encode_error(error, request.url.path, request.state.request_id)
    return Response(body, error.status, error.headers, "application/json")


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    request.state.log["error"] = error.code
    return _respond(request, error)


async def _http_error(request: Request, error: Exception) -> Response:
    """Starlette's own errors: no such route, or not with this method."""
    assert isinstance(error, HTTPException)
    path, headers = request.url.path[:200], dict(error.headers or {})
    code, message = None, str(error.detail)
    if error.status_code == 404:
        code, message = "not_found", f"no route {path!r}; /openapi.json lists all"
    elif error.status_code == 405:
        allowed = headers.get("Allow", "another method")
        code, message = "method_not_allowed", f"{path!r} does not take {request.method}; it takes {allowed}"
    return await _api_error(request, ApiError(error.status_code, message, code=code, headers=headers))


async def _bug(request: Request, error: Exception) -> Response:
    """The guard logs it: Starlette raises it again after this answer."""
    return _respond(request, internal(request.state.request_id))


def _describe(app: FastAPI) -> None:
    """Add the schemas of bodies to FastAPI's description of the routes: msgspec decodes them, not FastAPI."""
    bodies = openai_api.BODIES | anthropic.BODIES
    _, components = msgspec.json.schema_components(bodies.values(), ref_template="#/components/schemas/{name}")
    types = {"message": "string", "type": "string", "param": ["string", "null"], "code": ["string", "null"]}
    fields: dict[str, Any] = {"type": "object", "required": list(types)}
    fields["properties"] = {name: {"type": type} for name, type in types.items()}
    error = {"type": "object", "required": ["error"], "properties": {"error": fields}}
    described = app.openapi()
    described["components"] = {"schemas": components | {"Error": error}}
    content = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    responses = {"200": {"description": "success"}, "default": {"description": "an error", "content": content}}
    for path, methods in described["paths"].items():
        for operation in methods.values():
            operation["responses"] = responses
            if path in bodies:
                schema = {"$ref": f"#/components/schemas/{bodies[path].__name__}"}
                operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
