"""Pieces → callables: interpreted, or compiled by Inductor. Equal pieces are compiled once, and cached on disk.

A file's name is the hash of the code, torch version, device and piece that it was made from. A file that cannot be
read is skipped with a warning and written again.
"""

import hashlib
import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from anabranch.compile.split import Piece
from anabranch.kernels.tuning.table import cache_folder, hash_files, replace_file
from anabranch.platforms import Platform

log = logging.getLogger(__name__)

Function = Callable[..., Sequence[torch.Tensor]]
COMPILERS = ("inductor", "none")
HOUSE = Path(__file__).parents[1]
ROOMS = ("compile", "ops")
"""The code that a compiled piece depends on: how pieces are made, and the result shapes of opaque ops. What layers and
models compute is in the piece itself; kernels are not, because they are called by name."""
SIZES = (2, 3, 7, 16, 17, 48, 100, 256, 1023, 2048, 4099, 8192, 16384)
"""Numbers of tokens that the guards of a compiled piece are checked for."""


class PieceCompiler:
    def __init__(self, compiler: str, platform: Platform, largest: int) -> None:
        """Pieces must be correct for up to `largest` tokens."""
        assert compiler in COMPILERS
        self.compiler = compiler
        self.sizes = [*(size for size in SIZES if size < largest), largest]
        self.made_with = {
            "largest": largest,
            "code": hash_files([file for room in ROOMS for file in (HOUSE / room).glob("*.py")]),
            "torch": torch.__version__,
            "device": f"{platform.name} {platform.describe()}",
        }
        self.functions: dict[str, Function] = {}
        """By the piece's key."""
        self.num_compiled = 0
        self.num_loaded = 0

    def function(self, piece: Piece) -> Function:
        """Takes the piece's inputs, returns its outputs; correct for any number of tokens from two to the largest."""
        if piece.key not in self.functions:
            if self.compiler == "none":
                # GraphModule.forward, not the module: calling a module asks for hooks first.
                self.functions[piece.key] = piece.graph.forward
            else:
                self.functions[piece.key] = self._load(piece) or self._compile(piece)
        return self.functions[piece.key]

    def path(self, piece: Piece) -> Path:
        text = json.dumps(self.made_with | {"piece": piece.key}, sort_keys=True)
        return cache_folder().with_name("pieces") / hashlib.sha256(text.encode()).hexdigest()[:32]

    def _load(self, piece: Piece) -> Function | None:
        from torch._inductor.standalone_compile import CompiledArtifact  # the import takes a second

        path = self.path(piece)
        if not path.exists():
            return None
        try:
            loaded: Function = CompiledArtifact.load(path=str(path), format="binary")
        except Exception as error:  # a damaged file can raise anything that pickle can
            log.warning("%s is not a compiled piece (%s: %s); it is compiled again", path, type(error).__name__, error)
            return None
        self.num_loaded += 1
        return loaded

    def _compile(self, piece: Piece) -> Function:
        examples = [node.meta["example_value"] for node in piece.graph.graph.nodes if node.op == "placeholder"]
        try:
            compiled = torch._inductor.standalone_compile(piece.graph, examples, dynamic_shapes="from_graph", aot=True)
        except torch._inductor.exc.InductorError as error:
            reason = str(error).strip().split("\n")[0]
            raise ValueError(
                f"graphs compiled: Inductor failed ({reason}); use graphs traced or full, which do without it"
            ) from error
        self.num_compiled += 1
        check_sizes(examples, self.sizes)
        unwritten = replace_file(self.path(piece), lambda file: compiled.save(path=str(file), format="binary"))
        if unwritten is not None:
            log.warning("compiled pieces are not cached, the next start compiles again: %s", unwritten)
        return compiled


def check_sizes(examples: list[Any], sizes: Sequence[int]) -> None:
    """Assert that the compiler assumed nothing about the number of tokens that is false for one of `sizes`: a compiled
    piece has no guards, so it would give wrong results without an error."""
    for example in examples:
        if isinstance(example, torch.Tensor) and example.dim() and isinstance(example.shape[0], torch.SymInt):
            node = example.shape[0].node
            assert node.expr.is_Symbol, f"a compiled piece is valid for {node.expr} tokens only"
            for expression in (guard.expr for guard in node.shape_env.guards):
                if expression.free_symbols == {node.expr}:
                    wrong = [size for size in sizes if not expression.subs(node.expr, size)]
                    assert not wrong, f"a compiled piece is valid where {expression}, not for {wrong} tokens"
