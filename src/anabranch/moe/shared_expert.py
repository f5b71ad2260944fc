"""The always-on expert that every token visits: on a side stream, or as some of the experts.

T tokens, D hidden width, K experts per token.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import torch

if TYPE_CHECKING:
    from anabranch.platforms import SideStream

S = TypeVar("S", torch.Tensor, tuple[torch.Tensor, torch.Tensor | None])
"""What is made on the side."""
SIDE_TOKENS = 256
"""Up to so many tokens the two are computed at the same time. With more each fills the machine by itself, and they
would be in each other's way. On an H200 decode steps of Qwen1.5-MoE are 2 to 5 % faster so, up to all 256 tried."""


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
    side: Callable[[torch.Tensor], S],
    most_tokens: int | None = None,
) -> tuple[torch.Tensor, S]:
    """(main(x), side(x)), at the same time where the platform has streams and tokens are few. Neither may write into x.

    The main work is enqueued first: the other way round a captured graph spreads over dozens of streams.
    To a compiler it is one after the other: what it makes of them runs on one stream.
    """
    if torch.compiler.is_compiling() or (most_tokens is not None and x_TD.shape[0] > most_tokens):
        return main(x_TD), side(x_TD)
    fork = side_stream.fork(x_TD)
    main_TD = main(x_TD)
    with fork.side():
        made = side(x_TD)
    fork.join(*(tensor for tensor in (made if isinstance(made, tuple) else (made,)) if tensor is not None))
    return main_TD, made
