"""The gated delta net for requests with one new token: one program does a value head of a request from the convolution
to the gated norm, and holds BV columns of the head's state in registers at a time.

T token rows, R requests, G key heads (HG value heads share one), H value heads, K and V numbers of a key and a value,
W width of the convolution and WP that rounded up, C convolved channels.

The state is read once and written once, and that is nearly all of the traffic. With S' the decayed state, what is
written is S' + k Δᵀ, and o = S'ᵀ q + Δ (kᵀ q): so both sums over S' are made in one pass.

The HG programs of a key head all convolve its queries and keys, which costs less than to store and load them. Their
inputs in the page may be replaced only when all of those programs have read them: each counts, and the last one does
it, and resets the counter for the next launch. So launches on a device must not overlap.

On Hopper the kernel starts before its predecessor has finished (`DEPENDENT`), and prefetches its state to L2 where all
its programs run at once (`FETCH`; with more, what L2 holds would be evicted before it is used).
Pages, starts and lengths must have been written before the predecessor, as for attention. The state need not: it is
read after the wait.
"""

import triton
import triton.language as tl

from anabranch.kernels.triton.attention_decode import load_request
from anabranch.kernels.triton.launch import prefetch, wait_for_predecessor


@triton.jit
def gate(a, b, decay_log, dt_bias):
    """(logarithm of the decay, β)."""
    a = a.to(tl.float32) + dt_bias.to(tl.float32)
    softplus = tl.where(a > 20.0, a, tl.log(1.0 + tl.exp(tl.minimum(a, 20.0))))
    return -tl.exp(decay_log.to(tl.float32)) * softplus, tl.sigmoid(b.to(tl.float32))


@triton.jit
def load_taps(weight_CW, channel, W: tl.constexpr, WP: tl.constexpr):
    """Weights of channels, a row for each tap."""
    i = tl.arange(0, WP)[:, None]
    return tl.load(weight_CW + channel[None, :] * W + i, mask=(i < W) & (channel >= 0)[None, :], other=0.0)


@triton.jit
def load_inputs(x, conv, channel, channels, used, W: tl.constexpr, WP: tl.constexpr):
    """The last inputs of channels, a row for each tap; those before the token itself are zero unless `used`."""
    i = tl.arange(0, WP)[:, None]
    there = (channel >= 0)[None, :]
    before = tl.load(conv + i * channels + channel[None, :], mask=(i < W - 1) & used & there, other=0.0)
    own = tl.load(x + channel[None, :] + i * 0, mask=(i == W - 1) & there, other=0.0)
    return own + before.to(own.dtype)


@triton.jit
def convolve_one(inputs, taps):
    """In fp32, rounded to the dtype of the inputs."""
    y = tl.sum(inputs.to(tl.float32) * taps.to(tl.float32), 0)
    return (y * tl.sigmoid(y)).to(inputs.dtype).to(tl.float32)


@triton.jit
def keep(conv, channel, channels, inputs, W: tl.constexpr, WP: tl.constexpr):
    i = tl.arange(0, WP)[:, None]
    place = conv + (i - 1) * channels + channel[None, :]
    tl.store(place, inputs.to(conv.dtype.element_ty), mask=(i > 0) & (i < W) & (channel >= 0)[None, :])


