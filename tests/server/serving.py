"""A real server in its own process for tests to talk to, on a tiny model whose text is noise."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import signal
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from anabranch.config import EngineConfig
from tests.descriptors import num_descriptors
from tools import tiny_model

ROOT = Path(__file__).parents[2]
TEMPLATE = """\
{%- for message in messages %}
{{- '<|' + message.role + '|>' }}
{%- if message.reasoning_content %}{{ '<think>' + message.reasoning_content + '</think>' }}{% endif %}
{{- message.content }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson }}{{ '}\\n</tool_call>' }}
{%- endfor %}
{{- '\\n' }}
{%- endfor %}
{%- if tools %}{{ '<tools>' + (tools | tojson) + '</tools>\\n' }}{% endif %}
{%- if refuse %}{{ raise_exception("refused by the template") }}{% endif %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}
"""
CLI = "\nimport sys\nfrom anabranch.cli import main\nsys.exit(main.main())"
NAME = "noise"
QUICK = 90.0  # seconds nothing here takes, on however busy a machine
NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # the default reads all certificates, which takes 50 ms a request


def write_model(folder: Path) -> Path:
    tiny_model.write(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / NAME)


def gone(pid: int) -> bool:
    """Also where it has ended and the system has not yet forgotten it, which can take seconds."""
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


class Running:
    def __init__(self, process: subprocess.Popen[bytes], stderr: Path, headers: dict[str, str]) -> None:
        self.process, self.stderr, self.headers = process, stderr, headers
        self.url = ""

    def log(self) -> str:
        return self.stderr.read_text(errors="replace")

    def wait_for(self, pattern: str) -> re.Match[str]:
        end = time.monotonic() + QUICK
        while not (found := re.search(pattern, self.log())):
            assert self.process.poll() is None and time.monotonic() < end, self.log()
            time.sleep(0.02)
        return found

    def request(self, method: str, path: str, **options: Any) -> httpx.Response:
        """On a connection of its own, which is closed after it."""
        headers = {**self.headers, "connection": "close", **options.pop("headers", {})}
        return httpx.request(method, self.url + path, headers=headers, timeout=QUICK, verify=NO_TLS, **options)

    def get(self, path: str, **options: Any) -> httpx.Response:
        return self.request("GET", path, **options)

    def post(self, path: str, json: Any = None, **options: Any) -> httpx.Response:
        return self.request("POST", path, json=json, **options)

    def complete(self, prompt: str = "A river", **options: Any) -> str:
        body = {"prompt": prompt, "max_tokens": 12, "temperature": 0, "ignore_eos": True, **options}
        answer = self.post("/v1/completions", body)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["text"])

    def stats(self) -> dict[str, Any]:
        return dict(self.get("/debug/stats").json())

    @property
    def engine(self) -> psutil.Process:
        (child,) = psutil.Process(self.process.pid).children()
        return child

    def size(self) -> dict[str, int]:
        """What must not grow. Asked for over one connection, which is part of it each time."""
        parent = psutil.Process(self.process.pid)
        return {
            "tasks": self.stats()["asyncio_tasks"],
            "fds": num_descriptors(parent),
            "engine's fds": num_descriptors(self.engine),
            "processes": len(parent.children(recursive=True)),
        }

    def until(self, condition: Any, what: str = "") -> None:
        end = time.monotonic() + QUICK
        while not condition():
            assert time.monotonic() < end, f"{what}\n{self.log()}"
            time.sleep(0.02)

    def until_idle(self) -> None:
        def idle() -> bool:
            now = self.stats()
            return not (now["running"] or now["waiting"] or now["kv_usage"] or now["in_flight"])

        self.until(idle, "never idle")

    def end(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(QUICK)


@contextlib.contextmanager
def running(
    model: Path | None,
    *flags: str,
    key: str | None = None,
    ready: bool = True,
    make_engine: str = "",
    max_open_files: int = 0,
    before: str = "",
    **settings: Any,
) -> Iterator[Running]:
    """`anabranch serve`, or the same with an engine of the test's; without a model, the bundled one. `before`: code
    that the server's process runs first."""
    if make_engine:
        engine = EngineConfig(model=str(model), **settings.pop("engine", {}))
        code = "from anabranch import logs\nfrom anabranch.server import lifecycle\nlogs.set_up('text')\nimport sys\n"
        code += "from anabranch.server.settings import Settings\nfrom anabranch.config import EngineConfig\n"
        code += f"settings = Settings(**{settings | {'port': 0}!r})\n"
        code += f"engine = EngineConfig(**{dataclasses.asdict(engine)!r})\n"
        code += f"sys.exit(lifecycle.serve(settings, engine, {make_engine!r}))"
        command = [sys.executable, "-c", code]
    else:
        assert not settings
        command = [sys.executable, *(["-c", before + CLI] if before else ["-m", "anabranch.cli.main"]), "serve"]
        command += [*([str(model)] if model else []), "--port", "0", *flags]
        command += ["--api-key", key] if key else []
    if max_open_files:
        command = ["/bin/sh", "-c", f'ulimit -n {max_open_files} && exec "$@"', "sh", *command]
    with tempfile.TemporaryDirectory(prefix="t-", dir="/tmp") as folder:
        stderr = Path(folder) / "stderr"
        environment = os.environ | {
            "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}",
            "OMP_NUM_THREADS": "1",
            "TMPDIR": folder,
        }
        environment.pop("ANABRANCH_API_KEY", None)
        with stderr.open("wb") as stream:
            process = subprocess.Popen(command, stdout=stream, stderr=stream, env=environment, cwd=folder)
        server = Running(process, stderr, {"authorization": f"Bearer {key}"} if key else {})
        try:
            if ready:
                server.url = f"http://127.0.0.1:{server.wait_for(r'listening on http://127.0.0.1:([0-9]+)')[1]}"
                server.wait_for("ready after")
            yield server
        finally:
            children = []
            with contextlib.suppress(psutil.NoSuchProcess):
                children = psutil.Process(process.pid).children(recursive=True)
            process.kill()
            process.wait()
            server.until(lambda: all(gone(child.pid) for child in children), "a process has outlived the server")
            names = [name for name in os.listdir(folder) if name.startswith("anabranch-")]
            assert len(names) <= 1, names  # killed before its sockets had met: the system cleans TMPDIR, not we


