"""Ops as a compiler sees them: some it may look into and fuse, others it calls by name, as torch.ops.anabranch.NAME.

A `torch.library.Library` makes the latter, because calling what it makes costs less than calling a `custom_op`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from anabranch.ops.op import Op

NAMESPACE = "anabranch"
LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")
_made: dict[str, Callable[..., Any]] = {}


def opaque(name: str, schema: str, function: Callable[..., Any], fake: Callable[..., Any]) -> Callable[..., Any]:
    """torch.ops.anabranch.NAME; `schema` is what stands behind the name, parameters and results."""
    if name not in _made:
        LIBRARY.define(name + schema)
        LIBRARY.impl(name, function, "CompositeExplicitAutograd")
        torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=LIBRARY)
        _made[name] = getattr(torch.ops, NAMESPACE).__getattr__(name).default
    return _made[name]


def opaque_op(op: Op[..., Any]) -> Callable[..., Any]:
    """An op under its own name: the ordinary dispatch, once there are tensors."""
    assert not op.mutates, f"op {op.name} writes to its parameters"
    schema = torch.library.infer_schema(op.reference, mutates_args=())
    return opaque(op.name, schema, op.__call__, op.fake or op.reference)


@contextmanager
def shown_to_compiler(ops: Iterable[Op[..., Any]], look_into: bool) -> Iterator[None]:
    """Inside, whoever traces sees these ops: with `look_into` the reference of those that have no fake of their own;
    all others are opaque."""
    changed = list(ops)
    for op in changed:
        op.traced = op.reference if look_into and op.fake is None else opaque_op(op)
    try:
        yield
    finally:
        for op in changed:
            op.traced = None
