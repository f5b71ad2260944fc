"""The experts' histogram in one launch for all layers, with one atomic addition per id: few ids share an address.

L MoE layers, T token rows, K experts per token, E experts.
"""

import torch
import triton
import triton.language as tl

from anabranch import ops
from anabranch.kernels.triton.launch import cdiv, launch_options, wait_for_predecessor

BLOCK = 512


@triton.jit(do_not_specialize=["num_ids", "ids_per_layer", "num_experts"])
def count_kernel(
    expert_LTK, count_LE, num_ids, ids_per_layer, num_experts, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr
):
    wait_for_predecessor(DEPENDENT)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    expert = tl.load(expert_LTK + i, mask=i < num_ids, other=-1)
    place = (i // ids_per_layer) * num_experts + expert
    one = tl.full((BLOCK,), 1, tl.int64)
    tl.atomic_add(count_LE + place, one, mask=(expert >= 0) & (expert < num_experts), sem="relaxed")


def accepts(expert_LTK: torch.Tensor, count_LE: torch.Tensor) -> bool:
    return (
        expert_LTK.dtype == torch.int32
        and count_LE.dtype == torch.int64
        and expert_LTK.is_contiguous()
        and count_LE.is_contiguous()
        and expert_LTK.numel() < 1 << 31
    )


@ops.count_experts.kernel("triton", on=("cuda", "hip", "xpu"), accepts=accepts)
def count_experts(expert_LTK: torch.Tensor, count_LE: torch.Tensor) -> None:
    num_ids = expert_LTK.numel()
    if num_ids == 0:
        return
    count_kernel[(cdiv(num_ids, BLOCK),)](
        expert_LTK, count_LE, num_ids, num_ids // expert_LTK.shape[0], count_LE.shape[1],
        BLOCK=BLOCK, num_warps=4, **launch_options(expert_LTK.device),
    )  # fmt: skip
