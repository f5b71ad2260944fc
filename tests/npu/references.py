"""What Ascend's operators compute, from their documentation; knows nothing of anabranch.

Each refuses what the documentation does not allow, where the Meta kernel would let it pass. What no expert, page or
request owns is NaN, so that whoever reads it is seen.

T tokens, D width, K experts per token, E experts, N = T · K rows, P pages, S slots in a page, G key-value heads.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F

REFERENCES: dict[str, Callable[..., Any]] = {}
HALF = (torch.float16, torch.bfloat16)
NZ = 29


def operator(function: Callable[..., Any]) -> Callable[..., Any]:
    REFERENCES[f"npu::{function.__name__}"] = function
    return function


@operator
def npu_rms_norm(input: Any, gamma: Any, epsilon: float = 1e-6) -> Any:
    rstd = torch.rsqrt(input.float().square().mean(-1, keepdim=True) + epsilon)
    return (input.float() * rstd * gamma.float()).to(input.dtype), rstd


@operator
def npu_add_rms_norm(x1: Any, x2: Any, gamma: Any, epsilon: float = 1e-6) -> Any:
    x = x1 + x2
    return *npu_rms_norm(x, gamma, epsilon), x


@operator
def npu_rotary_mul(input: Any, r1: Any, r2: Any, rotary_mode: str = "half", rotate: Any = None) -> Any:
    assert input.dim() == r1.dim() == r2.dim() == 4 and rotary_mode == "half" and rotate is None
    assert input.dtype == r1.dtype == r2.dtype and input.shape[-1] == r1.shape[-1] == r2.shape[-1]
    a, b = input.chunk(2, dim=-1)
    return input * r1 + torch.cat([-b, a], dim=-1) * r2


@operator
def npu_swiglu(input: Any, dim: int = -1) -> Any:
    gate, up = input.float().chunk(2, dim=dim)
    return (F.silu(gate) * up).to(input.dtype)


@operator
def npu_geglu(input: Any, dim: int = -1, approximate: int = 1, activate_left: bool = False) -> Any:
    left, right = input.float().chunk(2, dim=dim)
    gate, up = (left, right) if activate_left else (right, left)
    gelu = F.gelu(gate, approximate="tanh" if approximate else "none")
    return (gelu * up).to(input.dtype), gelu.to(input.dtype)


@operator
def npu_scatter_pa_kv_cache(
    key: Any,
    value: Any,
    key_cache: Any,
    value_cache: Any,
    slot_mapping: Any,
    *,
    compress_lens: Any = None,
    compress_seq_offsets: Any = None,
    seq_lens: Any = None,
    cache_mode: str = "PA_NZ",
) -> None:
    assert cache_mode == "Norm" and compress_lens is compress_seq_offsets is seq_lens is None
    assert key.dtype == key_cache.dtype and slot_mapping.dtype in (torch.int32, torch.int64)
    written: dict[int, int] = {}
    for t, slot in enumerate(slot_mapping.tolist()):
        page, offset = divmod(slot, key_cache.shape[1])
        assert slot >= 0 and page < key_cache.shape[0], f"slot {slot} is in no page"
        first = written.setdefault(slot, t)
        same = torch.equal(key[first], key[t]) and torch.equal(value[first], value[t])
        assert same, f"rows {first} and {t} both go to slot {slot}; which comes last is open"
        key_cache[page, offset], value_cache[page, offset] = key[t], value[t]


@operator
def npu_fused_infer_attention_score(
    query: Any,
    key: Any,
    value: Any,
    *,
    atten_mask: Any,
    actual_seq_lengths: list[int],
    actual_seq_lengths_kv: list[int],
    block_table: Any,
    num_heads: int,
    num_key_value_heads: int,
    input_layout: str,
    block_size: int,
    sparse_mode: int,
    scale: float = 1.0,
    pre_tokens: int = 2**31 - 1,
    next_tokens: int = 2**31 - 1,
) -> Any:
    """Queries one request after another, `actual_seq_lengths` where each ends; keys in pages [P, S, G · D]."""
    assert input_layout == "TND" and sparse_mode in (3, 4) and block_table.dtype == torch.int32
    assert atten_mask.shape == (2048, 2048) and torch.equal(atten_mask.bool(), torch.ones(2048, 2048).triu(1).bool())
    assert query.dtype in HALF and key.dim() == 3 and key.is_contiguous() and block_size == key.shape[1]
    assert block_size % 16 == 0 and actual_seq_lengths[-1] == query.shape[0]
    assert len(actual_seq_lengths) == len(actual_seq_lengths_kv) == block_table.shape[0]
    out = torch.full_like(query, math.nan)
    for r, (begin, end) in enumerate(pairwise([0, *actual_seq_lengths])):
        length = actual_seq_lengths_kv[r]
        assert end > begin and length >= end - begin
        pages = block_table[r, : -(-length // block_size)].long()
        k, v = (x[pages].flatten(0, 1)[:length].unflatten(-1, (num_key_value_heads, -1)).float() for x in (key, value))
        k, v = (x.repeat_interleave(num_heads // num_key_value_heads, dim=1) for x in (k, v))
        behind = torch.arange(length - (end - begin), length)[:, None] - torch.arange(length)  # keys before a query
        # Mode 3 is causal; mode 4 a band, which may reach to keys behind a query's own.
        visible = behind >= 0 if sparse_mode == 3 else (behind <= pre_tokens) & (behind >= -next_tokens)
        scores = torch.einsum("qhd,lhd->hql", query[begin:end].float(), k) * scale
        weights = scores.masked_fill(~visible, -math.inf).softmax(-1)
        v = torch.where(visible.any(0)[:, None, None], v, 0.0)  # what nobody sees may hold anything
        out[begin:end] = torch.einsum("hql,lhd->qhd", weights, v).to(query.dtype)
    return out, torch.empty(0)


@operator
def npu_fusion_attention_v3(
    query: Any,
    key: Any,
    value: Any,
    head_num: int,
    input_layout: str,
    pse: Any = None,
    padding_mask: Any = None,
    atten_mask: Any = None,
    scale: float = 1.0,
    keep_prob: float = 1.0,
    pre_tockens: int = 2**31 - 1,
    next_tockens: int = 2**31 - 1,
    inner_precise: int = 0,
    prefix: Any = None,
    actual_seq_qlen: Any = None,
    actual_seq_kvlen: Any = None,
    sparse_mode: int = 0,
    gen_mask_parallel: bool = True,
    sync: bool = False,
    softmax_layout: str = "",
    sink: Any = None,
) -> Any:
    """What torch_npu makes of scaled_dot_product_attention. The first result alone: the others are for gradients."""
    assert input_layout == "BNSD" and keep_prob == 1.0 and query.shape[1] == head_num
    assert pse is padding_mask is prefix is actual_seq_qlen is actual_seq_kvlen is sink is None
    k, v = (x.float().repeat_interleave(head_num // x.shape[1], dim=1) for x in (key, value))
    scores = query.float() @ k.transpose(-1, -2) * scale
    if sparse_mode == 2:  # causal, counted from the first query and the first key
        scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -math.inf)
    else:
        assert sparse_mode in (0, 1)
        scores = scores if atten_mask is None else scores.masked_fill(atten_mask.bool(), -math.inf)
    return ((scores.softmax(-1) @ v).to(query.dtype),)


@operator
def npu_moe_gating_top_k_softmax(x: Any, finished: Any = None, k: int = 1) -> Any:
    assert finished is None and 0 < k <= x.shape[1]
    value, expert = torch.sort(x.float().softmax(-1), dim=-1, descending=True, stable=True)
    row = torch.arange(x.shape[0] * k, dtype=torch.int32).view(k, -1).T.contiguous()
    return value[:, :k].to(x.dtype), expert[:, :k].int(), row


@operator
def npu_moe_init_routing_v2(
    x: Any,
    expert_idx: Any,
    *,
    active_num: int,
    expert_num: int,
    expert_tokens_num_type: int,
    expert_tokens_num_flag: bool,
    active_expert_range: list[int],
    quant_mode: int = -1,
    row_idx_type: int = 0,
) -> Any:
    """Rows in expert order; at [t · K + k], the place of pair (t, k) among them; each expert's number of rows."""
    tokens, top_k = expert_idx.shape
    assert expert_tokens_num_type == 1 and expert_tokens_num_flag and quant_mode == -1 and row_idx_type == 0
    assert active_num == tokens * top_k and active_expert_range == [0, expert_num] and expert_idx.dtype == torch.int32
    flat = expert_idx.flatten().long()
    assert int(flat.min()) >= 0 and int(flat.max()) < expert_num, "an id of no expert"
    order = torch.sort(flat, stable=True).indices
    place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order)))
    return x[order // top_k], place.int(), torch.bincount(flat, minlength=expert_num), torch.empty(tokens * top_k)


@operator
def npu_grouped_matmul(
    x: list[Any],
    weight: list[Any],
    *,
    group_list: Any,
    split_item: int,
    group_type: int,
    group_list_type: int,
) -> Any:
    """Consecutive rows of x times one matrix each: as many as `group_list` counts."""
    (rows,), (stack,) = x, weight
    assert split_item == 2 and group_type == 0 and group_list_type == 1 and group_list.dtype == torch.int64
    assert rows.dtype == stack.dtype and rows.dtype in HALF and len(group_list) == stack.shape[0]
    out = torch.full((rows.shape[0], stack.shape[2]), math.nan, dtype=rows.dtype)
    begin = 0
    for matrix, count in zip(stack, group_list.tolist(), strict=True):
        out[begin : begin + count] = (rows[begin : begin + count].float() @ matrix.float()).to(rows.dtype)
        begin += count
    return [out]


@operator
def npu_moe_finalize_routing(
    expanded_permuted_rows: Any,
    skip1: Any,
    skip2: Any,
    bias: Any,
    scales: Any,
    expanded_src_to_dst_row: Any,
    export_for_source_row: Any,
    drop_pad_mode: int = 0,
    k: int = 1,
) -> Any:
    """Each token's rows, weighted and summed; mode 2: their places stand token by token."""
    assert skip1 is skip2 is bias is export_for_source_row is None and drop_pad_mode == 2
    assert scales.dtype == expanded_permuted_rows.dtype and expanded_src_to_dst_row.dtype == torch.int32
    place = expanded_src_to_dst_row.long()
    assert int(place.min()) >= 0 and int(place.max()) < len(expanded_permuted_rows)
    rows = expanded_permuted_rows[place].float().view(*scales.shape, -1)
    return (rows * scales.float()[..., None]).sum(1).to(expanded_permuted_rows.dtype)


@operator
def npu_format_cast(input: Any, acl_format: int, *, customize_dtype: Any = None, input_dtype: Any = None) -> Any:
    assert acl_format == NZ and input.is_contiguous() and not any(size % 16 for size in input.shape[-2:])
    return input.clone()
