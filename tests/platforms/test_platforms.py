"""Which platform is chosen, what it must implement, and that a stranger's package can bring one."""

import inspect
import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import torch

from anabranch import conformance, kernels, platforms
from anabranch.config import AUTO, AUTO_NUMBERS, EngineConfig
from anabranch.conformance import contract, models, tiny
from anabranch.engine.engine import make_engine
from anabranch.loader.load import load_model
from anabranch.loader.resolve import resolve
from anabranch.models.config import read_config
from anabranch.platforms import Memory, cpu
from anabranch.platforms.cpu import CpuPlatform
from anabranch.platforms.cuda import CudaPlatform
from anabranch.platforms.fake import FakePlatform
from anabranch.request import Request
from anabranch.sampling_params import SamplingParams

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


@pytest.mark.parametrize("flags", ["avx2", "avx2 avx512_bf16 amx_bf16", "bf16"])
def test_a_cpu_computes_in_fp32(flags: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "cpu_flags", lambda: frozenset(flags.split()))
    for wanted in (torch.bfloat16, torch.float16, torch.float32):
        assert CpuPlatform().compute_dtype(wanted) == torch.float32
    assert CpuPlatform().compute_dtype(torch.float64) == torch.float64
    assert "computes in fp32" in CpuPlatform().describe()


@pytest.mark.parametrize("given", [{}, {"OMP_WAIT_POLICY": "active"}, {"GOMP_SPINCOUNT": "7"}], ids=str)
def test_threads_of_torch_leave_their_cores_soon(given: dict[str, str]) -> None:
    """Unless the user says how they wait."""
    environment = {key: value for key, value in os.environ.items() if key not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
    script = "import os, anabranch; print(os.environ.get('GOMP_SPINCOUNT'))"
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment | given, capture_output=True, text=True, check=True
    )
    expected = given.get("GOMP_SPINCOUNT", "1000" if not given else "None")
    assert done.stdout.strip() == expected


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
    assert config.graphs == "pieces"
    for graphs in ("full", "decode"):
        message = (
            f"graphs {graphs}: platform 'fake' captures only what is between attentions; use auto, pieces or compiled"
        )
        with pytest.raises(ValueError, match=message):
            resolve(EngineConfig(model="", graphs=graphs), read_config(tmp_path), platform)
    assert models.other_answers(tmp_path, platform) == []
    assert platform.log.count("replay") > 50  # three pieces a step


def test_a_step_has_as_many_tokens_as_suit_the_machine(tmp_path: Path) -> None:
    tiny.write("qwen2_moe", tmp_path)
    model = read_config(tmp_path)

    class Gpu(CudaPlatform):
        has = FakePlatform.has
        total = 0

        def memory(self) -> Memory:
            return Memory(free=self.total, total=self.total)

    gpu = Gpu()
    for gpu.total, tokens in ((24 << 30, 8192), (80 << 30, 16384)):
        assert resolve(EngineConfig(model=""), model, gpu).max_num_batched_tokens == tokens
        assert resolve(EngineConfig(model="", max_num_batched_tokens=77), model, gpu).max_num_batched_tokens == 77
        assert resolve(EngineConfig(model="", serving=True), model, gpu).max_num_batched_tokens == 8192
    assert resolve(EngineConfig(model=""), model, CpuPlatform()).max_num_batched_tokens == 8192


def test_a_resolved_config_holds_no_auto(tmp_path: Path) -> None:
    """But for the number of pages, which depends on the memory that the weights leave."""
    tiny.write("qwen2_moe", tmp_path)
    asked = EngineConfig(model=str(tmp_path))
    for platform, graphs, shared_expert in (
        (FakePlatform(), "full", "stream"),
        (PiecesPlatform(), "pieces", "stream"),
        (CpuPlatform(), "none", "inline"),
    ):
        config = resolve(asked, read_config(tmp_path), platform)
        assert (config.graphs, config.shared_expert, config.moe_combine) == (graphs, shared_expert, "fastest")
        left = {field.name for field in fields(config) if getattr(config, field.name) == "auto"}
        left |= {name for name in (*AUTO_NUMBERS, "memory_fraction") if getattr(config, name) == AUTO}
        assert left == {"num_pages"}
        assert resolve(config, read_config(tmp_path), platform) == config


def test_the_cpu_keeps_the_contract() -> None:
    assert not [result for result in contract.check_contract(CpuPlatform()) if not result.passed]


@pytest.mark.gpu
def test_this_machines_accelerator_conforms() -> None:
    results = list(conformance.conformance(platforms.current()))
    assert {result.section for result in results} == set(conformance.SECTIONS)
    assert not [result for result in results if not result.passed]


def test_a_third_partys_platform_is_detected_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """That one brings kernels and conforms, tests/cli/test_conformance shows with a whole package."""

    class Acme(CpuPlatform):
        name = "acme"

    class Point:
        def load(self) -> object:
            return Acme

    monkeypatch.setattr(platforms, "_third_party", lambda: {"acme": Point()})
    assert platforms.names()[0] == "acme" and type(detect()) is Acme
    monkeypatch.setenv("ANABRANCH_PLATFORM", "cpu")
    assert type(detect()) is CpuPlatform


def test_an_entry_point_that_is_no_platform_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Point:
        def load(self) -> object:
            return dict

    monkeypatch.setattr(platforms, "_third_party", lambda: {"odd": Point()})
    with pytest.raises(ValueError, match=r"platform 'odd': .* is not a subclass of anabranch.platforms.Platform"):
        platforms.make("odd")


def test_a_platform_whose_kernels_cannot_be_imported_runs_on_references(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It names Triton's, and Triton is not installed: a warning, and the start goes on."""

    class WithoutTriton(FakePlatform):
        name = "without-triton"
        providers = {"triton": "anabranch.kernels.triton", "torch": "anabranch.kernels.torch"}

    for name in [name for name in sys.modules if name.startswith("anabranch.kernels.triton")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr(kernels, "triton", raising=False)
    monkeypatch.setitem(sys.modules, "triton", None)
    platform = WithoutTriton()
    monkeypatch.setattr(platforms, "current", lambda: platform)
    tiny.write("qwen2_moe", tmp_path)
    engine = make_engine(EngineConfig(model=str(tmp_path), num_pages=64, max_num_seqs=4, max_model_len=64))
    assert "kernels of provider 'triton' are not used" in caplog.text
    engine.add(Request(id="x", prompt_ids=(1, 2, 3), params=SamplingParams(temperature=0, max_tokens=4)))
    updates = []
    while engine.has_work:
        updates += engine.step()
    assert updates[-1].finish_reason == "length"
    engine.close()
