"""The experts' tables: what is tried, how it is written, which table serves a call, and the tuner on a GPU."""

import itertools
import json
import logging
import os
import re
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from anabranch import platforms

pytest.importorskip("triton")
from anabranch.kernels.triton import experts as kernel
from anabranch.kernels.tuning import experts_tables, experts_tuner
from anabranch.kernels.tuning import table as tables
from anabranch.kernels.tuning.experts_candidates import searches, searches_of
from anabranch.kernels.tuning.experts_tables import CODEC
from anabranch.kernels.tuning.experts_tiles import (
    FewTiles,
    GroupedTiles,
    HopperTiles,
    Machine,
    PackedTiles,
    Shape,
    SmallTiles,
    Tile,
    Tiles,
    adapt,
    choose,
)
from anabranch.ops.weight import Weight
from tests.kernels.triton.ahead_of_time import DEPENDENT_LAUNCH, NoDevice

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="nothing of it is interpreted")

BF16 = torch.bfloat16
GPU = torch.device("cuda", 0)
HOPPER = Machine(shared_bytes=226 << 10, hopper=True)
MACHINES = {"hopper": HOPPER, "ampere": Machine(shared_bytes=163 << 10), "any": Machine()}
SHAPES = {
    "qwen3-30b-a3b": Shape(128, 2048, 768, 8, BF16),
    "gemma-4-26b-a4b": Shape(128, 2816, 704, 8, BF16),
    "qwen1.5-moe-a2.7b": Shape(60, 2048, 1408, 4, BF16),
}
MIXTRAL = Shape(8, 4096, 14336, 2, BF16)
TOKENS = (1, 2, 5, 8, 9, 16, 17, 64, 100, 256, 1024, 5000, 16384)


