"""Which checkpoint tensor fills which part of which parameter; refuses missing, surplus and wrongly shaped tensors.

Works on a model without memory (meta device) and on headers: no weight is read here. A weight is taken from the first
of the sources that config.json names of which the checkpoint has all tensors; otherwise it is plain.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import nn

from anabranch import ops
from anabranch.formats import (
    BF16_SOURCE,
    CACHE_SCALES,
    IGNORED,
    PLAIN_SOURCE,
    Format,
    Index,
    Shape,
    Source,
    TensorSpec,
    Transposed,
    rounded,
)
from anabranch.layers.linear import Embedding, Linear
from anabranch.layers.norm import RMSNorm
from anabranch.loader import cache_scales
from anabranch.loader.checkpoint import DTYPES, FLOATS, Checkpoint, CheckpointError, TensorInfo
from anabranch.moe.experts import Experts
from anabranch.moe.layer import Router
from anabranch.ops.op import Op
from anabranch.ops.weight import Layout, Piece, Weight

if TYPE_CHECKING:
    from anabranch.models.decoder import Decoder

log = logging.getLogger(__name__)

SLICE = 8 << 20
"""Bytes of a tensor with all experts that are converted at a time: while that lasts, they take memory several times."""


@dataclass(frozen=True, slots=True)
class Copy:
    """Put `convert(source[part])[rest]` into `parameter[index]`."""

    source: TensorInfo
    parameter: str
    index: Index
    part: Index = ()
    convert: Callable[..., torch.Tensor] | None = None
    rest: Index = ()


def match(model: Decoder, checkpoint: Checkpoint, quantization: str = "none") -> list[Copy]:
    """One Copy for every tensor the model needs, in file order; CheckpointError if one is missing or left over. Plain
    matrices of layers are quantised as `quantization` says."""
    copies: list[Copy] = []
    used: set[str] = set()
    """Names of tensors, also of those that other ranks read."""
    for name, target, layouts in parameter_layouts(model):
        if isinstance(target, Weight):
            sources = model.config.sources or _rounded(name, target, quantization)
            if not sources and keeps_bf16(model, name, target) and _is_bf16(checkpoint, layouts):
                sources = (BF16_SOURCE,)
            found, all_ranks = _copies(target, name, layouts, sources, checkpoint)
            copies += found
            used |= all_ranks
        else:
            source = _find(checkpoint, _best(checkpoint, layouts, PLAIN_SOURCE)[0].name)
            owner, shape = model.get_submodule(name.rpartition(".")[0]), tuple(target.shape)
            one_group = isinstance(owner, Router) and source.shape == (1, *shape)  # of experts, as ERNIE keeps its bias
            _check(source, (TensorSpec(source.shape if one_group else shape),))
            convert = _plus_one if isinstance(owner, RMSNorm) and owner.from_one else None
            copies.append(Copy(source, name, (), (0,) if one_group else (), convert))
            used.add(source.name)
    used |= {info.name for _, *infos in cache_scales.find(model, checkpoint) for info in infos}
    _refuse_surplus(model, checkpoint, used)
    return sorted(copies, key=lambda copy: (copy.source.file, copy.source.begin))


def _plus_one(weight: torch.Tensor) -> torch.Tensor:
    return weight.float() + 1.0


def set_formats(model: Decoder, quantization: str) -> None:
    """The formats of a model without a checkpoint: as config.json says, or as if it were quantised while loading."""
    for path, weight, layouts in parameter_layouts(model):
        if not isinstance(weight, Weight):
            continue
        sources = model.config.sources or _rounded(path, weight, quantization)
        if not sources and model.config.dtype == "bfloat16" and keeps_bf16(model, path, weight):
            with torch.device("meta"):
                weight.set_format(BF16_SOURCE.format())
        elif sources and is_projection(path, weight.full_shape):
            if not any(sources[0].names(layout[0].name) for layout in layouts):
                continue  # such checkpoints keep it plain
            whole = torch.empty(weight.full_shape, device="meta")
            starts = {start for piece in layouts[-1] for start in _starts(piece, whole)}
            with torch.device("meta"):
                weight.set_format(sources[0].format(tuple(starts)))


def _rounded(path: str, weight: Weight, quantization: str) -> tuple[Source, ...]:
    """How a plain checkpoint's weight is quantised while it is loaded; (): it is not."""
    format = rounded.FORMATS.get(quantization)
    if format is None or not is_projection(path, weight.full_shape):
        return ()
    return (rounded.Rounded(format),) if rounded.can_round(format, weight.full_shape) else ()


