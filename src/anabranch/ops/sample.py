"""Logits → one token per request, with each request's own parameters. R requests, V vocabulary.

Randomness is a pure function of (seed, position, token id): from the same logits a request draws the same tokens
whatever else is in the batch, on any device, and no generator state has to be kept. No step of the definition leaves
its rounding open (see ops.exact): from the same logits, every kernel must draw the same token, always.
"""

from typing import NamedTuple

import torch

from anabranch.ops.exact import gumbel, log, mass, target_mass
from anabranch.ops.op import Samples, op

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
    """Logits of which some rows have no token."""
    logits_RV[0, -3] = float("nan")
    logits_RV[1] = float("nan")
    logits_RV[3, 5] = float("inf")
    logits_RV[-1] = float("-inf")
    return logits_RV


class SampleCall(NamedTuple):
    logits_RV: torch.Tensor
    """Of any float dtype, taken as fp32."""
    temperature_R: torch.Tensor
    """0: greedy."""
    seed_R: torch.Tensor
    position_R: torch.Tensor
    top_k_R: torch.Tensor | None = None
    """int32; 0: all. None, and so are the next two: no token is excluded."""
    top_p_R: torch.Tensor | None = None
    """1: all."""
    min_p_R: torch.Tensor | None = None
    """0: all."""


def samples(dtype: torch.dtype, generator: torch.Generator) -> Samples:
    rows, vocabulary = 6, 50
    truncation = {
        "top_k_R": torch.tensor([0, 0, 5, 1, 3, 40], dtype=torch.int32),
        "top_p_R": torch.tensor([1.0, 0.9, 1.0, 0.5, 0.1, 0.95]),
        "min_p_R": torch.tensor([0.0, 0.0, 0.1, 0.0, 0.0, 0.02]),
    }
    base = {
        "temperature_R": torch.tensor([0.0, 1.0, 0.7, 1.3, 0.0, 2.0]),
        "seed_R": torch.tensor([0, 1, 2**40 + 3, -4, 5, 6]),
        "position_R": torch.tensor([0, 7, 8, 100000, 1, 1]),
    }

    def normal(vocabulary: int) -> torch.Tensor:
        return torch.randn(rows, vocabulary, generator=generator)

    ties = torch.zeros(rows, vocabulary)
    ties[:, 7] = ties[:, 9] = 4
    masked = torch.full((rows, vocabulary), float("-inf"))
    masked[:, 11] = -3
    some = torch.where(torch.rand(rows, 8200, generator=generator) < 0.01, normal(8200), float("-inf"))
    some[:, 17] = 0
    for label, logits_RV in {
        "mixed": 3 * normal(vocabulary),
        "ties": ties,
        "all but one forbidden": masked,
        # Levels with many tokens each, so that top_k and top_p exclude some of equal tokens; in several tiles.
        "many ties": torch.randint(4, (rows, 700), generator=generator).float(),
        "V1": normal(1),
        "V8200": 3 * normal(8200),
        "V8200, most forbidden": some,
        "not finite": spoilt(normal(8200)),
        "not finite, few tokens": spoilt(normal(vocabulary)),
    }.items():
        yield f"{label}, no truncation", {"call": SampleCall(logits_RV.to(dtype), **base)}
        top_k_R = truncation["top_k_R"] * {"many ties": 9, "not finite, few tokens": 0}.get(label, 1)
        call = SampleCall(logits_RV.to(dtype), **base, **truncation)
        yield label, {"call": call._replace(top_k_R=top_k_R)}
    none = {name: value[:0] for name, value in {**base, **truncation}.items()}
    yield "no requests", {"call": SampleCall(torch.zeros(0, 8), **none)}


@op(samples=samples)
def sample(call: SampleCall) -> torch.Tensor:
    """token_R (int64). A tie goes to the lowest id. A row that holds NaN or +∞ gives NOT_FINITE, one that is −∞
    throughout NONE_ALLOWED.

    Otherwise tokens are ranked by logit, the lowest id first among equals. A token must be among the top_k, the tokens
    of those before it must not have reached top_p of their probability together, and it must be at least min_p times as
    probable as the best. One of the remaining is drawn: the best after Gumbel noise is added to logit / temperature,
    which is computed as logit · (1 / temperature).
    """
    logits = call.logits_RV.float()
    if logits.shape[0] == 0:
        return logits.new_zeros(0, dtype=torch.int64)
    greedy = call.temperature_R == 0
    scale_R1 = (1.0 / torch.where(greedy, 1.0, call.temperature_R.float()))[:, None]
    rank = torch.arange(logits.shape[1], device=logits.device)
    if call.top_k_R is None or call.top_p_R is None or call.min_p_R is None:
        noisy = logits * scale_R1 + gumbel(call.seed_R[:, None], call.position_R[:, None], rank)
    else:
        ranked, token = torch.sort(logits, dim=-1, descending=True, stable=True)
        scaled = ranked * scale_R1
        relative = scaled - scaled[:, :1]
        top_p, min_p = call.top_p_R.float(), call.min_p_R.float()
        kept = (call.top_k_R[:, None] == 0) | (rank < call.top_k_R[:, None])
        mass_RV = mass(relative) * kept
        before = mass_RV.cumsum(-1) - mass_RV
        kept &= (top_p[:, None] >= 1) | (before < target_mass(mass_RV.sum(-1), top_p)[:, None])
        kept &= (min_p[:, None] <= 0) | (relative >= log(min_p.clamp(TINY, 1.0))[:, None])
        noisy = scaled + gumbel(call.seed_R[:, None], call.position_R[:, None], token)
        noisy = torch.empty_like(noisy).scatter_(-1, token, noisy.masked_fill(~kept, float("-inf")))
    # The first of equal maxima.
    return or_reason(torch.where(greedy, logits.argmax(-1), noisy.argmax(-1)), logits.amax(-1))
