"""Tiles of the attention kernels, and the rule that chooses them for a shape. Nothing here uses a device.

D head dim, E that of values; BN keys in a block, BM rows (tokens × heads that share keys) of a program.

`decode_override` and `prefill_override` replace the choice for all calls, for benchmarks/attention_sweep.py.
"""

from dataclasses import dataclass, replace
from typing import ClassVar, TypeVar

import torch

from anabranch.kernels.tuning.experts_tiles import Machine


@dataclass(frozen=True, slots=True)
class DecodeTile:
    """attention_decode; `keys` is BN."""

    keys: int
    warps: int
    stages: int
    swap: bool = False
    """Keys are the rows of the products, so that 64 of them fill Hopper's matrix unit; heads are its narrow side."""
    programs: int = 2
    """Pieces of work per multiprocessor."""
    fetch: bool = False
    """The first keys are prefetched to L2 while the previous kernel still runs."""


@dataclass(frozen=True, slots=True)
class PrefillTile:
    """attention_prefill; `rows` is BM, `keys` is BN."""

    rows: int
    keys: int
    warps: int
    stages: int


@dataclass(frozen=True, slots=True)
class HopperTile:
    """attention_hopper: 128 rows, two warpgroups; `keys` is BN."""

    keys: int
    stages: int
    rows: ClassVar[int] = 128


HOPPER_ROWS = 16_384
"""Tokens × query heads from which on attention_hopper is chosen for D <= 128; 0: never. On an H200 it is 1.2 times as
fast at 16,384 and 32,768 rows, 1.4 times with 8,192 keys, and slower at 8,192 rows; at D = 256 it was no faster before
it copied pages."""

FEW_PAIRS = 16
"""Requests × key-value heads up to which attention_decode takes larger blocks of keys: a wave is never full."""

decode_override: DecodeTile | None = None
prefill_override: PrefillTile | HopperTile | None = None


def choose_decode(num_pairs: int, D: int, dtype: torch.dtype, machine: Machine, fp8: bool = False) -> DecodeTile:
    """`num_pairs`: requests × key-value heads; `fp8`: pages in FP8. The matrix unit takes these, converted, from
    registers: with keys as its rows, values would be loaded to registers too, and not ahead of their use."""
    swap = machine.wgmma and not fp8
    if dtype == torch.float32:  # exact products do not use the matrix unit
        tile = DecodeTile(16, 4, 2)
    elif D <= 128 and machine.wgmma and num_pairs <= FEW_PAIRS:
        tile = DecodeTile(128, 4, 2 if swap else 3, swap=swap, programs=1)
    elif D <= 128:
        tile = DecodeTile(128 if D <= 64 else 64, 4, 4 if fp8 else 3, swap=swap)
    elif D <= 256:
        tile = DecodeTile(32, 4, 4)
    else:
        tile = DecodeTile(32, 4, 3, programs=1)
    return fit(tile, D, dtype, machine)


def parts(D: int, tail: int = 64) -> tuple[int, int]:
    """The powers of two that a head dim is read in: 192 as 128 and 64, others as one, rounded up."""
    main = max(16, 1 << (D - 1).bit_length())
    return (main // 2, tail) if 0 < tail < main // 2 == D - tail else (main, 0)


def choose_prefill(
    num_rows: int, D: int, dtype: torch.dtype, machine: Machine, page: int = 16, E: int = 0
) -> PrefillTile | HopperTile:
    """`num_rows`: tokens × query heads of the step; `page` and `E`: see `fits`."""
    hopper = HopperTile(128, 2)
    if D <= 128 and E in (0, D) and 0 < HOPPER_ROWS <= num_rows and fits(hopper, D, dtype, machine, page):
        return hopper
    few = num_rows < 128 * machine.processors  # with blocks of 128 rows some multiprocessors would have none
    if dtype == torch.float32:
        tile = PrefillTile(32, 32, 4, 2) if D <= 128 else PrefillTile(16, 16, 4, 2)
    elif D <= 128 or (D <= 192 and 0 < E <= 128):
        tile = PrefillTile(64, 64, 4, 3) if few else PrefillTile(128, 128 if D <= 64 else 64, 8, 3)
    elif D <= 256:
        tile = PrefillTile(64, 32, 4, 3) if few else PrefillTile(128, 64, 8, 2)
    else:
        tile = PrefillTile(64, 32, 8, 2)
    return fit(tile, D, dtype, machine, E)


def fits(
    tile: DecodeTile | PrefillTile | HopperTile,
    D: int,
    dtype: torch.dtype,
    machine: Machine,
    page: int = 16,
    E: int = 0,
) -> bool:
    """Whether there is enough shared memory (queries, keys and values of each stage, and a little more), and pages are
    as it needs them. `page`: slots of a page, 0 where they are not contiguous; `E`: 0 where it is D."""
    if isinstance(tile, HopperTile):
        num_bytes = (128 + 2 * tile.stages * tile.keys + 64) * D * dtype.itemsize + 512
        usable = machine.hopper and D in (64, 128, 256) and dtype.itemsize == 2
        copied = page > 0 and page % 8 == 0 and tile.keys % page == 0
        return usable and copied and num_bytes <= machine.shared_bytes
    if isinstance(tile, PrefillTile):
        rows, direct = tile.rows, tile.rows >= 64
    else:
        rows, direct = 48, tile.swap
    # Hopper's matrix unit reads a stage while the next ones are filled; others copy it to registers before.
    buffers = tile.stages if machine.wgmma and direct else tile.stages - 1
    width = sum(parts(D, 64 if E else 0))
    both = width + sum(parts(E or D, 0))
    return (buffers * tile.keys * both + rows * width) * dtype.itemsize + (4 << 10) <= machine.shared_bytes


T = TypeVar("T", DecodeTile, PrefillTile)


def fit(tile: T, D: int, dtype: torch.dtype, machine: Machine, E: int = 0) -> T:
    """Fewer stages, then fewer keys, then fewer rows, until it fits."""
    while not fits(tile, D, dtype, machine, E=E):
        if tile.stages > 2:
            tile = replace(tile, stages=tile.stages - 1)
        elif tile.keys > 16:
            tile = replace(tile, keys=tile.keys // 2)
            if isinstance(tile, DecodeTile):
                tile = replace(tile, swap=False)
        elif isinstance(tile, PrefillTile) and tile.rows > 16:
            tile = replace(tile, rows=tile.rows // 2, warps=4)
        else:
            return replace(tile, stages=1)
    return tile
