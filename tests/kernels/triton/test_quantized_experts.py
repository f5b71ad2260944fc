"""The experts' kernels with quantised weights, against the same numbers in fp64: in the interpreter, and on a GPU."""

import importlib
import itertools
import re
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from anabranch.formats import Grouped
from anabranch.formats.grouped import FP4

pytest.importorskip("triton")
from anabranch.kernels.triton import experts as kernel
from anabranch.kernels.tuning.experts_tiles import (
    FewTiles,
    GroupedTiles,
    HopperTiles,
    Machine,
    PackedTiles,
    SmallTiles,
    Tile,
    Tiles,
    choose,
    label,
)
from anabranch.kernels.tuning.experts_tiles import Shape as TileShape
from anabranch.ops.experts import ExpertsCall
from anabranch.ops.weight import Weight
from tests.kernels.emulation.assembly import emulate
from tests.kernels.triton.ahead_of_time import recorded, resources
from tests.kernels.triton.places import everywhere, interpreter
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
    for weight in made.values():
        kernel.add_scales_by_input(weight)
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


PACKED_TILES = [PackedTiles(32, 6), PackedTiles(64, 5, group=4)]
MXFP4 = Grouped("fp4", 1, 32, "uint8")
MXFP4_TILES = [*PACKED_TILES, PackedTiles(128, 4, group=4)]
SPLIT_TILES = [PackedTiles(16, 8, split=True), PackedTiles(32, 6, split=True)]


@pytest.mark.gpu
@pytest.mark.parametrize("tiles", [*PACKED_TILES, *SPLIT_TILES], ids=label)
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
        for format, mean in itertools.product(formats, (0.0, 0.5)):  # zero points are taken off a sum in FP8
            check({**arguments, "x_TD": arguments["x_TD"] + mean}, format, tiles)


@pytest.mark.gpu
@pytest.mark.parametrize("tiles", [*MXFP4_TILES, *SPLIT_TILES], ids=label)
def test_packed_mxfp4_on_a_gpu(tiles: PackedTiles, poison: None) -> None:
    """The widths of gpt-oss, at which the last stage and the last columns are not whole, and others."""
    for tokens, E, K, D, inner in (
        (1, 4, 2, 2880, 2880),
        (7, 3, 2, 64, 192),
        (40, 8, 4, 2880, 2880),
        (300, 4, 2, 2880, 2880),
        (200, 32, 4, 512, 320),
        (900, 3, 2, 320, 1408),
    ):
        for biased in (True, False):
            activation = "clamped_swiglu" if biased else "silu"
            arguments = draw(tokens, E, K, D, inner, torch.bfloat16, "cuda", biased=biased, activation=activation)
            arguments["expert_TK"][0] = -1
            check(arguments, MXFP4, tiles)


@pytest.mark.gpu
def test_gpt_oss_on_a_gpu(poison: None) -> None:
    """With the tiles that are chosen."""
    for tokens in (1, 2, 3, 5, 16, 17, 64, 100, 300):
        arguments = draw(tokens, 4, 2, 2880, 2880, torch.bfloat16, "cuda", biased=True, activation="clamped_swiglu")
        check(arguments, MXFP4)
        call = ExpertsCall(**quantize(arguments, MXFP4)[0])
        hopper = kernel.machine_of(call.x_TD.device).hopper
        assert isinstance(kernel.tiles_for(call), FewTiles) == (hopper and tokens <= 4)
        assert isinstance(kernel.tiles_for(call), PackedTiles) == (hopper and tokens > 4)


@pytest.mark.gpu
@pytest.mark.parametrize("split", [False, True])
def test_packed_mxfp4_is_exact_on_a_gpu(split: bool, poison: None) -> None:
    """One input is 1 and all others are 0: the results are the weights, whatever their scales are."""
    D, inner = 192, 64
    for place in range(0, inner, 5):
        arguments = draw(3, 2, 1, D, inner, torch.bfloat16, "cuda", biased=True, activation="clamped_swiglu")
        arguments["x_TD"].zero_()
        arguments["expert_TK"].copy_(torch.tensor([[1], [0], [1]]))
        arguments["weight_TK"].fill_(1.0)
        given, _ = quantize(arguments, MXFP4)
        scale = given["down_EDI"].tensors["scale"]
        scale.copy_(torch.randint(80, 170, scale.shape, dtype=torch.uint8))
        gate_up, down = given["gate_up_bias_EF"].zero_(), given["down_bias_ED"].zero_()
        assert gate_up.shape == (2, 2 * inner) and down.shape == (2, D)
        gate_up[:, place], gate_up[:, inner + place] = 7.0, 0.0  # activated: 7 · sigmoid(11.9)
        found = kernel.run(ExpertsCall(**given), PackedTiles(16, 8, split=True) if split else PackedTiles(32, 6))
        h = torch.tensor(7.0 * torch.sigmoid(torch.tensor(1.702 * 7.0)).item()).to(torch.bfloat16).float().item()
        wanted = given["down_EDI"].dense(torch.float32)[[1, 0, 1], :, place].cuda() * h
        assert torch.equal(found, wanted.to(torch.bfloat16)), f"input {place}"


