"""Numbers of 8 or 4 bits with a scale for every group of inputs: w[n, k] = (q[n, k] − zero) · scale[n / R, k / G].

One format covers block FP8 (R = G = 128), FP8 and INT8 with a scale for a row (R = 1, one group), INT4 in groups with
or without zero points, and MXFP4 (scales are powers of two). Numbers of 4 bits are two in a byte: of every span of
inputs the first half is in the lower halves of its bytes, the second half in the upper ones. So a kernel multiplies the
bytes that it has loaded by two runs of neighbouring inputs, and rearranges nothing.

N outputs, K inputs. Leading dimensions, such as experts, come first in every tensor.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from anabranch.formats.format import Format, Index, Shape, TensorSpec, register_parser

if TYPE_CHECKING:
    import torch

STORED = {"fp8": "float8_e4m3fn", "int8": "int8", "int4": "uint8", "fp4": "uint8"}
"""The kinds of numbers, and the dtype that holds them. int4 is stored as 0 to 15, which stand for −8 to 7 where there
are no zero points."""
SCALES = {"float32": "", "float16": "_f16", "bfloat16": "_bf16", "uint8": "_e8m0"}
"""dtypes of scales, and what they add to the name of the format; uint8: the exponent of a power of two, plus 127."""
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""What the lower three bits of an fp4 number stand for; the fourth is the sign."""
SPAN = 128
"""The most inputs that are packed together."""
_NAME = re.compile(r"(fp8|int8|int4|fp4)_(\d+)x(\d+)(_f16|_bf16|_e8m0)?(_zero)?")


