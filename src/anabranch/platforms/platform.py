"""The contract between the engine and a machine, without models, kernels or batches. A chip is a file in this room."""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

import torch

if TYPE_CHECKING:
    import torch.distributed as dist


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

    def reset(self) -> None:
        """Give up the work; it is not replayed again."""


class Fork(Protocol):
    """A point where work leaves the main stream.

    Order matters: fork, enqueue the main work, *then* enqueue the side work inside `side()`, then `join`.
    Enqueueing the side work first makes a captured graph spread over many streams.
    """

    def side(self) -> AbstractContextManager[None]:
        """Work enqueued inside runs at the same time as the main stream's, after all that precedes the fork."""

    def join(self, *results: torch.Tensor) -> None:
        """The main stream waits for the side work; `results` were made there and are used on the main stream."""


class SideStream(Protocol):
    """A second stream. Each model instance owns one; two models never share it."""

    def fork(self, *inputs: torch.Tensor) -> Fork:
        """Open a fork; `inputs` were made on the main stream and will be read on the side."""


class Fetch(Protocol):
    """A copy to the host that has been started."""

    def wait(self) -> torch.Tensor: ...


Take = Callable[[torch.Tensor], torch.Tensor]
"""From a checkpoint's tensor to what fills a parameter, computed on the device."""


class Staging(Protocol):
    """A buffer on the host from which copies to the device are started."""

    buffer: torch.Tensor
    """Bytes."""

    def put(self, source: torch.Tensor, places: Sequence[tuple[torch.Tensor, Take | None]]) -> None:
        """Start copying `source`, a contiguous view of the buffer: each place's tensor becomes what is taken from it,
        or all of it. dtypes may differ."""

    def wait(self) -> None:
        """Wait until all that was put has arrived; then the buffer may be written again."""


class OneShot(Protocol):
    """All-reduce of small tensors in one kernel, through a buffer that was made before."""

    def takes(self, x: torch.Tensor) -> bool:
        """Whether it fits into the buffer, and is of a kind that the kernel takes: the same on all ranks."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks, a new tensor."""

    def release(self) -> bool:
        """Where a rank is gone: on another thread than the sums', let each that waits on the device for another rank go
        on, until it waits again. What such sums give are no numbers. Returns whether the device has no work left."""


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
    """Tokens of a step of an offline batch."""
    graph_mode: ClassVar[Literal["full", "pieces", "none"]] = "none"
    """What can be captured. full: attention too, whose kernels then take all lengths from the device; pieces: only what
    is between attentions."""
    memory_fraction: float = 0.9
    """Share of the device's memory the engine takes by default. An instance may set its own, as of batch_tokens."""
    fp8_cache: bool = True
    """Whether keys and values can be kept in FP8."""
    verifies_drafts: ClassVar[bool] = True
    """Whether the Runner takes shares that sample several tokens."""
    deterministic: ClassVar[bool] = False
    """Whether kernels compute each row by itself where they are asked to: see `kernels.bind`."""
    divides_models: ClassVar[bool] = True
    """Whether models can be divided among ranks."""
    proven: ClassVar[str] = ""
    """What tests show of it on this commit, and where they ran; empty: nothing."""
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
        """The device in words."""

    @abc.abstractmethod
    def memory(self) -> Memory: ...

    @abc.abstractmethod
    def has(self, capability: str) -> bool:
        """Whether the device has a capability: "bf16", "graphs", "streams", "sm90", "triton", ..."""

    def compute_dtype(self, wanted: torch.dtype) -> torch.dtype:
        """The dtype to compute in when a checkpoint asks for `wanted`."""
        return wanted

    def lay_out(self, weight: torch.Tensor) -> torch.Tensor:
        """A loaded weight, a matrix or a stack of them, as the device multiplies by it best: same shape and values."""
        return weight

    def rank_environment(self, rank: int) -> dict[str, str]:
        """Environment variables by which the process of a rank finds its device; ValueError if there is none for it."""
        return {}

    def make_one_shot(self, group: dist.ProcessGroup, num_bytes: int) -> OneShot | None:
        """For tensors of up to `num_bytes`; all ranks of the group call it. None, on all: there is none here."""
        return None

    def synchronize(self) -> None:
        """Wait until the device is idle."""
        return None

    def step(self, num_products: int) -> AbstractContextManager[None]:
        """Around the work of one step of about `num_products` multiplications."""
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


class HostPlatform(Platform):
    """A platform whose torch tensors are in the host's memory."""

    collective_backend = "gloo"
    providers = {"torch": "anabranch.kernels.torch"}
    deterministic = True

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")


class InlineStream:
    """The side stream of a platform without streams, and its own fork: side work runs in program order."""

    def fork(self, *inputs: torch.Tensor) -> InlineStream:
        return self

    def side(self) -> AbstractContextManager[None]:
        return nullcontext()

    def join(self, *results: torch.Tensor) -> None:
        pass


class InlineFetch:
    """A copy that is made at once."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor.to("cpu", copy=True)

    def wait(self) -> torch.Tensor:
        return self.tensor
