"""Which checkpoint tensor fills which part of which parameter; refuses missing, surplus and wrongly shaped tensors.

Works on a model without memory behind it (meta device) and on headers: no weight is read here.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from anabranch.layers.packing import Index, Layout, Packed, Piece
from anabranch.loader.checkpoint import Checkpoint, CheckpointError, TensorInfo

if TYPE_CHECKING:
    from anabranch.models.decoder import Decoder


@dataclass(frozen=True, slots=True)
class Copy:
    """Put `source[part]` into `parameter[index]`."""

    source: TensorInfo
    parameter: str
    index: Index
    part: tuple[slice, ...] = ()

    @property
    def num_bytes(self) -> int:
        """Of what is taken from the source."""
        source = self.source
        return source.num_bytes * math.prod(_part_shape(source.shape, self.part)) // max(1, source.num_elements)


def match(model: Decoder, checkpoint: Checkpoint) -> list[Copy]:
    """One Copy for every tensor the model needs, in file order; CheckpointError if it does not come out even."""
    copies: list[Copy] = []
    for parameter, layouts in parameter_layouts(model):
        chosen = _best(checkpoint, layouts)
        copies += [Copy(_find(checkpoint, piece.name), parameter, piece.index, piece.part) for piece in chosen]
    parameters = dict(model.named_parameters())
    taken: Counter[str] = Counter()
    for copy in copies:
        wanted = tuple(parameters[copy.parameter][copy.index].shape)
        taken[copy.source.name] += math.prod(wanted)
        if _part_shape(copy.source.shape, copy.part) != wanted:
            raise CheckpointError(
                f"{copy.source.file}: tensor {copy.source.name!r} has shape {list(copy.source.shape)}, "
                f"config.json asks for {list(wanted)}{' in a part of it' if copy.part else ''}"
            )
    for copy in copies:
        if copy.part and taken[copy.source.name] != copy.source.num_elements:
            raise CheckpointError(
                f"{copy.source.file}: tensor {copy.source.name!r} has shape {list(copy.source.shape)}, "
                f"config.json asks for {taken[copy.source.name]} elements"
            )
    _refuse_surplus(model, checkpoint, {copy.source.name for copy in copies})
    return sorted(copies, key=lambda copy: (copy.source.file, copy.source.begin))


def _part_shape(shape: tuple[int, ...], part: tuple[slice, ...]) -> tuple[int, ...]:
    return (*(len(range(size)[taken]) for size, taken in zip(shape, part)), *shape[len(part) :])


def parameter_layouts(model: Decoder) -> Iterator[tuple[str, list[Layout]]]:
    """Each parameter's name and every way a checkpoint may spell it, in full names."""
    for path, module in model.named_modules():
        packed = module.layouts() if isinstance(module, Packed) else {}
        parent = path.rpartition(".")[0]
        for name, _ in module.named_parameters(recurse=False):
            full = f"{path}.{name}"
            relative = packed.get(name)
            if relative is None:
                yield full, [(Piece(spelled),) for spelled in model.family.checkpoint_names(full)]
            else:
                yield full, [full for layout in relative for full in _spellings(model, parent, layout)]


def _spellings(model: Decoder, parent: str, layout: Layout) -> list[Layout]:
    """The layout once for each of the model's ways to spell names."""
    names = [model.family.checkpoint_names(f"{parent}.{piece.name}") for piece in layout]
    return [
        tuple(Piece(name, piece.index, piece.part) for name, piece in zip(spelled, layout, strict=True))
        for spelled in zip(*names, strict=True)
    ]


def _best(checkpoint: Checkpoint, layouts: list[Layout]) -> Layout:
    """The layout the checkpoint uses: the one of which it holds most. What that one lacks is missing."""
    return max(layouts, key=lambda layout: sum(piece.name in checkpoint.tensors for piece in layout) / len(layout))


def _find(checkpoint: Checkpoint, name: str) -> TensorInfo:
    if name not in checkpoint.tensors:
        where = checkpoint.files[0] if len(checkpoint.files) == 1 else checkpoint.folder
        raise CheckpointError(f"{where}: tensor {name!r} is missing; is the checkpoint complete?")
    return checkpoint.tensors[name]


def _refuse_surplus(model: Decoder, checkpoint: Checkpoint, used: set[str]) -> None:
    ignored = (*model.family.ignored, *(["lm_head.weight"] if model.config.tie_embeddings else []))
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
