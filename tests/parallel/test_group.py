"""The collectives of a group: what each rank gets, and what one rank alone gets."""

import contextlib
import os
import time
from pathlib import Path

import pytest
import torch
from torch.multiprocessing import ProcessRaisedException

from anabranch.moe.rebalance import move
from anabranch.parallel import collective_ops
from anabranch.parallel.group import ALONE, BUFFER_VARIABLE, Group, TorchGroup
from anabranch.parallel.placement import Placement
from anabranch.platforms.fake import FakeOneShot, FakePlatform
from tests.parallel.ranks import run

OLD, NEW = Placement(((0, 1, 2), (3, 2, 0))), Placement(((3, 1, 2), (3, 1, 0)))


def move_experts(group: Group) -> torch.Tensor:
    """Of 4 experts, whose numbers say which they are: plain, in FP8, and with another order in memory."""
    plain = torch.tensor(OLD.experts[group.rank])[:, None, None] + torch.zeros(3, 2, 2)
    tensors = [plain, plain.to(torch.float8_e4m3fn), plain.transpose(1, 2).contiguous().transpose(1, 2)]
    move(tensors, OLD, NEW, group)
    return torch.cat([tensor.float().flatten(1) for tensor in tensors], 1)


def collectives(group: Group) -> dict[str, torch.Tensor]:
    x = torch.arange(8.0).view(4, 2) + 100 * group.rank
    rows = list(range(group.rank + 1, group.rank + 1 + group.size))
    back = [rank + 1 + group.rank for rank in range(group.size)]
    one_row = [4 // group.size] * group.size
    to_last = [0] * (group.size - 1) + [4]
    from_all = [4 if group.rank == group.size - 1 else 0] * group.size
    found = {
        "all_reduce": group.all_reduce(x.clone()),
        "all_gather": group.all_gather(x),
        "columns": group.all_gather(x, dim=1),
        "reduce_scatter": group.reduce_scatter(x),
        "all_to_all": group.all_to_all(torch.full((sum(rows), 3), float(group.rank)), rows, back),
        "broadcast": group.broadcast(x.clone(), group.size - 1),
        "fp8 gathered": group.all_gather(x.to(torch.float8_e4m3fn)),
        "fp8 exchanged": group.all_to_all(x.to(torch.float8_e4m3fn), one_row, one_row),
        "fp8 broadcast": group.broadcast(x.to(torch.float8_e4m3fn)),
        "to the last": group.all_to_all(x, to_last, from_all),
    }
    if group.size == 2:
        found["moved"] = move_experts(group)
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
        fp8 = [x.to(torch.float8_e4m3fn).float() for x in inputs]
        assert torch.equal(found["fp8 gathered"].float(), torch.cat(fp8))
        assert torch.equal(found["fp8 exchanged"].float(), torch.cat([x.chunk(num_ranks)[rank] for x in fp8]))
        assert torch.equal(found["fp8 broadcast"].float(), fp8[0])
        if num_ranks == 2:
            assert torch.equal(found["moved"], torch.tensor(NEW.experts[rank])[:, None] + torch.zeros(3, 12))
        last = rank == num_ranks - 1
        assert torch.equal(found["to the last"], torch.cat(inputs) if last else torch.empty(0, 2))


def as_ops(group: Group) -> dict[str, bool]:
    """Each op against its fake, and what a traced function calls."""
    assert isinstance(group, TorchGroup)
    x = torch.arange(8.0).view(4, 2) + 100 * group.rank
    for op, *more in ((collective_ops.all_reduce,), (collective_ops.all_gather, 1), (collective_ops.reduce_scatter,)):
        torch.library.opcheck(op, (x, *more, group.name))
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    def function(x: torch.Tensor) -> torch.Tensor:
        return group.reduce_scatter(group.all_gather(group.all_reduce(x + 1), 1))

    found = torch.compile(function, fullgraph=True, backend=backend)(x)
    called = [str(node.target) for node in graphs[0].graph.nodes if "anabranch" in str(node.target)]
    names = ["all_reduce", "all_gather", "reduce_scatter"]
    return {
        "equal": torch.equal(found, function(x)),
        "called": called == [f"anabranch.{name}.default" for name in names],
    }


@pytest.mark.slow
def test_collectives_are_ops_where_they_are_traced() -> None:
    assert run(2, as_ops) == [{"equal": True, "called": True}] * 2


def through_a_buffer(group: Group, given: str) -> list[object]:
    assert isinstance(group, TorchGroup)
    if given:
        os.environ[BUFFER_VARIABLE] = given
    try:
        group.reserve(FakePlatform(), 1000)
    except ValueError as error:
        return [str(error)]
    found = [torch.equal(group.all_reduce(torch.ones(n)), torch.full((n,), 2.0)) for n in (1, 250, 251, 100_000)]
    assert group.one_shot is None or isinstance(group.one_shot, FakeOneShot)
    return [all(found), None if group.one_shot is None else group.one_shot.num_calls]


@pytest.mark.parametrize(
    "given, expected",
    [
        ("", [True, 2]),
        pytest.param("0", [True, None], marks=pytest.mark.slow),
        pytest.param("1004", [True, 3], marks=pytest.mark.slow),
        pytest.param("999", ["at least 1,000 bytes, because tensors of up to 1,000 bytes"], marks=pytest.mark.slow),
    ],
)
def test_small_sums_go_through_a_buffer(given: str, expected: list[object]) -> None:
    for found in run(2, through_a_buffer, given):
        assert found == expected or expected[0] in found[0]


def test_one_rank_gets_its_own_input() -> None:
    x = torch.randn(4, 2)
    assert ALONE.all_reduce(x) is ALONE.all_gather(x) is ALONE.reduce_scatter(x) is ALONE.broadcast(x) is x
    assert ALONE.all_to_all(x, [4], [4]) is x


def too_late(group: Group, file: str) -> None:
    if group.rank == 1:
        time.sleep(3)
        return
    began = time.monotonic()
    with pytest.raises(RuntimeError) as failed:
        group.barrier(0.5)
    Path(file).write_text(f"{time.monotonic() - began} {failed.value}")


@pytest.mark.slow
def test_a_barrier_has_an_end(tmp_path: Path) -> None:
    file = tmp_path / "error"
    with contextlib.suppress(ProcessRaisedException):  # gloo gives a group up after a timeout: its next barrier fails
        run(2, too_late, str(file))
    seconds, error = file.read_text().split(maxsplit=1)
    assert 0.4 < float(seconds) < 2.5  # the other comes after 3
    assert error.startswith("rank 0 has waited 0.5 s for the other 1: has one ended? (")
