"""experts_few on a GPU; compiled for one; and without one, by its source with torch in the place of Gluon: indices,
masks and the order of numbers are those of the kernels. What its instructions do: see test_quantized_experts."""

import itertools
import re
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from anabranch import ops
from anabranch.formats import Grouped
from anabranch.formats.grouped import FP4
from anabranch.ops.experts import ExpertsCall

pytest.importorskip("triton")
from anabranch.kernels.triton import experts as kernel
from anabranch.kernels.tuning.experts_tiles import FewTiles, Shape, choose_few, choose_small
from tests.kernels.triton.ahead_of_time import resources
from tests.kernels.triton.test_experts import Recorder, compile_launch, draw, launches, poison
from tests.kernels.triton.test_quantized_experts import MXFP4, check, quantize

__all__ = ["launches", "poison"]

SOURCE = Path(kernel.__file__).with_name("experts_few.py")
LEVELS = torch.tensor([*FP4, *(-x for x in FP4)], dtype=torch.float64)
CASES = [
    (Grouped("int4", 1, 128, "bfloat16"), 8, 256, 128),
    (Grouped("int4", 1, 128, "float16"), 3, 640, 256),
    (MXFP4, 4, 352, 160),
    (MXFP4, 1, 96, 320),
    (Grouped("fp8", 128, 128, "float32"), 6, 272, 144),
    (Grouped("fp8", 128, 128, "bfloat16"), 2, 528, 80),
]


class Pointer:
    """A tensor and places in it."""

    def __init__(self, tensor: torch.Tensor, place: Any = 0) -> None:
        self.tensor, self.place = tensor.reshape(-1), place
        self.dtype = SimpleNamespace(element_ty=tensor.dtype)

    def __add__(self, place: Any) -> "Pointer":
        return Pointer(self.tensor, self.place + place)


def point(value: Any) -> Any:
    return Pointer(value) if isinstance(value, torch.Tensor) else value


def load(pointer: Pointer, mask: Any = True, other: float = 0) -> torch.Tensor:
    place, mask = torch.broadcast_tensors(torch.as_tensor(pointer.place), torch.as_tensor(mask))
    assert not (mask & ((place < 0) | (place >= pointer.tensor.numel()))).any(), "outside of the tensor"
    value = pointer.tensor[torch.where(mask, place, 0)]
    return torch.where(mask, value, torch.tensor(other, dtype=value.dtype))


def store(pointer: Pointer, value: torch.Tensor, mask: torch.Tensor) -> None:
    pointer.tensor[pointer.place[mask]] = value[mask]


def octets(words: torch.Tensor) -> list[torch.Tensor]:
    return [words.long() >> 8 * place & 255 for place in range(4)]


def halves(words: torch.Tensor) -> list[torch.Tensor]:
    return [byte & 15 for byte in octets(words)] + [byte >> 4 for byte in octets(words)]


