"""Where pages come from."""

import psutil
import torch

from anabranch.engine import kv_tensors
from anabranch.layers.cache import CacheSpec, KeepAll, OneState


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


def test_tensors_are_as_many_as_the_spec_has_shapes() -> None:
    cpu = torch.device("cpu")
    keys, values = kv_tensors.allocate_layer(CacheSpec(((2, 8), (2, 4)), KeepAll()), 3, 16, torch.float16, cpu)
    assert keys.shape == (3, 16, 2, 8) and values.shape == (3, 16, 2, 4) and keys.dtype == torch.float16
    (state,) = kv_tensors.allocate_layer(CacheSpec(((2, 8, 8),), OneState(), "float32"), 3, 16, torch.float16, cpu)
    assert state.shape == (3, 2, 8, 8) and state.dtype == torch.float32 and state.is_contiguous()
