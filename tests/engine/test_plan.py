"""The arithmetic of `plan` against the models themselves."""

import math
from pathlib import Path

import pytest
import torch

from anabranch.config import EngineConfig
from anabranch.engine import kv_tensors, plan
from anabranch.layers.cache import KeepWindow
from anabranch.loader.load import build
from anabranch.models.config import read_config
from anabranch.ranks import plan as plan_ranks
from tests.models import tiny


@pytest.mark.parametrize("case", tiny.CASES, ids=lambda case: case.name)
def test_counts_are_those_of_the_model(case: tiny.Case, tmp_path: Path) -> None:
    config = read_config(tiny.save(case, tmp_path / "model"))
    model = build(config, torch.float32)
    assert sum(plan.count_weights(config).values()) == sum(p.numel() for p in model.parameters())

    experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    shared = sum(p.numel() for name, p in model.named_parameters() if "shared_expert" in name)
    assert plan.count_weights(config)["routed experts"] == experts
    assert plan.count_weights(config)["shared experts"] == shared

    page_size, num_pages = 4, [3 + g for g in range(len(config.cache_groups))]
    kv = kv_tensors.allocate(config, num_pages, page_size, torch.float32, torch.device("cpu"))
    assert plan.pages_bytes(config, num_pages, page_size, "float32") == sum(
        t.numel() * 4 for layer in kv for t in layer
    )


def test_weights_of_a_rank(tmp_path: Path) -> None:
    """All are divided, or experts alone; where they are not divided equally, a rank has room for the larger share."""
    config = read_config(tiny.save(next(c for c in tiny.CASES if c.model_type == "qwen3_moe"), tmp_path / "model"))
    by_kind = plan.weight_bytes(config, "float32")
    whole, experts = sum(by_kind.values()), by_kind["routed experts"]
    assert plan.rank_bytes(config, "float32", 1, 1.0) == whole
    ranks = {"model": "x", "expert_parallel": True}
    tensor, data = EngineConfig(tensor_parallel_size=4, **ranks), EngineConfig(data_parallel_size=4, **ranks)
    assert tensor.expert_share(8) == data.expert_share(8) == 0.25 and data.expert_share(6) == 2 / 6
    assert EngineConfig(data_parallel_size=4, expert_copies=1, **ranks).expert_share(6) == 3 / 6
    for expert_parallel in (False, True):
        division = plan_ranks.Division(tensor=2, expert_parallel=expert_parallel)
        exact = sum(plan_ranks.weight_bytes(config, division, "float32").values())
        assert plan.rank_bytes(division.of_a_rank(config), "float32", 2, 1 / 2) == exact
    assert plan.rank_bytes(config, "float32", 1, data.expert_share(8)) == whole - experts + experts // 4


def windowed(tmp_path: Path) -> plan.MemoryPlan:
    case = next(c for c in tiny.CASES if c.model_type == "gemma4_text")
    config = read_config(tiny.save(case, tmp_path / "model"))
    assert len(config.cache_groups) == 2
    return plan.plan_memory(config, 10**9, fraction=0.5, dtype="bfloat16", page_size=4)


def test_budget_adds_up(tmp_path: Path) -> None:
    found = windowed(tmp_path)
    assert found.weights + found.workspace + found.kv == found.usable == 500_000_000
    for context in (1, 17, 1000):
        n, one = found.concurrency(context), plan.request_bytes(found.config, context, 4, "bfloat16")
        assert n * one <= found.kv < (n + 1) * one


def test_short_requests_have_their_states(tmp_path: Path) -> None:
    """As many as may run, within two thirds of the memory; the rest is for keys and values. Nothing is left over."""
    config = read_config(tiny.save(next(c for c in tiny.CASES if c.model_type == "qwen3_next"), tmp_path / "model"))
    found = plan.plan_memory(config, 200_000_000, fraction=0.5, dtype="bfloat16", page_size=4)
    is_state = [not group.policy.per_token for group in config.cache_groups]
    assert is_state == [True, False]
    even, many, all_of_them = (found.num_pages(8192, num_seqs)[0] for num_seqs in (1, 300, 10**9))
    assert even == found.concurrency(8192) < many == 300 < all_of_them
    for num_seqs in (1, 300, 10**9):
        pages = found.num_pages(8192, num_seqs)
        used = plan.pages_bytes(config, pages, 4, "bfloat16")
        assert found.kv - 2 * plan.request_bytes(config, 8192, 4, "bfloat16") < used <= found.kv
    states = all_of_them * plan.page_bytes(config.cache_groups[0], 4, "bfloat16")
    assert 0.66 * found.kv < states <= found.kv * 2 / 3


def test_checkpoints_have_a_budget_of_their_own(tmp_path: Path) -> None:
    """As many states again as requests have, and no more memory for both than two thirds."""
    config = read_config(tiny.save(next(c for c in tiny.CASES if c.model_type == "qwen3_next"), tmp_path / "model"))
    assert plan.pages_for(config, 100, 40, 4) == [10, 100] and plan.pages_for(config, 100, 40, 4, True) == [20, 100]
    found = plan.plan_memory(config, 200_000_000, fraction=0.5, dtype="bfloat16", page_size=4)
    for reuse, num_states in ((False, 100), (True, 200)):
        options = EngineConfig(model="m", max_num_seqs=100, page_size=4, max_model_len=8192, prefix_cache=reuse)
        pages = found.pool_pages(options, "")
        assert pages[0] == num_states and plan.pages_bytes(config, pages, 4, "bfloat16") <= found.kv


def test_largest_context_is_the_boundary(tmp_path: Path) -> None:
    found = windowed(tmp_path)
    for num_requests in (1, 100, 5000):
        longest = found.largest_context(num_requests)
        assert longest == 0 or found.concurrency(longest) >= num_requests
        assert longest == found.config.max_position or found.concurrency(longest + 1) < num_requests


def test_pool_holds_what_concurrency_promises(tmp_path: Path) -> None:
    found = windowed(tmp_path)
    context = 900
    pages, n = found.num_pages(context), found.concurrency(context)
    for held, count in zip(plan.held_pages(found.config, context, 4), pages, strict=True):
        assert count >= n * held
    assert plan.pages_bytes(found.config, pages, 4, "bfloat16") <= found.kv


def test_sliding_layers_keep_only_their_window() -> None:
    policy = KeepWindow(10)
    for context in range(1, 60):
        # The most pages that hold any token a query at any position of the context can still see.
        worst = max(last // 4 - max(0, last - 9) // 4 + 1 for last in range(context))
        assert worst <= policy.held_pages(context, 4) <= worst + 1
    assert policy.held_pages(10**9, 4) == math.ceil(10 / 4) + 1


def test_too_small_a_memory_does_not_fit(tmp_path: Path) -> None:
    case = tiny.CASES[0]
    config = read_config(tiny.save(case, tmp_path / "model"))
    found = plan.plan_memory(config, 10_000, fraction=0.9, dtype="float32")
    assert not found.fits and found.kv < 0 and found.concurrency(16) == 0
    assert found.num_pages(64) == [0] * len(config.cache_groups)
