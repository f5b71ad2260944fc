"""From start to end: clients that leave, signals, an engine that dies, hangs or fails, and starts that must fail."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from anabranch.config import EngineConfig
from anabranch.server.lifecycle import listen, read_model
from anabranch.server.settings import Settings
from tests.server.faulty_engine import BUG, CRASH, EXIT, HANG, LEAK
from tests.server.serving import QUICK, Running, Unharmed, gone, running

ENGINE = "tests.server.faulty_engine:make_engine"
SMALL = {"max_num_seqs": 4, "num_pages": 300}
LONG = {"prompt": "A river", "max_tokens": 1900, "temperature": 0, "ignore_eos": True}


@pytest.fixture
def slow_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a long answer takes a minute, and no test has to hurry."""
    monkeypatch.setenv("STEP_SECONDS", "0.03")


class Streaming(threading.Thread):
    """A client that reads a stream to its end."""

    def __init__(self, server: Running, body: dict[str, Any] = LONG) -> None:
        super().__init__(daemon=True)
        self.server, self.body = server, body
        self.events: list[str] = []
        self.broken: Exception | None = None
        self.start()

    def run(self) -> None:
        url = self.server.url + "/v1/completions"
        try:
            with httpx.stream("POST", url, json=self.body | {"stream": True}, timeout=QUICK) as answer:
                self.events = []
                for line in answer.iter_lines():
                    if line.startswith("data: "):
                        self.events.append(line.removeprefix("data: "))
        except httpx.HTTPError as error:
            self.broken = error

    def wait_for_text(self) -> None:
        self.server.until(lambda: self.events, "no text")

    def last(self) -> dict[str, Any]:
        self.join(QUICK)
        assert not self.is_alive()
        return dict(json.loads(self.events[-1]))


# -- clients that leave ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def leaving(model: Path) -> Iterator[tuple[Running, Unharmed]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STEP_SECONDS", "0.03")
        with running(model, make_engine=ENGINE, engine=SMALL | {"max_num_batched_tokens": 64}) as server:
            yield server, Unharmed(server)


def leave(server: Running, path: str, body: dict[str, Any], wait: Any) -> None:
    """Ask, wait, hang up without a word."""
    host, port = server.url.removeprefix("http://").split(":")
    content = json.dumps(body).encode()
    with socket.create_connection((host, int(port)), timeout=QUICK) as connection:
        head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        connection.sendall(f"{head}content-length: {len(content)}\r\n\r\n".encode() + content)
        wait(connection)


def aborted(server: Running) -> int:
    found = [line for line in server.get("/metrics").text.splitlines() if 'finished_reason="abort"' in line]
    return int(float(found[0].split()[-1])) if found else 0


@pytest.mark.parametrize(
    ("when", "stream", "n"),
    [
        ("while it runs", False, 1),
        ("while it runs", True, 1),
        ("while it runs", False, 2),
        ("while it runs", True, 2),
        ("during prefill", False, 1),
        ("during prefill", True, 1),
        ("after some text", True, 1),
    ],
)
def test_who_leaves_is_forgotten(leaving: tuple[Running, Unharmed], when: str, stream: bool, n: int) -> None:
    server, unharmed = leaving
    before = aborted(server)
    body = LONG | {"stream": stream, "n": n}
    if when == "during prefill":  # 64 tokens a step: 30 steps of 30 ms
        body |= {"prompt": "x" * 1900, "max_tokens": 100}

    def wait(connection: socket.socket) -> None:
        if when == "after some text":
            text = b""
            while b"data: " not in text:
                text += connection.recv(65536)
        else:
            server.until(lambda: server.stats()["running"] >= (1 if when == "during prefill" else n))

    leave(server, "/v1/completions", body, wait)
    began = server.stats()
    server.until_idle()
    steps = server.stats()["generation_tokens"] - began["generation_tokens"]
    assert aborted(server) - before == n
    assert steps < 50 * n, "it was not aborted at once"
    unharmed.check()


