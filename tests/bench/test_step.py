"""`anabranch bench step`: on this machine as it is, and what a GPU's profile becomes."""

import argparse
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from anabranch.bench import step
from anabranch.bench.records import CONFIGS
from anabranch.bench.step import step_bytes, visited
from anabranch.engine.plan import count_active, count_weights, quantized
from anabranch.models.config import read_config
from tools import tiny_model

QWEN3 = read_config(CONFIGS / "qwen3-30b-a3b")


def parse(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    step.add_options(parser)
    return parser.parse_args(arguments)


def test_the_host_when_there_is_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ANABRANCH_KERNELS", "torch")  # the profiler does not see kernels in C
    tiny_model.write(tmp_path / "tiny")
    file = tmp_path / "step.json"
    arguments = ("--batch", "3", "--context", "20", "--steps", "3", "--bandwidth", "0.02", "--json", str(file))
    assert step.run(parse(str(tmp_path / "tiny"), *arguments)) == 0
    found, shown = json.loads(file.read_text()), capsys.readouterr().out
    assert found["model"] == "tiny" and found["batch"] == 3 and found["step_us"] > 0
    kernels = {row["name"]: row for row in found["kernels"]}
    if not found["on_device"]:
        assert kernels["aten::mm"]["count"] >= 4 and kernels["aten::mm"]["group"] == "dense"
    for rows in (found["groups"], found["kernels"]):
        assert sum(row["us"] for row in rows) == pytest.approx(sum(row["us"] for row in found["kernels"]))
        assert [row["us"] for row in rows] == sorted((row["us"] for row in rows), reverse=True)
    assert {row["group"] for row in found["kernels"]} <= {row["group"] for row in found["groups"]}
    begins = [begin for _, begin, _ in found["timeline"]]
    assert begins[0] == 0 and begins == sorted(begins)
    read = sum(row["bytes"] or 0 for row in found["groups"])
    assert found["floor_us"] == pytest.approx(1e6 * read / 0.02e12)
    assert "tiny, batch 3, context 20" in shown and "gaps" in shown and "× floor" in shown and "more:" in shown


def test_steps_of_prompts(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANABRANCH_KERNELS", "torch")  # the profiler does not see kernels in C
    tiny_model.write(tmp_path / "tiny")
    file = tmp_path / "step.json"
    arguments = ("--prompts", "--batch", "2", "--context", "20", "--steps", "2", "--json", str(file))
    assert step.run(parse(str(tmp_path / "tiny"), *arguments)) == 0
    found, shown = json.loads(file.read_text()), capsys.readouterr().out
    assert found["prompts"] and found["step_us"] > 0 and found["floor_us"] is None
    assert "tiny, prompts 2, context 20" in shown
    kernels = {row["name"]: row for row in found["kernels"]}
    assert found["on_device"] or kernels["aten::mm"]["count"] >= 4


def event(name: str, start: float, end: float, device: str = "CUDA") -> Any:
    return SimpleNamespace(
        name=name,
        device_type=f"DeviceType.{device}",
        time_range=SimpleNamespace(start=start, end=end),
        self_cpu_time_total=end - start,
    )


def events_of_a_gpu() -> list[Any]:
    """Two steps; in the second a kernel on a side stream overlaps, and the end of one is late."""
    return [
        event(step.RANGE, 100, 200, "CPU"),
        event("aten::mm", 101, 103, "CPU"),
        event(step.RANGE, 110, 190),  # the same range as the device shows it
        event("nvjet_tst_64x8", 110, 130),
        event("gate_up_small", 132, 152),
        event("void elementwise_kernel<float>", 152, 153),
        event(step.RANGE, 300, 500, "CPU"),
        event("gate_up_small", 330, 370),
        event("nvjet_tst_64x8", 310, 340),
        event("void elementwise_kernel<float>", 380, 385),
        event("nvjet_tst_64x8", 250, 260),  # between the steps
    ]


def test_kernels_belong_to_their_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step, "own_kernels", lambda: {"gate_up_small": "experts_small.gate_up_small"})
    profile = step.read_profile(events_of_a_gpu())
    assert profile.on_device
    assert profile.steps == [
        [
            step.KernelRun("nvjet_tst_64x8", 0, 20, 20),
            step.KernelRun("experts_small.gate_up_small", 22, 42, 20),
            step.KernelRun("void elementwise_kernel<float>", 42, 43, 1),
        ],
        [
            step.KernelRun("nvjet_tst_64x8", 0, 30, 30),
            step.KernelRun("experts_small.gate_up_small", 20, 60, 40),
            step.KernelRun("void elementwise_kernel<float>", 70, 75, 5),
        ],
    ]
    assert profile.spans() == [43, 75] and profile.median() == profile.steps[0]
    assert [step.gaps(calls) for calls in profile.steps] == [2, 10]
    assert next(iter(step.kernel_rows(profile))) == {
        "name": "experts_small.gate_up_small",
        "group": "experts",
        "count": 1.0,
        "us": 30.0,
        "us_each": 30.0,
    }
    groups = {row["group"]: row for row in step.group_rows(profile, {"experts": 46_000_000, "attention": 4600}, 4.6e12)}
    assert groups["experts"]["floor_us"] == pytest.approx(10) and groups["experts"]["us"] == 30
    assert groups["attention"] == {"group": "attention", "count": 0, "us": 0, "bytes": 4600, "floor_us": 0.001}
    assert groups["inputs, copies"]["us"] == 3 and groups["dense"]["us"] == 25


def test_a_kernel_inside_another_ones_time_hides_no_gap() -> None:
    calls = [step.KernelRun("long", 0, 30, 30), step.KernelRun("short", 5, 10, 5), step.KernelRun("last", 35, 40, 5)]
    assert step.gaps(calls) == step.gaps(calls[::-1]) == 5


def test_a_profile_without_kernels_says_what_may_be_wrong() -> None:
    with pytest.raises(ValueError, match="permission to read performance counters"):
        step.read_profile([event(step.RANGE, 0, 10, "CPU")])


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("experts_hopper.down_hopper", "experts"),
        ("attention_decode.attend_pieces", "attention"),
        ("route.route_kernel", "routing"),
        ("rope_store.rope_store_kernel", "norm, rope, KV"),
        ("activation.add_gated_kernel", "norm, rope, KV"),
        ("sample.choose_kernel", "sampling"),
        ("linear.stream_rows", "dense"),
        ("nvjet_sm90_tst_128x8_64x12_4x1_v_bz_TNT", "dense"),
        ("Memcpy DtoH (Device -> Pinned)", "inputs, copies"),
        ("something", "other"),
    ],
)
def test_groups(name: str, group: str) -> None:
    assert step.group_of(name) == group


