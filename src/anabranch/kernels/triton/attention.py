"""Paged attention on GPUs: which kernels run for a call, and how many programs they get.

T token rows, R requests, H query heads, G key-value heads (HG = H / G heads share one), D head dim, P pages, S slots in
a page, M page-table width, W pieces of work.

A decode step (every request has one new token) is attention_decode alone. Otherwise attention_prefill (or its twin
attention_hopper) does the requests with several new tokens, and attention_decode those with one in the same batch: what
is fast for one is not for the other. Who is which is seen on the device. The host knows sizes only, never lengths, so
that a captured call stays right while contexts grow.

This is one provider of the op. A vendor's attention library would be another: a package that registers on the same op
under its own name (`needs`: whether it can be imported), put before "triton" in a platform's `providers`.
"""

from __future__ import annotations

import functools
import importlib
import math
from dataclasses import dataclass

import torch
import triton

from anabranch import ops
from anabranch.kernels.triton import attention_tiles
from anabranch.kernels.triton.attention_decode import attend_pieces, combine_pieces
from anabranch.kernels.triton.attention_prefill import attend_rows
from anabranch.kernels.triton.attention_tiles import DecodeTile, HopperTile, Machine, PrefillTile
from anabranch.kernels.triton.launch import dependent_launch

MAX_DIM = 512
MAX_QUERIES = 64 * 128
"""Elements of the queries that attention_decode can hold: heads that share keys × head dim, both rounded up."""
GLUON_TRIED = ("3.6.",)
"""Versions of Triton that attention_hopper was compiled with."""
SINGLE_REQUESTS, MANY_REQUESTS = (32, 256, 512, 2048), (32, 1024, 2048)
"""A kernel looks at all requests of a step at once; each of these bounds is a version of it. The second are those of
attention_prefill, whose programs have more to do beside, and which looks at one entry more."""
FEW_PROGRAMS = 8
"""Per multiprocessor. With more, a successor that starts early would only take the place of programs that work."""


def accepts(
    q_THD: torch.Tensor,
    k_PSGD: torch.Tensor,
    v_PSGD: torch.Tensor,
    page_table_RM: torch.Tensor,
    query_start_R: torch.Tensor,
    context_len_R: torch.Tensor,
    scale: float,
    window: int = 0,
    max_query: int = 0,
) -> bool:
    return (
        q_THD.dtype == k_PSGD.dtype == v_PSGD.dtype
        and q_THD.dtype in (torch.float32, torch.float16, torch.bfloat16)
        and q_THD.stride(2) == k_PSGD.stride(3) == 1
        and k_PSGD.shape == v_PSGD.shape
        and k_PSGD.stride() == v_PSGD.stride()
        and q_THD.shape[2] <= MAX_DIM
        and page_table_RM.shape[0] < SINGLE_REQUESTS[-1]
        and page_table_RM.stride(1) == 1
        and all(tensor.dtype == torch.int32 and tensor.is_contiguous() for tensor in (query_start_R, context_len_R))
        and page_table_RM.dtype == torch.int32
        and scale > 0
    )


@ops.attention.kernel("triton", on=("cuda", "hip", "xpu"), accepts=accepts)
def attention(
    q_THD: torch.Tensor,
    k_PSGD: torch.Tensor,
    v_PSGD: torch.Tensor,
    page_table_RM: torch.Tensor,
    query_start_R: torch.Tensor,
    context_len_R: torch.Tensor,
    scale: float,
    window: int = 0,
    max_query: int = 0,
) -> torch.Tensor:
    call = Call(q_THD, k_PSGD, v_PSGD, page_table_RM, query_start_R, context_len_R, scale, window)
    out_THD = torch.empty(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device)
    (T, H, D), R = q_THD.shape, page_table_RM.shape[0]
    if T == 0:
        return out_THD
    machine = machine_of(q_THD.device)
    apart = call.padded_heads() * call.padded_dim() <= MAX_QUERIES
    decoding = apart and R > 0 and (max_query == 1 or T == 1)
    if not decoding:
        tile = attention_tiles.choose_prefill(T * H, D, q_THD.dtype, machine)
        attend_many(call, out_THD, tile, single=R < 2 or not apart)
    if decoding or (apart and R > 1):
        decode_tile = attention_tiles.choose_decode(R * k_PSGD.shape[2], D, q_THD.dtype, machine)
        attend_single(call, out_THD, decode_tile, pad=decoding)
    return out_THD


