"""Every op on the platform: each kernel that is bound to it, and the op as the engine calls it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from anabranch import kernels, ops
from anabranch.conformance.judge import copy, faults
from anabranch.conformance.result import Result, attempt
from anabranch.ops.op import Op
from anabranch.platforms import Platform

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MOST_SHOWN = 3
"""Faults of one kernel; it usually has one reason for all."""


def check_ops(platform: Platform) -> Iterator[Result]:
    kernels.bind(platform)
    for op in ops.OPS.values():
        for kernel in op.usable(platform):
            yield judged(op, kernel.provider, kernel.function, kernel.accepts, platform)
        yield judged(op, "as called", op, None, platform)


def judged(
    op: Op[..., Any], what: str, function: Callable[..., Any], accepts: Callable[..., bool] | None, platform: Platform
) -> Result:
    num_judged = 0

    def check() -> list[str]:
        nonlocal num_judged
        wrong: list[str] = []
        for dtype in DTYPES:
            if dtype not in op.tolerance or platform.compute_dtype(dtype) != dtype:
                continue
            for label, arguments in op.samples(dtype, torch.Generator().manual_seed(0)):
                if accepts is None or accepts(**copy(arguments, platform.device)):
                    found = faults(op, function, arguments, dtype, platform.device)
                    wrong += [f"{label}, {str(dtype).removeprefix('torch.')}: {fault}" for fault in found]
                    num_judged += 1
        if not num_judged:
            wrong.append("it accepts none of the op's samples, so nothing was judged")
        return wrong[:MOST_SHOWN]

    result = attempt("ops", op.name, what, check)
    return Result("ops", op.name, f"{what}, {num_judged} samples", result.faults)
