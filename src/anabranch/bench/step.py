"""Profile one step, kernel by kernel: count, time, share of the step, distance from its floor, and gaps.

    anabranch bench step qwen3-30b-a3b --load-format dummy --batch 1
    anabranch bench step FOLDER --batch 64 --context 1024 --json FILE
    anabranch bench step FOLDER --prompts --batch 16 --context 1024

All requests are in the middle of their answers; with --prompts, a step computes whole prompts, for which no floor is
known. Some steps are timed as they are, others under torch's profiler, which also sees the kernels inside a captured
graph. The floor of a group is the time to read the bytes it needs at the rate of the machine's memory (known for H200;
else give --bandwidth). Without an accelerator the host's ops are shown.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anabranch import ops
from anabranch.bench.records import bundled, commit
from anabranch.engine.plan import count_weights, kept, quantized, weight_bytes
from anabranch.formats import ITEM_BYTES
from anabranch.llm import LLM
from anabranch.models.config import ModelConfig
from anabranch.options import FLAGS, above_zero, add_engine_options, at_least, engine_fields
from anabranch.request import Request
from anabranch.sampling_params import SamplingParams

if TYPE_CHECKING:
    from anabranch.engine.engine import Engine

GROUPS = {
    "experts": r"(?<!count_)experts|gate_up",
    "attention": r"attention|attn|flash|fmha|scaled_dot_product",
    "routing": r"route|topk|top_k|count_experts",
    "norm, rope, KV": r"norm|rope|rotary|kv_store|activation|silu|gelu",
    "sampling": r"sample|argmax|draw|penal|logprob|mask_logits|softmax",
    "dense": r"linear|gemm|gemv|cutlass|nvjet|cublas|splitk|matmul|::mm\b|::addmm\b|::bmm\b",
    "inputs, copies": r"decode_inputs|memcpy|memset|copy|fill|index|elementwise|cat|gather|scatter|embedding",
}
"""Kinds of work, and a pattern of the kernels that do it: of the file names of ours, else of names; the first wins."""
RANGE = "anabranch bench step"
WARM_STEPS = 4


@dataclass(frozen=True, slots=True)
class KernelRun:
    """One run of a kernel, in µs since its step began."""

    name: str
    begin: float
    end: float
    busy: float
    """Its own µs: for an op on the host, without the ops it called."""


@dataclass(frozen=True, slots=True)
class Profile:
    """The kernel runs of each profiled step."""

    steps: list[list[KernelRun]]
    on_device: bool

    def busy(self, key: Callable[[str], str] = str) -> dict[str, list[float]]:
        """µs of every run, by a key of the kernel's name."""
        found: dict[str, list[float]] = {}
        for run in chain.from_iterable(self.steps):
            found.setdefault(key(run.name), []).append(run.busy)
        return found

    def spans(self) -> list[float]:
        """µs of each step from its first kernel to its last."""
        return [max(run.end for run in runs) - min(run.begin for run in runs) for runs in self.steps]

    def median(self) -> list[KernelRun]:
        """The step of median length."""
        spans = self.spans()
        return self.steps[spans.index(statistics.median_low(spans))]


def group_of(name: str) -> str:
    return next((group for group, pattern in GROUPS.items() if re.search(pattern, name, re.I)), "other")


def own_kernels() -> dict[str, str]:
    """Triton kernels of this package that have been imported: name → file.name."""
    place = "anabranch.kernels.triton."
    found: dict[str, str] = {}
    for module in [module for name, module in sys.modules.items() if name.startswith(place)]:
        for name, value in vars(module).items():
            if hasattr(value, "arg_names") and value.__module__ == module.__name__:
                file = module.__name__.removeprefix(place)
                found[name] = f"{file}|{found[name]}" if name in found else f"{file}.{name}"
    return found


def gaps(runs: list[KernelRun]) -> float:
    """µs between the first and the last kernel in which none ran."""
    total, reached = 0.0, min(run.begin for run in runs)
    for run in sorted(runs, key=lambda run: run.begin):
        total += max(0.0, run.begin - reached)
        reached = max(reached, run.end)
    return total


