"""Real clients of PyPI and npm against a real server with the bundled model; docs/clients.md says what they can do.

`make test-clients` installs them, each into an environment of its own under .venv-clients, and runs this. A script
runs its client's cases and prints how each ended (tests/clients/harness.py, harness.mjs); here that is
compared with the table.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from anabranch import bundled
from tests.conftest import missing_tool

ROOT = Path(__file__).parents[2]
HERE = ROOT / "tests" / "clients"
INSTALLED = ROOT / ".venv-clients"
IS_ASKED = os.environ.get("ANABRANCH_TEST_CLIENTS") == "1"
CASES = ("chat", "stream", "tools", "structured", "errors", "abort", "usage")
PYTHON = {
    "instructor": "client_instructor.py",
    "langchain-anthropic": "client_langchain_anthropic.py",
    "litellm": "client_litellm.py",
    "llama-index-llms-openai-like": "client_llama_index.py",
    "llm": "client_llm.py",
    "ollama": "client_ollama.py",
    "pydantic-ai-slim": "client_pydantic_ai.py",
}
"""Package → its script."""
NPM = {"@anthropic-ai/sdk": "anthropic.mjs", "ai": "vercel.mjs", "openai": "openai.mjs"}
OLDEST_NODE = 20
PROMPT, NUM_TOKENS = "Tell me a story.", 12
SLOW = 300.0  # seconds that no script takes, on however busy a machine
ENDLESS_CONTEXT = 32768  # tokens of an answer that no client waits for: minutes on a CPU

Row = dict[str, Any]


def table() -> dict[str, list[str]]:
    """Client → the other cells of its row: package, version, verdict, one for each case."""
    lines = (ROOT / "docs" / "clients.md").read_text().splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]
    head, *rows = rows
    assert head == ["client", "package", "version", "verdict", *CASES]
    return {row[0]: row[1:] for row in rows}


def pins() -> dict[str, str]:
    """Package → the version that is installed."""
    python = re.findall(r"^([a-z-]+)(?:\[.*\])?==(\S+)", (HERE / "requirements.txt").read_text(), re.M)
    npm: dict[str, str] = json.loads((HERE / "package.json").read_text())["dependencies"]
    assert {name for name, _ in python} == set(PYTHON) and set(NPM) <= set(npm)
    return dict(python) | npm | {f"{name} (npm)": npm[name] for name in NPM}


def test_the_table_has_the_versions_that_run() -> None:
    found = pins()
    for client, (package, version, verdict, *cells) in table().items():
        name = f"{package} (npm)" if f"{package} (npm)" in found and "npm" in client else package
        assert version == found[name], client
        assert set(cells) <= {"yes", "partly", "–"}, client
        assert verdict == ("partly" if "partly" in cells else "works"), client
    assert {package for package, *_ in table().values()} == {*PYTHON, *NPM}


def test_the_lock_file_names_no_registry() -> None:
    lock = json.loads((HERE / "package-lock.json").read_text())
    assert not [name for name, entry in lock["packages"].items() if "resolved" in entry]
    assert lock["packages"][""]["dependencies"] == json.loads((HERE / "package.json").read_text())["dependencies"]


def write_endless(folder: Path) -> Path:
    """The bundled model with a longer context and no token that ends an answer: a client has time to leave, however
    quick the machine."""
    shutil.copytree(bundled.folder(), folder)
    (folder / "generation_config.json").unlink()
    config = json.loads((folder / "config.json").read_text())
    config |= {"max_position_embeddings": ENDLESS_CONTEXT, "eos_token_id": None}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """What scripts are given: the server's address, what it answers, and another whose answers do not end."""
    from tests.server.serving import running

    model = write_endless(tmp_path_factory.mktemp("endless") / bundled.NAME)
    with running(None, "--chat-template", str(HERE / "tools.jinja")) as one, running(model) as endless:
        name = one.get("/v1/models").json()["data"][0]["id"]
        body = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": NUM_TOKENS, "temperature": 0}
        answer = one.post("/v1/chat/completions", body).json()
        yield {
            "url": one.url,
            "endless": endless.url,
            "model": name,
            "prompt": PROMPT,
            "expected": answer["choices"][0]["message"]["content"],
            "num_tokens": NUM_TOKENS,
            "num_prompt_tokens": answer["usage"]["prompt_tokens"],
        }
        assert "Traceback" not in one.log() + endless.log()


def check(package: str, command: list[str | Path], server: dict[str, Any]) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "NO_PROXY": "*", "DO_NOT_TRACK": "1"}
    for name in ("ANTHROPIC_API_KEY", "OPENAI_API_KEY", "OPENAI_BASE_URL", "ANTHROPIC_BASE_URL", "OLLAMA_HOST"):
        environment.pop(name, None)
    ran = subprocess.run(
        [*command, json.dumps(server)], capture_output=True, text=True, timeout=SLOW, env=environment, cwd=INSTALLED
    )
    assert ran.returncode == 0, ran.stderr
    results: dict[str, Row] = json.loads(ran.stdout.rstrip().splitlines()[-1])
    failed = [
        f"{client}, {case}:\n{error}"
        for client, row in results.items()
        for case, error in row["cases"].items()
        if error
    ]
    assert not failed, "\n".join(failed)
    rows = {client: row for client, row in table().items() if row[0] == package}
    assert rows.keys() == results.keys()
    for client, (_, version, _, *cells) in rows.items():
        assert results[client]["version"] == version
        assert {case for case, cell in zip(CASES, cells) if cell != "–"} == set(results[client]["cases"]), client


@pytest.mark.skipif(not IS_ASKED, reason="runs in `make test-clients`")
@pytest.mark.parametrize("package", PYTHON)
def test_python_client(package: str, server: dict[str, Any]) -> None:
    check(package, [INSTALLED / package / "bin" / "python", HERE / PYTHON[package]], server)


def need_node() -> None:
    if not (shutil.which("node") and shutil.which("npm")):
        missing_tool("needs node and npm (Debian: nodejs npm)")
    found = subprocess.run(["node", "--version"], capture_output=True, text=True, check=True).stdout
    if int(found.lstrip("v").partition(".")[0]) < OLDEST_NODE:  # which distributions may not have
        missing_tool(f"needs Node {OLDEST_NODE} or newer (nodejs.org), not {found.strip()}")


def test_an_old_node_is_a_missing_tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("node", "npm"):
        (tmp_path / name).write_text("#!/bin/sh\necho v18.20.4\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("tests.conftest.TEST_ALL", True)
    with pytest.raises(pytest.fail.Exception, match="needs Node 20 or newer .*, not v18.20.4"):
        need_node()


@pytest.mark.skipif(not IS_ASKED, reason="runs in `make test-clients`")
@pytest.mark.parametrize("package", NPM)
def test_npm_client(package: str, server: dict[str, Any], tmp_path: Path) -> None:
    need_node()
    (tmp_path / "node_modules").symlink_to(INSTALLED / "npm" / "node_modules")
    for script in HERE.glob("*.mjs"):  # a module looks for packages beside itself
        shutil.copy(script, tmp_path)
    check(package, ["node", tmp_path / NPM[package]], server)
