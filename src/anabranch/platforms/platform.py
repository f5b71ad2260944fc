"""The contract between the engine and a machine: what a platform must say and do.

A chip is a file in this room. Everything above asks the platform; nothing above says `torch.cuda`.
What this file does not know: models, kernels, batches.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol

import torch

from anabranch.formats import Index

GraphMode = Literal["full", "pieces", "none"]


@dataclass(frozen=True, slots=True)
class Memory:
    """Device memory in bytes."""

    free: int
    total: int
    cached: int = 0
    """Neither free nor in use: kept by this process's allocator for what it allocates next."""


class Graph(Protocol):
    """A captured sequence of device work. Replaying reads and writes the same buffers it was captured with."""

    def replay(self) -> None: ...


class Fork(Protocol):
    """A point where work leaves the main stream.

    Order matters: fork, enqueue the main work, *then* enqueue the side work inside `side()`, then `join`.
    Enqueueing the side work first makes a captured graph spread over many streams.
    """

    def side(self) -> AbstractContextManager[None]:
        """Work enqueued inside runs beside the main stream and sees everything enqueued before the fork."""

    def join(self, *results: torch.Tensor) -> None:
        """The main stream waits for the side work; `results` were made there and are used on the main stream."""


class SideStream(Protocol):
    """A second stream. Each model instance owns one; two models never share it."""

    def fork(self, *inputs: torch.Tensor) -> Fork:
        """Open a fork; `inputs` were made on the main stream and will be read on the side."""


class Fetch(Protocol):
    """A copy to the host that is on its way."""

    def wait(self) -> torch.Tensor: ...


class Staging(Protocol):
    """A buffer on the host from which the device takes copies by itself."""

    buffer: torch.Tensor
    """Bytes."""

    def put(self, source: torch.Tensor, places: Sequence[tuple[torch.Tensor, Index]]) -> None:
        """Start copying `source`, a contiguous view of the buffer: each place's tensor becomes that part of it. dtypes
        may differ."""

    def wait(self) -> None:
        """Until all that was put has arrived, and the buffer may be written again."""


class Platform(abc.ABC):
    """What a machine can do. Subclass it in one file; `fake` implements all of it without hardware."""

    name: ClassVar[str]
    """As given in ANABRANCH_PLATFORM and in a kernel's `on=`."""
    collective_backend: ClassVar[str]
    """torch.distributed's name for the collective library."""
    providers: ClassVar[Mapping[str, str]]
    """Kernel providers, best first: name → module whose import registers its kernels."""
    runner: ClassVar[str] = "anabranch.engine.torch_runner:TorchRunner"
    """`module:class` of the Runner that executes steps here."""
    reads_quantized: ClassVar[bool] = False
    """Whether that Runner takes checkpoints with a `quantization_config`."""
    page_size: ClassVar[int] = 16
    """Tokens in one KV page."""
    batch_tokens: int = 8192
    """Tokens of a step where throughput is all that counts; an instance may know better than its class."""
    graph_mode: ClassVar[GraphMode] = "none"
    """What is captured. full: attention too, whose kernels then take all lengths from the device: decode steps and
    those of one prompt whole, others in pieces between attentions; pieces: all of them in pieces."""
    memory_fraction: float = 0.9
    """Share of the device's memory the engine takes by default; an instance may know better than its class."""
    proven: ClassVar[str] = ""
    """What tests show of it on this commit, and where they ran, in words; empty: nothing."""
    unproven: ClassVar[str] = ""
    """What they do not show."""

    @classmethod
    @abc.abstractmethod
    def available(cls) -> bool:
        """Whether this machine has such a device and the software to drive it."""

    @property
    @abc.abstractmethod
    def device(self) -> torch.device: ...

    @abc.abstractmethod
    def describe(self) -> str:
        """The device in words, for people."""

    @abc.abstractmethod
    def memory(self) -> Memory: ...

    @abc.abstractmethod
    def has(self, capability: str) -> bool:
        """Whether the device can do a named thing: "bf16", "graphs", "streams", "sm90", "triton", ..."""

    def compute_dtype(self, wanted: torch.dtype) -> torch.dtype:
        """The dtype to compute in when a checkpoint asks for `wanted`."""
        return wanted

    def lay_out(self, weight: torch.Tensor) -> torch.Tensor:
        """A loaded weight, a matrix or a stack of them, as the device multiplies by it best: same shape and values."""
        return weight

    def synchronize(self) -> None:
        """Wait until the device is idle."""
        return None

    def step(self, num_products: int) -> AbstractContextManager[None]:
        """Around the work of one step of about so many multiplications."""
        return nullcontext()

    def fetch(self, tensor: torch.Tensor) -> Fetch:
        """Start copying to the host what the tensor will hold once the work enqueued so far has run."""
        return InlineFetch(tensor)

    def make_staging(self, num_bytes: int) -> Staging | None:
        """A buffer through which weights go to the device; None where the host's memory is the device's."""
        return None

    def make_side_stream(self) -> SideStream:
        """A new side stream; without streams, one that runs side work in line."""
        return InlineStream()

    def make_graph_pool(self) -> Any:
        """A memory pool that several captured graphs may share."""
        return None

    def capture(self, function: Callable[[], object], pool: Any = None) -> Graph | None:
        """Capture `function`'s device work; None where the platform cannot capture."""
        return None


class InlineFork:
    """Side work of a platform without streams: it simply happens, in program order."""

    def side(self) -> AbstractContextManager[None]:
        return self

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        return None

    def join(self, *results: torch.Tensor) -> None:
        return None


class InlineStream:
    def fork(self, *inputs: torch.Tensor) -> InlineFork:
        return InlineFork()


class InlineFetch:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor.to("cpu", copy=True)

    def wait(self) -> torch.Tensor:
        return self.tensor