def test_ten_leave_and_others_are_served(leaving: tuple[Running, Unharmed]) -> None:
    server, unharmed = leaving
    with ThreadPoolExecutor(8) as pool:
        good = [pool.submit(server.complete) for _ in range(4)]
        for number in range(10):
            chat = {"messages": [{"role": "user", "content": "x"}], "stream": number % 2 == 0, "max_tokens": 1000}
            leave(server, "/v1/chat/completions", chat, lambda _: time.sleep(0.02))
        assert {one.result() for one in good} == {unharmed.expected}
    server.until_idle()
    unharmed.check()


def test_a_bug_in_one_request_is_its_own(leaving: tuple[Running, Unharmed]) -> None:
    server, unharmed = leaving
    answer = server.post("/v1/completions", {"prompt": BUG})
    assert answer.status_code == 500 and answer.json()["error"]["code"] == "internal_error"
    assert answer.headers["x-should-retry"] == "false"
    unharmed.check()


@pytest.mark.slow
def test_a_leak_of_one_descriptor_is_found(model: Path) -> None:
    with running(model, make_engine=ENGINE, engine=SMALL) as server:
        unharmed = Unharmed(server)
        server.complete(LEAK)
        with pytest.raises(AssertionError, match="grown: .*engine's fds"):
            unharmed.check(seconds=1)


# -- signals -----------------------------------------------------------------------------------------------------------


def test_sigterm_lets_requests_finish(model: Path, slow_steps: None) -> None:
    with running(model, make_engine=ENGINE, engine=SMALL, shutdown_timeout=QUICK) as server:
        stream = Streaming(server, LONG | {"max_tokens": 100})
        with ThreadPoolExecutor(1) as pool:
            whole = pool.submit(server.complete, max_tokens=100)
            stream.wait_for_text()
            server.until(lambda: server.stats()["running"] == 2)
            engine = server.engine.pid
            server.process.send_signal(signal.SIGTERM)
            server.until(lambda: server.get("/health/ready").status_code == 503)
            refused = server.post("/v1/completions", {"prompt": "x"})
            assert refused.status_code == 503 and refused.json()["error"]["code"] == "server_draining"
            assert int(refused.headers["retry-after"]) > 0
            assert server.get("/health/live").status_code == 200
            assert len(whole.result()) > 0
        stream.join(QUICK)
        assert (
            stream.events[-1] == "[DONE]" and json.loads(stream.events[-2])["choices"][0]["finish_reason"] == "length"
        )
        assert server.process.wait(QUICK) == 0
        assert gone(engine)


def test_the_drain_has_an_end(model: Path, slow_steps: None) -> None:
    with running(model, make_engine=ENGINE, engine=SMALL, shutdown_timeout=0.5) as server:
        stream = Streaming(server)
        stream.wait_for_text()
        engine = server.engine.pid
        assert server.end() == 0
        assert stream.last()["error"]["code"] == "server_draining"
        assert gone(engine) and "sequences are aborted" in server.log()
        assert "Traceback" not in server.log()


def test_a_client_that_reads_nothing_does_not_hold_up_the_end(model: Path) -> None:
    with running(model, "--num-pages", "300", "--shutdown-timeout", "3") as server:
        host, port = server.url.removeprefix("http://").split(":")
        body = json.dumps(LONG | {"stream": True, "n": 4, "logprobs": 5, "prompt": ["A"] * 8}).encode()
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            connection.connect((host, int(port)))
            head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            connection.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
            server.until(lambda: server.stats()["generation_tokens"] > 400)
            ends_within(server, 6.0)


def test_a_second_signal_does_not_wait(model: Path, slow_steps: None) -> None:
    with running(model, make_engine=ENGINE, engine=SMALL, shutdown_timeout=3600) as server:
        stream = Streaming(server)
        stream.wait_for_text()
        engine = server.engine.pid
        server.process.send_signal(signal.SIGTERM)
        server.wait_for("waiting up to")
        assert server.end(signal.SIGINT) == 130
        assert stream.last()["error"]["code"] == "server_draining"
        assert gone(engine)


