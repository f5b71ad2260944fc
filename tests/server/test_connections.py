"""Connections of a real server: how fast a kept one answers, how many there may be, which hosts are answered."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import re
import resource
import socket
import statistics
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from anabranch.config import EngineConfig
from anabranch.server import connection
from anabranch.server.anthropic import Messages
from anabranch.server.body import decode
from anabranch.server.errors import ApiError
from anabranch.server.guard import Hosts
from anabranch.server.service import LARGE, SMALL, Service
from anabranch.server.settings import MIB, Settings
from anabranch.server.threads import Threads
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


# -- which requests are taken ------------------------------------------------------------------------------------------


def ask(server: Running, *lines: str, body: bytes = b"") -> tuple[int, bytes]:
    """The status and all the server says to a request of these lines; until it hangs up, if it does within a second."""
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), QUICK) as connection:
        connection.sendall("\r\n".join([*lines, "", ""]).encode() + body)
        said = connection.recv(65536)
        connection.settimeout(1.0)
        with contextlib.suppress(TimeoutError):
            while piece := connection.recv(65536):
                said += piece
            said += b"closed"
    return int(said.split()[1]), said


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("LOCALHOST:8000", 200),
        ("box.localhost", 200),
        ("127.0.0.1:8000", 200),
        ("[::1]:8000", 200),
        ("192.168.1.7", 200),
        ("evil.example", 403),
        ("evil.example:8000", 403),
        ("localhost.evil.example", 403),
        ("evillocalhost", 403),
        ("127.0.0.1.evil.example", 403),
        ("", 403),
    ],
)
def test_a_server_without_a_key_answers_to_known_hosts(server: Running, host: str, status: int) -> None:
    """What a page of another site sends after DNS rebinding has its own name as Host."""
    for path in ("/v1/models", "/"):
        found, said = ask(server, f"GET {path} HTTP/1.1", f"host: {host}", "connection: close")
        assert found == status, said
    if status == 403:
        assert b"host_not_allowed" in said and b"--allowed-hosts" in said
    assert ask(server, "GET /health HTTP/1.1", f"host: {host}", "connection: close")[0] == 200


def test_which_hosts_are_known() -> None:
    def allowed(header: str, **settings: Any) -> bool:
        return Hosts(Settings(**settings)).allow(header)

    assert allowed("box.example:8000", allowed_hosts=("other", "Box.example"))
    assert not allowed("other.example", allowed_hosts=("box.example",))
    assert allowed("anything", allowed_hosts=("*",)) and allowed("anything", api_key=("k",))
    assert not allowed("anything", api_key=("k",), allowed_hosts=("box",))
    everywhere: dict[str, Any] = {"host": "0.0.0.0", "allow_no_api_key": True}
    assert allowed(socket.gethostname(), **everywhere) and not allowed("evil.example", **everywhere)
    assert allowed("box.example", host="box.example", allow_no_api_key=True)
    with pytest.raises(ValueError, match="allowed_hosts"):
        Settings(allowed_hosts=("http://box",))


def test_other_sites_are_not_let_in_by_headers(server: Running) -> None:
    """A page of another site asks first (a preflight), and without leave it may neither send JSON nor read answers."""
    for headers in ({}, {"access-control-request-method": "POST"}):
        answer = server.request("OPTIONS", "/v1/completions", headers={"origin": "http://evil.example", **headers})
        assert answer.status_code == 405
    answer = server.get("/v1/models", headers={"origin": "http://evil.example"})
    assert not [name for name in answer.headers if name.startswith("access-control-")]
    assert server.post("/v1/completions", headers={"content-type": "text/plain"}, content="{}").status_code == 415


@pytest.mark.slow
def test_pages_of_allowed_origins_are_let_in(model: Path) -> None:
    origin, key = "http://localhost:3000", "k"
    asking = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}
    with running(model, "--num-pages", "200", "--allowed-origins", f"{origin},app://x", key=key) as server:
        for site in (origin, "app://x"):
            # Without the key: a browser does not send it along when it asks.
            answer = server.request(
                "OPTIONS", "/v1/completions", headers={"origin": site, "authorization": "", **asking}
            )
            assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, site)
            assert "POST" in answer.headers["access-control-allow-methods"]
            assert "authorization" in answer.headers["access-control-allow-headers"]
        answer = server.get("/v1/models", headers={"origin": origin})
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, origin)
        refused = server.get("/v1/models", headers={"origin": origin, "authorization": "Bearer wrong"})
        assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, origin)
        evil = {"origin": "http://evil.example"}
        assert server.request("OPTIONS", "/v1/completions", headers=evil | asking).status_code == 400
        assert "access-control-allow-origin" not in server.get("/v1/models", headers=evil).headers
    for wrong in ("localhost", "http://a/b", "http://a,http://b", ""):
        with pytest.raises(ValueError, match="allowed_origins"):
            Settings(allowed_origins=(wrong,))


def test_head_and_slashes_at_the_end(server: Running) -> None:
    for path in ("/", "/health", "/health/live", "/v1/models", "/version"):
        got, head = server.get(path), server.request("HEAD", path)
        assert (head.status_code, head.content) == (200, b"")
        assert head.headers["content-length"] == got.headers["content-length"] == str(len(got.content))
        assert path == "/" or server.get(f"{path}/").content == got.content
    status, said = ask(server, "HEAD /version HTTP/1.1", "host: localhost", "connection: close")
    assert status == 200 and said.endswith(b"\r\n\r\nclosed")
    body = {"prompt": "A river", "max_tokens": 3, "temperature": 0}
    assert (
        server.post("/v1/completions/", body).json()["choices"]
        == server.post("/v1/completions", body).json()["choices"]
    )
    assert server.request("HEAD", "/nowhere/").status_code == 404


@pytest.mark.parametrize(
    "lengths",
    [
        ("content-length: 6", "transfer-encoding: chunked"),
        ("transfer-encoding: chunked", "Content-Length: 6"),
        ("content-length: 6", "content-length: 7"),
        ("content-length: 6, 7",),
        ("content-length: -6",),
        ("content-length: +6",),
        ("transfer-encoding: gzip, chunked",),
    ],
)
def test_two_lengths_of_one_body(server: Running, lengths: tuple[str, ...]) -> None:
    """What a proxy could take for two requests is refused, and nothing more is read from the connection."""
    body = b"0\r\n\r\nGET /version HTTP/1.1\r\nhost: localhost\r\n\r\n"
    head = ("POST /tokenize HTTP/1.1", "host: localhost", "content-type: application/json", *lengths)
    status, said = ask(server, *head, body=body)
    assert status in (400, 501) and said.endswith(b"closed") and said.count(b"HTTP/1.1 ") == 1, said


def test_what_clients_do_leaves_no_traceback(server: Running) -> None:
    """Resets at every point of a request, and what is not HTTP."""
    host, port = server.url.removeprefix("http://").split(":")
    head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    body = json.dumps({"prompt": "A river", "max_tokens": 500, "ignore_eos": True, "stream": True})
    whole = f"{head}content-length: {len(body)}\r\n\r\n{body}"
    chunked = f"{head}transfer-encoding: chunked\r\n\r\n"
    for data in (
        *(whole[:size] for size in (0, 10, len(head), len(whole) - 5, len(whole))),
        *(chunked + part for part in ("5\r\n{", "zz\r\n", "ffffffffffffffffffffff\r\n")),
        whole + whole,
        "\x16\x03\x01\r\n\r\n",
        "GET /\x00 HTTP/1.1\r\nhost: localhost\r\n\r\n",
        "GET /v1/models%ff%00 HTTP/1.1\r\nhost: localhost\r\n\r\n",
        "GET / HTTP/1.1\r\nhost: localhost\r\nupgrade: websocket\r\nconnection: upgrade\r\n\r\n",
        "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        "CONNECT x:1 HTTP/1.1\r\nhost: localhost\r\n\r\n",
        "GET /debug/stats?since=nan HTTP/1.1\r\nhost: localhost\r\n\r\n",
        f"{head}expect: 100-continue\r\ncontent-length: 10\r\n\r\n",
    ):
        for answered in (False, True):
            with socket.create_connection((host, int(port)), QUICK) as connection:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # close: a reset
                connection.sendall(data.encode("latin-1"))
                if answered:
                    connection.settimeout(0.05)
                    with contextlib.suppress(TimeoutError):
                        connection.recv(100)
    server.until_idle()
    assert "Traceback" not in server.log(), server.log()
    assert "ERROR" not in server.log(), server.log()


# -- large bodies ------------------------------------------------------------------------------------------------------


def post(server: Running, path: str, body: str) -> httpx.Response:
    return server.post(path, content=body, headers={"content-type": "application/json"})


def test_a_body_is_limited_to_what_the_context_can_need(server: Running) -> None:
    """Decoding 15 MB of small objects takes a second in which nothing else is served."""
    limit = int(server.wait_for(r"limits: body (\d+) bytes")[1])
    context = int(server.wait_for(r"context (\d+) tokens")[1])
    assert limit == 2 * MIB + 32 * context
    objects = '{"messages": [{"role": "user", "content": "x"}], "metadata": {"a": [' + "{}," * 5_000_000 + "{}]}}"
    refused = post(server, "/v1/chat/completions", objects)
    assert refused.status_code == 413 and str(limit) in refused.json()["error"]["message"]
    largest = json.dumps({"messages": [{"role": "user", "content": "x"}], "max_tokens": 1})
    largest += " " * (limit - len(largest))
    assert post(server, "/v1/chat/completions", largest).status_code == 200
    assert post(server, "/v1/chat/completions", largest + " ").status_code == 413
    assert Settings().body_limit(10**9) == 16 * MIB
    assert Settings(max_body_bytes=5000).body_limit(10**9) == 5000


def test_large_bodies_are_worked_on_in_threads() -> None:
    async def names() -> list[str]:
        service = Service(Settings(), EngineConfig(model="x"), ("x",))
        sizes = (SMALL, SMALL + 1, LARGE + 1)
        return [(await service.run(threading.current_thread, size)).name for size in sizes]

    assert asyncio.run(names()) == ["MainThread", "prepare-1", "prepare-large-1"]


def test_a_thread_that_could_not_be_started_is_started_later(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Threads(1, "test")
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", raise_runtime_error)
        with pytest.raises(RuntimeError):
            pool.submit(int, 1)
    assert pool.submit(int, 2).result(QUICK) == 2


def raise_runtime_error(self: object) -> None:
    raise RuntimeError("can't start new thread")


def test_a_system_that_gives_fewer_open_files_than_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """As macOS does."""
    given: list[int] = []

    def setrlimit(kind: int, limits: tuple[int, int]) -> None:
        if limits[0] > 10240:
            raise ValueError("current limit exceeds maximum limit")
        given.append(limits[0])

    monkeypatch.setattr(resource, "getrlimit", lambda kind: (256, resource.RLIM_INFINITY))
    monkeypatch.setattr(resource, "setrlimit", setrlimit)
    assert connection.raise_file_limit() == 10240 and given == [10240]


@pytest.mark.parametrize("limit", [1000, 2000])  # torch.compile sets 2,000
def test_bodies_nested_too_deeply(limit: int) -> None:
    """Not deep enough for the decoder's limit."""
    given = sys.getrecursionlimit()
    sys.setrecursionlimit(max(limit, given))
    block: dict[str, Any] = {"type": "text", "text": "x", "zzz": 1}
    for _ in range(300):
        block = {"type": "tool_result", "tool_use_id": "1", "content": [block]}
    body = {"model": "x", "max_tokens": 1, "messages": [{"role": "user", "content": [block]}]}
    try:
        with pytest.raises(ApiError, match="too deeply nested") as caught:
            decode(json.dumps(body).encode(), Messages)
    finally:
        sys.setrecursionlimit(given)
    assert caught.value.status == 400