def test_own_kernels_are_found_by_their_file() -> None:
    pytest.importorskip("triton")
    from anabranch.kernels.triton import experts_small, route  # noqa: F401

    found = step.own_kernels()
    assert found["gate_up_small"] == "experts_small.gate_up_small" and found["route_kernel"] == "route.route_kernel"
    assert step.group_of(found["gate_up_small"]) == "experts" and step.group_of(found["route_kernel"]) == "routing"


def test_bytes_of_one_request_are_its_active_weights() -> None:
    """Counted in another way: all that a token passes through, but for norms."""
    found = step_bytes(QWEN3, 1, 1000, "bfloat16")
    norms = count_weights(QWEN3)["norms"] + 48 * 2 * 128
    assert sum(found.values()) - found["attention"] == 2 * (count_active(QWEN3) - norms)
    assert found["attention"] == 2 * 1000 * 48 * 2 * 4 * 128
    # The whole at 128 tokens of context and 4.6 TB/s is the floor that targets.json names.
    assert 1e3 * sum(step_bytes(QWEN3, 1, 128, "bfloat16").values()) / 4.6e12 == pytest.approx(1.32, abs=0.03)


def test_bytes_grow_with_the_experts_that_are_visited() -> None:
    assert visited(128, 8, 1) == pytest.approx(8)
    assert visited(128, 8, 16) == pytest.approx(128 * (1 - (15 / 16) ** 16))
    assert visited(4, 4, 100) == 4
    small, large = (step_bytes(QWEN3, batch, 128, "bfloat16") for batch in (1, 256))
    assert large["dense"] == small["dense"] and large["attention"] == 256 * small["attention"]
    assert large["experts"] == pytest.approx(2 * count_weights(QWEN3)["routed experts"], rel=1e-6)


def test_bytes_of_quantized_weights() -> None:
    plain, fp8 = (step_bytes(quantized(QWEN3, name), 16, 128, "bfloat16") for name in ("none", "fp8"))
    assert fp8["experts"] == pytest.approx(plain["experts"] / 2, rel=1e-3)
    assert plain["dense"] / 2 < fp8["dense"] < plain["dense"], "the head is not quantised"
    assert {group: fp8[group] for group in ("attention", "routing")} == {
        group: plain[group] for group in ("attention", "routing")
    }


def test_a_window_bounds_what_attention_reads() -> None:
    gemma = read_config(CONFIGS / "gemma4-26b-a4b")
    near, far = (step_bytes(gemma, 1, context, "bfloat16")["attention"] for context in (1024, 9 * 1024))
    full = 5 * 2 * 2 * 2 * 512  # bytes a token of the five layers without a window
    assert far - near == 8 * 1024 * full


@pytest.mark.parametrize("option", ["--batch", "--context", "--steps"])
def test_mistakes_are_refused_at_once(option: str) -> None:
    with pytest.raises(ValueError, match=f"{option}: at least 1, not 0"):
        step.run(parse("/no/such/model", option, "0"))


@pytest.mark.gpu
def test_kernels_inside_a_captured_graph_are_seen(tmp_path: Path) -> None:
    tiny_model.write(tmp_path / "tiny")
    file = tmp_path / "step.json"
    assert step.run(parse(str(tmp_path / "tiny"), "--batch", "2", "--steps", "3", "--json", str(file))) == 0
    found = json.loads(file.read_text())
    assert found["on_device"] and found["gap_us"] < found["span_us"]
    assert {"experts", "attention"} <= {row["group"] for row in found["groups"] if row["us"] > 0}
