"""experts_few without a GPU: its source runs with torch in the place of Gluon. So indices, masks and the order of
numbers are those of the kernels; layouts and instructions are not, see test_quantized_experts."""

import itertools
import re
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
from anabranch.kernels.tuning.experts_tiles import Shape, choose_few
from tests.kernels.triton.test_experts import draw
from tests.kernels.triton.test_quantized_experts import MXFP4, quantize

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
