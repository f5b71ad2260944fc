"""The gated delta net: what mixes tokens in the linear-attention layers of Qwen3-Next, Qwen3.5 and Qwen3.6.

A request has a state instead of keys and values: for each value head a matrix S [K, V] and, for the convolution before
it, its last inputs. Of each token, with its convolved key k, query q and value v:

    S ← S · exp(g)        Δ = (v − Sᵀ k) · β        S ← S + k Δᵀ        o = Sᵀ q

T tokens of all requests one after another, R requests, G key heads of K numbers, H value heads (H divisible by G) of V
numbers, C = 2 · G · K + H · V convolved channels, L inputs that the convolution keeps (its width is L + 1), P pages.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as functional

from anabranch.ops.op import Samples, op


class GatedDeltaCall(NamedTuple):
    x_TX: torch.Tensor
    """Rows of C inputs of the convolution (queries of all key heads, keys, values of all value heads), then z of H · V
    numbers, then b and a of H numbers each."""
    conv_PLC: torch.Tensor
    """The last inputs of the convolution, the oldest first."""
    state_PHKV: torch.Tensor
    """fp32, or a dtype to which it is rounded after each step."""
    page_R: torch.Tensor
    """int32: the page of a request's state."""
    query_start_R: torch.Tensor
    """int32, R + 1 entries: request r has the rows query_start_R[r] .. query_start_R[r + 1]."""
    context_len_R: torch.Tensor
    """int32: tokens of a request; its rows are the last of them. Where they are all of them, the state before them is
    zero, whatever the page holds."""
    conv_weight_CW: torch.Tensor
    """W = L + 1; the last column is for the token itself."""
    decay_log_H: torch.Tensor
    dt_bias_H: torch.Tensor
    norm_weight_V: torch.Tensor
    eps: float
    num_key_heads: int
    max_query: int = 0
    """At least the most rows of a request; 0: not known."""


def samples(dtype: torch.dtype, generator: torch.Generator) -> Samples:
    # Each request: (tokens in this step, context length after it).
    for label, requests, key_heads, heads, K, V, kept in (
        ("one prefill", [(7, 7)], 2, 4, 16, 16, 3),
        ("decode", [(1, 5), (1, 1), (1, 16)], 1, 2, 16, 32, 3),
        ("mixed, chunked", [(3, 9), (1, 12), (6, 6), (2, 3), (1, 1)], 2, 2, 32, 16, 3),
        ("long", [(130, 130), (70, 200)], 1, 2, 16, 16, 3),
        ("padding rows and an empty request", [(2, 6), (0, 0), (1, 1)], 1, 1, 16, 16, 1),
    ):
        start = [0]
        for n, _ in requests:
            start.append(start[-1] + n)
        tokens, pages = start[-1] + (3 if label.startswith("padding") else 0), len(requests) + 2
        channels = 2 * key_heads * K + heads * V

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator)

        state_PHKV, conv_PLC = draw(pages, heads, K, V) * 0.3, draw(pages, kept, channels).to(dtype)
        page_R = (1 + torch.randperm(pages - 1, generator=generator)[: len(requests)]).int()
        for r, (n, length) in enumerate(requests):
            if 0 < n == length:  # what a page holds before the first token does not count
                state_PHKV[page_R[r]] = conv_PLC[page_R[r]] = float("nan")
        call = GatedDeltaCall(
            x_TX=draw(tokens, channels + heads * V + 2 * heads).to(dtype),
            conv_PLC=conv_PLC,
            state_PHKV=state_PHKV,
            page_R=page_R,
            query_start_R=torch.tensor(start, dtype=torch.int32),
            context_len_R=torch.tensor([length for _, length in requests], dtype=torch.int32),
            conv_weight_CW=(draw(channels, kept + 1) * 0.5).to(dtype),
            decay_log_H=draw(heads) * 0.5,
            dt_bias_H=draw(heads),
            norm_weight_V=(1 + 0.1 * draw(V)).to(dtype),
            eps=1e-6,
            num_key_heads=key_heads,
            max_query=0 if "chunked" in label else max(n for n, _ in requests),
        )
        yield label, {"call": call}


