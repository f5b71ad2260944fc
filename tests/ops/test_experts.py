"""The experts' feed-forward against a computation by hand."""

import torch

from anabranch import ops
from anabranch.ops.weight import Weight

SAMPLES = dict(ops.experts.samples(torch.float32, torch.Generator().manual_seed(1)))


def test_by_hand() -> None:
    """One input, one hidden unit: expert e computes down[e] · silu(gate[e] · x) · up[e] · x."""
    gate, up, down = (2.0, 0.5, -1.0), (1.0, 3.0, 4.0), (5.0, -2.0, 0.5)
    gate_up_EFD = torch.tensor([[[g], [u]] for g, u in zip(gate, up)])
    down_EDI = torch.tensor(down)[:, None, None]
    x = 1.5

    def expert(e: int) -> float:
        silu = gate[e] * x * torch.sigmoid(torch.tensor(gate[e] * x)).item()
        return down[e] * silu * up[e] * x

    weight_TK, expert_TK = torch.tensor([[0.25, 0.5]]), torch.tensor([[2, 0]], dtype=torch.int32)
    weights = Weight.of(gate_up_EFD), Weight.of(down_EDI)
    call = ops.ExpertsCall(torch.tensor([[x]]), weight_TK, expert_TK, *weights, "silu", scaling=2.0)
    y_TD = ops.experts.reference(call)
    torch.testing.assert_close(y_TD, torch.tensor([[2.0 * (0.25 * expert(2) + 0.5 * expert(0))]]))


def test_tokens_without_experts_are_exactly_zero_and_the_input_stays() -> None:
    call = SAMPLES["E=6, top 4, gelu"]["call"]
    x_TD = call.x_TD.clone()
    x_TD[1] = float("nan")  # a padding row may hold anything
    before = x_TD.clone()
    y_TD = ops.experts.reference(call._replace(x_TD=x_TD))
    assert (call.expert_TK[1] == -1).all()
    assert torch.equal(y_TD[1], torch.zeros_like(y_TD[1]))
    assert y_TD[[0, 2]].isfinite().all()
    assert torch.equal(x_TD.view(torch.int32), before.view(torch.int32))
