"""Connections of a real server: how fast a kept one answers, how many there may be, which hosts and framing are taken."""

from __future__ import annotations

import http.client
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.serving import QUICK, Running, running


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Running]:
    with running(model, "--num-pages", "200") as server:
        yield server


def connect(server: Running) -> http.client.HTTPConnection:
    host, port = server.url.removeprefix("http://").split(":")
    return http.client.HTTPConnection(host, int(port), timeout=QUICK)


def test_a_kept_connection_answers_at_once(server: Running) -> None:
    """Without TCP_NODELAY on accepted sockets every reply after the first takes 40 ms more: the delayed ACK."""
    connection, seconds = connect(server), []
    for _ in range(40):
        began = time.perf_counter()
        connection.request("GET", "/version")
        connection.getresponse().read()
        seconds.append(time.perf_counter() - began)
    connection.close()
    assert statistics.median(seconds) < 0.02, seconds
