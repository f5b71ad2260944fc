"""The NPU platform as tests run it: work is computed on the CPU (executor.py) and a captured graph does it again.

Everything else is the platform's own, down to torch_npu and the calls that the stub runtime writes down.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from anabranch.platforms import accelerator
from anabranch.platforms.npu import NpuPlatform
from tests.npu.executor import OnCpu
from tests.npu.rig import Runtime


class ReplayedGraph:
    """A capture that begins, ends and replays in the stub, which holds no work; so the work is done here."""

    def __init__(self, graph: Any, function: Callable[[], object]) -> None:
        self.graph = graph
        self.function = function

    def replay(self) -> None:
        self.graph.replay()
        self.function()

    def reset(self) -> None:
        self.graph.reset()


class Npu(NpuPlatform):
    def capture(self, function: Callable[[], object], pool: Any = None) -> ReplayedGraph:
        return ReplayedGraph(super().capture(function, pool), function)


@contextmanager
def machine(runtime: Runtime | None = None) -> Iterator[tuple[Npu, OnCpu]]:
    """Inside, this thread's work on npu:0 is computed; that of threads which stage weights, too."""
    with pytest.MonkeyPatch.context() as patch:
        put = accelerator.DeviceStaging.put

        def computed(staging: accelerator.DeviceStaging, source: torch.Tensor, places: Any) -> None:
            with OnCpu():
                put(staging, source, places)

        patch.setattr(accelerator.DeviceStaging, "put", computed)
        with OnCpu(runtime) as mode:
            yield Npu(), mode
