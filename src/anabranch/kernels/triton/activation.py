"""The gated activation as a kernel of its own, for feed-forwards whose product does not have it in its epilogue.

T rows, I intermediate width.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from anabranch import ops
from anabranch.kernels.triton.gated import activate
from anabranch.kernels.triton.launch import cdiv, dependent_launch
from anabranch.ops.activation import ACTIVATIONS

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
BLOCK, NUM_WARPS = 1024, 4


@triton.jit
def gated_activation_kernel(
    x_T2I, y_TI, x_stride,
    I: tl.constexpr, BLOCK: tl.constexpr, ACTIVATION: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < I
    if DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()
    gate = tl.load(x_T2I + t * x_stride + i, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x_T2I + t * x_stride + I + i, mask=inside, other=0.0).to(tl.float32)
    tl.store(y_TI + t * I + i, activate(gate, up, ACTIVATION).to(y_TI.dtype.element_ty), mask=inside)


def accepts(x_T2I: torch.Tensor, kind: str) -> bool:
    return x_T2I.dim() == 2 and x_T2I.dtype in FLOATS and x_T2I.stride(1) == 1 and kind in ACTIVATIONS


@ops.gated_activation.kernel("triton", on=("cuda", "hip", "xpu"), accepts=accepts)
def gated_activation(x_T2I: torch.Tensor, kind: str) -> torch.Tensor:
    rows, width = x_T2I.shape[0], x_T2I.shape[1] // 2
    y_TI = torch.empty(rows, width, dtype=x_T2I.dtype, device=x_T2I.device)
    if y_TI.numel() == 0:
        return y_TI
    dependent = dependent_launch(x_T2I.device)
    gated_activation_kernel[(rows, cdiv(width, BLOCK))](
        x_T2I,
        y_TI,
        x_T2I.stride(0),
        I=width,
        BLOCK=BLOCK,
        ACTIVATION=kind,
        DEPENDENT=dependent,
        num_warps=NUM_WARPS,
        **({"launch_pdl": True} if dependent else {}),
    )
    return y_TI
