"""Simulate a model's experts on many ranks: how unequal their loads would be, how many bytes would move.

Each rank has its own tokens and some of the experts. A layer exchanges rows by all-to-all (a token goes once to each
rank that has experts of it, and back) or by all-gather and reduce-scatter (every rank gets all tokens). Routing is
drawn: from loads that a server has measured (--load: what GET /debug/experts returned), or from a Zipf distribution.
Experts are placed in order, or by load with room for some copies of busy ones on each rank. Nothing is computed, so
neither ranks nor weights are needed; the times are bytes over the rate of a link, without latencies.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from anabranch import bundled
from anabranch.options import above_zero, at_least, between

RANKS = (8, 16, 32, 64, 128, 256, 512)
MOST_PAIRS = 1 << 26
"""Of a token and an expert, in one draw."""


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", metavar="MODEL", nargs="?", help=f"{bundled.HELP}; a config.json is enough")
    ranks = "numbers of ranks (default 8 16 32 64 128 256 512)"
    add("--ranks", type=at_least(1), nargs="+", default=RANKS, metavar="N", help=ranks)
    add("--tokens", type=at_least(1), default=128, metavar="N", help="of each rank in a step (default 128)")
    copies = "room for copies of experts on each rank, for placement by load (default 0 1 2)"
    add("--copies", type=at_least(0), nargs="+", default=[0, 1, 2], metavar="N", help=copies)
    add("--zipf", type=between(0, 4), default=0.8, metavar="S", help="exponent of the loads; 0: equal (default 0.8)")
    add("--load", type=Path, metavar="FILE", help="JSON of GET /debug/experts: measured loads, layer by layer")
    add("--link", type=above_zero(), default=50.0, metavar="GB/S", help="rate of a rank's link (default 50)")
    add("--layers", type=at_least(1), default=8, metavar="N", help="layers to average over, at most (default 8)")
    add("--seed", type=int, default=0, metavar="N", help="default 0")
    add("--json", type=Path, metavar="FILE", help="write the figures to a file")
    add("--plot", type=Path, metavar="FILE", help="draw them; needs matplotlib: pip install 'anabranch[plot]'")


def run(options: argparse.Namespace) -> int:
    from anabranch.bench import records
    from anabranch.loader.locate import locate
    from anabranch.models.config import read_config

    if options.plot is not None:
        records.pyplot()  # refuse before the work, not after it
    model = bundled.folder() if options.model is None else records.bundled(options.model, "dummy")
    config = read_config(locate(model, weights=False))
    moe = next((layer.moe for layer in config.layers if layer.moe is not None), None)
    if moe is None:
        raise ValueError(f"{config.model_type}: the model has no experts")
    num_layers = sum(layer.moe is not None for layer in config.layers)
    measured = None if options.load is None else read_load(options.load, moe.num_experts)
    for n in options.ranks:
        if n * options.tokens * moe.num_experts > MOST_PAIRS:
            raise ValueError(f"--ranks {n} --tokens {options.tokens}: too many tokens to draw; take fewer")
    source = f"loads of {options.load}" if measured else f"Zipf {options.zipf:g}"
    print(
        f"{config.model_type}: {moe.num_experts} experts, {moe.top_k} per token, hidden size {config.hidden_size}, "
        f"{num_layers} layers; {options.tokens} tokens a rank, bf16, {source}, link {options.link:g} GB/s\n"
    )
    print(f"{'':>6}  {'':<14}{'load: busiest':>14}{'all-to-all':>24}{'all-gather':>24}")
    print(f"{'ranks':>6}  {'placement':<14}{'rank / mean':>14}{'MB a layer':>13}{'ms a step':>11}{'MB a layer':>13}"
          f"{'ms a step':>11}")  # fmt: skip
    rows = []
    placements = [("in order", None), *((f"by load + {c}" if c else "by load", c) for c in options.copies)]
    for n in options.ranks:
        # With more ranks than experts every placement has copies.
        for name, copies in placements if n <= moe.num_experts else placements[1:]:
            row = simulate(moe.num_experts, moe.top_k, n, copies, num_layers, measured, options)
            # There and back, in bf16.
            to_all = 4 * config.hidden_size * row.pop("moved")
            gathered = 4 * config.hidden_size * options.tokens * (n - 1)
            row |= {"ranks": n, "placement": name, "all_to_all_bytes": to_all, "all_gather_bytes": gathered}
            rows.append(row)
            cells = (
                f"{num_bytes / 1e6:>13.2f}{num_layers * num_bytes / options.link / 1e6:>11.2f}"
                for num_bytes in (to_all, gathered)
            )
            print(f"{n:>6}  {name:<14}{row['imbalance']:>14.2f}{''.join(cells)}", flush=True)
    if options.json is not None:
        options.json.write_text(
            json.dumps({"model": config.model_type, "commit": records.commit(), "rows": rows}, indent=1) + "\n"
        )
    if options.plot is not None:
        plot(rows, options.plot)
    return 0


def read_load(file: Path, num_experts: int) -> list[list[int]]:
    try:
        found = json.loads(file.read_text())["total"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"--load {file}: not what GET /debug/experts returns ({error})") from None
    if not found or any(len(layer) != num_experts for layer in found):
        raise ValueError(f"--load {file}: not the loads of {num_experts} experts in each layer; is it of this model?")
    return [[count + 1 for count in layer] for layer in found]  # an expert without tokens may get some


def simulate(
    num_experts: int,
    top_k: int,
    num_ranks: int,
    copies: int | None,
    num_layers: int,
    measured: list[list[int]] | None,
    options: argparse.Namespace,
) -> dict[str, Any]:
    """Means over layers: imbalance, and the rows that the rank with most of them sends or receives. `copies` None: in
    order."""
    import torch

    from anabranch.parallel import placement, simulation

    generator = torch.Generator().manual_seed(options.seed)
    imbalance = moved = 0.0
    count = min(num_layers, options.layers)
    for layer in range(count):
        if measured is None:
            load_E = simulation.zipf(num_experts, options.zipf, generator)
        else:
            load_E = torch.tensor(measured[layer * len(measured) // count], dtype=torch.float64)
        expert_TK = simulation.draw_routing(load_E, num_ranks * options.tokens, top_k, generator)
        placed = placement.in_order(num_experts, num_ranks)
        if copies is not None:
            placed = placement.balanced(load_E.tolist(), num_ranks, -(-num_experts // num_ranks) + copies)
        traffic = simulation.count_traffic(expert_TK, placed, num_experts)
        imbalance += traffic.imbalance / count
        moved += max(int(traffic.sent_R.max()), int(traffic.received_R.max())) / count
    return {"imbalance": imbalance, "moved": moved}


def plot(rows: list[dict[str, Any]], file: Path) -> None:
    from anabranch.bench.records import plot_file

    with plot_file(file, 1, 2, (11, 4.5)) as axes:
        for name in dict.fromkeys(row["placement"] for row in rows):
            line = [row for row in rows if row["placement"] == name]
            ranks = [row["ranks"] for row in line]
            axes[0][0].plot(ranks, [row["imbalance"] for row in line], marker="o", label=name)
            axes[0][1].plot(
                ranks, [row["all_to_all_bytes"] / 1e6 for row in line], marker="o", label=f"all-to-all, {name}"
            )
        gathered = {row["ranks"]: row["all_gather_bytes"] / 1e6 for row in rows}
        axes[0][1].plot(gathered.keys(), gathered.values(), "k--", label="all-gather")
        for axis, label in zip(axes[0], ("load: busiest rank / mean", "MB of the busiest rank, a layer"), strict=True):
            axis.set(xscale="log", xlabel="ranks", ylabel=label)
            axis.set_xticks([*gathered], map(str, gathered))
            axis.grid(alpha=0.3)
            axis.legend()
        axes[0][1].set(yscale="log")