@pytest.fixture
def h200(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An H200 as far as tables go, with an empty cache."""
    monkeypatch.setenv("ANABRANCH_CACHE", str(tmp_path))
    monkeypatch.setattr(experts_tables, "device_facts", lambda device: ("sm_90", 132))
    monkeypatch.setattr(experts_tables, "_installed", {})
    kernel.chosen.cache_clear()
    yield
    kernel.chosen.cache_clear()


# -- What is tried -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("dtype", [BF16, torch.float32])
@pytest.mark.parametrize("full", [False, True], ids=["fast", "full"])
def test_candidates_can_run_and_come_back_from_disk(machine: str, dtype: torch.dtype, full: bool) -> None:
    given = MACHINES[machine]
    for shape, tokens in itertools.product((*SHAPES.values(), MIXTRAL), TOKENS):
        shape = replace(shape, dtype=dtype)
        found = searches(tokens, shape, given, full=full)
        assert found[0].base == choose(tokens, shape, machine=given), "the rule is judged like the others"
        tried = list(dict.fromkeys(tiles for one in found for tiles in one.near()))
        assert len(tried) <= (34 if full else 14)
        for tiles in tried:
            assert adapt(tiles, tokens, "fastest", given) == tiles
            assert CODEC.decode(json.loads(json.dumps(CODEC.encode(tiles)))) == tiles
            if isinstance(tiles, GroupedTiles):
                for tile, operands in ((tiles.gate_up, 2), (tiles.down, 1)):
                    stage = (tiles.rows + operands * tile.columns) * tile.depth * dtype.itemsize
                    assert tile.stages >= 2 and stage * tile.stages <= given.shared_bytes
            assert full or not (isinstance(tiles, GroupedTiles) and tiles.add), "atomics are only tried in full"


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("format", ["fp8_128x128", "int4_1x128_bf16", "fp4_1x32_e8m0"])
def test_candidates_for_quantized_weights(machine: str, format: str) -> None:
    given = MACHINES[machine]
    for tokens in TOKENS:
        shape = replace(SHAPES["qwen3-30b-a3b"], format=format)
        tried = list(dict.fromkeys(tiles for one in searches(tokens, shape, given, full=True) for tiles in one.near()))
        for tiles in tried:
            assert adapt(tiles, tokens, "fastest", given) == tiles
            if isinstance(tiles, HopperTiles):
                tile = tiles.gate_up, tiles.down
                assert (tiles.groups, tiles.extra) == (tiles.slabs, 0)
                assert [(one.columns, one.depth) for one in tile] == [(128, 128), (256, 128)]
            assert CODEC.decode(json.loads(json.dumps(CODEC.encode(tiles)))) == tiles
        on_hopper = any(isinstance(tiles, HopperTiles if format == "fp8_128x128" else PackedTiles) for tiles in tried)
        assert on_hopper == (given.hopper and tokens > (2 if format.startswith("fp4") else 8))


@pytest.mark.parametrize("format", ["plain", "fp8_128x128", "int4_1x128_bf16", "fp4_1x32_e8m0"])
def test_a_table_knows_the_rule_between_its_sizes(format: str) -> None:
    """A table of INT4 once chose other tiles than the rule's for 9 to 15 tokens, whose time it did not know."""
    shape, sizes = replace(SHAPES["qwen3-30b-a3b"], format=format), experts_tuner.buckets("fast", 16384)
    timed = {
        size: {tiles: float(n + 1) for n, tiles in enumerate(dict.fromkeys(t for one in some for t in one.near()))}
        for size, some in searches_of(sizes, shape, HOPPER).items()
    }
    table = tables.Table(timed, "fast", sizes)
    for low, high in itertools.pairwise(sorted(sizes)):
        for tokens in (low + 1, high - 1):
            rule = choose(tokens, shape, machine=HOPPER)
            known = table.estimate(tokens, partial(adapt, num_tokens=tokens, combine="fastest", machine=HOPPER))
            assert rule in known, f"{tokens} tokens"


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        {"kind": "tiny"},
        {"kind": "small", "gate_rows": 3},
        {"kind": "small", "gate_rows": "4"},
        {"kind": "small", "share": 1},
        {"kind": "small", "colour": 1},
        {"kind": "grouped", "rows": 16},
        {"kind": "grouped", "rows": 16, "gate_up": [64, 64, 4, 5, True, 1], "down": [64, 64, 4, 5, True]},
        {"kind": "grouped", "rows": 16, "gate_up": [64, 64, 4, 5, True, 1], "down": [64, 60, 4, 5, True, 1]},
        {"kind": "grouped", "rows": 16, "gate_up": [64, 64, 4, 5, True, 1], "down": [64, 1 << 20, 4, 5, True, 1]},
        {"kind": "hopper", "groups": 2, "slabs": 2, "programs": 1, "gate_up": 64, "down": 64},
    ],
)
def test_what_are_no_tiles_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises((ValueError, TypeError)):
        CODEC.decode(wrong)


def test_tiles_in_another_mode_or_machine() -> None:
    small, tile = SmallTiles(), Tile(64, 64, 4, 4)
    matched = GroupedTiles(16, tile, tile, match=True)
    adding = GroupedTiles(16, tile, tile, add=True)
    hopper = HopperTiles(1, 1, 1, tile, tile)
    for combine in ("fastest", "ordered", "unfused", "fused"):
        assert adapt(small, 8, combine, HOPPER) == replace(small, by_token=combine != "unfused")
        assert adapt(small, 65, combine, HOPPER) is None
        assert adapt(matched, 16, combine, HOPPER) == replace(matched, add=combine == "fused")
        assert adapt(matched, 17, combine, HOPPER) is None
        assert adapt(hopper, 500, combine, HOPPER) == replace(hopper, add=combine == "fused")
        assert adapt(hopper, 500, combine, Machine()) is None
        # Atomics would not give the same bits every time.
        assert adapt(adding, 500, combine, HOPPER) == (adding if combine in ("fastest", "fused") else None)
    assert adapt(replace(hopper, add=True), 500, "ordered", HOPPER) is None
    assert adapt(replace(hopper, gate_up=replace(tile, depth=128)), 500, "fused", HOPPER) is None, "FP8 by FP8"
    shape = Shape(128, 2048, 768, 8, torch.bfloat16)
    for combine in ("fastest", "ordered", "unfused", "fused"):
        tiles = choose(500, shape, combine, HOPPER)
        assert isinstance(tiles, HopperTiles) and tiles.add == (combine == "fused")


