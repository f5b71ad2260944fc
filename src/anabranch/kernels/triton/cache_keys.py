"""Triton's name for a kernel in its cache, made to depend on the kernel alone.

The name is a hash of the kernel, of the functions it calls, and of the constants (`tl.constexpr` globals) that all of
them use. Triton 3.6 asks a called function for its constants before it has looked for them: they count only if
something hashed that function before. So two processes may have two names for one kernel, and what one compiled ahead
the other does not find; and who changes such a constant may be served the kernel with the old one.

`settle` is called when this package is imported: before anything of it is hashed, and in the processes that compile
too. It knows nothing of kernels, and does nothing to a Triton that hashes in another way.
"""

from __future__ import annotations

from typing import Any

from triton.runtime.jit import DependenciesFinder


def settle() -> None:
    """Called functions are hashed before their constants are asked for; once is enough."""
    update = getattr(DependenciesFinder, "_update_hash", None)
    if update is None or getattr(update, "settled", False):
        return

    def update_settled(self: DependenciesFinder, func: Any) -> Any:
        _ = func.cache_key  # finds its constants, and has them in it
        own = set(self.used_global_vals)
        result = update(self, func)
        for other in set(self.used_global_vals) - own:  # every launch would look at each of them
            del self.used_global_vals[other]
        return result

    update_settled.settled = True  # type: ignore[attr-defined]
    DependenciesFinder._update_hash = update_settled
