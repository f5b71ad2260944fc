"""What a step of an MoE layer would cost on many ranks with expert parallelism: who computes how many rows, and how
many of them move. Routing is drawn; nothing is computed.

T tokens of all ranks together, K experts per token, E experts, R ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from anabranch.parallel.placement import Placement


@dataclass(frozen=True, slots=True)
class Traffic:
    """Of one layer in one step."""

    rows_R: torch.Tensor
    """Rows that each rank computes: pairs of a token and an expert."""
    sent_R: torch.Tensor
    """Rows that each rank sends to others: a token goes once to a rank that has several of its experts."""
    received_R: torch.Tensor

    @property
    def imbalance(self) -> float:
        """The busiest rank's rows over the mean: how many times longer than with equal loads the step takes."""
        return float(self.rows_R.max() / self.rows_R.double().mean())


def zipf(num_experts: int, exponent: float, generator: torch.Generator) -> torch.Tensor:
    """Loads 1 / n^exponent, in a random order."""
    load_E = torch.arange(1, num_experts + 1, dtype=torch.float64) ** -exponent
    return load_E[torch.randperm(num_experts, generator=generator)]


def draw_routing(load_E: torch.Tensor, num_tokens: int, top_k: int, generator: torch.Generator) -> torch.Tensor:
    """expert_TK: different experts for each token, drawn one after another with odds in proportion to their load."""
    noise_TE = torch.rand(num_tokens, len(load_E), generator=generator, dtype=torch.float64)
    # The top k of log(load) + Gumbel noise are a sample without replacement.
    return (load_E.log() - (-noise_TE.log()).log()).topk(top_k, dim=1).indices


def count_traffic(expert_TK: torch.Tensor, placement: Placement, num_experts: int) -> Traffic:
    """Tokens are divided equally among the ranks, in order. A token visits a copy on its own rank, if there is one,
    otherwise one that depends on its number, so that copies share the load."""
    num_ranks, num_tokens = placement.num_ranks, len(expert_TK)
    ranks_of = placement.ranks_of(num_experts)
    most = max(map(len, ranks_of))
    copy_EC = torch.tensor([ranks + ranks[:1] * (most - len(ranks)) for ranks in ranks_of])
    count_E = torch.tensor([len(ranks) for ranks in ranks_of])
    has_ER = torch.zeros(num_experts, num_ranks, dtype=torch.bool)
    has_ER[torch.arange(num_experts)[:, None], copy_EC] = True
    token_T = torch.arange(num_tokens)
    own_T1 = (token_T * num_ranks // num_tokens)[:, None]
    copy_TK = copy_EC[expert_TK, (token_T[:, None] // 7 + expert_TK) % count_E[expert_TK]]
    rank_TK = torch.where(has_ER[expert_TK, own_T1], own_T1, copy_TK)
    visited_TK = rank_TK.sort(dim=1).values
    first_TK = torch.ones_like(visited_TK, dtype=torch.bool)
    first_TK[:, 1:] = visited_TK[:, 1:] != visited_TK[:, :-1]
    moves_TK = first_TK & (visited_TK != own_T1)
    return Traffic(
        rows_R=torch.bincount(rank_TK.flatten(), minlength=num_ranks),
        sent_R=torch.bincount(own_T1[:, 0], weights=moves_TK.sum(1).double(), minlength=num_ranks).long(),
        received_R=torch.bincount(visited_TK[moves_TK], minlength=num_ranks),
    )
