"""Traces of a real server, received by a collector of the test's that reads what OpenTelemetry's exporter sends."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from anabranch.server.tracing import ENDPOINTS, Traced, traced
from tests.server.serving import QUICK, ROOT, running

SECRET = "xyzzy-the-secret-word"
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


class Collector(ThreadingHTTPServer):
    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        super().__init__(("127.0.0.1", 0), Receiver)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"

    def spans(self) -> list[Any]:
        requests = [ExportTraceServiceRequest.FromString(body) for body in self.bodies]
        resources = [resource for request in requests for resource in request.resource_spans]
        for resource in resources:
            assert attributes(resource.resource)["service.name"] == "anabranch"
        return [span for resource in resources for scope in resource.scope_spans for span in scope.spans]


class Receiver(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        assert self.path == "/v1/traces"
        self.server.bodies.append(self.rfile.read(int(self.headers["content-length"])))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as collector:
        thread = threading.Thread(target=collector.serve_forever)
        thread.start()
        yield collector
        collector.shutdown()
        thread.join()


def attributes(thing: Any) -> dict[str, Any]:
    found = {}
    for attribute in thing.attributes:
        kind = attribute.value.WhichOneof("value")
        value = getattr(attribute.value, kind)
        found[attribute.key] = [one.string_value for one in value.values] if kind == "array_value" else value
    return found


def test_a_span_a_request(model: Path, collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
    with running(model, "--num-pages", "300", key="sesame") as server:
        parent = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
        body = {"prompt": SECRET, "max_tokens": 9, "ignore_eos": True, "temperature": 0}
        answer = server.post("/v1/completions", body, headers=parent)
        server.post("/v1/completions", body | {"stream": True})
        server.post("/v1/completions", body | {"temperature": SECRET}, headers={"traceparent": "nonsense"})
        server.post("/v1/completions", body, headers={"authorization": "Bearer no"})
        server.get(f"/{SECRET}")
        for path in ("/health", "/metrics", "/debug/stats", "/page/main.js"):
            assert server.get(path).status_code == 200
        assert server.end(signal.SIGTERM) == 0  # what is left is sent at the end
    plain, stream, bad, refused, nowhere = collector.spans()
    found = attributes(plain)
    assert plain.name == "POST /v1/completions" and plain.kind == plain.SPAN_KIND_SERVER
    assert (plain.trace_id.hex(), plain.parent_span_id.hex()) == (TRACE, PARENT)
    assert found["anabranch.request_id"] == answer.headers["x-request-id"]
    assert found["http.response.status_code"] == 200 and found["http.route"] == "/v1/completions"
    assert (found["gen_ai.usage.input_tokens"], found["gen_ai.usage.output_tokens"]) == (len(SECRET), 9)
    assert found["gen_ai.response.finish_reasons"] == ["length"]
    assert "gen_ai.latency.time_to_first_token" not in found
    seconds = (stream.end_time_unix_nano - stream.start_time_unix_nano) / 1e9
    assert 0 < attributes(stream)["gen_ai.latency.time_to_first_token"] < seconds
    assert not stream.parent_span_id and not bad.parent_span_id
    assert attributes(bad)["http.response.status_code"] == 400 and attributes(bad)["error.type"]
    assert attributes(refused)["http.response.status_code"] == 401
    assert attributes(refused)["error.type"] == "invalid_api_key"
    assert nowhere.name == "GET unknown" and attributes(nowhere)["http.response.status_code"] == 404
    assert not any(SECRET.encode() in body for body in collector.bodies)


@pytest.mark.parametrize(("status", "wrong"), [(200, False), (404, False), (499, False), (503, True), (None, True)])
def test_what_counts_as_an_error(status: int | None, wrong: bool) -> None:
    """None: not even the guard could answer."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if status is None:
            raise RuntimeError(SECRET)
        scope["state"] = {"log": {"status": status, "route": "/x"}}

    async def ask() -> None:
        scope = {"type": "http", "method": "GET", "path": "/x", "headers": []}
        with contextlib.suppress(RuntimeError):
            await Traced(app, provider)(scope, None, None)  # type: ignore[arg-type]

    asyncio.run(ask())
    (span,) = exporter.get_finished_spans()
    assert (span.status.status_code is StatusCode.ERROR) == wrong
    assert SECRET not in span.to_json()


@pytest.mark.slow
def test_a_collector_that_is_not_there_holds_up_nothing(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    with running(model, "--num-pages", "300") as server:
        expected = server.complete()
        assert server.complete() == expected
        began = time.monotonic()
        assert server.end(signal.SIGTERM) == 0
        assert time.monotonic() - began < QUICK


def test_off_unless_a_collector_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    async def app(*_: Any) -> None: ...

    assert traced(app, {}) is app
    named = {ENDPOINTS[0]: "http://127.0.0.1:1/v1/traces"}
    assert traced(app, named | {"OTEL_SDK_DISABLED": "true"}) is app
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ValueError, match=r"TRACES_ENDPOINT asks for traces.*pip install 'anabranch\[otel\]', or unset"):
        traced(app, named)


def test_the_server_says_what_is_missing(model: Path) -> None:
    """In one line, before anything is loaded."""
    code = "import sys\nsys.modules['opentelemetry.sdk'] = None\n"
    code += f"from anabranch.cli.main import main\nsys.exit(main(['serve', {str(model)!r}, '--port', '0']))"
    environment = os.environ | {ENDPOINTS[1]: "http://127.0.0.1:1", "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=QUICK, check=False
    )
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1 and "pip install 'anabranch[otel]'" in done.stderr
