"""Dense projections of few rows. T tokens, D inputs, F outputs."""

import torch

from anabranch import ops
from anabranch.formats import BF16, PLAIN
from anabranch.kernels.c.library import MAX_ROWS, function, is_plain, pointer
from anabranch.ops.weight import Weight

compute = function("linear")


def accepts(
    x_TD: torch.Tensor, weight_FD: Weight, bias_F: torch.Tensor | None = None, out_dtype: torch.dtype | None = None
) -> bool:
    if x_TD.dim() != 2 or not x_TD.shape[0] or out_dtype not in (None, torch.float32):
        return False
    if weight_FD.format is BF16:  # of any number of rows: no other kernel multiplies by it
        return is_plain(x_TD, bias_F) and weight_FD.data.is_contiguous()
    return x_TD.shape[0] <= MAX_ROWS and weight_FD.format is PLAIN and is_plain(x_TD, weight_FD.data, bias_F)


@ops.linear.kernel("c", on=("cpu",), accepts=accepts, traits=("bf16",))
def linear(
    x_TD: torch.Tensor, weight_FD: Weight, bias_F: torch.Tensor | None = None, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    return product(x_TD, weight_FD.data, bias_F)


def product(x_TD: torch.Tensor, weight_FD: torch.Tensor, bias_F: torch.Tensor | None) -> torch.Tensor:
    """Of any number of rows; the weight is fp32 or bf16."""
    (tokens, width), outputs = x_TD.shape, weight_FD.shape[0]
    y_TF = x_TD.new_empty(tokens, outputs)
    pointers = y_TF.data_ptr(), x_TD.data_ptr(), weight_FD.data_ptr(), pointer(bias_F)
    compute(*pointers, tokens, outputs, width, weight_FD.dtype == torch.bfloat16, torch.get_num_threads())
    return y_TF