class Unharmed:
    """After whatever a test did: a good request has the same answer, nothing is held, nothing has grown."""

    def __init__(self, server: Running) -> None:
        self.server = server
        self.expected = server.complete()
        # The first grammar starts a process that stays. An engine of a test's own may refuse it.
        server.post("/v1/completions", {"prompt": "A river", "max_tokens": 2, "guided_regex": "[a-z ]*"})
        server.get("/health")
        server.until_idle()
        server.size()
        self.before = server.size()

    def check(self, seconds: float = 20) -> None:
        server = self.server
        assert server.complete() == self.expected
        server.until_idle()
        now: dict[str, int] = {}

        def small() -> bool:
            nonlocal now
            now = server.size()
            return all(now[what] <= self.before[what] for what in now)

        end = time.monotonic() + seconds
        while not small():  # connections close a moment after their answers
            assert time.monotonic() < end, f"grown: {self.before} → {now}"
            time.sleep(0.1)
        assert server.get("/health/ready").status_code == 200


@pytest.fixture(scope="module")
def state(server: Running) -> Unharmed:
    return Unharmed(server)


@pytest.fixture
def unharmed(request: pytest.FixtureRequest) -> Iterator[None]:
    """After each test of a module that uses it, if the test had to do with the module's server."""
    state = request.getfixturevalue("state") if "server" in request.fixturenames else None
    yield
    if state is not None:
        state.check()
