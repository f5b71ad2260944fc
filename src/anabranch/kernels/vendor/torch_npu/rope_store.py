"""Head norms, rope and the KV write, by the chip's norm, rotation and scatter.

T tokens, H query heads, G key-value heads, D head dim, F rotated pairs, P pages, S slots in a page.
Pages are [P, S, G, D] and contiguous where the chip writes them, the layout that attention reads as [P, S, G · D].
"""

import torch
import torch_npu

from anabranch import ops
from anabranch.ops.rope_store import RopeStoreCall, head_norm, write

ALIGNMENT = 32
"""Bytes of which a head must be a multiple."""


def accepts(call: RopeStoreCall) -> bool:
    return call.q_THD.shape[0] > 0


@ops.rope_store.kernel("torch_npu", on=("npu",), accepts=accepts)
def rope_store(call: RopeStoreCall) -> torch.Tensor:
    # Tables as wide as what is rotated, [1, T, 1, 2F]: both of a pair turn by the same angle.
    cos, sin = (torch.cat([table, table], dim=-1)[None, :, None] for table in (call.cos_TF, call.sin_TF))
    q_THD = _rotate(head_norm(call.q_THD, call.q_weight, call.eps, ops.rms_norm), cos, sin)
    k_TGD = _rotate(head_norm(call.k_TGD, call.k_weight, call.eps, ops.rms_norm), cos, sin)
    v_TGD = ops.rms_norm(call.v_TGD, None, call.eps) if call.v_norm else call.v_TGD
    k_PSGD, v_PSGD = call.k_PSGD, call.v_PSGD
    half = k_PSGD.dtype in (torch.float16, torch.bfloat16) and k_TGD.dtype == v_TGD.dtype == k_PSGD.dtype
    aligned = k_PSGD.shape[-1] * k_PSGD.element_size() % ALIGNMENT == 0
    if half and aligned and k_PSGD.is_contiguous() and v_PSGD.is_contiguous():
        _scatter(k_TGD, v_TGD, call)
    else:
        write(k_TGD, v_TGD, call)
    return q_THD


def _scatter(k_TGD: torch.Tensor, v_TGD: torch.Tensor, call: RopeStoreCall) -> None:
    """The operator's documentation does not cover slot −1, and a step's shape may not depend on the number of padding
    rows: so a padding row writes once more what the row with the highest slot writes; where all are padding, what is
    there."""
    last = call.slot_T.argmax()[None]
    slot = call.slot_T.index_select(0, last)
    padding_T = call.slot_T < 0
    rows = []
    for x_TGD, x_PSGD in ((k_TGD, call.k_PSGD), (v_TGD, call.v_PSGD)):
        twin = torch.where(slot >= 0, x_TGD.index_select(0, last), x_PSGD[0, :1])
        rows.append(torch.where(padding_T[:, None, None], twin, x_TGD))
    slot_T = torch.where(padding_T, slot.clamp(min=0), call.slot_T).int()
    torch_npu.npu_scatter_pa_kv_cache(rows[0], rows[1], call.k_PSGD, call.v_PSGD, slot_T, cache_mode="Norm")


def _rotate(x_THD: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """In fp32: the operator wants tables of x's dtype, and half precision loses far positions."""
    width = cos.shape[-1]
    turned = torch_npu.npu_rotary_mul(x_THD[..., :width].float()[None], cos, sin)[0].to(x_THD.dtype)
    return turned if width == x_THD.shape[-1] else torch.cat([turned, x_THD[..., width:]], dim=-1)
