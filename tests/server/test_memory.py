"""A server that cannot have its memory ends with one line that says so, before it loads anything."""

from __future__ import annotations

from pathlib import Path

from tests.server.serving import QUICK, running


def test_more_pages_than_memory(model: Path) -> None:
    with running(model, "--num-pages", "2000000000", ready=False) as server:
        assert server.process.wait(QUICK) == 1
        text = server.log()
    assert "the model does not fit: it needs" in text and "GB of KV pages" in text, text
    assert "Traceback" not in text
