"""Long prompts are computed in blocks of queries where scores or masks of all of them would fill the memory."""

import sys
from typing import Any

import pytest
import torch

from anabranch import ops
from anabranch.kernels.torch import attention


def samples(op: Any) -> list[Any]:
    return [given["call"] for _, given in op.samples(torch.float32, torch.Generator().manual_seed(0))]


def test_latent_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = samples(ops.latent_attention)
    expected = [ops.latent_attention.reference(call) for call in calls]
    monkeypatch.setattr(sys.modules["anabranch.ops.latent_attention"], "SCORES", 30)
    for call, whole in zip(calls, expected, strict=True):
        torch.testing.assert_close(ops.latent_attention.reference(call), whole, rtol=1e-6, atol=1e-6)


def test_sinks(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = [call for call in samples(ops.attention) if call.sink_H is not None]
    assert any(call.query_start_R.diff().max() > 2 for call in calls)
    expected = [attention.attention(call) for call in calls]
    monkeypatch.setattr(attention, "MASK_ELEMENTS", 30)
    for call, whole in zip(calls, expected, strict=True):
        torch.testing.assert_close(attention.attention(call), whole, rtol=1e-6, atol=1e-6)
