"""Triton's interpreter without what takes half of its time. And with FP8 as GPUs have it: rounded to nearest,
saturating, and with NaN."""

import dataclasses
import functools
import importlib.util
import inspect
import os
from typing import Any


def speed_up_interpreter() -> None:
    """At every call of a device function it searches all members of `triton.language` for those to replace, which are
    the same each time, and replaces them again; at every operation it makes a table of dtypes, and for one of integers
    looks whether it overflows, to say so nowhere (but in Triton's debug mode)."""
    from triton import language
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

    patch_lang, np_dtype = interpreter._patch_lang, interpreter._get_np_dtype
    np_dtype_of_numbers = functools.cache(np_dtype)

    @functools.cache
    def languages(function: Any) -> list[Any]:
        return [module for module in (language, language.core) if module in function.__globals__.values()]

    def patch_once(function: Any) -> Any:
        """A launch replaces members of all it sees, and puts them back at its end: between, nothing is left to do."""
        done = all(module.static_print is print for module in languages(function))
        return None if done else patch_lang(function)

    def get_np_dtype(dtype: Any) -> Any:
        return np_dtype(dtype) if dtype.scalar.is_ptr() else np_dtype_of_numbers(dtype.scalar)

    interpreter._patch_lang, interpreter._get_np_dtype = patch_once, get_np_dtype
    options = interpreter.interpreter_builder.options
    assert not options.debug
    interpreter.interpreter_builder.options = dataclasses.replace(options, sanitize_overflow=False)


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
