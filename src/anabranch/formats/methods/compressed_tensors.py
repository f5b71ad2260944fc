"""compressed-tensors: FP8 and INT8 with scales for blocks, rows or matrices, INT4 in groups, MXFP4.

Each of `config_groups` is a source; which layers belong to it is read from the headers, not from `targets` and
`ignore`. Activations stay as they are: `input_activations` is for engines that quantise them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from anabranch.formats.packed4 import MXFP4, Packed4
from anabranch.formats.scaled import Scaled
from anabranch.formats.source import Source, refuse_unknown

NAME = "compressed-tensors"
KEYS = "config_groups format sparsity_config version"
GROUP_KEYS = "format input_activations output_activations targets weights"
WEIGHTS_KEYS = """
    actorder block_structure dynamic group_size num_bits observer observer_kwargs strategy symmetric type zp_dtype
"""


def sources(config: Mapping[str, Any]) -> tuple[Source, ...]:
    match config.get("sparsity_config") or {"format": "dense"}:
        case {"format": "dense"}:
            pass
        case sparsity:
            raise ValueError(f"sparsity_config {sparsity!r} is not supported (supported: format dense)")
    groups = config.get("config_groups")
    if not groups and isinstance(config.get("kv_cache_scheme"), Mapping):
        return ()  # only the cache is quantised
    if not isinstance(groups, Mapping) or not groups:
        raise ValueError("compressed-tensors without config_groups is not supported")
    found = []
    for name, group in groups.items():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if not isinstance(weights, Mapping):
            raise ValueError(f"config_groups.{name} quantises no weights, which is not supported")
        format = group.get("format") or config.get("format")
        try:
            refuse_unknown(group, GROUP_KEYS)
            refuse_unknown(weights, WEIGHTS_KEYS)
            found.append(_source(format, weights))
        except ValueError as error:
            raise ValueError(f"config_groups.{name}: {error}") from None
    return tuple(dict.fromkeys(found))


def _source(format: Any, weights: Mapping[str, Any]) -> Source:
    kind, bits, strategy = weights.get("type"), weights.get("num_bits"), weights.get("strategy")
    if weights.get("actorder") not in (None, False, "weight", "static"):
        raise ValueError(f"actorder {weights['actorder']!r} (weights in the order of activations) is not supported")
    if format == "mxfp4-pack-quantized":
        return MXFP4(fused=False)
    if format == "pack-quantized" and (kind, bits) == ("int", 4):
        return _packed(weights)
    numbers = {"float8": "fp8", "int8": "int8"}.get(f"{kind}{bits}")
    if format not in ("float-quantized", "int-quantized", "naive-quantized") or numbers is None:
        raise ValueError(f"format {format!r} with {bits} bits of type {kind!r} is not supported")
    if not weights.get("symmetric", True):
        raise ValueError("asymmetric weights of 8 bits are not supported")
    match strategy, weights.get("block_structure"), weights.get("group_size"):
        case "tensor", _, _:
            return Scaled(numbers, 0, 0, "_scale")
        case "channel", _, _:
            return Scaled(numbers, 1, 0, "_scale")
        case "block", [int(rows), int(group)], _:
            return Scaled(numbers, rows, group, "_scale")
        case "group", _, int(group) if group > 0:
            return Scaled(numbers, 1, group, "_scale")
    raise ValueError(f"strategy {strategy!r} is not supported (supported: tensor, channel, group, block)")


def _packed(weights: Mapping[str, Any]) -> Source:
    strategy, group = weights.get("strategy"), weights.get("group_size")
    if strategy == "channel":
        group = 0
    elif strategy != "group" or not isinstance(group, int) or group <= 0:
        raise ValueError(f"strategy {strategy!r} of int4 weights is not supported (supported: group, channel)")
    return Packed4("rows", group, not weights.get("symmetric", True))
