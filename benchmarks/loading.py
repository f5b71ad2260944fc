"""How fast weights get from files to the device: writes a random qwen3_moe checkpoint, loads it, compares a sample.

    python benchmarks/loading.py                              # 28 GB in /dev/shm
    python benchmarks/loading.py --size 1.5 --threads 1,2 --ready

The files are as Hugging Face lays them out (shards of 4 GB, a tensor per expert and projection). Every tensor is
another window of one pool of random numbers, so a tensor in the wrong place is seen. `--ready` also starts an engine on
them, in a process of its own, and shows where its time goes. What is written is removed at the end unless `--keep` is
given.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import json
import os
import random
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from anabranch import kernels, platforms
from anabranch.bench.records import commit
from anabranch.loader import names
from anabranch.loader.checkpoint import read_checkpoint
from anabranch.loader.load import build, fill_randomly
from anabranch.loader.read import read_weights
from anabranch.models.config import read_config

CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "head_dim": 128,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
POOL = 1 << 26
"""Random numbers that tensors are windows of."""
SHARD = 4_000_000_000


def write(folder: Path, size: float) -> int:
    """A checkpoint of about `size` GB; the bytes of its tensors."""
    folder.mkdir(parents=True, exist_ok=True)
    layer = 2 * (3 * 128 * 2048 * 768 + 2 * 2048 * 4096 + 2 * 2048 * 512)
    layers = max(1, round((size * 1e9 - 4 * 151936 * 2048) / layer))
    (folder / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": layers}, indent=1))
    model = build(read_config(folder), torch.bfloat16)
    layouts = (names.stored(target, layouts) for _, target, layouts in names.parameter_layouts(model))
    shapes = {name: list(shape) for name, shape in itertools.chain.from_iterable(layouts)}
    shards: list[dict[str, list[int]]] = [{}]
    for name, shape in shapes.items():
        if 2 * sum(map(num_elements, shards[-1].values())) >= SHARD:
            shards.append({})
        shards[-1][name] = shape
    pool = torch.randn(POOL).mul_(0.02).to(torch.bfloat16)
    files = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        list(threads.map(write_shard, [folder / file for file in files], shards, [pool] * len(shards)))
    weight_map = {name: file for file, shard in zip(files, shards, strict=True) for name in shard}
    total = 2 * sum(map(num_elements, shapes.values()))
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return total


def num_elements(shape: list[int]) -> int:
    return torch.Size(shape).numel()


def write_shard(file: Path, shapes: dict[str, list[int]], pool: torch.Tensor) -> None:
    header, end = {}, 0
    for name, shape in shapes.items():
        begin, end = end, end + 2 * num_elements(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    memory = memoryview((ctypes.c_ubyte * pool.nbytes).from_address(pool.data_ptr())).cast("B")
    with open(file, "wb", buffering=0) as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for name, shape in shapes.items():
            left, at = 2 * num_elements(shape), 2 * window(name)
            while left:
                count = stream.write(memory[at : at + left])
                left, at = left - count, (at + count) % pool.nbytes


def window(name: str) -> int:
    """Where in the pool a tensor begins: a number that depends on its name alone."""
    return random.Random(name).randrange(POOL)


def load(folder: Path, threads: int | None) -> tuple[torch.nn.Module, list[names.Copy], float, int]:
    """The model, and the seconds that reading its weights into memory took."""
    config, platform = read_config(folder), platforms.current()
    kernels.bind(platform)
    model = build(config, torch.bfloat16)
    copies = names.match(model, read_checkpoint(folder))
    model.to_empty(device=platform.device)
    platform.synchronize()
    began = time.perf_counter()
    num_bytes = read_weights(dict(model.named_parameters()), copies, platform, threads=threads)
    return model, copies, time.perf_counter() - began, num_bytes


def compare(model: torch.nn.Module, copies: list[names.Copy], count: int) -> int:
    """Bit for bit, tensors as they are in the files and in the model; how many."""
    parameters = dict(model.named_parameters())
    edges = [copies[0], copies[-1]]
    chosen = random.Random(0).sample(copies, min(count, len(copies))) + edges
    for copy in chosen:
        with open(copy.source.file, "rb") as stream:
            stream.seek(copy.source.begin)
            raw = bytearray(stream.read(copy.source.num_bytes))
        expected = torch.frombuffer(raw, dtype=torch.int16).view(copy.source.shape)
        found = parameters[copy.parameter][copy.index].cpu().contiguous().view(torch.int16)
        assert torch.equal(found, expected[copy.part]), copy.source.name
    return len(chosen)


READY = """
import json, sys
from anabranch.llm import LLM
from anabranch.stages import Stages
llm = LLM(sys.argv[1], stages=Stages.of_process(), dtype="bfloat16", max_model_len=4096)
print(json.dumps(llm.stats()["startup"]))
llm.close()
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=float, default=28.0, metavar="GB")
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm/anabranch-loading"))
    parser.add_argument("--threads", default="4,8,12,16", metavar="N,N", help="readers to try (default %(default)s)")
    parser.add_argument("--ready", action="store_true", help="start an engine too")
    parser.add_argument("--keep", action="store_true", help="keep the checkpoint, and use the one that is there")
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    platform = platforms.current()
    result: dict[str, Any] = {
        "commit": commit(),
        "command": " ".join(["python", *sys.argv]),
        "machine": platform.describe(),
    }
    try:
        if not (options.keep and (options.folder / "model.safetensors.index.json").exists()):
            began = time.perf_counter()
            num_bytes = write(options.folder, options.size)
            print(f"wrote {num_bytes / 1e9:.2f} GB in {time.perf_counter() - began:.1f} s", flush=True)
        if options.ready:  # first: afterwards this process holds a good part of the device
            command = [sys.executable, "-c", READY, str(options.folder)]
            result["ready"] = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
            stages = ", ".join(f"{name} {s:.2f} s" for name, s in result["ready"]["seconds"].items())
            print(f"ready: {stages}; {result['ready']['bytes_per_second']['weights'] / 1e9:.1f} GB/s", flush=True)
        measure(options, result, platform)
    finally:
        if not options.keep:
            shutil.rmtree(options.folder, ignore_errors=True)
    if options.json:
        Path(options.json).write_text(json.dumps(result, indent=1))


def measure(options: argparse.Namespace, result: dict[str, Any], platform: platforms.Platform) -> None:
    runs = result["reading"] = []
    model = None
    for threads in map(int, options.threads.split(",")):
        del model  # two of them may not fit
        model, copies, seconds, num_bytes = load(options.folder, threads)
        same = compare(model, copies, 40)
        rate = num_bytes / 1e9 / seconds
        runs.append({"threads": threads, "gb": num_bytes / 1e9, "s": seconds, "gb_s": rate})
        print(f"{threads:3} threads: {seconds:.2f} s, {rate:.1f} GB/s; {same} tensors equal", flush=True)
    assert model is not None
    platform.synchronize()
    began = time.perf_counter()
    fill_randomly(model)
    platform.synchronize()
    result["dummy_s"] = time.perf_counter() - began
    billions = sum(parameter.numel() for parameter in model.parameters()) / 1e9
    print(f"dummy weights: {billions:.1f} billion in {result['dummy_s']:.2f} s")


if __name__ == "__main__":
    main()
