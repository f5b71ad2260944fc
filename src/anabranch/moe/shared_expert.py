"""The always-on expert that every token visits, and the side stream it runs on. T tokens, D hidden width."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from anabranch.layers.linear import Linear
from anabranch.layers.mlp import MLP

if TYPE_CHECKING:
    from anabranch.platforms import SideStream


class SharedExpert(MLP):
    """A dense feed-forward whose result a learned gate may scale.

    The gate's checkpoint name stands beside the expert (`shared_expert_gate`), so the layer hands it in.
    """

    def forward(self, x_TD: torch.Tensor, gate: Linear | None = None) -> torch.Tensor:
        y_TD: torch.Tensor = super().forward(x_TD)
        return y_TD if gate is None else torch.sigmoid(gate(x_TD)) * y_TD


def beside(
    side_stream: SideStream,
    x_TD: torch.Tensor,
    main: Callable[[torch.Tensor], torch.Tensor],
    side: Callable[[torch.Tensor], torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor]:
    """(main(x), side(x)) at the same time where the platform has streams. Neither may write into x.

    The main work is enqueued first: the other way round a captured graph spreads over dozens of streams.
    """
    fork = side_stream.fork(x_TD)
    main_TD = main(x_TD)
    with fork.side():
        side_TD = side(x_TD)
    fork.join(side_TD)
    return main_TD, side_TD
