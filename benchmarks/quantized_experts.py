"""Experts in MXFP4, FP8 and INT4, of gpt-oss and Qwen3: ours, and for MXFP4 triton_kernels' if it can be imported.

    python benchmarks/quantized_experts.py --json FILE                  all models, 1 to 4,096 tokens
    python benchmarks/quantized_experts.py --tiles                      on Hopper: also other tiles
    python benchmarks/quantized_experts.py --models tiny --tokens 1 3   without a GPU
    ncu --profile-from-start off --set full python benchmarks/quantized_experts.py --models gpt-oss-20b --tokens 64 \\
        --once                                                          counters of its kernels

From hidden rows and the router's choice to summed rows; experts of gpt-oss have biases and the clamped SwiGLU. Calls
alternate between sets of weights that no cache holds together, and are replayed as one captured graph where there are
graphs. The other package gets the same numbers, and its result is compared with ours. Its routing tables are made
before it is timed; the order of rows is part of our time. Bytes are those of the experts that are hit.
"""

from __future__ import annotations

import argparse
import json
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from anabranch import kernels, ops, platforms
from anabranch.bench.records import commit
from anabranch.formats import Grouped
from anabranch.formats.grouped import unpack
from anabranch.kernels.tuning.timing import microseconds
from anabranch.ops.experts import ExpertsCall
from anabranch.ops.weight import Weight

MXFP4 = Grouped("fp4", 1, 32, "uint8")
wrong: list[str] = []
"""Tiles whose results are; said at the end, when the others have been timed."""
CACHE = 256 << 20
"""Bytes that the sets of weights have together at least: several times what caches hold."""


class Sizes(NamedTuple):
    num_experts: int
    top_k: int
    width: int
    inner: int
    format: Grouped = MXFP4


MODELS = {
    "gpt-oss-20b": Sizes(32, 4, 2880, 2880),
    "gpt-oss-120b": Sizes(128, 4, 2880, 2880),
    "qwen3-30b-a3b-fp8": Sizes(128, 8, 2048, 768, Grouped("fp8", 128, 128, "float32")),
    "qwen3-30b-a3b-int4": Sizes(128, 8, 2048, 768, Grouped("int4", 1, 128, "bfloat16")),
    "tiny": Sizes(4, 2, 64, 96),
    "tiny-int4": Sizes(4, 2, 128, 128, Grouped("int4", 1, 128, "bfloat16")),
}


def bytes_of(sizes: Sizes) -> float:
    """Of one expert."""
    scale = {"uint8": 1, "bfloat16": 2, "float32": 4}[sizes.format.scale] / sizes.format.group / sizes.format.rows
    return 3 * sizes.width * sizes.inner * (sizes.format.bits / 8 + scale)


