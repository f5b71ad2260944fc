"""PTX on arrays of numbers: what inline assembly of the kernels does to each element."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import torch

from tests.kernels.emulation.values import Pointer, Value, as_value, bits_of, from_bits

WIDTHS = {"h": 16, "r": 32, "l": 64}
"""Bits of a register, by its letter."""


def instructions(text: str) -> list[str]:
    lines = [line.strip() for line in re.sub(r"[{}]\s*\n|\n\s*[{}]", "\n", text).replace("; ", ";\n").splitlines()]
    return [line.rstrip(";").strip() for line in lines if line.strip(" {};") and ".reg" not in line]


def lanes(x: Any) -> list[np.ndarray]:
    return [np.asarray(x) & 0xFFFF, np.asarray(x) >> 16]


def paired(low: Any, high: Any) -> np.ndarray:
    return (np.asarray(low).astype(np.uint32) | (np.asarray(high).astype(np.uint32) << 16)).astype(np.uint32)


def fused(a: np.ndarray, b: Any, c: Any) -> np.ndarray:
    """a · b + c in bf16."""
    x, y, z = (
        torch.from_numpy(np.int32(n) << np.int32(16) | np.zeros_like(np.atleast_1d(a), np.int32)) for n in (a, b, c)
    )
    exact = x.view(torch.float32).double() * y.view(torch.float32) + z.view(torch.float32)
    return exact.float().to(torch.bfloat16).view(torch.int16).numpy().astype(np.uint32) & 0xFFFF


def emulate(ptx: list[str], given: dict[str, Any]) -> dict[str, Any]:
    """Registers after some instructions: `given` are those before; pointers are addresses."""
    registers = dict(given)

    def value(name: str) -> Any:
        return registers[name] if name in registers else np.uint32(int(name, 0))

    for line in ptx:
        operation, rest = line.split(maxsplit=1)
        if operation.startswith("prefetch"):
            continue
        if operation == "ld.global.u16":
            name, address = re.fullmatch(r"(.*), \[(.*)\]", rest).groups()  # type: ignore[union-attr]
            registers[name] = registers[address]().astype(np.uint32)
        elif operation == "mov.b32" and rest.startswith("{"):  # one number apart
            names, source = re.fullmatch(r"\{(.*)\}, (.*)", rest).groups()  # type: ignore[union-attr]
            registers.update(zip(names.split(", "), lanes(value(source))))
        elif operation == "mov.b32" and "{" in rest:  # two together
            name, low, high = re.fullmatch(r"(.*), \{(.*), (.*)\}", rest).groups()  # type: ignore[union-attr]
            registers[name] = paired(value(low), value(high))
        else:
            name, *sources = rest.split(", ")
            result = compute(operation, [value(source) for source in sources], sources)
            registers[name] = (np.asarray(result).astype(np.uint64) & np.uint64(0xFFFFFFFF)).astype(np.uint32)
    return registers


def compute(operation: str, of: list[Any], sources: list[str]) -> Any:
    by_lane = [lanes(x) for x in of]
    if operation in ("mov.b32", "mov.u32", "cvt.u32.u16"):
        return of[0]
    if operation == "prmt.b32":
        both = np.asarray(of[0]).astype(np.uint64) | (np.asarray(of[1]).astype(np.uint64) << np.uint64(32))
        result = np.zeros_like(both)
        for place in range(4):
            chosen = int(of[2]) >> 4 * place & 15
            assert chosen < 8
            result |= (both >> np.uint64(8 * chosen) & np.uint64(255)) << np.uint64(8 * place)
        return result
    if operation == "and.b32":
        return of[0] & of[1]
    if operation in ("mul.lo.u32", "mad.lo.u32"):
        product = np.asarray(of[0]).astype(np.uint64) * np.uint64(of[1])
        return product + np.uint64(of[2]) if operation == "mad.lo.u32" else product
    if operation == "min.u16x2":
        return paired(*(np.minimum(a, b) for a, b in zip(*by_lane)))
    if operation in ("shl.b32", "shr.b32"):
        wide = np.asarray(of[0]).astype(np.uint64)
        return wide << np.uint64(of[1]) if operation == "shl.b32" else wide >> np.uint64(of[1])
    if operation == "lop3.b32":
        assert sources[3] == "0xEA"
        return (of[0] & of[1]) | of[2]
    if operation in ("add.rn.bf16x2", "add.bf16x2"):
        return paired(*(fused(a, 0x3F80, b) for a, b in zip(*by_lane)))
    if operation == "sub.bf16x2":
        return paired(*(fused(a, 0x3F80, b ^ 0x8000) for a, b in zip(*by_lane)))
    if operation == "fma.rn.bf16x2":
        return paired(*(fused(a, b, c) for a, b, c in zip(*by_lane)))
    assert operation == "mul.bf16x2", operation
    return paired(*(fused(a, b, 0x8000) for a, b in zip(*by_lane)))


def inline_asm_elementwise(
    asm: str, constraints: str, args: Any, dtype: Any, is_pure: bool = False, pack: int = 1, **_: Any
) -> Any:
    """`pack` elements share a register; which ones is free, as the same instructions run for all."""
    kinds = [kind.strip().lstrip("=&") for kind in constraints.split(",")]
    num_outputs = constraints.count("=")
    dtypes = list(dtype) if isinstance(dtype, (tuple, list)) else [dtype]
    operands = [x if isinstance(x, (Value, Pointer)) else as_value(x) for x in args]
    shape = torch.broadcast_shapes(*(x.shape for x in operands))
    registers: dict[str, Any] = {}
    names = iter(range(num_outputs, len(kinds)))
    for x in operands:
        if isinstance(x, Pointer):
            registers[f"${next(names)}"] = lambda x=x: read(x, shape)
            continue
        bits = bits_of(x).expand(shape).reshape(-1, pack).numpy().astype(np.uint64)
        width = x.dtype.primitive_bitwidth
        per_register = max(1, min(pack, WIDTHS[kinds[num_outputs]] // width))
        for first in range(0, pack, per_register):
            word = sum(bits[:, first + i] << np.uint64(width * i) for i in range(per_register))
            registers[f"${next(names)}"] = np.asarray(word).astype(np.uint32)
    found = emulate(instructions(asm), registers)
    results, names = [], iter(range(num_outputs))
    for kind in dtypes:
        width = kind.primitive_bitwidth
        per_register = max(1, min(pack, 32 // width))
        columns = []
        for _ in range(0, pack, per_register):
            word = np.asarray(found[f"${next(names)}"]).astype(np.uint64)
            word = np.broadcast_to(word, (max(1, int(np.prod(shape)) // pack),))
            columns += [word >> np.uint64(width * i) & np.uint64((1 << width) - 1) for i in range(per_register)]
        bits = np.stack(columns, -1).astype(np.int64)
        results.append(from_bits(torch.from_numpy(bits).reshape(shape), kind))
    return tuple(results) if isinstance(dtype, (tuple, list)) else results[0]


def read(pointer: Pointer, shape: Any) -> np.ndarray:
    offset, _, _ = pointer.places(None)
    found = bits_of(Value(pointer.memory[offset].to(torch.int64), pointer.element))
    return found.expand(shape).reshape(-1).numpy()


NAMES = {"inline_asm_elementwise": inline_asm_elementwise}
