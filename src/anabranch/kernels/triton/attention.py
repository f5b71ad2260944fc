"""Paged attention on GPUs: which kernels run for a call, and how many programs they get.

T token rows, R requests, H query heads, G key-value heads (HG = H / G heads share one), D head dim, E that of values, P
pages, S slots in a page, M page-table width, W pieces of work.

A decode step (every request has one new token) is attention_decode alone. Otherwise attention_prefill (or its twin
attention_hopper) does the requests with several new tokens, and attention_decode those with one in the same batch: what
is fast for one is not for the other. Where E is not D, or tiles are fixed, attention_prefill does all. The device tells
them apart. The host knows sizes only, never lengths, so that a captured call stays right while contexts grow.
"""

import functools
import importlib
import math
from typing import Any, NamedTuple

import torch

from anabranch import ops
from anabranch.kernels.triton import attention_tiles
from anabranch.kernels.triton.attention_decode import attend_pieces
from anabranch.kernels.triton.attention_prefill import attend_rows
from anabranch.kernels.triton.attention_tiles import DecodeTile, HopperTile, PrefillTile
from anabranch.kernels.triton.launch import (
    FLOATS,
    FP8,
    cdiv,
    converts_fp8,
    dependent_launch,
    lasting_zeros,
    machine_of,
    next_power_of_2,
)
from anabranch.kernels.tuning.experts_tiles import Machine
from anabranch.ops.attention import AttentionCall

MAX_DIM = 512
MAX_QUERIES = 64 * 128
"""Elements of the queries that attention_decode can hold: heads that share keys × head dim, both rounded up."""
SINGLE_REQUESTS, MANY_REQUESTS = (32, 256, 512, 2048), (32, 1024, 2048)
"""A kernel reads the lengths of all requests of a step at once; each of these bounds is a version of it. The second are
those of attention_prefill, whose programs have more other work, and which reads one entry more."""
ELEMENTS_AT_ONCE, MOST_AT_ONCE = 2048, 16
"""Of pieces that are added up: elements per warp, which are 64 registers of a thread, and pieces. Those of the products
are free again by then."""
FEW_PROGRAMS = 8
"""Per multiprocessor. With more, a kernel that starts early would only take the place of programs that work."""


def accepts(call: AttentionCall) -> bool:
    q_THD, k_PSGD, v_PSGE, page_table_RM = call.q_THD, call.k_PSGD, call.v_PSGE, call.page_table_RM
    integers = page_table_RM, call.query_start_R, call.context_len_R
    return (
        (k_PSGD.dtype == q_THD.dtype or (k_PSGD.dtype == FP8 and converts_fp8(q_THD.device)))
        and v_PSGE.dtype == k_PSGD.dtype
        and q_THD.dtype in FLOATS
        and q_THD.stride(2) == k_PSGD.stride(3) == 1
        and k_PSGD.shape[:3] == v_PSGE.shape[:3]
        and k_PSGD.stride() == v_PSGE.stride()
        and max(q_THD.shape[2], v_PSGE.shape[3]) <= MAX_DIM
        and page_table_RM.shape[0] < SINGLE_REQUESTS[-1]
        and page_table_RM.stride(1) == 1
        and all(tensor.dtype == torch.int32 for tensor in integers)
        and all(tensor.is_contiguous() for tensor in integers[1:])
        and call.scale > 0
        and (call.sink_H is None or call.sink_H.is_contiguous())
    )


@ops.attention.kernel("triton", on=("cuda", "hip", "xpu"), accepts=accepts)
def attention(call: AttentionCall) -> torch.Tensor:
    q_THD, k_PSGD, v_PSGE, page_table_RM, window = call.q_THD, call.k_PSGD, call.v_PSGE, call.page_table_RM, call.window
    T, H, D = q_THD.shape
    (_, S, G, E), (R, M), device = v_PSGE.shape, page_table_RM.shape, q_THD.device
    out_THE = torch.empty(T, H, E, dtype=q_THD.dtype, device=device)
    if T == 0:
        return out_THE
    whole = k_PSGD.is_contiguous() and (k_PSGD.data_ptr() | v_PSGE.data_ptr()) % 16 == 0
    fp8 = k_PSGD.dtype == FP8
    shape = Shape(T, R, M, H, G, D, E, S, q_THD.dtype, window, call.max_query, whole, fp8, call.sink_H is not None)
    v_scale = call.v_scale if fp8 else None
    overrides = attention_tiles.prefill_override, attention_tiles.decode_override
    plan = make_plan(shape, machine_of(device), dependent_launch(device), *overrides)
    tensors = q_THD, k_PSGD, v_PSGE, page_table_RM, call.query_start_R, call.context_len_R, out_THE
    strides = *q_THD.stride()[:2], *k_PSGD.stride()[:3], page_table_RM.stride(0)
    numbers = R, call.scale * math.log2(math.e), window, *strides
    if plan.many is not None:
        attend_many(plan.many, v_scale, call.sink_H, *tensors, T, *numbers, plan.many.trigger, plan.alone)
    if plan.single is not None:
        attend_single(plan.single, shape, tensors, T if plan.pad else 0, numbers, v_scale, call.sink_H)
    return out_THE


