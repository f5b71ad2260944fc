"""The Ascend platform over a runtime that writes down what it is asked (tests/npu): memory, streams, captures."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.npu import rig

rig.needed()

from anabranch import platforms  # noqa: E402
from anabranch.config import EngineConfig  # noqa: E402
from anabranch.conformance import models, tiny  # noqa: E402
from anabranch.conformance.contract import check_contract  # noqa: E402
from anabranch.engine.single import SingleSequence  # noqa: E402
from anabranch.loader.load import load_model  # noqa: E402
from anabranch.loader.resolve import resolve  # noqa: E402
from anabranch.models.config import read_config  # noqa: E402
from anabranch.platforms.npu import NpuPlatform  # noqa: E402
from tests.npu.executor import OnCpu  # noqa: E402
from tests.npu.machine import machine  # noqa: E402


def test_it_is_detected_and_says_who_it_is() -> None:
    assert NpuPlatform.available()
    platform = platforms.current.__wrapped__()
    assert isinstance(platform, NpuPlatform) and platform.device == torch.device("npu:0")
    assert "Ascend910B3" in platform.describe() and platform.memory().total == 64 << 30
    assert platform.has("bf16") and platform.has("graphs") and platform.has("streams") and not platform.has("sm90")


def described(**environment: str) -> list[str]:
    code = (
        "import torch; from anabranch.platforms.npu import NpuPlatform; p = NpuPlatform(); "
        "print(p.memory_fraction, p.compute_dtype(torch.bfloat16), p.describe(), sep='|')"
    )
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    return done.stdout.strip().splitlines()[-1].split("|") if done.returncode == 0 else [done.stderr.splitlines()[-1]]


def test_defaults_follow_the_devices_memory_and_name() -> None:
    """A process each: the runtime says once what there is."""
    now = dict(os.environ)
    small = described(**now, STUB_NPU_GB="32", STUB_NPU_NAME="Ascend910A", ASCEND_RT_VISIBLE_DEVICES="3")
    assert small[0] == "0.81" and small[1] == "torch.float16" and small[2].endswith("ASCEND_RT_VISIBLE_DEVICES=3")
    large = described(**now, STUB_NPU_GB="64")
    assert large[:2] == ["0.9", "torch.bfloat16"]
    (none,) = described(**now, STUB_NPU_COUNT="0", ASCEND_RT_VISIBLE_DEVICES="9")
    assert none.startswith("ValueError: platform 'npu': no Ascend device") and none.endswith("(9)")


def test_steps_are_captured_in_pieces(tmp_path: Path) -> None:
    tiny.write("qwen2_moe", tmp_path)
    platform, model = NpuPlatform(), read_config(tmp_path)
    found = resolve(EngineConfig(model=""), model, platform)
    assert (found.graphs, found.page_size) == ("pieces", 128)
    assert resolve(EngineConfig(model="", graphs="none"), model, platform).graphs == "none"
    with pytest.raises(ValueError, match="graphs full: platform 'npu' captures only what is between attentions"):
        resolve(EngineConfig(model="", graphs="full"), model, platform)
    with pytest.raises(ValueError, match="kv_cache_dtype fp8_e4m3: platform 'npu' .* use auto"):
        resolve(EngineConfig(model="", kv_cache_dtype="fp8_e4m3"), model, platform)


def test_it_keeps_the_contract() -> None:
    with machine() as (platform, _):
        assert [result for result in check_contract(platform) if not result.passed] == []


def test_captures_are_torch_npus_own() -> None:
    runtime = rig.Runtime()
    platform = NpuPlatform()
    pool = platform.make_graph_pool()
    runtime.record()
    order = []
    graphs = [platform.capture(lambda i=i: order.append((i, runtime.stream())), pool) for i in range(2)]
    main = runtime.stream()
    for graph in graphs:
        graph.replay()
    assert {type(graph) for graph in graphs} == {torch.npu.NPUGraph}
    side = order[0][1]
    assert side != main and order == [(0, side), (1, side)]
    lines = [line for line in runtime.log() if "capture" in line or "replay" in line]
    expected = [f"capture # {verb} on stream {side}" for _ in range(2) for verb in ("begins", "ends")]
    expected += [f"replay # on stream {main}"] * 2
    assert [re.sub(r"(capture|replay) \d+", r"\1 #", line) for line in lines] == expected


def test_the_shared_expert_leaves_before_routing_and_joins_before_the_sum(tmp_path: Path) -> None:
    """In every layer: an event where the streams part, the routed experts enqueued on the main stream, then the shared
    one's work on the other, which has waited for that event; then the main stream waits for it, and adds."""
    tiny.write("qwen2_moe", tmp_path)
    runtime = rig.Runtime()
    with machine() as (platform, _):
        model = load_model(tmp_path, platform=platform, dtype="bfloat16")
        sequence = SingleSequence(model, 128, page_size=128)
        with OnCpu(runtime):
            runtime.record()
            sequence.forward([1, 2, 3])
    main = runtime.stream()
    log = runtime.log()
    waits = [i for i, line in enumerate(log) if re.match(rf"stream (?!{main}\b)\d+ waits", line)]
    assert len(waits) == len(model.layers)
    for forked in waits:
        side, event = map(int, re.findall(r"\d+", log[forked]))
        fork = log.index(f"event {event} on stream {main}")
        join = next(i for i, line in enumerate(log) if i > forked and line.startswith(f"stream {main} waits"))
        done = log.index(f"event {re.findall(r'[0-9]+', log[join])[1]} on stream {side}")
        assert fork < forked < done < join
        routed, shared, after = log[fork:forked], log[forked:done], log[join:]
        for name in ("npu_moe_gating_top_k_softmax", "npu_moe_init_routing_v2", "npu_moe_finalize_routing"):
            assert f"npu::{name} on stream {main}" in routed
        assert not [line for line in routed if line.endswith(f"on stream {side}")]
        assert f"npu::npu_swiglu on stream {side}" in shared
        assert not [line for line in shared if line.endswith(f"on stream {main}")]
        # Its input, its result, its gate: nobody's memory is given away early.
        assert shared[-1] == after[1] == after[2] == "record_stream"
        calls = [line for line in after if line.startswith("aten::")]
        assert calls[:3] == [f"aten::{name} on stream {main}" for name in ("sigmoid", "mul.Tensor", "add.Tensor")]


def test_fetches_and_staging_wait_for_their_own_work_alone() -> None:
    runtime = rig.Runtime()
    with machine() as (platform, _):
        runtime.record()
        fetch = platform.fetch(torch.arange(8).npu())
        assert fetch.wait().tolist() == list(range(8))
        log = runtime.log()
        event = next(line for line in log if line.startswith("event"))
        assert f"synchronize event {event.split()[1]}" in log
        staging = platform.make_staging(64)
        runtime.record()
        staging.wait()
        assert [line.split()[:2] for line in runtime.log()] == [["synchronize", "stream"]]


def test_models_logits_are_those_of_the_cpu(tmp_path: Path) -> None:
    """fp32: nothing of Ascend's attention or experts takes it, so torch's operators do, on npu:0 all the same."""
    tiny.write("qwen2_moe", tmp_path)
    expected = models.logits(tmp_path, platforms.make("cpu"), "float32", reference=True)
    with machine() as (platform, mode):
        assert models.far(expected, tmp_path, platform, "float32") == []
        assert "npu_fused_infer_attention_score" not in mode.calls and "npu_rms_norm" in mode.calls
