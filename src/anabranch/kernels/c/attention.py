"""Paged attention of steps in which every request has one row, read from the pages where they are.

R rows and requests, H query heads, G key-value heads, D head dim, E that of values, S slots in a page, M page-table
width.
"""

import torch

from anabranch import ops
from anabranch.kernels.c.library import function, is_plain, pointer
from anabranch.ops.attention import AttentionCall

compute = function("attention")


def accepts(call: AttentionCall) -> bool:
    q_THD, requests = call.q_THD, call.context_len_R.shape[0]
    return call.max_query == 1 and q_THD.shape[0] == requests and fits(call)


def fits(call: AttentionCall) -> bool:
    """But for rows that share a request."""
    q_THD = call.q_THD
    heads = q_THD.dtype == torch.float32 and q_THD.stride(2) == 1 and q_THD.stride(1) == q_THD.shape[2]
    tables = call.page_table_RM.is_contiguous() and call.context_len_R.is_contiguous()
    return heads and tables and is_plain(call.k_PSGD, call.v_PSGE, call.sink_H)


@ops.attention.kernel("c", on=("cpu",), accepts=accepts)
def attention(call: AttentionCall) -> torch.Tensor:
    q_THD, page_table_RM = call.q_THD, call.page_table_RM
    (rows, num_heads, dim), (_, page_size, num_kv_heads, value_dim) = q_THD.shape, call.v_PSGE.shape
    out_THE = q_THD.new_empty(rows, num_heads, value_dim)
    compute(
        out_THE.data_ptr(),
        q_THD.data_ptr(),
        call.k_PSGD.data_ptr(),
        call.v_PSGE.data_ptr(),
        page_table_RM.data_ptr(),
        call.context_len_R.data_ptr(),
        pointer(call.sink_H),
        rows,
        num_heads,
        num_kv_heads,
        dim,
        value_dim,
        page_size,
        page_table_RM.shape[1],
        q_THD.stride(0),
        call.window,
        call.scale,
        call.v_scale,
        torch.get_num_threads(),
    )
    return out_THE