def ptx_of(name: str, module: str = "experts_hopper_unpack") -> list[str]:
    """The instructions of a function."""
    function = getattr(importlib.import_module(f"anabranch.kernels.triton.{module}"), name)
    body = re.search(r'\{\n(.*?)\n +\}\n +"""', function.src, re.DOTALL)
    assert body is not None
    return [line.strip().rstrip(";") for line in body[1].splitlines() if ".reg" not in line]


def test_instructions_unpack_all_bytes_with_all_scales() -> None:
    scale, byte = (x.ravel().astype(np.uint32) for x in np.mgrid[0:255, 0:256])
    other = (byte * 37 + 11) & 255
    made = emulate(ptx_of("factors"), {"$2": scale | (100 << 8)})
    found = emulate(ptx_of("unpack_scaled"), {"$4": byte | (other << 8), "$5": made["$0"]})
    assert (made["$1"] == (100 + 62) << 7).all()
    levels = np.array([*FP4, *(-x for x in FP4)])
    numbers = [byte & 15, other & 15, byte >> 4, other >> 4]
    for place, number in enumerate(numbers):
        bits = torch.from_numpy((found[f"${place}"] << 16).astype(np.uint32).view(np.int32))
        real = bits.view(torch.float32).double().numpy() * 2.0**64
        wanted = levels[number] * 2.0 ** (scale.astype(np.float64) - 127)
        exact = (scale >= 59) & (scale <= 192)
        assert (real[exact] == wanted[exact]).all()
        assert (abs(real - wanted)[scale < 59] <= 2.0**-70).all()
        assert not np.isfinite(real[scale > 192]).any()


def test_instructions_unpack_words() -> None:
    """Each of four bytes in turn has every value, beside others: numbers in the order of experts_few."""
    byte = np.arange(256, dtype=np.uint32)
    others = [(byte * n + 3) & 255 for n in (37, 11, 201)]
    fp4 = np.array([*FP4, *(-x for x in FP4)])
    fp8 = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(torch.float8_e4m3fn).double().numpy()
    for place in range(4):
        bytes_ = [*others[:place], byte, *others[place:]]
        word = bytes_[0] | bytes_[1] << 8 | bytes_[2] << 16 | bytes_[3] << 24
        halves = [one & 15 for one in bytes_] + [one >> 4 for one in bytes_]
        scale = np.uint32((120 + 62) << 7)  # 2⁻⁷, see factors
        for name, given, wanted in (
            ("unpack_int4", {"$8": word}, [half.astype(float) - 8 for half in halves]),
            ("unpack_fp4", {"$8": word, "$9": scale + 0 * word}, [fp4[half] * 2.0 ** (-7 - 64) for half in halves]),
            ("unpack_fp8", {"$4": word}, [fp8[one] for one in bytes_]),
        ):
            found = emulate(ptx_of(name, "experts_few"), given)
            for index, numbers in enumerate(wanted):
                bits = torch.from_numpy((found[f"${index}"] << 16).astype(np.uint32).view(np.int32))
                real, usual = bits.view(torch.float32).double().numpy(), np.isfinite(numbers)
                assert (real[usual] == numbers[usual]).all(), f"{name}: number {index}"


def test_instructions_unpack_bytes_to_fp8() -> None:
    byte = np.arange(256, dtype=np.uint32)
    word = byte | ((byte * 37 + 11) & 255) << 8 | ((byte * 11 + 3) & 255) << 16 | ((byte * 201 + 7) & 255) << 24
    fp8 = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(torch.float8_e4m3fn).double().numpy()
    kinds = {"unpack_int4": np.arange(16) * 2.0**-9, "unpack_fp4": np.array([*FP4, *(-x for x in FP4)]) * 2.0**-6}
    for name, numbers in kinds.items():
        found = emulate(ptx_of(name, "experts_hopper_split"), {"$2": word})
        for place in range(4):
            stored = word >> 8 * place & 255
            for result, half in (("$0", stored & 15), ("$1", stored >> 4)):
                assert (fp8[found[result] >> 8 * place & 255] == numbers[half]).all(), (name, place, result)


