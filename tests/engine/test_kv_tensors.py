"""Where pages come from."""

import psutil
import torch

from anabranch.engine import kv_tensors


def test_a_pool_takes_host_memory_when_it_is_used() -> None:
    """A laptop's engine starts at once, and with half of the memory as its pool leaves that half to others."""
    process, size = psutil.Process(), 1 << 29
    before = process.memory_info().rss
    pages = kv_tensors.zeros((2, size // 8192, 1024), torch.float32, torch.device("cpu"))
    assert pages.nbytes == size and not pages[:, ::100].any()
    assert process.memory_info().rss - before < size // 8
    pages[1, 7] = 3.0
    assert pages.sum(2)[1, 7] == 3 * 1024 and not pages[0].any()


def test_nothing_at_all() -> None:
    assert kv_tensors.zeros((2, 0, 16), torch.bfloat16, torch.device("cpu")).shape == (2, 0, 16)