@triton.jit(do_not_specialize=["num_tokens", "num_requests", "eps", "trigger"])
def step_heads(
    x_TX, conv_PLC, state_PHKV, page_R, query_start_R, context_len_R,
    conv_weight_CW, decay_log_H, dt_bias_H, norm_weight_V, y_THV, count_RG,
    num_tokens, num_requests, x_stride, conv_stride, state_stride, eps, trigger,
    G: tl.constexpr, HG: tl.constexpr, K: tl.constexpr, V: tl.constexpr, W: tl.constexpr,
    WP: tl.constexpr, BV: tl.constexpr, FETCH: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Requests with several new tokens are left alone. Rows after the last request, and those of requests without
    context, become zero."""
    H: tl.constexpr = G * HG
    C: tl.constexpr = 2 * G * K + H * V
    h, r = tl.program_id(0), tl.program_id(1)
    g = h // HG
    k_K, v_V = tl.arange(0, K), tl.arange(0, V)
    row, next_row, length = load_request(query_start_R, context_len_R, r, r < num_requests)
    page = tl.load(page_R + r, cache_modifier=".cg").to(tl.int64)
    padding_row = tl.load(query_start_R + num_requests, cache_modifier=".cg")
    single, used = (next_row - row == 1) & (length > 0), length > 1
    state = state_PHKV + page * state_stride + h * (K * V)
    if FETCH:
        if single & used:
            LINE: tl.constexpr = 1024 // state_PHKV.dtype.element_ty.primitive_bitwidth  # 128 bytes
            prefetch((state + tl.arange(0, K * V // LINE) * LINE).to(tl.int64))
    q_channel, k_channel, v_channel = g * K + k_K, (G + g) * K + k_K, 2 * G * K + h * V + v_V
    q_taps = load_taps(conv_weight_CW, q_channel, W, WP)
    k_taps = load_taps(conv_weight_CW, k_channel, W, WP)
    v_taps = load_taps(conv_weight_CW, v_channel, W, WP)
    decay_log, dt_bias = tl.load(decay_log_H + h), tl.load(dt_bias_H + h)
    norm_weight = tl.load(norm_weight_V + v_V).to(tl.float32)
    wait_for_predecessor(DEPENDENT, trigger=trigger)

    zeros = tl.zeros([V], y_THV.dtype.element_ty)
    for t in range(padding_row + r, num_tokens, tl.num_programs(1)):
        tl.store(y_THV + (tl.cast(t, tl.int64) * H + h) * V + v_V, zeros)
    for t in range(row, tl.where(length == 0, next_row, row)):
        tl.store(y_THV + (tl.cast(t, tl.int64) * H + h) * V + v_V, zeros)
    if not single:
        return

    x, conv = x_TX + row.to(tl.int64) * x_stride, conv_PLC + page * conv_stride
    q_inputs = load_inputs(x, conv, q_channel, C, used, W, WP)
    k_inputs = load_inputs(x, conv, k_channel, C, used, W, WP)
    v_inputs = load_inputs(x, conv, v_channel, C, used, W, WP)
    z = tl.load(x + C + h * V + v_V).to(tl.float32)
    g_log, beta = gate(tl.load(x + C + H * V + H + h), tl.load(x + C + H * V + h), decay_log, dt_bias)

    q, k, v = convolve_one(q_inputs, q_taps), convolve_one(k_inputs, k_taps), convolve_one(v_inputs, v_taps)
    q *= tl.rsqrt(tl.sum(q * q, 0) + 1e-6) * (K**-0.5)
    k *= tl.rsqrt(tl.sum(k * k, 0) + 1e-6)
    tl.debug_barrier()  # all threads have read the page before one replaces what it kept
    keep(conv, v_channel, C, v_inputs, W, WP)
    if HG == 1:
        keep(conv, q_channel, C, q_inputs, W, WP)
        keep(conv, k_channel, C, k_inputs, W, WP)
    else:
        # Needs no fence, which would wait for the state: the sums above have used all that the threads have read.
        count = count_RG + r * G + g
        if tl.atomic_add(count, 1, sem="relaxed", scope="gpu") == HG - 1:
            tl.store(count, 0)
            keep(conv, q_channel, C, q_inputs, W, WP)
            keep(conv, k_channel, C, k_inputs, W, WP)

    decay, kq, block_B = tl.exp(g_log), tl.sum(k * q, 0), tl.arange(0, V // BV)[:, None]
    v_BV, o_BV = tl.reshape(v, [V // BV, BV]), tl.zeros([V // BV, BV], tl.float32)
    for block in range(V // BV):
        place = state + k_K[:, None] * V + block * BV + tl.arange(0, BV)[None, :]
        state_KV = tl.load(place, mask=used & (k_K >= 0)[:, None], other=0.0).to(tl.float32) * decay
        delta = (tl.sum(tl.where(block_B == block, v_BV, 0.0), 0) - tl.sum(state_KV * k[:, None], 0)) * beta
        o_V = tl.sum(state_KV * q[:, None], 0) + delta * kq
        tl.store(place, (state_KV + k[:, None] * delta[None, :]).to(state_PHKV.dtype.element_ty))
        o_BV = tl.where(block_B == block, o_V[None, :], o_BV)
    o = tl.reshape(o_BV, [V])
    y = norm_gated(o[None, :], z[None, :], norm_weight, eps, y_THV.dtype.element_ty)
    tl.store(y_THV + (row.to(tl.int64) * H + h) * V + v_V[None, :], y)


@triton.jit
def norm_gated(o_RV, z_RV, weight_V, eps, dtype: tl.constexpr):
    """RMSNorm of rows of o, which are rounded before and after it, times their weight and silu(z)."""
    o_RV = o_RV.to(dtype).to(tl.float32)
    o_RV *= tl.rsqrt(tl.sum(o_RV * o_RV, 1) * (1.0 / o_RV.shape[1]) + eps)[:, None]
    return (o_RV.to(dtype).to(tl.float32) * weight_V[None, :] * (z_RV * tl.sigmoid(z_RV))).to(dtype)