def draw(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> tuple[Weight, Weight, torch.Tensor, torch.Tensor]:
    """Random weights of all experts: gate rows, then up rows; and biases."""
    E, _, D, inner, format = sizes
    made = []
    for shape in ((E, 2 * inner, D), (E, D, inner)):
        weight = Weight(shape, format=format, dtype=torch.bfloat16).to_empty(device=device)
        data, scale = weight.tensors["data"].view(torch.uint8), weight.tensors["scale"]
        if format.numbers == "fp8":  # up to 240, none of them NaN
            data.random_(0, 120).add_(torch.empty_like(data).random_(0, 2), alpha=128)
        else:
            data.random_(0, 256)
        if scale.dtype == torch.uint8:
            scale.random_(118, 124)
        else:
            scale.uniform_(0.001, 0.002)
        ops.experts.prepare(weight)
        made.append(weight)
    biases = (torch.randn(E, size, device=device).to(dtype) for size in (2 * inner, D))
    return made[0], made[1], *biases  # type: ignore[return-value]


def calls(sizes: Sizes, tokens: int, device: torch.device, dtype: torch.dtype) -> list[ExpertsCall]:
    logits_TE = torch.randn(tokens, sizes.num_experts, device=device)
    weight_TK, expert_TK = logits_TE.topk(sizes.top_k)
    x_TD = torch.randn(tokens, sizes.width, device=device).to(dtype)
    num_bytes = int(bytes_of(sizes) * expert_TK.unique().numel())
    return [
        ExpertsCall(
            x_TD,
            weight_TK.softmax(-1),
            expert_TK.int(),
            gate_up,
            down,
            "clamped_swiglu" if sizes.format == MXFP4 else "silu",
            *(biases if sizes.format == MXFP4 else (None, None)),
        )
        for gate_up, down, *biases in (
            draw(sizes, device, dtype)
            for _ in range(max(1, min(8, -(-CACHE // num_bytes))) if device.type != "cpu" else 1)
        )
    ]


def theirs(call: ExpertsCall) -> Callable[[], torch.Tensor]:
    """The same by triton_kernels 3.5.1, laid out as vLLM does. Its gate and up rows alternate."""
    from triton_kernels.matmul_ogs import FlexCtx, FnSpecs, FusedActivation, PrecisionConfig, matmul_ogs
    from triton_kernels.matmul_ogs_details.opt_flags import update_opt_flags_constraints
    from triton_kernels.numerics import InFlexData
    from triton_kernels.routing import routing
    from triton_kernels.swiglu import swiglu_fn
    from triton_kernels.tensor import FP4, convert_layout, wrap_torch_tensor
    from triton_kernels.tensor_details import layout

    def prepare(weight: Weight, alternate: bool) -> tuple[Any, Any]:
        code, scale = unpack(weight.tensors["data"], MXFP4.span(weight.shape[-1])), weight.tensors["scale"]
        data = code[..., 0::2] | (code[..., 1::2] << 4)
        if alternate:
            data, scale = (x.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2) for x in (data, scale))
        values, options = layout.make_default_matmul_mxfp4_w_layout(mx_axis=1)
        exponents, more = layout.make_default_matmul_mxfp4_w_scale_layout(mx_axis=1, num_warps=8)
        packed = wrap_torch_tensor(data.contiguous().transpose(1, 2), dtype=FP4)
        scales = wrap_torch_tensor(torch.nn.functional.pad(scale, (0, -scale.shape[-1] % 4)).transpose(1, 2))
        config = PrecisionConfig(
            weight_scale=convert_layout(scales, exponents, **more), flex_ctx=FlexCtx(rhs_data=InFlexData())
        )
        return convert_layout(packed, values, **options), config

    update_opt_flags_constraints({"split_k": 1})  # as vLLM does on Hopper

    assert call.gate_up_bias_EF is not None and call.down_bias_ED is not None
    gate_up, gate_up_config = prepare(call.gate_up_EFD, True)
    down, down_config = prepare(call.down_EDI, False)
    down_bias = call.down_bias_ED.float()
    bias = call.gate_up_bias_EF.unflatten(1, (2, -1)).transpose(1, 2).flatten(1).float()
    logits_TE = torch.full((call.x_TD.shape[0], gate_up.shape[0]), float("-inf"), device=call.x_TD.device)
    logits_TE.scatter_(1, call.expert_TK.long(), call.weight_TK.log())
    data, gather, scatter = routing(logits_TE.to(call.x_TD.dtype), call.expert_TK.shape[1])
    act = FusedActivation(FnSpecs("swiglu", swiglu_fn, ("alpha", "limit")), (1.702, 7.0), 2)

    def run() -> torch.Tensor:
        h = matmul_ogs(
            call.x_TD, gate_up, bias, data, gather_indx=gather, precision_config=gate_up_config, fused_activation=act
        )
        weights = data.gate_scal
        y: torch.Tensor = matmul_ogs(
            h, down, down_bias, data, scatter_indx=scatter, precision_config=down_config, gammas=weights
        )
        return y

    return run


def time_tiles(platform: Any, sets: list[ExpertsCall]) -> dict[str, float]:
    """µs with each tile, and how far its result is from that of the tiles that are chosen."""
    from anabranch.kernels.triton import experts as kernel
    from anabranch.kernels.tuning.experts_tiles import FewTiles, PackedTiles, Shape, choose_few, is_packed, label

    call = sets[0]
    found, expected = {}, ops.experts(call).float()
    (num_experts, D, inner), (tokens, top_k) = call.down_EDI.shape, call.expert_TK.shape
    few = choose_few(Shape(num_experts, D, inner, top_k, call.x_TD.dtype, call.down_EDI.format.name))
    tried: list[Any] = [PackedTiles(32, 6), PackedTiles(64, 5)]
    tried += [PackedTiles(rows, stages, split=True) for rows, stages in ((16, 8), (16, 10), (32, 6), (32, 8))]
    if call.down_EDI.format == MXFP4:
        tried.append(PackedTiles(128, 4, 4))
    if not is_packed(call.down_EDI.format):
        tried = []
    if few is not None and tokens <= 16:
        tried += [few, FewTiles(12 - few.gate_warps, few.down_parts)]  # 4 or 8 warps
    for tiles in tried:
        error = float((kernel.run(call, tiles).float() - expected).norm() / expected.norm())
        if not error < 0.06:
            wrong.append(f"{label(tiles)} at {tokens} tokens: {error:.1%} off, not timed")
            continue
        found[label(tiles)] = microseconds(platform, [partial(kernel.run, one, tiles) for one in sets])
    return found


def once(call: Callable[[], torch.Tensor]) -> None:
    for _ in range(3):  # compiled, and as warm as it gets
        call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.profiler.start()  # type: ignore[no-untyped-call]
    call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()  # type: ignore[no-untyped-call]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=[name for name in MODELS if "tiny" not in name], choices=MODELS)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 4, 16, 64, 256, 1024, 4096], metavar="N")
    parser.add_argument("--tiles", action="store_true", help="also tiles of experts_hopper_packed and experts_few")
    parser.add_argument("--once", action="store_true", help="time nothing: one call of each, marked for a profiler")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    platform = platforms.current()
    kernels.bind(platform)
    device, dtype = platform.device, platform.compute_dtype(torch.bfloat16)
    torch.manual_seed(0)
    rows: list[dict[str, Any]] = []
    problem = None
    try:
        import triton_kernels  # noqa: F401
    except ImportError as error:
        problem = str(error)
        print(f"triton_kernels cannot be imported ({error}): ours alone")
    print(f"{'model':>14} {'tokens':>7} {'ours µs':>10} {'GB/s':>7} {'theirs µs':>10} {'ratio':>6} {'difference':>11}")
    with torch.inference_mode():
        for model in options.models:
            for tokens in options.tokens:
                sets = calls(MODELS[model], tokens, device, dtype)
                if options.once:
                    once(partial(ops.experts, sets[0]))
                    continue
                hit = int(sets[0].expert_TK.unique().numel())
                num_bytes = hit * bytes_of(MODELS[model])
                ours = microseconds(platform, [partial(ops.experts, call) for call in sets])
                row = {"model": model, "tokens": tokens, "us": ours, "gb_s": num_bytes / ours / 1e3}
                cells = f"{ours:10.1f} {row['gb_s']:7.0f}"
                if options.tiles:
                    row["tiles_us"] = tried = time_tiles(platform, sets)
                    print(f"{'tiles':>14} {tokens:7} " + "  ".join(f"{name}: {us:.1f}" for name, us in tried.items()))
                if problem is None and MODELS[model].format == MXFP4:
                    try:
                        others = [theirs(call) for call in sets]
                        y, expected = others[0]().float(), ops.experts(sets[0]).float()
                        row["theirs_us"] = microseconds(platform, others)
                        row["difference"] = float((y - expected).norm() / expected.norm())
                        cells += f" {row['theirs_us']:10.1f} {row['theirs_us'] / ours:6.2f} {row['difference']:11.2e}"
                    except Exception as error:  # another version of that package
                        problem = row["problem"] = f"{type(error).__name__}: {error}"
                        traceback.print_exc(limit=-3)
                rows.append(row)
                print(f"{model:>14} {tokens:7} {cells}", flush=True)
                if options.json is not None:
                    about = {"commit": commit(), "machine": platform.describe(), "problem": problem}
                    options.json.write_text(json.dumps(about | {"rows": rows}, indent=1) + "\n")

    if wrong:
        raise SystemExit("\n".join(wrong))


if __name__ == "__main__":
    main()
