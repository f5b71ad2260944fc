"""GPTQ with 4 bits: `qweight`, `scales`, `qzeros` of every layer.

`checkpoint_format` gptq stores zero points minus one, gptq_v2 as they are. With `sym` they are all 8 and are not read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from anabranch.formats.packed4 import Packed4
from anabranch.formats.source import Source

NAME = "gptq"
RULES = "dynamic extra_config regex_config"
"""Keys that hold exceptions for some layers. Headers show other bits, groups and plain layers."""
KEYS = f"{RULES} backend bits checkpoint_format desc_act format group_size method sym version"


def sources(config: Mapping[str, Any]) -> tuple[Source, ...]:
    if config.get("bits") != 4:
        raise ValueError(f"bits {config.get('bits')!r} of GPTQ is not supported (supported: 4)")
    if config.get("desc_act"):
        raise ValueError("desc_act (weights in the order of activations) is not supported: use a checkpoint without it")
    symmetric = config.get("sym", True)
    for key in RULES.split():
        rules = config.get(key) or {}
        if not isinstance(rules, Mapping):
            raise ValueError(f"{key} must be an object, not {rules!r}")
        for layers, rule in rules.items():
            if isinstance(rule, Mapping) and rule.get("sym", symmetric) != symmetric:
                raise ValueError(f"{key}: another sym for {layers!r} is not supported")
    version = config.get("checkpoint_format") or config.get("format") or "gptq"
    if version not in ("gptq", "gptq_v2"):
        raise ValueError(f"checkpoint_format {version!r} is not supported (supported: gptq, gptq_v2)")
    group = config.get("group_size", 128)
    if not isinstance(group, int) or group < -1 or group == 0:
        raise ValueError(f"group_size {group!r} must be a number of inputs, or −1 for all of them")
    offset = 1 if version == "gptq" else 0
    return (Packed4("columns", max(0, group), not symmetric, offset),)
