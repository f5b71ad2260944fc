"""Products with quantised weights against the same numbers in fp64: in the interpreter, and on a GPU."""

import itertools
from pathlib import Path

import pytest
import torch

from anabranch.formats import Grouped

pytest.importorskip("triton")
from anabranch.kernels.triton import linear as kernel
from anabranch.kernels.triton import linear_quantized, split_rows
from anabranch.kernels.triton.launch import gluon_kernels
from anabranch.ops.weight import Weight
from tests.kernels.triton import ahead_of_time
from tests.kernels.triton.ahead_of_time import recorded, resources
from tests.kernels.triton.places import dtypes, everywhere
from tests.kernels.triton.test_experts import TOLERANCE, compile_launch, distance, poison
from tests.kernels.triton.test_quantized_experts import FORMATS, check_products_overlap, formats, in_fp8, quantized

__all__ = ["poison"]


def expected_of(x_TD: torch.Tensor, weight: Weight) -> torch.Tensor:
    fp8 = linear_quantized.find_fp8_product(x_TD, weight) is not None
    return (in_fp8(x_TD) if fp8 else x_TD.double()) @ weight.dense(torch.float64).T


@everywhere
@formats
def test_products(format: Grouped, device: str, poison: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_quantized, "MULTIPLY_TOKENS", {4: 20, 8: 20})  # more are dequantised first
    for dtype in dtypes(device):
        for tokens, D, F, bias in ((1, 256, 96, True), (17, 128, 48, False), (21, 256, 33, True)):
            x_TD = torch.randn(tokens, D, device=device).to(dtype)
            weight = quantized(Weight.of(torch.randn(F, D, device=device) * D**-0.5), format)
            bias_F = torch.randn(F, device=device).to(dtype) if bias else None
            assert kernel.accepts(x_TD, weight, bias_F)
            found = kernel.linear(x_TD, weight, bias_F)
            expected = expected_of(x_TD, weight)
            if bias_F is not None:
                expected += bias_F.double()
            assert found.dtype == dtype
            assert distance(found, expected) <= TOLERANCE[dtype], (format.name, tokens, dtype)


