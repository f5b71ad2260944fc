"""Triton's interpreter without what takes a quarter of its time: at every call of a device function it searches all
members of `triton.language` for those to replace, which are the same each time. And with FP8 as GPUs have it:
rounded to nearest, saturating, and with NaN."""

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


def correct_fp8() -> None:
    import torch
    from triton import language as tl
    from triton.runtime import interpreter

    convert_float = interpreter._convert_float

    def convert(input: Any, input_dtype: Any, output_dtype: Any, rounding_mode: Any) -> Any:
        if (input_dtype, output_dtype) == (tl.float32, tl.float8e4nv):
            rounded = torch.from_numpy(input.copy()).clamp(-448, 448).to(torch.float8_e4m3fn)
            return rounded.view(torch.uint8).numpy()
        if input_dtype == tl.float8e4nv and output_dtype in (tl.float32, tl.float16):
            numbers = torch.from_numpy(input.view("uint8").copy()).view(torch.float8_e4m3fn)
            return numbers.to(getattr(torch, f"float{output_dtype.primitive_bitwidth}")).numpy()
        return convert_float(input, input_dtype, output_dtype, rounding_mode)

    interpreter._convert_float = convert


if os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton"):
    speed_up_interpreter()
    correct_fp8()