def keeps_bf16(model: Decoder, path: str, weight: Weight) -> bool:
    """Whether a model that computes in fp32 keeps this matrix as checkpoints in bf16 have it: the kernels widen its
    numbers, which takes less time than reading twice the bytes."""
    owner = model.get_submodule(path.rpartition(".")[0])
    op: Op[..., torch.Tensor] = ops.linear
    if isinstance(owner, Experts):  # the kernels have no other activation, and no biases
        op, common = ops.experts, owner.activation == "silu" and owner.gate_up_bias_EF is None
    else:
        common = isinstance(owner, Linear | Embedding)
    return common and weight.dtype == torch.float32 and len(weight.shape) > 1 and op.has_trait("bf16")


def _is_bf16(checkpoint: Checkpoint, layouts: list[Layout]) -> bool:
    tensors = [checkpoint.tensors.get(piece.name) for piece in _best(checkpoint, layouts, PLAIN_SOURCE)]
    return all(tensor is not None and tensor.dtype == "BF16" for tensor in tensors)


def is_projection(path: str, shape: Shape) -> bool:
    """Whether a weight is a matrix of a layer that is multiplied by: not the embedding, the head, a router, a
    convolution or the biases of experts, nor the expansion of latent rows, which is kept dense."""
    others = (".router.", ".conv1d.", "_bias_", ".kv_b_proj.")
    layer = path.startswith(("layers.", "mtp.layers."))
    return layer and not any(part in path for part in others) and len(shape) > 1


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


def stored(target: Weight | nn.Parameter, layouts: list[Layout]) -> Iterator[tuple[str, Shape]]:
    """The tensors of the last of a weight's layouts: name, shape. Pieces of one tensor are rows of it."""
    shapes: dict[str, Shape] = {}
    for piece in layouts[-1]:
        shape = tuple(torch.empty(target.shape, device="meta")[piece.index].shape)
        dim = max(0, len(piece.part) - 1)
        rows = shapes.get(piece.name, (0,) * len(shape))[dim] + shape[dim]
        shapes[piece.name] = (*shape[:dim], rows, *shape[dim + 1 :])
    transposed = isinstance(target, Weight) and target.transposed
    for name, shape in shapes.items():
        yield name, (*shape[:-2], shape[-1], shape[-2]) if transposed else shape


def _spellings(model: Decoder, parent: str, layout: Layout) -> list[Layout]:
    """The layout once for each of the model's ways to spell names."""
    names = [model.family.checkpoint_names(f"{parent}.{piece.name}") for piece in layout]
    return [
        tuple(Piece(name, piece.index, piece.part) for name, piece in zip(spelled, layout, strict=True))
        for spelled in zip(*names, strict=True)
    ]


def _copies(
    weight: Weight, path: str, layouts: list[Layout], sources: tuple[Source, ...], checkpoint: Checkpoint
) -> tuple[list[Copy], set[str]]:
    """What this rank reads, and the names of all tensors of the weight."""
    source, layout = _choose(checkpoint, layouts, sources if len(weight.full_shape) > 1 else ())
    if weight.transposed and source.names(layout[0].name).get("data") == layout[0].name:
        source = Transposed(source)
    names = {piece.name: source.names(piece.name) for piece in layout}
    whole = torch.empty(weight.full_shape, device="meta")
    stored: dict[str, Shape] = {}
    """The logical shape of each checkpoint tensor."""
    taken_of = Counter[str]()
    found = {name: {tensor: _find(checkpoint, n) for tensor, n in theirs.items()} for name, theirs in names.items()}
    infos = found[layout[0].name]
    pieces = [*weight.shard.pieces(layout, weight.full_shape)]
    starts = {start for piece in (*layout, *pieces) for start in _starts(piece, whole)}
    try:
        format = source.format(tuple(starts), {tensor: DTYPES[info.dtype] for tensor, info in infos.items()})
        specs = format.tensors(weight.full_shape)
    except ValueError as error:
        where = f"{infos['data'].file}: tensor {infos['data'].name!r}"
        raise CheckpointError(f"{where}: {error}; do config.json and the weights belong together?") from None
    for piece in layout:
        infos = found[piece.name]
        wanted = tuple(whole[piece.index].shape)
        shape = stored[piece.name] = source.logical(infos["data"].shape) if piece.part else wanted
        if _shape_of(shape, piece.part) != wanted:
            raise _misshapen(infos["data"], wanted)
        for tensor, info in infos.items():
            _check(info, source.stored(tensor, shape))
        taken_of[piece.name] += math.prod(wanted)
    for name, count in taken_of.items():
        if count != math.prod(stored[name]):
            raise _misshapen(found[name]["data"], f"{count} elements")
    if weight.format is not format:
        with torch.device("meta"):
            weight.set_format(format)
    copies: list[Copy] = []
    for piece in pieces:
        name, shape = piece.name, stored[piece.name]
        for tensor in specs:
            info = found[name][tensor]
            try:
                index = format.part(tensor, piece.index, weight.shape)
                part = format.part(tensor, piece.part, shape, shared=True)
            except ValueError as error:
                cure = "take fewer ranks, or --expert-parallel, which keeps experts whole"
                raise CheckpointError(f"{info.file}: tensor {info.name!r}: {error}; {cure}") from None
            copy = Copy(info, f"{path}.{tensor}", index, part)
            if source.changes(tensor, format):
                copy = _converted(copy, source, tensor, piece.part, shape, format)
            copy = _narrow(copy)
            inner = any(taken != slice(None) for taken in copy.part)
            copies += _slices(copy) if len(shape) == 3 and (copy.convert or inner) else (copy,)
    return copies, {info.name for infos in found.values() for info in infos.values()}


