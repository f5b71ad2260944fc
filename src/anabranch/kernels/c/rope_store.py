"""Head norms, rope and the KV write. T tokens, H query heads, G key-value heads, D head dim, F pairs."""

import torch

from anabranch import ops
from anabranch.kernels.c.library import MAX_ROWS, function, is_plain, pointer
from anabranch.ops.rope_store import RopeStoreCall

compute = function("rope_store")


def accepts(call: RopeStoreCall) -> bool:
    return call.q_THD.shape[0] <= MAX_ROWS and fits(call)


def fits(call: RopeStoreCall) -> bool:
    dim, weight = call.q_THD.shape[2], call.q_weight
    if call.v_norm or call.slot_T.dtype != torch.int64 or call.v_TGD.shape[2] != dim:
        return False
    heads = call.q_THD, call.k_TGD, call.v_TGD
    rows = all(x.dtype == torch.float32 and x.stride(2) == 1 and x.stride(1) == dim for x in heads)
    per_head = weight is None or weight.numel() == dim
    others = call.k_PSGD, call.v_PSGD, call.cos_TF, call.sin_TF, weight, call.k_weight
    return rows and per_head and is_plain(*others)


@ops.rope_store.kernel("c", on=("cpu",), accepts=accepts)
def rope_store(call: RopeStoreCall) -> torch.Tensor:
    q_THD, k_TGD, v_TGD, cos_TF = call.q_THD, call.k_TGD, call.v_TGD, call.cos_TF
    (tokens, num_heads, dim), num_kv_heads = q_THD.shape, k_TGD.shape[1]
    out_THD = q_THD.new_empty(tokens, num_heads, dim)
    compute(
        out_THD.data_ptr(),
        q_THD.data_ptr(),
        k_TGD.data_ptr(),
        v_TGD.data_ptr(),
        cos_TF.data_ptr(),
        call.sin_TF.data_ptr(),
        pointer(call.q_weight),
        pointer(call.k_weight),
        call.k_PSGD.data_ptr(),
        call.v_PSGD.data_ptr(),
        call.slot_T.data_ptr(),
        tokens,
        num_heads,
        num_kv_heads,
        dim,
        cos_TF.shape[1],
        q_THD.stride(0),
        k_TGD.stride(0),
        v_TGD.stride(0),
        call.eps,
    )
    return out_THD
