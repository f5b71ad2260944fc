"""Errors of requests: one exception, and one JSON envelope for every dialect.

{"error": {"message", "type", "param", "code"}} is in the body of every answer that is not a success, within Anthropic's
envelope where a client speaks that dialect; Ollama's clients take {"error": "the message"}. The openai client repeats
408, 409, 429 and everything from 500 on: an error that would come again has the header `x-should-retry: false`.
"""

from typing import Any, Literal

import msgspec

from anabranch.messages import INTERNAL

Headers = dict[str, str]
Dialect = Literal["openai", "anthropic", "ollama"]
MAX_MESSAGE = 2000  # characters
CONTEXT_WORDS = "This model's maximum context length is"

TYPES = {400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error"}
TYPES |= {408: "timeout_error", 429: "rate_limit_error", 503: "unavailable_error"}
ANTHROPIC_TYPES = TYPES | {413: "request_too_large", 503: "overloaded_error"}
TOO_LONG = "prompt is too long"  # Anthropic's clients look for these words before they shorten a conversation


class ApiError(Exception):
    def __init__(
        self, status: int, message: str, *, code: str | None, param: str | None = None, headers: Headers | None = None
    ) -> None:
        super().__init__(message)
        # A message may quote what a client sent, and half a surrogate pair cannot be written as UTF-8.
        self.message = message[:MAX_MESSAGE].encode("utf-8", "replace").decode()
        self.status, self.code, self.param = status, code, param
        self.headers = headers or {}
        if status == 500:
            self.headers.setdefault("x-should-retry", "false")

    def body(self, dialect: Dialect = "openai", request_id: str | None = None) -> dict[str, Any]:
        if dialect == "ollama":
            return {"error": self.message}
        is_anthropic = dialect == "anthropic"
        types, other = (ANTHROPIC_TYPES, "api_error") if is_anthropic else (TYPES, "server_error")
        name = types.get(self.status, other if self.status >= 500 else "invalid_request_error")
        error = {"message": self.message, "type": name, "param": self.param, "code": self.code}
        if not is_anthropic:
            return {"error": error}
        if self.code == "context_length_exceeded":
            error["message"] = f"{TOO_LONG}: {self.message}"
        return {"type": "error", "error": error, "request_id": request_id}

    def encoded(self, dialect: Dialect = "openai", request_id: str | None = None) -> bytes:
        return msgspec.json.encode(self.body(dialect, request_id))


def dialect_of(path: str, is_anthropic: bool) -> Dialect:
    """Of the answers of a route, known or not. `is_anthropic`: the client is Anthropic's; dialects share /v1/models."""
    if path.startswith("/api/"):
        return "ollama"
    names_model = path == "/v1/models" or path.startswith("/v1/models/")
    if path == "/v1/messages" or path.startswith("/v1/messages/") or (is_anthropic and names_model):
        return "anthropic"
    return "openai"


def bad_request(message: str, param: str | None = None, code: str | None = "invalid_value") -> ApiError:
    return ApiError(400, message, param=param, code=code)


def context_length(message: str, param: str | None) -> ApiError:
    return bad_request(message, param, "context_length_exceeded")


def unavailable(message: str, code: str) -> ApiError:
    return ApiError(503, message, code=code, headers={"retry-after": "5"})


def queue_full(message: str) -> ApiError:
    return ApiError(429, message, code="queue_full", headers={"retry-after": "1"})


def internal(request_id: str) -> ApiError:
    """Does not name the cause: that is in the log, under the id."""
    return ApiError(500, f"internal error; the server's log has the cause under {request_id}", code="internal_error")


def from_engine(message: str) -> ApiError:
    """The error of an Update: the engine's own fault, or why it refuses this request."""
    if message.startswith(INTERNAL):
        return ApiError(500, message, code="internal_error")
    if message.startswith(CONTEXT_WORDS):
        return context_length(message, None)
    param = message.partition(":")[0]
    return bad_request(message, param if param.isidentifier() else None)
