"""The functions of ops/exact.py for kernels, the same step by step.

Kernels that call them must be launched with `**EXACT`: a fused multiply-add would change the last bits. `noise_bound`
need not be exact: it serves to skip most tokens without computing their noise.
"""

import math
from typing import Any

import triton
import triton.language as tl

from anabranch.ops import exact

EXACT: dict[str, Any] = {"enable_fp_fusion": False}
"""Launch options."""

L7, L6, L5, L4, L3, L2, L1, L0 = map(tl.constexpr, exact.LOG_COEFFICIENTS)
E4, E3, E2, E1, E0 = map(tl.constexpr, exact.EXP2_COEFFICIENTS)
LOG2_E, LN_2 = tl.constexpr(exact.LOG2_E), tl.constexpr(exact.LN_2)
ROOT_HALF_BITS, MASS_BITS = tl.constexpr(exact.ROOT_HALF_BITS), tl.constexpr(exact.MASS_BITS)
SLACK, MOST = tl.constexpr(exact.SLACK), tl.constexpr(exact.MOST)
TINY = tl.constexpr(2.0**-126)

MOST_NOISE = tl.constexpr(33 * math.log(2) + 1e-3)
BOUND_AT_0 = tl.constexpr((32 + 127) * math.log(2) + 1e-3)
BOUND_STEP = tl.constexpr(-math.log(2) * 2.0**-23)


@triton.jit
def _log(exponent, f):
    q = L7 * f + L6
    q = q * f + L5
    q = q * f + L4
    q = q * f + L3
    q = q * f + L2
    q = q * f + L1
    q = q * f + L0
    return exponent.to(tl.float32) * LN_2 + (f + (f * f) * q)


@triton.jit
def _split(x):
    """x = 2^exponent · (1 + f)."""
    bits = x.to(tl.int32, bitcast=True)
    exponent = (bits - ROOT_HALF_BITS) >> 23
    return exponent, (bits - (exponent << 23)).to(tl.float32, bitcast=True) - 1.0


@triton.jit
def log(x):
    exponent, f = _split(x)
    return _log(exponent, f)


@triton.jit
def mass(relative):
    """int32."""
    power = tl.maximum(relative * LOG2_E, -40.0)
    whole = tl.floor(power)
    f = power - whole
    q = E4 * f + E3
    q = q * f + E2
    q = q * f + E1
    q = q * f + E0
    bits = (1.0 + f * q).to(tl.int32, bitcast=True) + ((whole.to(tl.int32) + MASS_BITS) << 23)
    return (bits.to(tl.float32, bitcast=True) + 0.5).to(tl.int32)


@triton.jit
def target_mass(total, top_p):
    share = tl.maximum((top_p * 16777216.0).to(tl.int64) - SLACK, 0)
    return tl.maximum((total >> 24) * share + ((total & 0xFFFFFF) * share >> 24), 1)


@triton.jit
def mix(x):
    """uint32."""
    x += 0x9E3779B9
    x = (x ^ (x >> 16)) * 0x21F0AAAD
    x = (x ^ (x >> 15)) * 0x735A2D97
    return x ^ (x >> 15)


@triton.jit
def hash_of(seed, position):
    """The part of the state that all tokens of a draw share, from int64 values."""
    state = mix((seed & 0xFFFFFFFF).to(tl.uint32))
    state = mix(state ^ ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32))
    return mix(state ^ (position & 0xFFFFFFFF).to(tl.uint32))


@triton.jit
def noise(state):
    v = tl.minimum((state.to(tl.float32) + 0.5) * 2.3283064365386963e-10, MOST)
    exponent, f = _split(1.0 - v)
    f = tl.where(exponent == 0, -v, f)
    return -log(-_log(exponent, f))


@triton.jit
def noise_bound(state):
    """An upper bound of the noise, rarely more than 0.1 above it: −ln(−ln(1 − v)) < −ln v, and the bits of a float are
    its logarithm, too low by at most 0.09."""
    bits = (state.to(tl.float32) + 0.5).to(tl.int32, bitcast=True)
    return tl.fma(bits.to(tl.float32), BOUND_STEP, BOUND_AT_0)
