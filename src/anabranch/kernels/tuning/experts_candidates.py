"""Tiles of the experts' kernels that the tuner times, for each number of tokens: those that were fastest somewhere.

Nothing here uses a device. The list is short because each entry is a pair of kernels to compile. A device with other
needs gets its tiles by adding a line here; benchmarks/results/experts_h200.json has the times it was made from.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from anabranch.formats import PLAIN
from anabranch.kernels.tuning.experts_tiles import (
    CHUNK,
    MATCH_TOKENS,
    SMALL_TOKENS,
    GroupedTiles,
    HopperTiles,
    Machine,
    PackedTiles,
    Shape,
    Tile,
    Tiles,
    adapt,
    choose,
    choose_small,
    fit,
)
from anabranch.kernels.tuning.search import Search


def searches(num_tokens: int, shape: Shape, machine: Machine, full: bool = False) -> list[Search[Tiles]]:
    """The searches for one number of tokens, the rule's own choice first; with `full`, rare winners too."""
    rule = choose(num_tokens, shape, machine=machine)
    found = [*small_searches(num_tokens, shape, full)]
    rows_per_expert = num_tokens * shape.top_k / shape.num_experts
    if shape.format != PLAIN.name:
        if isinstance(rule, HopperTiles):
            found += fp8_searches(rule)
        if isinstance(rule, PackedTiles):
            found += packed_searches(rule, shape)
        portable = choose(num_tokens, shape, machine=replace(machine, hopper=False))
        if isinstance(portable, GroupedTiles) and (rule == portable or num_tokens <= 64):
            found += quantized_searches(portable, shape, machine, full)
    elif shape.dtype != torch.float32:
        found += grouped_searches(num_tokens, rows_per_expert, shape.dtype, machine, full)
        if machine.hopper:
            found += hopper_searches(num_tokens, rows_per_expert, full)
    if full and isinstance(rule, GroupedTiles) and shape.top_k > 2:
        found.append(Search(replace(rule, add=True)))
    return [Search(rule), *found]


def searches_of(
    sizes: Sequence[int], shape: Shape, machine: Machine, full: bool = False
) -> dict[int, list[Search[Tiles]]]:
    """The searches for several numbers of tokens. What the rule gives between two of them is timed at both: a table
    can only compare what was."""
    found = {size: searches(size, shape, machine, full) for size in sizes}
    for low, high in itertools.pairwise(sorted(found)):
        for size, between in ((low, high - 1), (high, low + 1)):
            tiles = adapt(choose(between, shape, machine=machine), size, "fastest", machine)
            found[size] += [] if tiles is None else [Search(tiles)]
    return found


