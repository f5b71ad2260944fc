"""Activations in FP8, with a scale for every 128 inputs of a row. T tokens, D inputs, G groups of inputs."""

import torch
import triton
import triton.language as tl

from anabranch.kernels.triton.launch import cdiv, launch_options, wait_for_predecessor

GROUP = 128
"""Inputs that share a scale."""
PER_PROGRAM = 16
"""Groups."""


@triton.jit
def quantize_groups(x_TD, x_stride, q_TD, scale_GT, scale_stride, D, GROUPS: tl.constexpr, DEPENDENT: tl.constexpr):
    """GROUPS groups of one row."""
    wait_for_predecessor(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    column = group[:, None] * 128 + tl.arange(0, 128)[None, :]
    x = tl.load(x_TD + row * x_stride + column, mask=column < D, other=0.0).to(tl.float32)
    most = tl.maximum(tl.max(tl.abs(x), 1), 1e-10)
    tl.store(q_TD + row * D + column, (x * (448.0 / most)[:, None]).to(q_TD.dtype.element_ty), mask=column < D)
    tl.store(scale_GT + group * scale_stride + row, most / 448.0, mask=group * 128 < D)


def quantize_rows(x_TD: torch.Tensor, multiple: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """(rows, scales [G, T]). There are as many rows as the next multiple of `multiple`; what the last hold is not
    defined."""
    tokens, D = x_TD.shape
    rows = cdiv(tokens, multiple) * multiple
    q_TD = torch.empty(rows, D, dtype=torch.float8_e4m3fn, device=x_TD.device)
    scale_GT = torch.empty(cdiv(D, GROUP), rows, dtype=torch.float32, device=x_TD.device)
    quantize_groups[(tokens, cdiv(D, GROUP * PER_PROGRAM))](
        x_TD, x_TD.stride(0), q_TD, scale_GT, rows, D, GROUPS=PER_PROGRAM, num_warps=4, **launch_options(x_TD.device)
    )
    return q_TD, scale_GT
