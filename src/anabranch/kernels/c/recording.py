"""A function's calls of C kernels, recorded so that they can be made again in one: what Python and torch do around them
takes longer than the kernels where a model is small.

The tensors stay: a replay reads and writes the memory that the recorded calls have read and written.
"""

from collections.abc import Callable
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from anabranch.kernels.c.library import Calls, recordings, replayer

HARMLESS = {"aten::empty", "aten::new_empty", "aten::empty_like", "aten::detach"}


class _Watch(TorchDispatchMode):
    """Keeps the tensors that are made, and notes whether torch computes anything itself."""

    _should_skip_dynamo = classmethod(lambda cls: False)  # its import takes a second

    def __init__(self) -> None:
        super().__init__()
        self.made: list[Any] = []
        self.computes = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.made.append(out)
        self.computes |= not (func.is_view or func._schema.name in HARMLESS)
        return out


def record(function: Callable[[], object]) -> Callable[[], None] | None:
    """Run the function; what repeats its effects, or None where it does anything but call C kernels."""
    calls: Calls = []
    recordings.append(calls)
    try:
        with _Watch() as watch:
            function()
    finally:
        recordings.pop()
    if watch.computes or not calls:
        return None
    replay, made = replayer(calls), watch.made

    def repeat(kept: object = made) -> None:
        replay()

    return repeat
