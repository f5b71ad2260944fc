"""The experts' feed-forward on GPUs: which kernels run for a call, and how results are combined.

T tokens, D hidden width, K experts per token, E experts, I expert width (`inner`), N = T · K pairs.

A few tokens: experts_small. More: experts_grouped, or on Hopper experts_hopper, for block FP8 experts_hopper_fp8, and
for INT4 and MXFP4 experts_hopper_packed; all after experts_plan.

Three ways to bring rows back to their token (`combine`):

* fused: the down kernel adds into the token's row, in fp32. In registers where one program sees all experts of a
  token, otherwise by atomics, whose order, and so the last bits, changes from run to run.
* ordered: the same bits every time for the same batch.
* unfused: the down kernel writes a row per pair; another sums them, in fp32 and always in the same order. A caller that
  does not want them combined sums them itself; rows without an expert are then whatever the memory held.
* fastest: of these, the fastest for the number of tokens.

Tiles come from a table that was measured for this shape on this device (kernels/tuning), else from experts_tiles.
"""

import functools
from dataclasses import replace
from typing import Any

import torch

from anabranch import ops
from anabranch.formats import PLAIN
from anabranch.kernels.triton.experts_grouped import down_grouped, gate_up_grouped
from anabranch.kernels.triton.experts_plan import order_rows
from anabranch.kernels.triton.experts_small import down_pair, down_token, gate_up_small
from anabranch.kernels.triton.experts_sum import sum_rows
from anabranch.kernels.triton.launch import (
    FLOATS,
    cdiv,
    gluon_kernels,
    launch_options,
    machine_of,
    next_power_of_2,
    num_processors,
)
from anabranch.kernels.triton.quantize_rows import GROUP, quantize_rows
from anabranch.kernels.triton.quantized import KINDS, is_supported, options
from anabranch.kernels.triton.split_rows import split_rows
from anabranch.kernels.tuning.experts_tables import table_for
from anabranch.kernels.tuning.experts_tiles import (
    CHUNK,
    FewTiles,
    GroupedTiles,
    HopperTiles,
    Machine,
    PackedTiles,
    Shape,
    SmallTiles,
    Tiles,
    adapt,
    choose,
    is_packed,
    padded_tokens,
)
from anabranch.ops.experts import COMBINES, ExpertsCall, new_result
from anabranch.ops.weight import BY_INPUT, Weight

hopper_kernels = functools.partial(gluon_kernels, "experts_hopper")
fp8_kernels = functools.partial(gluon_kernels, "experts_hopper_fp8")
packed_kernels = functools.partial(gluon_kernels, "experts_hopper_packed")
few_kernels = functools.partial(gluon_kernels, "experts_few")


def accepts(call: ExpertsCall) -> bool:
    weights = call.gate_up_EFD, call.down_EDI
    if not all(is_supported(weight, call.x_TD.dtype) for weight in weights):
        return False
    x_TD = call.x_TD
    return (
        x_TD.dtype in FLOATS
        and x_TD.stride(1) == 1
        and call.weight_TK.dtype == torch.float32
        and call.expert_TK.dtype == torch.int32
        and all(
            tensor is None or tensor.is_contiguous()
            for tensor in (call.weight_TK, call.expert_TK, call.gate_up_bias_EF, call.down_bias_ED)
        )
    )


def add_scales_by_input(weight: Weight) -> None:
    """Scales in the order in which experts_hopper_packed copies them: 3 to 6 % more memory."""
    packed = packed_kernels(weight.device)
    if packed is None or machine_of(weight.device).fixed or not is_packed(weight.format) or "zero" in weight.tensors:
        return
    scales = packed.scales_by_input(weight.tensors["scale"])
    weight.register_parameter(BY_INPUT, torch.nn.Parameter(scales, requires_grad=False))


