"""How kernels are launched: what the device and this Triton support, memory shared by launches, and grid arithmetic.

`cdiv` and `next_power_of_2` replace Triton's, which take microseconds when called from Python: a layer calls them
twenty times.
"""

import functools
import importlib
import logging
from types import ModuleType
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from anabranch.kernels.compiling.versions import gluon_problem
from anabranch.kernels.tuning.experts_tiles import Machine

log = logging.getLogger(__name__)

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
FP8 = torch.float8_e4m3fn


@functools.cache
def dependent_launch(device: torch.device) -> bool:
    """Whether a kernel may be launched before its predecessor is done (it waits on the device): Hopper and later."""
    nvidia = device.type == "cuda" and torch.version.cuda is not None
    return nvidia and torch.cuda.get_device_capability(device) >= (9, 0)


@functools.cache
def converts_fp8(device: torch.device) -> bool:
    """Whether Triton converts from and to FP8 there: on NVIDIA GPUs from compute capability 8.9 on."""
    nvidia = device.type == "cuda" and torch.version.cuda is not None
    return not nvidia or torch.cuda.get_device_capability(device) >= (8, 9)


def launch_options(device: torch.device) -> dict[str, Any]:
    """For a kernel with the constant DEPENDENT, which waits on the device for its predecessor."""
    return {"DEPENDENT": True, "launch_pdl": True} if dependent_launch(device) else {"DEPENDENT": False}


@triton.jit
def wait_for_predecessor(DEPENDENT: tl.constexpr, EARLY: tl.constexpr = False, trigger=True):
    """With dependent launch: wait until the kernels before have finished, then, if `trigger`, let the next one start.
    EARLY: let it start before the wait; before its own wait it may then read only parameters."""
    if DEPENDENT:
        if EARLY:
            gdc_launch_dependents()
        gdc_wait()
        if not EARLY:
            if trigger != 0:
                gdc_launch_dependents()


@triton.jit
def prefetch(pointer):
    """Prefetch lines into L2, without waiting for them."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointer], dtype=tl.int32, is_pure=False, pack=1
    )


def is_hopper(device: torch.device) -> bool:
    return dependent_launch(device) and torch.cuda.get_device_capability(device) == (9, 0)


@functools.cache
def gluon_kernels(name: str, device: torch.device) -> ModuleType | None:
    """The module of this name, with Gluon kernels for Hopper; None, and not imported, where they cannot run."""
    if not is_hopper(device):
        return None
    if problem := gluon_problem():
        log.warning("%s is replaced by slower portable kernels: %s", name, problem)
        return None
    return importlib.import_module(f"anabranch.kernels.triton.{name}")


@functools.cache
def num_processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


fixed_tiles = False
"""See Machine.fixed."""


def fix_tiles(fixed: bool) -> None:
    """For all calls from now on."""
    global fixed_tiles
    fixed_tiles = fixed


def machine_of(device: torch.device) -> Machine:
    return _machine(device, fixed_tiles)


@functools.cache
def _machine(device: torch.device, fixed: bool) -> Machine:
    if device.type != "cuda":
        return Machine(fixed=fixed)
    properties = torch.cuda.get_device_properties(device)
    shared = getattr(properties, "shared_memory_per_block_optin", 0) or Machine().shared_bytes
    gluon = [gluon_kernels(name, device) for name in ("attention_hopper", "experts_hopper")]
    return Machine(shared - 1024, properties.multi_processor_count, is_hopper(device), None not in gluon, fixed)


def lasting_zeros(device: torch.device, *shape: int) -> torch.Tensor:
    """int32 counters for launches that reset them to zero. The caller makes them once and never frees them, because
    captured graphs hold their address. They must not be memory of a graph's pool: the engine runs each step once
    before it captures it. Launches that share them must not overlap."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "a kernel is captured before its first run, so its permanent counters would be memory of that graph: "
            "call it once before the capture"
        )
    return torch.zeros(shape, dtype=torch.int32, device=device)


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The least power of 2 that is at least n; 0 for 0."""
    return 1 << (n - 1).bit_length() if n > 0 else 0
