"""Activations in FP8, with a scale for every 128 inputs of a row. T tokens, D inputs, G groups of inputs.

A kernel that writes activations may write them in FP8 too and attach them to its result (`attach`); other activations
are quantised by a kernel of their own.
"""

import torch
import triton
import triton.language as tl

from anabranch.kernels.triton.launch import cdiv, launch_options, wait_for_predecessor

GROUP = 128
"""Inputs that share a scale."""
PER_PROGRAM = 16
"""Groups."""
FEW_TOKENS = 4
"""Up to this many tokens, activations are multiplied as they are."""
MULTIPLE = 16
"""Rows are padded to a multiple, as the vendor's library needs them; what the last rows hold is not defined."""
ATTACHED = "fp8_rows"
"""The attribute of a tensor that holds its rows in FP8."""


@triton.jit
def quantize_groups(x_TD, x_stride, q_TD, scale_GT, scale_stride, D, GROUPS: tl.constexpr, DEPENDENT: tl.constexpr):
    """GROUPS groups of one row."""
    wait_for_predecessor(DEPENDENT)
    row_R = tl.program_id(0).to(tl.int64) + tl.zeros([1], tl.int64)
    first = tl.program_id(1) * GROUPS
    column = (first + tl.arange(0, GROUPS))[:, None] * 128 + tl.arange(0, 128)[None, :]
    place = row_R[:, None, None] * x_stride + column[None, :, :]
    x = tl.load(x_TD + place, mask=(column < D)[None, :, :], other=0.0).to(tl.float32)
    store_groups(x, row_R, row_R >= 0, first, q_TD, scale_GT, scale_stride, D)


@triton.jit
def store_groups(x_RGI, row_R, real_R, first, q_TD, scale_GT, scale_stride, D):
    """Quantise groups from `first` on of R rows, of which those that are real are stored."""
    group = first + tl.arange(0, x_RGI.shape[1])
    most_RG = tl.maximum(tl.max(tl.abs(x_RGI), 2), 1e-10)
    column = group[:, None] * 128 + tl.arange(0, 128)[None, :]
    place = row_R.to(tl.int64)[:, None, None] * D + column[None, :, :]
    q_RGI = (x_RGI * (448.0 / most_RG)[:, :, None]).to(q_TD.dtype.element_ty)
    tl.store(q_TD + place, q_RGI, mask=real_R[:, None, None] & (column < D)[None, :, :])
    place = group[None, :].to(tl.int64) * scale_stride + row_R[:, None]
    tl.store(scale_GT + place, most_RG / 448.0, mask=real_R[:, None] & (group * 128 < D)[None, :])


Rows = tuple[torch.Tensor, torch.Tensor]
"""(q_TD, scale_GT)."""


def new_rows(tokens: int, D: int, device: torch.device) -> Rows:
    rows = cdiv(tokens, MULTIPLE) * MULTIPLE
    q_TD = torch.empty(rows, D, dtype=torch.float8_e4m3fn, device=device)
    return q_TD, torch.empty(cdiv(D, GROUP), rows, dtype=torch.float32, device=device)


def attach(x_TD: torch.Tensor, rows: Rows) -> None:
    setattr(x_TD, ATTACHED, rows)


def quantize_rows(x_TD: torch.Tensor) -> Rows:
    """Those that the kernel that wrote x attached, or new ones."""
    found: Rows | None = getattr(x_TD, ATTACHED, None)
    if found is not None:
        return found
    tokens, D = x_TD.shape
    q_TD, scale_GT = new_rows(tokens, D, x_TD.device)
    quantize_groups[(tokens, cdiv(D, GROUP * PER_PROGRAM))](
        x_TD, x_TD.stride(0), q_TD, scale_GT, q_TD.shape[0], D,
        GROUPS=PER_PROGRAM, num_warps=4, **launch_options(x_TD.device),
    )  # fmt: skip
    return q_TD, scale_GT
