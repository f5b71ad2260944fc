"""Show whether a model fits: weights by kind, KV bytes per token, and how many requests of which length memory holds.
Of a model that is divided among ranks: what each has, and what a step moves between them.

Reads config.json and the headers of safetensors files only, so it needs no GPU and no weights. Without --memory it
shows common sizes. --dtype auto is the model's own here, on every machine; with float32, the matrices of a model in
bf16 are counted as this machine keeps them.
"""

import argparse
import json
import re
from pathlib import Path
from typing import Any

from anabranch import bundled
from anabranch.bench.records import bundled as configs
from anabranch.config import batch_tokens
from anabranch.engine import plan as planning
from anabranch.formats import ITEM_BYTES
from anabranch.loader.checkpoint import read_checkpoint, with_stored_dtype
from anabranch.loader.locate import locate
from anabranch.models.config import ModelConfig, read_config
from anabranch.options import above_zero, add_engine_options, add_memory_fraction, at_least
from anabranch.ranks import plan as plan_ranks

COMMON_MEMORY = (24, 48, 80, 141)  # GB
BARE = 10**6
"""A number without a unit is in GB below this, and in bytes from it on."""
UNITS = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, "kib": 2**10, "mib": 2**20, "gib": 2**30}


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    names = "a config.json is enough, or the name of a config of bench offline, such as qwen3-30b-a3b"
    add("model", metavar="MODEL", nargs="?", help=f"{bundled.HELP}; {names}")
    add("--memory", metavar="SIZE", help="device memory: 141GB, 80GiB, or 141 for GB")
    add_memory_fraction(parser, "share to use (default 0.85)", 0.85)
    add_engine_options(parser, "dtype", "quantization", "kv_cache_dtype", "state_dtype")
    add("--page-size", type=at_least(1), default=16, metavar="N", help="tokens in a KV page (default 16)")
    add_engine_options(parser, "tensor_parallel_size", "expert_parallel")
    data = "ranks with requests of their own, which divide the experts among them (default 1)"
    add("--data-parallel-size", type=at_least(1), default=1, metavar="N", help=data)
    add("--nodes", type=at_least(1), default=1, metavar="N", help="machines of the ranks (default 1)")
    link = "rate of a rank's link in its node, and to other nodes (default 450 50)"
    add("--link-rate", type=above_zero(1e6), nargs="+", default=[450.0, 50.0], metavar="GB/S", help=link)
    memory = "rate at which a device reads its memory (default 4800)"
    add("--memory-rate", type=above_zero(1e6), default=4800.0, metavar="GB/S", help=memory)
    add("--tokens", type=at_least(1), default=128, metavar="N", help="of a rank in a step between ranks (default 128)")
    add("--json", action="store_true", help="print JSON")


def parse_size(text: str) -> int:
    found = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([a-z]*)\s*", text.lower())
    unit = "" if found is None else found[2] or ("gb" if float(found[1]) < BARE else "b")
    if found is None or unit not in UNITS or float(found[1]) <= 0:
        raise ValueError(f"--memory {text!r} is not a size; write it as 141GB or 80GiB")
    return int(float(found[1]) * UNITS[unit])


