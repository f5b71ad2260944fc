"""FP8 in blocks of 128 × 128 with `weight_scale_inv` (DeepSeek, Qwen, MiniMax), or with one scale for a matrix.

Despite its name, `weight_scale_inv` is multiplied by. Activations stay as they are: `activation_scheme`, `input_scale`
and `activation_scale` are for engines that quantise them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from anabranch.formats.scaled import Scaled
from anabranch.formats.source import Source

NAME = "fp8"
KEYS = "activation_scheme fmt scale_fmt version weight_block_size"


def sources(config: Mapping[str, Any]) -> tuple[Source, ...]:
    if config.get("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
        raise ValueError(f"fmt {config['fmt']!r} is not supported (supported: e4m3)")
    block = config.get("weight_block_size")
    if block is None:
        return Scaled("fp8", 0, 0, "_scale"), Scaled("fp8", 0, 0, "_scale_inv")
    match block:
        case [int(rows), int(group)] if rows > 0 and group > 0:
            return (Scaled("fp8", rows, group, "_scale_inv"),)
    raise ValueError(f"weight_block_size {block!r} must be two sizes")
