"""The gated delta net on the host: decoding requests together, prompts in chunks whose tokens are computed together.

Of a chunk, with G_t the sum of g up to token t and S the state before it:

    (I + A) Δ = β (V − e^G K S)    A[t, s] = β_t e^(G_t − G_s) k_t·k_s for s < t
    o_t = e^G_t Sᵀ q_t + Σ_{s ≤ t} e^(G_t − G_s) (q_t·k_s) Δ_s

Letters as in ops/gated_delta; N tokens of a chunk, B decoding requests, W inputs of the convolution.
"""

import torch
import torch.nn.functional as functional

from anabranch import ops
from anabranch.ops.gated_delta import (
    GatedDeltaCall,
    convolve,
    gated_norm,
    gates,
    request_rows,
    split_channels,
    split_row,
)

CHUNK = 64


@ops.gated_delta.kernel("torch", on=("cpu", "fake"))
def gated_delta(call: GatedDeltaCall) -> torch.Tensor:
    y_THV = call.x_TX.new_zeros(call.x_TX.shape[0], *call.state_PHKV.shape[1::2])
    counts, single = call.query_start_R.diff().tolist(), {}
    for r, rows, page, before in request_rows(call):
        if counts[r] == 1:
            single[r] = rows.start
        else:
            y_THV[rows] = _prefill(call, rows, page, before == 0)
    if single:
        y_THV[list(single.values())] = _decode(call, list(single), list(single.values()))
    return y_THV


def _decode(call: GatedDeltaCall, requests: list[int], rows: list[int]) -> torch.Tensor:
    page_B, first_B = call.page_R[requests].long(), call.context_len_R[requests] == 1
    x_BC, z_BHV, b_BH, a_BH = split_row(call, call.x_TX[rows])
    before_BLC = call.conv_PLC[page_B].to(x_BC.dtype).masked_fill_(first_B[:, None, None], 0.0)
    inputs_BWC = torch.cat([before_BLC, x_BC[:, None]], 1)
    call.conv_PLC[page_B] = inputs_BWC[:, 1:].to(call.conv_PLC.dtype)
    x_BC = functional.silu((inputs_BWC.float() * call.conv_weight_CW.float().T).sum(1)).to(x_BC.dtype)
    q, k, v = split_channels(call, x_BC)
    g_BH, beta_BH = gates(call, b_BH, a_BH)
    state_BHKV = call.state_PHKV[page_B].float().masked_fill_(first_B[:, None, None, None], 0.0)
    state_BHKV *= g_BH.exp()[..., None, None]
    delta_BHV = (v - (state_BHKV * k[..., None]).sum(2)) * beta_BH[..., None]
    state_BHKV += k[..., None] * delta_BHV[:, :, None]
    call.state_PHKV[page_B] = state_BHKV.to(call.state_PHKV.dtype)
    return gated_norm(call, (state_BHKV * q[..., None]).sum(2), z_BHV)


def _prefill(call: GatedDeltaCall, rows: slice, page: int, first: bool) -> torch.Tensor:
    x_TC, z_THV, b_TH, a_TH = split_row(call, call.x_TX[rows])
    q, k, v = split_channels(call, convolve(call, x_TC, page, first))
    g_TH, beta_TH = gates(call, b_TH, a_TH)
    state_HKV = call.state_PHKV[page].float()
    if first:
        state_HKV = torch.zeros_like(state_HKV)
    outputs = []
    for begin in range(0, len(x_TC), CHUNK):
        chunk = (x[begin : begin + CHUNK].transpose(0, 1) for x in (q, k, v, g_TH, beta_TH))
        o_HNV, state_HKV = _chunk(state_HKV, *chunk)
        outputs.append(o_HNV.transpose(0, 1))
    call.state_PHKV[page] = state_HKV.to(call.state_PHKV.dtype)
    return gated_norm(call, torch.cat(outputs), z_THV)


def _chunk(
    state_HKV: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g_HN: torch.Tensor,
    beta_HN: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(o_HNV, the state after the chunk)."""
    sum_HN1 = g_HN.cumsum(1)[..., None]
    later = torch.ones(g_HN.shape[1], g_HN.shape[1], dtype=torch.bool).triu(1)
    decay_HNN = (sum_HN1 - sum_HN1.transpose(1, 2)).masked_fill(later, -torch.inf).exp()
    lower_HNN = (k @ k.transpose(1, 2)) * decay_HNN * beta_HN[..., None]  # its diagonal is taken for 1
    right_HNV = (v - sum_HN1.exp() * (k @ state_HKV)) * beta_HN[..., None]
    delta_HNV = torch.linalg.solve_triangular(lower_HNN, right_HNV, upper=False, unitriangular=True)
    o_HNV = sum_HN1.exp() * (q @ state_HKV) + ((q @ k.transpose(1, 2)) * decay_HNN) @ delta_HNV
    last_H11 = sum_HN1[:, -1:]
    left_HNK = k * (last_H11 - sum_HN1).exp()
    return o_HNV, last_H11.exp() * state_HKV + left_HNK.transpose(1, 2) @ delta_HNV
