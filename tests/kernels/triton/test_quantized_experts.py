"""The experts' kernels with quantised weights, against the same numbers in fp64: in the interpreter, and on a GPU."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from anabranch.formats import Grouped

pytest.importorskip("triton")
from anabranch.kernels.triton import experts as kernel
from anabranch.kernels.tuning.experts_tiles import (
    GroupedTiles,
    HopperTiles,
    Machine,
    PackedTiles,
    SmallTiles,
    Tile,
    Tiles,
    choose,
)
from anabranch.kernels.tuning.experts_tiles import Shape as TileShape
from anabranch.ops.experts import ExpertsCall
from anabranch.ops.weight import Weight
from tests.kernels.triton.ahead_of_time import resources
from tests.kernels.triton.places import interpreter
from tests.kernels.triton.test_experts import (
    TOLERANCE,
    Arguments,
    Recorder,
    compile_launch,
    distance,
    draw,
    exact,
    launches,
    poison,
)

__all__ = ["launches", "poison"]

FORMATS = [
    Grouped("fp8", 128, 128),
    Grouped("fp8", 32, 128),
    Grouped("fp8"),
    Grouped("int8"),
    Grouped("int4", 1, 32, "float16"),
    Grouped("int4", 1, 64, zero=True),
    Grouped("int4", 1, 128, "bfloat16"),
    Grouped("fp4", 1, 32, "uint8"),
]
formats = pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)


def quantized(weight: Weight, format: Grouped) -> Weight:
    dense = weight.data.float()
    tensors = Grouped(format.numbers, format.rows, format.group, format.scale).quantize(dense)
    if format.zero:
        groups = tensors["scale"].shape
        tensors["zero"] = torch.randint(4, 12, groups, dtype=torch.uint8, device=dense.device)
    return Weight.view(format, weight.shape, tensors)


def quantize(arguments: Arguments, format: Grouped) -> tuple[Arguments, Arguments]:
    """(arguments with quantised weights, the same with the numbers that they stand for)"""
    made = {name: quantized(arguments[name], format) for name in ("gate_up_EFD", "down_EDI")}
    dense = {name: Weight.of(weight.dense(torch.float32)) for name, weight in made.items()}
    return arguments | made, arguments | dense


FP8_TOLERANCE = 2e-2
"""Numbers between two of FP8 that differ in the last bits of fp32 may be rounded apart, by a sixteenth."""


def in_fp8(x_TD: torch.Tensor) -> torch.Tensor:
    """What rows stand for after they were quantised, with a scale for every 128 inputs."""
    groups = torch.nn.functional.pad(x_TD.double(), (0, -x_TD.shape[1] % 128)).unflatten(1, (-1, 128))
    scale = groups.abs().amax(-1, keepdim=True).clamp_min(1e-10) / 448
    return ((groups / scale).float().to(torch.float8_e4m3fn).double() * scale).flatten(1)[:, : x_TD.shape[1]]


def check(arguments: Arguments, format: Grouped, tiles: Tiles | None = None) -> None:
    given, dense = quantize(arguments, format)
    call = ExpertsCall(**given)
    assert kernel.accepts(call)
    tiles = tiles or kernel.tiles_for(call)
    found = kernel.run(call, tiles)
    in_fp8_too = isinstance(tiles, HopperTiles)
    error = distance(found, exact(dense, in_fp8) if in_fp8_too else exact(dense))
    assert error <= (FP8_TOLERANCE if in_fp8_too else TOLERANCE[found.dtype]), f"{tiles}: off by {error:.1e}"


def grouped(format: Grouped, **options: Any) -> GroupedTiles:
    depth = format.group if format.bits == 4 else 32
    tile = Tile(16, depth, 4, 2, swap=options.pop("swap", False))
    return GroupedTiles(16, tile, tile, **options)


two_ways = pytest.mark.parametrize(
    ("format", "second"),
    [(format, False) for format in FORMATS] + [(FORMATS[0], True), (FORMATS[5], True)],
    ids=[format.name for format in FORMATS] + ["fp8, second way", "int4, second way"],
)


@interpreter
@two_ways
def test_a_few_tokens_in_the_interpreter(format: Grouped, second: bool, poison: None) -> None:
    tiles = SmallTiles(4, 4, 8, 4, by_token=not second, share=second, ahead=1)
    check(draw(2, 3, 2, 128, 128), format, tiles)


@interpreter
@pytest.mark.parametrize("second", [False, True])
def test_gpt_oss_in_the_interpreter(second: bool, poison: None) -> None:
    """Widths that are no multiple of a block."""
    format, arguments = Grouped("fp4", 1, 32, "uint8"), draw(2, 6, 2, 96, 96, biased=True, activation="clamped_swiglu")
    check(arguments, format, SmallTiles(4, 4, 8, 4, by_token=not second, share=second, ahead=1))
    check(arguments, format, grouped(format, swap=second, match=not second))
    deep = replace(grouped(format, swap=second, match=not second), gate_up=Tile(16, 64, 4, 2), down=Tile(16, 128, 4, 2))
    check(draw(3, 6, 2, 192, 128, biased=True, activation="clamped_swiglu"), format, deep)


@interpreter
@two_ways
def test_grouped_in_the_interpreter(format: Grouped, second: bool, poison: None) -> None:
    tiles = grouped(format, swap=second, match=not second)
    check(draw(2, 6, 2, 128, 128, biased=second), format, tiles)


@interpreter
def test_rows_and_inputs_that_are_no_whole_blocks_in_the_interpreter(poison: None) -> None:
    for tiles in (SmallTiles(4, 4, 8, 4), grouped(FORMATS[0], swap=True)):
        check(draw(4, 3, 2, 160, 96), Grouped("fp8", 32, 128), tiles)


def check_rows(
    tokens: int, dims: tuple[int, ...], format: Grouped, tiles: Tiles | None = None, rows: Any = (0,), **place: Any
) -> None:
    """A token's row has the same bits whatever the other tokens are and wherever it is among them, with the same
    tiles."""
    arguments, _ = quantize(draw(tokens, *dims, **place), format)
    others = draw(tokens, *dims, **place)
    of_token = "x_TD", "weight_TK", "expert_TK"

    def run(given: Arguments) -> torch.Tensor:
        call = ExpertsCall(**given)
        return kernel.run(call, kernel.tiles_for(call) if tiles is None else tiles)

    first = run(arguments)
    for t in rows:
        mixed = {name: others[name].clone() for name in of_token}
        for name in of_token:
            mixed[name][tokens - 1 - t] = arguments[name][t]
        assert torch.equal(run(arguments | mixed)[tokens - 1 - t], first[t]), f"{tokens} tokens, row {t} among others"


@interpreter
@pytest.mark.parametrize(("format", "second"), [(FORMATS[0], False), (FORMATS[5], True), (FORMATS[7], True)])
def test_rows_do_not_depend_on_each_other_in_the_interpreter(format: Grouped, second: bool) -> None:
    tiles = SmallTiles(4, 4, 8, 4, by_token=not second, share=second, ahead=1)
    check_rows(3, (2, 2, 64, 64), format, tiles)
    check_rows(4, (2, 2, 64, 64), format, grouped(format, swap=second, match=not second))


@pytest.mark.gpu
@formats
def test_rows_do_not_depend_on_each_other_on_a_gpu(format: Grouped) -> None:
    for tokens in (2, 8, 16, 40, 64, 100, 300):
        rows = (0, 1, tokens - 1)
        check_rows(tokens, (16, 4, 512, 768), format, rows=rows, dtype=torch.bfloat16, device="cuda")


@formats
@pytest.mark.parametrize("tokens", [1, 8, 16, 64, 256, 4096])
def test_a_step_in_depth_has_one_scale(format: Grouped, tokens: int) -> None:
    """Or, where scales are powers of two and numbers are scaled in bf16, whole groups."""
    for dtype in (torch.bfloat16, torch.float16):
        tiles = choose(tokens, TileShape(128, 2048, 768, 8, dtype, format.name))
        for tile in (tiles.gate_up, tiles.down) if isinstance(tiles, GroupedTiles) else ():
            if format.numbers == "fp4" and dtype == torch.bfloat16:
                assert tile.depth == 64
                continue
            assert (format.group or 128) % tile.depth == 0
            assert format.bits == 8 or tile.depth == format.span(2048)


@pytest.mark.gpu
@formats
@pytest.mark.parametrize("inner", [704, 768, 1408])
def test_on_a_gpu(format: Grouped, inner: int, poison: None) -> None:
    if format.group and inner % format.group and format.bits == 4:
        pytest.skip("groups do not divide the inputs")
    for tokens in (1, 3, 8, 9, 16, 40, 100, 300):
        check(draw(tokens, 8, 2, 512, inner, torch.bfloat16, "cuda"), format)


FP8_TILES = choose(
    300, TileShape(128, 2048, 768, 8, torch.bfloat16, FORMATS[0].name), machine=Machine(wgmma=True, hopper=True)
)


@pytest.mark.gpu
@pytest.mark.parametrize("scale", ["float32", "bfloat16"])
def test_fp8_by_fp8_on_a_gpu(scale: str, poison: None) -> None:
    """Shapes of Qwen3-30B-A3B and others, also numbers of tokens for which other kernels are faster."""
    assert isinstance(FP8_TILES, HopperTiles)
    for tokens, E, K, D, inner in (
        (1, 4, 2, 256, 128),
        (7, 8, 2, 384, 256),
        (200, 128, 8, 2048, 768),
        (900, 3, 2, 512, 1408),
    ):
        arguments = draw(tokens, E, K, D, inner, torch.bfloat16, "cuda")
        arguments["expert_TK"][0] = -1
        for groups in (1, 2):
            check(arguments, Grouped("fp8", 128, 128, scale), replace(FP8_TILES, groups=groups, slabs=groups))


PACKED_TILES = [PackedTiles(16, 8), PackedTiles(32, 6), PackedTiles(64, 5, group=4)]


@pytest.mark.gpu
@pytest.mark.parametrize("tiles", PACKED_TILES, ids=lambda tiles: f"{tiles.rows} rows")
def test_packed_on_a_gpu(tiles: PackedTiles, poison: None) -> None:
    """Shapes of Qwen3-30B-A3B and others, also numbers of tokens for which other kernels are faster."""
    formats = Grouped("int4", 1, 128, "bfloat16"), Grouped("int4", 1, 128, "float16", zero=True)
    for tokens, E, K, D, inner in (
        (1, 4, 2, 256, 128),
        (7, 8, 2, 384, 256),
        (200, 128, 8, 2048, 768),
        (900, 3, 2, 640, 1408),
    ):
        arguments = draw(tokens, E, K, D, inner, torch.bfloat16, "cuda")
        arguments["expert_TK"][0] = -1
        for format in formats:
            check(arguments, format, tiles)


@pytest.mark.slow
@pytest.mark.parametrize("tiles", PACKED_TILES, ids=lambda tiles: f"{tiles.rows} rows")
@pytest.mark.parametrize("zero", [False, True])
def test_packed_compiles_ahead_of_time(
    tiles: PackedTiles, zero: bool, launches: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from anabranch.kernels.triton import experts_hopper_packed

    for name in ("gate_up_hopper_packed", "down_hopper_packed"):
        recorder = Recorder(getattr(experts_hopper_packed, name), launches)
        monkeypatch.setattr(experts_hopper_packed, name, recorder)
    monkeypatch.setattr(kernel, "packed_kernels", lambda device: experts_hopper_packed)
    monkeypatch.setattr(kernel, "num_processors", lambda device: 132)
    arguments, _ = quantize(draw(30, 4, 2, 512, 256, torch.bfloat16), Grouped("int4", 1, 128, "bfloat16", zero))
    kernel.run(ExpertsCall(**arguments), tiles)
    products = [launch for launch in launches if "packed" in launch[0].__name__]
    assert len(products) == 2
    for function, args, kwargs in products:
        compiled = compile_launch(function, args, kwargs, "sm_90")
        assert compiled.metadata.shared <= 227 << 10
        assert resources(compiled)["STACK"] == 0
        assert f"wgmma.mma_async.sync.aligned.m64n{tiles.rows}k16.f32.bf16.bf16" in compiled.asm["ptx"]


@pytest.mark.slow
def test_fp8_by_fp8_compiles_ahead_of_time(launches: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    from anabranch.kernels.triton import experts_hopper, experts_hopper_fp8, quantize_rows

    for module, name in (
        (experts_hopper_fp8, "gate_up_hopper_fp8"),
        (experts_hopper_fp8, "down_hopper_fp8"),
        (quantize_rows, "quantize_groups"),
    ):
        monkeypatch.setattr(module, name, Recorder(getattr(module, name), launches))
    monkeypatch.setattr(kernel, "hopper_kernels", lambda device: experts_hopper)
    monkeypatch.setattr(kernel, "fp8_kernels", lambda device: experts_hopper_fp8)
    monkeypatch.setattr(kernel, "num_processors", lambda device: 132)
    arguments, _ = quantize(draw(30, 4, 2, 512, 256, torch.bfloat16), FORMATS[0])
    kernel.run(ExpertsCall(**arguments), FP8_TILES)
    products = [launch for launch in launches if "fp8" in launch[0].__name__ or "quantize" in launch[0].__name__]
    assert len(products) == 3
    for function, args, kwargs in products:
        compiled = compile_launch(function, args, kwargs, "sm_90")
        assert compiled.metadata.shared <= 227 << 10
        if "fp8" in function.__name__:
            assert "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3" in compiled.asm["ptx"]
