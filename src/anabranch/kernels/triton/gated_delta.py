"""The gated delta net on GPUs: which kernels run for a call, and their launches.

A decode step (every request has one new token) is gated_delta_decode alone. Otherwise gated_delta_chunks does the
requests with several new tokens first. The device tells them apart: the host knows sizes only. So the result of a
request does not depend on the others, but for the order of sums where there are few of them or many. Where drafts are
verified, gated_delta_drafts does it; with fixed tiles it does all.
"""

import functools
from typing import Any

import torch

from anabranch import ops
from anabranch.kernels.triton.attention import FEW_PROGRAMS, MANY_REQUESTS
from anabranch.kernels.triton.gated_delta_chunks import convolve_chunks, norm_rows, prepare_chunks, scan_chunks
from anabranch.kernels.triton.gated_delta_decode import step_heads
from anabranch.kernels.triton.gated_delta_drafts import accept_rows, keep_inputs, try_rows
from anabranch.kernels.triton.launch import (
    FLOATS,
    cdiv,
    gluon_kernels,
    lasting_zeros,
    launch_options,
    machine_of,
    next_power_of_2,
    num_processors,
)
from anabranch.ops.gated_delta import DeltaAcceptCall, DeltaDraftsCall, GatedDeltaCall

DIMS = (16, 32, 64, 128)
"""Numbers of a key or a value: powers of 2, of which a head's state fits in the registers of a program."""
CHUNK = 64
"""Tokens of a chunk."""
SMALL_CHUNK = 16
"""For small heads, and in fp32 on GPUs. There a product is no instruction: loops are unrolled, which takes a compiler
minutes for 64."""
CONVOLVED = 8
"""Rows that a program of convolve_chunks loads at once."""
COLUMNS = 32
"""Of the state, for a program of scan_chunks."""
HOPPER_STAGES = {32: 3, 64: 2}
"""Chunks that scan_chunks_hopper has in shared memory at a time, by the columns of a program."""
HOPPER_MANY = 4
"""Requests from which its programs may have more columns."""
STEP_COLUMNS = 64
"""Of the state, that a program of step_heads holds at a time where there are more of them than STEP_FEW."""
STEP_FEW = 256
ROWS_ELEMENTS = 1024
"""Elements of a program of norm_rows."""


def accepts(call: GatedDeltaCall) -> bool:
    x_TX, conv_PLC, state_PHKV = call.x_TX, call.conv_PLC, call.state_PHKV
    parameters = call.conv_weight_CW, call.decay_log_H, call.dt_bias_H, call.norm_weight_V
    integers = [x for x in (*call[3:6], call.cut_R, call.cut_page_R) if isinstance(x, torch.Tensor)]
    H, K, V = state_PHKV.shape[1:]
    return (
        x_TX.dtype in FLOATS
        and conv_PLC.dtype in FLOATS
        and state_PHKV.dtype in FLOATS
        and K in DIMS
        and V in DIMS
        and H % call.num_key_heads == 0
        and conv_PLC.shape[1] > 0
        and call.page_R.shape[0] < MANY_REQUESTS[-1]
        and x_TX.stride(1) == 1
        and conv_PLC[0].is_contiguous()
        and state_PHKV[0].is_contiguous()
        and all(tensor.is_contiguous() for tensor in (*parameters, *integers))
        and all(tensor.dtype == torch.int32 for tensor in integers)
    )


