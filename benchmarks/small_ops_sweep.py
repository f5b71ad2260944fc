"""Small ops on a GPU: every candidate tile checked and timed, to choose limits and tiles from.

    PYTHONPATH=src python3 benchmarks/small_ops_sweep.py --json FILE            all of it, some minutes
    PYTHONPATH=src python3 benchmarks/small_ops_sweep.py --only linear --tokens 1 4 8
    TRITON_INTERPRET=1 PYTHONPATH=src python benchmarks/small_ops_sweep.py      tiny shapes, without a GPU: does it run?

Parts: `linear` (against the vendor's library), `norm`, `rope`, `activation`, and `chain`: all small kernels of a layer
one after the other, where it shows what starting a kernel before its predecessor is done is worth (`early`), and a
prototype of add + norm + projection in one kernel (`fused`).

µs per call in a replayed graph, the median of several replays; calls go through several weight sets, so that L2
holds none of them. Floor: bytes at 4.6 TB/s, as measured on an H200.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as nn
import triton
import triton.language as tl

from anabranch import ops
from anabranch.kernels.triton import activation, linear, norm, rope_store, route
from anabranch.kernels.triton.launch import dependent_launch, wait_for_predecessor
from anabranch.kernels.triton.linear import MultiplyTiles, StreamTiles, Tiles, add_to, load_inside, pack
from anabranch.ops.weight import Weight

TINY = not torch.cuda.is_available()
DEVICE, DTYPE = ("cpu", torch.float32) if TINY else ("cuda", torch.bfloat16)
BANDWIDTH, COLD_BYTES = 4.6e12, 1 << 8 if TINY else 256 << 20
TOKENS = (1, 5) if TINY else (1, 2, 4, 8, 16, 32, 64, 256)
PARTS = ("linear", "norm", "rope", "activation", "chain")
Row = dict[str, Any]
warming = False
"""In a process that only fills the disk cache of kernels."""


@dataclass(frozen=True)
class Model:
    name: str
    width: int
    heads: tuple[tuple[int, int, int], ...]
    """Query heads, key-value heads, head dim of each kind of layer."""
    num_experts: int
    vocabulary: int
    inner: int = 0
    """Of the dense feed-forward, if there is one."""
    biased: bool = False
    normed: bool = True

    def products(self) -> Iterator[tuple[str, int, int, bool, torch.dtype]]:
        """(name, inputs, outputs, biased, dtype of the result)."""
        for H, G, D in self.heads:
            yield f"qkv {D}", self.width, (H + 2 * G) * D, self.biased, DTYPE
            yield f"o {D}", H * D, self.width, False, DTYPE
        yield "router", self.width, self.num_experts, False, torch.float32
        if self.inner:
            yield "gate up", self.width, 2 * self.inner, False, DTYPE
            yield "down", self.inner, self.width, False, DTYPE
        yield "lm_head", self.width, self.vocabulary, False, DTYPE


MODELS = (
    (Model("tiny", 64, ((4, 2, 16),), 8, 100, 48, True),)
    if TINY
    else (
        Model("qwen3-30b-a3b", 2048, ((32, 4, 128),), 128, 151_936),
        Model("qwen1.5-moe-a2.7b", 2048, ((16, 16, 128),), 60, 151_936, 5632, True, False),
        Model("gemma-4-26b-a4b", 2816, ((16, 8, 256), (16, 2, 512)), 128, 262_144, 2112),
    )
)


def normal(*size: int) -> torch.Tensor:
    return torch.randn(*size, device=DEVICE).to(DTYPE)


def graph_us(calls: list[Callable[[], object]], least_calls: int = 16, budget_s: float = 0.02) -> float:
    """Median µs of one call over replays of a graph that makes each of them once or more."""
    calls = calls * max(1, -(-least_calls // len(calls)))
    calls[0]()
    if warming:
        return 1.0
    if TINY:
        begin = time.perf_counter()
        calls[0]()
        return 1e6 * (time.perf_counter() - begin)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times: list[float] = []
    begin = time.perf_counter()
    while len(times) < 9 or (time.perf_counter() - begin < budget_s and len(times) < 100):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) * 1e3 / len(calls))
    times = sorted(times[2:])
    return times[len(times) // 2]


@contextlib.contextmanager
def constants(module: Any, **values: Any) -> Iterator[None]:
    """A module's constants, changed for a while."""
    before = {name: getattr(module, name) for name in values}
    for name, value in values.items():
        setattr(module, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)


