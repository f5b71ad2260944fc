"""Every op on the platform: each of its kernels that the platform can use, and the op as the engine calls it."""

from collections.abc import Callable, Iterator
from typing import Any

import torch

from anabranch import kernels, ops
from anabranch.conformance import Result, attempt
from anabranch.conformance.judge import copy, faults
from anabranch.ops.op import Op
from anabranch.platforms import Platform

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MOST_SHOWN = 3
"""Faults of one kernel to report; they usually have one cause."""


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

    def check() -> Iterator[str]:
        nonlocal num_judged
        for dtype in DTYPES:
            if dtype not in op.tolerance or platform.compute_dtype(dtype) != dtype:
                continue
            for label, arguments in op.samples(dtype, torch.Generator().manual_seed(0)):
                if label.startswith("FP8 cache") and not platform.fp8_cache:
                    continue
                if accepts is None or accepts(**copy(arguments, platform.device)):
                    num_judged += 1
                    for fault in faults(op, function, arguments, dtype, platform.device):
                        yield f"{label}, {str(dtype).removeprefix('torch.')}: {fault}"
        if not num_judged:
            yield "it accepts none of the op's samples, so nothing was judged"

    result = attempt("ops", op.name, what, check)
    return Result("ops", op.name, f"{what}, {num_judged} samples", result.faults[:MOST_SHOWN])
