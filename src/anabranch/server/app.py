"""The FastAPI application: routes, their schemas, and errors in one envelope behind one guard."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException

from anabranch import __version__
from anabranch.server import anthropic, anthropic_api, openai_api, operations, page
from anabranch.server.errors import ApiError, internal
from anabranch.server.guard import Guard
from anabranch.server.service import Service


def make_app(service: Service) -> Guard:
    app = FastAPI(
        title="Anabranch",
        version=__version__,
        docs_url=None,  # FastAPI's pages load scripts from elsewhere
        redoc_url=None,
        redirect_slashes=False,
        exception_handlers={ApiError: _api_error, HTTPException: _http_error, Exception: _bug},
    )
    app.include_router(operations.router)
    app.include_router(page.router)
    app.include_router(openai_api.router)
    app.include_router(anthropic_api.router)
    _describe(app)
    guard = Guard(app, service.settings, encode_error)
    app.state.service, app.state.guard = service, guard
    return guard


def encode_error(error: ApiError, path: str, request_id: str) -> bytes:
    """In the envelope of the route's dialect."""
    if path in anthropic_api.BODIES:
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
    """Starlette's own: no such route, or not with this method."""
    assert isinstance(error, HTTPException)
    method, path = request.method, request.url.path[:200]
    words = {
        404: f"no route {path!r}; /openapi.json lists all",
        405: f"{method} is not for {path!r}; it takes {(error.headers or {}).get('Allow', 'another method')}",
    }
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
    message = words.get(error.status_code, str(error.detail))
    return await _api_error(request, ApiError(error.status_code, message, code=code, headers=dict(error.headers or {})))


async def _bug(request: Request, error: Exception) -> Response:
    """The guard logs it: Starlette raises it again after this answer."""
    return _respond(request, internal(request.state.request_id))


def _describe(app: FastAPI) -> None:
    """Bodies are decoded by msgspec and not by FastAPI: add their schemas to what it says about the routes."""
    bodies = openai_api.BODIES | anthropic_api.BODIES
    _, components = msgspec.json.schema_components(bodies.values(), ref_template="#/components/schemas/{name}")
    error: dict[str, Any] = {
        "type": "object",
        "required": ["error"],
        "properties": {
            "error": {
                "type": "object",
                "required": ["message", "type", "param", "code"],
                "properties": {
                    "message": {"type": "string"},
                    "type": {"type": "string"},
                    "param": {"type": ["string", "null"]},
                    "code": {"type": ["string", "null"]},
                },
            }
        },
    }
    described = app.openapi()
    described["components"] = {"schemas": components | {"Error": error}}
    refusal = {
        "description": "refused, with the reason",
        "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
    }
    for path, methods in described["paths"].items():
        for operation in methods.values():
            operation["responses"] = {"200": {"description": "as asked"}, "default": refusal}
            if path in bodies:
                schema = {"$ref": f"#/components/schemas/{bodies[path].__name__}"}
                operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
