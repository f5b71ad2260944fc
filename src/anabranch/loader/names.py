"""Which checkpoint tensor fills which part of which parameter; refuses missing, surplus and wrongly shaped tensors.

Works on a model without memory (meta device) and on headers: no weight is read here. A weight takes the format that
config.json names if the checkpoint has all of its tensors in that format; otherwise it is plain.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from anabranch import formats
from anabranch.formats import PLAIN, Format, Index
from anabranch.loader.checkpoint import DTYPES, FLOATS, Checkpoint, CheckpointError, TensorInfo
from anabranch.ops.weight import Layout, Piece, Weight

if TYPE_CHECKING:
    from anabranch.models.decoder import Decoder


@dataclass(frozen=True, slots=True)
class Copy:
    """Put `source[part]` into `parameter[index]`."""

    source: TensorInfo
    parameter: str
    index: Index
    part: Index = ()


def match(model: Decoder, checkpoint: Checkpoint) -> list[Copy]:
    """One Copy for every tensor the model needs, in file order; CheckpointError if one is missing or left over."""
    copies: list[Copy] = []
    format = formats.known()[model.config.format]
    for name, target, layouts in parameter_layouts(model):
        if isinstance(target, Weight):
            copies += _copies(target, name, layouts, format, checkpoint)
        else:
            source = _find(checkpoint, _best(checkpoint, layouts, PLAIN)[0].name)
            _check(source, source.shape, tuple(target.shape), "")
            copies.append(Copy(source, name, ()))
    _refuse_surplus(model, checkpoint, {copy.source.name for copy in copies})
    return sorted(copies, key=lambda copy: (copy.source.file, copy.source.begin))


def parameter_layouts(model: Decoder) -> Iterator[tuple[str, Weight | nn.Parameter, list[Layout]]]:
    """Each weight and each other parameter: its name, itself, and every way a checkpoint may keep it, in full names."""
    for path, module in model.named_modules():
        if not isinstance(module, Weight):
            for name, parameter in module.named_parameters(recurse=False):
                full = f"{path}.{name}"
                yield full, parameter, [(Piece(theirs),) for theirs in model.family.checkpoint_names(full)]
        elif not module.layouts:
            yield path, module, [(Piece(theirs),) for theirs in model.family.checkpoint_names(path)]
        else:
            parent = path.rpartition(".")[0].rpartition(".")[0]
            yield path, module, [full for layout in module.layouts for full in _spellings(model, parent, layout)]


def checkpoint_shapes(model: Decoder) -> dict[str, tuple[int, ...]]:
    """The tensors of a plain checkpoint of this model, with one tensor per expert and projection: name → shape."""
    return {
        piece.name: tuple(torch.empty(target.shape, device="meta")[piece.index].shape)
        for _, target, layouts in parameter_layouts(model)
        for piece in layouts[-1]
    }


def _spellings(model: Decoder, parent: str, layout: Layout) -> list[Layout]:
    """The layout once for each of the model's ways to spell names."""
    names = [model.family.checkpoint_names(f"{parent}.{piece.name}") for piece in layout]
    return [
        tuple(Piece(name, piece.index, piece.part) for name, piece in zip(spelled, layout, strict=True))
        for spelled in zip(*names, strict=True)
    ]


def _copies(weight: Weight, path: str, layouts: list[Layout], wanted: Format, checkpoint: Checkpoint) -> Iterator[Copy]:
    layout, format = _best(checkpoint, layouts, wanted), wanted
    if _share(checkpoint, layout, wanted) < 1:
        layout, format = _best(checkpoint, layouts, PLAIN), PLAIN
    if weight.format is not format:
        with torch.device("meta"):
            weight.set_format(format)
    names = {piece.name: format.checkpoint_names(piece.name) for piece in layout}
    for tensor, spec in format.tensors(weight.full_shape).items():
        whole, taken_of = torch.empty(spec.shape, device="meta"), Counter[str]()
        for piece in layout:
            source, index = _find(checkpoint, names[piece.name][tensor]), format.part(tensor, piece.index)
            taken = _shape_of(source.shape, format.part(tensor, piece.part))
            _check(source, taken, tuple(whole[index].shape), spec.dtype)
            taken_of[source.name] += math.prod(taken)
        for name, count in taken_of.items():
            if count != checkpoint.tensors[name].num_elements:
                raise CheckpointError(
                    f"{checkpoint.tensors[name].file}: tensor {name!r} has shape "
                    f"{list(checkpoint.tensors[name].shape)}, config.json asks for {count} elements"
                )
        for piece in weight.shard.pieces(layout, weight.full_shape):
            index, part = format.part(tensor, piece.index), format.part(tensor, piece.part)
            yield Copy(checkpoint.tensors[names[piece.name][tensor]], f"{path}.{tensor}", index, part)


def _shape_of(shape: tuple[int, ...], part: Index) -> tuple[int, ...]:
    """Of a part of a tensor that consists of slices."""
    sizes = (len(range(size)[taken]) for size, taken in zip(shape, part) if isinstance(taken, slice))
    return (*sizes, *shape[len(part) :])


def _check(source: TensorInfo, shape: tuple[int, ...], wanted: tuple[int, ...], dtype: str) -> None:
    """CheckpointError unless the tensor has the shape and the numbers that a parameter needs; no `dtype`: any float."""
    if source.dtype not in FLOATS if not dtype else DTYPES[source.dtype] != dtype:
        raise CheckpointError(
            f"{source.file}: tensor {source.name!r} is {source.dtype}, where {dtype or 'floating-point numbers'} "
            "should be; is the checkpoint complete, and of the format that config.json names?"
        )
    if shape != wanted:
        raise CheckpointError(
            f"{source.file}: tensor {source.name!r} has shape {list(source.shape)}, config.json asks for {list(wanted)}"
        )


def _best(checkpoint: Checkpoint, layouts: list[Layout], format: Format) -> Layout:
    """The layout the checkpoint uses: the one of which it holds most. What that one lacks is missing."""
    return max(layouts, key=lambda layout: _share(checkpoint, layout, format))


def _share(checkpoint: Checkpoint, layout: Layout, format: Format) -> float:
    """How much of a layout the checkpoint holds, 0 to 1."""
    names = [name for piece in layout for name in format.checkpoint_names(piece.name).values()]
    return sum(name in checkpoint.tensors for name in names) / len(names)


def _find(checkpoint: Checkpoint, name: str) -> TensorInfo:
    if name not in checkpoint.tensors:
        where = checkpoint.files[0] if len(checkpoint.files) == 1 else checkpoint.folder
        raise CheckpointError(f"{where}: tensor {name!r} is missing; is the checkpoint complete?")
    return checkpoint.tensors[name]


def _refuse_surplus(model: Decoder, checkpoint: Checkpoint, used: set[str]) -> None:
    ignored = model.family.ignored
    used = used | ({"lm_head.weight"} if model.config.tie_embeddings else set())
    surplus = [
        tensor
        for name, tensor in checkpoint.tensors.items()
        if name not in used and not any(p in name for p in ignored)
    ]
    if surplus:
        more = f" (and {len(surplus) - 1} more)" if len(surplus) > 1 else ""
        raise CheckpointError(
            f"{surplus[0].file}: tensor {surplus[0].name!r}{more} has no place in a "
            f"{model.config.model_type} model of this config.json; do the two belong together?"
        )
