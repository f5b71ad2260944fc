"""A draw from all tokens, or the best one: the first and the last step of sample.py without those between."""

from __future__ import annotations

import torch

from anabranch import ops
from anabranch.kernels.triton.sample import fits, launch


def accepts(
    logits_RV: torch.Tensor, temperature_R: torch.Tensor, seed_R: torch.Tensor, position_R: torch.Tensor
) -> bool:
    return fits(logits_RV, temperature_R, seed_R, position_R)


@ops.draw.kernel("triton", on=("cuda", "hip", "xpu"), accepts=accepts)
def draw(
    logits_RV: torch.Tensor, temperature_R: torch.Tensor, seed_R: torch.Tensor, position_R: torch.Tensor
) -> torch.Tensor:
    return launch(logits_RV, temperature_R, None, seed_R, position_R)