@ops.experts.kernel(
    "triton",
    on=("cuda", "hip", "xpu"),
    accepts=accepts,
    tuner="anabranch.kernels.tuning.experts_tuner",
    traits=("unreduced_rows", *KINDS),
    prepare=add_scales_by_input,
)
def experts(call: ExpertsCall) -> torch.Tensor:
    if call.x_TD.shape[0] == 0:
        return new_result(call)
    return run(call, tiles_for(call))


def tiles_for(call: ExpertsCall) -> Tiles:
    combine = call.combine if call.combined else "unfused"
    if combine not in COMBINES:
        raise ValueError(f"combine {combine!r} is none of {', '.join(COMBINES)}")
    (tokens, top_k), (num_experts, D, inner) = call.expert_TK.shape, call.down_EDI.shape
    shape = Shape(num_experts, D, inner, top_k, call.x_TD.dtype, call.gate_up_EFD.format.name)
    return chosen(padded_tokens(tokens), shape, combine, machine_for(call), call.x_TD.device)


@functools.cache
def chosen(tokens: int, shape: Shape, combine: str, machine: Machine, device: torch.device) -> Tiles:
    """As measured on this device, else by the rule."""
    rule = choose(tokens, shape, combine, machine)
    table = None if machine.fixed else table_for(device, shape)
    return rule if table is None else table.pick(tokens, rule, lambda tiles: adapt(tiles, tokens, combine, machine))


def run(call: ExpertsCall, tiles: Tiles) -> torch.Tensor:
    """The op with these tiles. At least one token."""
    if isinstance(tiles, SmallTiles):
        return run_small(call, tiles)
    if isinstance(tiles, FewTiles):
        return run_few(call, tiles)
    if isinstance(tiles, PackedTiles):
        return run_hopper_packed(call, tiles)
    if isinstance(tiles, HopperTiles):
        return run_hopper(call, tiles) if call.down_EDI.format is PLAIN else run_hopper_fp8(call, tiles)
    return run_grouped(call, tiles)


def run_small(call: ExpertsCall, tiles: SmallTiles) -> torch.Tensor:
    (_, D, inner), (tokens, top_k) = call.down_EDI.shape, call.expert_TK.shape
    num_pairs, launch = tokens * top_k, launch_options(call.x_TD.device)
    sharing = {"PAIRS": next_power_of_2(padded_tokens(tokens) * top_k) if tiles.share else 1, "SHARE": tiles.share}
    h_NI = call.x_TD.new_empty(num_pairs, inner)
    weight_FD = call.gate_up_EFD.data
    width = weight_FD.shape[-1]
    shape = {"ROWS": tiles.gate_rows, **chunks(weight_FD), **options(call.gate_up_EFD)}
    gate_up_small[(num_pairs, cdiv(inner, tiles.gate_rows))](
        call.x_TD, call.x_TD.stride(0), call.expert_TK, weight_FD, bias_EF=call.gate_up_bias_EF, h_NI=h_NI,
        num_pairs=num_pairs, D=width, inner=inner,
        K=top_k, ACTIVATION=call.activation, num_warps=tiles.gate_warps, **sharing, **shape, **launch,
    )  # fmt: skip
    weight_DI = call.down_EDI.data
    width = weight_DI.shape[-1]
    shape = {"COLUMNS": tiles.down_columns, "width": width, **chunks(weight_DI), **options(call.down_EDI)}
    y = new_result(call)
    if tiles.by_token and call.combined:
        down_token[(tokens, cdiv(D, tiles.down_columns))](
            call.weight_TK, call.expert_TK, h_NI, weight_DI, bias_ED=call.down_bias_ED, y_TD=y, scaling=call.scaling,
            D=D, inner=inner,
            K=top_k, AHEAD=min(tiles.ahead, top_k), num_warps=tiles.down_warps, **shape, **launch,
        )  # fmt: skip
        return y
    rows_ND = call.x_TD.new_empty(num_pairs, D) if call.combined else y
    down_pair[(num_pairs, cdiv(D, tiles.down_columns))](
        call.weight_TK, call.expert_TK, h_NI, weight_DI, bias_ED=call.down_bias_ED, rows_ND=rows_ND,
        num_pairs=num_pairs, scaling=call.scaling, D=D, inner=inner,
        num_warps=tiles.down_warps, **sharing, **shape, **launch,
    )  # fmt: skip
    return sum_into(call, rows_ND, y, False, launch) if call.combined else y


