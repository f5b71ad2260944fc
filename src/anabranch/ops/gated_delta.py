"""The gated delta net: what mixes tokens in the linear-attention layers of Qwen3-Next, Qwen3.5 and Qwen3.6.

A request has a state instead of keys and values: for each value head a matrix S [K, V] and, for the convolution before
it, its last inputs. Of each token, with its convolved key k, query q and value v:

    S ← S · exp(g)        Δ = (v − Sᵀ k) · β        S ← S + k Δᵀ        o = Sᵀ q

Where drafts are verified, a state must not change before it is known which of them count. `gated_delta_drafts`
computes their rows from a state, leaves it as it is and keeps their inputs; `gated_delta_accept` then takes those that
count into the states of all layers.

T tokens of all requests one after another, R requests, G key heads of K numbers, H value heads (H divisible by G) of V
numbers, C = 2 · G · K + H · V convolved channels, L inputs that the convolution keeps (its width is L + 1), P pages.
"""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.nn.functional as functional

from anabranch.ops.op import Samples, op


class GatedDeltaCall(NamedTuple):
    x_TX: torch.Tensor
    """Rows of C inputs of the convolution (queries of all key heads, keys, values of all value heads), then z of H · V
    numbers, then b and a of H numbers each."""
    conv_PLC: torch.Tensor
    """The last inputs of the convolution, the oldest first. Of x's dtype or wider."""
    state_PHKV: torch.Tensor
    """fp32, or a dtype to which it is rounded after each step."""
    page_R: torch.Tensor
    """int32: the page of a request's state."""
    query_start_R: torch.Tensor
    """int32, R + 1 entries: request r has the rows query_start_R[r] .. query_start_R[r + 1]."""
    context_len_R: torch.Tensor
    """int32: tokens of a request; its rows are the last of them. Where they are all of them, the state before them is
    zero, whatever the page holds. 0: its rows, if it has any, are padding."""
    conv_weight_CW: torch.Tensor
    """W = L + 1; the last column is for the token itself."""
    decay_log_H: torch.Tensor
    dt_bias_H: torch.Tensor
    norm_weight_V: torch.Tensor
    eps: float
    num_key_heads: int
    max_query: int = 0
    """At least the most rows of a request; 0: not known."""
    cut_R: torch.Tensor | None = None
    """int32: after how many of its rows, fewer than all, a request's state is also stored in another page, as where a
    step ends; 0: nowhere. None: of no request."""
    cut_page_R: torch.Tensor | None = None
    """int32: these pages."""


