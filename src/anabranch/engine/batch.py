"""Ints become tensors here and nowhere else: what requests contribute to a step → layers.step.Step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from anabranch.layers.step import Step


@dataclass(frozen=True, slots=True)
class Rows:
    """One request's share of a step."""

    tokens: Sequence[int]
    num_computed: int
    """Tokens of the request whose keys and values are in its pages already."""
    pages: Sequence[Sequence[int]]
    """For each KVGroup, the request's pages in order."""
    all_logits: bool = False
    """Logits of every row, not only the last."""


def make_step(requests: Sequence[Rows], page_size: int, device: torch.device) -> Step:
    tokens: list[int] = []
    positions: list[int] = []
    query_start, context_len = [0], []
    logit_row: list[int] = []
    num_groups = len(requests[0].pages)
    slots: list[list[int]] = [[] for _ in range(num_groups)]
    for rows in requests:
        begin, end = rows.num_computed, rows.num_computed + len(rows.tokens)
        tokens += rows.tokens
        positions += range(begin, end)
        first = query_start[-1] if rows.all_logits else len(tokens) - 1
        logit_row += range(first, len(tokens))
        query_start.append(len(tokens))
        context_len.append(end)
        for group, pages in enumerate(rows.pages):
            slots[group] += [pages[i // page_size] * page_size + i % page_size for i in range(begin, end)]

    def tensor(values: object, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    return Step(
        token_T=tensor(tokens, torch.int64),
        position_T=tensor(positions, torch.int64),
        query_start_R=tensor(query_start),
        context_len_R=tensor(context_len),
        page_tables=tuple(tensor(_padded([rows.pages[group] for rows in requests])) for group in range(num_groups)),
        slots=tuple(tensor(group, torch.int64) for group in slots),
        logit_row=tensor(logit_row, torch.int64),
    )


def _padded(tables: list[Sequence[int]]) -> list[list[int]]:
    width = max(map(len, tables))
    return [[*pages, *([0] * (width - len(pages)))] for pages in tables]
