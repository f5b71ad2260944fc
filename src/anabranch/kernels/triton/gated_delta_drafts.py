"""The gated delta net where drafts are verified: like gated_delta_decode, but a program goes through all rows of a
request with the head's state in registers.

`try_rows` writes results, keeps inputs and leaves pages as they are. Later `accept_rows` takes the inputs that count
into the states of all layers in one launch, and `keep_inputs`, which replaces what that reads, into what the
convolutions keep. Together they read a state twice and write it once, however many drafts there are.

M layers; other letters as in gated_delta_decode.
"""

import triton
import triton.language as tl

from anabranch.kernels.triton.gated_delta_chunks import keep_last
from anabranch.kernels.triton.gated_delta_decode import convolve_one, gate, load_taps, norm_gated
from anabranch.kernels.triton.launch import wait_for_predecessor


@triton.jit
def load_row(x, x_stride, conv, channel, channels, n, used, W: tl.constexpr, WP: tl.constexpr):
    """The inputs of row n of a request, a row for each tap; x is its first row. Inputs before that are in its page, if
    `used`."""
    i = tl.arange(0, WP)[:, None]
    there = (i < W) & (channel >= 0)[None, :]
    source = n + i - (W - 1)
    before = tl.load(conv + (n + i) * channels + channel[None, :], mask=there & (source < 0) & used, other=0.0)
    own = tl.load(x + source.to(tl.int64) * x_stride + channel[None, :], mask=there & (source >= 0), other=0.0)
    return own + before.to(own.dtype)


