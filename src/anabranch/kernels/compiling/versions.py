"""What differs between Triton's releases: Gluon, compilation before the first launch, and the keys of Triton's cache.

A version without the first two falls back: to portable kernels, and to compilation at the first launch. `anabranch
doctor` prints what applies.
"""

import inspect
from typing import Any

import triton
from triton.runtime.jit import DependenciesFinder, JITFunction

GLUON = ("3.6", "3.7", "3.8", "3.9")
"""Triton versions for which every Gluon kernel compiles (tests/kernels/compiling/test_versions.py)."""
DO_COMPILE = ["self", "key", "signature", "device", "constexprs", "options", "attrs", "warmup"]
"""Parameters of JITFunction._do_compile in the Triton versions that `precompile.recording` supports."""


def gluon_problem() -> str | None:
    """Why Gluon kernels are not used with this Triton; None if they are."""
    if ".".join(triton.__version__.split(".")[:2]) in GLUON:
        return None
    return f"Gluon kernels are written for Triton {', '.join(GLUON)}, not {triton.__version__}"


def recording_problem() -> str | None:
    """Why launches cannot be recorded with this Triton; None if they can."""
    if list(inspect.signature(JITFunction._do_compile).parameters) == DO_COMPILE:
        return None
    return f"Triton {triton.__version__} compiles kernels by an interface that is not supported"


def settle_cache_keys() -> None:
    """Make the key of a kernel in Triton's cache depend on the kernel alone.

    The key is a hash of the kernel, of the functions it calls, and of the constants (`tl.constexpr` globals) that they
    use. Triton 3.6 reads the constants of a called function before it has collected them, so they count only if that
    function was hashed earlier. Two processes may then have two keys for one kernel and not find what the other
    compiled, and a changed constant may leave the key as it was. Here called functions are hashed first.

    Called when `kernels.triton` is imported, before any of its kernels is hashed, also in the compiling processes. Does
    nothing when called again, or to a Triton that hashes in another way.
    """
    update = getattr(DependenciesFinder, "_update_hash", None)
    if update is None or getattr(update, "settled", False):
        return

    def update_settled(self: DependenciesFinder, func: Any) -> Any:
        _ = func.cache_key  # collects its constants, and includes them
        own = set(self.used_global_vals)
        result = update(self, func)
        for other in set(self.used_global_vals) - own:  # every launch would check each of them
            del self.used_global_vals[other]
        return result

    update_settled.settled = True  # type: ignore[attr-defined]
    DependenciesFinder._update_hash = update_settled
