"""Keys, sizes, times and the queue: what a server does with those who ask too much, against a running one."""

from __future__ import annotations

import base64
import json
import re
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from anabranch.config import EngineConfig
from anabranch.server import page
from anabranch.server.app import make_app
from anabranch.server.guard import HEALTH, OPEN
from anabranch.server.service import Service
from anabranch.server.settings import Settings
from tests.server.serving import QUICK, Running, running

pytestmark = pytest.mark.usefixtures("unharmed")

MAX_BODY = 100_000
MAX_HEADERS = 4096
KEY = "open-sesame"


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Running]:
    flags = ["--max-num-seqs", "2", "--max-queue", "2", "--num-pages", "200", "--max-body-bytes", str(MAX_BODY)]
    flags += ["--max-header-bytes", str(MAX_HEADERS), "--header-timeout", "4", "--body-timeout", "4"]
    with running(model, *flags, "--served-model-name", "one", "two", key=KEY) as server:
        yield server


def error(answer: Any, status: int) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    assert answer.headers["x-request-id"]
    found = answer.json()["error"]
    assert set(found) == {"message", "type", "param", "code"}
    return dict(found)


def raw(server: Running, data: bytes, then: bytes = b"", pause: float = 0.0) -> bytes:
    """All the server says to these bytes until it hangs up."""
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=QUICK) as connection:
        connection.sendall(data)
        if then:
            time.sleep(pause)
            connection.sendall(then)
        said = b""
        while piece := connection.recv(65536):
            said += piece
        return said


def walk(routes: Any) -> Iterator[Any]:
    for route in routes:
        if hasattr(route, "original_router"):  # as FastAPI keeps a router that was included
            yield from walk(route.original_router.routes)
        else:
            yield route


def routes() -> list[tuple[str, str]]:
    """Every route of the application, as it is found in it."""
    app = make_app(Service(Settings(), EngineConfig(model="x"), ("x",)))
    found = [(method, re.sub("{.*}", "x", route.path)) for route in walk(app.routes) for method in route.methods]
    assert len(found) >= 14 and {("POST", "/v1/completions"), ("GET", "/openapi.json"), ("GET", "/")} <= set(found)
    return found


def test_every_route_but_health_and_the_pages_files_needs_the_key(server: Running) -> None:
    asked = [*routes(), ("GET", "/nowhere"), ("POST", "/v1/nothing"), ("GET", "//health"), ("GET", "/health/ready//")]
    asked += [("GET", "/page/"), ("GET", "/page/../v1/models"), ("GET", "/page/__init__.py"), ("GET", "//")]
    with httpx.Client(timeout=QUICK) as client:
        for method, path in asked:
            url = server.url + path  # not a base_url: httpx would take //health for a host
            if path in OPEN:
                assert path == "/" or client.request(method, f"{url}/").status_code == 200
                assert client.request(method, url).status_code == 200
                continue
            for headers in (
                {},
                {"authorization": "Bearer"},
                {"authorization": "Bearer wrong"},
                {"authorization": f"Bearer {KEY}x"},
                {"authorization": KEY},
                {"authorization": "Basic !!!"},
                {"x-api-key": ""},
                {"x-api-key": KEY[:-1]},
            ):
                answer = client.request(method, url, headers=headers)
                assert answer.status_code == 401, (method, path, headers)
                if path.startswith("/api/"):
                    assert "API key" in answer.json()["error"]
                elif method != "HEAD":
                    assert error(answer, 401)["code"] == "invalid_api_key"
                assert KEY not in answer.text
    assert {"/health", "/health/live", "/health/ready"} == HEALTH
    files = {file.name for file in Path(page.__file__).parent.iterdir() if file.suffix in (".html", ".css", ".js")}
    assert HEALTH | {"/"} | {f"/page/{name}" for name in files - {"index.html"}} == OPEN
    challenge = httpx.get(server.url + "/v1/models").headers["www-authenticate"]
    assert challenge.startswith("Bearer") and "Basic" not in challenge  # browsers ask for a password where it is


def test_the_key_opens_as_clients_send_it(server: Running) -> None:
    basic = base64.b64encode(f"anyone:{KEY}".encode()).decode()
    for headers in ({"authorization": f"Bearer {KEY}"}, {"x-api-key": KEY}, {"authorization": f"Basic {basic}"}):
        answer = httpx.get(server.url + "/v1/models", headers=headers, timeout=QUICK)
        assert [one["id"] for one in answer.json()["data"]] == ["one", "two"]
    assert KEY not in server.log()


def test_request_ids_come_back(server: Running) -> None:
    assert server.get("/version", headers={"x-request-id": "mine-1"}).headers["x-request-id"] == "mine-1"
    strange = server.get("/version", headers={"x-request-id": "a b" + "c" * 200}).headers["x-request-id"]
    assert strange.startswith("req-")


def test_a_body_over_the_limit(server: Running) -> None:
    body = json.dumps({"prompt": "x" * MAX_BODY}).encode()
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
        found = error(server.request("POST", path, content=body, headers={"content-type": "application/json"}), 413)
        assert found["code"] == "body_too_large" and str(MAX_BODY) in found["message"]
    chunks = (b"x" * 10_000 for _ in range(50))  # without a length to tell it beforehand
    found = error(
        server.request("POST", "/tokenize", content=chunks, headers={"content-type": "application/json"}), 413
    )
    assert found["code"] == "body_too_large"
    just_fits = json.dumps({"prompt": "x"})
    just_fits += " " * (MAX_BODY - len(just_fits))
    answer = server.request("POST", "/tokenize", content=just_fits, headers={"content-type": "application/json"})
    assert answer.status_code == 200


