"""Head norms, rope and the KV write in few calls. T tokens, H query heads, G key-value heads, D head dim, F pairs."""

import torch

from anabranch import ops
from anabranch.ops.rope_store import RopeStoreCall, as_bytes, head_norm, rotate, to_cache, write


@ops.rope_store.kernel("torch", on=("cpu", "fake"))
def rope_store(call: RopeStoreCall) -> torch.Tensor:
    if call.q_THD.dtype == torch.float32 and 2 * call.cos_TF.shape[1] == call.q_THD.shape[2]:
        cos = torch.cat([call.cos_TF, call.cos_TF], 1)[:, None]
        sin = torch.cat([-call.sin_TF, call.sin_TF], 1)[:, None]
        q_THD = _rotated(call.q_THD, call.q_weight, cos, sin, call.eps)
        k_TGD = _rotated(call.k_TGD, call.k_weight, cos, sin, call.eps)
    else:
        rope = call.cos_TF, call.sin_TF
        q_THD = rotate(head_norm(call.q_THD, call.q_weight, call.eps), *rope)
        k_TGD = rotate(head_norm(call.k_TGD, call.k_weight, call.eps), *rope)
    v_TGD = ops.rms_norm(call.v_TGD, None, call.eps) if call.v_norm else call.v_TGD
    k_PSGD, v_PSGD, slot_T = call.k_PSGD, call.v_PSGD, call.slot_T
    whole = k_PSGD.is_contiguous() and v_PSGD.is_contiguous()
    if whole and not (slot_T.numel() and int(slot_T.min()) < 0):  # padding; reading a value is cheap on the host
        for pages, x_TGD, scale in ((k_PSGD, k_TGD, call.k_scale), (v_PSGD, v_TGD, call.v_scale)):
            as_bytes(pages).flatten(0, 1).index_copy_(0, slot_T, as_bytes(to_cache(x_TGD, scale, pages.dtype)))
    else:
        write(k_TGD, v_TGD, call)
    return q_THD


def _rotated(
    x_THD: torch.Tensor, weight: torch.Tensor | None, cos: torch.Tensor, sin: torch.Tensor, eps: float
) -> torch.Tensor:
    """norm(x) · cos + (norm(x) with its halves swapped) · (−sin, sin)."""
    x = head_norm(x_THD, weight, eps, lambda x, weight, eps: torch.rms_norm(x, weight.shape, weight, eps))
    return torch.addcmul(x * cos, x.roll(x.shape[2] // 2, -1), sin)
