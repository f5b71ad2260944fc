"""The decoder as one FX graph, traced once for any number of tokens. Mixers are opaque ops in it.

The graph is all that is kept of Dynamo: it is never called through again, so no guards are checked in a step and
nothing can be compiled again unnoticed. Parameters are inputs of the graph, not constants in it.

T token rows.
"""

import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from anabranch import ops
from anabranch.models.decoder import Cut, Decoder, run_parts
from anabranch.ops.opaque import opaque, shown_to_compiler

BETWEEN_MIXERS = (
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


def _mix(projected: list[torch.Tensor], rope: list[torch.Tensor], layer: int, shape: list[int]) -> torch.Tensor:
    raise AssertionError("anabranch::mix is where a graph is split; pieces run with mixers between them")


def _fake_mix(projected: list[torch.Tensor], rope: list[torch.Tensor], layer: int, shape: list[int]) -> torch.Tensor:
    return projected[0].new_empty(projected[0].shape[0], *shape)


MIX = opaque("mix", "(Tensor[] projected, Tensor[] rope, int layer_id, int[] shape) -> Tensor", _mix, _fake_mix)
"""The mixer of a layer: what was projected → rows of `shape`."""


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
        def mix(cut: Cut) -> torch.Tensor:
            return MIX(cut.projected, cut.rope, cut.layer_id, model.layers[cut.layer_id].mixer.mixed_shape)

        return run_parts(model.parts(token_T, position_T, num_tokens), mix)

    device = model.embed_tokens.weight.device
    token_T, position_T = (torch.zeros(EXAMPLE_TOKENS, dtype=torch.int64, device=device) for _ in range(2))
    num_tokens = torch.zeros((), dtype=torch.int32, device=device)
    for rotary in model.rotaries:
        rotary(position_T)  # tables are made when first used, and that must not be traced
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
    with static, shown_to_compiler(BETWEEN_MIXERS, look_into):
        torch.compile(_with_new_code(decoder), fullgraph=True, backend=backend)(token_T, position_T, num_tokens)
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


def _with_new_code(function: Callable[..., Any]) -> Callable[..., Any]:
    """With a code object of its own: Dynamo counts compilations by it, and another model is no recompilation."""
    code = function.__code__.replace()
    return types.FunctionType(code, function.__globals__, function.__name__, None, function.__closure__)
