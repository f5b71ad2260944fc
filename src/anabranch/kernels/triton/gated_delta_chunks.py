"""The gated delta net for requests with several new tokens: in chunks of tokens, with matrix products.

T token rows, R requests, G key heads (HG value heads share one), H value heads, K and V numbers of a key and a value,
W width of the convolution, C convolved channels, N tokens of a chunk.

With c the sums of the logarithms of decays since the chunk's start, and S the state before the chunk, the updates Δ of
all its tokens satisfy (I + A) Δ = β v − (β e^c k) S, where A_ij = β_i kᵢᵀkⱼ e^(c_i − c_j) for j < i. So, with M the
inverse of I + A:

    U = M (β v)    W = M (β e^c k)    Δ = U − W S    o = e^c q S + (q kᵀ e^(c_i − c_j), j ≤ i) Δ
    S ← e^(c_last) S + kᵀ (e^(c_last − c) Δ)

`convolve_chunks` and `prepare_chunks` do for all chunks at once what does not need S, `scan_chunks` goes from chunk to
chunk, and `norm_rows` normalises and gates what that has written. Requests with one new token, and padding, are left to
step_heads, which comes last: until then their rows may hold anything. Where a request is cut a chunk ends, so that both
parts are computed as by two steps.

The inputs of the convolution that a page keeps are replaced by prepare_chunks: convolve_chunks has read them by then.
The result is in the place of U, and U in that of the values. Operands of products have the dtype of the inputs, but for
the inverse.
"""

import triton
import triton.language as tl

from anabranch.kernels.triton.attention_decode import load_request
from anabranch.kernels.triton.attention_prefill import find_rows
from anabranch.kernels.triton.gated_delta_decode import gate, norm_gated
from anabranch.kernels.triton.launch import wait_for_predecessor