def test_a_body_of_many_megabytes_is_not_kept(server: Running) -> None:
    import psutil

    before = psutil.Process(server.process.pid).memory_info().rss
    chunks = (b"x" * 2**20 for _ in range(40))
    headers = {"content-type": "application/json", "content-length": str(40 * 2**20)}
    error(server.request("POST", "/v1/completions", content=chunks, headers=headers), 413)
    assert psutil.Process(server.process.pid).memory_info().rss - before < 15 * 2**20


def test_headers_over_the_limit(server: Running) -> None:
    for size in (MAX_HEADERS, 10 * MAX_HEADERS, 500_000):
        answer = raw(server, b"GET /health HTTP/1.1\r\nhost: x\r\nx-long: " + b"y" * size + b"\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 431 "), answer[:200]
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "headers"
        assert b"x-request-id: req-" in answer
    many = b"".join(b"x-%d: y\r\n" % number for number in range(1000))
    assert raw(server, b"GET /health HTTP/1.1\r\nhost: x\r\n" + many + b"\r\n").startswith(b"HTTP/1.1 431 ")


def test_what_is_not_http(server: Running) -> None:
    for data in (b"hello\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n", b"GET / HTTP/1.1\r\nhost x\r\n\r\n"):
        answer = raw(server, data)
        assert answer.startswith(b"HTTP/1.1 400 "), answer[:200]
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "invalid_http"


def test_headers_and_bodies_that_do_not_come(server: Running) -> None:
    """Half a header, half a body, and nothing at all: none holds a connection for longer than it may."""
    head = b"POST /tokenize HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    head += b"authorization: Bearer " + KEY.encode() + b"\r\n"
    began = time.monotonic()
    with ThreadPoolExecutor(4) as pool:
        half_header = pool.submit(raw, server, b"GET /health HTTP/1.1\r\nhost: ")
        nothing = pool.submit(raw, server, b"")
        half_body = pool.submit(raw, server, head + b"content-length: 100\r\n\r\n{")
        again = pool.submit(raw, server, b"GET /health HTTP/1.1\r\nhost: x\r\n\r\nGET /hea")
        assert half_header.result().startswith(b"HTTP/1.1 408 ")
        assert nothing.result() == b""
        assert half_body.result().startswith(b"HTTP/1.1 408 ") and b"request_timeout" in half_body.result()
        assert again.result().startswith(b"HTTP/1.1 200 ") and b"HTTP/1.1 408 " in again.result()
    assert time.monotonic() - began >= 3.0


def test_a_broken_body_in_mid_request(server: Running) -> None:
    head = b"POST /tokenize HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    head += b"authorization: Bearer " + KEY.encode() + b"\r\ntransfer-encoding: chunked\r\n\r\n"
    assert raw(server, head + b"5\r\nhello\r\n", b"zzz\r\n", 0.1).startswith(b"HTTP/1.1 400 ")


def test_a_full_queue_says_so_at_once(server: Running) -> None:
    body = {"prompt": "A river", "max_tokens": 150, "ignore_eos": True, "temperature": 0}
    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(lambda _: server.post("/v1/completions", body), range(12)))
    served = [answer for answer in answers if answer.status_code == 200]
    assert len(served) >= 4
    refused = [answer for answer in answers if answer.status_code != 200]
    assert refused
    for answer in refused:
        assert error(answer, 429)["code"] == "queue_full"
        assert int(answer.headers["retry-after"]) >= 1
    assert len({answer.json()["choices"][0]["text"] for answer in served}) == 1
    assert server.stats()["refused"] >= len(refused)


def test_many_prompts_count_as_many(server: Running) -> None:
    too_many = server.post("/v1/completions", {"prompt": ["a", "b", "c", "d", "e"], "max_tokens": 2})
    assert error(too_many, 400)["param"] == "n"
    assert server.post("/v1/completions", {"prompt": ["a", "b"], "n": 2, "max_tokens": 2}).status_code == 200


def test_the_limits_are_told_at_the_start(server: Running) -> None:
    assert f"body {MAX_BODY} bytes, headers {MAX_HEADERS} bytes, 2 sequences running and 2 waiting" in server.log()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.7", "example.org", ""])
def test_other_machines_need_a_key(host: str) -> None:
    with pytest.raises(ValueError, match="without a key"):
        Settings(host=host)
    assert Settings(host=host, api_key=("k",)) and Settings(host=host, allow_no_api_key=True)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost", "127.8.0.1"])
def test_this_machine_needs_none(host: str) -> None:
    assert Settings(host=host)


@pytest.mark.parametrize(
    "wrong", [{"api_key": ("",)}, {"api_key": (" ",)}, {"port": 70000}, {"max_queue": -1}, {"header_timeout": -1}]
)
def test_settings_are_checked(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong)).replace("api_key", "API key")):
        Settings(**wrong)
