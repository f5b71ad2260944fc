"""Where pages come from."""

from pathlib import Path

import psutil
import torch

from anabranch.engine import kv_tensors
from anabranch.layers.cache import CacheSpec, KeepAll, OneState
from anabranch.models.config import read_config
from tests.models import tiny


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


def test_states_of_all_layers_in_one_tensor(tmp_path: Path) -> None:
    config = read_config(tiny.save(next(c for c in tiny.CASES if c.model_type == "qwen3_next"), tmp_path / "model"))
    layers = kv_tensors.allocate(config, [3, 5], 4, torch.float16, torch.device("cpu"))
    (group,) = (group for group in config.cache_groups if not group.policy.per_token)
    assert len(group.layers) > 1
    for i, layer_id in enumerate(group.layers):
        for j, state in enumerate(layers[layer_id]):
            assert state.shape == (3, *group.spec.shapes[j]) and state.is_contiguous()
            state[:] = torch.arange(3).view(-1, *[1] * (state.dim() - 1)) + 10 * i + 100 * j
    (stacked,) = kv_tensors.stack_states(config, layers).values()
    for j, state_LP in enumerate(stacked):
        assert state_LP.shape == (len(group.layers), 3, *group.spec.shapes[j])
        for i, layer_id in enumerate(group.layers):
            assert torch.equal(state_LP[i], layers[layer_id][j])
