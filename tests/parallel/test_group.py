"""The collectives of a group: what each rank gets, and what one rank alone gets."""

import pytest
import torch

from anabranch.parallel.group import ALONE, Group
from tests.parallel.ranks import run


def collectives(group: Group) -> dict[str, torch.Tensor]:
    x = torch.arange(8.0).view(4, 2) + 100 * group.rank
    rows = list(range(group.rank + 1, group.rank + 1 + group.size))
    back = [rank + 1 + group.rank for rank in range(group.size)]
    found = {
        "all_reduce": group.all_reduce(x.clone()),
        "all_gather": group.all_gather(x),
        "columns": group.all_gather(x, dim=1),
        "reduce_scatter": group.reduce_scatter(x),
        "all_to_all": group.all_to_all(torch.full((sum(rows), 3), float(group.rank)), rows, back),
        "broadcast": group.broadcast(x.clone(), group.size - 1),
    }
    group.barrier(30.0)
    return found


@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_collectives(num_ranks: int) -> None:
    inputs = [torch.arange(8.0).view(4, 2) + 100 * rank for rank in range(num_ranks)]
    total = torch.stack(inputs).sum(0)
    for rank, found in enumerate(run(num_ranks, collectives)):
        assert torch.equal(found["all_reduce"], total)
        assert torch.equal(found["all_gather"], torch.cat(inputs))
        assert torch.equal(found["columns"], torch.cat(inputs, 1))
        assert torch.equal(found["reduce_scatter"], total.chunk(num_ranks)[rank])
        sources = [source for source in range(num_ranks) for _ in range(source + 1 + rank)]
        assert found["all_to_all"].tolist() == [[float(source)] * 3 for source in sources]
        assert torch.equal(found["broadcast"], inputs[-1])


def test_one_rank_gets_its_own_input() -> None:
    x = torch.randn(4, 2)
    assert ALONE.all_reduce(x) is ALONE.all_gather(x) is ALONE.reduce_scatter(x) is ALONE.broadcast(x) is x
    assert ALONE.all_to_all(x, [4], [4]) is x


def too_late(group: Group) -> str:
    if group.rank == 1:
        import time

        time.sleep(3)
        return ""
    try:
        group.barrier(0.5)
    except RuntimeError as error:
        return str(error)
    return "no error"


@pytest.mark.slow
def test_a_barrier_has_an_end() -> None:
    from torch.multiprocessing import ProcessRaisedException

    try:
        found = run(2, too_late)[0]
    except ProcessRaisedException:
        return  # gloo gives a group up after a timeout: the next collective fails too
    assert "rank 0 has waited 0.5 s for the other 1" in found
