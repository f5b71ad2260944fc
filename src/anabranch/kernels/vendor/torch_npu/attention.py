"""Paged attention, prefill chunks and decode rows in one call.

The operator takes lengths from the host, so they are copied from the device: once a step, since all layers pass the
same tensors. That is also why no captured graph may contain it.

T token rows, R requests, H query heads, G key-value heads, D head dim, P pages, S slots in a page, M page-table width.
"""

import functools

import torch
import torch_npu

from anabranch import ops
from anabranch.ops.attention import AttentionCall

CAUSAL, BAND = 3, 4
"""Of `sparse_mode`: both count from the last query and the last key."""
MASK = 2048
"""Rows of the one mask that these modes read, whatever the lengths."""
FAR = 2**31 - 1
PAGE = 16
"""Slots of which a page must be a multiple."""
MOST_HEADS, WIDEST = 64, 512
"""Query heads of a key head; head dim."""


def accepts(call: AttentionCall) -> bool:
    q_THD, k_PSGD, v_PSGE = call.q_THD, call.k_PSGD, call.v_PSGE
    _, page_size, kv_heads, width = k_PSGD.shape
    half = q_THD.dtype in (torch.float16, torch.bfloat16) and k_PSGD.dtype == v_PSGE.dtype == q_THD.dtype
    shaped = page_size % PAGE == 0 and width % 16 == 0 and width <= WIDEST and q_THD.shape[1] <= MOST_HEADS * kv_heads
    whole = k_PSGD.is_contiguous() and v_PSGE.is_contiguous() and k_PSGD.shape == v_PSGE.shape
    return half and shaped and whole and q_THD.shape[0] > 0 and call.sink_H is None


@ops.attention.kernel("torch_npu", on=("npu",), accepts=accepts)
def attention(call: AttentionCall) -> torch.Tensor:
    q_THD, page_table_RM, window = call.q_THD, call.page_table_RM, call.window
    starts, lengths = _on_host(call.query_start_R, call.context_len_R)
    busy = [r for r in range(len(lengths)) if starts[r + 1] > starts[r]]
    if not busy:
        return torch.zeros_like(q_THD)
    if len(busy) < len(lengths):
        page_table_RM = page_table_RM[busy]
    out_THD: torch.Tensor = torch_npu.npu_fused_infer_attention_score(
        q_THD[: starts[-1]],
        call.k_PSGD.flatten(2),
        call.v_PSGE.flatten(2),
        atten_mask=_hidden(q_THD.device),
        actual_seq_lengths=[starts[r + 1] for r in busy],
        actual_seq_lengths_kv=[lengths[r] for r in busy],
        block_table=page_table_RM,
        num_heads=q_THD.shape[1],
        num_key_value_heads=call.k_PSGD.shape[2],
        scale=call.scale,
        input_layout="TND",
        block_size=call.k_PSGD.shape[1],
        sparse_mode=BAND if window else CAUSAL,
        pre_tokens=window - 1 if window else FAR,  # those before the query; the window counts the query too
        next_tokens=0 if window else FAR,
    )[0]
    if starts[-1] == q_THD.shape[0]:
        return out_THD
    return torch.cat([out_THD, torch.zeros_like(q_THD[starts[-1] :])])


@functools.lru_cache(maxsize=1)  # a tensor's hash is its identity
def _on_host(query_start_R: torch.Tensor, context_len_R: torch.Tensor) -> tuple[list[int], list[int]]:
    """A step's tensors are not written after it is made, so the same tensors hold the same numbers."""
    return query_start_R.tolist(), context_len_R.tolist()


@functools.cache
def _hidden(device: torch.device) -> torch.Tensor:
    """True where a query does not see a key."""
    with torch.inference_mode(False):  # it may be used outside of inference mode too
        return torch.triu(torch.ones(MASK, MASK, dtype=torch.bool), diagonal=1).to(device)
