"""What holds for every test: its seed, no network, and what a marker needs.

With ANABRANCH_TEST_ALL=1 (`make test-all`) slow tests run, and a missing tool fails a test instead of skipping it.
With TRITON_INTERPRET=1 (`make test-interpreter`) the tests marked `interpreter` run, and only these.
"""

import gc
import logging
import os
import shutil
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before anything imports huggingface_hub

import hypothesis
import pytest
import torch

TEST_ALL = os.environ.get("ANABRANCH_TEST_ALL") == "1"
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
LEFT_OUT = pytest.StashKey[int]()

hypothesis.settings.register_profile("anabranch", deadline=None)  # a busy machine is no failure
hypothesis.settings.load_profile("anabranch")

gc.disable()  # until all modules are imported: there is much to search, and no garbage


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.hookimpl(trylast=True)  # of those that -k and -m have left
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Triton decides between interpreter and compiler when it is imported: one pytest call has the tests of one."""
    left_out = [item for item in items if (item.get_closest_marker("interpreter") is not None) != INTERPRETED]
    config.stash[LEFT_OUT] = len(left_out)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        chosen = set(items) - set(left_out)
        items[:] = [item for item in items if item in chosen]


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Not with -n, where workers collect the tests: `make test` runs both kinds."""
    if number := config.stash.get(LEFT_OUT, 0):
        how = "without" if INTERPRETED else "with"
        which = "do not run" if INTERPRETED else "run"
        terminalreporter.write_line(
            f"{number} deselected tests {which} in Triton's interpreter: repeat the command {how} TRITON_INTERPRET=1"
        )


def pytest_runtest_setup(item: pytest.Item) -> None:
    def marked(name: str) -> bool:
        return item.get_closest_marker(name) is not None

    if marked("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    if marked("slow") and not TEST_ALL and "slow" not in item.config.option.markexpr:
        pytest.skip("slow: runs in `make test-all`")
    if marked("compiler") and not has_compiler():
        missing_tool("needs a C++ compiler and Python's headers (Debian: g++ python3-dev)")
    if marked("chromium") and not has_chromium():
        missing_tool("needs Chromium (Debian: chromium)")


def has_compiler() -> bool:
    headers = Path(sysconfig.get_path("include"), "Python.h")
    return shutil.which(os.environ.get("CXX", "g++")) is not None and headers.exists()


def has_chromium() -> bool:
    return any(shutil.which(name) for name in ("chromium", "chromium-browser", "google-chrome"))


def missing_tool(reason: str) -> None:
    if TEST_ALL:
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)


@pytest.fixture(scope="session")
def thorough() -> bool:
    """Whether random walks go as far as they do in `make test-all`, not only as far as they must to get everywhere."""
    return TEST_ALL


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def log_as_before() -> Iterator[None]:
    """`serve` logs to the standard error that it finds, which is closed after the test: later ones would fail."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
