"""A CPU in the place of an H200, where kernels run as machine runs them."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

PROCESSORS = 3
"""Few, so that a program has several work items."""


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The CPU counts as a Hopper GPU where an op looks for kernels."""
    from anabranch.kernels.triton import attention, launch

    cached: list[Any] = [launch.gluon_kernels, launch.num_processors]
    monkeypatch.setattr(launch, "is_hopper", lambda device: True)
    for module in (launch, attention):  # kernels are launched before their predecessor has ended
        monkeypatch.setattr(module, "dependent_launch", lambda device: True)
    facts = SimpleNamespace(multi_processor_count=PROCESSORS, major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: facts)
    multiply = torch.mm

    def mm(a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        """On a CPU torch has no other dtype for the result."""
        return multiply(a, b) if out_dtype is None else multiply(a.to(out_dtype), b.to(out_dtype))

    monkeypatch.setattr(torch, "mm", mm)
    for one in cached:
        one.cache_clear()
    yield
    for one in cached:
        one.cache_clear()
