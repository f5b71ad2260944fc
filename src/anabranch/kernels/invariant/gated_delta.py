"""The gated delta net token by token: calls of one shape, on one thread. Letters as in ops/gated_delta."""

from typing import Any

import torch

from anabranch import ops
from anabranch.kernels.invariant.blocks import threads
from anabranch.ops.gated_delta import DeltaAcceptCall, DeltaDraftsCall, GatedDeltaCall, request_rows

ONE_ROW = torch.tensor([0, 1])
PAGE = torch.tensor([0])


def _rows(
    x_TX: torch.Tensor, conv_LC: torch.Tensor, state_HKV: torch.Tensor, before: int, *parameters: Any
) -> torch.Tensor:
    """y_THV of one request's rows, which follow `before` tokens; its state is updated."""
    rows = []
    for t, x_1X in enumerate(x_TX.split(1)):
        states = conv_LC[None], state_HKV[None]
        call = GatedDeltaCall(x_1X, *states, PAGE, ONE_ROW, torch.tensor([before + t + 1]), *parameters)
        rows.append(ops.gated_delta.reference(call))
    return torch.cat(rows)


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
    y_THV = call.x_TX.new_zeros(call.x_TX.shape[0], *call.state_PHKV.shape[1::2])
    channels, heads = call.conv_PLC.shape[2], call.state_PHKV.shape[1]
    with threads(1):
        for page, row, count, start in torch.stack((call.page_R, call.row_R, call.count_R, call.start_R), 1).tolist():
            if count:
                rows, states = slice(row, row + count), (call.conv_PLC[page].clone(), call.state_PHKV[page].clone())
                y_THV[rows] = _rows(call.x_TX[rows], *states, start, *call[8:])
                call.kept_NX[rows, :channels] = call.x_TX[rows, :channels]
                call.kept_NX[rows, -2 * heads :] = call.x_TX[rows, -2 * heads :]
    return y_THV


@ops.gated_delta_accept.kernel("invariant", on=("cpu", "fake"))
def gated_delta_accept(call: DeltaAcceptCall) -> None:
    one_V = torch.ones(call.state_MPHKV.shape[4])
    requests = torch.stack((call.page_R, call.row_R, call.count_R, call.start_R), 1).tolist()
    with threads(1):
        for m, kept_NX in enumerate(call.kept_MNX):
            weights = call.conv_weight_MCW[m], call.decay_log_MH[m], call.dt_bias_MH[m], one_V, 1e-6
            for page, row, count, start in requests:
                if count:
                    states = call.conv_MPLC[m, page], call.state_MPHKV[m, page]
                    _rows(kept_NX[row : row + count], *states, start, *weights, call.num_key_heads)