@everywhere
@pytest.mark.parametrize("D", [64, 128, 2880])
def test_both_parts_of_a_row_are_the_row(D: int, device: str) -> None:
    """To the bit, down to a thousandth of the largest number; sums are those of the parts."""
    from anabranch.kernels.triton.split_rows import split_rows

    size = torch.tensor([1e-30, 1e-3, 1.0, 300.0, 1e30, 0.0], device=device)[:, None]
    x_TD = (size * torch.randn(6, 2 * D, device=device)).to(torch.bfloat16)[:, :D]
    q_T2D, scale_T, sum_TG = split_rows(x_TD)
    parts = q_T2D.float()
    found, most = parts.sum(1) * scale_T[:, None], x_TD.float().abs().amax(1, keepdim=True)
    large = x_TD.float().abs() >= most / 512
    assert torch.equal(found[large], x_TD.float()[large]) and large.float().mean() > 0.9
    assert ((found - x_TD.float()).abs() <= most * 2.0**-17).all()
    assert (scale_T.log2() % 1 == 0).all() and parts.abs().max() <= 256
    if D % 128 == 0:
        assert torch.allclose(sum_TG, parts.sum(1).unflatten(1, (-1, 128)).sum(-1), rtol=1e-5, atol=1e-4)
    # What is not finite stays so in its row, whatever its bits are.
    bits = torch.tensor([0x7FC0, 0x7FFF, -1, 0x7F80, -0x80], dtype=torch.int16, device=device)
    spoilt_TD = x_TD[2].repeat(6, 1)
    spoilt_TD[:5, 3] = bits.view(torch.bfloat16)
    q_T2D, _, sum_TG = split_rows(spoilt_TD)
    assert q_T2D.float().isfinite().all(2).all(1).tolist() == 5 * [False] + [True]
    assert torch.equal(q_T2D[5].view(torch.uint8), split_rows(x_TD[2:3])[0][0].view(torch.uint8))
    assert D % 128 or sum_TG.isfinite().all(1).tolist() == 5 * [False] + [True]


@pytest.mark.slow
@pytest.mark.parametrize("D", [2880, 12288])
def test_split_rows_compile_ahead_of_time(D: int) -> None:
    from anabranch.kernels.triton import split_rows

    with recorded(split_rows, "split_row") as launches:
        split_rows.split_rows(torch.zeros(3, D, dtype=torch.bfloat16))
    compiled = compile_launch(launches[0].function, launches[0].args, launches[0].kwargs, "sm_90")
    assert resources(compiled)["STACK"] == 0


def test_threads_have_the_numbers_that_the_matrix_unit_takes_from_them() -> None:
    """Of an operand of 64 rows and 16 inputs, lane l of warp w has rows 16 w + l / 4 and 8 more, and of each the
    inputs 2 (l % 4), the next, and 8 more (PTX ISA, wgmma with A in registers)."""
    from anabranch.kernels.triton import experts_hopper_unpack

    layout = experts_hopper_unpack.GROUPS.value

    def place(index: int, bases: Any) -> np.ndarray:
        chosen = [base for bit, base in enumerate(bases) if index >> bit & 1]
        return np.array(chosen).sum(0) if chosen else np.zeros(3, int)

    for warp, lane in itertools.product(range(4), range(32)):
        mine = set()
        for register in range(1 << len(layout.reg_bases)):
            row, group, pair = (
                place(register, layout.reg_bases) + place(lane, layout.lane_bases) + place(warp, layout.warp_bases)
            )
            for byte, half in itertools.product((0, 1), (0, 1)):
                mine.add((int(row), int(32 * group + 16 * half + 2 * pair + byte)))
        rows, inputs = (16 * warp + lane // 4, 16 * warp + lane // 4 + 8), (0, 1, 8, 9)
        assert mine == {(r, 16 * s + 2 * (lane % 4) + i) for r in rows for s in range(4) for i in inputs}


@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 8, 16, 64, 256, 1024, 4096])
def test_tiles_of_gpt_oss(tokens: int) -> None:
    shape, hopper = TileShape(32, 2880, 2880, 4, torch.bfloat16, MXFP4.name), Machine(227 << 10, 132, True, True)
    tiles = choose(tokens, shape, machine=hopper)
    assert isinstance(tiles, FewTiles) == (tokens <= 4) and isinstance(tiles, PackedTiles) == (tokens > 4)
    if isinstance(tiles, PackedTiles):
        assert tiles.rows == (16 if tokens <= 64 else 64 if tokens <= 512 else 128)
        assert tiles.split == (tokens <= 64)
        assert tiles.stages * (256 * 64 + tiles.rows * 256) + 2 * tiles.rows * 128 <= 226 << 10
    assert isinstance(choose(tokens, shape, machine=replace(hopper, fixed=True)), GroupedTiles)
    for combine in ("fused", "ordered", "unfused"):
        other = choose(tokens, shape, combine, hopper)
        assert isinstance(other, FewTiles) == (tokens <= 4 and combine != "unfused")
        assert isinstance(other, PackedTiles) == (tokens > (2 if combine == "unfused" else 4) and combine != "fused")