def step_bytes(config: ModelConfig, batch: int, context: int, dtype: str) -> dict[str, int]:
    """Bytes that a decode step must read, by group of kernels: the floor of its time.

    Weights once, in the model's format (of the routed experts, those that a batch with uniform routing is expected to
    visit), and the keys and values of every token, or the state, of every request. Activations are left out: in decode
    they are small and mostly cached.
    """
    size, width = ITEM_BYTES[dtype], config.hidden_size
    counts, stored = count_weights(config), weight_bytes(config, dtype)
    each = {kind: stored[kind] / max(1, counts[kind]) for kind in counts}
    found = {"dense": config.vocab_size * width * each["embeddings"], "experts": 0.0, "routing": 0.0, "attention": 0.0}
    for layer in config.layers:
        matrices = sum(math.prod(shape) for shape in layer.mixer.weight_shapes(width) if len(shape) > 1)
        found["dense"] += matrices * each["attention"] + 3 * width * layer.mlp_width * each["dense feed-forward"]
        cache = layer.mixer.cache
        values = cache.policy.num_kept(context) * sum(map(math.prod, cache.shapes))
        found["attention"] += batch * values * ITEM_BYTES[cache.dtype or dtype]
        if layer.moe is not None:
            moe = layer.moe
            found["routing"] += moe.num_experts * width * size
            found["dense"] += 3 * width * moe.shared_width * each["shared experts"]
            experts = visited(moe.num_experts, moe.top_k, batch)
            found["experts"] += experts * 3 * width * moe.width * each["routed experts"]
    return {group: round(count) for group, count in found.items() if count}


def visited(num_experts: int, top_k: int, batch: int) -> float:
    """The expected number of experts that at least one of `batch` tokens chooses."""
    return num_experts * (1 - (1 - top_k / num_experts) ** batch)


# -- measuring ---------------------------------------------------------------------------------------------------------


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", metavar="MODEL", help="a bundled config, a folder or a hub id")
    add("--batch", type=int, default=1, metavar="N", help="requests of a step (default 1)")
    add("--prompts", action="store_true", help="steps that compute whole prompts")
    add("--context", type=int, default=128, metavar="L", help="tokens in each request's prompt (default 128)")
    add_engine_options(parser, "load_format", "dtype", "expert_load_interval")
    add("--steps", type=int, default=8, metavar="N", help="steps to profile (default 8)")
    add("--top", type=at_least(1), default=25, metavar="N", help="kernels to show (default 25)")
    add("--bandwidth", type=above_zero(), metavar="TB/S", help="of this machine's memory, for the floors")
    add("--json", metavar="FILE", help="write all of it to a file, with the time line of one step")
    add_engine_options(parser, *FLAGS)
    parser.set_defaults(tune="off")


def run(options: argparse.Namespace) -> int:
    for name in ("batch", "context", "steps"):
        if getattr(options, name) < 1:
            raise ValueError(f"--{name}: at least 1, not {getattr(options, name)}")
    folder = bundled(options.model, options.load_format)
    room = options.context + 3 * options.steps + WARM_STEPS + 16
    fields = engine_fields(options)
    if options.prompts:
        fields["max_num_batched_tokens"] = fields.get("max_num_batched_tokens") or options.batch * options.context
    with LLM(
        folder,
        max_model_len=room,
        max_num_seqs=max(256, options.batch),
        prefix_cache=False,
        show_progress=False,
        **fields,
    ) as llm:
        if options.prompts:
            step = partial(prompts_step, llm.engine, options.batch, options.context)
            times = [step() for _ in range(WARM_STEPS + options.steps)]
            plain = 1e6 * statistics.median(times[WARM_STEPS:])
            profile = profiled_steps(llm, options.steps, step)
        else:
            decode(llm.engine, [options.context] * options.batch, room)
            plain = timed_steps(llm.engine, options.steps)
            profile = profiled_steps(llm, options.steps, llm.engine.step)
        result = summarize(llm, options, plain, profile)
    print(show(result, options.top))
    if options.json:
        Path(options.json).write_text(json.dumps(result, indent=1) + "\n")
    return 0


