"""The plan of a divided model, against the model itself: what its ranks hold, and the collectives that they call."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from anabranch.engine.single import SingleSequence
from anabranch.loader.load import build, load_model
from anabranch.models.config import read_config
from anabranch.moe.dispatch import Exchange
from anabranch.moe.setup import MoESetup
from anabranch.ranks import plan
from anabranch.ranks.plan import Collective, Division
from tests.models import tiny
from tests.parallel.test_models import CASES, FAMILIES, Rank, settings

DIVISIONS = [Division(tensor=n, expert_parallel=whole) for n in (1, 2, 4) for whole in (False, True)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {
        name: tiny.save(replace(case, settings=case.settings | settings(name)), tmp_path_factory.mktemp(name) / "model")
        for name, case in CASES.items()
    }


@pytest.mark.parametrize("name", FAMILIES)
def test_a_rank_has_as_many_bytes_as_planned(folders: dict[str, Path], name: str) -> None:
    config = read_config(folders[name])
    for division in DIVISIONS:
        for rank in range(division.tensor):
            setup = MoESetup(group=Rank(rank, division.tensor), expert_parallel=division.expert_parallel)
            one = config.divide(rank, division.tensor, division.expert_parallel)
            held = sum(parameter.nbytes for parameter in build(one, torch.float32, setup).parameters())
            assert sum(plan.weight_bytes(config, division, "float32").values()) == held, division


class Counting(Rank):
    """Rank 0 of several that are not there, and what it was called with."""

    def __init__(self, size: int) -> None:
        super().__init__(0, size)
        self.calls: Counter[tuple[str, int]] = Counter()

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        self.calls["all_reduce", x.nbytes] += 1
        return x

    def all_gather(self, x: torch.Tensor, dim: int = 0) -> torch.Tensor:
        self.calls["all_gather", x.nbytes] += 1
        return torch.cat([x] * self.size, dim)

    def all_to_all(self, x: torch.Tensor, send: list[int], receive: list[int]) -> torch.Tensor:
        self.calls["all_to_all", x.nbytes] += 1
        return x


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("expert_parallel", [False, True])
def test_a_step_calls_the_collectives_that_are_planned(
    folders: dict[str, Path], name: str, expert_parallel: bool
) -> None:
    group, division = Counting(2), Division(tensor=2, expert_parallel=expert_parallel)
    model = load_model(folders[name], dtype="float32", group=group, expert_parallel=expert_parallel)
    SingleSequence(model, 64).forward([1, 2, 3, 4, 5])
    planned: Counter[tuple[str, int]] = Counter()
    for collective in plan.collectives(read_config(folders[name]), division, "float32", 5, 5):
        if collective.name != "broadcast":  # there is no sampler here
            planned[collective.name, collective.num_bytes] += collective.count
    assert planned == group.calls


@pytest.mark.parametrize("name", ["qwen3_moe", "qwen3_5_moe"])
def test_engines_of_several_ranks(folders: dict[str, Path], name: str) -> None:
    """Two of two ranks each, all four with some of the experts: weights, and what a step of 5 tokens calls."""
    config, division = read_config(folders[name]), Division(data=2, tensor=2, expert_parallel=True)
    same, every = Counting(2), Counting(4)
    model = load_model(folders[name], dtype="float32", group=same, expert_parallel=True, exchange=Exchange(every, same))
    held = sum(parameter.nbytes for parameter in model.parameters())
    assert sum(plan.weight_bytes(config, division, "float32").values()) == held
    SingleSequence(model, 64).forward([1, 2, 3, 4, 5])
    for group, exchange in ((same, False), (every, True)):
        planned: Counter[tuple[str, int]] = Counter()
        for collective in plan.collectives(config, division, "float32", 5, 5):
            if collective.exchange == exchange and collective.name != "broadcast":
                planned[collective.name, collective.num_bytes] += collective.count
                assert collective.among(division).num_ranks == group.size
        assert planned == group.calls


def ring(num_ranks: int, num_bytes: int, passes: int) -> float:
    """Bytes that a rank sends to its neighbour: a chunk of each `passes` × (ranks − 1) times."""
    chunks = [num_bytes / num_ranks] * num_ranks
    return sum(chunks[step % num_ranks] for _ in range(passes) for step in range(num_ranks - 1))


@pytest.mark.parametrize("num_ranks", [2, 3, 8])
def test_bytes_on_links(num_ranks: int) -> None:
    assert Collective("all_reduce", "", 600, 1).link_bytes(num_ranks) == pytest.approx(ring(num_ranks, 600, 2))
    assert Collective("all_gather", "", 600, 1).link_bytes(num_ranks) == pytest.approx(
        ring(num_ranks, 600 * num_ranks, 1)
    )
    assert Collective("all_to_all", "", 600, 1).link_bytes(num_ranks) == pytest.approx(600 - 600 / num_ranks)


def test_links_between_nodes() -> None:
    """4 ranks on 2 nodes, with links of 10 bytes/s inside and 1 outside, counted by hand."""
    division, rates = Division(tensor=4, nodes=2), (10.0, 1.0)
    # Half of 800 bytes to the other rank of the node; then that half with a rank of the other node; and back.
    assert Collective("all_reduce", "", 800, 3).seconds(division, rates) == pytest.approx(3 * (800 / 10 + 400 / 1))
    # 800 bytes from the other node; then the two nodes' to the other rank.
    assert Collective("all_gather", "", 800, 1).seconds(division, rates) == pytest.approx(800 / 1 + 1600 / 10)
    # A quarter for each rank: one is in the node, two are not.
    assert Collective("all_to_all", "", 800, 1).seconds(division, rates) == pytest.approx(400 / 1 + 200 / 10)
    one_node = Collective("all_reduce", "", 800, 1).seconds(replace(division, nodes=1), rates)
    assert one_node == pytest.approx(2 * 3 * 200 / 10)


def test_experts_of_ranks_with_requests_of_their_own(folders: dict[str, Path]) -> None:
    config = read_config(folders["qwen3_moe"])
    whole = plan.weight_bytes(config, Division(), "bfloat16")
    found = plan.weight_bytes(config, Division(data=4, expert_parallel=True), "bfloat16")
    assert found == whole | {"routed experts": whole["routed experts"] // 4}
    moe = config.layers[0].moe
    assert moe is not None
    rows = 10 * config.hidden_size * 2
    calls = plan.collectives(config, Division(data=4, expert_parallel=True), "bfloat16", 10, 10)
    assert [(call.name, call.num_bytes, call.count) for call in calls] == [
        ("all_gather", rows, len(config.layers)),
        ("all_gather", 10 * moe.top_k * 8, len(config.layers)),
        ("all_to_all", 4 * rows, len(config.layers)),
    ]


def test_what_a_step_reads(folders: dict[str, Path]) -> None:
    config = read_config(folders["qwen3_moe"])
    every = plan.read_bytes(config, Division(), "bfloat16", 10**6)
    total = plan.weight_bytes(config, Division(), "bfloat16")
    table = 0 if config.tie_embeddings else total["embeddings"] // 2
    assert every == sum(total.values()) - table
    moe = config.layers[0].moe
    assert moe is not None
    idle = total["routed experts"] * (1 - moe.top_k / moe.num_experts)
    assert plan.read_bytes(config, Division(), "bfloat16", 1) == pytest.approx(every - idle, abs=1)


@pytest.mark.parametrize(
    "options, words",
    [
        ({"data": 2}, "--data-parallel-size goes with --expert-parallel"),
        ({"data": 2, "tensor": 3, "nodes": 3, "expert_parallel": True}, "each must have whole groups of 3 ranks"),
        ({"tensor": 4, "nodes": 3}, "--nodes 3: 4 ranks cannot be divided among so many"),
    ],
)
def test_what_cannot_be_planned_is_refused(options: dict[str, int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Division(**options)  # type: ignore[arg-type]


def test_one_rank_calls_nothing(folders: dict[str, Path]) -> None:
    assert plan.collectives(read_config(folders["llama"]), Division(), "float32", 5, 5) == []
