"""Connections of a real server: how fast a kept one answers, how many there may be, which hosts and framing are taken."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import resource
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from anabranch.server import open_files
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


# -- how many ----------------------------------------------------------------------------------------------------------


def test_more_connections_than_open_files_allow(model: Path) -> None:
    """Clients that open connections and send half a header: 503 for those beyond the limit, a short log, and no work."""
    with running(model, "--num-pages", "200", max_open_files=300) as server, contextlib.ExitStack() as stack:
        limit = int(server.wait_for(r"(\d+) connections\n")[1])
        assert limit == 300 - open_files.FILES - open_files.AT_ONCE
        host, port = server.url.removeprefix("http://").split(":")
        clients = [stack.enter_context(socket.create_connection((host, int(port)), QUICK)) for _ in range(400)]
        process = psutil.Process(server.process.pid)
        refused = b"".join(iter(lambda: clients[-1].recv(65536), b""))
        head, _, body = refused.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 503 ") and b"retry-after" in head
        assert json.loads(body)["error"]["code"] == "connections"
        for client in clients[: limit - 20]:
            client.sendall(b"GET /health HTTP/1.1\r\nhost: ")
        assert server.get("/health").status_code == 503
        before = sum(process.cpu_times()[:2])
        time.sleep(1.0)
        assert sum(process.cpu_times()[:2]) - before < 0.5
        assert process.num_fds() < 300
        stack.close()
        server.until(lambda: server.get("/health").status_code == 200)
        assert "Traceback" not in server.log() and len(server.log()) < 20_000
        assert 1 <= len(re.findall("connections are in use", server.log())) <= 5
        assert server.end() == 0


def test_the_limit_of_open_files_is_raised() -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    code = "import resource; from anabranch.server import open_files as files\n"
    code += f"resource.setrlimit(resource.RLIMIT_NOFILE, (256, {hard}))\n"
    code += "print(files.raise_limit(), resource.getrlimit(resource.RLIMIT_NOFILE)[0])"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    expected = open_files.WANTED if hard == resource.RLIM_INFINITY else min(hard, open_files.WANTED)
    assert [int(number) for number in said] == [expected, expected]


def test_connections_that_do_not_fit_are_refused_at_the_start() -> None:
    assert open_files.max_connections(None, 1024) == 1024 - 128
    assert open_files.max_connections(None, 10**6) == open_files.MOST
    assert open_files.max_connections(900 - 128, 900) == 900 - 128
    with pytest.raises(ValueError, match="ulimit -n 144"):
        open_files.max_connections(None, 100)
    with pytest.raises(ValueError, match="ulimit -n 2128`, or lower --max-connections"):
        open_files.max_connections(2000, 1024)
