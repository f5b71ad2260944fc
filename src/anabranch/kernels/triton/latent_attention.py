"""Attention over latent rows on GPUs: which kernels run for a call, and how many programs they get.

T token rows, R requests, H query heads, L latent dims, F dims that have turned, S slots in a page, M page-table width,
W pieces of work.

As `attention`: a decode step is latent_decode alone; otherwise latent_prefill does the requests with several new tokens
and latent_decode those with one. The host knows sizes only, never lengths.
"""

import functools
import math
from typing import Any, NamedTuple

import torch

from anabranch import ops
from anabranch.kernels.triton.attention import (
    ELEMENTS_AT_ONCE,
    MANY_REQUESTS,
    MOST_AT_ONCE,
    SINGLE_REQUESTS,
    counts_of,
    few_programs,
    most_pieces,
)
from anabranch.kernels.triton.attention_tiles import DecodeTile, PrefillTile
from anabranch.kernels.triton.latent_decode import attend_latent_pieces
from anabranch.kernels.triton.latent_prefill import attend_latent_rows
from anabranch.kernels.triton.launch import FLOATS, dependent_launch, machine_of, next_power_of_2
from anabranch.kernels.tuning.experts_tiles import Machine
from anabranch.ops.latent_attention import LatentAttentionCall

MAX_LATENT, MAX_TURNED = 512, 128
SUMMED_HEADS = 16
"""Whose pieces are added up together."""
decode_override: DecodeTile | None = None
prefill_override: PrefillTile | None = None
"""Instead of what would be chosen."""


class Shape(NamedTuple):
    """What the plan of a call depends on besides the machine."""

    T: int
    R: int
    M: int
    H: int
    L: int
    F: int
    S: int
    dtype: torch.dtype
    max_query: int


class LatentPlan(NamedTuple):
    """Options of the kernels that run, and their programs."""

    many: dict[str, Any] | None
    num_blocks: int
    single: dict[str, Any] | None
    num_groups: int
    num_pieces: int
    triggers: tuple[int, int]
    """Whether each lets the next kernel start early."""


def accepts(call: LatentAttentionCall) -> bool:
    q_THL, q_turned_THF, rows_PSC, page_table_RM = call[:4]
    integers = page_table_RM, call.query_start_R, call.context_len_R
    return (
        q_THL.dtype in FLOATS
        and q_THL.dtype == q_turned_THF.dtype == rows_PSC.dtype
        and q_THL.stride(2) == q_turned_THF.stride(2) == 1
        and rows_PSC[0].is_contiguous()
        and q_THL.shape[2] <= MAX_LATENT
        and q_turned_THF.shape[2] <= MAX_TURNED
        and page_table_RM.shape[0] < SINGLE_REQUESTS[-1]
        and page_table_RM.stride(1) == 1
        and all(tensor.dtype == torch.int32 for tensor in integers)
        and all(tensor.is_contiguous() for tensor in integers[1:])
        and call.scale > 0
    )


@ops.latent_attention.kernel("triton", on=("cuda", "hip", "xpu"), accepts=accepts)
def latent_attention(call: LatentAttentionCall) -> torch.Tensor:
    q_THL, q_turned_THF, rows_PSC, page_table_RM = call[:4]
    (T, H, L), device = q_THL.shape, q_THL.device
    out_THL = torch.empty(T, H, L, dtype=q_THL.dtype, device=device)
    if T == 0:
        return out_THL
    R, M = page_table_RM.shape
    shape = Shape(T, R, M, H, L, q_turned_THF.shape[2], rows_PSC.shape[1], q_THL.dtype, call.max_query)
    plan = make_plan(shape, machine_of(device), dependent_launch(device), decode_override, prefill_override)
    tensors = q_THL, q_turned_THF, rows_PSC, page_table_RM, call.query_start_R, call.context_len_R, out_THL
    strides = *q_THL.stride()[:2], *q_turned_THF.stride()[:2], rows_PSC.stride(0), page_table_RM.stride(0)
    numbers = R, call.scale * math.log2(math.e), *strides
    if plan.many is not None:
        alone = int(plan.single is None)
        attend_latent_rows[(plan.num_blocks,)](*tensors, T, *numbers, plan.triggers[0], alone, **plan.many)
    if plan.single is not None:
        made = (out_THL,) * 3  # not touched
        if plan.single["SPLIT"]:
            piece_WHL = torch.empty(plan.num_pieces, H, L, dtype=torch.float32, device=device)
            weight_WH = torch.empty(plan.num_pieces, H, dtype=torch.float32, device=device)
            made = piece_WHL, weight_WH, counts_of(plan.num_groups, device)
        padded = T if plan.many is None else 0
        grid = plan.num_groups, plan.num_pieces
        attend_latent_pieces[grid](*tensors, *made, padded, *numbers, plan.triggers[1], **plan.single)
    return out_THL


