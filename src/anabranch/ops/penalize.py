"""Penalties for tokens that a request has seen already.

R rows of logits, V vocabulary, N rows that are penalised, P rows of the tables that count tokens.
"""

from typing import NamedTuple

import torch

from anabranch.ops.op import Samples, op


class PenalizeCall(NamedTuple):
    logits_RV: torch.Tensor
    row_N: torch.Tensor
    count_PV: torch.Tensor
    prompt_PV: torch.Tensor
    table_row_N: torch.Tensor
    presence_N: torch.Tensor
    frequency_N: torch.Tensor
    repetition_N: torch.Tensor


def samples(dtype: torch.dtype, generator: torch.Generator) -> Samples:
    for rows, vocabulary, row, table_row in ((5, 40, [3, 0, 4], [1, 5, 0]), (1, 1003, [0], [2]), (2, 8, [], [])):
        count = torch.randint(-3, 4, (6, vocabulary), generator=generator, dtype=torch.int32).clamp(min=0)

        def uniform(low: float, high: float, n: int = len(row)) -> torch.Tensor:
            return low + (high - low) * torch.rand(n, generator=generator)

        call = PenalizeCall(
            logits_RV=3 * torch.randn(rows, vocabulary, generator=generator),
            row_N=torch.tensor(row, dtype=torch.int64),
            count_PV=count,
            prompt_PV=torch.rand(6, vocabulary, generator=generator) < 0.3,
            table_row_N=torch.tensor(table_row, dtype=torch.int64),
            presence_N=uniform(-2, 2),
            frequency_N=uniform(-2, 2),
            repetition_N=uniform(0.5, 2),
        )
        yield f"N{len(row)} of R{rows} V{vocabulary}", {"call": call}


@op(samples=samples, mutates=("logits_RV",))
def penalize(call: PenalizeCall) -> None:
    """Row `row_N[n]` of the logits is changed by what row `table_row_N[n]` of the tables says, in place; no row twice.

    * repetition: the logit of a token of prompt or output is divided by it if positive, multiplied if negative;
    * frequency × the token's count in the output, and presence once if it is there at all, are subtracted.
    """
    logits, count = call.logits_RV[call.row_N], call.count_PV[call.table_row_N]
    seen = call.prompt_PV[call.table_row_N] | (count > 0)
    factor = torch.where(seen, call.repetition_N[:, None], 1.0)
    logits = torch.where(logits > 0, logits / factor, logits * factor)
    logits -= call.frequency_N[:, None] * count
    logits -= call.presence_N[:, None] * (count > 0)
    call.logits_RV[call.row_N] = logits
