"""What a machine can do. With `kernels/` the only room that names hardware.

`current()` gives the one platform of this process: ANABRANCH_PLATFORM if set, else the first available one.
Third parties add a platform through the entry point group `anabranch.platforms` (name → Platform subclass).
"""

from __future__ import annotations

import difflib
import functools
import importlib
import importlib.metadata
import os

from anabranch.platforms.platform import Fetch, Fork, Graph, Memory, Platform, SideStream, Staging

__all__ = ["Fetch", "Fork", "Graph", "Memory", "Platform", "SideStream", "Staging", "current", "make", "names"]

# In order of detection: the CPU is always available, so it comes last.
BUILT_IN = {
    "cuda": "anabranch.platforms.cuda:CudaPlatform",
    "hip": "anabranch.platforms.hip:HipPlatform",
    "npu": "anabranch.platforms.npu:NpuPlatform",
    "xpu": "anabranch.platforms.xpu:XpuPlatform",
    "mlx": "anabranch.platforms.mlx:MlxPlatform",
    "cpu": "anabranch.platforms.cpu:CpuPlatform",
    "fake": "anabranch.platforms.fake:FakePlatform",
}


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
        except Exception as error:  # somebody else's code: say whose
            raise ValueError(f"platform {name!r} ({third_party[name].value}) does not load: {error}") from error
    elif name in BUILT_IN:
        module, _, attribute = BUILT_IN[name].partition(":")
        found = getattr(importlib.import_module(module), attribute)
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
    forced = os.environ.get("ANABRANCH_PLATFORM")
    if forced:
        return make(forced)
    for name in names():
        platform = load(name)
        if platform.available():
            return platform()
    raise AssertionError("the CPU platform is always available")