@dataclass(frozen=True, slots=True)
class Call:
    """The arguments of one call of the op."""

    q_THD: torch.Tensor
    k_PSGD: torch.Tensor
    v_PSGD: torch.Tensor
    page_table_RM: torch.Tensor
    query_start_R: torch.Tensor
    context_len_R: torch.Tensor
    scale: float
    window: int

    def strides(self) -> tuple[int, ...]:
        return (*self.q_THD.stride()[:2], *self.k_PSGD.stride()[:3], self.page_table_RM.stride(0))

    def padded_dim(self) -> int:
        return max(16, triton.next_power_of_2(self.q_THD.shape[2]))

    def padded_heads(self) -> int:
        """Those that share keys."""
        return max(16, triton.next_power_of_2(self.q_THD.shape[1] // self.k_PSGD.shape[2]))

    def shape(self, num_entries: int, bounds: tuple[int, ...]) -> dict[str, int | bool]:
        """What all kernels are compiled for; they look at so many entries of the requests at once."""
        return {
            "HG": self.q_THD.shape[1] // self.k_PSGD.shape[2],
            "D": self.q_THD.shape[2],
            "DP": self.padded_dim(),
            "S": self.k_PSGD.shape[1],
            "RP": next(bound for bound in bounds if bound >= num_entries),
            "WINDOWED": self.window > 0,
        }


def attend_many(call: Call, out_THD: torch.Tensor, tile: PrefillTile | HopperTile, single: bool) -> None:
    """Requests with several new tokens, and padding; `single`: those with one too."""
    (T, H, _), G, R = call.q_THD.shape, call.k_PSGD.shape[2], call.page_table_RM.shape[0]
    blocks = T * (H // G) // tile.rows + R + 1
    if isinstance(tile, HopperTile):
        # Gluon is imported only where it is used: it changes from one Triton to the next.
        attend = importlib.import_module("anabranch.kernels.triton.attention_hopper").attend_rows_hopper
        options = {"STAGES": tile.stages, "num_warps": 4}
    else:
        attend = attend_rows
        options = {"BM": tile.rows, "num_warps": tile.warps, "num_stages": tile.stages}
    attend[(G, blocks)](
        call.q_THD,
        call.k_PSGD,
        call.v_PSGD,
        call.page_table_RM,
        call.query_start_R,
        call.context_len_R,
        out_THD,
        T,
        R,
        call.scale * math.log2(math.e),
        call.window,
        *call.strides(),
        **call.shape(R + 1, MANY_REQUESTS),
        BN=tile.keys,
        SINGLE=single,
        **options,
        **launch_options(call, G * blocks),
    )


def attend_single(call: Call, out_THD: torch.Tensor, tile: DecodeTile, pad: bool) -> None:
    """Requests with one new token; `pad`: and rows of padding."""
    (T, H, D), (_, S, G, _), (R, M) = call.q_THD.shape, call.k_PSGD.shape, call.page_table_RM.shape
    most_keys = min(M * S, call.window + tile.keys - 1) if call.window else M * S
    num_pieces = most_pieces(R, G, most_keys, tile, call.q_THD.device)
    split = num_pieces > R
    piece_WHD = weight_WH = out_THD  # not touched
    if split:
        piece_WHD = torch.empty(num_pieces, H, D, dtype=torch.float32, device=out_THD.device)
        weight_WH = torch.empty(num_pieces, H, dtype=torch.float32, device=out_THD.device)
    shape, options = call.shape(R, SINGLE_REQUESTS), launch_options(call, G * num_pieces)
    attend_pieces[(G, num_pieces)](
        call.q_THD,
        call.k_PSGD,
        call.v_PSGD,
        call.page_table_RM,
        call.query_start_R,
        call.context_len_R,
        out_THD,
        piece_WHD,
        weight_WH,
        T if pad else 0,
        R,
        call.scale * math.log2(math.e),
        call.window,
        *call.strides(),
        **shape,
        ROWS=call.padded_heads(),
        BN=tile.keys,
        SPLIT=split,
        SWAP=tile.swap,
        FETCH=tile.fetch and options["PDL"] and D * out_THD.itemsize >= 128,
        num_warps=tile.warps,
        num_stages=tile.stages,
        **options,
    )
    if not split:
        return
    most_cut = min(R, num_pieces - R)
    heads = 1 if FEW_PROGRAMS * machine_of(out_THD.device).processors >= most_cut * H else H // G
    combine_pieces[(H // heads, most_cut)](
        call.query_start_R,
        call.context_len_R,
        out_THD,
        piece_WHD,
        weight_WH,
        R,
        num_pieces,
        call.window,
        H,
        HEADS=heads,
        BN=tile.keys,
        AT_ONCE=max(8, 4096 // shape["DP"]),
        num_warps=4,
        **{name: shape[name] for name in ("D", "DP", "RP", "WINDOWED")},
        **launch_options(call, most_cut * H // heads),
    )


def most_pieces(R: int, G: int, most_keys: int, tile: DecodeTile, device: torch.device) -> int:
    """W: a piece of each request, and as many more as the machine holds at a time, if there are keys for them."""
    blocks = triton.cdiv(most_keys, tile.keys)
    if blocks < 2:
        return R
    return R + min(max(1, tile.programs * machine_of(device).processors // G), R * blocks)


def launch_options(call: Call, programs: int) -> dict[str, bool]:
    device = call.q_THD.device
    few = programs <= FEW_PROGRAMS * machine_of(device).processors
    dependent = dependent_launch(device)
    return {"TRIGGER": few, "PDL": dependent, **({"launch_pdl": True} if dependent else {})}


@functools.cache
def machine_of(device: torch.device) -> Machine:
    if device.type != "cuda":
        return Machine()
    properties = torch.cuda.get_device_properties(device)
    shared = getattr(properties, "shared_memory_per_block_optin", 0) or Machine().shared_bytes
    hopper = dependent_launch(device) and torch.cuda.get_device_capability(device) == (9, 0)
    return Machine(
        shared_bytes=shared - 1024,
        processors=properties.multi_processor_count,
        wgmma=hopper,
        gluon=hopper and triton.__version__.startswith(GLUON_TRIED),
    )
