"""Which platform is chosen, what it must implement, and that a stranger's package can bring one."""

import inspect
import json
import os
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest
import torch

from anabranch import conformance, platforms
from anabranch.config import EngineConfig, resolve
from anabranch.conformance import models, tiny
from anabranch.loader.load import load_model
from anabranch.models.config import read_config
from anabranch.platforms import cpu
from anabranch.platforms.cpu import CpuPlatform
from anabranch.platforms.cuda import CudaPlatform
from anabranch.platforms.fake import FakePlatform

SRC = Path(__file__).parents[2] / "src"
detect = platforms.current.__wrapped__  # what `current` does the first time


@pytest.fixture(autouse=True)
def not_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ANABRANCH_PLATFORM", raising=False)


def test_the_first_available_platform_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CudaPlatform, "available", classmethod(lambda cls: False))
    assert isinstance(detect(), CpuPlatform)
    monkeypatch.setattr(CudaPlatform, "available", classmethod(lambda cls: True))
    assert isinstance(detect(), CudaPlatform)


def test_the_fake_platform_is_never_detected_but_can_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not FakePlatform.available()
    monkeypatch.setenv("ANABRANCH_PLATFORM", "fake")
    assert isinstance(detect(), FakePlatform)


def test_a_typo_names_the_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANABRANCH_PLATFORM", "cdua")
    with pytest.raises(ValueError, match=r"unknown platform 'cdua' \(known: .*cpu.*\); did you mean 'cuda'\?"):
        detect()
    monkeypatch.setenv("ANABRANCH_PLATFORM", "abacus")
    with pytest.raises(ValueError, match=r"unknown platform 'abacus' \(known: .*cpu.*\)$"):
        detect()


@pytest.mark.parametrize("name", platforms.BUILT_IN)
def test_a_platform_says_who_it_is(name: str) -> None:
    platform = platforms.load(name)
    assert platform.name == name
    assert "torch" in platform.providers
    assert 0 < platform.memory_fraction < 1
    assert platform.page_size & (platform.page_size - 1) == 0
    assert not inspect.isabstract(platform)


def test_the_cpu() -> None:
    platform = CpuPlatform()
    memory = platform.memory()
    assert 0 < memory.free <= memory.total
    assert "CPU" in platform.describe()
    assert platform.device == torch.device("cpu")
    assert platform.capture(lambda: None) is None
    order: list[str] = []
    fork = platform.make_side_stream().fork()
    with fork.side():
        order.append("side")
    fork.join()
    assert order == ["side"]


