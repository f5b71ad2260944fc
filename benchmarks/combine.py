"""Ways to bring the experts' rows back to their tokens, with the same products before them, and a naive one.

    python benchmarks/combine.py --json FILE                    Qwen3, Qwen1.5 and Gemma 4, 1 to 16,384 tokens
    python benchmarks/combine.py --models tiny --tokens 1 40    without a GPU

naive: a row for every pair, [T, K, D], and torch's sum over K. The others are combine modes of the op `experts`. Calls
alternate between sets of weights that no cache holds together, and are replayed as one captured graph where there are
graphs.
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path
from typing import Any

import torch

from anabranch import kernels, ops, platforms
from anabranch.bench.op_cases import TINY, shape
from anabranch.bench.records import commit
from anabranch.kernels.tuning.timing import microseconds
from anabranch.ops.experts import ExpertsCall
from anabranch.ops.weight import Weight

MODES = ("naive", "unfused", "ordered", "fused", "fastest")
SETS = 4


def naive(call: ExpertsCall) -> torch.Tensor:
    return ops.experts(call._replace(combined=False)).sum(1)  # type: ignore[no-any-return]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    models = ["qwen3-30b-a3b", "qwen1.5-moe-a2.7b", "gemma4-26b-a4b"]
    parser.add_argument("--models", nargs="+", default=models, metavar="NAME")
    sizes = [1, 8, 64, 256, 1024, 2048, 4096, 8192, 16384]
    parser.add_argument("--tokens", type=int, nargs="+", default=sizes, metavar="N")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    platform = platforms.current()
    kernels.bind(platform)
    device, dtype = platform.device, platform.compute_dtype(torch.bfloat16)
    rows: list[dict[str, Any]] = []
    print(f"{'model':>20} {'tokens':>7}" + "".join(f"{mode + ' µs':>12}" for mode in MODES) + "  fused against naive")
    with torch.inference_mode():
        for name in options.models:
            model = shape(TINY if name == "tiny" else name)
            E, D, inner, k = model.moe.num_experts, model.config.hidden_size, model.moe.width, model.moe.top_k
            weights = [
                tuple(Weight.of(torch.randn(*s, device=device).to(dtype) * s[2] ** -0.5) for s in sizes)
                for sizes in [((E, 2 * inner, D), (E, D, inner))] * (SETS if device.type != "cpu" else 1)
            ]
            for tokens in options.tokens:
                calls = []
                for gate_up, down in weights:
                    weight_TK, expert_TK = torch.randn(tokens, E, device=device).softmax(-1).topk(k)
                    x_TD = torch.randn(tokens, D, device=device).to(dtype)
                    given = x_TD, weight_TK, expert_TK.int(), gate_up, down
                    calls.append(ExpertsCall(*given, model.config.activation))
                expected, us = naive(calls[0]).float(), {}
                for mode in MODES:
                    made = [naive if mode == "naive" else ops.experts] * len(calls)
                    asked = [call if mode == "naive" else call._replace(combine=mode) for call in calls]
                    error = float((made[0](asked[0]).float() - expected).norm() / expected.norm())
                    assert error < 0.02, f"{mode}: {error:.1%} off"
                    us[mode] = microseconds(platform, [partial(f, call) for f, call in zip(made, asked, strict=True)])
                rows.append({"model": name, "tokens": tokens, "us": us})
                cells = "".join(f"{us[mode]:12.1f}" for mode in MODES)
                print(f"{name:>20} {tokens:7}{cells} {us['fused'] / us['naive'] - 1:+12.1%}", flush=True)
                if options.json is not None:
                    about = {"commit": commit(), "machine": platform.describe()}
                    options.json.write_text(json.dumps(about | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