# -- Which table serves a call -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", SHAPES)
def test_shipped_tables_are_found_and_followed(model: str, h200: None, caplog: pytest.LogCaptureFixture) -> None:
    shape = SHAPES[model]
    began = time.process_time()
    table = experts_tables.table_for(GPU, shape)
    assert time.process_time() - began < 0.2
    assert table is not None and not caplog.records
    assert table.level == "full" and not table.missing and max(table.times) == 16384
    assert experts_tables.table_for(GPU, replace(shape, top_k=3)) is None
    assert experts_tables.table_for(torch.device("cpu"), shape) is None
    for tokens in (*TOKENS, 40_000):
        for combine in ("fastest", "fused", "ordered", "unfused"):
            for machine in MACHINES.values():
                tiles = kernel.chosen(tokens, shape, combine, machine, GPU)
                assert adapt(tiles, tokens, combine, machine) == tiles
    for tokens, times in table.times.items():
        chosen = kernel.chosen(tokens, shape, "fastest", HOPPER, GPU)
        assert times[chosen] <= min(times.values()) * (1 + tables.NOISE)


def test_a_table_overrules_the_rule(h200: None) -> None:
    shape = SHAPES["gemma-4-26b-a4b"]
    rule = choose(8192, shape, machine=HOPPER)
    assert kernel.chosen(8192, shape, "fastest", HOPPER, GPU) != rule, "6 % slower in the sweep"
    assert kernel.chosen(8192, replace(shape, inner=720), "fastest", HOPPER, GPU) == choose(
        8192, replace(shape, inner=720), machine=HOPPER
    )


