"""Dense projections of few rows. T tokens, D inputs, F outputs."""

import torch

from anabranch import ops
from anabranch.formats import PLAIN
from anabranch.kernels.c.library import MAX_ROWS, function, is_plain, pointer
from anabranch.ops.weight import Weight

compute = function("linear")


def accepts(
    x_TD: torch.Tensor, weight_FD: Weight, bias_F: torch.Tensor | None = None, out_dtype: torch.dtype | None = None
) -> bool:
    few = x_TD.dim() == 2 and 0 < x_TD.shape[0] <= MAX_ROWS and out_dtype in (None, torch.float32)
    return few and weight_FD.format is PLAIN and is_plain(x_TD, weight_FD.data, bias_F)


@ops.linear.kernel("c", on=("cpu",), accepts=accepts)
def linear(
    x_TD: torch.Tensor, weight_FD: Weight, bias_F: torch.Tensor | None = None, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    return product(x_TD, weight_FD.data, bias_F)


def product(x_TD: torch.Tensor, weight_FD: torch.Tensor, bias_F: torch.Tensor | None) -> torch.Tensor:
    """Of any number of rows."""
    (tokens, width), outputs = x_TD.shape, weight_FD.shape[0]
    y_TF = x_TD.new_empty(tokens, outputs)
    pointers = y_TF.data_ptr(), x_TD.data_ptr(), weight_FD.data_ptr(), pointer(bias_F)
    compute(*pointers, tokens, outputs, width, torch.get_num_threads())
    return y_TF
