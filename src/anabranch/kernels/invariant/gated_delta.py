"""The gated delta net token by token: calls of one shape, on one thread. Letters as in ops/gated_delta."""

from typing import Any

import torch

from anabranch import ops
from anabranch.ops.gated_delta import (
    DeltaAcceptCall,
    DeltaDraftsCall,
    GatedDeltaCall,
    accept_drafts,
    compute_drafts,
    one_request,
    request_rows,
)
from anabranch.platforms.cpu import threads


def _rows(
    x_TX: torch.Tensor, conv_LC: torch.Tensor, state_HKV: torch.Tensor, before: int, *parameters: Any
) -> torch.Tensor:
    """As one_request, row by row."""
    rows = enumerate(x_TX.split(1), before)
    return torch.cat([one_request(x_1X, conv_LC, state_HKV, number, *parameters) for number, x_1X in rows])


@ops.gated_delta.kernel("invariant", on=("cpu", "fake"))
def gated_delta(call: GatedDeltaCall) -> torch.Tensor:
    y_THV = call.x_TX.new_zeros(call.x_TX.shape[0], *call.state_PHKV.shape[1::2])
    with threads(1):
        for _, rows, page, before in request_rows(call):
            states = call.conv_PLC[page], call.state_PHKV[page]
            y_THV[rows] = _rows(call.x_TX[rows], *states, before, *call[6:12])
    return y_THV


@ops.gated_delta_drafts.kernel("invariant", on=("cpu", "fake"))
def gated_delta_drafts(call: DeltaDraftsCall) -> torch.Tensor:
    with threads(1):
        return compute_drafts(call, _rows)


@ops.gated_delta_accept.kernel("invariant", on=("cpu", "fake"))
def gated_delta_accept(call: DeltaAcceptCall) -> None:
    with threads(1):
        accept_drafts(call, _rows)