def samples(dtype: torch.dtype, generator: torch.Generator) -> Samples:
    draw = partial(torch.randn, generator=generator)
    # Each request: (tokens in this step, context length after it, and perhaps where it is cut).
    for label, requests, key_heads, heads, K, V, kept in (
        ("one prefill", [(7, 7)], 2, 4, 16, 16, 3),
        ("decode", [(1, 5), (1, 1), (1, 16)], 1, 2, 16, 32, 3),
        ("mixed, chunked", [(3, 9), (1, 12), (6, 6), (2, 3), (1, 1)], 2, 2, 32, 16, 3),
        ("long", [(130, 130), (70, 200)], 1, 2, 16, 16, 3),
        ("cut", [(9, 9, 4), (1, 3), (5, 7, 2), (4, 4), (80, 90, 70)], 1, 2, 16, 16, 3),
        ("padding rows and an empty request", [(2, 6), (0, 0), (1, 1)], 1, 1, 16, 16, 1),
        ("a padded decode step, fp32 inputs kept", [(1, 5), (1, 1), (1, 0), (1, 0)], 2, 4, 16, 16, 3),
    ):
        cuts = [cut for _, _, *cut in requests]
        start = list(accumulate((n for n, *_ in requests), initial=0))
        tokens, pages = start[-1] + (3 if label.startswith("padding") else 0), len(requests) * (1 + any(cuts)) + 2
        channels = 2 * key_heads * K + heads * V
        state_PHKV, conv_PLC = draw(pages, heads, K, V) * 0.3, draw(pages, kept, channels).to(dtype)
        if "fp32" in label:
            conv_PLC = conv_PLC.float()
        order = (1 + torch.randperm(pages - 1, generator=generator)).int()
        page_R = order[: len(requests)].clone()
        for r, (n, length, *_) in enumerate(requests):
            if 0 < n == length:  # what a page holds before the first token does not count
                state_PHKV[page_R[r]] = conv_PLC[page_R[r]] = float("nan")
        call = GatedDeltaCall(
            x_TX=draw(tokens, channels + heads * V + 2 * heads).to(dtype),
            conv_PLC=conv_PLC,
            state_PHKV=state_PHKV,
            page_R=page_R,
            query_start_R=torch.tensor(start, dtype=torch.int32),
            context_len_R=torch.tensor([length for _, length, *_ in requests], dtype=torch.int32),
            conv_weight_CW=(draw(channels, kept + 1) * 0.5).to(dtype),
            decay_log_H=draw(heads) * 0.5,
            dt_bias_H=draw(heads),
            norm_weight_V=(1 + 0.1 * draw(V)).to(dtype),
            eps=1e-6,
            num_key_heads=key_heads,
            max_query=0 if "chunked" in label else max(n for n, *_ in requests),
            cut_R=torch.tensor([sum(cut) for cut in cuts], dtype=torch.int32) if any(cuts) else None,
            cut_page_R=order[-len(requests) :].clone() if any(cuts) else None,
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


def request_rows(call: GatedDeltaCall) -> Iterator[tuple[int, slice, int, int]]:
    """(request, its rows, its page, tokens before these rows) of the requests that have rows. One that is cut comes
    twice, with its rows up to there and those after; meanwhile its state is copied."""
    starts, lengths = call.query_start_R.tolist(), call.context_len_R.tolist()
    cuts = [0] * len(lengths) if call.cut_R is None else call.cut_R.tolist()
    for r, page in enumerate(call.page_R.tolist()):
        begin, end = starts[r : r + 2]
        if begin < end and lengths[r]:
            before = lengths[r] - (end - begin)
            if cuts[r]:
                assert call.cut_page_R is not None
                yield r, slice(begin, begin + cuts[r]), page, before
                for states in (call.conv_PLC, call.state_PHKV):
                    states[call.cut_page_R[r]] = states[page]
            yield r, slice(begin + cuts[r], end), page, before + cuts[r]


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
    """y_THV. Updates the pages of the requests that have rows; rows after the last request, and those of requests
    without context, are padding: they touch no page, and their result is zero."""
    y_THV = call.x_TX.new_zeros(call.x_TX.shape[0], *call.state_PHKV.shape[1::2])
    for _, rows, page, before in request_rows(call):
        first = before == 0
        x_TC, z_THV, b_TH, a_TH = split_row(call, call.x_TX[rows])
        q, k, v = split_channels(call, convolve(call, x_TC, page, first))
        g_TH, beta_TH = gates(call, b_TH, a_TH)
        state_HKV = torch.zeros_like(call.state_PHKV[page]).float() if first else call.state_PHKV[page].float()
        o_THV = torch.empty_like(v)
        for t in range(len(v)):
            state_HKV = state_HKV * g_TH[t].exp()[:, None, None]
            delta_HV = (v[t] - (state_HKV * k[t, :, :, None]).sum(1)) * beta_TH[t, :, None]
            state_HKV = state_HKV + k[t, :, :, None] * delta_HV[:, None, :]
            o_THV[t] = (state_HKV * q[t, :, :, None]).sum(1)
        call.state_PHKV[page] = state_HKV.to(call.state_PHKV.dtype)
        y_THV[rows] = gated_norm(call, o_THV, z_THV)
    return y_THV


class DeltaDraftsCall(NamedTuple):
    x_TX: torch.Tensor
    """As in GatedDeltaCall, as are all that have the same names."""
    kept_NX: torch.Tensor
    """The inputs of these requests' rows are kept here, at the same places; not z."""
    conv_PLC: torch.Tensor
    state_PHKV: torch.Tensor
    page_R: torch.Tensor
    row_R: torch.Tensor
    """int32: the first row of a request."""
    count_R: torch.Tensor
    """int32: how many rows it has; 0: this op is not for it."""
    start_R: torch.Tensor
    """int32: tokens before its first row; 0: the state is zero, whatever the page holds."""
    conv_weight_CW: torch.Tensor
    decay_log_H: torch.Tensor
    dt_bias_H: torch.Tensor
    norm_weight_V: torch.Tensor
    eps: float
    num_key_heads: int


class DeltaAcceptCall(NamedTuple):
    """Of M layers; the other letters as above."""

    kept_MNX: torch.Tensor
    conv_MPLC: torch.Tensor
    state_MPHKV: torch.Tensor
    page_R: torch.Tensor
    row_R: torch.Tensor
    count_R: torch.Tensor
    """int32: how many of the rows from row_R on count."""
    start_R: torch.Tensor
    conv_weight_MCW: torch.Tensor
    decay_log_MH: torch.Tensor
    dt_bias_MH: torch.Tensor
    num_key_heads: int


def draft_samples(dtype: torch.dtype, generator: torch.Generator) -> Samples:
    draw, ints = partial(torch.randn, generator=generator), partial(torch.tensor, dtype=torch.int32)
    # Each request: (rows, tokens before them).
    for label, requests, key_heads, heads, K, V, kept, padding in (
        ("drafts", [(5, 9), (1, 4), (3, 1)], 2, 4, 16, 16, 3, 0),
        ("no drafts, a first token, padding", [(1, 5), (1, 0), (0, 0), (2, 7)], 1, 2, 16, 32, 3, 2),
        ("more rows than inputs are kept", [(4, 6), (2, 2)], 1, 1, 32, 16, 1, 0),
    ):
        rows = [n for n, _ in requests]
        tokens, pages, channels = sum(rows) + padding, len(requests) + 2, 2 * key_heads * K + heads * V
        x_TX = draw(tokens, channels + heads * V + 2 * heads).to(dtype)
        call = DeltaDraftsCall(
            x_TX=x_TX,
            kept_NX=torch.zeros(tokens + 3, x_TX.shape[1], dtype=dtype),
            conv_PLC=draw(pages, kept, channels),
            state_PHKV=draw(pages, heads, K, V) * 0.3,
            page_R=torch.randperm(pages, generator=generator)[: len(requests)].int(),
            row_R=ints([sum(rows[:r]) for r in range(len(rows))]),
            count_R=ints(rows),
            start_R=ints([start for _, start in requests]),
            conv_weight_CW=(draw(channels, kept + 1) * 0.5).to(dtype),
            decay_log_H=draw(heads) * 0.5,
            dt_bias_H=draw(heads),
            norm_weight_V=(1 + 0.1 * draw(V)).to(dtype),
            eps=1e-6,
            num_key_heads=key_heads,
        )
        yield label, {"call": call}


def accept_samples(dtype: torch.dtype, generator: torch.Generator) -> Samples:
    for label, sample in draft_samples(dtype, generator):
        layers = [sample["call"], next(s["call"] for name, s in draft_samples(dtype, generator) if name == label)]
        names = "kept_NX", "conv_PLC", "state_PHKV", "conv_weight_CW", "decay_log_H", "dt_bias_H"
        layers = [call._replace(kept_NX=torch.cat([call.x_TX, call.kept_NX[:3]])) for call in layers]
        kept, conv, state, weight, decay_log, dt_bias = (
            torch.stack([getattr(call, name) for call in layers]) for name in names
        )
        call = layers[0]
        count_R = (call.count_R - (call.count_R > 2).int()).clamp(min=0)
        requests = call.page_R, call.row_R, count_R, call.start_R
        weights = weight, decay_log, dt_bias
        yield label, {"call": DeltaAcceptCall(kept, conv, state, *requests, *weights, call.num_key_heads)}


def one_request(
    x_TX: torch.Tensor, conv_LC: torch.Tensor, state_HKV: torch.Tensor, before: int, *parameters: Any
) -> torch.Tensor:
    """y_THV of one request's rows, which follow `before` tokens; its state is updated."""
    requests = torch.tensor([0]), torch.tensor([0, len(x_TX)]), torch.tensor([before + len(x_TX)])
    return gated_delta.reference(GatedDeltaCall(x_TX, conv_LC[None], state_HKV[None], *requests, *parameters))


def drafted_rows(call: DeltaDraftsCall | DeltaAcceptCall) -> Iterator[tuple[int, slice, int]]:
    """(page, rows, tokens before them) of the requests that have rows."""
    for page, row, count, start in torch.stack((call.page_R, call.row_R, call.count_R, call.start_R), 1).tolist():
        if count:
            yield page, slice(row, row + count), start


def compute_drafts(call: DeltaDraftsCall, compute: Callable[..., torch.Tensor]) -> torch.Tensor:
    """gated_delta_drafts, where `compute` does what one_request does."""
    y_THV = call.x_TX.new_zeros(call.x_TX.shape[0], *call.state_PHKV.shape[1::2])
    channels, heads = call.conv_PLC.shape[2], call.state_PHKV.shape[1]
    for page, rows, start in drafted_rows(call):
        states = call.conv_PLC[page].clone(), call.state_PHKV[page].clone()
        y_THV[rows] = compute(call.x_TX[rows], *states, start, *call[8:])
        call.kept_NX[rows, :channels] = call.x_TX[rows, :channels]
        call.kept_NX[rows, -2 * heads :] = call.x_TX[rows, -2 * heads :]
    return y_THV


def accept_drafts(call: DeltaAcceptCall, compute: Callable[..., torch.Tensor]) -> None:
    """gated_delta_accept, likewise."""
    one_V = call.state_MPHKV.new_ones(call.state_MPHKV.shape[4])
    for m, kept_NX in enumerate(call.kept_MNX):
        weights = call.conv_weight_MCW[m], call.decay_log_MH[m], call.dt_bias_MH[m], one_V, 1e-6
        for page, rows, start in drafted_rows(call):
            states = call.conv_MPLC[m, page], call.state_MPHKV[m, page]
            compute(kept_NX[rows], *states, start, *weights, call.num_key_heads)


@op(samples=draft_samples, mutates=("kept_NX",))
def gated_delta_drafts(call: DeltaDraftsCall) -> torch.Tensor:
    """y_THV of the requests' rows, as from gated_delta, but no page is changed; zero elsewhere."""
    return compute_drafts(call, one_request)


@op(samples=accept_samples, mutates=("conv_MPLC", "state_MPHKV"))
def gated_delta_accept(call: DeltaAcceptCall) -> None:
    """Updates the pages with rows that gated_delta_drafts has kept, as gated_delta would have done."""
    accept_drafts(call, one_request)
