"""AWQ with 4 bits: `qweight`, `scales`, `qzeros` of every layer, packed along outputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from anabranch.formats.packed4 import Packed4
from anabranch.formats.source import Source

NAME = "awq"


def sources(config: Mapping[str, Any]) -> tuple[Source, ...]:
    if config.get("bits", config.get("w_bit")) != 4:
        raise ValueError(f"bits {config.get('bits')!r} of AWQ is not supported (supported: 4)")
    if str(config.get("version", "gemm")).lower() != "gemm":
        raise ValueError(f"version {config['version']!r} of AWQ is not supported (supported: gemm)")
    group = config.get("group_size", config.get("q_group_size", 128))
    if not isinstance(group, int) or group < -1 or group == 0:
        raise ValueError(f"group_size {group!r} must be a number of inputs, or −1 for all of them")
    return (Packed4("awq", max(0, group), bool(config.get("zero_point", True))),)