def test_a_thread_that_does_not_end_is_not_waited_for() -> None:
    async def run() -> None:
        service = Service(Settings(prepare_timeout=0.1), EngineConfig(model="x"), ("x",))
        ending = threading.Event()
        with pytest.raises(ApiError) as caught:
            await service.prepare(ending.wait, "messages", LARGE + 1)
        assert caught.value.status == 400 and service.num_busy_threads == 1
        with pytest.raises(ApiError) as caught:  # the only thread for large bodies is taken
            await service.run(lambda: None, LARGE + 1)
        assert caught.value.status == 503
        with pytest.raises(ApiError) as caught:  # not the fault of a prompt that was never looked at
            await service.prepare(lambda: None, "messages", LARGE + 1)
        assert caught.value.status == 503
        waiting = asyncio.create_task(service.prepare(ending.wait, "messages", 1))
        await asyncio.sleep(0.02)
        service.cancel_work()
        with pytest.raises(ApiError, match="shutting down"):
            await waiting
        ending.set()

    asyncio.run(run())


def test_tokenize_is_limited_and_gives_memory_back(server: Running) -> None:
    """16 MB of text once took 1.1 GB, which stayed."""
    process = psutil.Process(server.process.pid)
    text = "ab " * 66_000  # what may be counted though it is longer than the context
    server.post("/tokenize", {"prompt": text})
    before = process.memory_info().rss
    counted = server.post("/tokenize", {"messages": [{"role": "user", "content": text}]}).json()
    assert counted["count"] > counted["max_model_len"]
    assert server.post("/detokenize", {"tokens": counted["tokens"][:60_000]}).status_code == 200
    long = "ab " * 600_000
    for path, body in (
        ("/tokenize", {"messages": [{"role": "user", "content": long}]}),
        ("/tokenize", {"prompt": long}),
        ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": long}]}),
    ):
        answer = server.post(path, body)
        assert answer.status_code == 400 and "maximum context length" in answer.text, answer.text[:300]
    assert server.post("/detokenize", {"tokens": [1] * 100_000}).json()["error"]["param"] == "tokens"
    server.until(lambda: process.memory_info().rss - before < 30 * MIB, "memory stays")


