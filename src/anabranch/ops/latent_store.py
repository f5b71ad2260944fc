"""What comes between the projections of latent attention and the attention itself: norm, rope and the write, in one op.

T tokens, H query heads, D head dim of queries, L latent dims, F pairs that turn, C = L + 2F numbers kept of a token,
P pages, S slots in a page.
"""

from typing import NamedTuple

import torch

from anabranch.ops.norm import rms_norm
from anabranch.ops.op import Samples, op


class LatentStoreCall(NamedTuple):
    q_THD: torch.Tensor
    """Of each head the last 2F dimensions turn."""
    row_TC: torch.Tensor
    """Of each token its latent row and its key that turns, as they were projected."""
    weight_L: torch.Tensor
    """Of the norm of the latent row."""
    eps: float
    cos_TF: torch.Tensor
    sin_TF: torch.Tensor
    """fp32."""
    interleaved: bool
    """Pairs are (2i, 2i + 1), not (i, i + F)."""
    rows_PSC: torch.Tensor
    slot_T: torch.Tensor
    """Token t goes to slot_T[t] = page · S + offset; −1 (a padding row) is not written."""


def samples(dtype: torch.dtype, generator: torch.Generator) -> Samples:
    for label, tokens, heads, plain, latent, pairs in (
        ("neighbours", 5, 4, 16, 32, 8),
        ("halves", 3, 3, 8, 24, 4),
        ("neighbours, odd sizes", 4, 5, 12, 20, 3),
        ("neighbours, no padding", 1, 20, 16, 64, 16),
        ("halves, no tokens", 0, 2, 8, 16, 4),
    ):
        angle = 100 * torch.rand(tokens, pairs, generator=generator)
        # Strided, as slices of a packed projection are.
        row = torch.randn(tokens, 8 + latent + 2 * pairs, generator=generator).to(dtype)[:, 8:]
        slot = torch.randperm(4 * 4, generator=generator)[:tokens]
        slot[1::3] = -1
        call = LatentStoreCall(
            q_THD=torch.randn(tokens, heads, plain + 2 * pairs, generator=generator).to(dtype),
            row_TC=row,
            weight_L=torch.rand(latent, generator=generator).to(dtype),
            eps=1e-6,
            cos_TF=angle.cos(),
            sin_TF=angle.sin(),
            interleaved=label.startswith("neighbours"),
            rows_PSC=torch.randn(4, 4, latent + 2 * pairs, generator=generator).to(dtype),
            slot_T=slot.int() if label == "halves" else slot,
        )
        yield label, {"call": call}


@op(samples=samples, mutates=("rows_PSC",))
def latent_store(call: LatentStoreCall) -> torch.Tensor:
    """Queries, turned; the latent row (normed) and the key (turned) are written to their slots. Writes over none of its
    inputs."""
    latent, page_size = call.weight_L.shape[0], call.rows_PSC.shape[1]
    c_TL = rms_norm.reference(call.row_TC[:, :latent], call.weight_L, call.eps)
    row_TC = torch.cat([c_TL, turn(call.row_TC[:, latent:], call.cos_TF, call.sin_TF, call.interleaved)], -1)
    kept = call.slot_T >= 0
    slot = call.slot_T[kept].long()
    call.rows_PSC[slot // page_size, slot % page_size] = row_TC[kept]
    plain, turned = call.q_THD.split([call.q_THD.shape[2] - 2 * call.cos_TF.shape[1], 2 * call.cos_TF.shape[1]], -1)
    return torch.cat([plain, turn(turned, call.cos_TF[:, None], call.sin_TF[:, None], call.interleaved)], -1)


def turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """Pairs of the last dimension by their angles."""
    dims = (-1, 2) if interleaved else (2, -1)
    a, b = x.float().unflatten(-1, dims).unbind(-1 if interleaved else -2)
    return torch.stack([a * cos - b * sin, b * cos + a * sin], -1 if interleaved else -2).flatten(-2).to(x.dtype)
