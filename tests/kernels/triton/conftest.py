"""Triton's interpreter without what takes a quarter of its time: at every call of a device function it searches all
members of `triton.language` for those to replace, which are the same each time."""

import functools
import importlib.util
import inspect
import os
from typing import Any


def speed_up_interpreter() -> None:
    from triton.language.core import is_builtin
    from triton.runtime import interpreter

    @functools.cache
    def names_of_builtins(package: Any) -> list[str]:
        return [name for name, member in inspect.getmembers(package) if is_builtin(member)]

    def patch_builtin(package: Any, *rest: Any) -> None:
        for name in names_of_builtins(package):
            if is_builtin(member := getattr(package, name)):  # not replaced yet
                interpreter._patch_attr(package, name, member, *rest)

    interpreter._patch_builtin = patch_builtin


if os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton"):
    speed_up_interpreter()
