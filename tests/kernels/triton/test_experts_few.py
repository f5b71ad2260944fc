"""experts_few on a GPU, and compiled for one. On a CPU: tests/kernels/emulation. What its instructions do: see
test_quantized_experts."""

import itertools
import re
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from anabranch.formats import Grouped
from anabranch.ops.experts import ExpertsCall

pytest.importorskip("triton")
from anabranch.kernels.triton import experts as kernel
from anabranch.kernels.tuning.experts_tiles import FewTiles, Shape, choose_few, choose_small
from tests.kernels.triton.ahead_of_time import resources
from tests.kernels.triton.test_experts import Recorder, compile_launch, draw, launches, poison
from tests.kernels.triton.test_quantized_experts import MXFP4, check, quantize

__all__ = ["launches", "poison"]

FEW = [
    (Grouped("int4", 1, 128, "bfloat16"), 8, 2048, 768),
    (Grouped("int4", 1, 128, "float16"), 6, 384, 256),
    (MXFP4, 4, 2880, 2880),
    (MXFP4, 2, 192, 320),
    (Grouped("fp8", 128, 128, "float32"), 8, 2048, 768),
    (Grouped("fp8", 128, 128, "bfloat16"), 1, 512, 1408),
]


@pytest.mark.gpu
@pytest.mark.parametrize(("format", "top_k", "D", "inner"), FEW)
def test_few_on_a_gpu(format: Grouped, top_k: int, D: int, inner: int, poison: None) -> None:
    tiles = choose_few(Shape(8, D, inner, top_k, torch.bfloat16, format.name))
    assert tiles is not None
    for tokens, biased in itertools.product((1, 2, 5), (False, True)):
        activation = "clamped_swiglu" if biased else "silu"
        place: Any = {"biased": biased, "activation": activation}
        arguments = draw(tokens, 8, top_k, D, inner, torch.bfloat16, "cuda", **place)
        if tokens > 1:
            arguments["expert_TK"][0] = -1
            arguments["expert_TK"][1, 0] = -1
        check(arguments, format, tiles)


def record_few(launches: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    from anabranch.kernels.triton import experts_few

    for name in ("gate_up_few", "down_few"):
        monkeypatch.setattr(experts_few, name, Recorder(getattr(experts_few, name), launches))
    monkeypatch.setattr(kernel, "few_kernels", lambda device: experts_few)


@pytest.mark.slow
@pytest.mark.parametrize(("format", "top_k", "D", "inner"), FEW)
def test_few_compiles_ahead_of_time(
    format: Grouped, top_k: int, D: int, inner: int, launches: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No number goes from one thread to another, but for sums at the end."""
    record_few(launches, monkeypatch)
    tiles = choose_few(Shape(8, D, inner, top_k, torch.bfloat16, format.name))
    assert tiles is not None
    given, _ = quantize(draw(2, 8, top_k, D, inner, torch.bfloat16, biased=format == MXFP4), format)
    kernel.run(ExpertsCall(**given), tiles)
    assert len(launches) == 2
    for function, args, kwargs in launches:
        compiled = compile_launch(function, args, kwargs, "sm_90")
        assert compiled.metadata.shared <= 1024 and resources(compiled)["STACK"] == 0
        assert "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16" in compiled.asm["ptx"]
        halves, chunks = 1 if format.numbers == "fp8" else 2, kwargs["CHUNKS"]
        found = len(re.findall(r"ld\.global\.v4", compiled.asm["ptx"]))
        assert found >= 2 * chunks + 2 * halves * chunks, "all of the weights and inputs, 16 bytes at a time"


def test_where_few_tiles_serve() -> None:
    shape = Shape(128, 2048, 768, 8, torch.bfloat16, FEW[0][0].name)
    assert choose_few(shape) == FewTiles(4, 1)
    assert choose_few(Shape(32, 2880, 2880, 4, torch.bfloat16, MXFP4.name)) == FewTiles(4, 2)
    assert choose_few(replace(shape, top_k=10)) is None and choose_few(replace(shape, dtype=torch.float16)) is None
    assert choose_few(replace(shape, inner=2048)) is None, "too much for a warp"
    assert choose_few(replace(shape, D=16384)) is None
    assert choose_few(replace(shape, format=Grouped("int4", 1, 128, "float16", zero=True).name)) is None
    assert choose_few(Shape(128, 2048, 768, 8, torch.bfloat16)) is None


@pytest.mark.slow
@pytest.mark.parametrize(("format", "top_k", "D", "inner"), FEW[::2])
def test_fewer_instructions_than_small(
    format: Grouped,
    top_k: int,
    D: int,
    inner: int,
    launches: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Of a thread for each number of its gate and up rows. With `pytest -s` they are shown."""
    import triton

    record_few(launches, monkeypatch)
    shape = Shape(8, D, inner, top_k, torch.bfloat16, format.name)
    few, small = choose_few(shape), choose_small(shape)
    assert few is not None and small is not None
    given, _ = quantize(draw(1, 8, top_k, D, inner, torch.bfloat16), format)
    found = []
    for tiles, rows, warps in ((few, 16, few.gate_warps), (small, 2 * small.gate_rows, small.gate_warps)):
        launches.clear()
        kernel.run(ExpertsCall(**given), tiles)
        function, args, kwargs = launches[0]
        (tmp_path / "cubin").write_bytes(compile_launch(function, args, kwargs, "sm_90").asm["cubin"])
        tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
        code = subprocess.run([tool, "-sass", tmp_path / "cubin"], capture_output=True, text=True, check=True).stdout
        found.append(len(re.findall(r"^\s+/\*[0-9a-f]{4,}\*/", code, re.MULTILINE)) / (rows * D / 32 / warps))
    print(f"\n{format.name}: {found[0]:.1f} instructions a number, experts_small {found[1]:.1f}")
    assert found[0] < 0.75 * found[1]
