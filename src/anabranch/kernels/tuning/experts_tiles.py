"""Tiles of the experts' kernels: what can be chosen, and what is chosen for a shape when nothing was measured.

D hidden width, I expert width (`inner`), K experts per token, E experts. Nothing here uses a device.

The rule was made from sweeps on an H200 with the shapes of Qwen3-30B-A3B, Gemma-4-26B-A4B and Qwen1.5-MoE-A2.7B
(benchmarks/results/experts_h200.json).
"""

import math
from dataclasses import dataclass, replace

import torch

from anabranch.formats import PLAIN, Format, Grouped, named

MANY = 1 << 16
"""As a group of tiles: all of them."""
CHUNK = 256
"""Elements that a warp of experts_small loads at once: 16 bytes a thread at two bytes an element."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What tiles are chosen and tuned for."""

    num_experts: int
    D: int
    inner: int
    top_k: int
    dtype: torch.dtype
    format: str = PLAIN.name
    """Of the weights."""


@dataclass(frozen=True, slots=True)
class Machine:
    """What the choice of tiles depends on besides the shape. The defaults hold for any GPU, and the interpreter."""

    shared_bytes: int = 64 << 10
    """Shared memory that one program may have."""
    processors: int = 64
    wgmma: bool = False
    """Hopper's matrix unit, which needs 64 rows and reads them from shared memory."""
    hopper: bool = False
    """The Gluon kernels for Hopper run here."""
    fixed: bool = False
    """What a row gives must not depend on how many there are: see kernels.bind."""


PORTABLE = Machine()


@dataclass(frozen=True, slots=True)
class SmallTiles:
    """experts_small: how many weight rows a program owns, and its warps."""

    gate_rows: int = 4
    gate_warps: int = 8
    down_columns: int = 4
    down_warps: int = 4
    by_token: bool = True
    """The down kernel sums a token's experts in registers; else it writes rows."""
    share: bool = False
    """Tokens that share an expert read its weights once."""
    ahead: int = 3
    """Experts whose down weights are fetched while the gate/up kernel still runs."""


@dataclass(frozen=True, slots=True)
class Tile:
    """One grouped product."""

    columns: int
    """BN; the gate/up product has as many gate columns as up columns."""
    depth: int
    """BK."""
    warps: int
    stages: int
    swap: bool = False
    group: int = MANY
    """Tiles of rows that pass through all columns together."""


@dataclass(frozen=True, slots=True)
class GroupedTiles:
    """experts_grouped: rows of a tile are the same for both products, since one plan serves both."""

    rows: int
    gate_up: Tile
    down: Tile
    match: bool = False
    """No plan: at most `rows` tokens, and every expert reads all of them."""
    add: bool = False
    """The down kernel adds into the token's row (combine mode `fused`); else it writes rows."""


@dataclass(frozen=True, slots=True)
class HopperTiles:
    """experts_hopper."""

    groups: int
    """Warpgroups that multiply: 1 or 2."""
    slabs: int
    """64 rows each; a warpgroup takes one or two."""
    programs: int
    """Per multiprocessor."""
    gate_up: Tile
    down: Tile
    extra: int = 0
    """Rows that a tile may hold beyond its slabs: 0 or 16, the latter with two warpgroups of one slab each."""
    add: bool = False
    """As in GroupedTiles."""


@dataclass(frozen=True, slots=True)
class PackedTiles:
    """experts_hopper_packed."""

    rows: int
    """Tokens of a tile: 32 or 64, of MXFP4 also 128; with `split` 16 or 32."""
    stages: int
    group: int = 1
    """As in Tile."""
    split: bool = False
    """Activations are multiplied in two parts by the matrix unit for FP8: see experts_hopper_split."""


@dataclass(frozen=True, slots=True)
class FewTiles:
    """experts_few."""

    gate_warps: int
    """Parts of the inputs of a gate/up program."""
    down_parts: int
    """The same of an expert's inputs in a down program."""


Tiles = SmallTiles | GroupedTiles | HopperTiles | PackedTiles | FewTiles

