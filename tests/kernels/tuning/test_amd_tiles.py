"""Every tile that the tuner would time on AMD's GPUs compiles for them and fits: the rule's choice and its rivals.

The kernels themselves compile for these targets in their own files' ahead-of-time tests.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
from anabranch.kernels.triton import experts as kernel
from anabranch.kernels.triton import experts_plan
from anabranch.kernels.tuning.experts_candidates import searches
from anabranch.kernels.tuning.experts_tiles import Machine, Shape, Tiles
from anabranch.ops.experts import ExpertsCall
from anabranch.ops.weight import Weight
from tests.kernels.triton import ahead_of_time
from tests.kernels.triton.ahead_of_time import Launch, compile_for, recorded

LAUNCHED = ("gate_up_small", "down_token", "down_pair", "gate_up_grouped", "down_grouped", "sum_rows")
E, K, D, INNER = 128, 8, 2048, 768
"""Qwen3-30B-A3B."""


def candidates(num_tokens: int, machine: Machine) -> Iterator[Tiles]:
    for search in searches(num_tokens, Shape(E, D, INNER, K, torch.bfloat16), machine):
        yield from search.near()


def launches_of(num_tokens: int, tiles: Tiles, weights: tuple[Weight, Weight]) -> list[Launch]:
    call = ExpertsCall(
        torch.empty(num_tokens, D, dtype=torch.bfloat16),
        torch.empty(num_tokens, K),
        torch.empty(num_tokens, K, dtype=torch.int32),
        *weights,
        "silu",
    )
    with recorded(kernel, *LAUNCHED) as launches, recorded(experts_plan, "count_pairs", "place_pairs"):
        kernel.run(call, tiles)
    return launches


def variant(launch: Launch) -> tuple[Any, ...]:
    """What makes Triton compile it again."""
    given = dict(zip(launch.function.arg_names, launch.args)) | launch.kwargs
    return launch.function.__name__, *((n, v) for n, v in given.items() if not isinstance(v, torch.Tensor))


@pytest.mark.slow
@pytest.mark.parametrize("num_tokens", [1, 16, 4096])
@pytest.mark.parametrize("target", ahead_of_time.AMD)
def test_every_candidate_compiles(target: str, num_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead_of_time.DEPENDENT_LAUNCH, lambda device: False)
    machine = Machine(shared_bytes=ahead_of_time.SHARED[target])
    weights = (
        Weight.of(torch.empty(E, 2 * INNER, D, dtype=torch.bfloat16, device="meta")),
        Weight.of(torch.empty(E, D, INNER, dtype=torch.bfloat16, device="meta")),
    )
    compiled: dict[tuple[Any, ...], Any] = {}
    for tiles in candidates(num_tokens, machine):
        for launch in launches_of(num_tokens, tiles, weights):
            name = variant(launch)
            if name not in compiled:
                compiled[name] = compile_for(target, launch)
                assert compiled[name].metadata.shared <= machine.shared_bytes, f"{launch.function.__name__}: {tiles}"
    assert len({name[0] for name in compiled}) >= 2 and len(compiled) >= 4
    if num_tokens > 1:
        assert all("v_mfma" in found.asm["amdgcn"] for name, found in compiled.items() if name[0].endswith("grouped"))
