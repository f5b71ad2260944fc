"""Forbid tokens by bit masks, as grammars and lists of allowed tokens give them.

R rows of logits, V vocabulary, N rows that are masked, M words of 32 bits: bit i of word m is token 32 · m + i.
"""

import torch

from anabranch.ops.op import Samples, op


def samples(dtype: torch.dtype, generator: torch.Generator) -> Samples:
    # A finite value for forbidden tokens, so that a kernel's error on the others can be measured.
    for rows, vocabulary, num_words, row in ((4, 70, 3, [2, 0]), (1, 64, 2, [0]), (2, 70, 2, [1, 0]), (3, 8, 1, [])):
        allowed_NM = torch.randint(-(2**31), 2**31, (len(row), num_words), generator=generator).int()
        logits_RV = 3 * torch.randn(rows, vocabulary, generator=generator)
        masks = {"row_N": torch.tensor(row, dtype=torch.int64), "allowed_NM": allowed_NM, "value": -5.0}
        yield f"N{len(row)} of R{rows} V{vocabulary} M{num_words}", {"logits_RV": logits_RV, **masks}


@op(samples=samples, mutates=("logits_RV",))
def mask_logits(
    logits_RV: torch.Tensor, row_N: torch.Tensor, allowed_NM: torch.Tensor, value: float = float("-inf")
) -> None:
    """Where `allowed_NM[n]` has no bit, row `row_N[n]` of the logits becomes `value`, in place; no row twice.

    Tokens beyond the mask's last word are forbidden.
    """
    num_rows, num_words = allowed_NM.shape
    bit = torch.arange(32, dtype=torch.int32, device=logits_RV.device)
    allowed = ((allowed_NM[:, :, None] >> bit) & 1).bool().view(num_rows, 32 * num_words)
    missing = logits_RV.shape[1] - allowed.shape[1]
    allowed = torch.nn.functional.pad(allowed, (0, missing))  # a negative number of missing tokens cuts
    logits_RV[row_N] = logits_RV[row_N].masked_fill(~allowed, value)


def pack_mask(allowed_NV: torch.Tensor) -> torch.Tensor:
    """allowed_NM (int32) of a bool tensor."""
    rows, vocabulary = allowed_NV.shape
    bits = torch.nn.functional.pad(allowed_NV.long(), (0, -vocabulary % 32)).view(rows, -1, 32)
    return (bits << torch.arange(32, device=allowed_NV.device)).sum(-1).int()  # bit 31 becomes the sign
