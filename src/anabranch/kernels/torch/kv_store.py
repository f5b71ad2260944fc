"""The KV write as two index copies.

T tokens, P pages, S slots in a page, G key-value heads, D head dim.
"""

from __future__ import annotations

import torch

from anabranch import ops


def accepts(
    k_TGD: torch.Tensor, v_TGD: torch.Tensor, k_PSGD: torch.Tensor, v_PSGD: torch.Tensor, slot_T: torch.Tensor
) -> bool:
    return k_PSGD.is_contiguous() and v_PSGD.is_contiguous()


@ops.kv_store.kernel("torch", on=("cpu", "fake"), accepts=accepts)
def kv_store(
    k_TGD: torch.Tensor, v_TGD: torch.Tensor, k_PSGD: torch.Tensor, v_PSGD: torch.Tensor, slot_T: torch.Tensor
) -> None:
    if slot_T.numel() and int(slot_T.min()) < 0:  # padding; a look at the values is free on the host
        ops.kv_store.reference(k_TGD, v_TGD, k_PSGD, v_PSGD, slot_T)
        return
    k_PSGD.flatten(0, 1).index_copy_(0, slot_T, k_TGD)
    v_PSGD.flatten(0, 1).index_copy_(0, slot_T, v_TGD)