SMALL_TOKENS = 8
"""Up to this many experts_small is fastest."""
QUANTIZED_SMALL_TOKENS = 2
"""The same for quantised weights."""
MATCH_TOKENS = 16
"""Up to this many a plan costs more than computing rows that are not used."""
MOST_SMALL_TOKENS = 64
"""Beyond, experts_small is slow."""
HOPPER_TOKENS = 64
"""Above, experts_hopper is at least as fast as experts_grouped."""
HOPPER_FP8_TOKENS = 8
"""Likewise experts_hopper_fp8."""
PACKED_TOKENS = {"int4": 8, "fp4": 2}
"""Likewise experts_hopper_packed, for kinds of numbers."""
FEW_TOKENS = {"fp8": 8, "int4": 8, "fp4": 4}
"""Up to this many experts_few is fastest, where it serves."""
LEAST_COLUMNS = 16
MOST_CHUNKS = 12
"""Of 64 bytes of 16 rows, which a warp of experts_few has at once."""


def padded_tokens(num_tokens: int) -> int:
    """Tokens for which a call is planned: as many, or up to a quarter more (a few more where they are few). So kernels
    change at few sizes, and a start can go through all of them."""
    step = max(8, (1 << (num_tokens - 1).bit_length()) // 8)
    return num_tokens if num_tokens <= SMALL_TOKENS else -(-num_tokens // step) * step


def choose(num_tokens: int, shape: Shape, combine: str = "fastest", machine: Machine = PORTABLE) -> Tiles:
    """The tiles for one call."""
    format = named(shape.format)
    if machine.fixed:
        return choose_fixed(num_tokens, shape, format, machine)
    few = choose_few(shape) if machine.hopper and combine != "unfused" else None
    if few is not None and isinstance(format, Grouped) and num_tokens <= FEW_TOKENS[format.numbers]:
        return few
    # Converting quantised weights is work: from a few tokens on, it is faster to do it once for all of them.
    if num_tokens <= (QUANTIZED_SMALL_TOKENS if isinstance(format, Grouped) else SMALL_TOKENS):
        small = choose_small(shape)
        if small is not None:
            return replace(small, by_token=False) if combine == "unfused" else small
    rows_per_expert = num_tokens * shape.top_k / shape.num_experts
    if machine.hopper and format is PLAIN and num_tokens > HOPPER_TOKENS:
        return replace(choose_hopper(rows_per_expert, shape.inner), add=combine == "fused")
    if machine.hopper and combine != "fused":
        if format.is_block_fp8 and num_tokens > HOPPER_FP8_TOKENS:
            return HopperTiles(2, 2, 1, Tile(128, 128, 4, 4, group=4), Tile(256, 128, 4, 4, group=4))
        if isinstance(format, Grouped) and is_packed(format) and num_tokens > PACKED_TOKENS[format.numbers]:
            return choose_packed(rows_per_expert, format)
    if isinstance(format, Grouped):
        tiles = fit(choose_quantized(num_tokens, rows_per_expert, shape, format), shape.dtype, machine)
    else:
        tiles = choose_grouped(num_tokens, rows_per_expert, shape.dtype, machine)
    # Adding into tokens' rows by atomics was slower at every size measured, so `fastest` never does.
    return replace(tiles, add=combine == "fused")


def choose_fixed(num_tokens: int, shape: Shape, format: Format, machine: Machine) -> Tiles:
    """Of those that add up inputs in the same order. Hopper has two matrix units, of which one takes 64 rows and more,
    of tokens or (swapped) of weights: it must do all or nothing. Elsewhere one tile serves all numbers of tokens."""
    if isinstance(format, Grouped):
        return fit(choose_quantized(MANY, 64, shape, format), shape.dtype, machine)
    if not machine.hopper or shape.dtype == torch.float32:
        return choose_grouped(MANY, 64, shape.dtype, machine)
    rows_per_expert = num_tokens * shape.top_k / shape.num_experts
    if num_tokens > HOPPER_TOKENS:
        return replace(choose_hopper(rows_per_expert, shape.inner), extra=0)
    return replace(choose_grouped(num_tokens, rows_per_expert, shape.dtype, machine), match=False)


def choose_small(shape: Shape) -> SmallTiles | None:
    """None where the weights of a program would not fit in its registers."""
    format = named(shape.format)
    size = format.bits / 8 if isinstance(format, Grouped) else shape.dtype.itemsize
    chunks_D, chunks_I = (max(1, math.ceil(width / CHUNK * size / 2)) for width in (shape.D, shape.inner))
    if chunks_D > 32 or chunks_I > 16:
        return None
    rows, warps = (4, 8) if shape.D <= 2048 else (2, 4)
    if isinstance(format, Grouped):  # more rows, so that as many bytes are in flight
        rows *= 16 // format.bits // (2 if format.bits == 4 else 1)
    if shape.top_k * chunks_I > 32:
        return SmallTiles(rows, warps, 8, 8, by_token=False)
    return SmallTiles(rows, warps, ahead=min(shape.top_k, max(1, 10 // chunks_I)))


def choose_few(shape: Shape) -> FewTiles | None:
    """None where a program would have more than eight warps, or a warp more than its registers hold."""
    format, experts = named(shape.format), 1 << (shape.top_k - 1).bit_length()
    if not isinstance(format, Grouped) or format.zero or shape.dtype != torch.bfloat16 or experts > 8:
        return None
    if not is_packed(format) and not (format.is_block_fp8 and format.scale != "uint8"):
        return None
    chunks_D, chunks_I = (-(-width * format.bits // 512) for width in (shape.D, shape.inner))
    warps = 4 if chunks_D <= 4 * MOST_CHUNKS else 8
    fits = max(-(-chunks_D // warps), -(-chunks_I * experts // 8)) <= MOST_CHUNKS
    return FewTiles(warps, 8 // experts) if fits else None


def choose_hopper(rows_per_expert: float, inner: int) -> HopperTiles:
    if rows_per_expert <= 8:
        return HopperTiles(1, 1, 1, Tile(64, 64, 4, 8), Tile(128, 64, 4, 8))
    whole = inner % 128 == 0
    if rows_per_expert <= 96 and not whole:
        return HopperTiles(2, 2, 1, Tile(64, 64, 4, 6, group=4), Tile(128, 64, 4, 6, group=4))
    if rows_per_expert <= 96 or not whole:
        return HopperTiles(2, 2, 1, Tile(128, 64, 4, 4, group=4), Tile(256, 64, 4, 4, group=4))
    # From about 128 rows on, half the experts would have a last tile with a few rows.
    return HopperTiles(2, 2, 1, Tile(128, 64, 4, 4, group=2), Tile(256, 64, 4, 4, group=2), extra=16)


def is_packed(format: Format) -> bool:
    """Whether experts_hopper_packed multiplies weights of this format."""
    if not isinstance(format, Grouped):
        return False
    mxfp4 = (format.numbers, format.rows, format.group, format.scale) == ("fp4", 1, 32, "uint8")
    return mxfp4 or (format.numbers, format.rows, format.group) == ("int4", 1, 128)


def choose_packed(rows_per_expert: float, format: Grouped) -> PackedTiles:
    if rows_per_expert <= 8:
        return PackedTiles(16, 8, split=True)
    if format.numbers == "fp4" and rows_per_expert > 64:  # INT4 has no registers for as many
        return PackedTiles(128, 4, group=4)
    if rows_per_expert <= 24:
        return PackedTiles(32, 6, split=True)
    return PackedTiles(64, 5)


def choose_grouped(num_tokens: int, rows_per_expert: float, dtype: torch.dtype, machine: Machine) -> GroupedTiles:
    if dtype == torch.float32:  # exact products run on ordinary cores; nothing to feed
        tile = Tile(32, 32, 4, 2)
        return fit(GroupedTiles(16 if rows_per_expert <= 8 else 32, tile, tile), dtype, machine)
    if num_tokens <= 64 or rows_per_expert <= 8:
        tiles = GroupedTiles(16, Tile(64, 64, 4, 5, swap=machine.hopper), Tile(128, 64, 4, 5, swap=machine.hopper))
        return fit(replace(tiles, match=num_tokens <= MATCH_TOKENS), dtype, machine)
    if rows_per_expert <= 96:
        tile, rows = Tile(64, 64, 4, 4, swap=machine.hopper), 32 if rows_per_expert <= 24 else 64
        return fit(GroupedTiles(rows, tile, replace(tile, columns=128)), dtype, machine)
    tile = Tile(128, 64, 8, 3, group=8)
    return fit(GroupedTiles(128, tile, replace(tile, columns=256)), dtype, machine)


def choose_quantized(num_tokens: int, rows_per_expert: float, shape: Shape, format: Grouped) -> GroupedTiles:
    """A step in depth has one scale for each row, or one span of packed numbers; of MXFP4, several."""
    scaled = format.numbers == "fp4" and format.scale == "uint8" and shape.dtype != torch.float16

    def one(columns: int, inputs: int, warps: int = 4) -> Tile:
        depth = format.span(inputs) if format.bits == 4 else math.gcd(128, format.group or 128)
        if scaled:
            depth = math.gcd(64, inputs)
        if shape.dtype == torch.float32:
            columns, depth = 32, depth if format.bits == 4 else min(depth, 32)
        return Tile(columns, depth, warps, 4, group=8 if rows_per_expert > 96 else MANY)

    if num_tokens <= 64 or rows_per_expert <= 8:
        rows, columns, warps = 16, 32 if num_tokens <= 8 else 64, 4
    elif rows_per_expert <= 24:
        rows, columns, warps = 32, 64, 4
    else:
        rows, columns, warps = (64, 64, 4) if rows_per_expert <= 96 else (128, 64, 8)
    match = num_tokens <= MATCH_TOKENS
    return GroupedTiles(rows, one(columns, shape.D, warps), one(max(64, columns), shape.inner, warps), match=match)


def fit(tiles: GroupedTiles, dtype: torch.dtype, machine: Machine) -> GroupedTiles:
    """As many stages as there is shared memory for, and half the columns, or else rows, where there is not enough for
    two."""
    deepest = max(tiles.gate_up.depth, tiles.down.depth)
    if 2 * (tiles.rows + 2 * LEAST_COLUMNS) * deepest * dtype.itemsize > machine.shared_bytes:
        return fit(replace(tiles, rows=tiles.rows // 2), dtype, machine)

    def fitted(tile: Tile, operands: int) -> Tile:
        stage = (tiles.rows + operands * tile.columns) * tile.depth * dtype.itemsize
        if 2 * stage > machine.shared_bytes:
            return fitted(replace(tile, columns=tile.columns // 2), operands)
        return replace(tile, stages=min(tile.stages, machine.shared_bytes // stage))

    return replace(tiles, gate_up=fitted(tiles.gate_up, 2), down=fitted(tiles.down, 1))


def adapt(tiles: Tiles, num_tokens: int, combine: str, machine: Machine) -> Tiles | None:
    """What tiles that were measured with combine `fastest` become in a call; None if they cannot do it."""
    if isinstance(tiles, SmallTiles):
        if num_tokens > MOST_SMALL_TOKENS:
            return None
        return replace(tiles, by_token=False) if combine == "unfused" else tiles
    if isinstance(tiles, HopperTiles | PackedTiles | FewTiles) and not machine.hopper:
        return None
    if isinstance(tiles, FewTiles):
        return None if combine == "unfused" else tiles
    adds = isinstance(tiles, HopperTiles) and tiles.gate_up.depth == 64  # bf16 or fp16
    if isinstance(tiles, PackedTiles) or (isinstance(tiles, HopperTiles) and not adds):
        return tiles if combine != "fused" else None
    if tiles.add and combine not in ("fastest", "fused"):
        return None
    if isinstance(tiles, GroupedTiles) and tiles.match and num_tokens > tiles.rows:
        return None
    return replace(tiles, add=True) if combine == "fused" else tiles


def label(tiles: Tiles) -> str:
    """In a few words, for people."""

    def one(tile: Tile) -> str:
        group = "" if tile.group == MANY else f" g{tile.group}"
        return f"{tile.columns}x{tile.depth} s{tile.stages} w{tile.warps}{' swap' if tile.swap else ''}{group}"

    if isinstance(tiles, SmallTiles):
        how = ("token" if tiles.by_token else "pair") + (" share" if tiles.share else "")
        gate, down = f"{tiles.gate_rows}/{tiles.gate_warps}", f"{tiles.down_columns}/{tiles.down_warps}"
        return f"small gate {gate} down {down} ahead {tiles.ahead} {how}"
    if isinstance(tiles, HopperTiles):
        rows = f"{64 * tiles.slabs}{f'+{tiles.extra}' if tiles.extra else ''}/{tiles.groups}"
        add = " add" if tiles.add else ""
        return f"hopper {rows} p{tiles.programs}{add}: {one(tiles.gate_up)} | {one(tiles.down)}"
    if isinstance(tiles, FewTiles):
        return f"few gate {tiles.gate_warps} down {tiles.down_parts}"
    if isinstance(tiles, PackedTiles):
        return f"packed {tiles.rows} s{tiles.stages} g{tiles.group}{' split' * tiles.split}"
    how = (" match" if tiles.match else "") + (" add" if tiles.add else "")
    return f"grouped {tiles.rows}{how}: {one(tiles.gate_up)} | {one(tiles.down)}"