@triton.jit
def find_chunk(query_start_R, context_len_R, cut_R, num_requests, i, b, N: tl.constexpr, DEPENDENT: tl.constexpr):
    """(request, its first row, number of rows, context length, and of chunk b the first of its rows and the one after
    its last); i is 0 .. RP. A request has a chunk more than its rows may need, for the cut."""
    start = tl.load(query_start_R + i, mask=i <= num_requests, other=0, cache_modifier=".cg")
    r = tl.sum(((i <= num_requests) & (start // N + 2 * i <= b)).to(tl.int32), 0) - 1
    begin, end, length = load_request(query_start_R, context_len_R, r, r < num_requests)
    cut = tl.load(cut_R + r, mask=r < num_requests, other=0, cache_modifier=".cg")
    wait_for_predecessor(DEPENDENT, trigger=0)
    first, after_cut = (b - 2 * r - begin // N) * N, tl.cdiv(cut, N) * N
    is_before = first < after_cut
    num_rows = end - begin
    return (
        r, begin, num_rows, length,
        tl.where(is_before, first, first - after_cut + cut), tl.where(is_before, cut, num_rows),
    )  # fmt: skip


@triton.jit
def convolve_head(
    x, x_stride, conv, weight_CW, first_channel, channels, y, y_stride, scale, row, num_rows, used,
    NORMED: tl.constexpr, D: tl.constexpr, W: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """D channels of ROWS rows of a request from `row` on, to y, maybe normalised to the length `scale`; x, y: the first
    row of the request. Inputs before those of the request are in its page, if `used`. A row is a vector, so that each
    input is loaded once."""
    channel = first_channel + tl.arange(0, D)
    weights, inputs = (), ()
    for i in tl.static_range(W):
        weights = weights + (tl.load(weight_CW + channel * W + i).to(tl.float32),)
    for i in tl.static_range(ROWS + W - 1):
        source = row + (i - (W - 1))
        if i < W - 1:
            one = tl.load(x + source.to(tl.int64) * x_stride + channel, mask=(source >= 0) & (channel >= 0), other=0.0)
            mask = (source < 0) & used & (channel >= 0)
            one += tl.load(conv + (source + (W - 1)) * channels + channel, mask=mask, other=0.0).to(one.dtype)
        else:  # rows after the last are computed, but not stored
            one = tl.load(x + tl.minimum(source, num_rows - 1).to(tl.int64) * x_stride + channel)
        inputs = inputs + (one.to(tl.float32),)
    for n in tl.static_range(ROWS):
        sum_D = inputs[n] * weights[0]
        for i in tl.static_range(1, W):
            sum_D += inputs[n + i] * weights[i]
        y_D = (sum_D * tl.sigmoid(sum_D)).to(x.dtype.element_ty)
        if NORMED:
            y_D = y_D.to(tl.float32)
            y_D *= tl.rsqrt(tl.sum(y_D * y_D, 0) + 1e-6) * scale
        place = y + (row + n).to(tl.int64) * y_stride + tl.arange(0, D)
        tl.store(place, y_D.to(y.dtype.element_ty), mask=(row + n < num_rows) & (channel >= 0))


@triton.jit
def invert(a_NN, N: tl.constexpr, LEVELS: tl.constexpr, PRECISION: tl.constexpr):
    """The inverse of I + a, of which only what is below the diagonal may not be zero, for N = 2 ** LEVELS.

    From blocks on the diagonal to blocks twice as large: with D two blocks whose inverse is known, and c what is below
    the first and beside the second, (D + c)⁻¹ = D⁻¹ − D⁻¹ c D⁻¹. (A series for all of a would be exact too, but its
    terms are huge where keys are alike.)

    PRECISION is that of products: "fp16" has as many bits as tf32, and a range that is enough here. With keys of length
    1, β and decays of at most 1, no number is above 1: each is a key times what updates have left of another.
    """
    i, j = tl.arange(0, N)[:, None], tl.arange(0, N)[None, :]
    inverse = tl.where(i == j, 1.0, 0.0) - tl.where(i // 2 == j // 2, a_NN, 0.0)
    for level in tl.static_range(1, LEVELS):
        beside = (i // (2 << level) == j // (2 << level)) & (i // (1 << level) != j // (1 << level))
        c = tl.where(beside, a_NN, 0.0)
        if PRECISION == "fp16":
            half = inverse.to(tl.float16)
            inverse -= tl.dot(tl.dot(half, c.to(tl.float16)).to(tl.float16), half)
        else:
            c = tl.dot(inverse, c, input_precision=PRECISION)
            inverse -= tl.dot(c, inverse, input_precision=PRECISION)
    return inverse


@triton.jit(do_not_specialize=["num_tokens", "num_requests"])
def convolve_chunks(
    x_TX, conv_PLC, page_R, query_start_R, context_len_R, conv_weight_CW, qk_TGK, v_THV,
    num_tokens, num_requests, x_stride, conv_stride,
    G: tl.constexpr, HG: tl.constexpr, K: tl.constexpr, V: tl.constexpr, W: tl.constexpr,
    ROWS: tl.constexpr, RP: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """ROWS rows of a request, and a head: of queries, of keys (both normalised), or of values."""
    H: tl.constexpr = G * HG
    C: tl.constexpr = 2 * G * K + H * V
    head = tl.program_id(0)
    requests, b = tl.arange(0, RP), tl.program_id(1)
    r, begin, num_rows, _, length, first_row = find_rows(
        query_start_R, context_len_R, num_requests, num_tokens, 0, requests, b, 1, ROWS, DEPENDENT
    )
    if (r >= num_requests) | (num_rows < 2) | (first_row >= num_rows) | (length == 0):
        return
    used, token = length > num_rows, begin.to(tl.int64)
    x, conv = x_TX + token * x_stride, conv_PLC + tl.load(page_R + r).to(tl.int64) * conv_stride
    if head < 2 * G:
        y = qk_TGK + (head // G * num_tokens + token) * (G * K) + head % G * K
        scale = tl.where(head < G, K**-0.5, 1.0)
        convolve_head(
            x, x_stride, conv, conv_weight_CW, head * K, C, y, G * K, scale, first_row, num_rows, used, True, K, W, ROWS
        )
    else:
        y, first = v_THV + token * (H * V) + (head - 2 * G) * V, 2 * G * K + (head - 2 * G) * V
        convolve_head(
            x, x_stride, conv, conv_weight_CW, first, C, y, H * V, 1.0, first_row, num_rows, used, False, V, W, ROWS
        )


@triton.jit
def keep_last(x, x_stride, conv, target, channel, channels, num_rows, used, W: tl.constexpr):
    """Keep the last inputs of a request in the page `target`, which may be its own; x is its first row."""
    inputs = ()
    for i in tl.static_range(W - 1):
        source = num_rows + (i - (W - 1))
        new = tl.load(x + source.to(tl.int64) * x_stride + channel, mask=(source >= 0) & (channel >= 0), other=0.0)
        before = tl.load(
            conv + (num_rows + i) * channels + channel, mask=(source < 0) & used & (channel >= 0), other=0.0
        )
        inputs = inputs + (new + before.to(new.dtype),)
    tl.debug_barrier()  # rows are read before they are replaced
    for i in tl.static_range(W - 1):
        tl.store(target + i * channels + channel, inputs[i].to(conv.dtype.element_ty))


@triton.jit(do_not_specialize=["num_requests"])
def prepare_chunks(
    x_TX, conv_PLC, page_R, query_start_R, context_len_R, cut_R, cut_page_R, decay_log_H, dt_bias_H,
    q_TGK, k_TGK, w_THK, v_THV, qk_THN, sum_TH, num_requests, x_stride, conv_stride,
    G: tl.constexpr, HG: tl.constexpr, K: tl.constexpr, V: tl.constexpr, W: tl.constexpr,
    N: tl.constexpr, LEVELS: tl.constexpr, RP: tl.constexpr, PRECISION: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """A chunk of a request and a value head. U replaces the values."""
    H: tl.constexpr = G * HG
    C: tl.constexpr = 2 * G * K + H * V
    h = tl.program_id(0)
    g = h // HG
    r, begin, num_rows, length, first_row, last_row = find_chunk(
        query_start_R, context_len_R, cut_R, num_requests, tl.arange(0, RP), tl.program_id(1), N, DEPENDENT
    )
    if (num_rows < 2) | (first_row >= last_row) | (length == 0):
        return
    if first_row == 0:
        x, used, page = x_TX + begin.to(tl.int64) * x_stride, length > num_rows, tl.load(page_R + r)
        conv = conv_PLC + page.to(tl.int64) * conv_stride
        for part in range(tl.where(last_row < num_rows, 0, 1), 2):  # at the cut, and at the end
            target = tl.where(part == 0, tl.load(cut_page_R + r), page).to(tl.int64)
            kept, end = conv_PLC + target * conv_stride, tl.where(part == 0, last_row, num_rows)
            keep_last(x, x_stride, conv, kept, 2 * G * K + h * V + tl.arange(0, V), C, end, used, W)
            if h % HG == 0:
                keep_last(x, x_stride, conv, kept, g * K + tl.arange(0, K), C, end, used, W)
                keep_last(x, x_stride, conv, kept, (G + g) * K + tl.arange(0, K), C, end, used, W)
    dtype = x_TX.dtype.element_ty
    token = (begin + first_row).to(tl.int64)
    n, k_K, v_V = tl.arange(0, N), tl.arange(0, K), tl.arange(0, V)
    real = first_row + n < last_row
    head, shared = token * H + h, (token * G + g) * K
    is_k, is_v = real[:, None] & (k_K >= 0)[None, :], real[:, None] & (v_V >= 0)[None, :]
    k = tl.load(k_TGK + shared + n[:, None] * (G * K) + k_K[None, :], mask=is_k, other=0.0)
    q = tl.load(q_TGK + shared + n[:, None] * (G * K) + k_K[None, :], mask=is_k, other=0.0)

    gates = x_TX + token * x_stride + n * x_stride + C + H * V + h
    a, b = tl.load(gates + H, mask=real, other=0.0), tl.load(gates, mask=real, other=0.0)
    g_log, beta = gate(a, b, tl.load(decay_log_H + h), tl.load(dt_bias_H + h))
    sum_N = tl.cumsum(tl.where(real, g_log, 0.0), 0)
    tl.store(sum_TH + head + n * H, sum_N, mask=real)
    i, j = n[:, None], n[None, :]
    decay = tl.exp(tl.where(i >= j, sum_N[:, None] - sum_N[None, :], 0.0))

    qk = tl.where(i >= j, tl.dot(q, tl.trans(k), input_precision="ieee") * decay, 0.0)
    tl.store(qk_THN + head * N + i * (H * N) + j, qk.to(dtype), mask=real[:, None] & (j >= 0))

    kk = tl.dot(k, tl.trans(k), input_precision="ieee")
    inverse = invert(tl.where(i > j, kk * decay * beta[:, None], 0.0), N, LEVELS, PRECISION).to(dtype)
    w = tl.dot(inverse, (k.to(tl.float32) * (beta * tl.exp(sum_N))[:, None]).to(dtype), input_precision="ieee")
    tl.store(w_THK + head * K + i * (H * K) + k_K[None, :], w.to(dtype), mask=is_k)

    v_ptr = v_THV + head * V + i * (H * V) + v_V[None, :]
    v = tl.load(v_ptr, mask=is_v, other=0.0).to(tl.float32)
    u = tl.dot(inverse, (v * beta[:, None]).to(dtype), input_precision="ieee")
    tl.store(v_ptr, u.to(dtype), mask=is_v)


@triton.jit(do_not_specialize=["num_requests"])
def scan_chunks(
    state_PHKV, page_R, query_start_R, context_len_R, cut_R, cut_page_R,
    q_TGK, k_TGK, w_THK, qk_THN, sum_TH, y_THV, num_requests, state_stride,
    G: tl.constexpr, HG: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    N: tl.constexpr, BV: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """BV columns of the state of a request and a value head, from its first chunk to its last. y holds U at first."""
    H: tl.constexpr = G * HG
    s, h, r = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    g = h // HG
    begin, end, length = load_request(query_start_R, context_len_R, r, r < num_requests)
    cut, cut_page = tl.load(cut_R + r), tl.load(cut_page_R + r).to(tl.int64)
    wait_for_predecessor(DEPENDENT, trigger=0)
    num_rows = end - begin
    if (num_rows < 2) | (length == 0):
        return
    used = length > num_rows
    dtype = y_THV.dtype.element_ty
    page = tl.load(page_R + r).to(tl.int64)
    n, k_K, v_V = tl.arange(0, N), tl.arange(0, K), s * BV + tl.arange(0, BV)
    place = state_PHKV + h * (K * V) + k_K[:, None] * V + v_V[None, :]
    state_KV = tl.load(place + page * state_stride, mask=used & (k_K >= 0)[:, None], other=0.0).to(tl.float32)
    for part in range(tl.where(cut > 0, 0, 1), 2):  # up to the cut, and from there on
        first, last_row = tl.where(part == 0, 0, cut), tl.where(part == 0, cut, num_rows)
        target = tl.where(part == 0, cut_page, page)
        for first_row in range(first, last_row, N):
            real = first_row + n < last_row
            token = (begin + first_row).to(tl.int64)
            head, shared = token * H + h, (token * G + g) * K
            is_k, is_v = real[:, None] & (k_K >= 0)[None, :], real[:, None] & (v_V >= 0)[None, :]
            w = tl.load(w_THK + head * K + n[:, None] * (H * K) + k_K[None, :], mask=is_k, other=0.0)
            u_ptr = y_THV + head * V + n[:, None] * (H * V) + v_V[None, :]
            u = tl.load(u_ptr, mask=is_v, other=0.0)
            q = tl.load(q_TGK + shared + n[:, None] * (G * K) + k_K[None, :], mask=is_k, other=0.0)
            k = tl.load(k_TGK + shared + n[:, None] * (G * K) + k_K[None, :], mask=is_k, other=0.0)
            qk_ptr = qk_THN + head * N + n[:, None] * (H * N) + n[None, :]
            qk = tl.load(qk_ptr, mask=real[:, None] & (n >= 0)[None, :], other=0.0)
            sum_N = tl.load(sum_TH + head + n * H, mask=real, other=0.0)
            last = tl.load(sum_TH + head + tl.minimum(N, last_row - first_row) * H - H)
            state_d = state_KV.to(dtype)
            delta = u.to(tl.float32) - tl.dot(w, state_d, input_precision="ieee")
            o = tl.dot(q, state_d, input_precision="ieee") * tl.exp(sum_N)[:, None]
            o = tl.dot(qk, delta.to(dtype), o, input_precision="ieee")
            tl.store(u_ptr, o.to(dtype), mask=is_v)
            delta *= tl.exp(last - sum_N)[:, None]
            state_KV = tl.dot(tl.trans(k), delta.to(dtype), state_KV * tl.exp(last), input_precision="ieee")
        stored = state_KV.to(state_PHKV.dtype.element_ty)
        tl.store(place + target * state_stride, stored)
        state_KV = stored.to(tl.float32)


@triton.jit(do_not_specialize=["num_rows", "eps"])
def norm_rows(
    x_TX, norm_weight_V, y_THV, num_rows, x_stride, z_start, eps,
    H: tl.constexpr, V: tl.constexpr, ROWS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """In place; row i is value head i % H of token i // H, z_start columns after which x has its z."""
    v_V = tl.arange(0, V)
    weight = tl.load(norm_weight_V + v_V).to(tl.float32)
    wait_for_predecessor(DEPENDENT, trigger=0)
    row_R = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    mask = (row_R < num_rows)[:, None] & (v_V >= 0)[None, :]
    y_ptr = y_THV + row_R.to(tl.int64)[:, None] * V + v_V[None, :]
    o = tl.load(y_ptr, mask=mask, other=0.0)
    place = ((row_R // H).to(tl.int64) * x_stride + z_start + row_R % H * V)[:, None] + v_V[None, :]
    z = tl.load(x_TX + place, mask=mask, other=0.0).to(tl.float32)
    y = norm_gated(o, z, weight, eps, y_THV.dtype.element_ty)
    tl.store(y_ptr, y, mask=mask)
