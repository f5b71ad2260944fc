"""NVIDIA GPUs through torch.cuda."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from anabranch.platforms.platform import Memory, Platform


class CudaPlatform(Platform):
    name = "cuda"
    collective_backend = "nccl"
    providers = {"triton": "anabranch.kernels.triton", "torch": "anabranch.kernels.torch"}
    graph_mode = "full"
    memory_fraction = 0.85
    proven = "router, expert sort, experts and all families on an H200; other kernels and graphs not run yet"

    @classmethod
    def available(cls) -> bool:
        return torch.version.cuda is not None and torch.cuda.is_available()

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", torch.cuda.current_device())

    def describe(self) -> str:
        properties = torch.cuda.get_device_properties(self.device)
        return (
            f"{properties.name}, {properties.multi_processor_count} SMs, "
            f"{properties.total_memory / 1e9:.0f} GB, compute capability {properties.major}.{properties.minor}"
        )

    def memory(self) -> Memory:
        free, total = torch.cuda.mem_get_info(self.device)
        return Memory(free=free, total=total)

    def has(self, capability: str) -> bool:
        if capability in ("graphs", "streams"):
            return True
        major, minor = torch.cuda.get_device_capability(self.device)
        if capability == "bf16":
            return major >= 8
        return capability == f"sm{major}{minor}"

    def compute_dtype(self, wanted: torch.dtype) -> torch.dtype:
        return torch.float16 if wanted == torch.bfloat16 and not self.has("bf16") else wanted

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def fetch(self, tensor: torch.Tensor) -> CudaFetch:
        return CudaFetch(tensor)

    def make_staging(self, num_bytes: int) -> CudaStaging:
        return CudaStaging(num_bytes, torch.cuda.Stream(self.device))

    def make_side_stream(self) -> CudaSideStream:
        return CudaSideStream(torch.cuda.Stream(self.device))

    def make_graph_pool(self) -> Any:
        return torch.cuda.graph_pool_handle()

    def capture(self, function: Callable[[], object], pool: Any = None) -> torch.cuda.CUDAGraph:
        # Not torch.cuda.graph(): it collects garbage and empties the allocator before every capture, which takes long.
        graph = torch.cuda.CUDAGraph()
        main = torch.cuda.current_stream(self.device)
        stream = self._capture_stream()
        stream.wait_stream(main)
        with torch.cuda.stream(stream):
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                function()
            finally:
                graph.capture_end()
        main.wait_stream(stream)
        return graph

    @functools.cache  # noqa: B019 (a platform lives as long as the process)
    def _capture_stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self.device)


class CudaSideStream:
    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.stream = stream

    def fork(self, *inputs: torch.Tensor) -> CudaFork:
        return CudaFork(self.stream, inputs)


class CudaFork:
    def __init__(self, stream: torch.cuda.Stream, inputs: tuple[torch.Tensor, ...]) -> None:
        self.stream = stream
        self.inputs = inputs
        self.ready = torch.cuda.current_stream(stream.device).record_event()

    def side(self) -> AbstractContextManager[None]:
        return self._side()

    @contextmanager
    def _side(self) -> Iterator[None]:
        with torch.cuda.stream(self.stream):
            self.stream.wait_event(self.ready)
            yield
        # The allocator must not hand the inputs' memory out again while the side stream may still read it.
        for tensor in self.inputs:
            tensor.record_stream(self.stream)

    def join(self, *results: torch.Tensor) -> None:
        main = torch.cuda.current_stream(self.stream.device)
        main.wait_stream(self.stream)
        for tensor in results:
            tensor.record_stream(main)


class CudaStaging:
    """Page-locked memory and a stream of its own: copies run beside each other and beside the host."""

    def __init__(self, num_bytes: int, stream: torch.cuda.Stream) -> None:
        self.buffer = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        self.stream = stream

    def put(self, source: torch.Tensor, places: Sequence[tuple[torch.Tensor, tuple[slice, ...]]]) -> None:
        with torch.cuda.stream(self.stream):
            (target, part), *others = places
            if not others and not part and target.dtype == source.dtype and target.is_contiguous():
                target.copy_(source, non_blocking=True)
                return
            # What is not a plain copy is done on the device: torch would do it on the host, and wait.
            arrived = source.to(self.stream.device, non_blocking=True)
            for target, part in places:
                target.copy_(arrived[part])

    def wait(self) -> None:
        self.stream.synchronize()


class CudaFetch:
    """Pinned memory and an event: waiting for it does not wait for work enqueued later."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self.host.copy_(tensor, non_blocking=True)
        self.done = torch.cuda.current_stream(tensor.device).record_event()

    def wait(self) -> torch.Tensor:
        self.done.synchronize()
        return self.host
