"""schemathesis: bodies made from the server's own schema, wrong and right ones, and no answer is a 5xx."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings

from tests.server.serving import QUICK, Running, Unharmed, running

PATHS = ["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"]
PATHS += ["/v1/messages", "/v1/messages/count_tokens", "/v1/responses", "/v1/embeddings"]
PATHS += ["/api/chat", "/api/generate", "/api/show"]
NO_BODY = {"/debug/experts"}


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Running]:
    with running(model, "--max-model-len", "128", "--num-pages", "200", "--max-num-seqs", "16") as server:
        yield server


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["negative", "positive"])
def test_no_body_brings_the_server_down(server: Running, mode: str) -> None:
    unharmed = Unharmed(server)
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    operations = {result.ok().path: result.ok() for result in schema.get_all_operations()}
    assert {*PATHS, *NO_BODY} == {path for path, operation in operations.items() if operation.method == "post"}
    seen: set[int] = set()
    for path in PATHS:
        cases = operations[path].as_strategy(generation_mode=schemathesis.GenerationMode(mode))

        @settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck), database=None)
        @given(case=cases)
        def ask(case: Any) -> None:
            answer = case.call(base_url=server.url, timeout=QUICK)
            seen.add(answer.status_code)
            assert answer.status_code < 500 and answer.status_code not in (409, 422), answer.text
            if answer.status_code >= 400:
                error = answer.json()["error"]
                if case.path.startswith("/api/"):
                    assert isinstance(error, str) and error
                else:
                    assert set(error) == {"message", "type", "param", "code"}

        ask()
    assert 400 in seen
    assert mode == "negative" or 200 in seen
    unharmed.check()
