"""Makes the key of a kernel in Triton's cache depend on the kernel alone.

The key is a hash of the kernel, of the functions it calls, and of the constants (`tl.constexpr` globals) that they use.
Triton 3.6 reads the constants of a called function before it has collected them, so they count only if that function
was hashed earlier. Two processes may then have two keys for one kernel and not find what the other compiled, and a
changed constant may leave the key as it was.

`settle` is called when `kernels.triton` is imported, before any of its kernels is hashed, also in the compiling
processes. It does nothing to a Triton that hashes in another way.
"""

from typing import Any

from triton.runtime.jit import DependenciesFinder


def settle() -> None:
    """Hash called functions before their constants are read. Calling it again has no effect."""
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