def run(options: argparse.Namespace) -> int:
    sizes = [gb * 10**9 for gb in COMMON_MEMORY] if options.memory is None else [parse_size(options.memory)]
    folder = locate(bundled.folder() if options.model is None else configs(options.model, "dummy"), weights=False)
    config = read_config(folder, kv_cache_dtype=options.kv_cache_dtype, state_dtype=options.state_dtype)
    config = with_stored_dtype(config, folder)
    config = planning.quantized(config, options.quantization)
    dtype = config.dtype if options.dtype == "auto" else options.dtype
    on_disk = _on_disk(folder, config)
    if dtype == "float32" and planning.kept(config) is not config:
        from anabranch import kernels, ops, platforms  # with torch, which takes seconds

        kernels.bind(platforms.current())
        config = planning.kept(config) if ops.linear.has_trait("bf16") else config
    if len(options.link_rate) > 2:
        raise ValueError("--link-rate takes one rate or two: inside a node, and between nodes")
    division = plan_ranks.Division(
        tensor=options.tensor_parallel_size,
        data=options.data_parallel_size,
        expert_parallel=options.expert_parallel,
        nodes=options.nodes,
    )
    plans = [
        planning.plan_memory(
            division.of_a_rank(config),
            size,
            fraction=options.memory_fraction,
            dtype=dtype,
            page_size=options.page_size,
            captured_tokens=min(batch_tokens(size) // 2, config.max_position),
            weights=sum(plan_ranks.weight_bytes(config, division, dtype).values()),
        )
        for size in sizes
    ]
    if options.json:
        found = _as_json(config, dtype, plans, on_disk)
        if division.num_ranks > 1:
            found["rank"] = _step(config, division, dtype, options)
        print(json.dumps(found, indent=1))
    else:
        print("\n".join(_as_text(config, dtype, plans, on_disk)))
        if division.num_ranks > 1:
            print("\n".join(_ranks_as_text(config, division, options, _step(config, division, dtype, options))))
    return 0


def _step(
    config: ModelConfig, division: plan_ranks.Division, dtype: str, options: argparse.Namespace
) -> dict[str, Any]:
    """What a rank has, and a step of `--tokens` tokens, each of another request."""
    rates = options.link_rate[0] * 1e9, options.link_rate[-1] * 1e9
    calls = plan_ranks.collectives(config, division, dtype, options.tokens, options.tokens)
    read = plan_ranks.read_bytes(config, division, dtype, options.tokens)
    kept = {True: 0, False: 0}  # bytes per token, and per request
    for group in division.of_a_rank(config).cache_groups:
        kept[group.policy.per_token] += group.num_values * ITEM_BYTES[group.spec.dtype or dtype]
    return {
        "weights": plan_ranks.weight_bytes(config, division, dtype),
        "kv_bytes_per_token": kept[True],
        "state_bytes_per_request": kept[False],
        "collectives": [
            {
                "name": call.name,
                "of": call.what,
                "count": call.count,
                "bytes": call.num_bytes,
                "sent_bytes": round(call.count * call.link_bytes(call.among(division).num_ranks)),
                "seconds": call.seconds(division, rates),
            }
            for call in calls
        ],
        "link_seconds": sum(call.seconds(division, rates) for call in calls),
        "read_bytes": read,
        "read_seconds": read / options.memory_rate / 1e9,
    }


def _ranks_as_text(
    config: ModelConfig, division: plan_ranks.Division, options: argparse.Namespace, step: dict[str, Any]
) -> list[str]:
    of = f"of {division.data} engines " if division.tensor > 1 else ""
    how = f"{of}with requests of their own, " if division.data > 1 else ""
    how += "whole experts" if division.expert_parallel else "a part of each expert"
    nodes = f" on {division.nodes} nodes" if division.nodes > 1 else ""
    lines = ["", f"each of {division.num_ranks} ranks{nodes}, {how} (memory and requests above are of one rank)"]
    parts = ", ".join(f"{kind} {size / 1e9:.3f}" for kind, size in step["weights"].items() if size)
    lines += [f"  weights: {sum(step['weights'].values()) / 1e9:.3f} GB ({parts})"]
    states = f", states: {step['state_bytes_per_request']:,} per request" if step["state_bytes_per_request"] else ""
    lines += [f"  KV: {step['kv_bytes_per_token']:,} bytes per token{states}", ""]
    lines += [
        f"a step of {options.tokens} tokens{' of each engine' if division.data > 1 else ''}, each of another request"
    ]
    lines += [f"  {'collective':<40}{'calls':>7}{'bytes':>14}{'MB sent':>10}{'ms':>9}"]
    for call in step["collectives"]:
        title = f"{call['name']}: {call['of']}"
        sent, ms = call["sent_bytes"] / 1e6, call["seconds"] * 1e3
        lines.append(f"  {title:<40}{call['count']:>7}{call['bytes']:>14,}{sent:>10.2f}{ms:>9.3f}")
    total = step["link_seconds"] + step["read_seconds"]
    links = " and ".join(f"{rate:g}" for rate in options.link_rate[: min(2, division.nodes)])
    lines += [
        f"  links ({links} GB/s): {step['link_seconds'] * 1e3:.3f} ms; weights read ({step['read_bytes'] / 1e9:.2f} GB "
        f"at {options.memory_rate:g} GB/s): {step['read_seconds'] * 1e3:.3f} ms; together {total * 1e3:.3f} ms",
        "  (bytes over rates: no latencies, contention, overlap, attention or computation)",
    ]
    return lines


def _on_disk(folder: Path, config: ModelConfig) -> tuple[int, int] | None:
    """(bytes, files) of the checkpoint; None if there is only a config."""
    if not any(folder.glob("*.safetensors*")):
        return None
    checkpoint = read_checkpoint(folder, quantized=bool(config.sources))
    return checkpoint.num_bytes, len(checkpoint.files)


def contexts(config: ModelConfig) -> list[int]:
    lengths = [length for length in (2048, 8192, 32768, 131072) if length < config.max_position]
    return [*lengths, config.max_position]


def _as_text(
    config: ModelConfig, dtype: str, plans: list[planning.MemoryPlan], on_disk: tuple[int, int] | None
) -> list[str]:
    counts, num_bytes = planning.count_weights(config), planning.weight_bytes(config, dtype)
    total = sum(counts.values())
    moe = next((layer.moe for layer in config.layers if layer.moe is not None), None)
    experts = f", {moe.num_experts} experts, {moe.top_k} per token" if moe else ""
    lines = [f"{config.model_type}: {len(config.layers)} layers, hidden size {config.hidden_size}{experts}", ""]
    numbers = dtype if config.quantization == "none" else f"{dtype}, {config.quantization}"
    lines += [f"{'weights (' + numbers + ')':<24}{'parameters':>16}{'GB':>10}{'share':>9}"]
    for kind, count in counts.items():
        if count:
            lines.append(f"  {kind:<22}{count:>16,}{num_bytes[kind] / 1e9:>10.3f}{count / total:>9.1%}")
    lines.append(f"  {'total':<22}{total:>16,}{sum(num_bytes.values()) / 1e9:>10.3f}")
    lines.append(f"  {'active per token':<22}{planning.count_active(config):>16,}")
    if on_disk is not None:
        lines.append(f"  on disk: {on_disk[0] / 1e9:.3f} GB in {on_disk[1]} file{'s' if on_disk[1] > 1 else ''}")
    lines += ["", "KV cache"]
    for group in config.cache_groups:
        sizes = " + ".join(" × ".join(map(str, shape)) for shape in group.spec.shapes)
        per, kept = ("token" if group.policy.per_token else "request"), group.policy.num_kept(config.max_position)
        window = f", the last {kept:,} tokens" if group.policy.slides else ""
        size = group.num_values * ITEM_BYTES[group.spec.dtype or dtype]
        stored = f", {group.spec.dtype}" if group.spec.dtype else ""
        lines.append(f"  {size:,} bytes per {per}: {len(group.layers)} layers × ({sizes}){stored}{window}")
    lines += ["", f"{'memory':>10}{'for KV':>12}" + "".join(f"{f'{n:,} tokens':>16}" for n in contexts(config))]
    for plan in plans:
        cells = "".join(f"{f'{plan.concurrency(n):,}':>16}" for n in contexts(config))
        if not plan.fits:
            cells = f"   does not fit: {-plan.kv / 1e9:.1f} GB short"
        kv = f"{max(0, plan.kv) / 1e9:.1f} GB"
        lines.append(f"{f'{plan.total / 1e9:.0f} GB':>10}{kv:>12}{cells}")
    lines += [
        "  (requests of that many tokens at the same time, "
        f"in {plans[0].usable / plans[0].total:.0%} of the memory, after {plans[0].weights / 1e9:.1f} GB of weights "
        f"and {plans[0].workspace / 1e9:.1f} GB that steps of `serve` need)"
    ]
    if len(plans) == 1 and plans[0].fits:
        lines.append(f"  largest context of a single request: {plans[0].largest_context():,} tokens")
    return lines


def _as_json(
    config: ModelConfig, dtype: str, plans: list[planning.MemoryPlan], on_disk: tuple[int, int] | None
) -> dict[str, Any]:
    return {
        "model_type": config.model_type,
        "dtype": dtype,
        "quantization": config.quantization,
        "weights": planning.weight_bytes(config, dtype),
        "active_parameters": planning.count_active(config),
        "on_disk_bytes": on_disk[0] if on_disk else None,
        "kv_bytes_per_token": [
            {
                "bytes": group.num_values * ITEM_BYTES[group.spec.dtype or dtype],
                "layers": len(group.layers),
                "window": group.policy.num_kept(config.max_position) if group.policy.slides else 0,
            }
            for group in config.cache_groups
        ],
        "memory": [
            {
                "total": plan.total,
                "kv": plan.kv,
                "fits": plan.fits,
                "largest_context": plan.largest_context() if plan.fits else 0,
                "concurrency": {str(length): plan.concurrency(length) for length in contexts(config)},
            }
            for plan in plans
        ],
    }
