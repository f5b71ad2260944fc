"""The gated activation as a separate kernel, for feed-forwards whose product does not apply it; and the sum of two
feed-forwards, one of them scaled by a gate.

T rows, I intermediate width, D width.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from anabranch import ops
from anabranch.kernels.triton.exact import EXACT
from anabranch.kernels.triton.gated import activate
from anabranch.kernels.triton.launch import FLOATS, cdiv, launch_options, wait_for_predecessor
from anabranch.ops.activation import ACTIVATIONS

BLOCK, NUM_WARPS = 1024, 4


@triton.jit
def gated_activation_kernel(
    x_T2I, y_TI, x_stride,
    I: tl.constexpr, BLOCK: tl.constexpr, ACTIVATION: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < I
    wait_for_predecessor(DEPENDENT)
    gate = tl.load(x_T2I + t * x_stride + i, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x_T2I + t * x_stride + I + i, mask=inside, other=0.0).to(tl.float32)
    tl.store(y_TI + t * I + i, activate(gate, up, ACTIVATION).to(y_TI.dtype.element_ty), mask=inside)


@triton.jit
def add_gated_kernel(x_TD, gated_TD, gate_T1, y_TD, D: tl.constexpr, BLOCK: tl.constexpr, DEPENDENTS: tl.constexpr):
    """Rounded as the reference rounds. It never waits: see `add_gated`."""
    t = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = d < D
    if DEPENDENTS:
        gdc_launch_dependents()
    dtype = y_TD.dtype.element_ty
    gate = tl.sigmoid(tl.load(gate_T1 + t).to(tl.float32)).to(dtype).to(tl.float32)
    gated = tl.load(gated_TD + t * D + d, mask=inside, other=0.0).to(tl.float32)
    x = tl.load(x_TD + t * D + d, mask=inside, other=0.0).to(tl.float32)
    y = x + (gate * gated).to(dtype).to(tl.float32)
    tl.store(y_TD + t * D + d, y.to(dtype), mask=inside)


def accepts(x_T2I: torch.Tensor, kind: str) -> bool:
    return x_T2I.dim() == 2 and x_T2I.dtype in FLOATS and x_T2I.stride(1) == 1 and kind in ACTIVATIONS


@ops.gated_activation.kernel("triton", on=("cuda", "hip", "xpu"), accepts=accepts)
def gated_activation(x_T2I: torch.Tensor, kind: str) -> torch.Tensor:
    rows, width = x_T2I.shape[0], x_T2I.shape[1] // 2
    y_TI = torch.empty(rows, width, dtype=x_T2I.dtype, device=x_T2I.device)
    if y_TI.numel() == 0:
        return y_TI
    gated_activation_kernel[(rows, cdiv(width, BLOCK))](
        x_T2I, y_TI, x_T2I.stride(0),
        I=width, BLOCK=BLOCK, ACTIVATION=kind, num_warps=NUM_WARPS, **launch_options(x_T2I.device),
    )  # fmt: skip
    return y_TI


def accepts_sum(x_TD: torch.Tensor, gated_TD: torch.Tensor, gate_T1: torch.Tensor) -> bool:
    tensors = (x_TD, gated_TD, gate_T1)
    return (
        x_TD.dim() == 2
        and x_TD.shape == gated_TD.shape
        and gate_T1.shape == (x_TD.shape[0], 1)
        and x_TD.dtype in FLOATS
        and all(tensor.dtype == x_TD.dtype and tensor.is_contiguous() for tensor in tensors)
    )


@ops.add_gated.kernel("triton", on=("cuda", "hip", "xpu"), accepts=accepts_sum)
def add_gated(x_TD: torch.Tensor, gated_TD: torch.Tensor, gate_T1: torch.Tensor) -> torch.Tensor:
    """Launched after all predecessors are done: two streams join here, and dependent launch is safe with one
    predecessor only. Its successor has one, and may start early."""
    rows, width = x_TD.shape
    y_TD = torch.empty(rows, width, dtype=x_TD.dtype, device=x_TD.device)
    if y_TD.numel() == 0:
        return y_TD
    add_gated_kernel[(rows, cdiv(width, BLOCK))](
        x_TD, gated_TD, gate_T1, y_TD,
        D=width, BLOCK=BLOCK, DEPENDENTS=launch_options(x_TD.device)["DEPENDENT"], num_warps=NUM_WARPS,
        **EXACT,  # without it the product is not rounded
    )  # fmt: skip
    return y_TD