def run_few(call: ExpertsCall, tiles: FewTiles) -> torch.Tensor:
    (_, D, inner), (tokens, top_k), device = call.down_EDI.shape, call.expert_TK.shape, call.x_TD.device
    kernels = few_kernels(device)
    assert kernels is not None and call.combined

    def shape(weight: Weight, warps: int, parts: int) -> dict[str, Any]:
        width = weight.data.shape[-1] * weight.data.element_size() // 16
        of = options(weight)
        constants = {name: of[name] for name in ("KIND", "OUTPUTS", "INPUTS", "num_groups", "scale")}
        return {"W": warps, "CHUNKS": cdiv(width, 4 * parts), "width": width, "num_warps": warps, **constants}

    launch, h_NI, y_TD = launch_options(device), call.x_TD.new_empty(tokens * top_k, inner), new_result(call)
    kernels.gate_up_few[(tokens * top_k, cdiv(inner, 8))](
        call.x_TD, call.x_TD.stride(0), call.expert_TK, call.gate_up_EFD.data.view(torch.int32),
        bias_EF=call.gate_up_bias_EF, h_NI=h_NI, D=D, inner=inner, K=top_k, ACTIVATION=call.activation,
        **shape(call.gate_up_EFD, tiles.gate_warps, tiles.gate_warps), **launch,
    )  # fmt: skip
    kernels.down_few[(tokens, cdiv(D, 16))](
        call.weight_TK, call.expert_TK, h_NI, call.down_EDI.data.view(torch.int32), bias_ED=call.down_bias_ED,
        y_TD=y_TD, scaling=call.scaling, D=D, inner=inner, K=top_k, PARTS=tiles.down_parts,
        **shape(call.down_EDI, next_power_of_2(top_k) * tiles.down_parts, tiles.down_parts), **launch,
    )  # fmt: skip
    return y_TD


def chunks(weight: torch.Tensor) -> dict[str, int]:
    """How experts_small goes through a row of weights: CHUNK at a time, 16 bytes for each thread of a warp."""
    width = weight.shape[-1]
    chunk = min(2 * CHUNK if weight.element_size() == 1 else CHUNK, next_power_of_2(width))
    return {"CHUNK": chunk, "NUM_CHUNKS": cdiv(width, chunk)}


