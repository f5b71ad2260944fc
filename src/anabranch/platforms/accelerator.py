"""What devices with streams share, since torch.cuda, torch.xpu and torch.npu have the same functions: streams, events,
page-locked memory, captures. What a chip is called and can compute is in its own file.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch

from anabranch.platforms.platform import Memory, Platform, Take


class AcceleratorPlatform(Platform):
    device_type: ClassVar[str]
    """As torch names the device."""
    providers = {"triton": "anabranch.kernels.triton", "torch": "anabranch.kernels.torch"}
    graph_class: ClassVar[str] = ""
    """The class of captured graphs in the device's module; empty: nothing is captured."""

    @property
    def api(self) -> Any:
        """The device's module, as torch.cuda is one."""
        return torch.get_device_module(self.device_type)

    @property
    def device(self) -> torch.device:
        return torch.device(self.device_type, self.api.current_device())

    def memory(self) -> Memory:
        free, total = self.api.mem_get_info(self.device)
        cached = self.api.memory_reserved(self.device) - self.api.memory_allocated(self.device)
        return Memory(free=free, total=total, cached=cached)

    def has(self, capability: str) -> bool:
        if capability == "bf16":
            return bool(self.api.is_bf16_supported())
        return capability == "streams" or (capability == "graphs" and bool(self.graph_class))

    def compute_dtype(self, wanted: torch.dtype) -> torch.dtype:
        return torch.float16 if wanted == torch.bfloat16 and not self.has("bf16") else wanted

    def synchronize(self) -> None:
        self.api.synchronize(self.device)

    def fetch(self, tensor: torch.Tensor) -> DeviceFetch:
        return DeviceFetch(self.api, tensor)

    def make_staging(self, num_bytes: int) -> DeviceStaging:
        return DeviceStaging(self.api, num_bytes, self.device)

    def make_side_stream(self) -> DeviceSideStream:
        return DeviceSideStream(self.api, self.device)

    def make_graph_pool(self) -> Any:
        return self.api.graph_pool_handle() if self.graph_class else None

    def capture(self, function: Callable[[], object], pool: Any = None) -> Any:
        if not self.graph_class:
            return None
        # Not the module's own `graph()`, which is slow: it collects garbage and empties the allocator each time.
        graph = getattr(self.api, self.graph_class)()
        main, stream = self.api.current_stream(self.device), self._capture_stream()
        stream.wait_stream(main)
        with self.api.stream(stream):
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                function()
            finally:
                graph.capture_end()
        main.wait_stream(stream)
        return graph

    @functools.cache  # noqa: B019 (a platform lives as long as the process)
    def _capture_stream(self) -> Any:
        return self.api.Stream(self.device)


class DeviceSideStream:
    def __init__(self, api: Any, device: torch.device) -> None:
        self.api = api
        self.stream = api.Stream(device)

    def fork(self, *inputs: torch.Tensor) -> DeviceFork:
        return DeviceFork(self, inputs)


class DeviceFork:
    def __init__(self, side: DeviceSideStream, inputs: tuple[torch.Tensor, ...]) -> None:
        self.api, self.stream, self.inputs = side.api, side.stream, inputs
        self.ready = self.api.current_stream(self.stream.device).record_event()

    @contextmanager
    def side(self) -> Iterator[None]:
        with self.api.stream(self.stream):
            self.stream.wait_event(self.ready)
            yield
        # The allocator must not reuse the inputs' memory while the side stream may still read it.
        for tensor in self.inputs:
            tensor.record_stream(self.stream)

    def join(self, *results: torch.Tensor) -> None:
        main = self.api.current_stream(self.stream.device)
        main.wait_stream(self.stream)
        for tensor in results:
            tensor.record_stream(main)


class DeviceStaging:
    """Page-locked memory and a stream of its own: copies run while the host and other copies do."""

    def __init__(self, api: Any, num_bytes: int, device: torch.device) -> None:
        self.api = api
        self.buffer = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        self.stream = api.Stream(device)

    def put(self, source: torch.Tensor, places: Sequence[tuple[torch.Tensor, Take | None]]) -> None:
        with self.api.stream(self.stream):
            (target, take), *others = places
            if not others and take is None and target.dtype == source.dtype and target.is_contiguous():
                target.copy_(source, non_blocking=True)
                return
            # Torch would convert or rearrange on the host, and wait; the device does it instead.
            arrived = source.to(self.stream.device, non_blocking=True)
            for target, take in places:
                target.copy_(arrived if take is None else take(arrived))

    def wait(self) -> None:
        self.stream.synchronize()


class DeviceFetch:
    """Page-locked memory and an event: waiting for it does not wait for work enqueued later."""

    def __init__(self, api: Any, tensor: torch.Tensor) -> None:
        self.host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self.host.copy_(tensor, non_blocking=True)
        self.done = api.current_stream(tensor.device).record_event()

    def wait(self) -> torch.Tensor:
        self.done.synchronize()
        return self.host
