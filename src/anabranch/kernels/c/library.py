"""The functions of `kernels.c`, and what their arguments must be."""

import ctypes
import struct
from collections.abc import Callable
from typing import Any

import torch

from anabranch.kernels.c.build import load

MAX_ROWS = 32
"""Tokens up to which these kernels are faster than the BLAS library, which copies a weight before it multiplies."""

P, L, I, F = ctypes.c_void_p, ctypes.c_long, ctypes.c_int, ctypes.c_float
Calls = list[tuple[str, tuple[Any, ...]]]
ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "linear": (P, P, P, P, L, L, L, I, I),
    "gated_silu": (P, P, L, L),
    "add_gated": (P, P, P, P, L, L),
    "add_rms_norm": (P, P, P, P, P, L, L, F),
    "rope_store": (*[P] * 11, *[L] * 8, F),
    "attention": (*[P] * 7, *[L] * 9, F, F, I),
    "route": (P, P, P, L, L, L, I, F),
    "experts": (*[P] * 6, *[L] * 5, F, I, I),
}

recordings: list[Calls] = []
"""The last of these gets every call; see recording.py."""
_loaded = load()
problem = _loaded if isinstance(_loaded, str) else ""
"""Why there are no kernels; "": there are."""


def matrix_units(wanted: int = -1) -> bool:
    """Whether matrices in bf16 are multiplied by the CPU's matrix units (AMX); 0: not from here on, 1: where it has
    any."""
    return bool(getattr(_loaded, "units", int)(wanted))


def function(name: str) -> Callable[..., None]:
    found: Any = getattr(_loaded, name)
    found.argtypes, found.restype = ARGUMENTS[name], None

    def call(*arguments: Any) -> None:
        found(*arguments)
        if recordings:
            recordings[-1].append((name, arguments))

    return call


def replayer(calls: Calls) -> Callable[[], None]:
    """Makes the calls again, with the same arguments, in one."""
    numbers = {name: number for number, name in enumerate(ARGUMENTS)}
    packed = bytearray()
    for name, arguments in calls:
        kinds = "".join("d" if kind is F else "q" for kind in ARGUMENTS[name])
        packed += struct.pack(f"q{kinds}", numbers[name], *(0 if x is None else x for x in arguments))
        packed += bytes(8 * (20 - len(kinds)))
    memory = (ctypes.c_char * len(packed)).from_buffer(packed)
    assert not isinstance(_loaded, str)
    replay = _loaded.replay
    replay.argtypes, replay.restype = (P, L), None
    return lambda: replay(memory, len(calls))


def is_plain(*tensors: torch.Tensor | None) -> bool:
    """Whether the kernels can read all of them."""
    for x in tensors:  # noqa: SIM110  a generator takes twice as long
        if x is not None and (x.dtype != torch.float32 or not x.is_contiguous()):
            return False
    return True


def pointer(x: torch.Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()