def run_grouped(call: ExpertsCall, tiles: GroupedTiles) -> torch.Tensor:
    (num_experts, D, inner), (tokens, top_k) = call.down_EDI.shape, call.expert_TK.shape
    num_pairs, launch = tokens * top_k, launch_options(call.x_TD.device)
    match = tiles.match and call.combined and tokens <= tiles.rows
    quantized = call.down_EDI.format is not PLAIN  # for plain weights, experts_small is faster with so few tokens
    by_pair = match and quantized and padded_tokens(tokens) * top_k < num_experts
    if match:
        order_N = tile_3M = call.expert_TK  # neither is read
        weight_N, max_tiles = call.weight_TK, num_pairs if by_pair else num_experts
    else:
        plan = order_rows(call, tiles.rows, 0, launch)
        order_N, weight_N, tile_3M, max_tiles = plan.order_N, plan.weight_N, plan.tile_3M, plan.max_tiles
    common = {"K": top_k, "KP": next_power_of_2(top_k), "BM": tiles.rows, "MATCH": match, "BY_PAIR": by_pair, **launch}
    h_NI = call.x_TD.new_empty(num_pairs, inner)
    tile = tiles.gate_up
    gate_up_grouped[(max_tiles * cdiv(inner, tile.columns),)](
        call.x_TD, call.x_TD.stride(0), call.expert_TK, call.gate_up_EFD.data, bias_EF=call.gate_up_bias_EF, h_NI=h_NI,
        order_N=order_N, tile_3M=tile_3M, max_tiles=max_tiles, num_pairs=num_pairs, D=D, inner=inner,
        **options(call.gate_up_EFD),
        EVEN=D % tile.depth == 0, ACTIVATION=call.activation, BN=tile.columns, BK=tile.depth, GROUP=tile.group,
        SWAP=tile.swap, num_warps=tile.warps, num_stages=tile.stages, **common,
    )  # fmt: skip
    add = tiles.add and call.combined
    y = new_result(call)
    if add:  # zeros in all rows: a token may have no expert here
        out = torch.zeros(tokens, D, dtype=torch.float32, device=y.device)
    else:
        out = call.x_TD.new_empty(num_pairs, D) if call.combined else y
    tile = tiles.down
    down_grouped[(max_tiles * cdiv(D, tile.columns),)](
        call.weight_TK, weight_N, call.expert_TK, h_NI, call.down_EDI.data, bias_ED=call.down_bias_ED, out=out,
        order_N=order_N, tile_3M=tile_3M, max_tiles=max_tiles, num_pairs=num_pairs, scaling=call.scaling, D=D,
        inner=inner, **options(call.down_EDI),
        EVEN=inner % tile.depth == 0, ADD=add, BN=tile.columns, BK=tile.depth, GROUP=tile.group,
        SWAP=tile.swap, num_warps=tile.warps, num_stages=tile.stages, **common,
    )  # fmt: skip
    if not call.combined:
        return y
    return y.copy_(out) if add else sum_into(call, out, y, match, launch)