def split_row(call: GatedDeltaCall, x_TX: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """(inputs of the convolution, z_THV, b_TH, a_TH)."""
    heads, V = call.state_PHKV.shape[1], call.state_PHKV.shape[3]
    x_TC, z_TV, b_TH, a_TH = x_TX.split((call.conv_PLC.shape[2], heads * V, heads, heads), 1)
    return x_TC, z_TV.unflatten(1, (heads, V)), b_TH, a_TH


def split_channels(call: GatedDeltaCall, x_TC: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(q_THK, k_THK, v_THV) of convolved inputs, in fp32: queries and keys normalised, one for each value head."""
    heads, K, V = call.state_PHKV.shape[1:]
    G = call.num_key_heads
    q, k, v = x_TC.float().split((G * K, G * K, heads * V), 1)
    q, k = (x.unflatten(1, (G, K)) for x in (q, k))
    q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    q, k = (x.repeat_interleave(heads // G, 1) for x in (q * K**-0.5, k))
    return q, k, v.unflatten(1, (heads, V))


def gates(call: GatedDeltaCall, b_TH: torch.Tensor, a_TH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(g_TH, β_TH) in fp32."""
    g_TH = -call.decay_log_H.float().exp() * functional.softplus(a_TH.float() + call.dt_bias_H.float())
    return g_TH, b_TH.float().sigmoid()


def gated_norm(call: GatedDeltaCall, o_THV: torch.Tensor, z_THV: torch.Tensor) -> torch.Tensor:
    """RMSNorm of each head, times silu(z); o is in fp32, the result in z's dtype."""
    o_THV = o_THV.to(z_THV.dtype).float()
    o_THV = o_THV * torch.rsqrt(o_THV.square().mean(-1, keepdim=True) + call.eps)
    y_THV = o_THV.to(z_THV.dtype).float() * call.norm_weight_V.float() * functional.silu(z_THV.float())
    return y_THV.to(z_THV.dtype)


def convolve(call: GatedDeltaCall, x_TC: torch.Tensor, page: int, first: bool) -> torch.Tensor:
    """silu of the convolution of one request's rows; its last inputs are kept."""
    kept = call.conv_PLC.shape[1]
    before = torch.zeros_like(call.conv_PLC[page]) if first else call.conv_PLC[page]
    inputs = torch.cat([before.to(x_TC.dtype), x_TC])
    call.conv_PLC[page] = inputs[len(inputs) - kept :]
    weight_CW = call.conv_weight_CW.float()
    windows = inputs.float().unfold(0, kept + 1, 1)
    return functional.silu((windows * weight_CW).sum(-1)).to(x_TC.dtype)


@op(samples=samples, mutates=("conv_PLC", "state_PHKV"))
def gated_delta(call: GatedDeltaCall) -> torch.Tensor:
    """y_THV. Updates the pages of the requests that have rows; rows after the last request are padding, and their
    result is zero."""
    heads, V = call.state_PHKV.shape[1], call.state_PHKV.shape[3]
    y_THV = call.x_TX.new_zeros(call.x_TX.shape[0], heads, V)
    start, lengths = call.query_start_R.tolist(), call.context_len_R.tolist()
    for r, page in enumerate(call.page_R.tolist()):
        rows = slice(start[r], start[r + 1])
        num_rows = start[r + 1] - start[r]
        if not num_rows:
            continue
        first = lengths[r] == num_rows
        x_TC, z_THV, b_TH, a_TH = split_row(call, call.x_TX[rows])
        q, k, v = split_channels(call, convolve(call, x_TC, page, first))
        g_TH, beta_TH = gates(call, b_TH, a_TH)
        state_HKV = torch.zeros_like(call.state_PHKV[page]).float() if first else call.state_PHKV[page].float()
        o_THV = torch.empty_like(v)
        for t in range(num_rows):
            state_HKV = state_HKV * g_TH[t].exp()[:, None, None]
            delta_HV = (v[t] - (state_HKV * k[t, :, :, None]).sum(1)) * beta_TH[t, :, None]
            state_HKV = state_HKV + k[t, :, :, None] * delta_HV[:, None, :]
            o_THV[t] = (state_HKV * q[t, :, :, None]).sum(1)
        call.state_PHKV[page] = state_HKV.to(call.state_PHKV.dtype)
        y_THV[rows] = gated_norm(call, o_THV, z_THV)
    return y_THV
