"""The always-on expert that every token visits: on a side stream, or as some of the experts.

T tokens, D hidden width, K experts per token.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from anabranch.layers.linear import Linear
from anabranch.layers.mlp import MLP

if TYPE_CHECKING:
    from anabranch.platforms import SideStream


SIDE_TOKENS = 256
"""Up to so many tokens the two are computed at the same time. With more each fills the machine by itself, and they
would be in each other's way. On an H200 decode steps of Qwen1.5-MoE are 2 to 5 % faster so, up to all 256 tried."""


class SharedExpert(MLP):
    """A dense feed-forward whose result a learned gate may scale.

    The gate's checkpoint name stands beside the expert (`shared_expert_gate`), so the layer hands it in.
    """

    def forward(self, x_TD: torch.Tensor, gate: Linear | None = None) -> torch.Tensor:
        y_TD: torch.Tensor = super().forward(x_TD)
        return y_TD if gate is None else torch.sigmoid(gate(x_TD)) * y_TD


def always_on(
    first: int, count: int, weight_T1: torch.Tensor | None, weight_TK: torch.Tensor, expert_TK: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(weight, expert) of the routed experts and then of experts first .. first + count, which every token visits.

    Padding rows (expert −1) visit nobody. Then one launch does all, and the shared weights stream with the others'.
    """
    real_T1 = expert_TK[:, :1] >= 0
    expert_TS = torch.where(real_T1, _ids(first, count, expert_TK.device), -1)
    weight_T1 = real_T1.float() if weight_T1 is None else torch.where(real_T1, weight_T1, 0.0)
    weight_TS = weight_T1.expand(-1, count)
    return torch.cat([weight_TK, weight_TS], dim=1), torch.cat([expert_TK, expert_TS], dim=1)


def _ids(first: int, count: int, device: torch.device) -> torch.Tensor:
    if torch.compiler.is_compiling():  # which looks through caches and modes
        return torch.arange(first, first + count, dtype=torch.int32, device=device)
    return _kept_ids(first, count, device)


@functools.cache
def _kept_ids(first: int, count: int, device: torch.device) -> torch.Tensor:
    with torch.inference_mode(False):  # it may be used outside of inference mode too
        return torch.arange(first, first + count, dtype=torch.int32, device=device)


def beside(
    side_stream: SideStream,
    x_TD: torch.Tensor,
    main: Callable[[torch.Tensor], torch.Tensor],
    side: Callable[[torch.Tensor], torch.Tensor],
    most_tokens: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(main(x), side(x)), at the same time where the platform has streams and tokens are few. Neither may write into x.

    The main work is enqueued first: the other way round a captured graph spreads over dozens of streams.
    To a compiler it is one after the other: what it makes of them runs on one stream.
    """
    if torch.compiler.is_compiling() or (most_tokens is not None and x_TD.shape[0] > most_tokens):
        return main(x_TD), side(x_TD)
    fork = side_stream.fork(x_TD)
    main_TD = main(x_TD)
    with fork.side():
        side_TD = side(x_TD)
    fork.join(side_TD)
    return main_TD, side_TD