def run_hopper(call: ExpertsCall, tiles: HopperTiles) -> torch.Tensor:
    (_, D, inner), (tokens, top_k) = call.down_EDI.shape, call.expert_TK.shape
    num_pairs, launch = tokens * top_k, launch_options(call.x_TD.device)
    gluon = hopper_kernels(call.x_TD.device)
    assert gluon is not None
    add = tiles.add and call.combined
    # Zeros in all rows: a token may have no expert here.
    sum_TD = torch.empty(tokens, D, dtype=torch.float32, device=call.x_TD.device) if add else None
    plan = order_rows(call, 64 * tiles.slabs, tiles.extra, launch, sum_TD)
    places = tiles.programs * num_processors(call.x_TD.device)
    common = {"GROUPS": tiles.groups, "SLABS": tiles.slabs, "EXTRA": tiles.extra, "num_warps": 4, "launch_pdl": True}
    if tiles.programs > 1:
        common["maxnreg"] = 128
    h_NI = call.x_TD.new_empty(num_pairs, inner)
    tile = tiles.gate_up
    narrow = tile.columns == 128 and 0 < inner % 128 <= 64 and tiles.slabs == tiles.groups
    gluon.gate_up_hopper[(min(places, plan.max_tiles * cdiv(inner, tile.columns)),)](
        call.x_TD, call.x_TD.stride(0),
        gluon.descriptor(call.gate_up_EFD.data, tile.columns // 2 if narrow else tile.columns, tile.depth), h_NI,
        plan.order_N, plan.tile_3M, plan.head, plan.max_tiles, inner,
        K=top_k, DEPTH=D, NARROW=narrow, ACTIVATION=call.activation, BN=tile.columns, BK=tile.depth,
        STAGES=tile.stages, BAND=tile.group, **common,
    )  # fmt: skip
    y = new_result(call)
    rows_ND = y
    if call.combined:
        rows_ND = call.x_TD.new_empty(num_pairs, D) if sum_TD is None else sum_TD
    tile = tiles.down
    h_desc = gluon.descriptor(h_NI, 64, tile.depth)
    gluon.down_hopper[(min(places, plan.max_tiles * cdiv(D, tile.columns)),)](
        plan.weight_N, h_desc, gluon.descriptor(h_NI, 16, tile.depth) if tiles.extra else h_desc,
        gluon.descriptor(call.down_EDI.data, tile.columns, tile.depth), rows_ND, plan.order_N, plan.tile_3M, plan.head,
        plan.max_tiles, D,
        DEPTH=inner, BN=tile.columns, BK=tile.depth, STAGES=tile.stages, BAND=tile.group, ADD=top_k if add else 0,
        **common,
    )  # fmt: skip
    if sum_TD is not None:
        return y.copy_(sum_TD)
    return sum_into(call, rows_ND, y, False, launch) if call.combined else y


def run_hopper_fp8(call: ExpertsCall, tiles: HopperTiles) -> torch.Tensor:
    (_, D, inner), (tokens, top_k), device = call.down_EDI.shape, call.expert_TK.shape, call.x_TD.device
    num_pairs, launch = tokens * top_k, launch_options(device)
    gluon, fp8 = hopper_kernels(device), fp8_kernels(device)
    assert gluon is not None and fp8 is not None
    q_TD, x_scale = quantize_rows(call.x_TD)
    plan = order_rows(call, 64 * tiles.groups, 0, launch)
    places = num_processors(device)
    common = {"GROUPS": tiles.groups, "num_warps": 4, "launch_pdl": True}
    h_NI, h_scale = q_TD.new_empty(num_pairs, inner), x_scale.new_empty(inner // GROUP, num_pairs)
    tile, weight = tiles.gate_up, call.gate_up_EFD.tensors
    fp8.gate_up_hopper_fp8[(min(places, plan.max_tiles * cdiv(inner, tile.columns)),)](
        q_TD, D, x_scale, x_scale.shape[1], gluon.descriptor(weight["data"], tile.columns, tile.depth), weight["scale"],
        h_NI, h_scale, num_pairs, plan.order_N, plan.tile_3M, plan.head, plan.max_tiles, inner,
        K=top_k, DEPTH=D, ACTIVATION=call.activation, BN=tile.columns, BK=tile.depth, STAGES=tile.stages,
        BAND=tile.group, **common,
    )  # fmt: skip
    y = new_result(call)
    rows_ND = call.x_TD.new_empty(num_pairs, D) if call.combined else y
    tile, weight = tiles.down, call.down_EDI.tensors
    fp8.down_hopper_fp8[(min(places, plan.max_tiles * cdiv(D, tile.columns)),)](
        plan.weight_N, gluon.descriptor(h_NI, 64, tile.depth), h_scale, num_pairs,
        gluon.descriptor(weight["data"], tile.columns, tile.depth), weight["scale"], rows_ND, plan.order_N,
        plan.tile_3M, plan.head, plan.max_tiles, D,
        DEPTH=inner, BN=tile.columns, BK=tile.depth, STAGES=tile.stages, BAND=tile.group, **common,
    )  # fmt: skip
    return sum_into(call, rows_ND, y, False, launch) if call.combined else y


def run_hopper_packed(call: ExpertsCall, tiles: PackedTiles) -> torch.Tensor:
    (_, D, inner), (tokens, top_k), device = call.down_EDI.shape, call.expert_TK.shape, call.x_TD.device
    num_pairs, launch = tokens * top_k, launch_options(device)
    packed = packed_kernels(device)
    assert packed is not None
    plan = order_rows(call, tiles.rows, 0, launch)
    places = num_processors(device)
    common = {"R": tiles.rows, "STAGES": tiles.stages, "BAND": tiles.group, "num_warps": 4, "launch_pdl": True}
    split = tiles.split
    common["PARTS"] = (4 if call.down_EDI.format.kind == "fp4" else 1) if split else 0
    common["RING"] = ring = split and "zero" not in call.down_EDI.tensors

    def scales(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        if not ring:
            return packed.scales(tensors["scale"])
        # Weights that are no model's, such as a sample's, are not prepared.
        return tensors[BY_INPUT] if BY_INPUT in tensors else packed.scales_by_input(tensors["scale"])

    h_NI = call.x_TD.new_empty(num_pairs, inner)
    weight = call.gate_up_EFD.tensors
    x = split_rows(call.x_TD) if split else (call.x_TD, None, None)
    packed.gate_up_hopper_packed[(min(places, plan.max_tiles * cdiv(inner, 128)),)](
        x[0], x[0].stride(0), x[1], x[2], packed.weight_descriptor(weight["data"], 128, split),
        scales(weight), weight.get("zero"), call.gate_up_bias_EF, h_NI, plan.order_N, plan.tile_3M,
        plan.head, plan.max_tiles, inner, K=top_k, DEPTH=D, ACTIVATION=call.activation, **common,
    )  # fmt: skip
    y = new_result(call)
    rows_ND = call.x_TD.new_empty(num_pairs, D) if call.combined else y
    weight = call.down_EDI.tensors
    h = split_rows(h_NI) if split else (h_NI, None, None)
    h_desc = packed.row_descriptor(h[0], tiles.rows, common["PARTS"])
    packed.down_hopper_packed[(min(places, plan.max_tiles * cdiv(D, 256)),)](
        plan.weight_N, h_desc, h[1], h[2], packed.weight_descriptor(weight["data"], 256, split),
        scales(weight), weight.get("zero"), call.down_bias_ED, rows_ND, plan.order_N, plan.tile_3M,
        plan.head, plan.max_tiles, D, DEPTH=inner, **common,
    )  # fmt: skip
    return sum_into(call, rows_ND, y, False, launch) if call.combined else y


def machine_for(call: ExpertsCall) -> Machine:
    """The machine as far as this call can use it."""
    machine = machine_of(call.x_TD.device)
    x_TD, aligned, format = call.x_TD, 16, call.gate_up_EFD.format
    copied = (x_TD, call.gate_up_EFD.data, call.down_EDI.data)
    packed = is_packed(format) and x_TD.dtype == torch.bfloat16 and call.down_EDI.format == format
    # What D and I must be multiples of.
    multiples = (64, 16) if format is PLAIN else (64, 64) if packed and format.kind == "fp4" else (GROUP, GROUP)
    usable = (
        machine.hopper
        and (format is PLAIN or format.is_block_fp8 or packed)
        and x_TD.dtype.itemsize == 2
        and (packed or (call.gate_up_bias_EF is None and call.down_bias_ED is None))
        and x_TD.shape[1] % multiples[0] == 0
        and call.down_EDI.shape[2] % multiples[1] == 0
        and all(tensor.data_ptr() % aligned == 0 and tensor.stride(-2) % aligned == 0 for tensor in copied)
        and x_TD.shape[0] * x_TD.stride(0) < 1 << 31  # offsets have 32 bits there
    )
    return machine if usable == machine.hopper else replace(machine, hopper=False)


def sum_into(
    call: ExpertsCall, rows_ND: torch.Tensor, y_TD: torch.Tensor, first: bool, launch: dict[str, Any]
) -> torch.Tensor:
    (tokens, top_k), D = call.expert_TK.shape, y_TD.shape[1]
    # Few tokens: more programs; many: whole rows.
    few = tokens <= 64 or machine_of(y_TD.device).fixed
    columns = min(next_power_of_2(D), 256 if few else 1024)
    sum_rows[(tokens, cdiv(D, columns))](
        call.expert_TK, rows_ND, y_TD, D,
        K=top_k, KP=next_power_of_2(top_k), COLUMNS=columns, FIRST=first, num_warps=1 if columns <= 256 else 4,
        **launch,
    )  # fmt: skip
    return y_TD