# -- how many ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_more_connections_than_open_files_allow(model: Path) -> None:
    """Clients that open connections and send half a header: 503 beyond the limit, a short log, and no work."""
    with running(model, "--num-pages", "200", max_open_files=300) as server, contextlib.ExitStack() as stack:
        limit = int(server.wait_for(r"(\d+) connections\n")[1])
        assert limit == 300 - connection.OTHER_FILES - connection.ACCEPTED_AT_ONCE
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
    code = "import resource; from anabranch.server import connection\n"
    code += f"resource.setrlimit(resource.RLIMIT_NOFILE, (256, {hard}))\n"
    code += "print(connection.raise_file_limit(), resource.getrlimit(resource.RLIMIT_NOFILE)[0])"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    expected = connection.WANTED_FILES if hard == resource.RLIM_INFINITY else min(hard, connection.WANTED_FILES)
    assert [int(number) for number in said] == [expected, expected]


def test_connections_that_do_not_fit_are_refused_at_the_start() -> None:
    assert connection.max_connections(None, 1024) == 1024 - 128
    assert connection.max_connections(None, 10**6) == connection.MOST_CONNECTIONS
    assert connection.max_connections(900 - 128, 900) == 900 - 128
    with pytest.raises(ValueError, match="ulimit -n 144"):
        connection.max_connections(None, 100)
    with pytest.raises(ValueError, match="ulimit -n 2128`, or lower --max-connections"):
        connection.max_connections(2000, 1024)
