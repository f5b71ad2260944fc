"""The input of a decode step, computed on the device from three numbers a row.

The host uploads these: the slot that owns the row (−1: padding; such rows come last), its token (−1: the one
that the slot sampled last, which the host may not have read yet; 0 if that is negative, see ops.sample) and its context
length with that token. All else follows, so that a captured step takes one small copy.

R rows, S slots, M page-table width, N columns of it that are wanted.
"""

import torch

from anabranch.ops.op import Samples, op

Row = tuple[int, int, int]
"""(slot, token, context length)."""


def packed(rows: list[Row]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int32).view(len(rows), 3).T.contiguous()


BATCHES: dict[str, list[Row]] = {
    "all known": [(2, 17, 1), (0, 4, 8), (1, 0, 9)],
    "some on the device": [(4, -1, 5), (0, 3, 12), (3, -1, 16)],
    "padding": [(1, -1, 3), (5, 9, 4), (-1, 0, 0), (-1, 0, 0)],
    "padding alone": [(-1, 0, 0)],
    "no rows": [],
}


def input_samples(dtype: torch.dtype, generator: torch.Generator) -> Samples:
    for label, rows in BATCHES.items():
        last_token_S = torch.randint(1000, (7,), generator=generator)
        last_token_S[3] = -1
        yield label, {"packed_3R": packed(rows), "last_token_S": last_token_S}


@op(samples=input_samples)
def decode_inputs(
    packed_3R: torch.Tensor, last_token_S: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(token_R int64, position_R int64, query_start_R int32 with R + 1 entries, context_len_R int32, num_tokens int32
    without dimensions). Padding rows have token 0, position 0 and no context; they are not in num_tokens."""
    slot_R, token_R, end_R = packed_3R.long()
    owned_R = slot_R >= 0
    last_R = last_token_S[slot_R.clamp(min=0)].clamp(min=0)
    token_R = torch.where(owned_R, torch.where(token_R < 0, last_R, token_R), 0)
    end_R = torch.where(owned_R, end_R, 0)
    query_start_R = torch.arange(packed_3R.shape[1] + 1, dtype=torch.int32, device=packed_3R.device)
    return token_R, (end_R - 1).clamp(min=0), query_start_R, end_R.int(), owned_R.sum(dtype=torch.int32)


def page_samples(dtype: torch.dtype, generator: torch.Generator) -> Samples:
    for label, rows in BATCHES.items():
        table_SM = torch.randint(100, (7, 5), generator=generator, dtype=torch.int32)
        for page_size, columns in ((4, 4), (4, 5), (4, 0), (16, 1)):
            pages = {"table_SM": table_SM, "page_size": page_size, "columns": columns}
            yield f"{label}, {columns} pages of {page_size}", {"packed_3R": packed(rows), **pages}


@op(samples=page_samples)
def decode_pages(
    packed_3R: torch.Tensor, table_SM: torch.Tensor, page_size: int, columns: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(page_table_RN int32, slot_R int64): the first N columns of each row's own page table, and where in the pages its
    token's key and value go, be its page in them or not. Padding rows have pages 0 and slot −1."""
    slot_R, _, end_R = packed_3R.long()
    owned_R = slot_R >= 0
    table_R, position_R = slot_R.clamp(min=0), (end_R - 1).clamp(min=0)
    page_table_RN = torch.where(owned_R[:, None], table_SM[:, :columns][table_R], 0)
    page_R = table_SM[table_R, position_R // page_size].long()
    return page_table_RN, torch.where(owned_R, page_R * page_size + position_R % page_size, -1)