def decode(engine: Engine, lengths: list[int], max_tokens: int) -> None:
    """Add a request for each length of a prompt, and step until every one of them gets a token in each step."""
    rng, vocabulary = random.Random(0), engine.model.vocab_size
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
    waiting = {str(i) for i in range(len(lengths))}
    for id, length in zip(sorted(waiting), lengths, strict=True):
        prompt = tuple(rng.randrange(vocabulary) for _ in range(length))
        engine.add(Request(id=id, prompt_ids=prompt, params=params))
    while waiting:
        waiting -= {update.id for update in engine.step()}
    for _ in range(WARM_STEPS):
        decode_step(engine)


def prompts_step(engine: Engine, batch: int, length: int) -> float:
    """Seconds in which all of some new prompts get their first token."""
    rng, params = random.Random(batch), SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)
    for i in range(batch):
        prompt = tuple(rng.randrange(engine.model.vocab_size) for _ in range(length))
        engine.add(Request(id=f"prompt {i}", prompt_ids=prompt, params=params))
    began = time.perf_counter()
    while engine.sequences:
        engine.step()
    return time.perf_counter() - began


def decode_step(engine: Engine) -> float:
    """Seconds of a step in which every request gets a token."""
    began = time.perf_counter()
    updates = engine.step()
    seconds = time.perf_counter() - began
    assert len(updates) == len(engine.sequences), f"{len(updates)} of {len(engine.sequences)} requests had a token"
    return seconds


def timed_steps(engine: Engine, num_steps: int) -> float:
    """µs of a step as the engine runs them: each is launched before the last one is read."""
    engine.step()
    began = time.perf_counter()
    for _ in range(num_steps):
        decode_step(engine)
    return 1e6 * (time.perf_counter() - began) / num_steps


def profiled_steps(llm: LLM, num_steps: int, step: Callable[[], object]) -> Profile:
    """Steps that are launched when the device is idle and waited for, so that all kernels seen belong to them."""
    from torch import profiler

    platform = llm.engine.runner.platform
    platform.synchronize()
    with profiler.profile(activities=profiler.supported_activities()) as found:
        for _ in range(num_steps):
            with profiler.record_function(RANGE):
                step()
                platform.synchronize()
    return read_profile(list(found.events()))


def read_profile(events: list[Any]) -> Profile:
    """The device's kernels by step; where there are none, the host's ops."""

    def is_host(event: Any) -> bool:
        return "CPU" in str(event.device_type)

    ranges = sorted((e.time_range.start, e.time_range.end) for e in events if e.name == RANGE and is_host(e))
    kernels = [e for e in events if not is_host(e) and e.name != RANGE]
    on_device, ours = bool(kernels), own_kernels()
    chosen = kernels if on_device else [e for e in events if e.name != RANGE and "::" in e.name]
    steps: list[list[KernelRun]] = []
    for begin, end in ranges:
        inside = [e for e in chosen if begin <= e.time_range.start < end]
        inside.sort(key=lambda e: e.time_range.start)
        first = inside[0].time_range.start if inside else 0.0
        runs = []
        for e in inside:
            start, stop = e.time_range.start, e.time_range.end
            busy = stop - start if on_device else e.self_cpu_time_total
            runs.append(KernelRun(ours.get(e.name, e.name), start - first, stop - first, busy))
        steps.append(runs)
    if not steps or not all(steps):
        raise ValueError(
            "the profiler saw no kernels: on a GPU it may need the permission to read performance counters"
        )
    return Profile(steps, on_device)


# -- showing -----------------------------------------------------------------------------------------------------------


