"""AWQ with 4 bits: `qweight`, `scales`, `qzeros` of every layer, packed along outputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from anabranch.formats.packed4 import Packed4
from anabranch.formats.source import Source

NAME = "awq"
KEYS = "backend bits checkpoint_format format group_size method q_group_size sym version w_bit zero_point"


def sources(config: Mapping[str, Any]) -> tuple[Source, ...]:
    if config.get("bits", config.get("w_bit")) != 4:
        raise ValueError(f"bits {config.get('bits')!r} of AWQ is not supported (supported: 4)")
    for key in ("version", "format", "checkpoint_format"):
        if str(config.get(key) or "gemm").lower() != "gemm":
            raise ValueError(f"{key} {config[key]!r} of AWQ is not supported (supported: gemm)")
    if config.get("backend") == "llm-awq":
        raise ValueError("backend 'llm-awq' of AWQ is not supported: it packs weights in another way")
    group = config.get("group_size", config.get("q_group_size", 128))
    if not isinstance(group, int) or group < -1 or group == 0:
        raise ValueError(f"group_size {group!r} must be a number of inputs, or −1 for all of them")
    return (Packed4("awq", max(0, group), bool(config.get("zero_point", True))),)
