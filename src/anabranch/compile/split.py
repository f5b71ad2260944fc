"""A traced decoder, cut at its mixers into pieces that keep the order of the original.

A piece knows nothing of the layer it came from: its inputs are numbered as they are met and parameters are inputs like
any other, so that pieces of equal layers are equal, which `Piece.key` says.
"""

import hashlib
import operator
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
from torch import fx

from anabranch.compile.trace import MIX, Traced

ROUTE = "anabranch::route"


@dataclass(frozen=True, slots=True)
class Piece:
    graph: fx.GraphModule
    inputs: tuple[str, ...]
    """Names of values, in the order of the graph's placeholders."""
    outputs: tuple[str, ...]
    """Names of the values it leaves for others."""
    experts: tuple[str, ...]
    """Those of the outputs that are a router's expert_TK."""
    key: str
    """Equal for equal pieces: what is computed, and the shapes, dtypes and devices of its inputs."""


@dataclass(frozen=True, slots=True)
class Mixing:
    """A mixer between two pieces. Names of values."""

    projected: tuple[str, ...]
    rope: tuple[str, ...]
    mixed: str


@dataclass(frozen=True, slots=True)
class Split:
    pieces: tuple[Piece, ...]
    mixings: tuple[Mixing, ...]
    """One between each two pieces; that of layer 0 first."""
    result: str
    finished: tuple[frozenset[str], ...]
    """For each piece: values that are not read after it and the mixer that follows it."""
    constants: Mapping[str, torch.Tensor]


def split(traced: Traced) -> Split:
    nodes = list(traced.graph.graph.nodes)
    constants = dict(traced.constants)
    between: list[list[fx.Node]] = [[]]
    mixers: list[fx.Node] = []
    for node in nodes:
        if node.op == "get_attr":
            constants[node.name] = operator.attrgetter(node.target)(traced.graph)
        elif node.op not in ("placeholder", "output"):
            if node.target is MIX:
                assert node.args[2] == len(mixers), "mixers out of order"
                mixers.append(node)
                between.append([])
            else:
                between[-1].append(node)
    (result,) = nodes[-1].args[0]
    pieces = tuple(_piece(part, result) for part in between)
    mixings = tuple(_mixing(node) for node in mixers)
    return Split(pieces, mixings, result.name, _finished(pieces, mixings, {result.name, *constants}), constants)


def _mixing(node: fx.Node) -> Mixing:
    lists: Any = node.args[:2]
    projected, rope = (tuple(arg.name for arg in args) for args in lists)
    return Mixing(projected, rope, mixed=node.name)


def _piece(part: list[fx.Node], result: fx.Node) -> Piece:
    inside = set(part)
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    outer = list(dict.fromkeys(arg for node in part for arg in node.all_input_nodes if arg not in inside))
    for number, node in enumerate(outer):
        copies[node] = graph.placeholder(f"input_{number}")
    for node in part:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    experts = [node for node in part if _is_expert_ids(node)]
    outputs = [
        node for node in part if node is result or node in experts or any(user not in inside for user in node.users)
    ]
    for node, copy in copies.items():
        # Nothing else of what the tracer wrote down: it names the layer.
        copy.meta = {name: value for name, value in node.meta.items() if name == "example_value"}
    graph.output(tuple(copies[node] for node in outputs))
    graph.lint()
    return Piece(
        graph=fx.GraphModule({}, graph),
        inputs=tuple(node.name for node in outer),
        outputs=tuple(node.name for node in outputs),
        experts=tuple(node.name for node in experts),
        key=hashlib.sha256("\n".join(_describe(graph)).encode()).hexdigest(),
    )


def _is_expert_ids(node: fx.Node) -> bool:
    if node.target is not operator.getitem or node.args[1] != 1:
        return False
    source = node.args[0]
    return isinstance(source, fx.Node) and getattr(source.target, "name", str)() == ROUTE


def _describe(graph: fx.Graph) -> Iterable[str]:
    """The graph in words that do not depend on the names of nodes and of sizes."""
    number: dict[fx.Node, int] = {}
    symbols: dict[str, str] = {}

    def size(value: object) -> str:
        return re.sub(r"\b[su]\d+\b", lambda found: symbols.setdefault(found[0], f"n{len(symbols)}"), str(value))

    for node in graph.nodes:
        number[node] = len(number)
        words = [node.op]
        if node.op == "placeholder":
            value = node.meta["example_value"]
            if isinstance(value, torch.Tensor):
                sizes = [size(part) for part in (*value.shape, *value.stride())]
                words += [str(value.dtype), str(value.device.type), *sizes]
            else:
                words += [type(value).__name__, size(value)]
        else:
            target: Any = node.target
            words.append(target if isinstance(target, str) else f"{target.__module__}.{target.__name__}")
            words.append(str(fx.map_arg((node.args, node.kwargs), lambda arg: f"%{number[arg]}")))
        yield " ".join(words)


def _finished(pieces: tuple[Piece, ...], mixings: tuple[Mixing, ...], kept: set[str]) -> tuple[frozenset[str], ...]:
    """Memory of captured pieces that is not needed any more is for later ones."""
    kept = kept.union(*(piece.experts for piece in pieces))
    finished: list[frozenset[str]] = []
    for piece, mixing in reversed(list(zip_longest(pieces, mixings))):
        used = {*piece.inputs, *piece.outputs, *(mixing.projected + mixing.rope if mixing else ())}
        finished.append(frozenset(used - kept))
        kept |= used
    return tuple(reversed(finished))
