"""The input of a decode step in one launch, and one more for each page table.

R rows, S slots, M page-table width, N columns of it that are copied.
"""

import torch
import triton
import triton.language as tl

from anabranch import ops
from anabranch.kernels.triton.launch import cdiv, launch_options, wait_for_predecessor

BOUNDS = (64, 1024, 4096)
"""The single program has more entries than rows; each bound is a version of the kernel."""
BLOCK = 256
"""Columns that a program copies."""


@triton.jit(do_not_specialize=["num_rows"])
def inputs_kernel(
    packed_3R, last_token_S, token_R, position_R, query_start_R, context_len_R, num_tokens, num_rows,
    ROWS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """ROWS > R."""
    wait_for_predecessor(DEPENDENT)
    row = tl.arange(0, ROWS)
    there = row < num_rows
    slot = tl.load(packed_3R + row, mask=there, other=-1)
    token = tl.load(packed_3R + num_rows + row, mask=there, other=0).to(tl.int64)
    end = tl.load(packed_3R + 2 * num_rows + row, mask=there, other=0)
    owned = slot >= 0
    token = tl.where(token < 0, tl.load(last_token_S + slot, mask=owned & (token < 0), other=0), token)
    end = tl.where(owned, end, 0)
    tl.store(token_R + row, tl.where(owned, tl.maximum(token, 0), 0), mask=there)
    tl.store(position_R + row, tl.maximum(end - 1, 0).to(tl.int64), mask=there)
    tl.store(query_start_R + row, row, mask=row <= num_rows)
    tl.store(context_len_R + row, end, mask=there)
    tl.store(num_tokens, tl.sum(owned.to(tl.int32), 0))


@triton.jit(do_not_specialize=["num_rows", "columns"])
def pages_kernel(
    packed_3R, table_SM, page_table_RN, slot_R, num_rows, stride, columns,
    PAGE_SIZE: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Program (row, block of columns); the first block also writes the token's slot."""
    wait_for_predecessor(DEPENDENT)
    row = tl.program_id(0)
    slot = tl.load(packed_3R + row).to(tl.int64)
    owned = slot >= 0
    table = table_SM + tl.maximum(slot, 0) * stride
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    page = tl.where(owned, tl.load(table + column, mask=column < columns, other=0), 0)
    tl.store(page_table_RN + row.to(tl.int64) * columns + column, page, mask=column < columns)
    if tl.program_id(1) == 0:
        position = tl.maximum(tl.load(packed_3R + 2 * num_rows + row) - 1, 0)
        first = tl.load(table + position // PAGE_SIZE, mask=owned, other=0).to(tl.int64) * PAGE_SIZE
        tl.store(slot_R + row, tl.where(owned, first + position % PAGE_SIZE, -1))


def accepts_inputs(packed_3R: torch.Tensor, last_token_S: torch.Tensor) -> bool:
    return packed_3R.is_contiguous() and last_token_S.is_contiguous() and packed_3R.shape[1] < BOUNDS[-1]


@ops.decode_inputs.kernel("triton", on=("cuda", "hip", "xpu"), accepts=accepts_inputs)
def decode_inputs(
    packed_3R: torch.Tensor, last_token_S: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    num_rows, device = packed_3R.shape[1], packed_3R.device
    token_R, position_R = (torch.empty(num_rows, dtype=torch.int64, device=device) for _ in range(2))
    query_start_R = torch.empty(num_rows + 1, dtype=torch.int32, device=device)
    context_len_R = torch.empty(num_rows, dtype=torch.int32, device=device)
    num_tokens = torch.empty((), dtype=torch.int32, device=device)
    results = token_R, position_R, query_start_R, context_len_R, num_tokens
    rows = next(bound for bound in BOUNDS if bound > num_rows)
    inputs_kernel[(1,)](
        packed_3R, last_token_S, *results, num_rows,
        ROWS=rows, num_warps=min(rows // 32, 8), **launch_options(device),
    )  # fmt: skip
    return results


def accepts_pages(packed_3R: torch.Tensor, table_SM: torch.Tensor, page_size: int, columns: int) -> bool:
    return packed_3R.is_contiguous() and table_SM.stride(1) == 1 and columns <= table_SM.shape[1]


@ops.decode_pages.kernel("triton", on=("cuda", "hip", "xpu"), accepts=accepts_pages)
def decode_pages(
    packed_3R: torch.Tensor, table_SM: torch.Tensor, page_size: int, columns: int
) -> tuple[torch.Tensor, torch.Tensor]:
    num_rows, device = packed_3R.shape[1], packed_3R.device
    page_table_RN = torch.empty(num_rows, columns, dtype=torch.int32, device=device)
    slot_R = torch.empty(num_rows, dtype=torch.int64, device=device)
    if num_rows:
        pages_kernel[(num_rows, max(1, cdiv(columns, BLOCK)))](
            packed_3R, table_SM, page_table_RN, slot_R, num_rows, table_SM.stride(0), columns,
            PAGE_SIZE=page_size, BLOCK=BLOCK, num_warps=2, **launch_options(device),
        )  # fmt: skip
    return page_table_RN, slot_R
