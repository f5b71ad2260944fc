"""One step's input as the model sees it: tensors only.

T token rows, R requests, M page-table width. Made in one place, `engine/batch`.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch


class Drafts(NamedTuple):
    """Requests whose rows after the first are drafts: their states must not change before it is known which count."""

    row_R: torch.Tensor
    """int32: the first row of such a request."""
    count_R: torch.Tensor
    """int32: its rows; 0: not such a request."""
    start_R: torch.Tensor
    """int32: tokens before its first row."""
    other_len_R: torch.Tensor | None
    """context_len_R of the others, 0 for these; None: there are no others."""


class Span(NamedTuple):
    """The rows [begin, end) of a request, and the tokens that it has with them."""

    request: int
    begin: int
    end: int
    context: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Requests' new tokens, one request after another.

    Example, page size 4: request A prefills tokens at positions 0-2, request B decodes at position 5:

        token_T = [a0 a1 a2 b5]     position_T = [0 1 2 5]
        query_start_R = [0 3 4]     context_len_R = [3 6]
        page_tables[0] = [[7 0] [2 9]]     slots[0] = [28 29 30 37]   (page · 4 + offset)
        logit_row = [2 3]
    """

    token_T: torch.Tensor
    position_T: torch.Tensor
    query_start_R: torch.Tensor
    """int32, R + 1 entries."""
    context_len_R: torch.Tensor
    """int32, this step's tokens included."""
    page_tables: tuple[torch.Tensor, ...]
    """int32 [R, M], one for each cache group of the model (layers/cache)."""
    slots: tuple[torch.Tensor, ...]
    """Where each token's key and value go, one tensor [T] for each cache group; −1: nowhere (padding)."""
    logit_row: torch.Tensor | None
    """The rows whose logits are wanted; None: all."""
    max_query: int = 0
    """The most tokens of one request, or more; 0: not known. A captured step with max_query 1 serves decoding alone."""
    spans: tuple[Span, ...] = ()
    """Of the requests with several rows, in order, where the host knows them: not in a captured step."""
    num_tokens: torch.Tensor | None = None
    """A device scalar; rows from there on are padding. None: no padding."""
    drafts: Drafts | None = None
    """In models with states, if there are drafts."""
    cuts: dict[int, tuple[torch.Tensor, torch.Tensor]] | None = None
    """By cache group with states, where the step stores states on its way too, as checkpoints: after how many of each
    request's rows (0: nowhere), and in which page; int32 both. None: nowhere."""
