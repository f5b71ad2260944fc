"""NVIDIA GPUs through torch.cuda."""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
    proven = "tests marked gpu, on an H200"

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

    def make_side_stream(self) -> CudaSideStream:
        return CudaSideStream(torch.cuda.Stream(self.device))

    def make_graph_pool(self) -> Any:
        return torch.cuda.graph_pool_handle()

    def capture(self, function: Callable[[], object], pool: Any = None) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            function()
        return graph


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


class CudaFetch:
    """Pinned memory and an event: waiting for it does not wait for work enqueued later."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self.host.copy_(tensor, non_blocking=True)
        self.done = torch.cuda.current_stream(tensor.device).record_event()

    def wait(self) -> torch.Tensor:
        self.done.synchronize()
        return self.host
