"""What the kernels in C compute, for any number of rows: a row's sums have the same order in all of them. They are for
fp32. Where there are none, or what is called does not suit them, functions return None and kernels compute the
reference, and do so for any number of rows.

A tensor of one row may be contiguous where several rows like it are not: so everything is made contiguous first.
"""

import torch

from anabranch import ops
from anabranch.formats import BF16
from anabranch.kernels.c.library import problem
from anabranch.ops.attention import AttentionCall
from anabranch.ops.experts import ExpertsCall
from anabranch.ops.rope_store import RopeStoreCall
from anabranch.ops.route import RouteCall
from anabranch.ops.weight import Weight

if not problem:
    from anabranch.kernels.c import activation, attention, experts, linear, norm, rope_store, route

TOKENS = 256
"""Of one call of attention, where each has a page table of its own."""

TRAITS = () if problem else ("bf16",)


def fp32(*tensors: torch.Tensor | None) -> bool:
    return all(x is None or x.dtype == torch.float32 for x in tensors)


def product(x_TD: torch.Tensor, weight_FD: Weight, bias_F: torch.Tensor | None) -> torch.Tensor | None:
    if problem or x_TD.dim() != 2 or not x_TD.shape[0] or not fp32(x_TD, bias_F):
        return None
    stored_FD = weight_FD.data if weight_FD.format is BF16 else weight_FD.dense(torch.float32)
    return linear.product(x_TD.contiguous(), stored_FD, bias_F) if stored_FD.is_contiguous() else None


def gated(x_T2I: torch.Tensor, kind: str) -> torch.Tensor | None:
    x_T2I = x_T2I.contiguous()
    return None if problem or not activation.fits_gated(x_T2I, kind) else activation.gated_activation(x_T2I, kind)


def add_gated(x_TD: torch.Tensor, gated_TD: torch.Tensor, gate_T1: torch.Tensor) -> torch.Tensor | None:
    if problem or not fp32(x_TD, gated_TD, gate_T1):
        return None
    return activation.add_gated(x_TD.contiguous(), gated_TD.contiguous(), gate_T1.contiguous())


@ops.rms_norm.kernel("invariant", on=("cpu", "fake"))
def rms_norm(x: torch.Tensor, weight_D: torch.Tensor | None, eps: float) -> torch.Tensor:
    if problem or x.dim() != 2 or not fp32(x, weight_D):
        return ops.rms_norm.reference(x, weight_D, eps)
    return norm.rms_norm(x.contiguous(), weight_D, eps)


@ops.add_rms_norm.kernel("invariant", on=("cpu", "fake"))
def add_rms_norm(
    x_TD: torch.Tensor, residual_TD: torch.Tensor, weight_D: torch.Tensor, eps: float, fp8: str = ""
) -> tuple[torch.Tensor, torch.Tensor]:
    if problem or not fp32(x_TD, residual_TD, weight_D):
        return ops.add_rms_norm.reference(x_TD, residual_TD, weight_D, eps)
    return norm.add_rms_norm(x_TD.contiguous(), residual_TD.contiguous(), weight_D, eps)


@ops.route.kernel("invariant", on=("cpu", "fake"))
def choose(call: RouteCall) -> tuple[torch.Tensor, torch.Tensor]:
    call = call._replace(logits_TE=call.logits_TE.contiguous())
    return ops.route.reference(call) if problem or not route.fits(call) else route.route(call)


@ops.rope_store.kernel("invariant", on=("cpu", "fake"))
def turn_and_store(call: RopeStoreCall) -> torch.Tensor:
    tables = call.cos_TF.contiguous(), call.sin_TF.contiguous()
    call = call._replace(cos_TF=tables[0], sin_TF=tables[1], slot_T=call.slot_T.long())
    if problem or not rope_store.fits(call):  # torch's kernel fuses a product and a sum
        return ops.rope_store.reference(call)
    return rope_store.rope_store(call)


def combined(call: ExpertsCall) -> torch.Tensor | None:
    call = call._replace(
        x_TD=call.x_TD.contiguous(), expert_TK=call.expert_TK.contiguous(), weight_TK=call.weight_TK.contiguous()
    )
    return None if problem or not call.x_TD.shape[0] or not experts.fits(call) else experts.experts(call)


def attended(call: AttentionCall) -> torch.Tensor | None:
    """Each row like a request of its own."""
    call = call._replace(
        q_THD=call.q_THD.contiguous(),
        page_table_RM=call.page_table_RM.contiguous(),
        context_len_R=call.context_len_R.contiguous(),
    )
    if problem or not attention.fits(call):
        return None
    if call.max_query == 1 and call.q_THD.shape[0] == call.context_len_R.shape[0]:
        return attention.attention(call)
    start_R = call.query_start_R
    request_T = torch.repeat_interleave(start_R.diff())
    if not request_T.shape[0]:
        return torch.zeros_like(call.q_THD)
    length_T = call.context_len_R[request_T] - start_R[1:][request_T] + torch.arange(1, request_T.shape[0] + 1)
    padding = call.q_THD.shape[0] - request_T.shape[0]  # rows of no request, without context
    request_T, length_T = (torch.nn.functional.pad(x, (0, padding)) for x in (request_T, length_T.int()))
    parts = zip(call.q_THD.split(TOKENS), request_T.split(TOKENS), length_T.split(TOKENS), strict=True)
    return torch.cat(
        [
            attention.attention(
                call._replace(q_THD=q_THD, page_table_RM=call.page_table_RM[request_T], context_len_R=length_T)
            )
            for q_THD, request_T, length_T in parts
        ]
    )
