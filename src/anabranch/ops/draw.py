"""Logits → one token per request where nothing is cut off: `sample` without top_k, top_p, min_p, and without its sort.

R requests, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from anabranch.ops.exact import gumbel
from anabranch.ops.op import Sample, op
from anabranch.ops.sample import or_reason, spoilt


def samples(dtype: torch.dtype, generator: torch.Generator) -> Iterator[Sample]:
    base = {
        "temperature_R": torch.tensor([0.0, 1.0, 0.7, 2.0]),
        "seed_R": torch.tensor([0, 1, 2**40 + 3, -4]),
        "position_R": torch.tensor([0, 7, 100000, 1]),
    }
    for vocabulary in (50, 1, 8200):
        yield f"V{vocabulary}", {"logits_RV": (3 * torch.randn(4, vocabulary, generator=generator)).to(dtype), **base}
    masked = torch.full((4, 50), float("-inf"))
    masked[:, 11] = -3
    yield "all but one forbidden", {"logits_RV": masked.to(dtype), **base}
    for vocabulary in (50, 8200):
        logits_RV = spoilt(torch.randn(6, vocabulary, generator=generator)).to(dtype)
        twice = {name: torch.cat([value, value])[1:7] for name, value in base.items()}
        yield f"V{vocabulary}, not finite", {"logits_RV": logits_RV, **twice}
    yield "no requests", {"logits_RV": torch.zeros(0, 8), **{name: value[:0] for name, value in base.items()}}


@op(samples=samples)
def draw(
    logits_RV: torch.Tensor, temperature_R: torch.Tensor, seed_R: torch.Tensor, position_R: torch.Tensor
) -> torch.Tensor:
    """token_R (int64): what `sample` draws with top_k 0, top_p 1 and min_p 0, always. Temperature 0 is greedy. Rows
    without a token give NOT_FINITE or NONE_ALLOWED, as there."""
    logits = logits_RV.float()
    if logits.shape[0] == 0:
        return logits.new_zeros(0, dtype=torch.int64)
    greedy_R1 = (temperature_R == 0)[:, None]
    scale_R1 = 1.0 / temperature_R.float()[:, None]
    token_V = torch.arange(logits.shape[1], device=logits.device)
    noise = gumbel(seed_R[:, None], position_R[:, None], token_V)
    token_R = torch.where(greedy_R1, logits, logits * scale_R1 + noise).argmax(-1)  # the first of equal maxima
    return or_reason(token_R, logits.amax(-1))
