"""One matrix product per expert over rows in expert order.

M input rows, N rows in expert order, E experts, D inputs, F outputs.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from anabranch.ops.op import Sample, op


def samples(dtype: torch.dtype, generator: torch.Generator) -> Iterator[Sample]:
    for label, counts, rows, gather, bias in (
        ("", [2, 0, 3, 1], 6, False, False),
        ("gathered, biased, two rows without an expert", [1, 4, 0], 7, True, True),
        ("nothing", [0, 0], 0, False, False),
    ):
        start = [0]
        for count in counts:
            start.append(start[-1] + count)
        weight = torch.randn(len(counts), 24, 16, generator=generator)
        inputs = 4 if gather else rows
        yield (
            label or "plain",
            {
                "x_MD": torch.randn(inputs, 16, generator=generator).to(dtype),
                "weight_EFD": weight.to(dtype),
                "start_E": torch.tensor(start, dtype=torch.int32),
                "row_N": torch.randint(inputs, (rows,), generator=generator).int() if gather else None,
                "bias_EF": torch.randn(len(counts), 24, generator=generator).to(dtype) if bias else None,
            },
        )


@op(samples=samples)
def expert_matmul(
    x_MD: torch.Tensor,
    weight_EFD: torch.Tensor,
    start_E: torch.Tensor,
    row_N: torch.Tensor | None = None,
    bias_EF: torch.Tensor | None = None,
) -> torch.Tensor:
    """y_NF: for n in expert e's range start_E[e] .. start_E[e + 1], y[n] = weight[e] · x[row_N[n]] + bias[e].

    Without row_N the rows already lie in expert order. Rows past the last expert's are zero.
    """
    rows_ND = x_MD if row_N is None else x_MD[row_N.long()]
    y_NF = rows_ND.new_zeros(rows_ND.shape[0], weight_EFD.shape[1])
    starts = start_E.tolist()
    for e in range(weight_EFD.shape[0]):
        mine = slice(starts[e], starts[e + 1])
        y_NF[mine] = rows_ND[mine] @ weight_EFD[e].T
        if bias_EF is not None:
            y_NF[mine] += bias_EF[e]
    return y_NF
