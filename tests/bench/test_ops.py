"""`anabranch bench ops`: every op runs and is judged, bytes and arithmetic are counted rightly, by a told clock."""

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from anabranch import kernels, ops, platforms
from anabranch.bench import op_cases
from anabranch.bench import ops as bench
from anabranch.bench.op_cases import CASES, Case, Setting, shape
from anabranch.bench.records import TARGETS
from anabranch.kernels.c.library import problem
from anabranch.kernels.tuning import timing
from anabranch.ops.experts import COMBINES
from anabranch.ops.op import Kernel
from anabranch.platforms.fake import FakePlatform


@pytest.fixture(autouse=True)
def cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[platforms.Platform]:
    """Timings are shortened, not left out."""
    monkeypatch.delenv("ANABRANCH_KERNELS", raising=False)
    platform = platforms.make("cpu")
    monkeypatch.setattr(platforms, "current", lambda: platform)
    before = {name: (op.bound, op.forced) for name, op in ops.OPS.items()}
    kernels.bind(platform)
    yield platform
    for name, (bound, forced) in before.items():
        ops.OPS[name].bound, ops.OPS[name].forced = bound, forced


FIRST = "torch" if problem else "c"
"""Of the providers on a CPU."""
TINY = shape("tiny")


def run(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    bench.add_options(parser)
    return bench.run(parser.parse_args([*arguments, "--repeats", "1"]))


def setting(*tokens: int, **options: Any) -> Setting:
    return Setting(platforms.make("cpu"), (TINY,), torch.float32, tokens, **options)


def test_every_op_is_timed_and_judged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "results" / "ops.json"
    assert run("--tokens", "1", "5", "--json", str(file)) == 0
    found = json.loads(file.read_text())
    assert {"commit", "command", "machine", "torch", "dtype", "routing"} <= set(found)
    assert {row["op"] for row in found["rows"]} == set(CASES)
    printed = capsys.readouterr().out
    for row in found["rows"]:
        assert row["us"] > 0 and row["right"] and row["size"] in (1, 5), row
        assert row["gb_s"] >= 0 and row["how"] == "called"
        assert row["label"] in printed
    judged = {row["op"] for row in found["rows"] if row["error"] is not None}
    assert judged == set(CASES), "something of every op is compared with its reference"
    assert {row["kernel"] for row in found["rows"] if row["op"] == "experts"} == {FIRST}


def test_short_names_and_mistakes() -> None:
    for arguments, message in (
        (["sorting"], "no benchmark of 'sorting'"),
        (["route", "--models", "gpt"], "'gpt' is none of qwen3-30b-a3b"),
    ):
        with pytest.raises(ValueError, match=message):
            run(*arguments)
    with pytest.raises(SystemExit):
        run("route", "--tokens", "0")
    assert set(bench.SHORT.values()) <= set(CASES)
    assert run("activation", "--tokens", "3") == 0


def test_all_ways_to_combine_and_skewed_routing(tmp_path: Path) -> None:
    file = tmp_path / "experts.json"
    assert run("experts", "--combine", "all", "--zipf", "--tokens", "6", "--json", str(file)) == 0
    found = json.loads(file.read_text())
    assert [row["label"] for row in found["rows"]] == [f"zipf, {combine}" for combine in COMBINES]
    assert found["routing"] == "zipf"


def test_zipf_routing_is_skewed() -> None:
    def busiest(zipf: bool) -> float:
        torch.manual_seed(0)
        logits_TE = op_cases.draw_logits(setting(zipf=zipf), 64, 4000)
        return logits_TE.argmax(-1).bincount(minlength=64).max().item() / 4000

    # 1 / (1 + 1/2 + ... + 1/64) = 0.21 of all tokens go to the most popular expert.
    assert busiest(True) == pytest.approx(0.21, abs=0.03) and busiest(False) < 0.04


def test_a_wrong_kernel_is_seen(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    right = ops.gated_activation.reference
    assert run("activation", "--tokens", "4") == 0
    wrong = Kernel(FIRST, lambda x_T2I, kind: right(x_T2I, kind) * 1.1, None, None, None)
    monkeypatch.setitem(ops.gated_activation.kernels, FIRST, wrong)
    assert run("activation", "--tokens", "4") == 1
    assert "WRONG" in capsys.readouterr().out
    assert run("activation", "--tokens", "4", "--no-check") == 0


def test_distance() -> None:
    one = torch.tensor([3.0, 4.0])
    assert bench.distance(one, one) == 0
    assert bench.distance(one + torch.tensor([0.0, 0.5]), one) == pytest.approx(0.1)
    assert math.isnan(bench.distance(one * math.nan, one))
    assert bench.distance(torch.tensor([1, 2, 3, 4]), torch.tensor([1, 2, 4, 4])) == 0.25
    assert bench.distance((one, torch.tensor([1])), (one, torch.tensor([2]))) == 1.0
    assert bench.distance(torch.tensor([1.0, 2.0, 99.0]), torch.tensor([1.0, 2.0])) == 0, "the first rows are judged"


# ---------------------------------------------------------------------------------------------------------------------
# Bytes, arithmetic, floors
# ---------------------------------------------------------------------------------------------------------------------


def case_of(op: str, size: int, label: str = "") -> Case:
    return next(case for case in CASES[op](setting(size), TINY) if case.size == size and label in case.label)


def test_bytes_and_arithmetic_are_those_of_the_shapes() -> None:
    D, V, E = TINY.config.hidden_size, TINY.config.vocab_size, TINY.moe.num_experts
    inner, k = TINY.moe.width, TINY.moe.top_k
    assert case_of("add_rms_norm", 5).num_bytes == 4 * 4 * 5 * D
    assert case_of("sum_add_rms_norm", 5).num_bytes == 4 * 5 * ((k + 3) * D + k)
    assert case_of("gated_activation", 5).num_bytes == 4 * 3 * 5 * inner
    assert case_of("add_gated", 5).num_bytes == 4 * 5 * (3 * D + 1)
    head = case_of("linear", 5, "lm_head")
    assert head.num_bytes == 4 * (V * D + 5 * (D + V)) and head.flops == 2 * 5 * D * V
    assert case_of("sample", 5).num_bytes == 4 * 5 * V
    assert case_of("route", 5).num_bytes == 5 * (4 * E + 8 * k)
    torch.manual_seed(0)
    experts = case_of("experts", 1)
    assert experts.num_bytes == 4 * (k * 3 * D * inner + 2 * D), "one token visits k experts"
    assert experts.flops == 2 * k * 3 * D * inner


def test_attention_counts_what_is_visible() -> None:
    (heads,) = TINY.heads

    def count(queries: int, context: int, window: int = 0) -> int:
        first = context - queries
        return sum(min(i + 1, window) if window else i + 1 for i in range(first, context))

    for queries, context, window in ((1, 40, 0), (1, 40, 8), (12, 12, 0), (12, 12, 5), (12, 12, 100)):
        case = op_cases.attention_case(setting(), replace(heads, window=window), 3, queries, context)
        assert case.flops == 4 * 3 * count(queries, context, window) * 4 * 16
        keys = min(context, window) if window and queries == 1 else context
        assert case.num_bytes == 4 * 16 * 3 * (2 * keys * 2 + 2 * queries * 4)


def test_the_floor_is_the_larger_of_bytes_and_arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "CEILINGS", {"CPU": (1e9, 1e12)})
    monkeypatch.setattr(bench, "timed", lambda calls, setting, repeats: (50.0, "graph"))
    options = argparse.Namespace(no_check=True, repeats=1)
    half = replace(setting(), dtype=torch.bfloat16)
    given = [(torch.zeros(1, 2), "silu")]
    for num_bytes, flops, floor in ((10_000, 1e6, 10.0), (10_000, 2e7, 20.0)):
        row = bench.measure("gated_activation", "m", Case(1, "", given, num_bytes, flops), half, options)
        assert row["floor_us"] == floor and row["gb_s"] == 0.2 and row["tflop_s"] == flops / 50e6
        assert f"{100 * floor / 50:.0f}" in bench.shown(row)
    # Without matrix units for fp32 nothing is known about its arithmetic.
    assert bench.ceilings(setting()) == (1e9, math.inf)


def test_models_have_the_targets_of_every_listed_size() -> None:
    measured = [name for name in TARGETS if shape(name).experts_us]
    assert len(measured) == 3
    for name in measured:
        target, vllm = shape(name).experts_us["target"], shape(name).experts_us["vllm"]
        assert target.keys() == vllm.keys() and len(target) == 13
        assert all(target[n] < vllm[n] for n in target)


# ---------------------------------------------------------------------------------------------------------------------
# Timing
# ---------------------------------------------------------------------------------------------------------------------


class Watch:
    """A clock that only moves when somebody works."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.calls = 0
        monkeypatch.setattr(timing.time, "perf_counter", lambda: self.now)

    def work(self, seconds: float) -> Callable[[], None]:
        def call() -> None:
            self.now += seconds
            self.calls += 1

        return call


def test_microseconds_of_calls_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    watch, platform = Watch(monkeypatch), FakePlatform()
    calls = [watch.work(10e-6), watch.work(30e-6)]
    assert timing.microseconds(platform, calls, repeats=3) == pytest.approx(20.0)
    assert platform.log.count("capture") == 1
    # 3 ms of replays between two looks at the clock, so that the host's share does not count.
    replays = platform.log.count("replay")
    assert replays == pytest.approx(1 + 3 * (0.003 / 40e-6), abs=3)
    platform.log.clear()
    assert timing.microseconds(platform, calls, repeats=3, graph=False) == pytest.approx(20.0)
    assert "capture" not in platform.log and "replay" not in platform.log
    slow = [watch.work(1.0)]
    watch.calls = 0
    assert timing.microseconds(platform, slow, repeats=2, graph=False) == pytest.approx(1e6)
    assert watch.calls == 1 + 1 + 2, "what is slow is not repeated more than asked for"


def test_what_cannot_be_captured_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    platform = FakePlatform()

    def refuse(function: Any, pool: Any = None) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    assert bench.timed([lambda: None], replace(setting(), platform=platform), 1)[1] == "graph"
    monkeypatch.setattr(platform, "capture", refuse)
    assert bench.timed([lambda: None], replace(setting(), platform=platform), 1)[1] == "called"


# ---------------------------------------------------------------------------------------------------------------------
# Plot, torch.compile
# ---------------------------------------------------------------------------------------------------------------------


def test_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "ops.svg"
    assert run("route", "norm", "--tokens", "1", "4", "--plot", str(file)) == 0
    text = file.read_text()
    assert "route" in text and "add_rms_norm" in text


def test_a_plot_without_matplotlib_is_refused_before_anything_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(bench, "measure", lambda *_: pytest.fail("measured first"))
    with pytest.raises(ValueError, match="pip install 'anabranch"):
        run("route", "--plot", str(tmp_path / "x.png"))


def test_ratios_to_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def compile(function: Any, mode: str) -> Any:
        if mode == "max-autotune":
            raise RuntimeError("no compiler")
        return lambda *given, **named: function(*given, **named)

    def microseconds(platform: Any, calls: list[Any], graph: bool = True, **how: Any) -> float:
        return {ops.route: 10.0, ops.route.reference: 20.0}.get(calls[0].func, 50.0) - 5.0 * graph

    monkeypatch.setattr(torch, "compile", compile)
    monkeypatch.setattr(bench, "microseconds", microseconds)
    file = tmp_path / "route.json"
    assert run("route", "--tokens", "4", "--compile", "--json", str(file)) == 0
    row = json.loads(file.read_text())["rows"][0]
    others = {"default": {"called": 5.0, "graph": 4.5}, "reduce-overhead": {"called": 5.0}}
    assert row["ratios"] == {"eager": {"called": 2.0, "graph": 1.5}, **others}
    assert "torch.compile max-autotune: RuntimeError: no compiler" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.compiler
def test_against_torch_compile(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One mode of three: compiling takes its time."""
    monkeypatch.setattr(bench, "MODES", ("default",))
    file = tmp_path / "route.json"
    assert run("route", "--tokens", "4", "--compile", "--json", str(file)) == 0
    found = json.loads(file.read_text())["rows"][0]["others_us"]["default"]
    assert set(found) == {"called", "graph"} and all(us > 0 for us in found.values())


@pytest.mark.gpu
@pytest.mark.parametrize("op", CASES)
def test_on_a_gpu(op: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The smallest model's shapes, replayed as graphs."""
    platform = platforms.make("cuda")
    monkeypatch.setattr(platforms, "current", lambda: platform)
    kernels.bind(platform)
    file = tmp_path / "x.json"
    assert run(op, "--models", "tiny", "--tokens", "1", "40", "--json", str(file)) == 0
    rows = json.loads(file.read_text())["rows"]
    assert rows and all(row["how"] == "graph" for row in rows)
