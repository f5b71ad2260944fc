"""The input of a decode step where device memory is the host's: reading values costs nothing, and most steps have no
padding.

R rows, S slots, M page-table width, N columns of it that are wanted.
"""

import torch

from anabranch import ops


def _padded(packed_3R: torch.Tensor) -> bool:
    return packed_3R.shape[1] == 0 or int(packed_3R[0, -1]) < 0  # padding rows come last


@ops.decode_inputs.kernel("torch", on=("cpu", "fake"))
def decode_inputs(
    packed_3R: torch.Tensor, last_token_S: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    if _padded(packed_3R):
        return ops.decode_inputs.reference(packed_3R, last_token_S)
    slot_R, token_R, end_R = packed_3R.long().unbind()
    token_R = torch.where(token_R < 0, last_token_S.index_select(0, slot_R).clamp_(min=0), token_R)
    num_rows = packed_3R.shape[1]
    query_start_R = torch.arange(num_rows + 1, dtype=torch.int32)
    return token_R, end_R - 1, query_start_R, packed_3R[2], torch.tensor(num_rows, dtype=torch.int32)


@ops.decode_pages.kernel("torch", on=("cpu", "fake"))
def decode_pages(
    packed_3R: torch.Tensor, table_SM: torch.Tensor, page_size: int, columns: int
) -> tuple[torch.Tensor, torch.Tensor]:
    if _padded(packed_3R):
        return ops.decode_pages.reference(packed_3R, table_SM, page_size, columns)
    slot_R, _, end_R = packed_3R.long().unbind()
    page_table_RN = table_SM[:, :columns].index_select(0, slot_R)
    position_R = end_R - 1
    page_R = table_SM[slot_R, position_R // page_size]
    return page_table_RN, page_R * page_size + position_R % page_size