@functools.lru_cache(256)
def make_plan(
    shape: Shape,
    machine: Machine,
    dependent: bool,
    decode_tile: DecodeTile | None = None,
    prefill_tile: PrefillTile | None = None,
) -> LatentPlan:
    T, R, M, H, L, F, S, *_ = shape
    LP = max(16, next_power_of_2(L))
    compiled_for = {
        "L": L,
        "LP": LP,
        "F": F,
        "FP": max(16, next_power_of_2(F)),
        "S": S,
        "DEPENDENT": dependent,
        **({"launch_pdl": True} if dependent else {}),
    }
    many = single = None
    num_blocks = num_pieces = 0
    num_groups = next(n for n in range(-(-H // most_rows(machine)), H + 1) if H % n == 0)
    decoding = R > 0 and (shape.max_query == 1 or T == 1) and not machine.fixed
    if not decoding:
        tile = prefill_tile or choose_prefill(shape, machine)
        num_blocks = T * H // tile.rows + R + 1
        many = {
            **compiled_for,
            "H": H,
            "BM": tile.rows,
            "BN": tile.keys,
            "RP": next(bound for bound in MANY_REQUESTS if bound >= R + 1),
            "num_warps": tile.warps,
            "num_stages": tile.stages,
        }
    if decoding or (R > 1 and not machine.fixed):  # its pieces depend on how many requests there are
        rows = max(16, next_power_of_2(H // num_groups))
        chosen = decode_tile or choose_decode(rows, shape, machine)
        num_pieces = most_pieces(R, num_groups, max(M * S, 2 * chosen.keys), chosen, machine)
        assert num_pieces < 1 << 15, "the place of a piece has half of a count"
        single = {
            **compiled_for,
            "HG": H // num_groups,
            "ROWS": rows,
            "BN": chosen.keys,
            "RP": next(bound for bound in SINGLE_REQUESTS if bound >= R),
            "SPLIT": num_pieces > R,
            "SUM": SUMMED_HEADS,
            "AT_ONCE": max(1, min(MOST_AT_ONCE, ELEMENTS_AT_ONCE * chosen.warps // (SUMMED_HEADS * LP))),
            "num_warps": chosen.warps,
            "num_stages": chosen.stages,
        }
    triggers = few_programs(machine, num_blocks), few_programs(machine, num_groups * num_pieces)
    return LatentPlan(many, num_blocks, single, num_groups, num_pieces, triggers)


def most_rows(machine: Machine) -> int:
    """Queries of a program. Hopper's matrix unit wants 64; Blackwell's, with as many, would keep results where there is
    not enough room for these."""
    return 64 if machine.wgmma else 32


def choose_decode(rows: int, shape: Shape, machine: Machine) -> DecodeTile:
    """`rows`: heads of a program, rounded up. Few of them leave room for two programs on a multiprocessor."""
    if shape.dtype == torch.float32:  # exact products do not use the matrix unit
        candidates = [DecodeTile(16, 8, 2, programs=1)]
    elif rows <= 16:
        candidates = [DecodeTile(32, 4, 3)]
    else:  # with 64 keys, registers are spilled
        candidates = [DecodeTile(32, 8, 3, programs=1)]
    smaller = [DecodeTile(keys, 8, stages, programs=1) for keys in (32, 16) for stages in (2, 1)]
    return next((t for t in candidates + smaller if fits(rows, t.keys, t.stages, shape, machine)), smaller[-1])


def choose_prefill(shape: Shape, machine: Machine) -> PrefillTile:
    if shape.dtype == torch.float32:
        candidates = [PrefillTile(16, 16, 4, 2)]
    else:
        candidates = [PrefillTile(most_rows(machine), 32, 8, stages) for stages in (3, 2)]
    smaller = [PrefillTile(16, 16, 4, stages) for stages in (2, 1)]
    return next((t for t in candidates + smaller if fits(t.rows, t.keys, t.stages, shape, machine)), smaller[-1])


def fits(rows: int, keys: int, stages: int, shape: Shape, machine: Machine) -> bool:
    """Whether there is enough shared memory for queries, rows of each stage, and a little more."""
    # Hopper's matrix unit, which has 64 rows, reads a stage while others are filled; other units copy it to registers.
    buffers = stages if machine.wgmma and rows >= 64 else max(1, stages - 1)
    width = next_power_of_2(shape.L) + next_power_of_2(shape.F)
    return (buffers * keys + rows) * width * shape.dtype.itemsize + (4 << 10) <= machine.shared_bytes
