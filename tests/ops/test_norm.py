"""Norms against transformers and torch, what is added before them, and where narrow dtypes would overflow."""

import pytest
import torch

from anabranch import ops


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weighted", [True, False])
def test_as_gemma4_does_it(dtype: torch.dtype, weighted: bool) -> None:
    from transformers.models.gemma4.modeling_gemma4 import Gemma4RMSNorm

    norm = Gemma4RMSNorm(24, eps=1e-3, with_scale=weighted)
    weight_D = torch.randn(24).to(dtype) if weighted else None
    if weighted:
        norm.weight.data = weight_D
    x = torch.randn(2, 5, 24).to(dtype)
    torch.testing.assert_close(ops.rms_norm.reference(x, weight_D, 1e-3), norm(x))


def test_as_llama_does_it() -> None:
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    norm = LlamaRMSNorm(24, eps=1e-5)
    norm.weight.data = torch.randn(24)
    x = torch.randn(5, 24)
    torch.testing.assert_close(ops.rms_norm.reference(x, norm.weight, 1e-5), norm(x))


def test_large_fp16_values_do_not_overflow() -> None:
    x = torch.full((1, 16), 1000.0, dtype=torch.float16)  # the square is past fp16's 65504
    assert torch.equal(ops.rms_norm.reference(x, None, 1e-6), torch.ones_like(x))


def test_zeros_stay_zero() -> None:
    x = torch.zeros(2, 8)
    assert torch.equal(ops.rms_norm.reference(x, torch.ones(8), 1e-6), x)


def test_add_rms_norm_gives_both_the_norm_and_the_sum() -> None:
    x_TD, residual_TD, weight_D = torch.randn(3, 8), torch.randn(3, 8), torch.randn(8)
    normed_TD, total_TD = ops.add_rms_norm.reference(x_TD, residual_TD, weight_D, 1e-6)
    assert torch.equal(total_TD, x_TD + residual_TD)
    torch.testing.assert_close(normed_TD, torch.nn.functional.rms_norm(total_TD, (8,), weight_D, 1e-6))


def test_rows_without_an_expert_count_for_nothing() -> None:
    rows_TKD, residual_TD, weight_D = torch.randn(3, 4, 8), torch.randn(3, 8), torch.randn(8)
    expert_TK = torch.tensor([[5, 0, 1, 2], [-1, 3, 3, -1], [-1, -1, -1, -1]], dtype=torch.int32)
    x_TD = torch.stack([rows_TKD[0].sum(0), rows_TKD[1, 1] + rows_TKD[1, 2], torch.zeros(8)])
    rows_TKD[expert_TK < 0] = float("nan")
    found = ops.sum_add_rms_norm.reference(rows_TKD, expert_TK, residual_TD, weight_D, 1e-6)
    for one, other in zip(found, ops.add_rms_norm.reference(x_TD, residual_TD, weight_D, 1e-6), strict=True):
        torch.testing.assert_close(one, other)


def test_the_sum_of_rows_is_rounded_before_the_residual_is_added() -> None:
    """1 + 2⁻⁸ is 1 in bf16; with the residual's −1 more would be left than two ops leave."""
    rows_TKD = torch.tensor([[[1.0], [2.0**-8]]]).bfloat16()
    given = torch.zeros(1, 2, dtype=torch.int32), torch.tensor([[-1.0]]).bfloat16(), torch.ones(1).bfloat16()
    assert ops.sum_add_rms_norm.reference(rows_TKD, *given, 1e-6)[1].item() == 0.0