def _converted(copy: Copy, source: Source, tensor: str, part: Index, shape: Shape, format: Format) -> Copy:
    """A copy of this part of a piece, which the checkpoint does not keep as we do. If the part can be read alone, no
    more is converted; otherwise all matrices are of which it is a part."""
    part = part + (slice(None),) * (len(shape) - len(part))
    taken = [slice(*one.indices(size)) for one, size in zip(part, shape) if isinstance(one, slice)]
    lead, (outputs, inputs) = taken[:-2], taken[-2:]
    place = source.place(tensor, outputs, inputs, shape)
    rest = (*(slice(None) for _ in lead), *copy.part[len(lead) :]) if place is None else ()
    ours = _shape_of(shape, (*lead,) if place is None else (*taken,))
    convert = partial(source.convert, tensor, shape=ours, format=format)
    return replace(copy, part=(*lead, *(place or ())), convert=convert, rest=rest)


def _narrow(copy: Copy) -> Copy:
    """A copy of some of the first dimension of a tensor, which reads no more than these."""
    if not copy.part or not isinstance(copy.part[0], slice):
        return copy
    begin, end, step = copy.part[0].indices(copy.source.shape[0])
    every = slice(None, None, None if step == 1 else step)
    return replace(copy, source=some_rows(copy.source, begin, end), part=(every, *copy.part[1:]))


def some_rows(source: TensorInfo, begin: int, end: int) -> TensorInfo:
    """Some of the first dimension of a tensor."""
    one = source.num_bytes // max(1, source.shape[0])
    first, last = source.begin + begin * one, source.begin + end * one
    return replace(source, shape=(end - begin, *source.shape[1:]), begin=first, end=last)


