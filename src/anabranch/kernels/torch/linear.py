"""Products whose sum is wanted in fp32, without copies of the operands in fp32: the library sums in fp32 anyway.

T tokens, D inputs, F outputs.
"""

import torch

from anabranch import ops
from anabranch.formats import PLAIN
from anabranch.ops.weight import Weight


def accepts(
    x_TD: torch.Tensor, weight_FD: Weight, bias_F: torch.Tensor | None = None, out_dtype: torch.dtype | None = None
) -> bool:
    plain = weight_FD.format is PLAIN and weight_FD.dtype == x_TD.dtype
    short = plain and x_TD.dtype in (torch.bfloat16, torch.float16)
    return short and out_dtype == torch.float32 and x_TD.dim() == 2 and x_TD.shape[0] > 0


@ops.linear.kernel("torch", on=("cuda",), accepts=accepts)
def linear(
    x_TD: torch.Tensor, weight_FD: Weight, bias_F: torch.Tensor | None = None, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    y_TF = torch.mm(x_TD, weight_FD.data.T, out_dtype=torch.float32)
    return y_TF if bias_F is None else y_TF.add_(bias_F)
