"""Logits → one token per request, with each request's own parameters. R requests, V vocabulary.

Randomness is a pure function of (seed, position, token id), so that a request draws the same tokens whatever else is
in the batch, on any device, and no generator state has to be kept.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from anabranch.ops.op import Sample, op


def samples(dtype: torch.dtype, generator: torch.Generator) -> Iterator[Sample]:
    rows, vocabulary = 6, 50
    base = {
        "temperature_R": torch.tensor([0.0, 1.0, 0.7, 1.3, 0.0, 2.0]),
        "top_k_R": torch.tensor([0, 0, 5, 1, 3, 40], dtype=torch.int32),
        "top_p_R": torch.tensor([1.0, 0.9, 1.0, 0.5, 0.1, 0.95]),
        "min_p_R": torch.tensor([0.0, 0.0, 0.1, 0.0, 0.0, 0.02]),
        "seed_R": torch.tensor([0, 1, 2**40 + 3, -4, 5, 6]),
        "position_R": torch.tensor([0, 7, 8, 100000, 1, 1]),
    }
    yield "mixed", {"logits_RV": 3 * torch.randn(rows, vocabulary, generator=generator), **base}
    ties = torch.zeros(rows, vocabulary)
    ties[:, 7] = ties[:, 9] = 4
    yield "ties", {"logits_RV": ties, **base}
    masked = torch.full((rows, vocabulary), float("-inf"))
    masked[:, 11] = -3
    yield "all but one forbidden", {"logits_RV": masked, **base}
    yield "no requests", {"logits_RV": torch.zeros(0, 8), **{name: value[:0] for name, value in base.items()}}


@op(samples=samples)
def sample(
    logits_RV: torch.Tensor,
    temperature_R: torch.Tensor,
    top_k_R: torch.Tensor,
    top_p_R: torch.Tensor,
    min_p_R: torch.Tensor,
    seed_R: torch.Tensor,
    position_R: torch.Tensor,
) -> torch.Tensor:
    """token_R (int64). Temperature 0 is greedy; a tie goes to the lowest id.

    Otherwise logits / temperature, then the token must be among the top_k (0: all), among the fewest most probable of
    those whose probabilities (among them) reach top_p, and at least min_p times as probable as the best. One of the
    remaining is drawn by adding Gumbel noise and taking the maximum.
    """
    logits = logits_RV.float()
    if logits.shape[0] == 0:
        return logits.new_zeros(0, dtype=torch.int64)
    greedy = temperature_R == 0
    scaled = logits / torch.where(greedy, 1.0, temperature_R)[:, None]
    probability, token = torch.sort(scaled.softmax(-1), dim=-1, descending=True, stable=True)
    rank = torch.arange(logits.shape[1], device=logits.device)
    kept = (top_k_R[:, None] == 0) | (rank < top_k_R[:, None])
    probability = probability * kept
    probability = probability / probability.sum(-1, keepdim=True)
    kept &= probability.cumsum(-1) - probability < top_p_R[:, None]
    kept &= probability >= min_p_R[:, None] * probability[:, :1]
    kept[:, 0] = True
    noisy = scaled.gather(-1, token) + gumbel(seed_R[:, None], position_R[:, None], token)
    drawn = token.gather(-1, noisy.masked_fill(~kept, float("-inf")).argmax(-1, keepdim=True))[:, 0]
    best = logits.argmax(-1)  # the first of equal maxima
    return torch.where(greedy, best, drawn)


def gumbel(seed: torch.Tensor, position: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise from 32-bit mixing of integers; the low and high halves of the seed both count."""
    state = mix(seed & 0xFFFFFFFF)
    state = mix(state ^ ((seed >> 32) & 0xFFFFFFFF))
    state = mix(state ^ (position & 0xFFFFFFFF))
    state = mix(state ^ (token & 0xFFFFFFFF))
    uniform = ((state >> 8).double() + 0.5) * 2.0**-24
    return -torch.log(-torch.log(uniform)).float()


def mix(x: torch.Tensor) -> torch.Tensor:
    """A bijection of 32-bit integers (held in int64) whose every output bit depends on every input bit."""
    x = x + 0x9E3779B9 & 0xFFFFFFFF
    x = (x ^ (x >> 16)) * 0x21F0AAAD & 0xFFFFFFFF
    x = (x ^ (x >> 15)) * 0x735A2D97 & 0xFFFFFFFF
    return x ^ (x >> 15)
