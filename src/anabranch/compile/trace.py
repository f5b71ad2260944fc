"""The decoder as one FX graph, traced once for any number of tokens. Attention stands in it as an opaque op.

The graph is all that is kept of Dynamo: it is never called through again, so no guards are checked in a step and
nothing can be compiled anew behind our back. Parameters are inputs of the graph, not constants in it.

T token rows, H query heads, D head dim, F rotated pairs.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from anabranch import ops
from anabranch.layers.norm import Hidden
from anabranch.models.decoder import Decoder
from anabranch.ops.opaque import opaque, shown_to_compiler

BETWEEN_ATTENTIONS = (
    ops.rms_norm,
    ops.add_rms_norm,
    ops.norm_add,
    ops.linear,
    ops.gated_activation,
    ops.add_gated,
    ops.route,
    ops.experts,
)
"""Ops that occur in the graph."""
EXAMPLE_TOKENS = 1000
"""Compilers choose tiles by it. Not 0 or 1, which they take to be special."""


def _attend(heads: torch.Tensor, cos_TF: torch.Tensor, sin_TF: torch.Tensor, layer: int, num: int) -> torch.Tensor:
    raise AssertionError("anabranch::attend is where a graph is split; pieces are run with attention between them")


def _fake_attend(heads: torch.Tensor, cos_TF: torch.Tensor, sin_TF: torch.Tensor, layer: int, num: int) -> torch.Tensor:
    return heads.new_empty(heads.shape[0], num, heads.shape[2])


ATTEND = opaque(
    "attend",
    "(Tensor heads, Tensor cos_TF, Tensor sin_TF, int layer_id, int num_heads) -> Tensor",
    _attend,
    _fake_attend,
)
"""Rope, KV write and attention of a layer: heads of queries, keys and values → attended_THD."""


@dataclass(frozen=True, slots=True)
class Traced:
    graph: fx.GraphModule
    constants: Mapping[str, torch.Tensor]
    """Parameters and tables, by the name of their placeholder."""
    token: str
    position: str
    num_tokens: str | None
    """None: a model without routers has no use for it."""
    sizes: tuple[str, ...]
    """Placeholders that take the number of rows."""


def trace(model: Decoder, look_into: bool) -> Traced:
    """`look_into`: the compiler is to see the insides of simple ops, and fuse them."""

    def decoder(token_T: torch.Tensor, position_T: torch.Tensor, num_tokens: torch.Tensor) -> torch.Tensor:
        x: Hidden
        x, ropes = model.enter(token_T, position_T)
        residual_TD = None
        for layer_id, layer in enumerate(model.config.layers):
            heads, residual_TD = model.before(layer_id, x, residual_TD)
            rope = ropes[model.rope_of_layer[layer_id]]
            attended_THD = ATTEND(heads, *rope, layer_id, layer.attention.num_heads)
            x, residual_TD = model.after(layer_id, attended_THD, residual_TD, num_tokens)
        return model.leave(x, residual_TD)

    device = model.embed_tokens.weight.device
    token_T, position_T = (torch.zeros(EXAMPLE_TOKENS, dtype=torch.int64, device=device) for _ in range(2))
    num_tokens = torch.zeros((), dtype=torch.int32, device=device)
    model.enter(token_T, position_T)  # tables are made when first used, and that must not be traced
    for input in (token_T, position_T):
        torch._dynamo.mark_dynamic(input, 0)

    graphs: list[fx.GraphModule] = []
    given: list[Any] = []

    def backend(graph: fx.GraphModule, examples: list[Any]) -> Callable[..., Any]:
        graphs.append(graph)

        def keep(*args: Any) -> tuple[None]:
            given.extend(args)
            return (None,)

        return keep

    # Dynamo remembers models traced before and takes sizes that differ from theirs, of weights too, to be dynamic.
    static = torch._dynamo.config.patch(automatic_dynamic_shapes=False, assume_static_by_default=True)
    with static, shown_to_compiler(BETWEEN_ATTENTIONS, look_into):
        torch.compile(_anew(decoder), fullgraph=True, backend=backend)(token_T, position_T, num_tokens)
    (graph,) = graphs
    names = [node.name for node in graph.graph.nodes if node.op == "placeholder"]
    by_name = dict(zip(names, given, strict=True))
    name_of = {id(value): name for name, value in by_name.items()}
    inputs = {id(value) for value in (token_T, position_T, num_tokens)}
    sizes = {name: value for name, value in by_name.items() if isinstance(value, int)}
    assert set(sizes.values()) == {EXAMPLE_TOKENS}, f"more than the number of tokens is dynamic: {sizes}"
    return Traced(
        graph=graph,
        constants={
            name: value
            for name, value in by_name.items()
            if isinstance(value, torch.Tensor) and id(value) not in inputs
        },
        token=name_of[id(token_T)],
        position=name_of[id(position_T)],
        num_tokens=name_of.get(id(num_tokens)),
        sizes=tuple(sizes),
    )


def _anew(function: Callable[..., Any]) -> Callable[..., Any]:
    """With a code object of its own: Dynamo counts compilations by it, and another model is no recompilation."""
    code = function.__code__.replace()
    return types.FunctionType(code, function.__globals__, function.__name__, None, function.__closure__)
