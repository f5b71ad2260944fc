"""Logits → one token per request, with each request's own parameters. R requests, V vocabulary.

Randomness is a pure function of (seed, position, token id): from the same logits a request draws the same tokens
whatever else is in the batch, on any device, and no generator state has to be kept. No step of the definition leaves
its rounding open (see ops.exact): from the same logits, every kernel must draw the same token, always.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from anabranch.ops.exact import gumbel, log, mass, target_mass
from anabranch.ops.op import Sample, op

TINY = 2.0**-126
"""The smallest normal fp32 number."""
NOT_FINITE, NONE_ALLOWED = -1, -2
"""In place of a token: the row holds NaN or +∞; all of the row is −∞."""


def or_reason(token_R: torch.Tensor, best_R: torch.Tensor) -> torch.Tensor:
    """token_R, but NOT_FINITE or NONE_ALLOWED for rows that have no token; best_R is each row's maximum, NaN if the row
    holds one."""
    token_R = torch.where(best_R > float("-inf"), token_R, NONE_ALLOWED)
    return torch.where(best_R < float("inf"), token_R, NOT_FINITE)


def spoilt(logits_RV: torch.Tensor) -> torch.Tensor:
    """Rows without a token, and whole ones between them."""
    logits_RV[0, -3] = float("nan")
    logits_RV[1] = float("nan")
    logits_RV[3, 5] = float("inf")
    logits_RV[-1] = float("-inf")
    return logits_RV


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
    yield "mixed", {"logits_RV": (3 * torch.randn(rows, vocabulary, generator=generator)).to(dtype), **base}
    ties = torch.zeros(rows, vocabulary)
    ties[:, 7] = ties[:, 9] = 4
    yield "ties", {"logits_RV": ties.to(dtype), **base}
    masked = torch.full((rows, vocabulary), float("-inf"))
    masked[:, 11] = -3
    yield "all but one forbidden", {"logits_RV": masked.to(dtype), **base}
    # Levels with many tokens each, so that ties are cut by top_k and top_p; and a vocabulary of several tiles.
    levels = torch.randint(4, (rows, 700), generator=generator).float()
    yield "many ties", {"logits_RV": levels.to(dtype), **base, "top_k_R": base["top_k_R"] * 9}
    yield "V8200", {"logits_RV": (3 * torch.randn(rows, 8200, generator=generator)).to(dtype), **base}
    allowed = torch.rand(rows, 8200, generator=generator) < 0.01
    some = torch.where(allowed, torch.randn(rows, 8200, generator=generator), float("-inf"))
    some[:, 17] = 0
    yield "V8200, most forbidden", {"logits_RV": some.to(dtype), **base}
    yield "not finite", {"logits_RV": spoilt(torch.randn(rows, 8200, generator=generator)).to(dtype), **base}
    small = spoilt(torch.randn(rows, vocabulary, generator=generator))
    yield "not finite, few tokens", {"logits_RV": small.to(dtype), **base, "top_k_R": base["top_k_R"] * 0}
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
    """token_R (int64), from logits in any float dtype, taken as fp32. Temperature 0 is greedy; a tie goes to the lowest
    id. A row that holds NaN or +∞ gives NOT_FINITE, one that is −∞ throughout NONE_ALLOWED.

    Otherwise tokens are ranked by logit, the lowest id first among equals. A token must be among the top_k (0: all),
    the tokens of those before it must not have reached top_p of their probability together (1: all), and it must be at
    least min_p times as probable as the best (0: all). One of the remaining is drawn: the best after Gumbel noise is
    added to logit / temperature, which is computed as logit · (1 / temperature).
    """
    logits = logits_RV.float()
    if logits.shape[0] == 0:
        return logits.new_zeros(0, dtype=torch.int64)
    greedy = temperature_R == 0
    scale_R1 = (1.0 / torch.where(greedy, 1.0, temperature_R.float()))[:, None]
    ranked, token = torch.sort(logits, dim=-1, descending=True, stable=True)
    scaled = ranked * scale_R1
    relative = scaled - scaled[:, :1]
    rank = torch.arange(logits.shape[1], device=logits.device)
    kept = (top_k_R[:, None] == 0) | (rank < top_k_R[:, None])
    mass_RV = mass(relative) * kept
    before = mass_RV.cumsum(-1) - mass_RV
    kept &= (top_p_R[:, None] >= 1) | (before < target_mass(mass_RV.sum(-1), top_p_R.float())[:, None])
    kept &= (min_p_R[:, None] <= 0) | (relative >= log(min_p_R.float().clamp(TINY, 1.0))[:, None])
    noisy = scaled + gumbel(seed_R[:, None], position_R[:, None], token)
    noisy = noisy.masked_fill(~kept, float("-inf"))
    drawn = torch.empty_like(noisy).scatter_(-1, token, noisy).argmax(-1)  # the first of equal maxima
    return or_reason(torch.where(greedy, logits.argmax(-1), drawn), logits.amax(-1))
