"""Ops as a compiler sees them: some it may look into and fuse, others it calls by name, as torch.ops.anabranch.NAME.

A schema has no records and no weights. An op that takes a record gets the record's fields as its parameters, and a
weight becomes its tensors, the name of its format and its shape.

A `torch.library.Library` makes opaque ops, because calling what it makes costs less than calling a `custom_op`.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, get_type_hints

import torch

from anabranch import formats
from anabranch.ops.op import Op
from anabranch.ops.weight import BY_INPUT, Weight

NAMESPACE = "anabranch"
LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")
_made: dict[str, Callable[..., Any]] = {}

TYPES: dict[Any, str] = {
    torch.Tensor: "Tensor {0}",
    torch.Tensor | None: "Tensor? {0}",
    Weight: "Tensor[] {0}, str {0}_format, int[] {0}_shape",
    torch.dtype | None: "ScalarType? {0}",
    bool: "bool {0}",
    int: "int {0}",
    float: "float {0}",
    str: "str {0}",
}
"""A parameter in a schema."""
RESULTS: dict[Any, str] = {torch.Tensor: "Tensor", tuple[torch.Tensor, torch.Tensor]: "(Tensor, Tensor)"}


def opaque(name: str, schema: str, function: Callable[..., Any], fake: Callable[..., Any]) -> Callable[..., Any]:
    """torch.ops.anabranch.NAME; `schema` is what follows the name, parameters and results."""
    if name not in _made:
        LIBRARY.define(name + schema)
        LIBRARY.impl(name, function, "CompositeExplicitAutograd")
        torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=LIBRARY)
        _made[name] = getattr(torch.ops, NAMESPACE).__getattr__(name).default
    return _made[name]


def opaque_op(op: Op[..., Any]) -> Callable[..., Any]:
    """A function that takes the op's arguments and calls it under its own name: the ordinary dispatch, once there are
    tensors."""
    assert not op.mutates, f"op {op.name} writes to its parameters"
    hints = get_type_hints(op.reference)
    result = RESULTS[hints.pop("return")]
    defaults = {name: p.default for name, p in inspect.signature(op.reference).parameters.items()}
    first = next(iter(hints.values()))
    record = first if hasattr(first, "_fields") else None
    types = get_type_hints(record) if record is not None else hints
    schema = ", ".join(TYPES[type].format(name) for name, type in types.items())

    def from_flat(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*flat: Any) -> Any:
            values = unflatten(types.values(), flat)
            return function(record(*values)) if record is not None else function(*values)

        return call

    named = opaque(op.name, f"({schema}) -> {result}", from_flat(op.__call__), from_flat(op.fake or op.reference))

    def call(*args: Any, **kwargs: Any) -> Any:
        if record is not None:
            return named(*flatten(args[0] if args else kwargs["call"]))
        rest = [kwargs.get(name, default) for name, default in list(defaults.items())[len(args) :]]
        return named(*flatten([*args, *rest]))

    return call


def flatten(values: Iterable[Any]) -> list[Any]:
    """The arguments of an opaque op. Traced."""
    flat: list[Any] = []
    for value in values:
        if isinstance(value, Weight):
            flat += [list(value.tensors.values()), value.format.name, list(value.shape)]
        else:
            flat.append(value)
    return flat


def unflatten(types: Iterable[Any], flat: Sequence[Any]) -> list[Any]:
    """The arguments of the op itself: weights around the same tensors."""
    given = iter(flat)
    values = []
    for type in types:
        value = next(given)
        if type is Weight:
            format, shape = formats.named(next(given)), tuple(next(given))
            names = list(format.tensors(shape))
            names += [BY_INPUT][: len(value) - len(names)]
            value = Weight.view(format, shape, dict(zip(names, value, strict=True)))
        values.append(value)
    return values


@contextmanager
def shown_to_compiler(ops: Iterable[Op[..., Any]], look_into: bool) -> Iterator[None]:
    """Inside, tracing sees these ops: with `look_into` the reference of those that have no fake of their own; all
    others are opaque."""
    changed = list(ops)
    for op in changed:
        op.traced = op.reference if look_into and op.fake is None else opaque_op(op)
    try:
        yield
    finally:
        for op in changed:
            op.traced = None
