"""The KV write. Pages are [P, S, G, D] and contiguous, the layout that attention reads as [P, S, G · D].

T tokens, P pages, S slots in a page, G key-value heads, D head dim.
"""

from __future__ import annotations

import torch
import torch_npu

from anabranch import ops

ALIGNMENT = 32
"""Bytes of which a head must be a multiple."""


def accepts(
    k_TGD: torch.Tensor, v_TGD: torch.Tensor, k_PSGD: torch.Tensor, v_PSGD: torch.Tensor, slot_T: torch.Tensor
) -> bool:
    half = k_PSGD.dtype in (torch.float16, torch.bfloat16) and k_TGD.dtype == v_TGD.dtype == k_PSGD.dtype
    aligned = k_PSGD.shape[-1] * k_PSGD.element_size() % ALIGNMENT == 0
    return half and aligned and k_PSGD.is_contiguous() and v_PSGD.is_contiguous() and slot_T.numel() > 0


@ops.kv_store.kernel("torch_npu", on=("npu",), accepts=accepts)
def kv_store(
    k_TGD: torch.Tensor, v_TGD: torch.Tensor, k_PSGD: torch.Tensor, v_PSGD: torch.Tensor, slot_T: torch.Tensor
) -> None:
    """The operator does not say what it makes of slot −1, and a step's shape may not depend on how many there are: so
    a padding row writes once more what the row with the highest slot writes; where all are padding, what is there."""
    last = slot_T.argmax()[None]
    slot = slot_T.index_select(0, last)
    padding_T = slot_T < 0
    rows = []
    for x_TGD, x_PSGD in ((k_TGD, k_PSGD), (v_TGD, v_PSGD)):
        twin = torch.where(slot >= 0, x_TGD.index_select(0, last), x_PSGD[0, :1])
        rows.append(torch.where(padding_T[:, None, None], twin, x_TGD))
    slot_T = torch.where(padding_T, slot.clamp(min=0), slot_T).int()
    torch_npu.npu_scatter_pa_kv_cache(rows[0], rows[1], k_PSGD, v_PSGD, slot_T, cache_mode="Norm")
