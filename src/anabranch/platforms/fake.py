"""A platform without hardware: the whole contract on the CPU, with a log of its calls, for tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist

from anabranch.platforms.platform import Fetch, HostPlatform, Memory, OneShot, Take


class FakePlatform(HostPlatform):
    name = "fake"
    device = HostPlatform.device
    graph_mode = "full"
    proven = "every test of streams, copies and graphs that needs no hardware"
    unproven = "nothing: there is no hardware"

    def __init__(self, memory: int = 1 << 30) -> None:
        self.log: list[str] = []
        """Every contract call, in order."""
        self._memory = memory

    @classmethod
    def available(cls) -> bool:
        return False  # only by name

    def describe(self) -> str:
        return "no hardware, for tests"

    def memory(self) -> Memory:
        return Memory(free=self._memory, total=self._memory)

    def has(self, capability: str) -> bool:
        return capability in ("graphs", "streams")

    def compute_dtype(self, wanted: torch.dtype) -> torch.dtype:
        return torch.float32

    def lay_out(self, weight: torch.Tensor) -> torch.Tensor:
        self.log.append(f"lay out {list(weight.shape)}")
        return weight.clone()

    def rank_environment(self, rank: int) -> dict[str, str]:
        return {}

    def make_one_shot(self, group: dist.ProcessGroup, num_bytes: int) -> OneShot | None:
        self.log.append(f"one shot {num_bytes}")
        return FakeOneShot(group, num_bytes) if num_bytes else None

    def synchronize(self) -> None:
        self.log.append("synchronize")

    def step(self, num_products: int) -> AbstractContextManager[None]:
        self.log.append("step")
        return super().step(num_products)

    def fetch(self, tensor: torch.Tensor) -> Fetch:
        self.log.append("fetch")
        return super().fetch(tensor)

    def make_staging(self, num_bytes: int) -> FakeStaging:
        return FakeStaging(num_bytes)

    def make_side_stream(self) -> FakeSideStream:
        return FakeSideStream(self.log)

    def make_graph_pool(self) -> Any:
        self.log.append("pool")
        return object()

    def capture(self, function: Callable[[], object], pool: Any = None) -> FakeGraph:
        self.log.append("capture")
        function()
        return FakeGraph(function, self.log)


class FakeStaging:
    """Copies as late as the contract allows: in `wait`."""

    def __init__(self, num_bytes: int) -> None:
        self.buffer = torch.zeros(num_bytes, dtype=torch.uint8)
        self.late: list[tuple[torch.Tensor, torch.Tensor, Take | None]] = []

    def put(self, source: torch.Tensor, places: Sequence[tuple[torch.Tensor, Take | None]]) -> None:
        assert source.is_contiguous() and source.untyped_storage().data_ptr() == self.buffer.data_ptr()
        self.late += [(target, source, take) for target, take in places]

    def wait(self) -> None:
        for target, source, take in self.late:
            target.copy_(source if take is None else take(source))
        self.late.clear()


class FakeOneShot:
    """Through one buffer, like the real one; ranks read each other's by a collective."""

    def __init__(self, group: dist.ProcessGroup, num_bytes: int) -> None:
        self.group, self.buffer = group, torch.zeros(num_bytes, dtype=torch.uint8)
        self.num_calls = 0

    def takes(self, x: torch.Tensor) -> bool:
        return x.nbytes <= self.buffer.nbytes

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        shared = self.buffer[: x.nbytes].view(x.dtype).view(x.shape)
        shared.copy_(x)
        every = [torch.empty_like(x) for _ in range(self.group.size())]
        dist.all_gather(every, shared, group=self.group)
        return torch.stack(every).sum(0)

    def release(self) -> bool:
        return True


class FakeGraph:
    def __init__(self, function: Callable[[], object], log: list[str]) -> None:
        self.function = function
        self.log = log

    def replay(self) -> None:
        self.log.append("replay")
        self.function()

    def reset(self) -> None:
        self.log.append("reset")


class FakeSideStream:
    """And its own fork."""

    def __init__(self, log: list[str]) -> None:
        self.log = log

    def fork(self, *inputs: torch.Tensor) -> FakeSideStream:
        self.log.append("fork")
        return self

    @contextmanager
    def side(self) -> Iterator[None]:
        self.log.append("side begins")
        yield
        self.log.append("side ends")

    def join(self, *results: torch.Tensor) -> None:
        self.log.append("join")