@dataclass(frozen=True)
class Grouped(Format):
    numbers: str
    """A key of STORED."""
    rows: int = 1
    """R, outputs that share a scale."""
    group: int = 0
    """G, inputs that share a scale; 0: all of them."""
    scale: str = "float32"
    """A key of SCALES."""
    zero: bool = False
    """There is a zero point for each scale."""

    @property
    def name(self) -> str:  # type: ignore[override]
        return f"{self.numbers}_{self.rows}x{self.group}{SCALES[self.scale]}{'_zero' if self.zero else ''}"

    @property
    def kind(self) -> str:
        return self.numbers

    @property
    def is_block_fp8(self) -> bool:
        return (self.numbers, self.rows, self.group) == ("fp8", 128, 128)

    @property
    def bits(self) -> int:
        return int(self.numbers[-1])

    def span(self, inputs: int) -> int:
        """Inputs that are packed together, where numbers have 4 bits."""
        return math.gcd(SPAN, self.group or inputs)

    def num_groups(self, inputs: int) -> int:
        return -(-inputs // self.group) if self.group else 1

    def tensors(self, shape: Shape) -> dict[str, TensorSpec]:
        *lead, outputs, inputs = shape
        if self.bits == 4 and (inputs % (self.group or 2) or self.span(inputs) % 2):
            raise ValueError(f"{inputs} inputs are no multiple of the group size {self.group or 2} of {self.name}")
        groups = self.num_groups(inputs)
        specs = {
            "data": TensorSpec((*lead, outputs, inputs * self.bits // 8), STORED[self.numbers]),
            "scale": TensorSpec((*lead, -(-outputs // self.rows), groups), self.scale),
        }
        return specs | ({"zero": TensorSpec((*lead, outputs, groups), "uint8")} if self.zero else {})

    def part(self, tensor: str, index: Index, shape: Shape, shared: bool = False) -> Index:
        if tensor == "data" and self.bits == 4 and len(index) == len(shape):
            taken, half = self._divide(index[-1], self.span(shape[-1]), shape[-1]), self.span(shape[-1]) // 2
            return (*index[:-1], _times(taken, half))
        # What one element along each of the last two dimensions of the tensor stands for, in the logical weight.
        sizes = {"data": (1, 1), "scale": (self.rows, self.group), "zero": (1, self.group)}[tensor]
        lead = len(shape) - len(sizes)
        if shared and not self.group and tensor != "data":
            index = index[: lead + 1]  # an output's one scale serves all its inputs
        scaled = map(self._divide, index[lead:], sizes, shape[lead:])
        return (*index[:lead], *scaled)

    def _divide(self, place: int | slice, size: int, length: int) -> slice:
        if size == 1 and isinstance(place, slice):
            return place
        begin, end, step = place.indices(length) if isinstance(place, slice) else (place, place + 1, 1)
        if (begin, end) == (0, length) and step == 1:
            return slice(None)
        if step != 1 or not size or begin % size or (end % size and end != length):
            raise ValueError(f"{self.name}: {begin}:{end} of {length} are not whole blocks of {size or length}")
        return slice(begin // size, -(-end // size))

    def dequantize(self, tensors: Mapping[str, torch.Tensor], shape: Shape, dtype: torch.dtype) -> torch.Tensor:
        import torch

        data, scale = tensors["data"], tensors["scale"]
        if self.bits == 4:
            data = unpack(data, self.span(shape[-1]))
        if self.numbers == "fp4":
            table = torch.tensor(FP4, device=data.device)
            q = table[(data & 7).long()] * (1 - 2 * (data >> 3).float())
        else:
            q = data.float()
            if self.zero:
                q = q - self._spread(tensors["zero"].float(), shape, 1)
            elif self.numbers == "int4":
                q = q - 8
        scale = torch.exp2(scale.float() - 127) if self.scale == "uint8" else scale.float()
        return (q * self._spread(scale, shape, self.rows)).to(dtype)

    def _spread(self, values: torch.Tensor, shape: Shape, rows: int) -> torch.Tensor:
        """One value for every number of the weight, from one for `rows` outputs and a group of inputs."""
        outputs, inputs = shape[-2:]
        if rows > 1:
            values = values.repeat_interleave(rows, -2)[..., :outputs, :]
        return values.repeat_interleave(self.group, -1)[..., :inputs] if self.group else values

    def quantize(self, dense: torch.Tensor) -> dict[str, torch.Tensor]:
        """By rounding to the nearest. Zero points, if it has them, are all 8."""
        import torch

        *lead, outputs, inputs = dense.shape
        self.tensors(tuple(dense.shape))
        dense, group = dense.float(), self.group or inputs
        pad = (0, -inputs % group, 0, -outputs % self.rows)
        padded = torch.nn.functional.pad(dense, pad) if any(pad) else dense  # pad copies in any case
        blocks = padded.unflatten(-1, (-1, group)).unflatten(-3, (-1, self.rows))
        low, high = blocks.amin((-3, -1)), blocks.amax((-3, -1))
        most = torch.maximum(high, -low).clamp_min(1e-20)
        if self.numbers == "fp8":
            scale = most / 448
        elif self.numbers == "int8":
            scale = most / 127
        elif self.numbers == "int4":
            scale = torch.maximum(high / 7, -low / 8).clamp_min(1e-20)
        else:
            exponent = (torch.log2(most).floor() - 2).clamp(-127, 127)
            scale = exponent + 127
        scale = scale.to(getattr(torch, self.scale))
        used = torch.exp2(scale.float() - 127) if self.scale == "uint8" else scale.float()
        q = dense / self._spread(used, tuple(dense.shape), self.rows).clamp_min(1e-38)
        if self.numbers == "fp8":
            return {"data": q.clamp(-448, 448).to(torch.float8_e4m3fn), "scale": scale}
        if self.numbers == "int8":
            return {"data": q.round().clamp(-127, 127).to(torch.int8), "scale": scale}
        if self.numbers == "int4":
            code = (q.round().clamp(-8, 7) + 8).to(torch.uint8)
        else:
            levels = torch.tensor(FP4, device=dense.device)
            code = torch.bucketize(q.abs(), (levels[1:] + levels[:-1]) / 2).to(torch.uint8)
            code = code | ((q < 0).to(torch.uint8) << 3)
        zero = {"zero": torch.full_like(scale, 8, dtype=torch.uint8)} if self.zero else {}
        return {"data": pack(code, self.span(inputs)), "scale": scale} | zero


def _times(place: slice, factor: int) -> slice:
    return place if place == slice(None) else slice(place.start * factor, place.stop * factor)


def pack(numbers: torch.Tensor, span: int) -> torch.Tensor:
    """uint8 numbers of 4 bits [..., K] in bytes [..., K / 2], as the format has them."""
    low, high = numbers.unflatten(-1, (-1, 2, span // 2)).unbind(-2)
    return (low | (high << 4)).flatten(-2)


def unpack(data: torch.Tensor, span: int) -> torch.Tensor:
    """The inverse of `pack`."""
    import torch

    halves = data.unflatten(-1, (-1, span // 2))
    return torch.stack((halves & 15, halves >> 4), -2).flatten(-3)


def parse(name: str) -> Grouped | None:
    found = _NAME.fullmatch(name)
    if found is None:
        return None
    numbers, rows, group, suffix, zero = found.groups()
    scale = next(dtype for dtype, ending in SCALES.items() if ending == (suffix or ""))
    return Grouped(numbers, int(rows), int(group), scale, bool(zero))


register_parser(parse)