@pytest.mark.parametrize("name", ["cpu", "fake", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_fetch_brings_what_the_tensor_held_when_it_was_asked_for(name: str) -> None:
    platform = platforms.make(name)
    tensor = torch.arange(1000, device=platform.device)
    fetch = platform.fetch(tensor)
    tensor.zero_()
    found = fetch.wait()
    assert found.device == torch.device("cpu")
    assert torch.equal(found, torch.arange(1000))


@pytest.mark.parametrize("flag", ["avx512_bf16", "amx_bf16", "bf16"])
def test_a_cpu_with_bf16_instructions_keeps_bf16(flag: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "cpu_flags", lambda: frozenset({"avx2", flag}))
    assert CpuPlatform().compute_dtype(torch.bfloat16) == torch.bfloat16
    assert CpuPlatform().compute_dtype(torch.float16) == torch.float32


def test_a_cpu_without_them_computes_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "cpu_flags", lambda: frozenset({"avx2", "avx512f"}))
    for wanted in (torch.bfloat16, torch.float16, torch.float32):
        assert CpuPlatform().compute_dtype(wanted) == torch.float32
    assert "computes in fp32" in CpuPlatform().describe()


def test_the_fake_platform_implements_the_whole_contract_itself() -> None:
    """Nothing but plain values is inherited: what a contract method does by default is not what the fake shows."""
    contract = {
        name
        for name, member in vars(platforms.Platform).items()
        if not name.startswith("_") and not isinstance(member, str | int | float)
    }
    assert {"capture", "make_side_stream", "compute_dtype"} <= contract
    assert not contract - set(vars(FakePlatform))


def test_the_fake_platform_writes_down_what_was_asked_of_it() -> None:
    platform = FakePlatform(memory=1000)
    runs: list[int] = []
    pool = platform.make_graph_pool()
    fork = platform.make_side_stream().fork(torch.zeros(1))
    with fork.side():
        platform.log.append("side work")
    fork.join(torch.zeros(1))
    graph = platform.capture(lambda: runs.append(1), pool)
    graph.replay()
    platform.synchronize()
    expected = ["pool", "fork", "side begins", "side work", "side ends", "join", "capture", "replay", "synchronize"]
    assert platform.log == expected
    assert runs == [1, 1]
    assert platform.memory() == platforms.Memory(free=1000, total=1000)


def test_weights_are_laid_out_but_for_embeddings_and_routers(tmp_path: Path) -> None:
    tiny.write("qwen2_moe", tmp_path)
    platform = FakePlatform()
    model = load_model(tmp_path, platform=platform)
    found = sorted(line for line in platform.log if line.startswith("lay out"))
    layer = [[256, 128], [128, 128], [6, 64, 128], [6, 128, 32], [96, 128], [128, 48], [1, 128]]
    expected = [*layer, *layer, [tiny.VOCAB_SIZE, 128]]  # qkv, output, experts, shared expert and its gate; the head
    assert found == sorted(f"lay out {shape}" for shape in expected)
    assert model.layers[0].mlp.router.weight.shape == (6, 128)


class PiecesPlatform(FakePlatform):
    graph_mode = "pieces"


def test_a_platform_may_capture_all_steps_in_pieces(tmp_path: Path) -> None:
    tiny.write("qwen2_moe", tmp_path)
    platform = PiecesPlatform()
    config = resolve(EngineConfig(model=""), read_config(tmp_path), platform)
    assert (config.graph_mode, config.prefill_graph) == ("none", "breakable")
    with pytest.raises(ValueError, match="graph_mode full: platform 'fake' captures between attentions only; use auto"):
        resolve(EngineConfig(model="", graph_mode="full"), read_config(tmp_path), platform)
    assert models.other_answers(tmp_path, platform) == []
    assert platform.log.count("replay") > 50  # three pieces a step


@pytest.mark.gpu
def test_this_machines_accelerator_conforms() -> None:
    results = list(conformance.conformance(platforms.current()))
    assert {result.section for result in results} == set(conformance.SECTIONS)
    assert not [result for result in results if not result.passed]


ACME_PLATFORM = """
    from anabranch.platforms.cpu import CpuPlatform

    class AcmePlatform(CpuPlatform):
        name = "acme"
        providers = {"acme": "acme_kernels", **CpuPlatform.providers}
    """
ACME_KERNELS = """
    from anabranch import ops

    calls = []

    @ops.rms_norm.kernel("acme", on=("acme",))
    def rms_norm(x, weight_D, eps):
        calls.append("rms_norm")
        return ops.rms_norm.reference(x, weight_D, eps)
    """
SHOW = """
    import json, sys
    import torch
    from anabranch import kernels, ops, platforms

    def bound(platform):
        kernels.bind(platform)
        return {name: [kernel.provider for kernel in ops.OPS[name].bound] for name in ("rms_norm", "experts")}

    on_cpu = bound(platforms.make("cpu"))
    current = platforms.current()
    on_current = bound(current)
    ops.rms_norm(torch.ones(1, 4), None, 1e-6)
    calls = sys.modules["acme_kernels"].calls
    print(json.dumps([platforms.names()[0], current.name, on_cpu, on_current, calls]))
    """


@pytest.fixture
def acme(tmp_path: Path) -> Path:
    """A third party's package as it lies in site-packages."""
    (tmp_path / "acme_platform.py").write_text(dedent(ACME_PLATFORM))
    (tmp_path / "acme_kernels.py").write_text(dedent(ACME_KERNELS))
    info = tmp_path / "acme_anabranch-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-anabranch\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[anabranch.platforms]\nacme = acme_platform:AcmePlatform\n")
    return tmp_path


def test_a_third_party_brings_a_platform_and_a_kernel(acme: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ANABRANCH_")}
    environment["PYTHONPATH"] = os.pathsep.join([str(SRC), str(acme)])
    done = subprocess.run([sys.executable, "-c", dedent(SHOW)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    first, current, on_cpu, on_current, calls = json.loads(done.stdout)
    assert (first, current) == ("acme", "acme")
    assert on_cpu == {"rms_norm": ["torch"], "experts": ["torch"]}
    assert on_current == {"rms_norm": ["acme"], "experts": ["torch"]}
    assert calls == ["rms_norm"]


def test_an_entry_point_that_is_no_platform_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Point:
        def load(self) -> object:
            return dict

    monkeypatch.setattr(platforms, "_third_party", lambda: {"odd": Point()})
    with pytest.raises(ValueError, match=r"platform 'odd': .* is not a subclass of anabranch.platforms.Platform"):
        platforms.make("odd")