class Shape(NamedTuple):
    """What the plan of a call depends on besides the machine: the same for all layers of a cache group in a step."""

    T: int
    R: int
    M: int
    H: int
    G: int
    D: int
    E: int
    S: int
    dtype: torch.dtype
    window: int
    max_query: int
    whole: bool = True
    """Keys, and values, lie in one piece, as the copy engine wants them."""
    fp8: bool = False
    """The pages are FP8, which attention_hopper does not read."""
    sinks: bool = False
    """Heads have sinks, which attention_hopper does not know."""

    def padded_dim(self) -> int:
        return max(16, next_power_of_2(self.D))

    def padded_heads(self) -> int:
        """Those that share keys."""
        return max(16, next_power_of_2(self.H // self.G))


class Launch(NamedTuple):
    grid: tuple[int, int]
    options: dict[str, Any]
    """What the kernel is compiled for: few versions of it, whatever the step. A start has to know them all."""
    trigger: int
    """Whether it lets the next kernel start early."""


class AttentionPlan(NamedTuple):
    """Which kernels run, and how."""

    many: Launch | None
    """Requests with several new tokens, and padding: attention_prefill, or its twin."""
    single: Launch | None
    """Those with one: attention_decode."""
    pad: bool = False
    """Rows of padding are for attention_decode: there is no other kernel."""
    alone: int = 0
    """Requests with one new token are for attention_prefill: there is no other kernel."""


@functools.lru_cache(256)
def make_plan(
    shape: Shape,
    machine: Machine,
    dependent: bool,
    prefill_tile: PrefillTile | HopperTile | None = None,
    decode_tile: DecodeTile | None = None,
) -> AttentionPlan:
    """The tiles: those instead of what would be chosen. A plan takes longer than the launches, hence the cache."""
    fits = shape.padded_heads() * shape.padded_dim() <= MAX_QUERIES and shape.D == shape.E
    apart = fits and not machine.fixed  # pieces depend on how many requests there are
    decoding = apart and shape.R > 0 and (shape.max_query == 1 or shape.T == 1)
    many = None
    if not decoding:
        page = shape.S if shape.whole and not shape.fp8 and not shape.sinks else 0
        sizes = 0 if machine.fixed else shape.T * shape.H, shape.D, shape.dtype, machine, page, shape.E
        tile = prefill_tile or attention_tiles.choose_prefill(*sizes)
        many = plan_many(shape, machine, dependent, tile)
    if not decoding and (shape.R < 2 or not apart):
        return AttentionPlan(many, None, alone=1)
    pairs = shape.R * shape.G
    chosen = decode_tile or attention_tiles.choose_decode(pairs, shape.D, shape.dtype, machine, shape.fp8)
    return AttentionPlan(many, plan_single(shape, machine, dependent, chosen), pad=decoding)


def plan_many(shape: Shape, machine: Machine, dependent: bool, tile: PrefillTile | HopperTile) -> Launch:
    blocks = shape.T * (shape.H // shape.G) // tile.rows + shape.R + 1
    options = compiled_for(shape, shape.R + 1, MANY_REQUESTS, tile.keys, dependent)
    if isinstance(tile, HopperTile):
        options |= {"STAGES": tile.stages, "num_warps": 4}
    else:
        main, tail = attention_tiles.parts(shape.D)
        options |= {"DP": main, "DT": tail, "E": shape.E, "EP": sum(attention_tiles.parts(shape.E, 0))}
        options |= {"BM": tile.rows, "num_warps": tile.warps, "num_stages": tile.stages}
    return Launch((shape.G, blocks), options, few_programs(machine, shape.G * blocks))


def plan_single(shape: Shape, machine: Machine, dependent: bool, tile: DecodeTile) -> Launch:
    R, G, heads = shape.R, shape.G, next_power_of_2(shape.H // shape.G)
    # However short the contexts of this step are: those of the next one need not be, and it should find its kernels.
    most_keys = max(shape.M * shape.S, 2 * tile.keys)
    if shape.window:
        most_keys = min(most_keys, shape.window + tile.keys - 1)
    num_pieces = most_pieces(R, G, most_keys, tile, machine)
    assert num_pieces < 1 << 15, "the place of a piece has half of a count"
    options = {
        **compiled_for(shape, R, SINGLE_REQUESTS, tile.keys, dependent),
        "ROWS": shape.padded_heads(),
        "SPLIT": num_pieces > R,
        "HEADS": heads,
        "AT_ONCE": max(1, min(MOST_AT_ONCE, ELEMENTS_AT_ONCE * tile.warps // (heads * shape.padded_dim()))),
        "SWAP": tile.swap,
        "FETCH": tile.fetch and dependent and shape.D * (1 if shape.fp8 else shape.dtype.itemsize) >= 128,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }
    return Launch((G, num_pieces), options, few_programs(machine, G * num_pieces))


def compiled_for(shape: Shape, num_entries: int, bounds: tuple[int, ...], keys: int, dependent: bool) -> dict[str, Any]:
    """Options of all kernels; `num_entries` of the requests are read at once."""
    return {
        "HG": shape.H // shape.G,
        "D": shape.D,
        "DP": shape.padded_dim(),
        "S": shape.S,
        "RP": next(bound for bound in bounds if bound >= num_entries),
        "WINDOWED": shape.window > 0,
        "BN": keys,
        "DEPENDENT": dependent,
        **({"launch_pdl": True} if dependent else {}),
    }


def few_programs(machine: Machine, programs: int) -> int:
    return int(programs <= FEW_PROGRAMS * machine.processors)


def most_pieces(R: int, G: int, most_keys: int, tile: DecodeTile, machine: Machine) -> int:
    """W: a piece of each request, and as many more as the machine holds at a time, if there are keys for them."""
    blocks = cdiv(most_keys, tile.keys)
    return R if blocks < 2 else R + min(max(1, tile.programs * machine.processors // G), R * blocks)


def attend_many(launch: Launch, v_scale: float | None, sink_H: torch.Tensor | None, *arguments: Any) -> None:
    if "STAGES" in launch.options:
        # Gluon is imported only where it is used: it changes from one Triton to the next.
        gluon = importlib.import_module("anabranch.kernels.triton.attention_hopper")
        attend = gluon.attend_rows_hopper
        arguments += tuple(gluon.descriptor(pages) for pages in arguments[1:3])
    else:
        attend, arguments = attend_rows, (*arguments, v_scale, sink_H)
    attend[launch.grid](*arguments, **launch.options)


def attend_single(
    launch: Launch,
    shape: Shape,
    tensors: tuple[torch.Tensor, ...],
    num_tokens: int,
    numbers: tuple[int | float, ...],
    v_scale: float | None,
    sink_H: torch.Tensor | None,
) -> None:
    """`tensors` and `numbers` are the kernel's, in its order, but for those that are made here."""
    (num_groups, num_pieces), options, trigger = launch
    out_THD = tensors[-1]
    piece_WHD = weight_WH = count_RG = out_THD  # not touched
    if options["SPLIT"]:
        device = out_THD.device
        piece_WHD = torch.empty(num_pieces, shape.H, shape.D, dtype=torch.float32, device=device)
        weight_WH = torch.empty(num_pieces, shape.H, dtype=torch.float32, device=device)
        count_RG = counts_of(num_groups, device)
    made = piece_WHD, weight_WH, count_RG
    attend_pieces[launch.grid](*tensors, *made, num_tokens, *numbers, trigger, v_scale, sink_H, **options)


@functools.cache
def counts_of(G: int, device: torch.device) -> torch.Tensor:
    """For as many requests as a step may have. All calls share them: on a device these follow each other."""
    return lasting_zeros(device, SINGLE_REQUESTS[-1], G)
