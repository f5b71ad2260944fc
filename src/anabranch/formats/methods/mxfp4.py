"""MXFP4 as gpt-oss has it: `…_blocks` and `…_scales` of all experts of a layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from anabranch.formats.packed4 import MXFP4
from anabranch.formats.source import Source

NAME = "mxfp4"
KEYS = ""


def sources(config: Mapping[str, Any]) -> tuple[Source, ...]:
    return (MXFP4(fused=True),)
