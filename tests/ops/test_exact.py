"""The functions that sampling rests on: near the true ones, and the same in any order and shape."""

import math

import torch

from anabranch.ops import exact


def test_log() -> None:
    x = torch.cat([torch.rand(100_000) * 4 + 1e-9, torch.logspace(-37, 37, 20_000)])
    expected = x.double().log()
    assert ((exact.log(x) - expected).abs() <= 2e-7 * expected.abs() + 1e-9).all()
    assert exact.log(torch.tensor([1.0])).item() == 0


def test_mass() -> None:
    relative = -23 * torch.rand(100_000)
    expected = 2.0**30 * relative.double().exp()
    assert ((exact.mass(relative) - expected).abs() <= 0.5 + 2e-6 * expected).all()
    assert exact.mass(torch.tensor([0.0, -21.4, -21.6, -1e30, -math.inf])).tolist() == [2**30, 1, 0, 0, 0]


def test_mass_falls_with_the_logit() -> None:
    """Neighbouring floats: a more probable token never weighs less."""
    bits = torch.tensor(-1.0).view(torch.int32) + torch.arange(1 << 18, dtype=torch.int32)
    for start in (-1.0, -8.3, -19.0):
        relative = (bits + (torch.tensor(start).view(torch.int32) - bits[0])).view(torch.float32)
        assert (relative.diff() < 0).all() and (exact.mass(relative).diff() <= 0).all()


def test_target_mass() -> None:
    total = torch.tensor(10 * 2**30)
    for tenths in range(1, 10):
        target = exact.target_mass(total, torch.tensor(tenths / 10)).item()
        # `tenths` of ten equal tokens reach it and fewer do not, whichever way fp32 has rounded the fraction.
        assert (tenths - 1) * 2**30 < target <= tenths * 2**30
        assert abs(target / (10 * 2**30) - tenths / 10) < 2e-6
    assert exact.target_mass(total, torch.tensor(0.0)).item() == 1
    assert exact.target_mass(torch.tensor(2**48 - 1), torch.tensor(0.999)).item() < 2**48


def test_noise() -> None:
    state = torch.cat([torch.randint(2**32, (100_000,)), torch.arange(100), 2**32 - 1 - torch.arange(100)])
    v = ((state.double() + 0.5) * 2.0**-32).clamp(max=exact.MOST)
    expected = -(-(-v).log1p()).log()
    found = exact.noise(state)
    near_1 = 1 - v < 1e-3  # there fp32 is coarse, and the noise of no consequence
    assert ((found - expected).abs() <= torch.where(near_1, 0.05, 1e-4)).all()
    assert ((found - expected).abs()[v < 0.5] <= 3e-6).all()


def test_large_noise_has_no_steps() -> None:
    """The largest noise of a vocabulary decides: neighbours there must differ."""
    state = torch.arange(1, 10_000)  # v about 1e-6
    assert exact.noise(state).unique().numel() > 9_000


def test_gumbel_depends_on_every_bit() -> None:
    zero = torch.tensor(0)
    plain = exact.gumbel(zero, zero, zero)
    for bit in range(64):
        assert exact.gumbel(torch.tensor(-(1 << 63) if bit == 63 else 1 << bit), zero, zero) != plain
    for bit in range(32):
        assert exact.gumbel(zero, torch.tensor(1 << bit), zero) != plain
        assert exact.gumbel(zero, zero, torch.tensor(1 << bit)) != plain
