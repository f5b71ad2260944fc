"""Measured tables of the experts' tiles: which one applies to a call, and how tiles are written as JSON."""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import torch
import triton

from anabranch.formats import PLAIN
from anabranch.kernels.tuning.experts_tiles import (
    MANY,
    FewTiles,
    GroupedTiles,
    HopperTiles,
    PackedTiles,
    Shape,
    SmallTiles,
    Tile,
    Tiles,
)
from anabranch.kernels.tuning.table import Facts, Table, find, hash_files

TILES_VERSION = 1
"""Raise it when a field of the tiles changes its meaning, or a kernel changes so much that shipped times mislead."""
KINDS: dict[str, type[Tiles]] = {
    "small": SmallTiles,
    "grouped": GroupedTiles,
    "hopper": HopperTiles,
    "packed": PackedTiles,
    "few": FewTiles,
}


def good_for(shape: Shape, device: torch.device) -> Facts:
    """What a table of this shape, measured on this device, applies to."""
    arch, num_processors = device_facts(device)
    sizes = {"E": shape.num_experts, "D": shape.D, "I": shape.inner, "k": shape.top_k}
    facts: dict[str, int | str] = {"op": "experts", "arch": arch, "sm": num_processors, **sizes}
    facts["dtype"] = str(shape.dtype).removeprefix("torch.")
    return facts if shape.format == PLAIN.name else {**facts, "format": shape.format}


@functools.cache
def device_facts(device: torch.device) -> tuple[str, int]:
    """(architecture, multiprocessors)."""
    properties = torch.cuda.get_device_properties(device)
    arch = f"sm_{properties.major}{properties.minor}" if torch.version.hip is None else properties.gcnArchName
    return arch, properties.multi_processor_count


def made_with() -> Facts:
    """The code that is timed, every file of the op, and the compiler."""
    return {"sources": sources(), "triton": triton.__version__}


@functools.cache
def sources() -> str:
    tuning, triton = Path(__file__).parent, Path(__file__).parents[1] / "triton"
    shared = (triton / f"{name}.py" for name in ("gated", "launch", "quantize_rows", "quantized", "split_rows"))
    return hash_files([*tuning.glob("experts*.py"), *triton.glob("experts*.py"), *shared])


class TilesCodec:
    """{"kind": "grouped", "rows": 16, "gate_up": [64, 64, 4, 5, true], "down": [...], ...}; defaults are omitted."""

    def encode(self, choice: Tiles) -> dict[str, Any]:
        written: dict[str, Any] = {"kind": next(kind for kind, cls in KINDS.items() if type(choice) is cls)}
        for field in dataclasses.fields(choice):
            value = getattr(choice, field.name)
            if isinstance(value, Tile):
                value = [value.columns, value.depth, value.warps, value.stages, value.swap, value.group]
            if value != field.default:
                written[field.name] = value
        return written

    def decode(self, written: dict[str, Any]) -> Tiles:
        values = dict(written)
        cls = KINDS.get(values.pop("kind", None))
        if cls is None:
            raise ValueError(f"not tiles: {written}")
        for field in dataclasses.fields(cls):
            if field.name in values:
                values[field.name] = self._value(field, values[field.name])
        return cls(**values)

    def _value(self, field: dataclasses.Field[Any], value: Any) -> Any:
        if field.type is Tile:
            columns, depth, warps, stages, swap, group = value
            numbers = (columns, depth, warps, group)
            if all(map(_is_power, numbers)) and type(stages) is int and 0 < stages <= 16 and type(swap) is bool:
                if 16 <= columns <= 512 and 16 <= depth <= 512 and warps <= 16 and group <= MANY:
                    return Tile(*value)
        elif field.type is bool:
            if type(value) is bool:
                return value
        elif (
            type(value) is int
            and 0 <= value <= 256
            and (_is_power(value) or field.name in ("ahead", "extra", "stages"))
        ):
            return value
        raise ValueError(f"{field.name} = {value!r}")


def _is_power(value: object) -> bool:
    return type(value) is int and value > 0 and value & (value - 1) == 0


CODEC = TilesCodec()
_installed: dict[tuple[torch.device, Shape], Table[Tiles] | None] = {}


def table_for(device: torch.device, shape: Shape) -> Table[Tiles] | None:
    """The table for this shape, read from disk once per process."""
    if (device, shape) not in _installed:
        is_gpu = device.type == "cuda"
        _installed[device, shape] = find(CODEC, good_for(shape, device), made_with(), TILES_VERSION) if is_gpu else None
    return _installed[device, shape]


def install(device: torch.device, shape: Shape, table: Table[Tiles]) -> None:
    """Use this table from now on; graphs that were captured before are not affected."""
    _installed[device, shape] = table


def forget() -> None:
    """Read tables from disk again."""
    _installed.clear()