def distance(found: Any, expected: Any) -> float:
    """‖found − expected‖ / ‖expected‖, the largest of several results; NaN is infinitely far."""
    if isinstance(expected, tuple):
        return max(distance(a, b) for a, b in zip(found, expected, strict=True))
    error = ((found.double() - expected.double()).norm() / expected.double().norm()).item()
    return error if error == error else float("inf")


def checked(call: Callable[[], Any], expected: Any) -> float:
    """The distance, with new memory full of NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        return distance(call(), expected)
    finally:
        torch.use_deterministic_algorithms(False)


# ---------------------------------------------------------------------------------------------------------------------
# Projections
# ---------------------------------------------------------------------------------------------------------------------


FEW_OUTPUTS = ((1, 1, 8), (1, 1, 4), (1, 2, 4))
MANY_OUTPUTS = (
    *((1, 4, 1), (2, 4, 1), (4, 4, 1), (2, 2, 1), (4, 1, 1), (2, 8, 1)),
    *((1, 2, 2), (2, 2, 2), (1, 1, 4), (2, 1, 4)),
)


def candidates(tokens: int, D: int, F: int) -> list[Tiles]:
    item = DTYPE.itemsize
    chunks = -(-D * item // (16 * linear.NUM_LANES))
    found: list[Tiles] = []
    if tokens <= 8:
        for rows, warps, across in FEW_OUTPUTS if F <= 512 else MANY_OUTPUTS:
            loads = -(-chunks // across)
            # More tokens times loads would take long to compile and have no registers left.
            if rows * loads <= (8 if tokens == 8 else 2 * linear.MAX_LOADS) and across <= chunks:
                found.append(StreamTiles(rows, warps, across))
    if 4 <= tokens <= 64 or TINY:
        padded = max(linear.LEAST_COLUMNS, triton.next_power_of_2(tokens))
        for rows, warps, depth, stages in (
            (16, 4, 64, 4),
            (16, 4, 128, 4),
            (16, 8, 64, 3),
            (16, 8, 64, 4),
            (16, 8, 64, 6),
            (32, 4, 64, 4),
            (32, 8, 64, 4),
            (64, 4, 64, 4),
        ):
            if (rows + padded) * warps * depth * item * (stages - 1) <= 200 << 10:
                found.append(MultiplyTiles(rows, warps, depth, stages))
    return found


def short(tiles: Tiles | str | None) -> str:
    """A string: linear_hopper, which has nothing to choose from."""
    if tiles is None or isinstance(tiles, str):
        return tiles or "library"
    if isinstance(tiles, StreamTiles):
        return f"stream {tiles.rows}/{tiles.warps}/{tiles.across}"
    return f"multiply {tiles.rows}/{tiles.warps}/{tiles.depth}/{tiles.stages}"


def library(
    x_TD: torch.Tensor, weight_FD: torch.Tensor, bias_F: torch.Tensor | None, out_dtype: torch.dtype
) -> torch.Tensor:
    if out_dtype == x_TD.dtype:
        return nn.linear(x_TD, weight_FD, bias_F)
    return torch.mm(x_TD, weight_FD.T, out_dtype=out_dtype)


def sweep_linear(options: argparse.Namespace) -> Iterator[Row]:
    for model in options.models:
        for name, D, F, biased, out_dtype in model.products():
            num_sets = min(32, max(2, -(-COLD_BYTES // (F * D * DTYPE.itemsize))))
            weights = [normal(F, D) * D**-0.5 for _ in range(num_sets)]
            bias_F = normal(F) if biased else None
            for tokens in options.tokens:
                x_TD = normal(tokens, D)
                expected = nn.linear(x_TD.float(), weights[0].float(), None if bias_F is None else bias_F.float())
                hopper = linear.hopper_kernels(x_TD.device)
                taken = linear.hopper_for(x_TD, weights[0])
                chosen = linear.choose(tokens, D, F, DTYPE.itemsize) if taken is None else "split"
                runs: dict[Tiles | str | None, Any] = {None: library}
                runs |= {tiles: partial(linear.run, tiles=tiles) for tiles in candidates(tokens, D, F)}
                if hopper is not None and hopper.takes(x_TD, weights[0]):
                    runs["split"] = hopper.run
                for tiles, run in runs.items():
                    calls = [partial(run, x_TD, weight, bias_F, out_dtype=out_dtype) for weight in weights]
                    yield timed(
                        calls,
                        expected,
                        out_dtype,
                        part="linear",
                        model=model.name,
                        case=name,
                        tokens=tokens,
                        variant=short(tiles),
                        chosen=tiles == chosen,
                        floor=(F * D + tokens * D) * DTYPE.itemsize + tokens * F * out_dtype.itemsize,
                    )


def timed(calls: list[Callable[[], Any]], expected: Any, dtype: torch.dtype, *, floor: float, **about: Any) -> Row:
    """A row; what does not run is in it too, with its reason."""
    limit = 3e-5 if dtype == torch.float32 else 1e-2
    try:
        error = checked(calls[0], expected)
        us = graph_us(calls)
    except Exception as fault:  # a tile too large for this machine must not end the sweep
        return {**about, "us": None, "fault": f"{type(fault).__name__}: {fault}"[:200], "right": False}
    return {**about, "us": round(us, 3), "floor_us": floor / BANDWIDTH * 1e6, "error": error, "right": error <= limit}


# ---------------------------------------------------------------------------------------------------------------------
# Norms, rope, activation
# ---------------------------------------------------------------------------------------------------------------------


def sweep_norm(options: argparse.Namespace) -> Iterator[Row]:
    usual = norm.EARLY_TOKENS
    for model in options.models:
        D, weight_D = model.width, normal(model.width)
        for tokens in options.tokens:
            pairs = [(normal(tokens, D), normal(tokens, D)) for _ in range(4)]
            expected = ops.add_rms_norm.reference(*pairs[0], weight_D, 1e-6)
            for warps in (1, 2, 4, 8, 16):
                for early in (False, True):
                    with constants(norm, EARLY_TOKENS=tokens if early else 0):
                        yield timed(
                            [partial(norm.launch, *pair, weight_D, 1e-6, warps) for pair in pairs],
                            expected,
                            DTYPE,
                            part="norm",
                            model=model.name,
                            case="add",
                            tokens=tokens,
                            variant=f"warps {warps}{' early' if early else ''}",
                            chosen=(warps, early) == (norm.choose_warps(triton.next_power_of_2(D)), tokens <= usual),
                            floor=(4 * tokens + 1) * D * DTYPE.itemsize,
                        )


def rope_arguments(model: Model, heads: tuple[int, int, int], tokens: int) -> ops.RopeStoreCall:
    H, G, D = heads
    packed = normal(tokens, H + 2 * G, D)
    angle_TF = torch.rand(tokens, D // 2, device=DEVICE)
    pages = torch.zeros(2, -(-tokens // 16), 16, G, D, dtype=DTYPE, device=DEVICE)
    weight_D = normal(D) if model.normed else None
    slot_T = torch.randperm(pages.shape[1] * 16, device=DEVICE)[:tokens]
    rest = (angle_TF.cos(), angle_TF.sin(), weight_D, weight_D, False, 1e-6, pages[0], pages[1], slot_T)
    return ops.RopeStoreCall(*packed.split([H, G, G], dim=1), *rest)


def sweep_rope(options: argparse.Namespace) -> Iterator[Row]:
    for model in options.models:
        for heads in model.heads:
            H, G, D = heads
            for tokens in options.tokens:
                given = [rope_arguments(model, heads, tokens) for _ in range(4)]
                expected = ops.rope_store.reference(given[0])
                usual = rope_store.FEW_ELEMENTS if tokens <= rope_store.FEW_TOKENS else rope_store.MANY_ELEMENTS
                for elements in (256, 512, 1024, 2048, 4096):
                    with constants(rope_store, FEW_ELEMENTS=elements, MANY_ELEMENTS=elements):
                        yield timed(
                            [partial(rope_store.rope_store, one) for one in given],
                            expected,
                            DTYPE,
                            part="rope",
                            model=model.name,
                            case=f"{H} {G} {D}",
                            tokens=tokens,
                            variant=f"elements {elements}",
                            chosen=elements == usual,
                            floor=tokens * (2 * (H + 2 * G) * D * DTYPE.itemsize + 4 * D),
                        )


def sweep_activation(options: argparse.Namespace) -> Iterator[Row]:
    for model in options.models:
        for tokens in options.tokens if model.inner else ():
            inputs = [normal(tokens, 2 * model.inner) for _ in range(4)]
            expected = ops.gated_activation.reference(inputs[0].float(), "silu")
            for block, warps in ((256, 1), (512, 2), (1024, 4), (1024, 2), (2048, 4)):
                with constants(activation, BLOCK=block, NUM_WARPS=warps):
                    yield timed(
                        [partial(activation.gated_activation, x, "silu") for x in inputs],
                        expected,
                        DTYPE,
                        part="activation",
                        model=model.name,
                        case=f"I {model.inner}",
                        tokens=tokens,
                        variant=f"block {block} warps {warps}",
                        chosen=(block, warps) == (1024, 4),
                        floor=3 * tokens * model.inner * DTYPE.itemsize,
                    )


# ---------------------------------------------------------------------------------------------------------------------
# A layer without attention and experts; add + norm + projection as one kernel
# ---------------------------------------------------------------------------------------------------------------------


@triton.jit
def add_norm_stream_rows(
    x_TD, residual_TD, norm_D, weight_FD, y_TF, total_TD, num_outputs, eps,
    T: tl.constexpr, D: tl.constexpr, R: tl.constexpr, W: tl.constexpr, L: tl.constexpr, V: tl.constexpr,
    LOG: tl.constexpr, DEPENDENT: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """As stream_rows, of norm(x + residual). Every program does the whole norm: its row is small, and already in L2.

    The factor of the norm is applied to the sums, so nothing waits for it.
    """
    STEP: tl.constexpr = L * V
    CHUNKS: tl.constexpr = (D + STEP - 1) // STEP
    first = tl.program_id(0) * (R * W)
    output_W = first + tl.arange(0, W)
    d = tl.arange(0, STEP)[None, :]
    zero_W = tl.zeros((W, 1), tl.int32)
    w = ()
    scale = ()
    for c in tl.static_range(CHUNKS):
        for r in tl.static_range(R):
            row_W = tl.minimum(output_W + r * W, num_outputs - 1).to(tl.int64)
            w = w + (load_inside(weight_FD + (row_W * D)[:, None], d, c, STEP, D, "evict_first"),)
        scale = scale + (load_inside(norm_D + zero_W, d, c, STEP, D, ""),)
    tl.debug_barrier()
    wait_for_predecessor(DEPENDENT, EARLY)
    sums = ()
    squares = ()
    for _ in tl.static_range(T * R):
        sums = sums + (tl.zeros((W, L), tl.float32),)
    for _ in tl.static_range(T):
        squares = squares + (tl.zeros((W, L), tl.float32),)
    writes = (tl.program_id(0) == 0) & (tl.arange(0, W) == 0)[:, None]
    for c in tl.static_range(CHUNKS):
        for t in tl.static_range(T):
            x = load_inside(x_TD + (zero_W + t * D), d, c, STEP, D, "").to(tl.float32)
            x += load_inside(residual_TD + (zero_W + t * D), d, c, STEP, D, "").to(tl.float32)
            rounded = x.to(total_TD.dtype.element_ty)
            tl.store(total_TD + (zero_W + t * D + c * STEP + d), rounded, mask=writes & (c * STEP + d < D))
            x = rounded.to(tl.float32)
            squares = add_to(squares, t, tl.sum(tl.reshape(x * x, (W, L, V)), 2))
            x *= scale[c].to(tl.float32)
            for r in tl.static_range(R):
                products = tl.reshape(w[c * R + r].to(tl.float32) * x, (W, L, V))
                sums = add_to(sums, t * R + r, tl.sum(products, 2))
    y = ()
    for i in tl.static_range(1 << LOG):
        factor_W = tl.rsqrt(tl.sum(squares[i % (T * R) // R], 1) * (1.0 / D) + eps)
        y = y + (tl.sum(sums[i % (T * R)], 1) * factor_W,)
    y_WN = pack(y, LOG)
    n = tl.arange(0, 1 << LOG)[None, :]
    output = first + n % R * W + tl.arange(0, W)[:, None]
    is_output = (n < T * R) & (output < num_outputs)
    tl.store(y_TF + (n // R * num_outputs + output), y_WN.to(y_TF.dtype.element_ty), mask=is_output)


def add_norm_linear(
    x_TD: torch.Tensor, residual_TD: torch.Tensor, norm_D: torch.Tensor, weight_FD: torch.Tensor, tiles: StreamTiles
) -> tuple[torch.Tensor, torch.Tensor]:
    (tokens, D), F = x_TD.shape, weight_FD.shape[0]
    y_TF, total_TD = x_TD.new_empty(tokens, F), torch.empty_like(x_TD)
    dependent = dependent_launch(x_TD.device)
    add_norm_stream_rows[(triton.cdiv(F, tiles.rows * tiles.warps),)](
        x_TD,
        residual_TD,
        norm_D,
        weight_FD,
        y_TF,
        total_TD,
        F,
        1e-6,
        T=tokens,
        D=D,
        R=tiles.rows,
        W=tiles.warps,
        L=linear.NUM_LANES * tiles.across,
        V=16 // x_TD.element_size(),
        LOG=(tokens * tiles.rows - 1).bit_length(),
        DEPENDENT=dependent,
        EARLY=linear.EARLY,
        num_warps=tiles.warps * tiles.across,
        **({"launch_pdl": True} if dependent else {}),
    )
    return y_TF, total_TD


class Chain:
    """add + norm, QKV, norm + rope + write, O (of the queries: attention is left out), add + norm, router, top 8."""

    def __init__(self, model: Model, tokens: int, num_layers: int) -> None:
        self.model, (self.H, self.G, self.D) = model, model.heads[0]
        width = model.width
        self.x_TD, self.residual_TD, self.norm_D = normal(tokens, width), normal(tokens, width), normal(width)
        self.rope = rope_arguments(model, model.heads[0], tokens)[3:]
        self.layers = []
        for _ in range(num_layers):
            inner = self.H * self.D
            shapes = (((self.H + 2 * self.G) * self.D, width), (width, inner), (model.num_experts, width))
            self.layers.append(tuple(normal(*shape) * shape[1] ** -0.5 for shape in shapes))

    def run(self, project: Callable[..., torch.Tensor], fused: StreamTiles | None = None) -> tuple[Any, ...]:
        x_TD, residual_TD = self.x_TD, self.residual_TD
        found: tuple[Any, ...] = ()
        for qkv, o, router in self.layers:
            if fused is not None:
                packed, residual_TD = add_norm_linear(x_TD, residual_TD, self.norm_D, qkv, fused)
            else:
                x_TD, residual_TD = norm.add_rms_norm(x_TD, residual_TD, self.norm_D, 1e-6)
                packed = project(x_TD, qkv, None, DTYPE)
            heads = packed.unflatten(-1, (-1, self.D)).split([self.H, self.G, self.G], dim=1)
            q_THD = rope_store.rope_store(ops.RopeStoreCall(*heads, *self.rope))
            x_TD = project(q_THD.flatten(1), o, None, DTYPE)
            x_TD, residual_TD = norm.add_rms_norm(x_TD, residual_TD, self.norm_D, 1e-6)
            found = route.route(
                ops.RouteCall(project(x_TD, router, None, torch.float32), min(8, self.model.num_experts))
            )
        return x_TD, residual_TD, found[0].sum(1)


def own(x_TD: torch.Tensor, weight_FD: torch.Tensor, bias_F: None, out_dtype: torch.dtype) -> torch.Tensor:
    if linear.accepts(x_TD, Weight.of(weight_FD), bias_F, out_dtype):
        return linear.linear(x_TD, Weight.of(weight_FD), bias_F, out_dtype)
    return library(x_TD, weight_FD, bias_F, out_dtype)


def sweep_chain(options: argparse.Namespace) -> Iterator[Row]:
    num_layers = 1 if TINY else 8
    for model in options.models:
        for tokens in options.tokens:
            chain = Chain(model, tokens, num_layers)
            in_bytes = sum(weight.numel() for layer in chain.layers for weight in layer) * DTYPE.itemsize
            expected = chain.run(library if not TINY else own)
            variants: list[tuple[str, bool, Any, StreamTiles | None]] = [("own", False, own, None)]
            if not TINY:
                variants += [("library", False, library, None), ("own early", True, own, None)]
            if tokens <= linear.STREAM_TOKENS:
                for tiles in (StreamTiles(2, 4), StreamTiles(2, 8), StreamTiles(4, 4)):
                    variants.append((f"fused {short(tiles)}", False, own, tiles))
                variants.append(("fused stream 2/4/1 early", True, own, StreamTiles(2, 4)))
            for name, early, project, fused in variants:
                with constants(linear, EARLY=early), constants(norm, EARLY_TOKENS=tokens if early else 0):
                    row = timed(
                        [partial(chain.run, project, fused)],
                        expected,
                        DTYPE,
                        part="chain",
                        model=model.name,
                        case="a layer",
                        tokens=tokens,
                        variant=name,
                        chosen=name == "own",
                        floor=in_bytes,
                    )
                # The rounding of each of the layers adds up: close is right.
                row["right"] = row.get("error", 1.0) <= 5e-2
                for key in ("us", "floor_us"):
                    if row.get(key):
                        row[key] /= num_layers
                yield row


# ---------------------------------------------------------------------------------------------------------------------
# All of it
# ---------------------------------------------------------------------------------------------------------------------

SWEEPS = {
    "linear": sweep_linear,
    "norm": sweep_norm,
    "rope": sweep_rope,
    "activation": sweep_activation,
    "chain": sweep_chain,
}


def compile_part(job: tuple[str, str]) -> None:
    """Go through a part without timing it, so that its kernels are in the disk cache."""
    global warming
    warming = True
    part, name = job
    models = [model for model in MODELS if model.name == name]
    for _ in SWEEPS[part](argparse.Namespace(models=models, tokens=TOKENS)):
        pass


def compile_tiles(job: tuple[int, int, int, bool, torch.dtype, Tiles]) -> None:
    """Run once, on a few outputs; the sweep says what does not run."""
    tokens, D, F, biased, out_dtype, tiles = job
    with contextlib.suppress(Exception):
        linear.run(normal(tokens, D), normal(F, D), normal(F) if biased else None, out_dtype, tiles)
        torch.cuda.synchronize()


def compile_all(options: argparse.Namespace) -> None:
    parts = [(part, model.name) for part in options.only if part != "linear" for model in options.models]
    tiles = {
        # What is compiled depends on F only in that 16 divides it, or it is 1.
        (tokens, D, F if F < 16 else 16 + F % 16, biased, out_dtype, one)
        for model in options.models
        for _, D, F, biased, out_dtype in (model.products() if "linear" in options.only else ())
        for tokens in options.tokens
        for one in candidates(tokens, D, F)
    }
    begin = time.perf_counter()
    with multiprocessing.get_context("spawn").Pool(options.workers) as pool:
        waiting = [pool.map_async(compile_part, parts, chunksize=1), pool.map_async(compile_tiles, tiles, chunksize=4)]
        for result in waiting:
            result.get()
    print(f"{len(parts)} parts, {len(tiles)} tiles compiled in {time.perf_counter() - begin:.0f} s", flush=True)


def show(rows: list[Row], best: int) -> None:
    """Of each case the library's line, the chosen one and the fastest right ones."""
    cases: dict[tuple[str, str, str, int], list[Row]] = {}
    for row in rows:
        cases.setdefault((row["part"], row["model"], row["case"], row["tokens"]), []).append(row)
    for (part, model, case, tokens), group in cases.items():
        right = sorted((row for row in group if row["right"]), key=lambda row: row["us"])
        wrong = [row for row in group if not row["right"]]
        shown = right[:best] + [row for row in right[best:] if row["chosen"] or row["variant"] == "library"]
        floor = next((row["floor_us"] for row in right), 0.0)
        line = f"{part:10} {model:18} {case:10} T {tokens:<4} floor {floor:7.2f} "
        for row in shown:
            line += (
                f" | {row['variant']}{'*' if row['chosen'] else ''} {row['us']:.2f} ({100 * floor / row['us']:.0f} %)"
            )
        for row in wrong:
            line += f" | WRONG {row['variant']} {row.get('fault') or row['error']}"
        print(line, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=PARTS, choices=PARTS)
    parser.add_argument("--models", nargs="*", default=[model.name for model in MODELS])
    parser.add_argument("--tokens", type=int, nargs="*", default=TOKENS)
    parser.add_argument("--best", type=int, default=3, help="variants to print of each case; * is the chosen one")
    parser.add_argument("--workers", type=int, default=0 if TINY else 14, help="processes that compile; 0: none")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    options.models = [model for model in MODELS if model.name in options.models]
    if options.workers:
        compile_all(options)
    rows: list[Row] = []
    with torch.inference_mode():
        for part in options.only:
            begin, found = time.perf_counter(), list(SWEEPS[part](options))
            rows += found
            show(found, options.best)
            print(f"{part}: {time.perf_counter() - begin:.0f} s", flush=True)
            if options.json:  # after each part: what is measured is not lost
                save(options.json, rows)
    wrong = sum(not row["right"] for row in rows)
    print(f"{len(rows)} rows, {wrong} wrong or not run")
    return 0


def save(file: Path, rows: list[Row]) -> None:
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent
    )
    head = {
        "commit": commit.stdout.strip(),
        "command": " ".join(["python", *sys.argv]),
        "machine": "interpreter" if TINY else torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({**head, "rows": rows}, indent=1))


if __name__ == "__main__":
    sys.exit(main())