@triton.jit
def try_rows(
    x_TX, kept_NX, conv_PLC, state_PHKV, page_R, row_R, count_R, start_R,
    conv_weight_CW, decay_log_H, dt_bias_H, norm_weight_V, y_THV, cut_R, cut_page_R,
    x_stride, kept_stride, conv_stride, state_stride, eps,
    G: tl.constexpr, HG: tl.constexpr, K: tl.constexpr, V: tl.constexpr, W: tl.constexpr,
    WP: tl.constexpr, STORE: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """STORE: the rows count, so the state is stored, also where a request is cut, and no inputs are kept."""
    H: tl.constexpr = G * HG
    C: tl.constexpr = 2 * G * K + H * V
    h, r = tl.program_id(0), tl.program_id(1)
    g = h // HG
    k_K, v_V = tl.arange(0, K), tl.arange(0, V)
    q_channel, k_channel, v_channel = g * K + k_K, (G + g) * K + k_K, 2 * G * K + h * V + v_V
    q_taps = load_taps(conv_weight_CW, q_channel, W, WP)
    k_taps = load_taps(conv_weight_CW, k_channel, W, WP)
    v_taps = load_taps(conv_weight_CW, v_channel, W, WP)
    decay_log, dt_bias = tl.load(decay_log_H + h), tl.load(dt_bias_H + h)
    norm_weight = tl.load(norm_weight_V + v_V).to(tl.float32)
    wait_for_predecessor(DEPENDENT)
    count = tl.load(count_R + r)
    if count == 0:
        return
    used, page, row = tl.load(start_R + r) > 0, tl.load(page_R + r).to(tl.int64), tl.load(row_R + r).to(tl.int64)
    x, conv = x_TX + row * x_stride, conv_PLC + page * conv_stride
    place = state_PHKV + h * (K * V) + k_K[:, None] * V + v_V[None, :]
    state_KV = tl.load(place + page * state_stride, mask=used & (k_K >= 0)[:, None], other=0.0).to(tl.float32)
    for n in range(count):
        x_n, kept = x + n * x_stride, kept_NX + (row + n) * kept_stride
        a, b = tl.load(x_n + C + H * V + H + h), tl.load(x_n + C + H * V + h)
        if not STORE:
            tl.store(kept + v_channel, tl.load(x_n + v_channel))
            tl.store(kept + C + H * V + H + h, a)
            tl.store(kept + C + H * V + h, b)
            if h % HG == 0:
                tl.store(kept + q_channel, tl.load(x_n + q_channel))
                tl.store(kept + k_channel, tl.load(x_n + k_channel))
        q = convolve_one(load_row(x, x_stride, conv, q_channel, C, n, used, W, WP), q_taps)
        k = convolve_one(load_row(x, x_stride, conv, k_channel, C, n, used, W, WP), k_taps)
        v = convolve_one(load_row(x, x_stride, conv, v_channel, C, n, used, W, WP), v_taps)
        z = tl.load(x_n + C + h * V + v_V).to(tl.float32)
        g_log, beta = gate(a, b, decay_log, dt_bias)
        q *= tl.rsqrt(tl.sum(q * q, 0) + 1e-6) * (K**-0.5)
        k *= tl.rsqrt(tl.sum(k * k, 0) + 1e-6)
        state_KV *= tl.exp(g_log)
        delta = (v - tl.sum(state_KV * k[:, None], 0)) * beta
        o = tl.sum(state_KV * q[:, None], 0) + delta * tl.sum(k * q, 0)
        # A call: of a product and a sum, compilers may round either part first, and differently where a request is cut.
        state_KV = tl.fma(tl.broadcast_to(k[:, None], [K, V]), tl.broadcast_to(delta[None, :], [K, V]), state_KV)
        y = norm_gated(o[None, :], z[None, :], norm_weight, eps, y_THV.dtype.element_ty)
        tl.store(y_THV + ((row + n) * H + h) * V + v_V[None, :], y)
        if STORE:
            if n + 1 == tl.load(cut_R + r):
                cut_page = tl.load(cut_page_R + r).to(tl.int64)
                tl.store(place + cut_page * state_stride, state_KV.to(state_PHKV.dtype.element_ty))
    if STORE:
        tl.store(place + page * state_stride, state_KV.to(state_PHKV.dtype.element_ty))


@triton.jit
def accept_rows(
    kept_MNX, conv_MPLC, state_MPHKV, page_R, row_R, count_R, start_R, conv_weight_MCW, decay_log_MH, dt_bias_MH,
    kept_stride, row_stride, convs_stride, conv_stride, states_stride, state_stride,
    G: tl.constexpr, HG: tl.constexpr, K: tl.constexpr, V: tl.constexpr, W: tl.constexpr,
    WP: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """The first of each pair of strides is that of layers."""
    H: tl.constexpr = G * HG
    C: tl.constexpr = 2 * G * K + H * V
    h, r, m = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    k_K, v_V = tl.arange(0, K), tl.arange(0, V)
    k_channel, v_channel = (G + h // HG) * K + k_K, 2 * G * K + h * V + v_V
    k_taps = load_taps(conv_weight_MCW + m * (C * W), k_channel, W, WP)
    v_taps = load_taps(conv_weight_MCW + m * (C * W), v_channel, W, WP)
    decay_log, dt_bias = tl.load(decay_log_MH + m * H + h), tl.load(dt_bias_MH + m * H + h)
    wait_for_predecessor(DEPENDENT)
    count = tl.load(count_R + r)
    if count == 0:
        return
    used, page, row = tl.load(start_R + r) > 0, tl.load(page_R + r).to(tl.int64), tl.load(row_R + r).to(tl.int64)
    x, conv = kept_MNX + m * kept_stride + row * row_stride, conv_MPLC + m * convs_stride + page * conv_stride
    state = state_MPHKV + m * states_stride + page * state_stride + h * (K * V)
    place = state + k_K[:, None] * V + v_V[None, :]
    state_KV = tl.load(place, mask=used & (k_K >= 0)[:, None], other=0.0).to(tl.float32)
    for n in range(count):
        gates = x + n * row_stride + C + H * V + h
        k = convolve_one(load_row(x, row_stride, conv, k_channel, C, n, used, W, WP), k_taps)
        v = convolve_one(load_row(x, row_stride, conv, v_channel, C, n, used, W, WP), v_taps)
        g_log, beta = gate(tl.load(gates + H), tl.load(gates), decay_log, dt_bias)
        k *= tl.rsqrt(tl.sum(k * k, 0) + 1e-6)
        state_KV *= tl.exp(g_log)
        delta = (v - tl.sum(state_KV * k[:, None], 0)) * beta
        state_KV += k[:, None] * delta[None, :]
    tl.store(place, state_KV.to(state_MPHKV.dtype.element_ty))


@triton.jit
def keep_inputs(
    kept_MNX, conv_MPLC, page_R, row_R, count_R, start_R, target_R, kept_stride, row_stride, convs_stride, conv_stride,
    G: tl.constexpr, HG: tl.constexpr, K: tl.constexpr, V: tl.constexpr, W: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """A head of queries, of keys or of values, a request, a layer. Inputs go to the pages `target_R`."""
    C: tl.constexpr = 2 * G * K + G * HG * V
    head, r, m = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    wait_for_predecessor(DEPENDENT)
    count = tl.load(count_R + r)
    if count == 0:
        return
    used, page, row = tl.load(start_R + r) > 0, tl.load(page_R + r).to(tl.int64), tl.load(row_R + r).to(tl.int64)
    x, conv = kept_MNX + m * kept_stride + row * row_stride, conv_MPLC + m * convs_stride + page * conv_stride
    target = conv_MPLC + m * convs_stride + tl.load(target_R + r).to(tl.int64) * conv_stride
    if head < 2 * G:
        keep_last(x, row_stride, conv, target, head * K + tl.arange(0, K), C, count, used, W)
    else:
        keep_last(x, row_stride, conv, target, 2 * G * K + (head - 2 * G) * V + tl.arange(0, V), C, count, used, W)