def _slices(copy: Copy) -> Iterator[Copy]:
    """A copy of all experts that a tensor has as copies of a few each."""
    source, target = copy.source, (*copy.index, slice(None))[0]
    assert isinstance(target, slice)
    offset, count = target.start or 0, source.shape[0]
    some = max(1, SLICE * count // max(1, source.num_bytes))
    for first in range(0, count, some):
        last = min(first + some, count)
        index = (slice(first + offset, last + offset), *copy.index[1:])
        convert = copy.convert
        if isinstance(convert, partial):
            convert = partial(convert, shape=(last - first, *convert.keywords["shape"][1:]))
        yield replace(copy, source=some_rows(source, first, last), index=index, convert=convert)


def _choose(checkpoint: Checkpoint, layouts: list[Layout], sources: tuple[Source, ...]) -> tuple[Source, Layout]:
    """The source and layout that the checkpoint has. If it has none completely: those of which it has most, so that
    what is missing can be named."""
    found = [(source, _best(checkpoint, layouts, source)) for source in (*sources, PLAIN_SOURCE)]
    for source, layout in found:
        if _share(checkpoint, layout, source) == 1 and _holds(checkpoint, layout[0], source):
            return source, layout
    return max(found, key=lambda pair: (_holds(checkpoint, pair[1][0], pair[0]), _share(checkpoint, pair[1], pair[0])))


def _holds(checkpoint: Checkpoint, piece: Piece, source: Source) -> bool:
    """Whether the checkpoint has the piece's numbers with a dtype of this source."""
    info = checkpoint.tensors.get(source.names(piece.name).get("data", ""))
    return info is not None and any(_is_of(info, spec) for spec in source.stored("data", (8, 8)))


def _is_of(info: TensorInfo, spec: TensorSpec) -> bool:
    return DTYPES[info.dtype] == spec.dtype if spec.dtype else info.dtype in FLOATS


def _starts(piece: Piece, whole: torch.Tensor) -> Iterator[int]:
    """The outputs at which a piece begins, in the weight and in its checkpoint tensor; 1 where it has every other."""
    for index, dim in ((piece.index, whole.dim() - 2), (piece.part, whole[piece.index].dim() - 2)):
        place = index[dim] if 0 <= dim < len(index) else slice(None)
        if isinstance(place, slice):
            yield (place.start or 0) if place.step in (None, 1) else 1


def _shape_of(shape: Shape, part: Index) -> Shape:
    """Of a part of a tensor that consists of slices."""
    sizes = (len(range(size)[taken]) for size, taken in zip(shape, part) if isinstance(taken, slice))
    return (*sizes, *shape[len(part) :])


def _check(info: TensorInfo, allowed: tuple[TensorSpec, ...]) -> None:
    """CheckpointError unless the tensor looks like one of these."""
    if not any(_is_of(info, spec) for spec in allowed):
        raise CheckpointError(
            f"{info.file}: tensor {info.name!r} is {info.dtype}, where {allowed[0].dtype or 'floating-point numbers'} "
            "should be; is the checkpoint complete, and of the format that config.json names?"
        )
    if info.shape not in [spec.shape for spec in allowed]:
        raise _misshapen(info, allowed[0].shape)


def _misshapen(info: TensorInfo, wanted: Shape | str) -> CheckpointError:
    asked = wanted if isinstance(wanted, str) else list(wanted)
    return CheckpointError(
        f"{info.file}: tensor {info.name!r} has shape {list(info.shape)}, config.json asks for {asked}; do the two "
        "belong together?"
    )


def _best(checkpoint: Checkpoint, layouts: list[Layout], source: Source) -> Layout:
    """The layout the checkpoint uses: the one of which it holds most. What that one lacks is missing."""
    return max(layouts, key=lambda layout: _share(checkpoint, layout, source))


def _share(checkpoint: Checkpoint, layout: Layout, source: Source) -> float:
    """How much of a layout the checkpoint holds, 0 to 1."""
    names = [name for piece in layout for name in source.names(piece.name).values()]
    return sum(name in checkpoint.tensors for name in names) / len(names) if names else 0.0


def _find(checkpoint: Checkpoint, name: str) -> TensorInfo:
    if name not in checkpoint.tensors:
        where = checkpoint.files[0] if len(checkpoint.files) == 1 else checkpoint.folder
        raise CheckpointError(f"{where}: tensor {name!r} is missing; is the checkpoint complete?")
    return checkpoint.tensors[name]


def _refuse_surplus(model: Decoder, checkpoint: Checkpoint, used: set[str]) -> None:
    ignored = of_family = model.family.ignored
    if model.family.has_further_layers:
        ignored = of_family = (*ignored, f".layers.{len(model.config.layers)}.")
    if model.config.sources:
        ignored = (*ignored, *IGNORED)
    if not any(group.spec.dtype == cache_scales.FP8 for group in model.config.cache_groups):
        ignored = (*ignored, *CACHE_SCALES)
    used = used | ({"lm_head.weight"} if model.config.tie_embeddings else set())
    surplus = [
        tensor
        for name, tensor in checkpoint.tensors.items()
        if name not in used and not any(p in name for p in ignored)
    ]
    passed = Counter(part for name in checkpoint.tensors for part in ignored if name not in used and part in name)
    if found := {part: count for part, count in passed.items() if part in of_family}:
        parts = ", ".join(f"{count} of '*{part}*'" for part, count in found.items())
        log.info("tensors of the checkpoint that are not used: %s", parts)
    if surplus:
        more = f" (and {len(surplus) - 1} more)" if len(surplus) > 1 else ""
        raise CheckpointError(
            f"{surplus[0].file}: tensor {surplus[0].name!r}{more} has no place in a "
            f"{model.config.model_type} model of this config.json; do the two belong together?"
        )
