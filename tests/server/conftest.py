"""Tests here need the server's packages and its real clients. Where one is missing (a GPU machine's own Python), the
folder is passed over and says so, but for the parsers, which need none of them. `make test-all` fails instead.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest

NEEDED = ("fastapi", "uvicorn", "msgspec", "zmq", "prometheus_client", "llguidance", "httpx", "psutil")
NEEDED += ("openai", "anthropic", "langchain_openai", "schemathesis", "opentelemetry")
MISSING = [name for name in NEEDED if importlib.util.find_spec(name) is None]
NEED_NONE = ("test_parsers.py",)

if MISSING and os.environ.get("ANABRANCH_TEST_ALL"):
    raise pytest.UsageError(f"tests/server needs {', '.join(MISSING)}; run: make setup")

if not MISSING:
    from tests.server.serving import model, state, unharmed

    __all__ = ["model", "state", "unharmed"]  # fixtures


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    is_test = collection_path.name.startswith("test_") and collection_path.name not in NEED_NONE
    return True if MISSING and is_test else None


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if MISSING:
        terminalreporter.write_line(f"tests/server was passed over: it needs {', '.join(MISSING)}")
