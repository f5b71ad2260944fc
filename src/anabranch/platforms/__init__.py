"""What a machine can do. `current()` is the platform of this process: ANABRANCH_PLATFORM if set, else the first that is
available. Third parties add one through the entry point group `anabranch.platforms` (name → Platform subclass).
"""

import difflib
import functools
import importlib
import importlib.metadata
import os

from anabranch.platforms.platform import Fetch, Fork, Graph, Memory, OneShot, Platform, SideStream, Staging, Take

__all__ = [
    "Fetch",
    "Fork",
    "Graph",
    "Memory",
    "OneShot",
    "Platform",
    "SideStream",
    "Staging",
    "Take",
    "current",
    "make",
    "names",
]

BUILT_IN = ("cuda", "hip", "npu", "xpu", "mlx", "cpu", "fake")
"""In order of detection; the CPU is always available. `cuda` is `cuda.CudaPlatform`, and so on."""


def _third_party() -> dict[str, importlib.metadata.EntryPoint]:
    return {point.name: point for point in importlib.metadata.entry_points(group="anabranch.platforms")}


def names() -> list[str]:
    """Every platform that can be asked for, in order of detection: third parties' first."""
    return [*_third_party(), *BUILT_IN]


def load(name: str) -> type[Platform]:
    third_party = _third_party()
    if name in third_party:
        try:
            found = third_party[name].load()
        except Exception as error:  # another package's code
            raise ValueError(f"platform {name!r} ({third_party[name].value}) does not load: {error}") from error
    elif name in BUILT_IN:
        found = getattr(importlib.import_module(f"{__name__}.{name}"), f"{name.capitalize()}Platform")
    else:
        near = difflib.get_close_matches(name, names(), 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"unknown platform {name!r} (known: {', '.join(names())}){hint}")
    if not (isinstance(found, type) and issubclass(found, Platform)):
        raise ValueError(f"platform {name!r}: {found!r} is not a subclass of anabranch.platforms.Platform")
    return found


def make(name: str) -> Platform:
    """The platform of that name, whether or not detection would choose it."""
    return load(name)()


@functools.cache
def current() -> Platform:
    """Detected once per process."""
    if forced := os.environ.get("ANABRANCH_PLATFORM"):
        return make(forced)
    return next(platform for platform in map(load, names()) if platform.available())()
