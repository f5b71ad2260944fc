"""What the engine does with Triton versions other than the installed one."""

import logging
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")

from triton.runtime.jit import JITFunction  # noqa: E402

from anabranch import kernels, ops  # noqa: E402
from anabranch.kernels.compiling import versions  # noqa: E402
from anabranch.kernels.triton import launch  # noqa: E402
from tests.conftest import missing_tool  # noqa: E402

ROOT = Path(__file__).parents[3]
TRITONS = ROOT / ".cache" / "triton"
"""One folder for each other version, which `make test-all` installs."""
OTHERS = ("3.6.0", "3.9.0")
PLATFORM: Any = SimpleNamespace(name="paper", providers={"triton": "anabranch.kernels.triton"})


@pytest.fixture
def bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """An op has a kernel in Triton, as on a GPU."""
    monkeypatch.setattr(ops.OPS["route"], "bound", (SimpleNamespace(provider="triton", accepts=None),))


def changed(self: Any, key: str, source: Any) -> None:
    """What JITFunction._do_compile might become."""


def test_an_unknown_triton_compiles_at_first_launch(
    bound: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(JITFunction, "_do_compile", changed)
    with caplog.at_level(logging.WARNING):
        kernels.compile_ahead(PLATFORM, lambda: pytest.fail("no dry run is needed"))
    assert "compiled at its first launch" in caplog.text and triton.__version__ in caplog.text


def test_a_triton_without_the_parts_that_precompilation_imports(bound: None, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name == "anabranch.kernels.compiling.precompile"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr("anabranch.kernels.compiling.precompile", raising=False)
    monkeypatch.setitem(sys.modules, "triton.runtime.cache", None)
    assert "differs from the versions" in str(kernels.precompile_problem())
    kernels.compile_ahead(PLATFORM, lambda: pytest.fail("no dry run is needed"))


@pytest.mark.parametrize(
    ("version", "known"), [("3.6.0", True), ("3.7.1", True), ("3.9.0+git1", True), ("3.10.0", False), ("4.0", False)]
)
def test_gluon_runs_on_known_versions_only(monkeypatch: pytest.MonkeyPatch, version: str, known: bool) -> None:
    monkeypatch.setattr("triton.__version__", version)
    monkeypatch.setattr(launch, "is_hopper", lambda device: True)
    assert (versions.gluon_problem() is None) == known
    found = launch.gluon_kernels.__wrapped__("linear_hopper", torch.device("cuda", 0))
    assert (found is not None) == known


def test_doctor_reports_both(bound: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [line.rstrip().rpartition(" ")[2] for line in kernels.compiler_facts()] == ["yes", "yes"]
    monkeypatch.setattr("triton.__version__", "3.10.0")
    monkeypatch.setattr(JITFunction, "_do_compile", changed)
    gluon, ahead = kernels.compiler_facts()
    assert "portable ones instead" in gluon and "3.10.0" in gluon and "at first launch" in ahead


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="Triton's wheels are for Linux")
@pytest.mark.parametrize("version", [*OTHERS, "installed"])
def test_every_kernel_compiles_for_hopper(version: str, tmp_path: Path) -> None:
    """In a process of its own, with nothing in Triton's cache; two specialisations of each kernel."""
    path = [str(ROOT / "src"), str(ROOT)]
    if version != "installed":
        if not (TRITONS / version / "triton").is_dir():
            missing_tool(f"needs Triton {version} in {TRITONS / version}: make tritons")
        path.insert(0, str(TRITONS / version))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path), "TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-m", "tests.kernels.triton.compile_dry_run", "2"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"triton {version if version != 'installed' else triton.__version__}: Gluon; ahead of time" in done.stdout
    assert ", 0 failed" in done.stdout
