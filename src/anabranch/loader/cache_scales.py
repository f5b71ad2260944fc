"""The scales of an FP8 cache: a checkpoint may have one for the keys of a layer, and one for its values.

Where it has none, they are 1. Other caches have no scales, and the checkpoint's are not read.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from anabranch.layers.attention import Attention
from anabranch.loader.checkpoint import DTYPES, FLOATS, Checkpoint, CheckpointError, TensorInfo

if TYPE_CHECKING:
    from anabranch.models.decoder import Decoder

log = logging.getLogger(__name__)

FP8 = "float8_e4m3fn"
NAMES = ("{0}_scale", "attn.{0}_scale", "{0}_proj.{0}_scale", "{0}_proj.output_scale", "kv_scale")
"""Of the scale of keys (k) or values (v), in a layer's attention."""
PLAIN_CACHE = "use kv_cache_dtype auto"


def find(model: Decoder, checkpoint: Checkpoint) -> Iterator[tuple[Attention, TensorInfo, TensorInfo]]:
    """Each layer that keeps FP8 and has scales in the checkpoint: those of its keys and of its values."""
    for path, module in model.named_modules():
        if isinstance(module, Attention) and module.config.cache_dtype == FP8:
            k, v = (_tensor(model, checkpoint, path, which) for which in "kv")
            if k is not None and v is not None:
                yield module, k, v
            elif found := k or v:
                raise CheckpointError(
                    f"{found.file}: tensor {found.name!r} is the only cache scale of its layer: keys and values must "
                    f"both have one; is the checkpoint complete? If it is, {PLAIN_CACHE}"
                )


def read(model: Decoder, checkpoint: Checkpoint) -> None:
    """Set the scales of all layers."""
    keeping = [m for m in model.modules() if isinstance(m, Attention) and m.config.cache_dtype == FP8]
    found = list(find(model, checkpoint))
    for attention, k, v in found:
        attention.set_cache_scales(_number(k), _number(v))
    if keeping:
        log.info("FP8 cache: %d of %d layers have scales in the checkpoint; others have 1", len(found), len(keeping))


def _tensor(model: Decoder, checkpoint: Checkpoint, path: str, which: str) -> TensorInfo | None:
    for name in NAMES:
        for theirs in model.family.checkpoint_names(f"{path}.{name.format(which)}"):
            if info := checkpoint.tensors.get(theirs):
                if math.prod(info.shape) != 1 or info.dtype not in FLOATS:
                    raise CheckpointError(
                        f"{info.file}: tensor {info.name!r} is {info.dtype} {list(info.shape)}, but a cache scale must "
                        f"be one floating-point number for a layer; {PLAIN_CACHE}"
                    )
                return info
    return None


def _number(info: TensorInfo) -> float:
    with open(info.file, "rb") as file:
        file.seek(info.begin)
        stored = bytearray(file.read(info.num_bytes))
    scale = torch.frombuffer(stored, dtype=getattr(torch, DTYPES[info.dtype])).item()
    if not 0 < scale < math.inf:
        raise CheckpointError(
            f"{info.file}: tensor {info.name!r} is {scale}, but a cache scale must be a number above 0; download the "
            f"model again, or {PLAIN_CACHE}"
        )
    return float(scale)