def test_loading_is_told_and_can_be_ended(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOAD_SECONDS", "3600")
    make_slowly = "tests.server.faulty_engine:make_slowly"
    with running(model, make_engine=make_slowly, engine=SMALL, ready=False) as server:
        server.url = f"http://127.0.0.1:{server.wait_for('listening on http://127.0.0.1:([0-9]+)')[1]}"
        assert server.get("/health/live").status_code == 200
        answer = server.get("/health/ready")
        assert answer.status_code == 503 and answer.json()["error"]["code"] == "server_loading"
        for path, body in (("/v1/completions", {"prompt": "x"}), ("/tokenize", {"prompt": "x"})):
            assert server.post(path, body).status_code == 503
        assert server.get("/metrics").status_code == 200 and server.get("/debug/stats").json()["phase"] == "loading"
        server.until(lambda: psutil.Process(server.process.pid).children())
        engine = server.engine.pid
        assert server.end() == 0 and gone(engine)


def ends_within(server: Running, seconds: float) -> None:
    """SIGTERM, and exit code 0 within the time."""
    began = time.monotonic()
    assert server.end() == 0, server.log()
    assert time.monotonic() - began < seconds
    assert "Traceback" not in server.log()


def test_a_template_that_does_not_end_holds_nothing_up(model: Path, tmp_path: Path) -> None:
    folder = copy_of(model, tmp_path / "endless")
    loops = "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}"
    (folder / "chat_template.jinja").write_text(loops + "{% endfor %}" * 3)
    chat = {"messages": [{"role": "user", "content": "x"}]}
    with running(folder, "--num-pages", "200", "--shutdown-timeout", "6") as server, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(server.post, "/v1/chat/completions", chat)
        server.until(lambda: server.stats()["in_flight"] == 1)
        ends_within(server, 6.0)
        assert answer.result().status_code == 503
        assert answer.result().json()["error"]["code"] == "server_draining"


def test_a_file_that_cannot_be_read_to_its_end_holds_nothing_up(model: Path, tmp_path: Path) -> None:
    """A pipe without a writer in place of the weights."""
    folder = copy_of(model, tmp_path / "pipe")
    (folder / "model.safetensors").unlink()
    os.mkfifo(folder / "model.safetensors")
    with running(folder, "--shutdown-timeout", "6", ready=False) as server:
        server.url = f"http://127.0.0.1:{server.wait_for('listening on http://127.0.0.1:([0-9]+)')[1]}"
        assert server.get("/health/ready").status_code == 503
        time.sleep(0.5)
        ends_within(server, 6.0)


# -- the engine's end --------------------------------------------------------------------------------------------------


# test_ready_is_no_more_when_the_engine_is_gone has SIGKILL.
SLOW = [pytest.param(how, marks=pytest.mark.slow) for how in ("SIGKILL", "SIGSEGV", EXIT, HANG)]


@pytest.mark.parametrize("how", [CRASH, *SLOW])
def test_an_engine_that_ends(model: Path, how: str, slow_steps: None) -> None:
    settings = {"step_timeout": 4.0} if how == HANG else {}
    with running(model, make_engine=ENGINE, engine=SMALL, **settings) as server:
        stream, engine = Streaming(server), server.engine.pid
        stream.wait_for_text()
        with ThreadPoolExecutor(2) as pool:
            whole = pool.submit(server.post, "/v1/completions", LONG)
            server.until(lambda: server.stats()["running"] == 2)
            if how.startswith("SIG"):
                os.kill(engine, signal.Signals[how])
                other = whole
            else:
                other = pool.submit(server.post, "/v1/completions", {"prompt": how, "max_tokens": 5})
            error = stream.last()["error"]
            assert error["code"] in ("server_dead", "internal_error") and error["message"], error
            for answer in (whole.result(), other.result()):
                assert answer.status_code in (500, 503), answer.text
                assert answer.json()["error"]["code"] in ("server_dead", "internal_error")
        assert server.process.wait(QUICK) == 1
        assert gone(engine)
        log = server.log()
        assert "ending with exit code 1" in log
        words = {CRASH: "the step failed", EXIT: "process ended with exit code 7", HANG: "one step for"}
        cause = words.get(how, f"process was killed by {how}")
        assert cause in log
        if how != HANG:
            assert cause in error["message"] and cause in other.result().json()["error"]["message"]


def test_ready_is_no_more_when_the_engine_is_gone(model: Path) -> None:
    with running(model, make_engine=ENGINE, engine=SMALL) as server:
        seen: list[int] = []
        text = ""
        os.kill(server.engine.pid, signal.SIGKILL)
        while server.process.poll() is None:
            try:
                answer = server.get("/health/ready")
            except httpx.HTTPError:
                break
            seen.append(answer.status_code)
            text = answer.text
        assert 503 in seen and seen == sorted(seen), seen  # never 200 again
        assert "killed by SIGKILL" in text
        assert server.process.wait(QUICK) == 1


def test_nothing_outlives_a_killed_server(model: Path, slow_steps: None) -> None:
    with running(model, make_engine=ENGINE, engine=SMALL) as server:
        stream = Streaming(server)
        stream.wait_for_text()
        family = psutil.Process(server.process.pid).children(recursive=True)
        assert family
        server.process.kill()
        server.process.wait()
        server.until(lambda: all(gone(child.pid) for child in family), "an orphan")


# -- starts that cannot succeed ----------------------------------------------------------------------------------------


def start(*arguments: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "anabranch.cli.main", "serve", "--port", "0", *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=QUICK, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stderr


def copy_of(model: Path, folder: Path) -> Path:
    folder.mkdir()
    for path in model.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


def test_a_port_in_use(model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, said = start(str(model), "--port", str(port))
    assert code == 1 and f"127.0.0.1:{port}" in said and "choose another --port" in said and said.count("\n") == 1


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def pointer(path: Path) -> None:
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")


def drop_tensor(path: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(path)
    del tensors["model.layers.1.mlp.gate.weight"]
    save_file(tensors, path)


def other_shape(path: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(path)
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:8].clone()
    save_file(tensors, path)


def config(**changes: Any) -> Any:
    return lambda path: path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def pickled(path: Path) -> None:
    path.rename(path.with_name("pytorch_model.bin"))


def template_error(path: Path) -> None:
    path.write_text("{% for %}")


@pytest.mark.parametrize(
    ("file", "harm", "words"),
    [
        ("model.safetensors", truncate, ["model.safetensors"]),
        ("model.safetensors", pointer, ["model.safetensors", "git lfs"]),
        ("model.safetensors", pickled, ["safetensors"]),
        ("model.safetensors", Path.unlink, ["safetensors"]),
        ("config.json", config(model_type="mamba"), ["mamba"]),
        ("config.json", config(num_experts_per_tok=13), ["13", "12"]),
        ("tokenizer.json", truncate, ["tokenizer.json", "truncated"]),
        ("tokenizer.json", Path.unlink, ["tokenizer.json"]),
        ("chat_template.jinja", template_error, ["chat template"]),
    ],
)
def test_a_model_folder_that_is_not_whole(model: Path, tmp_path: Path, file: str, harm: Any, words: list[str]) -> None:
    """The errors with which a server ends before it starts an engine; the next test starts some."""
    folder = copy_of(model, tmp_path / "model")
    harm(folder / file)
    with pytest.raises((ValueError, OSError)) as caught:
        read_model(EngineConfig(model=str(folder)), Settings())
    assert all(word in str(caught.value).splitlines()[-1] for word in words), caught.value


@pytest.mark.parametrize(
    ("file", "harm", "words"),
    [
        ("tokenizer.json", truncate, ["tokenizer.json", "truncated"]),
        ("model.safetensors", drop_tensor, ["gate.weight"]),  # these two are found by the engine
        pytest.param("model.safetensors", other_shape, ["norm.weight", "8"], marks=pytest.mark.slow),
    ],
)
def test_such_a_folder_ends_the_start(model: Path, tmp_path: Path, file: str, harm: Any, words: list[str]) -> None:
    folder = copy_of(model, tmp_path / "model")
    harm(folder / file)
    code, said = start(str(folder))
    assert code == 1
    last = said.strip().splitlines()[-1]
    assert last.startswith("anabranch serve: ") and all(word in last for word in words), said


def test_packed_weights_are_left_to_the_platform(model: Path, tmp_path: Path) -> None:
    """MLX reads them; the server's own process does not know the platform, and the engine of any other refuses."""
    folder = copy_of(model, tmp_path / "packed")
    config(quantization_config={"bits": 4, "group_size": 32})(folder / "config.json")
    assert read_model(EngineConfig(model=str(folder)), Settings()).config.vocab_size
    code, said = start(str(folder))
    last = said.strip().splitlines()[-1]
    assert code == 1 and last.startswith("anabranch serve: ") and "'quantization_config'" in last, said
    config(num_experts_per_tok=13)(folder / "config.json")
    with pytest.raises(ValueError, match="13"):
        read_model(EngineConfig(model=str(folder)), Settings())


MISTAKES = """
import sys
from anabranch.cli.main import main
for arguments in {calls}:
    try:
        code = main(["serve", "--port", "0", *arguments])
    except SystemExit as end:
        code = end.code
    print("exit code", code, file=sys.stderr)
"""


def test_other_mistakes_of_a_command_line(model: Path, tmp_path: Path) -> None:
    """All in one process, which takes less time."""
    mistakes = (
        ((str(model), "--tool-call-parser", "hermis"), 1, "unknown tool parser"),
        ((str(model), "--max-model-len", "999999"), 1, "max_model_len"),
        ((str(model), "--host", "0.0.0.0"), 1, "refusing to serve"),
        ((str(model), "--api-key", ""), 1, "API key"),
        ((str(model), "--max-num-seq", "4"), 2, "did you mean --max-num-seqs?"),
        ((str(model), "--chat-template", str(tmp_path / "none.jinja")), 1, "none.jinja"),
    )
    code_of_all = MISTAKES.format(calls=[arguments for arguments, _, _ in mistakes])
    done = subprocess.run([sys.executable, "-c", code_of_all], capture_output=True, text=True, timeout=QUICK)
    assert "Traceback" not in done.stderr, done.stderr
    said = re.split(r"exit code (\d)\n", done.stderr)
    for (_, code, words), message, found in zip(mistakes, said[::2], said[1::2], strict=False):
        assert int(found) == code and words in message, message
    assert len(said) == 2 * len(mistakes) + 1


def test_a_client_may_connect_before_the_loop_runs() -> None:
    """The log line with the address comes then."""
    with listen(Settings(port=0)) as sock, socket.create_connection(sock.getsockname(), timeout=5):
        pass


def test_help_fits_two_screens() -> None:
    command = [sys.executable, "-m", "anabranch.cli.main", "serve"]
    environment = os.environ | {"COLUMNS": "80"}
    core = subprocess.run([*command, "--help"], capture_output=True, text=True, env=environment)
    assert core.returncode == 0 and core.stdout.count("\n") <= 2 * 25
    every = subprocess.run([*command, "--help=all"], capture_output=True, text=True, env=environment)
    assert every.returncode == 0 and "--step-timeout" in every.stdout and "--step-timeout" not in core.stdout
    assert "--max-num-seqs" in core.stdout and "--page-size" in every.stdout