def test_packed_tiles_take_biases_and_widths_of_whole_64s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "machine_of", lambda device: Machine(227 << 10, 132, True, True))

    def usable(format: Grouped, D: int, inner: int, biased: bool, dtype: torch.dtype = torch.bfloat16) -> bool:
        given, _ = quantize(draw(4, 2, 2, D, inner, dtype, biased=biased), format)
        return kernel.machine_for(ExpertsCall(**given)).hopper

    assert usable(MXFP4, 192, 320, True) and usable(MXFP4, 128, 64, False)
    assert not usable(MXFP4, 192, 96, True) and not usable(MXFP4, 96, 64, True)
    assert not usable(MXFP4, 192, 320, True, torch.float16)
    assert usable(FORMATS[6], 128, 256, True) and not usable(FORMATS[0], 128, 128, True)


@pytest.mark.slow
@pytest.mark.parametrize("tiles", [*MXFP4_TILES, *SPLIT_TILES], ids=label)
def test_packed_mxfp4_compiles_ahead_of_time(
    tiles: PackedTiles, launches: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    place = {"biased": True, "activation": "clamped_swiglu"}
    arguments, _ = quantize(draw(30, 2, 2, 1344, 320, torch.bfloat16, **place), MXFP4)
    for compiled in compile_packed(arguments, tiles, launches, monkeypatch):
        check_products_overlap(compiled, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "tiles, zero",
    [(tiles, zero) for tiles in (*PACKED_TILES, *SPLIT_TILES) for zero in (False, True)],
    ids=lambda it: label(it) if isinstance(it, PackedTiles) else str(it),
)
def test_packed_compiles_ahead_of_time(
    tiles: PackedTiles, zero: bool, launches: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    arguments, _ = quantize(draw(30, 4, 2, 512, 256, torch.bfloat16), Grouped("int4", 1, 128, "bfloat16", zero))
    for compiled in compile_packed(arguments, tiles, launches, monkeypatch):
        check_products_overlap(compiled, tmp_path)


def check_products_overlap(compiled: Any, folder: Path) -> None:
    import triton

    (folder / "kernel.ptx").write_text(compiled.asm["ptx"])
    command = [triton.knobs.nvidia.ptxas.path, "--gpu-name=sm_90a", folder / "kernel.ptx", "-o", folder / "out"]
    noted = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "serialized" not in noted.stdout + noted.stderr, "it waits for every product"


def compile_packed(
    arguments: Arguments, tiles: PackedTiles, launches: list[Any], monkeypatch: pytest.MonkeyPatch
) -> list[Any]:
    from anabranch.kernels.triton import experts_hopper_packed, split_rows

    for module, name in (
        (experts_hopper_packed, "gate_up_hopper_packed"),
        (experts_hopper_packed, "down_hopper_packed"),
        (split_rows, "split_row"),
    ):
        monkeypatch.setattr(module, name, Recorder(getattr(module, name), launches))
    monkeypatch.setattr(kernel, "packed_kernels", lambda device: experts_hopper_packed)
    monkeypatch.setattr(kernel, "num_processors", lambda device: 132)
    for name in ("gate_up_EFD", "down_EDI"):
        kernel.add_scales_by_input(arguments[name])
    kernel.run(ExpertsCall(**arguments), tiles)
    products = [launch for launch in launches if "packed" in launch[0].__name__]
    assert len(products) == 2
    found = []
    for function, args, kwargs in products:
        compiled = compile_launch(function, args, kwargs, "sm_90")
        assert compiled.metadata.shared <= 227 << 10
        assert resources(compiled)["STACK"] == 0
        kind = "k32.f32.e4m3.e4m3" if tiles.split else "k16.f32.bf16.bf16"
        assert f"wgmma.mma_async.sync.aligned.m64n{tiles.rows}{kind}" in compiled.asm["ptx"]
        found.append(compiled)
    return found


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
