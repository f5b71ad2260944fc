"""`anabranch conformance`: a stranger's platform passes, a wrong one does not, and each promise can be seen broken."""

import json
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import anabranch
from anabranch import conformance, ops
from anabranch.cli.main import main
from anabranch.conformance import Result, contract, models, tiny
from anabranch.loader.load import load_model
from anabranch.models.family import known
from anabranch.ops.op import Kernel
from anabranch.platforms import Platform
from anabranch.platforms.fake import FakeGraph, FakePlatform, FakeSideStream, FakeStaging
from anabranch.platforms.platform import InlineFetch

PLUGIN = Path(__file__).parents[1] / "plugin"
SRC = Path(anabranch.__file__).parents[1]


def install(folder: Path) -> Path:
    """The plugin as pip leaves it in site-packages."""
    project = tomllib.loads((PLUGIN / "pyproject.toml").read_text())["project"]
    shutil.copytree(PLUGIN / "abacus", folder / "abacus", ignore=shutil.ignore_patterns("__pycache__"))
    info = folder / "abacus_for_anabranch-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    lines = [f"{name} = {value}" for name, value in project["entry-points"]["anabranch.platforms"].items()]
    (info / "entry_points.txt").write_text("\n".join(["[anabranch.platforms]", *lines, ""]))
    return folder


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ANABRANCH_")}
    environment |= {"PYTHONPATH": os.pathsep.join([str(SRC), str(folder)]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "anabranch.cli.main", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)


@pytest.mark.slow
def test_a_third_partys_platform_conforms(tmp_path: Path) -> None:
    folder = install(tmp_path)
    done = run(folder, "conformance", "--platform", "abacus")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "abacus: an abacus with 23 rods" in done.stdout and "abacus conforms" in done.stdout
    lines = [line.split() for line in done.stdout.splitlines()]
    assert ["ops", "rms_norm", "abacus,", "3", "samples", "ok"] in lines  # its own kernel, on what it accepts
    assert ["contract", "captured", "graphs", "ok"] in lines
    judged = {line[1] for line in lines if line[:1] == ["models"]}
    assert judged == set(known())
    doctor = run(folder, "doctor")
    assert "abacus" in doctor.stdout and "anabranch conformance --platform abacus" in doctor.stdout


def test_a_wrong_kernel_is_named_and_the_exit_code_says_so(tmp_path: Path) -> None:
    file = install(tmp_path) / "abacus" / "kernels.py"
    file.write_text(file.read_text().replace("* weight_D", "* weight_D.abs().sqrt()"))
    found = run(tmp_path, "conformance", "--platform", "abacus", "--only", "ops", "--json")
    assert found.returncode == 1
    wrong = [result for result in map(json.loads, found.stdout.splitlines()) if not result["passed"]]
    assert {(result["name"], result["what"].split(",")[0]) for result in wrong} >= {("rms_norm", "abacus")}
    assert "differs by" in wrong[0]["faults"][0]


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch has a GPU here")
@pytest.mark.parametrize("platform", ["hip", "npu"])
def test_a_platform_that_is_not_there_is_one_line(platform: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["conformance", "--platform", platform]) == 1
    out, error = capfd.readouterr()
    assert out == "" and platform in error and error.count("\n") == 1


def test_the_plugin_is_known_to_nobody_here() -> None:
    assert not [path for path in SRC.rglob("*.py") if "abacus" in path.read_text().lower()]


def test_every_family_has_a_tiny_model(tmp_path: Path) -> None:
    for model_type, family in known().items():
        assert set(family.tiny) <= set(family.model_types)
        tiny.write(model_type, tmp_path / model_type)
        assert load_model(tmp_path / model_type).config.model_type == model_type


# ---------------------------------------------------------------------------------------------------------------------
# Platforms that break one promise each
# ---------------------------------------------------------------------------------------------------------------------


class LateFetch(FakePlatform):
    def fetch(self, tensor: torch.Tensor) -> Any:
        class Late(InlineFetch):
            def __init__(self, tensor: torch.Tensor) -> None:
                self.tensor = tensor

        return Late(tensor)


class LostStaging(FakePlatform):
    def make_staging(self, num_bytes: int) -> FakeStaging:
        class Lost(FakeStaging):
            def put(self, source: torch.Tensor, places: Any) -> None:
                super().put(source, [(target, ()) for target, part in places if not part])

        return Lost(num_bytes)


class StaleStaging(FakePlatform):
    def make_staging(self, num_bytes: int) -> FakeStaging:
        class Stale(FakeStaging):
            def wait(self) -> None:
                return None

        return Stale(num_bytes)


class OneSideStream(FakePlatform):
    stream = FakeSideStream([])

    def make_side_stream(self) -> FakeSideStream:
        return self.stream


class SideForgets(FakePlatform):
    def make_side_stream(self) -> FakeSideStream:
        class Side(FakeSideStream):
            def join(self, *results: torch.Tensor) -> None:
                for result in results:
                    result.zero_()  # the main stream did not wait, and read what was there before

        return Side(self.log)


class Transposed(FakePlatform):
    def lay_out(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.flip(-1)


class NeverReplays(FakePlatform):
    def capture(self, function: Callable[[], object], pool: Any = None) -> FakeGraph:
        return FakeGraph(lambda: None, self.log)


class CannotCapture(FakePlatform):
    def capture(self, function: Callable[[], object], pool: Any = None) -> Any:
        return None


class CannotReset(FakePlatform):
    def capture(self, function: Callable[[], object], pool: Any = None) -> Any:
        class Graph:
            replay = staticmethod(function)

        return Graph()


class NotSoMuchMemory(FakePlatform):
    def memory(self) -> Any:
        return super().memory().__class__(free=2, total=1)


class OddPages(FakePlatform):
    page_size = 48


class SaysYes(FakePlatform):
    def has(self, capability: str) -> bool:
        return True


class ForgetsItsKernels(FakePlatform):
    providers = {"torch": "anabranch.kernels.torch", "lost": "anabranch_lost_kernels"}


BROKEN = {
    LateFetch: "fetch",
    LostStaging: "staging",
    StaleStaging: "staging",
    OneSideStream: "side stream",
    SideForgets: "side stream",
    Transposed: "weight layout",
    NeverReplays: "captured graphs",
    CannotCapture: "captured graphs",
    CannotReset: "captured graphs",
    NotSoMuchMemory: "memory",
    OddPages: "values",
    SaysYes: "values",
    ForgetsItsKernels: "providers",
}


def failed(results: list[Result]) -> set[str]:
    return {result.name for result in results if not result.passed}


def test_the_fake_platform_keeps_the_contract() -> None:
    results = list(contract.check_contract(FakePlatform()))
    assert failed(results) == set() and not [result for result in results if result.absent]


@pytest.mark.parametrize("platform", BROKEN, ids=lambda platform: platform.__name__)
def test_a_broken_promise_is_seen(platform: type[Platform]) -> None:
    found = failed(list(contract.check_contract(platform())))
    assert BROKEN[platform] in found
    assert found <= {BROKEN[platform], "a fork in a graph"}


def test_what_a_platform_raises_is_a_fault_and_not_the_end() -> None:
    class Raises(FakePlatform):
        def fetch(self, tensor: torch.Tensor) -> Any:
            raise RuntimeError("no wire to the host")

    results = list(contract.check_contract(Raises()))
    assert failed(results) == {"fetch"}
    assert "RuntimeError: no wire to the host" in next(r for r in results if r.name == "fetch").faults[0]


def test_a_model_that_is_slightly_off_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny.write("qwen3_moe", tmp_path)
    platform = FakePlatform()
    expected = models.logits(tmp_path, platform, "float32", reference=True)
    assert models.far(expected, tmp_path, platform, "float32") == []
    right = ops.experts.kernels["torch"].function
    wrong = Kernel("torch", lambda *args, **kwargs: right(*args, **kwargs) * 1.01, None, None, None)
    monkeypatch.setitem(ops.experts.kernels, "torch", wrong)
    assert "differ by more than" in models.far(expected, tmp_path, platform, "float32")[0]


def test_sections_can_be_asked_for_alone() -> None:
    results = list(conformance.conformance(FakePlatform(), ["contract"]))
    assert {result.section for result in results} == {"contract"}