def activate(gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
    if activation == "silu":
        return torch.nn.functional.silu(gate) * up
    gate, up = gate.clamp(max=7), up.clamp(-7, 7)
    return gate * torch.sigmoid(1.702 * gate) * (up + 1)


def kernels() -> tuple[Any, list[int]]:
    """The kernels as functions of one program, and its ids."""
    program = [0, 0]
    gl = SimpleNamespace(
        constexpr=int,
        **{name: getattr(torch, name) for name in ("int64", "int32", "int16", "bfloat16", "float32")},
        **dict.fromkeys(
            ("DistributedLinearLayout", "SliceLayout", "NVMMADistributedLayout", "DotOperandLayout"),
            lambda *args, **kwargs: None,
        ),
        program_id=lambda axis: torch.tensor(program[axis]),
        arange=lambda begin, end, layout: torch.arange(begin, end),
        load=load,
        store=store,
        static_range=range,
        where=lambda chosen, a, b: torch.where(chosen, torch.as_tensor(a), torch.as_tensor(b)),
        minimum=lambda a, b: torch.minimum(torch.as_tensor(a), torch.as_tensor(b)),
        cdiv=lambda a, b: -(-a // b),
        zeros=lambda shape, dtype, layout: torch.zeros(shape, dtype=dtype),
        sum=torch.sum,
        reshape=torch.reshape,
        permute=torch.permute,
        join=lambda a, b: torch.stack(torch.broadcast_tensors(a, b), -1),
        split=lambda x: x.unbind(-1),
        expand_dims=torch.unsqueeze,
        convert_layout=lambda x, layout, assert_trivial: x,
    )
    source = SOURCE.read_text()
    source = source[source.index("@gluon.constexpr_function") :]
    source = re.sub(r"@gluon\.\w+(\(.*?\))?\n", "", source)
    source = re.sub(r"\w+\.type\.layout(\.parent)?", "None", source)
    source = source.replace(".to(gl.bfloat16, bitcast=True)", ".view(gl.bfloat16)")
    names: dict[str, Any] = {
        "gl": gl,
        "activate": activate,
        "mma_v2": lambda a, b, acc: a.float() @ b.float() + acc,
        "unpack_int4": lambda words: [(half - 8).bfloat16() for half in halves(words)],
        "unpack_fp4": lambda words, scale: [
            (LEVELS[half] * 2.0**-126 * scale.double()).bfloat16() for half in halves(words)
        ],
        "unpack_fp8": lambda words: [
            byte.to(torch.uint8).view(torch.float8_e4m3fn).bfloat16() for byte in octets(words)
        ],
        **dict.fromkeys(("barrier", "gdc_wait", "gdc_launch_dependents"), lambda: None),
    }
    exec(compile(source, str(SOURCE), "exec"), names)
    return SimpleNamespace(gate_up_few=names["gate_up_few"], down_few=names["down_few"]), program


@pytest.mark.slow
@pytest.mark.parametrize(("format", "top_k", "D", "inner"), CASES)
def test_few_is_the_reference(format: Grouped, top_k: int, D: int, inner: int, monkeypatch: pytest.MonkeyPatch) -> None:
    functions, program = kernels()

    class Launcher:
        def __init__(self, name: str) -> None:
            self.function = getattr(functions, name)

        def __getitem__(self, grid: tuple[int, int]) -> Any:
            def launch(*given: Any, **named: Any) -> None:
                named = {name: value for name, value in named.items() if name not in ("num_warps", "launch_pdl")}
                of = [Pointer(x) if isinstance(x, torch.Tensor) else x for x in given]
                for program[0], program[1] in itertools.product(range(grid[0]), range(grid[1])):
                    self.function(
                        *of, **{n: Pointer(x) if isinstance(x, torch.Tensor) else x for n, x in named.items()}
                    )

            return launch

    launchers = SimpleNamespace(gate_up_few=Launcher("gate_up_few"), down_few=Launcher("down_few"))
    monkeypatch.setattr(kernel, "few_kernels", lambda device: launchers)

    def unwritten(x: torch.Tensor, *shape: Any) -> torch.Tensor:
        return torch.full(torch.empty(*shape, device="meta").shape, float("nan"), dtype=x.dtype)

    monkeypatch.setattr(torch.Tensor, "new_empty", unwritten)
    tiles = choose_few(Shape(8, D, inner, top_k, torch.bfloat16, format.name))
    assert tiles is not None
    for tokens, biased in ((1, True), (3, False)):
        activation = "clamped_swiglu" if biased else "silu"
        arguments = draw(tokens, 8, top_k, D, inner, torch.bfloat16, biased=biased, activation=activation)
        if tokens > 1:
            arguments["expert_TK"][0] = -1
            arguments["expert_TK"][1, 0] = -1
        call = ExpertsCall(**quantize(arguments, format)[0])._replace(scaling=1.7)
        found, wanted = kernel.run(call, tiles).float(), ops.experts.reference(call).float()
        assert (found - wanted).norm() <= 6e-3 * wanted.norm()


# -- On a GPU, or compiled for one


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
