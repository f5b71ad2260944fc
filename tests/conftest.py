"""What holds for every test: its seed, no network, and what a marker needs.

With ANABRANCH_TEST_ALL=1 (`make test-all`) slow tests run, and a missing tool fails a test instead of skipping it.
"""

import os
import shutil
import sysconfig
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before anything imports huggingface_hub

import hypothesis
import pytest
import torch

TEST_ALL = os.environ.get("ANABRANCH_TEST_ALL") == "1"

hypothesis.settings.register_profile("anabranch", deadline=None)  # a busy machine is no failure
hypothesis.settings.load_profile("anabranch")


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


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)
