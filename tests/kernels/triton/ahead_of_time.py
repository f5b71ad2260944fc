"""Kernels compiled for GPUs that are not there: what a launch would compile, and what came out of it.

with recorded(module, "norm_kernel") as launches:
    module.launch(...)
for launch in launches:
    compile_for("sm_90", launch)
"""

import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TARGETS = {
    "sm_80": ("cuda", 80, 32),
    "sm_90": ("cuda", 90, 32),
    "sm_100": ("cuda", 100, 32),
    "gfx90a": ("hip", "gfx90a", 64),
    "gfx942": ("hip", "gfx942", 64),
    "gfx950": ("hip", "gfx950", 64),
}
AMD = tuple(target for target in TARGETS if target.startswith("gfx"))
SHARED = {
    "sm_80": 163 << 10,
    "sm_90": 226 << 10,
    "sm_100": 226 << 10,
    "gfx90a": 64 << 10,
    "gfx942": 64 << 10,
    "gfx950": 160 << 10,
}
"""Bytes of shared memory that one program may have."""


class NoDevice:
    """All of a driver that a launch asks before it looks for its kernel."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget(*TARGETS["sm_90"])

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


DEPENDENT = ("sm_90", "sm_100")
"""Where kernels are launched before their predecessor is done."""
DEPENDENT_LAUNCH = "anabranch.kernels.triton.launch.dependent_launch"
"""What says so, for tests that replace it."""
TYPES = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.uint8: "*u8",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.int8: "*i8",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
OPTIONS = ("num_warps", "num_stages", "launch_pdl", "maxnreg", "enable_fp_fusion")


@dataclass(frozen=True)
class Launch:
    function: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@contextmanager
def recorded(module: ModuleType, *names: str) -> Iterator[list[Launch]]:
    """Launches of these kernels are kept instead of made."""
    launches: list[Launch] = []
    before = {name: getattr(module, name) for name in names}

    class Recorder:
        def __init__(self, function: Any) -> None:
            self.function = function

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *args, **kwargs: launches.append(Launch(self.function, grid, args, kwargs))

    for name, function in before.items():
        setattr(module, name, Recorder(function))
    try:
        yield launches
    finally:
        for name, function in before.items():
            setattr(module, name, function)


def compile_for(target: str, launch: Launch) -> Any:
    """As a launch would: integers that 16 divides and the addresses of tensors count as aligned."""
    function = launch.function
    values = dict(zip(function.arg_names, launch.args)) | launch.kwargs
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    aligned: dict[tuple[int], Any] = {}
    for place, param in enumerate(function.params):
        value, name = values[param.name], param.name
        if param.is_constexpr or value is None or (isinstance(value, int) and value == 1 and not plain(param)):
            signature[name], constants[name] = "constexpr", value
            continue
        if isinstance(value, torch.Tensor):
            signature[name] = TYPES[value.dtype]
        elif hasattr(value, "block_shape"):
            shape = ",".join(map(str, value.block_shape))
            signature[name] = f"tensordesc<{TYPES[value.base.dtype][1:]}[{shape}],{value.layout!r}>"
        else:
            signature[name] = "fp32" if isinstance(value, float) else "i32" if abs(value) < 1 << 31 else "i64"
        divides = isinstance(value, int) and value % 16 == 0 and not plain(param)
        if divides or (isinstance(value, torch.Tensor) and value.storage_offset() * value.element_size() % 16 == 0):
            aligned[(place,)] = [["tt.divisibility", 16]]
    options = {name: value for name, value in launch.kwargs.items() if name in OPTIONS}
    source = ASTSource(function, signature, constants, aligned)
    return triton.compile(source, target=GPUTarget(*TARGETS[target]), options=options)


def plain(param: Any) -> bool:
    return bool(param.do_not_specialize)


def resources(compiled: Any) -> dict[str, int]:
    """Registers, stack and local memory that the assembler gave a kernel: {"REG": 40, "STACK": 0, "LOCAL": 0, ...}."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    line = next(line for line in said.splitlines() if "REG:" in line)
    return {name: int(number) for name, number in re.findall(r"(\w+):(\d+)", line)}


def loads(compiled: Any) -> dict[str, int]:
    """Loads from global memory in the PTX: {"wide": those of 16 bytes, "narrow": all others}."""
    found = re.findall(r"ld\.global[\w.:]*", compiled.asm["ptx"])
    wide = sum(bool(re.search(r"v4\.b32|v2\.b64|v8\.b16", load)) for load in found)
    return {"wide": wide, "narrow": len(found) - wide}


def loads_around_wait(compiled: Any) -> tuple[int, int]:
    """Loads from global memory (asynchronous ones too) before and behind the wait for the kernel before."""
    before, wait, after = compiled.asm["ptx"].partition("griddepcontrol.wait")
    assert wait, "does not wait for its predecessor"
    assert "griddepcontrol.launch_dependents" in compiled.asm["ptx"]
    pattern = r"ld\.global|cp\.async\.c[ag]\.shared"
    return len(re.findall(pattern, before)), len(re.findall(pattern, after))
