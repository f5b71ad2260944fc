"""Work on npu:0, computed on the CPU: every operator that reaches torch_npu's kernels is taken over here.

An `npu::` operator is first given to torch_npu's own Meta kernel, with tensors of the same shapes, strides and dtypes:
it refuses what the real one would, and says what shapes and dtypes come out. Then a function of `references.py`
computes, and what it gives must have those shapes. All other operators are torch's, and the CPU's own kernels do them.
Tensors stay on npu:0 all the while; views are torch_npu's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from tests.npu.references import REFERENCES
from tests.npu.rig import Runtime

NATIVE = {
    "aten::empty.memory_format",
    "aten::empty_strided",
    "aten::_pin_memory",
    "aten::is_pinned",
    "aten::_local_scalar_dense",
    "aten::record_stream",
}
"""What the stub runtime can do: it has memory and copies."""

WITHOUT_META = {"npu::npu_format_cast"}
"""Judged by their schema alone, which torch has checked when they come here."""


class OnCpu(TorchDispatchMode):
    def __init__(self, runtime: Runtime | None = None) -> None:
        super().__init__()
        self.runtime = runtime
        """Is told each operator and the stream it was enqueued on."""
        self.calls: list[str] = []
        """The npu:: operators, in order."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = function._schema.name + (f".{function._overloadname}" if function._overloadname != "default" else "")
        on_npu = any(is_npu(x) for x in leaves((args, kwargs))) or _names_npu(kwargs.get("device"))
        if not on_npu or name in NATIVE:
            if name == "aten::record_stream" and self.runtime is not None:
                self.runtime.note("record_stream")
            return function(*args, **kwargs)
        if is_composite(name):
            with self:
                return function.decompose(*args, **kwargs)
        if function.is_view:
            return function(*args, **kwargs)
        if name == "aten::copy_":
            return self._copy(*args[:2])
        if name == "aten::_to_copy":
            return self._to_copy(args[0], kwargs)
        if self.runtime is not None:
            self.runtime.note(f"{name} on stream {self.runtime.stream()}")
        if name.startswith("npu::"):
            self.calls.append(name.removeprefix("npu::"))
            return self._run(function, args, kwargs, by=lambda *a, **k: judged(function, name, a, k))
        return self._run(function, args, kwargs, by=function)

    def _run(self, function: Any, args: Any, kwargs: Any, by: Callable[..., Any]) -> Any:
        came_from: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

        def down(x: Any) -> Any:
            if not is_npu(x):
                return x
            copy = to_host(x)
            came_from[id(copy)] = x, copy
            return copy

        host_args, host_kwargs = tree_map(down, (args, kwargs))
        if "device" in host_kwargs:
            host_kwargs["device"] = "cpu"
        result = by(*host_args, **host_kwargs)
        for i, argument in enumerate(function._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                written = host_kwargs.get(argument.name, host_args[i] if i < len(host_args) else None)
                if id(written) in came_from:
                    put_back(came_from[id(written)][0], written)

        def up(x: Any) -> Any:
            if not isinstance(x, torch.Tensor):
                return x
            return came_from[id(x)][0] if id(x) in came_from else to_npu(x)

        return tree_map(up, result)

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        host = to_host(source) if is_npu(source) else source
        if is_npu(target):
            put_back(target, host)
        else:
            target.copy_(host)
        return target

    def _to_copy(self, source: torch.Tensor, kwargs: dict[str, Any]) -> torch.Tensor:
        host = to_host(source) if is_npu(source) else source
        device = kwargs.get("device") or source.device
        host = host.to(kwargs.get("dtype") or host.dtype, copy=True)
        return to_npu(host) if _names_npu(device) else host


def is_composite(name: str) -> bool:
    """Made of others, and not taken over by torch_npu. In inference mode torch leaves them whole."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    return has(name, "CompositeImplicitAutograd") and not has(name, "PrivateUse1")


def judged(function: Any, name: str, args: Any, kwargs: Any) -> Any:
    """The reference's result, if torch_npu's Meta kernel takes the call and gives such shapes."""
    if name in WITHOUT_META:
        return REFERENCES[name](*args, **kwargs)
    expected = function(*tree_map(_meta, args), **tree_map(_meta, kwargs))
    found = REFERENCES[name](*args, **kwargs)
    if isinstance(found, tuple) and len(found) < len(expected):  # results that nobody reads have a shape and no more
        found += tuple(torch.empty(one.shape, dtype=one.dtype) for one in expected[len(found) :])
    for want, got in zip(leaves(expected), leaves(found), strict=True):
        if isinstance(want, torch.Tensor):
            assert (got.shape, got.dtype) == (want.shape, want.dtype), f"{name}: {got.shape} {got.dtype}, not {want}"
    return found


def leaves(tree: Any) -> list[Any]:
    found: list[Any] = []
    tree_map(found.append, tree)
    return found


def is_npu(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.device.type == "npu"


def _names_npu(device: Any) -> bool:
    return device is not None and torch.device(device).type == "npu"


def _meta(x: Any) -> Any:
    if not isinstance(x, torch.Tensor):
        return x
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")


def _storage(x: torch.Tensor) -> torch.Tensor:
    """All of the memory that x is a view of, flat."""
    return torch.as_strided(x, (x.untyped_storage().nbytes() // x.element_size(),), (1,), 0)


def to_host(x: torch.Tensor) -> torch.Tensor:
    with torch._C._DisableTorchDispatch():
        return torch.as_strided(_storage(x).cpu(), x.shape, x.stride(), x.storage_offset())


def put_back(x: torch.Tensor, values: torch.Tensor) -> None:
    with torch._C._DisableTorchDispatch():
        flat = _storage(x)
        host = flat.cpu()
        torch.as_strided(host, x.shape, x.stride(), x.storage_offset()).copy_(values)
        flat.copy_(host)


def to_npu(x: torch.Tensor) -> torch.Tensor:
    with torch._C._DisableTorchDispatch():
        dense = x.contiguous()
        fresh = torch.empty(dense.shape, dtype=dense.dtype, device="npu")
        return fresh.copy_(dense)
