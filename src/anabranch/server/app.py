"""The FastAPI application: routes and their schemas. The guard answers every error, as JSON of the route's dialect."""

from collections import Counter
from typing import Any, NoReturn

import msgspec
from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from anabranch import __version__
from anabranch.server import anthropic, embeddings, ollama, openai, operations, page, responses
from anabranch.server.errors import ApiError
from anabranch.server.guard import Guard
from anabranch.server.service import Service


def make_app(service: Service) -> FastAPI:
    app = FastAPI(
        title="Anabranch",
        version=__version__,
        docs_url=None,  # FastAPI's pages load scripts from other sites
        redoc_url=None,
        redirect_slashes=False,
        exception_handlers={HTTPException: _http_error},
    )
    for module in (operations, page, openai, embeddings, anthropic, responses, ollama):
        app.include_router(module.router)
    _describe(app)
    app.state.service, app.state.responses = service, Counter[tuple[str, int]]()
    app.state.kept_responses = responses.Responses()
    app.add_middleware(Guard, settings=service.settings, responses=app.state.responses)
    if origins := service.settings.allowed_origins:  # around the guard: a browser asks without a key
        shown, methods = ["x-request-id", "request-id", "retry-after"], ["GET", "POST", "DELETE"]
        app.add_middleware(
            CORSMiddleware, allow_origins=origins, allow_methods=methods, allow_headers=["*"], expose_headers=shown
        )
    return app


async def _http_error(request: Request, error: HTTPException) -> NoReturn:
    """Starlette's own errors: no such route, or not with this method."""
    path, headers = request.url.path[:200], dict(error.headers or {})
    code, message = None, str(error.detail)
    if error.status_code == 404:
        code, message = "not_found", f"no route {path!r}; /openapi.json lists all"
    elif error.status_code == 405:
        allowed = headers.get("Allow", "another method")
        code, message = "method_not_allowed", f"{path!r} does not take {request.method}; it takes {allowed}"
    raise ApiError(error.status_code, message, code=code, headers=headers)


def _describe(app: FastAPI) -> None:
    """Add the schemas of bodies to FastAPI's description of the routes: msgspec decodes them, not FastAPI."""
    bodies = openai.BODIES | embeddings.BODIES | anthropic.BODIES | responses.BODIES | ollama.BODIES
    _, components = msgspec.json.schema_components(bodies.values(), ref_template="#/components/schemas/{name}")
    types = {"message": "string", "type": "string", "param": ["string", "null"], "code": ["string", "null"]}
    fields: dict[str, Any] = {"type": "object", "required": list(types)}
    fields["properties"] = {name: {"type": type} for name, type in types.items()}
    error = {"type": "object", "required": ["error"], "properties": {"error": fields}}
    described = app.openapi()
    described["components"] = {"schemas": components | {"Error": error}}
    ollama_error = {"type": "object", "required": ["error"], "properties": {"error": {"type": "string"}}}
    described["components"]["schemas"]["OllamaError"] = ollama_error
    for path, methods in described["paths"].items():
        name = "OllamaError" if path.startswith("/api/") else "Error"
        content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}}}
        answers = {"200": {"description": "success"}, "default": {"description": "an error", "content": content}}
        for operation in methods.values():
            operation["responses"] = answers
            if path in bodies:
                schema = {"$ref": f"#/components/schemas/{bodies[path].__name__}"}
                operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
