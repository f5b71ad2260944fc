"""A trace span for each request, sent to an OpenTelemetry collector: counts and times, never text.

Active where OpenTelemetry's own variables name a collector (OTEL_EXPORTER_OTLP_ENDPOINT or
OTEL_EXPORTER_OTLP_TRACES_ENDPOINT); needs the extra `otel`. A caller's `traceparent` header makes the span part of its
trace. Wraps the guard, so that refused requests have spans too; attributes are what the guard logs.
"""

import os
import time
from collections.abc import Mapping
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from anabranch import __version__
from anabranch.server.guard import FREQUENT

ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
ATTRIBUTES = {
    "id": "anabranch.request_id",
    "route": "http.route",
    "status": "http.response.status_code",
    "prompt_tokens": "gen_ai.usage.input_tokens",
    "completion_tokens": "gen_ai.usage.output_tokens",
    "stream": "gen_ai.request.stream",
    "error": "error.type",
}
"""Name in the guard's log → name in OpenTelemetry."""


def traced(app: ASGIApp, environment: Mapping[str, str] = os.environ) -> ASGIApp:
    """The app with traces; the app itself where no collector is named."""
    wanted = any(environment.get(name) for name in ENDPOINTS)
    if not wanted or environment.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return app
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        name = next(name for name in ENDPOINTS if environment.get(name))
        raise ValueError(
            f"{name} asks for traces, which need the package {error.name}; run: pip install 'anabranch[otel]', "
            f"or unset {name}"
        ) from None
    resource = Resource.create({"service.name": environment.get("OTEL_SERVICE_NAME") or "anabranch"})
    # Not the process's global provider: FastAPI would add its own spans to that. The last spans are sent at exit.
    provider = TracerProvider(resource=resource)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return Traced(app, provider)


class Traced:
    def __init__(self, app: ASGIApp, provider: Any) -> None:
        self.app = app
        self.tracer = provider.get_tracer("anabranch", __version__)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        from opentelemetry.trace import SpanKind, StatusCode
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        if scope["type"] != "http" or scope["path"].startswith(FREQUENT):
            await self.app(scope, receive, send)
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        parent = TraceContextTextMapPropagator().extract(headers)
        attributes = {"http.request.method": scope["method"], "gen_ai.system": "anabranch"}
        span = self.tracer.start_span(scope["method"], parent, SpanKind.SERVER, attributes)
        began, first = time.monotonic(), 0.0

        async def timed_send(message: Message) -> None:
            nonlocal first
            if not first and message["type"] == "http.response.body":
                first = time.monotonic() - began
            await send(message)

        try:
            await self.app(scope, receive, timed_send)
        finally:
            noted = scope.get("state", {}).get("log", {})
            for name, attribute in ATTRIBUTES.items():
                if name in noted:
                    span.set_attribute(attribute, noted[name])
            if finish := noted.get("finish"):
                span.set_attribute("gen_ai.response.finish_reasons", finish.split(","))
            if noted.get("stream") and first:
                span.set_attribute("gen_ai.latency.time_to_first_token", first)
            span.update_name(f"{scope['method']} {noted.get('route', 'unknown')}")
            if not noted or noted["status"] >= 500:
                span.set_status(StatusCode.ERROR)
            span.end()
