"""Logarithms, probabilities and noise to the last bit, so that from the same logits a seed draws the same
tokens on every device.

Libraries round their logarithms and exponentials differently, and sums of floats depend on their order. Here is only
what IEEE 754 leaves no choice in (additions and multiplications of fp32, each rounded by itself, in the order written;
conversions) and arithmetic of integers. Kernels do the same steps (kernels/triton/exact.py), without fused
multiply-add. Against the true functions they are good to about 1e-6.
"""

from typing import TypeVar

import torch

Bits = TypeVar("Bits", int, torch.Tensor)

LOG2_E, LN_2 = 1.4426950216293335, 0.6931471824645996
"""As fp32 has them, like all constants here."""
ROOT_HALF_BITS = 0x3F3504F3
LOG_COEFFICIENTS = (
    0.0897943452000618,
    -0.14426842331886292,
    0.14883700013160706,
    -0.16551794111728668,
    0.19963476061820984,
    -0.25002583861351013,
    0.3333393335342407,
    -0.4999998211860657,
)
"""Of q in ln(1 + f) = f + f² q(f) for √½ ≤ 1 + f < √2, the highest power first."""
EXP2_COEFFICIENTS = (
    0.0018852978246286511,
    0.008973377756774426,
    0.05583592876791954,
    0.24015280604362488,
    0.6931524872779846,
)
"""Of q in 2^f = 1 + f q(f) for 0 ≤ f < 1."""
MASS_BITS = 30
SLACK = 16
"""Top p counts as reached this many 2⁻²⁴ earlier: more than fp32 can tell apart, far less than anyone can notice."""
MOST = 1 - 2.0**-24


def log(x: torch.Tensor) -> torch.Tensor:
    """ln x of positive, normal fp32."""
    return _log(*_parts(x))


def _parts(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(exponent, f) of x = 2^exponent · (1 + f)."""
    bits = x.view(torch.int32)
    exponent = (bits - ROOT_HALF_BITS) >> 23
    return exponent, (bits - (exponent << 23)).view(torch.float32) - 1.0


def _log(exponent: torch.Tensor, f: torch.Tensor) -> torch.Tensor:
    """ln(2^exponent · (1 + f))."""
    return exponent.float() * LN_2 + (f + (f * f) * _polynomial(f, LOG_COEFFICIENTS))


def _polynomial(x: torch.Tensor, coefficients: tuple[float, ...]) -> torch.Tensor:
    y = torch.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        y = y * x + coefficient
    return y


def mass(relative: torch.Tensor) -> torch.Tensor:
    """round(2³⁰ · e^relative) (int64) of fp32 ≤ 0: a probability in units of 2⁻³⁰ times the best token's.

    Integers, because their sums are the same in any order. What is less likely than 2⁻³¹ times the best counts nothing.
    """
    power = (relative * LOG2_E).clamp(min=-40.0)
    whole = power.floor()
    f = power - whole
    bits = (1.0 + f * _polynomial(f, EXP2_COEFFICIENTS)).view(torch.int32)
    scaled = (bits + ((whole.int() + MASS_BITS) << 23)).view(torch.float32)
    return (scaled + 0.5).long()


def target_mass(total: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """The mass (int64, at least 1) at which `top_p` of `total` is reached."""
    share = ((top_p * 2.0**24).long() - SLACK).clamp(min=0)
    return ((total >> 24) * share + ((total & 0xFFFFFF) * share >> 24)).clamp(min=1)


def gumbel(seed: torch.Tensor, position: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise, −ln(−ln(1 − v)): v is a hash of the three integers, a fp32 number between 0 and 1.

    v is small where the noise is large, and fp32 is finest near 0, so that large noise has no steps.
    """
    return noise(mix(stream(seed, position) ^ (token & 0xFFFFFFFF)))


def stream(seed: Bits, position: Bits) -> Bits:
    """The hash of the first two integers."""
    state = mix(mix(seed & 0xFFFFFFFF) ^ ((seed >> 32) & 0xFFFFFFFF))
    return mix(state ^ (position & 0xFFFFFFFF))


def noise(state: torch.Tensor) -> torch.Tensor:
    """Of a hash, 32 bits held in int64."""
    v = ((state.float() + 0.5) * 2.0**-32).clamp(max=MOST)
    exponent, f = _parts(1.0 - v)
    f = torch.where(exponent == 0, -v, f)  # there v is exact, and 1 − v is not
    return -log(-_log(exponent, f))


def mix(x: Bits) -> Bits:
    """A bijection of 32-bit integers (tensors hold them in int64) whose every output bit depends on every input bit."""
    x = x + 0x9E3779B9 & 0xFFFFFFFF
    x = (x ^ (x >> 16)) * 0x21F0AAAD & 0xFFFFFFFF
    x = (x ^ (x >> 15)) * 0x735A2D97 & 0xFFFFFFFF
    return x ^ (x >> 15)
