"""The router's reference under torch.compile, for `bench ops route --compile`.

Each mode and dtype compiles in a process of its own, all at the same time; then they are timed one after the other, so
that nobody disturbs anybody. What fails is left out with its reason.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.multiprocessing as mp

from anabranch import ops, platforms
from anabranch.bench.op_cases import Setting
from anabranch.bench.op_cases_moe import draw_logits
from anabranch.bench.op_shapes import ModelShape
from anabranch.kernels.timing import microseconds

MODES = ("default", "reduce-overhead", "max-autotune")
TOKENS = (1, 2, 2048, 250_000)
COMPILE_SECONDS = 300.0


def compare(setting: Setting) -> dict[str, dict[str, dict[str, float]]]:
    """ "MODEL TOKENS DTYPE" → mode → {"called": µs, "graph": µs}."""
    dtypes = ("float32",) if setting.small else ("bfloat16", "float16", "float32")
    sizes = setting.tokens or setting.sizes(*TOKENS)
    parts = [(model, dtype, mode) for model in setting.models for dtype in dtypes for mode in MODES]
    context = mp.get_context("spawn")
    ready, turn, results = context.Barrier(len(parts)), context.Lock(), context.Queue()
    workers = [context.Process(target=measure, args=(*part, sizes, ready, turn, results)) for part in parts]
    for worker in workers:
        worker.start()
    found: dict[str, dict[str, dict[str, float]]] = {}
    for _ in workers:
        model, dtype, mode, times, fault = results.get(timeout=2 * COMPILE_SECONDS)
        print(f"torch.compile {mode}, {model}, {dtype}: {fault or 'ready'}", flush=True)
        for tokens, us in times.items():
            found.setdefault(f"{model} {tokens} {dtype}", {})[mode] = us
    for worker in workers:
        worker.join()
    return found


def measure(
    model: ModelShape, dtype: str, mode: str, sizes: tuple[int, ...], ready: Any, turn: Any, results: Any
) -> None:
    """In a process of its own."""
    times: dict[int, dict[str, float]] = {}
    fault = ""
    platform = platforms.current()
    setting = Setting(platform, (model,), getattr(torch, dtype))
    function = torch.compile(ops.route.reference, mode=mode)
    scale_E = torch.rand(model.num_experts, device=platform.device)
    rest: Any = {"top_k": model.top_k, "renormalize": model.renormalize, "expert_scale_E": scale_E}
    calls = {}
    try:
        for tokens in sizes:
            logits = [draw_logits(replace(setting, zipf=False), model, tokens, setting.dtype) for _ in range(4)]
            calls[tokens] = [partial(function, logits_TE, **rest) for logits_TE in logits]
            for call in calls[tokens]:
                call()
        platform.synchronize()
    except Exception as error:  # the others' figures are not lost with this one's
        fault = f"{type(error).__name__}: {error}"[:200]
    with contextlib.suppress(Exception):
        ready.wait(timeout=COMPILE_SECONDS)
    with turn:
        for tokens in sizes if not fault else ():
            times[tokens] = {"called": microseconds(platform, calls[tokens], graph=False)}
            if mode == "default":  # the other modes bring graphs of their own
                times[tokens]["graph"] = microseconds(platform, calls[tokens])
        results.put((model.name, dtype, mode, times, fault))