def test_another_device_or_version_is_not_served(h200: None, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = SHAPES["qwen3-30b-a3b"]
    monkeypatch.setattr(experts_tables, "TILES_VERSION", experts_tables.TILES_VERSION + 1)
    assert experts_tables.table_for(GPU, shape) is None
    monkeypatch.undo()
    monkeypatch.setattr(experts_tables, "_installed", {})
    monkeypatch.setattr(experts_tables, "device_facts", lambda device: ("sm_90", 114))
    assert experts_tables.table_for(GPU, shape) is None


def test_every_source_of_the_op_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The files of the op and what its kernels import of their room, directly or not."""
    triton, tuning = Path(kernel.__file__).parent, Path(experts_tables.__file__).parent
    needed, found = {*triton.glob("experts*.py"), *tuning.glob("experts*.py")}, set[Path]()
    while more := needed - found:
        found |= more
        for file in more:
            names = re.findall(r"from anabranch\.kernels\.triton\.(\w+) import", file.read_text())
            needed |= {triton / f"{name}.py" for name in names}
    assert triton / "quantized.py" in found
    counted: list[Path] = []
    monkeypatch.setattr(experts_tables, "hash_files", lambda files: counted.extend(files) or "")
    experts_tables.sources.__wrapped__()
    assert set(counted) == found


# -- The tuner, with a device that only says how long things take ------------------------------------------------------


class FakeBench:
    """Everything takes 0.1 s of a fake clock; tiles with fewer warps are faster."""

    made: list["FakeBench"] = []

    def __init__(self, shape: Shape, weights: Any, activation: str, platform: Any) -> None:
        self.asked: list[tuple[int, Tiles]] = []
        FakeBench.made.append(self)

    def machine(self) -> Machine:
        return Machine()

    def compile(self, wanted: Sequence[tuple[int, Tiles]], seconds: float) -> None:
        assert wanted

    def time(self, size: int, choice: Tiles) -> float | None:
        self.asked.append((size, choice))
        if isinstance(choice, FewTiles | PackedTiles):
            return 3.0
        return 5.0 if isinstance(choice, SmallTiles) else 100.0 * choice.down.warps + choice.gate_up.warps


@pytest.fixture
def fake(h200: None, monkeypatch: pytest.MonkeyPatch) -> type[FakeBench]:
    monkeypatch.setattr(experts_tuner, "ExpertsBench", FakeBench)
    monkeypatch.setattr(FakeBench, "made", [])
    return FakeBench


class OnH200(platforms.load("fake")):  # type: ignore[misc]
    @property
    def device(self) -> torch.device:
        return GPU


def ensure(shape: Shape, level: str = "fast", **options: Any) -> experts_tuner.Tuned:
    return experts_tuner.ensure(shape, [], "silu", OnH200(), level, 8192, **options)


NEW = Shape(32, 1024, 512, 4, BF16)


def test_a_new_shape_is_measured_once_and_then_known(fake: type[FakeBench]) -> None:
    assert kernel.chosen(4096, NEW, "fastest", Machine(), GPU) == choose(4096, NEW)
    first = ensure(NEW)
    assert sorted(first.measured) == [1, 8, 16, 64, 256, 1024, 4096, 8192]
    assert ensure(NEW).measured == () and len(fake.made) == 1
    # The next process finds it on disk, at once.
    experts_tables.forget()
    began = time.process_time()
    again = ensure(NEW)
    assert time.process_time() - began < 0.2
    assert again.measured == () and again.table is not None and first.table is not None
    assert again.table.times == first.table.times
    chosen = kernel.chosen(4096, NEW, "fastest", Machine(), GPU)
    assert isinstance(chosen, GroupedTiles) and chosen != choose(4096, NEW)
    assert first.table.times[4096][chosen] == min(first.table.times[4096].values())


def test_a_shape_with_a_shipped_table_is_not_measured(fake: type[FakeBench]) -> None:
    assert ensure(SHAPES["qwen3-30b-a3b"]).measured == () and not fake.made
    assert ensure(SHAPES["qwen3-30b-a3b"], "full").measured == () and not fake.made
    assert ensure(SHAPES["qwen3-30b-a3b"], again=True).measured and len(fake.made) == 1


def test_full_after_fast_measures_again_and_fast_after_full_does_not(fake: type[FakeBench]) -> None:
    ensure(NEW)
    assert len(ensure(NEW, "full").measured) == 14
    assert ensure(NEW, "fast").measured == () and ensure(NEW, "full").measured == ()
    tried = [len(bench.asked) for bench in fake.made]
    assert len(tried) == 2 and tried[1] > tried[0]


def test_what_time_did_not_suffice_for_is_measured_at_the_next_start(
    fake: type[FakeBench], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(experts_tuner, "FAST_SECONDS", 0.0)
    assert ensure(NEW).table is None, "nothing at all was measured: the rule stays"
    now = itertools.count()
    real = experts_tuner.measure
    # A clock that ticks with every look: 20 looks, then the budget is spent.
    monkeypatch.setattr(experts_tuner, "FAST_SECONDS", 20.0)
    monkeypatch.setattr(experts_tuner, "measure", lambda *args: real(*args[:4], lambda: float(next(now))))
    first = ensure(NEW)
    assert first.table is not None and 0 < len(first.measured) < 8
    assert set(first.table.missing) == set(first.table.wanted) - set(first.measured)
    experts_tables.forget()
    monkeypatch.setattr(experts_tuner, "measure", real)
    second = ensure(NEW)
    assert set(second.measured) == set(first.table.missing)
    assert second.table is not None and not second.table.missing
    assert {size for size, _ in fake.made[-1].asked} == set(second.measured), "what was known is not measured again"


def test_sizes_by_hand_join_the_others(fake: type[FakeBench]) -> None:
    ensure(NEW)
    tuned = ensure(NEW, sizes=(48, 64))
    assert tuned.measured == (48,) and tuned.table is not None and {48, 64, 8192} <= set(tuned.table.times)


# -- The real bench: compiling here, timing on a GPU -------------------------------------------------------------------


def test_kernels_of_candidates_are_compiled_in_other_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """For a GPU that is not there. What was not compiled in time is not timed, and never compiled inline."""
    from triton.runtime.driver import driver

    from anabranch.kernels.compiling import compile_server
    from anabranch.kernels.triton import experts_plan

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(driver, "_active", NoDevice())
    monkeypatch.setattr(DEPENDENT_LAUNCH, lambda device: True)
    for module, names in (
        (kernel, ("gate_up_small", "down_token", "gate_up_grouped", "down_grouped", "sum_rows")),
        (experts_plan, ("place_pairs",)),
    ):
        for name in names:
            function = getattr(module, name)
            monkeypatch.setattr(function, "device_caches", defaultdict(function.create_binder))
    shape = Shape(4, 64, 32, 2, torch.float16)
    weights = Weight.of(torch.randn(4, 64, 64).half()), Weight.of(torch.randn(4, 64, 32).half())
    bench = experts_tuner.ExpertsBench(shape, [weights], "silu", platforms.make("cpu"))
    small, tile = SmallTiles(2, 1, 2, 1), Tile(16, 16, 4, 2)
    grouped = GroupedTiles(16, tile, tile)
    late = replace(grouped, down=replace(tile, columns=32))
    try:
        bench.compile([(2, small), (32, grouped)], 120.0)
        assert all(job.is_cached() for job in (*bench.jobs_of(2, small), *bench.jobs_of(32, grouped)))
        assert len(bench.jobs_of(2, small)) == 2 and len(bench.jobs_of(32, grouped)) == 4
        # Of `late` only the down kernel is new: it is not compiled, so it is not timed.
        missing = [job.kernel.__name__ for job in bench.jobs_of(32, late) if not job.is_cached()]
        assert missing == ["down_grouped"]
        compiled = sorted(tmp_path.iterdir())
        with caplog.at_level(logging.INFO):
            assert bench.time(32, late) is None
        assert sorted(tmp_path.iterdir()) == compiled and "does not run" not in caplog.text
        # Compiled, but nothing can be launched here: the candidate is skipped and logged.
        with caplog.at_level(logging.INFO):
            assert bench.time(2, small) is None
        assert "does not run" in caplog.text
    finally:
        compile_server.close()


@pytest.mark.gpu
def test_tuning_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small shape, cold and warm; the tiles that win give the right result."""
    monkeypatch.setenv("ANABRANCH_CACHE", str(tmp_path))
    experts_tables.forget()
    kernel.chosen.cache_clear()
    platform = platforms.current()
    shape = Shape(16, 512, 256, 4, BF16)
    weights = [
        (
            Weight.of(torch.randn(16, 512, 512, device=platform.device).to(BF16) / 20),
            Weight.of(torch.randn(16, 512, 256, device=platform.device).to(BF16) / 16),
        )
        for _ in range(4)
    ]
    began = time.monotonic()
    tuned = experts_tuner.ensure(shape, weights, "silu", platform, "fast", 4096)
    assert time.monotonic() - began < 25
    assert tuned.table is not None and tuned.measured
    tuned.table.check()
    experts_tables.forget()
    began = time.process_time()
    assert experts_tuner.ensure(shape, weights, "silu", platform, "fast", 4096).measured == ()
    assert time.process_time() - began < 0.2
    bench = experts_tuner.ExpertsBench(shape, weights, "silu", platform)
    for tokens in (1, 3, 16, 100, 1500):
        call = bench.draw(tokens, weights[0])
        found = kernel.run(call, kernel.tiles_for(call)).double()
        expected = torch.zeros_like(found)
        for e in range(16):
            token, slot = (call.expert_TK == e).nonzero(as_tuple=True)
            gate, up = (call.x_TD[token].double() @ call.gate_up_EFD.data[e].double().T).chunk(2, dim=-1)
            row = torch.nn.functional.silu(gate) * up @ call.down_EDI.data[e].double().T
            expected.index_add_(0, token, row * call.weight_TK[token, slot, None].double())
        assert (found - expected).norm() / expected.norm() <= 1e-2, tokens
    experts_tables.forget()
    kernel.chosen.cache_clear()