def summarize(llm: LLM, options: argparse.Namespace, plain: float, profile: Profile) -> dict[str, Any]:
    from anabranch.bench.ops import CEILINGS

    runner = llm.engine.runner
    machine = runner.platform.describe()
    dtype = str(runner.dtype).removeprefix("torch.")
    known = next((rate for name, (rate, _) in CEILINGS.items() if machine.startswith(name)), None)
    rate = options.bandwidth * 1e12 if options.bandwidth else known
    model = quantized(llm.engine.model, options.quantization)
    if dtype == "float32" and ops.linear.has_trait("bf16"):
        model = kept(model)
    reads = {} if options.prompts else step_bytes(model, options.batch, options.context, dtype)
    return {
        "engine": "anabranch",
        "model": Path(options.model).name,
        "commit": commit(),
        "machine": machine,
        "batch": options.batch,
        "context": options.context,
        "prompts": options.prompts,
        "on_device": profile.on_device,
        "step_us": plain,
        "span_us": statistics.median(profile.spans()),
        "gap_us": statistics.median(map(gaps, profile.steps)),
        "bandwidth": rate,
        "floor_us": 1e6 * sum(reads.values()) / rate if rate and reads else None,
        "groups": list(group_rows(profile, reads, rate)),
        "kernels": list(kernel_rows(profile)),
        "timeline": [[run.name, round(run.begin, 3), round(run.busy, 3)] for run in profile.median()],
    }


def group_rows(profile: Profile, reads: dict[str, int], rate: float | None) -> Iterator[dict[str, Any]]:
    busy = profile.busy(group_of)
    for group in sorted({*busy, *reads}, key=lambda group: -sum(busy.get(group, ()))):
        times = busy.get(group, [])
        yield {
            "group": group,
            "count": len(times) / len(profile.steps),
            "us": sum(times) / len(profile.steps),
            "bytes": reads.get(group),
            "floor_us": 1e6 * reads[group] / rate if rate and group in reads else None,
        }


def kernel_rows(profile: Profile) -> Iterator[dict[str, Any]]:
    busy = profile.busy()
    for name, times in sorted(busy.items(), key=lambda item: -sum(item[1])):
        us, count = sum(times) / len(profile.steps), len(times) / len(profile.steps)
        yield {"name": name, "group": group_of(name), "count": count, "us": us, "us_each": us / count}


def show(result: dict[str, Any], top: int) -> str:
    total = sum(row["us"] for row in result["groups"])
    what, per = ("kernels", "on the device") if result["on_device"] else ("ops", "on the host")
    lines = [
        f"{result['model']}, {'prompts' if result['prompts'] else 'batch'} {result['batch']}, "
        f"context {result['context']}; {result['machine']}",
        f"a step takes {result['step_us']:,.0f} µs; {per} {result['span_us']:,.0f} µs under the profiler: "
        f"{what} {total:,.0f} µs, gaps {result['gap_us']:,.0f} µs",
    ]
    if result["floor_us"]:
        share = result["floor_us"] / result["step_us"]
        read = sum(row["bytes"] or 0 for row in result["groups"])
        lines.append(f"it must read {read / 1e9:.3f} GB: {result['floor_us']:,.0f} µs, {share:.0%} of the step")
    lines += ["", f"{'group':<16}{'count':>7}{'µs':>11}{'share':>8}{'MB read':>11}{'floor µs':>10}{'× floor':>9}"]
    for row in result["groups"]:
        floor = "" if row["floor_us"] is None else f"{row['floor_us']:,.1f}"
        times = f"{row['us'] / row['floor_us']:.2f}" if row["floor_us"] and row["us"] else ""
        read_mb = "" if row["bytes"] is None else f"{row['bytes'] / 1e6:,.1f}"
        lines.append(
            f"{row['group']:<16}{row['count']:>7.4g}{row['us']:>11,.1f}{row['us'] / total:>8.1%}"
            f"{read_mb:>11}{floor:>10}{times:>9}"
        )
    width = max(len(_short(row["name"])) for row in result["kernels"][:top])
    lines += ["", f"{what[:-1]:<{width}}{'count':>7}{'µs each':>10}{'µs':>11}{'share':>8}  group"]
    for row in result["kernels"][:top]:
        lines.append(
            f"{_short(row['name']):<{width}}{row['count']:>7.4g}{row['us_each']:>10,.2f}{row['us']:>11,.1f}"
            f"{row['us'] / total:>8.1%}  {row['group']}"
        )
    if left := result["kernels"][top:]:
        lines.append(f"and {len(left)} more: {sum(row['us'] for row in left):,.1f} µs")
    return "\n".join(lines)


def _short(name: str, most: int = 60) -> str:
    """The beginning of a name: of a C++ template it is enough."""
    return name if len(name) <= most else name[: most - 1] + "…"