@ops.gated_delta.kernel("triton", on=("cuda", "hip", "xpu"), accepts=accepts)
def gated_delta(call: GatedDeltaCall) -> torch.Tensor:
    x_TX, device = call.x_TX, call.x_TX.device
    (T, R), (H, K, V), G = (x_TX.shape[0], call.page_R.shape[0]), call.state_PHKV.shape[1:], call.num_key_heads
    if R == 0:
        return x_TX.new_zeros(T, H, V)
    if machine_of(device).fixed:
        return do_rows(call)
    y_THV = torch.empty(T, H, V, dtype=x_TX.dtype, device=device)
    if T == 0:
        return y_THV
    options = {"G": G, "HG": H // G, "K": K, "V": V, "W": call.conv_weight_CW.shape[1], **launch_options(device)}
    if call.max_query != 1 and T > 1:
        do_chunks(call, y_THV, options)
    trigger = int(device.type == "cuda" and FEW_PROGRAMS * num_processors(device) >= H * R)
    few = H * R <= STEP_FEW
    columns = V if few else min(V, STEP_COLUMNS)
    step_heads[(H, R)](
        x_TX, call.conv_PLC, call.state_PHKV, call.page_R, call.query_start_R, call.context_len_R,
        call.conv_weight_CW, call.decay_log_H, call.dt_bias_H, call.norm_weight_V, y_THV, counts_of(G, device),
        T, R, x_TX.stride(0), call.conv_PLC.stride(0), call.state_PHKV.stride(0), call.eps, trigger,
        WP=next_power_of_2(options["W"]), BV=columns, FETCH=options["DEPENDENT"] and few,
        num_warps=max(1, K * columns // 4096), **options,
    )  # fmt: skip
    return y_THV


def do_rows(call: GatedDeltaCall) -> torch.Tensor:
    """Token by token, whatever the chunk, by the kernel that verifies drafts."""
    starts_R = call.query_start_R
    count_R = torch.where(call.context_len_R > 0, starts_R[1:] - starts_R[:-1], 0)
    requests = call.page_R, starts_R[:-1], count_R, call.context_len_R - count_R
    states, weights = (call.conv_PLC, call.state_PHKV), (call.conv_weight_CW, call.decay_log_H, call.dt_bias_H)
    x_TX, norm_weight_V, num_key_heads = call.x_TX, call.norm_weight_V, call.num_key_heads
    rows = DeltaDraftsCall(x_TX, x_TX, *states, *requests, *weights, norm_weight_V, call.eps, num_key_heads)
    cut_R, cut_page_R = cuts_of(call)
    y_THV = launch_rows(rows, True, cut_R, cut_page_R)
    sizes = call.state_PHKV.shape[1:], num_key_heads
    if call.cut_R is not None:
        cut = call.page_R, starts_R[:-1], torch.minimum(cut_R, count_R), requests[3]
        launch_inputs(x_TX[None], call.conv_PLC[None], cut, cut_page_R, *sizes)
    launch_inputs(x_TX[None], call.conv_PLC[None], requests, call.page_R, *sizes)
    return y_THV


def do_chunks(call: GatedDeltaCall, y_THV: torch.Tensor, options: dict[str, Any]) -> None:
    x_TX, (T, H, V), K, G = call.x_TX, y_THV.shape, options["K"], options["G"]
    R, device, fp32 = call.page_R.shape[0], x_TX.device, x_TX.dtype == torch.float32
    chunk = SMALL_CHUNK if device.type != "cpu" and (fp32 or min(K, V) < 64) else CHUNK
    cuts, requests = cuts_of(call), (call.query_start_R, call.context_len_R)
    qk_TGK = torch.empty(2, T, G, K, dtype=x_TX.dtype, device=device)
    w_THK = torch.empty(T, H, K, dtype=x_TX.dtype, device=device)
    qk_THN = torch.empty(T, H, chunk, dtype=x_TX.dtype, device=device)
    sum_TH = torch.empty(T, H, dtype=torch.float32, device=device)
    strides = x_TX.stride(0), call.conv_PLC.stride(0)
    searched = {"RP": next(bound for bound in MANY_REQUESTS if bound > R)}
    convolve_chunks[(2 * G + H, T // CONVOLVED + R + 1)](
        x_TX, call.conv_PLC, call.page_R, *requests, call.conv_weight_CW, qk_TGK, y_THV, T, R, *strides,
        ROWS=CONVOLVED, num_warps=1, **searched, **options,
    )  # fmt: skip
    # Triton 3.6's products by four warps of Hopper read beyond shared memory where rows have less than 128 bytes.
    warps = 4 if fp32 or min(K, V) >= 64 else 2
    prepare_chunks[(H, T // chunk + 2 * R)](
        x_TX, call.conv_PLC, call.page_R, *requests, *cuts, call.decay_log_H, call.dt_bias_H,
        *qk_TGK, w_THK, y_THV, qk_THN, sum_TH, R, *strides,
        LEVELS=chunk.bit_length() - 1, PRECISION=precision(x_TX), N=chunk, num_warps=warps, num_stages=1,
        **searched, **options,
    )  # fmt: skip
    state_PHKV, options = call.state_PHKV, without(options, "W")
    hopper = gluon_kernels("gated_delta_hopper", device) if K == 128 and V % 64 == 0 and not fp32 else None
    if hopper is None:
        columns = min(COLUMNS, V)
        scan_chunks[(V // columns, H, R)](
            state_PHKV, call.page_R, *requests, *cuts, *qk_TGK, w_THK, qk_THN, sum_TH, y_THV, R, state_PHKV.stride(0),
            N=chunk, BV=columns, num_warps=warps, num_stages=1 if fp32 else 2, **options,
        )  # fmt: skip
    else:
        # Programs of one long request are few, however many have one token beside it: they have few columns each.
        columns = 32 if R < HOPPER_MANY or T // (call.max_query or T) < 2 else 64
        made = (*qk_TGK, K), (w_THK, K), (qk_THN, chunk), (y_THV, columns)
        hopper.scan_chunks_hopper[(V // columns, H, R)](
            *(hopper.descriptor(x, width, chunk) for *several, width in made for x in several),
            state_PHKV, call.page_R, *requests, *cuts, sum_TH, y_THV, R, state_PHKV.stride(0),
            N=chunk, BV=columns, STAGES=HOPPER_STAGES[columns], num_warps=4, **options,
        )  # fmt: skip
    rows = max(1, ROWS_ELEMENTS // V)
    norm_rows[(cdiv(T * H, rows),)](
        x_TX, call.norm_weight_V, y_THV, T * H, x_TX.stride(0), call.conv_PLC.shape[2], call.eps,
        H=H, V=V, ROWS=rows, num_warps=4, **without(options, "G", "HG", "K", "V"),
    )  # fmt: skip


def accepts_drafts(call: DeltaDraftsCall) -> bool:
    x_TX, kept_NX, conv_PLC, state_PHKV = call[:4]
    integers = call.page_R, call.row_R, call.count_R, call.start_R
    return (
        all(tensor.dtype in FLOATS for tensor in (x_TX, conv_PLC, state_PHKV))
        and x_TX.dtype == kept_NX.dtype
        and {*state_PHKV.shape[2:]} <= {*DIMS}
        and state_PHKV.shape[1] % call.num_key_heads == 0
        and conv_PLC.shape[1] > 0
        and x_TX.stride(1) == kept_NX.stride(1) == 1
        and conv_PLC[0].is_contiguous()
        and state_PHKV[0].is_contiguous()
        and all(tensor.is_contiguous() for tensor in (*call[8:12], *integers))
        and all(tensor.dtype == torch.int32 for tensor in integers)
    )


@ops.gated_delta_drafts.kernel("triton", on=("cuda", "hip", "xpu"), accepts=accepts_drafts)
def gated_delta_drafts(call: DeltaDraftsCall) -> torch.Tensor:
    return launch_rows(call, False, call.page_R, call.page_R)


def launch_rows(call: DeltaDraftsCall, store: bool, cut_R: torch.Tensor, cut_page_R: torch.Tensor) -> torch.Tensor:
    x_TX, (H, K, V), G = call.x_TX, call.state_PHKV.shape[1:], call.num_key_heads
    y_THV = x_TX.new_zeros(x_TX.shape[0], H, V)
    W = call.conv_weight_CW.shape[1]
    if call.page_R.shape[0]:
        try_rows[(H, call.page_R.shape[0])](
            *call[:12], y_THV, cut_R, cut_page_R,
            x_TX.stride(0), call.kept_NX.stride(0), call.conv_PLC.stride(0), call.state_PHKV.stride(0), call.eps,
            G=G, HG=H // G, K=K, V=V, W=W, WP=next_power_of_2(W), STORE=store,
            num_warps=max(1, K * V // 2048), **launch_options(x_TX.device),
        )  # fmt: skip
    return y_THV


def launch_inputs(
    kept_MNX: torch.Tensor,
    conv_MPLC: torch.Tensor,
    requests: tuple[torch.Tensor, ...],
    target_R: torch.Tensor,
    heads: tuple[int, ...],
    num_key_heads: int,
) -> None:
    (H, K, V), G, W = heads, num_key_heads, conv_MPLC.shape[2] + 1
    strides = *kept_MNX.stride()[:2], *conv_MPLC.stride()[:2]
    keep_inputs[(2 * G + H, requests[0].shape[0], conv_MPLC.shape[0])](
        kept_MNX, conv_MPLC, *requests, target_R, *strides,
        G=G, HG=H // G, K=K, V=V, W=W, num_warps=1, **launch_options(kept_MNX.device),
    )  # fmt: skip


def accepts_accept(call: DeltaAcceptCall) -> bool:
    kept_MNX, conv_MPLC, state_MPHKV = call[:3]
    integers = call.page_R, call.row_R, call.count_R, call.start_R
    return (
        all(tensor.dtype in FLOATS for tensor in (kept_MNX, conv_MPLC, state_MPHKV))
        and {*state_MPHKV.shape[3:]} <= {*DIMS}
        and state_MPHKV.shape[2] % call.num_key_heads == 0
        and conv_MPLC.shape[2] > 0
        and kept_MNX.stride(2) == 1
        and conv_MPLC[0, 0].is_contiguous()
        and state_MPHKV[0, 0].is_contiguous()
        and all(tensor.is_contiguous() for tensor in (*call[7:10], *integers))
        and all(tensor.dtype == torch.int32 for tensor in integers)
    )


@ops.gated_delta_accept.kernel("triton", on=("cuda", "hip", "xpu"), accepts=accepts_accept)
def gated_delta_accept(call: DeltaAcceptCall) -> None:
    kept_MNX, conv_MPLC, state_MPHKV, *_ = call
    requests = call.page_R, call.row_R, call.count_R, call.start_R
    (M, _, H, K, V), G, R = state_MPHKV.shape, call.num_key_heads, call.page_R.shape[0]
    W = call.conv_weight_MCW.shape[2]
    if not R:
        return
    if machine_of(kept_MNX.device).fixed:  # by the kernel that has made the results, which are not needed again
        one_V = kept_MNX.new_ones(V)
        for m in range(M):
            layer = kept_MNX[m], kept_MNX[m], conv_MPLC[m], state_MPHKV[m]
            weights = call.conv_weight_MCW[m], call.decay_log_MH[m], call.dt_bias_MH[m], one_V
            launch_rows(DeltaDraftsCall(*layer, *requests, *weights, 1e-6, G), True, no_cuts(one_V.device), call.page_R)
    else:
        strides = *kept_MNX.stride()[:2], *conv_MPLC.stride()[:2], *state_MPHKV.stride()[:2]
        accept_rows[(H, R, M)](
            kept_MNX, conv_MPLC, state_MPHKV, *requests, *call[7:10], *strides,
            G=G, HG=H // G, K=K, V=V, W=W, WP=next_power_of_2(W),
            num_warps=max(1, K * V // 2048), **launch_options(kept_MNX.device),
        )  # fmt: skip
    launch_inputs(kept_MNX, conv_MPLC, requests, call.page_R, (H, K, V), G)


def without(options: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name not in names}


def precision(x_TX: torch.Tensor) -> str:
    """Of the products that invert a matrix: about as fine as what the result is rounded to, or finer."""
    if x_TX.dtype == torch.float32 or torch.version.hip is not None:
        return "ieee"
    return "fp16" if x_TX.dtype == torch.bfloat16 else "tf32x3"


def cuts_of(call: GatedDeltaCall) -> tuple[torch.Tensor, torch.Tensor]:
    """Where requests are cut, and the pages for it: tensors in any case, so that kernels have one version."""
    if call.cut_R is None or call.cut_page_R is None:
        return no_cuts(call.x_TX.device), call.page_R
    return call.cut_R, call.cut_page_R


@functools.cache
def no_cuts(device: torch.device) -> torch.Tensor:
    return lasting_zeros(device, MANY_REQUESTS[-1])


@functools.cache
def counts_of(G: int, device: torch.device) -> torch.Tensor:
    """For as many requests as a step may have. All calls share them: on a device these follow each other."""
    return lasting_zeros(device, MANY_REQUESTS[-1], G)