@everywhere
@formats
def test_rows_do_not_depend_on_each_other(format: Grouped, device: str) -> None:
    """With as many tokens, so that the kernel is the same."""
    if device == "cpu" and format not in (FORMATS[0], FORMATS[5], FORMATS[7]):
        pytest.skip("the interpreter is slow: an example of each kind")
    dtype = dtypes(device)[-1]
    weight = quantized(Weight.of(torch.randn(64, 128, device=device)), format)
    for tokens in (2, 17, 70) if device == "cpu" else (2, 17, 70, 200):
        x_TD, others_TD = (torch.randn(tokens, 128, device=device).to(dtype) for _ in range(2))
        first, order = kernel.linear(x_TD, weight), torch.randperm(tokens, device=device)
        assert torch.equal(kernel.linear(x_TD[order], weight), first[order])
        for t in (0, tokens // 2, tokens - 1):
            others_TD[t] = x_TD[t]
            assert torch.equal(kernel.linear(others_TD, weight)[t], first[t]), (tokens, t)


@everywhere
def test_inputs_that_are_no_whole_block(device: str, poison: None) -> None:
    x_TD = torch.randn(3, 160, device=device)
    weight = quantized(Weight.of(torch.randn(96, 160, device=device)), Grouped("fp8", 32, 128))
    expected = x_TD.double() @ weight.dense(torch.float64).T
    assert distance(kernel.linear(x_TD, weight), expected) <= TOLERANCE[torch.float32]


@everywhere
def test_sums_in_fp32(device: str, poison: None) -> None:
    x_TD = torch.randn(5, 128, device=device).half()
    weight = quantized(Weight.of(torch.randn(64, 128, device=device)), Grouped("int4", 1, 128, "bfloat16"))
    found = kernel.linear(x_TD, weight, None, torch.float32)
    assert found.dtype == torch.float32
    assert distance(found, x_TD.double() @ weight.dense(torch.float64).T) <= 1e-5


@pytest.mark.parametrize("zero", [False, True])
def test_int4_on_hopper(zero: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What multiplies how many tokens: linear_hopper_packed from 5 on, where it can; then the vendor's library."""
    packed = pytest.importorskip("anabranch.kernels.triton.linear_hopper_packed")
    monkeypatch.setattr(linear_quantized, "packed_kernels", lambda device: packed)
    monkeypatch.setattr(linear_quantized, "dequantize", lambda weight, dtype: weight.dense(dtype))
    monkeypatch.setattr(packed, "counts", lambda device: torch.zeros(1, dtype=torch.int32))

    def chosen(tokens: int, F: int = 1024, D: int = 256, group: int = 128, dtype: torch.dtype = torch.bfloat16) -> str:
        weight = quantized(Weight.of(torch.zeros(F, D)), Grouped("int4", 1, group, "bfloat16", zero))
        names = ((linear_quantized, "stream_scaled"), (linear_quantized, "multiply_scaled"))
        with recorded(packed, "multiply_packed") as launches, recorded(split_rows, "split_row"):
            with recorded(*names[0]) as few, recorded(*names[1]) as multiplied:
                kernel.linear(torch.zeros(tokens, D, dtype=dtype), weight)
        if launches:
            return f"{launches[0].args[1].block_shape[1]} s{launches[0].kwargs['STAGES']}"
        return "few" if few else "multiplied" if multiplied else "library"

    assert [chosen(tokens) for tokens in (1, 4)] == ["few", "few"]
    assert [chosen(tokens) for tokens in (5, 16, 17, 32)] == 2 * ["16 s8"] + 2 * ["32 s4"]
    assert [chosen(tokens) for tokens in (33, 64)] == 2 * ["library" if zero else "64 s4"]
    assert [chosen(tokens) for tokens in (65, 256)] == ["library", "library"]
    assert chosen(16, F=512) == chosen(16, group=64) == chosen(16, dtype=torch.float16) == "multiplied"


@pytest.mark.gpu
def test_int4_on_a_gpu(poison: None) -> None:
    """The projections of Qwen3-30B-A3B, with all tiles."""
    for D, F in ((2048, 5120), (4096, 2048), (640, 1000)):
        weight = quantized(Weight.of(torch.randn(F, D, device="cuda") * D**-0.5), Grouped("int4", 1, 128, "bfloat16"))
        for tokens in (5, 16, 17, 33, 64, 100, 129, 256, 257):
            x_TD = torch.randn(tokens, D, device="cuda").bfloat16()
            found = kernel.linear(x_TD, weight)
            assert distance(found, expected_of(x_TD, weight)) <= TOLERANCE[torch.bfloat16], (D, F, tokens)


PACKED_LINEAR = [(16, 4), (16, 8), (32, 4), (64, 4)]


@pytest.mark.slow
@pytest.mark.parametrize("rows, stages", PACKED_LINEAR)
def test_packed_compiles_ahead_of_time(rows: int, stages: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without spills, with products that overlap: with inputs of one program and of several."""
    packed = pytest.importorskip("anabranch.kernels.triton.linear_hopper_packed")
    monkeypatch.setattr(packed, "counts", lambda device: torch.zeros(1, dtype=torch.int32))
    for D, zero in ((128 * stages, False), (256 * stages + 128, True)):
        weight = quantized(Weight.of(torch.zeros(200, D)), Grouped("int4", 1, 128, "bfloat16", zero))
        x_TD, y_TF = torch.zeros(40, D, dtype=torch.bfloat16), torch.zeros(40, 200, dtype=torch.bfloat16)
        with recorded(packed, "multiply_packed") as launches, recorded(split_rows, "split_row"):
            packed.run(x_TD, weight, None, y_TF, (rows, stages))
        compiled = compile_launch(launches[0].function, launches[0].args, launches[0].kwargs, "sm_90")
        assert compiled.metadata.shared <= ahead_of_time.SHARED["sm_90"]
        assert resources(compiled)["STACK"] == 0
        assert f"wgmma.mma_async.sync.aligned.m64n{rows}k32.f32.e4m3.e4m3" in compiled.asm["ptx"]
        check_products_overlap(compiled, tmp_path)


@pytest.mark.gpu
def test_packed_on_a_gpu(poison: None) -> None:
    """With every tile, and inputs that are no whole program's; sums do not depend on which program is the last."""
    packed = gluon_kernels("linear_hopper_packed", torch.device("cuda"))
    if packed is None:
        pytest.skip("for Hopper")
    for (D, F), zero in itertools.product(((2048, 5120), (4096, 2048), (640, 1000), (128, 72)), (False, True)):
        format = Grouped("int4", 1, 128, "bfloat16", zero)
        weight = quantized(Weight.of(torch.randn(F, D, device="cuda") * D**-0.5), format)
        bias_F = torch.randn(F, device="cuda").bfloat16()
        for tokens, tiles in itertools.product((1, 5, 16, 64, 100, 257), PACKED_LINEAR):
            x_TD = (torch.randn(tokens, D, device="cuda") + tokens % 2 / 2).bfloat16()
            for bias in (None, bias_F):
                found, again = (packed.run(x_TD, weight, bias, x_TD.new_empty(tokens, F), tiles) for _ in range(2))
                wanted = x_TD.double() @ weight.dense(torch.float64).T + (0.0 if bias is None else bias.double())
                assert distance(found, wanted) <= TOLERANCE[torch.bfloat16], (D, F, tokens, tiles)
                assert torch.equal(found, again)


@pytest.mark.gpu
def test_packed_waits_for_its_input() -> None:
    """Launched at once after what it depends on, many times: without `poison`, which puts kernels between them."""
    packed = gluon_kernels("linear_hopper_packed", torch.device("cuda"))
    if packed is None:
        pytest.skip("for Hopper")
    weight = quantized(Weight.of(torch.randn(2048, 2048, device="cuda") / 50), Grouped("int4", 1, 128, "bfloat16"))
    x_TD, tiles = torch.randn(16, 2048, device="cuda").bfloat16(), (16, 4)

    def chain() -> torch.Tensor:
        y_TD = x_TD
        for _ in range(8):
            y_TD = packed.run(y_TD, weight, None, x_TD.new_empty(16, 2048), tiles)
        return y_TD

    first = chain()
    assert all(torch.equal(chain(), first) for _ in range(50))


@pytest.mark.gpu
def test_fp8_by_fp8_on_a_gpu(poison: None) -> None:
    """The projections of Qwen3-30B-A3B and odd shapes, by our kernel and by the vendor's library."""
    ways = set()
    for D, F in ((2048, 5120), (4096, 2048), (1024, 640), (640, 1000), (384, 72)):
        weight = quantized(Weight.of(torch.randn(F, D, device="cuda") * D**-0.5), FORMATS[0])
        bias_F = torch.randn(F, device="cuda").bfloat16()
        for tokens in (5, 16, 17, 33, 64, 100, 129, 257, 1001):
            x_TD = torch.randn(tokens, D, device="cuda").bfloat16()
            way = linear_quantized.find_fp8_product(x_TD, weight)
            ways.add(None if way is None else way.__name__)
            for bias in (None, bias_F):
                found = kernel.linear(x_TD, weight, bias)
                expected = expected_of(x_TD, weight) + (0.0 if bias is None else bias.double())
                assert distance(found, expected) <= TOLERANCE[torch.bfloat16], (D, F, tokens, way)
                assert torch.equal(kernel.linear(x_TD, weight, bias), found), "sums depend on who is last"
    assert ways == {"run", "multiply_by_library", None}
