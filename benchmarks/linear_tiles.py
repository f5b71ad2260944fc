"""Dense projections with INT4 weights and FP8 ones by rows: tiles of multiply_scaled and, for
INT4 on Hopper, of linear_hopper_packed (split), and dequantising first.

    python benchmarks/linear_tiles.py --json FILE               shapes of Qwen3-30B-A3B, 8 to 512 tokens
    python benchmarks/linear_tiles.py --shapes 256x128 --tokens 3   without a GPU, in Triton's interpreter

Calls alternate between weights that no cache holds together, and are replayed as one captured graph. `rule` is what
runs; `dense` dequantises the weights into memory and multiplies by the vendor's library.
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path
from typing import Any

import torch

from anabranch import kernels, ops, platforms
from anabranch.bench.records import commit
from anabranch.formats import Grouped
from anabranch.kernels.tuning.timing import microseconds
from anabranch.ops.weight import Weight

FORMATS = {"int4": Grouped("int4", 1, 128, "bfloat16"), "fp8 rows": Grouped("fp8", 1, 0, "float32")}
TILES = [(rows, columns, warps, stages) for rows in (16, 32, 64, 128) for columns, warps, stages in (
    (16, 2, 4), (16, 4, 4), (32, 4, 4), (64, 4, 3), (64, 8, 4))]  # fmt: skip
SPLIT = (2, 4, 8)
"""Stages of linear_hopper_packed."""
NUM_WEIGHTS = 10
wrong: list[str] = []
"""Tiles whose results are; said at the end, when the others have been timed."""


def draw(F: int, D: int, format: Grouped, device: torch.device) -> Weight:
    weight = Weight((F, D), format=format, dtype=torch.bfloat16).to_empty(device=device)
    data = weight.tensors["data"].view(torch.uint8)
    data.random_(0, 120 if format.numbers == "fp8" else 256)
    weight.tensors["scale"].uniform_(0.001, 0.002)
    return weight


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["5120x2048", "2048x4096"], metavar="OUTPUTSxINPUTS")
    parser.add_argument("--tokens", type=int, nargs="+", default=[8, 16, 32, 64, 128, 192, 256, 384, 512], metavar="N")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    platform = platforms.current()
    kernels.bind(platform)
    from anabranch.kernels.triton import linear_quantized as kernel
    from anabranch.kernels.triton.launch import gluon_kernels

    packed = gluon_kernels("linear_hopper_packed", platform.device)
    device, dtype = platform.device, platform.compute_dtype(torch.bfloat16)
    found: dict[str, Any] = {"commit": commit(), "machine": platform.describe(), "us": {}}
    for shape in options.shapes:
        F, D = map(int, shape.split("x"))
        for name, format in FORMATS.items():
            weights = [draw(F, D, format, device) for _ in range(NUM_WEIGHTS if device.type == "cuda" else 1)]
            for tokens in options.tokens:
                x_TD = torch.randn(tokens, D, device=device).to(dtype)
                y_TF = torch.empty(tokens, F, dtype=dtype, device=device)
                expected = (x_TD.double() @ weights[0].dense(torch.float64).T).to(dtype)
                ways: dict[str, list[Any]] = {"rule": [partial(ops.linear, x_TD, weight) for weight in weights]}
                ways["dense"] = [
                    partial(
                        lambda x, w: kernel.multiply_dense(x, kernel.dequantize(w, dtype), None, dtype), x_TD, weight
                    )
                    for weight in weights
                ]
                for tile in TILES:
                    if tile[0] in {max(16, min(64, 1 << (tokens - 1).bit_length())), 128 if tokens > 64 else 0}:
                        label = "{}x{} w{} s{}".format(*tile)
                        ways[label] = [partial(kernel.multiply, x_TD, weight, None, y_TF, *tile) for weight in weights]
                padded = max(16, min(64, 1 << (tokens - 1).bit_length()))
                for stages in SPLIT if packed is not None and name == "int4" else ():
                    run = partial(packed.run, x_TD, bias_F=None, y_TF=y_TF, tile=(padded, stages))
                    if stages <= 4 or padded <= 16:  # more registers than there are
                        ways[f"split {padded} s{stages}"] = [partial(run, weight_FD=w) for w in weights]
                times = {}
                for label, calls in ways.items():
                    error = float((calls[0]().float() - expected.float()).norm() / expected.float().norm())
                    if not error < 0.02:
                        wrong.append(f"{shape} {name} {tokens} {label}: {error:.1%} off, not timed")
                        continue
                    times[label] = microseconds(platform, calls)
                found["us"][f"{shape}/{name}/{tokens}"] = times
                best = min(times, key=lambda label: times[label])
                print(f"{shape:>10} {name:>8} {tokens:4} rule {times['rule']:6.1f}  dense {times['dense']:6.1f}  "
                      f"best {times[best]:6.1f} {best}", flush=True)  # fmt: skip
                if options.json is not None:
                    options.json.write_text(json.dumps(found, indent=1) + "\n")

    if wrong:
        raise SystemExit("\n".join(wrong))


if __name__ == "__main__":
    main()
