"""Random arguments of ops.sample, with everything that makes rows hard: ties, flat and peaked rows, forbidden tokens,
parameters alone and together."""

from typing import Any

import torch


def sampling_rows(rows: int, vocabulary: int, generator: torch.Generator) -> dict[str, Any]:
    def pick(*values: float) -> torch.Tensor:
        return torch.tensor(values)[torch.randint(len(values), (rows,), generator=generator)]

    def some(chance: float) -> torch.Tensor:
        return torch.rand(rows, 1, generator=generator) < chance

    logits = torch.randn(rows, vocabulary, generator=generator) * pick(0.05, 1.0, 3.0, 8.0)[:, None]
    logits = torch.where(some(0.3), (2 * logits).round() / 2, logits)  # ties, and −0.0 among them
    forbidden = torch.rand(rows, vocabulary, generator=generator) < 0.9
    forbidden[:, vocabulary // 2] = False
    logits = torch.where(some(0.2) & forbidden, float("-inf"), logits)
    return {
        "logits_RV": logits,
        "temperature_R": pick(0.0, 0.3, 0.7, 1.0, 1.7),
        "top_k_R": pick(0, 0, 0, 1, 2, 7, 50, vocabulary - 1, 2 * vocabulary).int(),
        "top_p_R": pick(1.0, 1.0, 0.999, 0.95, 0.9, 0.5, 0.05),
        "min_p_R": pick(0.0, 0.0, 0.0, 0.02, 0.3, 1.0),
        "seed_R": torch.randint(-(2**63), 2**63 - 1, (rows,), generator=generator),
        "position_R": torch.randint(100_000, (rows,), generator=generator),
    }