def small_searches(num_tokens: int, shape: Shape, full: bool) -> Iterator[Search[Tiles]]:
    small = choose_small(shape)
    if small is None or num_tokens > (4 if full else 2) * SMALL_TOKENS:
        return
    gates = [{"gate_rows": 4, "gate_warps": 8}, {"gate_rows": 2, "gate_warps": 4}]
    if full:
        gates += [{"gate_rows": 2, "gate_warps": 2}, {"gate_rows": 4, "gate_warps": 4}]
    chunks = -(-shape.inner // CHUNK)
    downs: list[dict[str, int]] = []
    if small.by_token:
        downs += [{"ahead": ahead} for ahead in sorted({min(shape.top_k, max(1, n // chunks)) for n in (6, 9, 12)})]
        if full:
            downs += [{"down_columns": 2, "down_warps": 2}]
    yield Search(small, (tuple(gates), tuple(downs)))
    if full and num_tokens > 1:
        yield Search(replace(small, gate_rows=4, gate_warps=4, share=True))


def grouped_searches(
    num_tokens: int, rows_per_expert: float, dtype: torch.dtype, machine: Machine, full: bool
) -> Iterator[Search[Tiles]]:
    """Portable kernels; on Hopper, experts_hopper is faster from about a thousand tokens on."""
    if num_tokens < 4 or (machine.hopper and num_tokens > (512 if full else 256)):
        return
    swap = machine.hopper
    if num_tokens <= 64 or rows_per_expert <= 96:
        all_rows = [16] if num_tokens <= 64 else [32, 64]
        gates = [Tile(64, 64, 4, 5, swap), Tile(32, 128, 4, 4, swap), Tile(64, 128, 4, 3, swap)]
        downs = [Tile(128, 64, 4, 5, swap), Tile(64, 64, 4, 6, swap), Tile(128, 64, 4, 4, swap)]
    else:
        all_rows = [64, 128]
        gates = [Tile(128, 64, 8, 3, group=8), Tile(128, 64, 4, 4, group=4), Tile(64, 64, 4, 4, group=8)]
        downs = [Tile(256, 64, 8, 3, group=8), Tile(128, 64, 8, 3, group=8), Tile(128, 64, 4, 4, group=4)]
    for rows in all_rows if full or rows_per_expert > 16 else all_rows[:1]:
        base = fit(GroupedTiles(rows, gates[0], downs[0], match=num_tokens <= MATCH_TOKENS), dtype, machine)
        yield Search(
            base,
            (
                tuple({"gate_up": fit(replace(base, gate_up=tile), dtype, machine).gate_up} for tile in gates[1:]),
                tuple({"down": fit(replace(base, down=tile), dtype, machine).down} for tile in downs[1:]),
            ),
        )


def quantized_searches(rule: GroupedTiles, shape: Shape, machine: Machine, full: bool) -> Iterator[Search[Tiles]]:
    """The rule's tiles with other columns, stages and operands; their depth is given by the format."""

    def others(tile: Tile) -> list[Tile]:
        found = [replace(tile, columns=columns) for columns in (32, 64, 128)]
        found += [replace(tile, columns=128, warps=8, stages=3), replace(tile, columns=64, swap=machine.wgmma)]
        return [new for new in dict.fromkeys(found) if new != tile]

    def fitted(rows: int, **changed: Tile) -> GroupedTiles:
        return fit(replace(rule, rows=rows, **changed), shape.dtype, machine)  # type: ignore[arg-type]

    for rows in sorted({rule.rows, *((16, 32, 64) if full and not rule.match else ())}):
        gates = tuple({"gate_up": fitted(rows, gate_up=tile).gate_up} for tile in others(rule.gate_up))
        downs = tuple({"down": fitted(rows, down=tile).down} for tile in others(rule.down))
        yield Search(fitted(rows), (gates, downs))


def fp8_searches(rule: HopperTiles) -> Iterator[Search[Tiles]]:
    """experts_hopper_fp8: other numbers of rows that pass through all columns together."""
    gate_ups = tuple({"gate_up": replace(rule.gate_up, group=group)} for group in (2, 8))
    yield Search(rule, (gate_ups, tuple({"down": replace(rule.down, group=group)} for group in (2, 8))))


def packed_searches(rule: PackedTiles, shape: Shape) -> Iterator[Search[Tiles]]:
    """experts_hopper_packed: tiles of other sizes."""
    most = [(128, 4)] if shape.format.startswith("fp4") and rule.rows > 32 else []
    for rows, stages in ((32, 6), (64, 5), *most):
        yield Search(PackedTiles(rows, stages), (tuple({"group": group} for group in (4,) if rule.rows > 32),))
    for rows, stages in ((16, 8), (32, 6)) if rule.rows <= 32 else ():
        yield Search(PackedTiles(rows, stages, split=True))


def hopper_searches(num_tokens: int, rows_per_expert: float, full: bool) -> Iterator[Search[Tiles]]:
    def search(base: HopperTiles, bands: bool) -> Search[Tiles]:
        """With `bands`, also other numbers of rows that pass through all columns together."""
        groups = ((2, 4, 8) if full else (2, 4)) if bands else ()
        gate_ups = tuple({"gate_up": replace(base.gate_up, group=group)} for group in groups)
        return Search(base, (gate_ups, tuple({"down": replace(base.down, group=group)} for group in groups)))

    if num_tokens >= 32 and rows_per_expert <= 64:
        yield Search(HopperTiles(1, 1, 1, Tile(64, 64, 4, 8), Tile(128, 64, 4, 8)))
    if num_tokens < 128:
        return
    narrow, wide = Tile(64, 64, 4, 6, group=4), Tile(128, 64, 4, 6, group=4)
    yield search(HopperTiles(2, 2, 1, narrow, wide), full)
    gate_up, down = Tile(128, 64, 4, 4, group=4), Tile(256, 64, 4, 4, group=4)
    yield search(HopperTiles(2, 2, 1, gate_up, down), num_tokens >= 512)
    if rows_per_expert >= 48:
        yield search(HopperTiles(2, 2, 1, replace(gate_up, group=2), replace(down, group=2), extra=16), full)
    if rows_per_expert >= 128:
        yield search(HopperTiles(2, 4, 1, Tile(64, 64, 4, 4, group=2), Tile(128, 64, 4, 4, group=2)), full)
