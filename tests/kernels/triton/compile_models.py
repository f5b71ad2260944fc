"""Compiles for an H200, without one, the kernels of models at their real sizes: `python -m
tests.kernels.triton.compile_models [-n N] [-k KERNEL] [MODEL ...]`.

Of every kernel that the dry run of a model launches, at most N specialisations (default 2, 0: all). Prints a line for
each: registers, bytes of stack and of spilled registers, shared memory. Exit code 1 if one does not compile, spills, or
needs more shared memory than there is.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from triton.runtime.driver import driver

from anabranch import kernels
from anabranch.kernels.compiling.precompile import Job, recording
from tests.engine import paper_h200
from tests.kernels.triton.ahead_of_time import SHARED, NoDevice, resources

MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router"]}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]}
GPT_OSS = {
    "model_type": "gpt_oss",
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"],
    "vocab_size": 201_088,
    "max_position_embeddings": 131_072,
    "quantization_config": MXFP4,
}
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "intermediate_size": 18_432,
    "moe_intermediate_size": 2048,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "first_k_dense_replace": 1,
    "vocab_size": 129_280,
    "max_position_embeddings": 163_840,
    "quantization_config": FP8,
}
GLM_45_AIR = {
    "model_type": "glm4_moe",
    "hidden_size": 4096,
    "intermediate_size": 10_944,
    "moe_intermediate_size": 1408,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "partial_rotary_factor": 0.5,
    "attention_bias": True,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 1,
    "vocab_size": 151_552,
}
GLM_47_FLASH = {
    "model_type": "glm4_moe_lite",
    "hidden_size": 2048,
    "intermediate_size": 10_240,
    "moe_intermediate_size": 1536,
    "num_attention_heads": 20,
    "num_key_value_heads": 20,
    "q_lora_rank": 768,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "v_head_dim": 256,
    "n_routed_experts": 64,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "vocab_size": 154_880,
}
MINIMAX_M2 = {
    "model_type": "minimax_m2",
    "hidden_size": 3072,
    "intermediate_size": 1536,
    "num_attention_heads": 48,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rotary_dim": 64,
    "num_local_experts": 256,
    "num_experts_per_tok": 8,
    "vocab_size": 200_064,
    "quantization_config": FP8,
}
MODELS: dict[str, tuple[dict[str, Any] | str, dict[str, Any]]] = {
    "gpt-oss-20b": (GPT_OSS, {}),
    "gpt-oss-120b": (GPT_OSS | {"num_local_experts": 128}, {}),
    "deepseek-v2-lite": ("deepseek-v2-lite", {}),
    "deepseek-v3": (DEEPSEEK_V3, {}),
    "glm-4.5-air": (GLM_45_AIR, {}),
    "glm-4.7-flash": (GLM_47_FLASH, {}),
    "minimax-m2": (MINIMAX_M2, {}),
    "qwen3-30b-a3b-fp8": ("qwen3-30b-a3b", {"quantization": "fp8"}),
    "qwen3-30b-a3b-int4": ("qwen3-30b-a3b", {"quantization": "int4"}),
    "qwen3.6-35b-a3b": ("qwen3.6-35b-a3b", {"speculative": "mtp", "max_num_seqs": 64}),
}
"""Their config.json, or the name of a bundled one, and options of the engine. Without what does not change a kernel."""


def jobs_of(name: str) -> list[Job]:
    """What the dry run of two layers launches."""
    config, options = MODELS[name]
    with tempfile.TemporaryDirectory() as folder:
        cut_down = paper_h200.cut_down
        if isinstance(config, dict):

            def cut_down(name: str, folder: Path) -> None:
                (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2, "dtype": "bfloat16"}))

        found: list[Job] = []

        def compile_ahead(platform: object, work: Any) -> None:
            work()
            found.extend(jobs)

        with (
            paper_h200.paper_h200(),
            recording() as jobs,
            torch.inference_mode(),
            mock.patch.object(paper_h200, "cut_down", cut_down),
            mock.patch.object(kernels, "compile_ahead", compile_ahead),
        ):
            paper_h200.make_runner(config if isinstance(config, str) else name, Path(folder), **options).warm_up()
    paper_h200.forget(job.kernel for job in found)
    return found


def some(jobs: list[Job], most: int) -> list[Job]:
    """At most this number of each kernel, spread over all that there are."""
    by_kernel: dict[str, list[Job]] = defaultdict(list)
    for job in jobs:
        by_kernel[job.kernel.__name__].append(job)
    found = []
    for same in by_kernel.values():
        count = min(most, len(same)) if most else len(same)
        found += [same[-1 - place * len(same) // count] for place in range(count)]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=list(MODELS), metavar="MODEL", help=", ".join(MODELS))
    parser.add_argument("-n", type=int, default=2, help="specialisations of a kernel; 0: all")
    parser.add_argument("-k", default="", help="kernels whose names match this regular expression")
    options = parser.parse_args()
    driver.set_active(NoDevice())
    seen: set[str] = set()
    bad = 0
    print(f"triton {triton.__version__}\n{'REG':>4} {'STACK':>6} {'LOCAL':>6} {'SHARED':>7}  kernel", flush=True)
    for name in options.models:
        print(f"-- {name}", flush=True)
        for job in some([job for job in jobs_of(name) if re.search(options.k, job.kernel.__name__)], options.n):
            if job.hash() in seen:
                continue
            seen.add(job.hash())
            try:
                compiled = triton.compile(job.source(), target=job.target, options=job.options)
            except Exception as error:
                bad += 1
                print(f"failed: {job.name}: {str(error).splitlines()[-1:]}", flush=True)
                continue
            used, shared = resources(compiled), compiled.metadata.shared
            wrong = used["LOCAL"] > 0 or used["STACK"] > 0 or shared > SHARED["sm_90"]
            bad += wrong
            numbers = f"{used['REG']:4} {used['STACK']:6} {used['LOCAL']:6} {shared:7}"
            print(f"{numbers}{' !' if wrong else '  '}{job.name}", flush=True)
    print(f"{len(seen)} specialisations, {bad} of them with something wrong")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
