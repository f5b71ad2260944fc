"""Placements of experts, and the simulator against a count by hand; `anabranch simulate`."""

import json
import random
from collections import Counter
from pathlib import Path

import pytest
import torch

from anabranch.cli import main
from anabranch.parallel.placement import Placement, balanced, in_order
from anabranch.parallel.simulation import count_traffic, draw_routing, zipf


def test_in_order() -> None:
    assert in_order(4, 2).experts == ((0, 1), (2, 3))
    for num_experts, num_ranks in ((7, 3), (128, 12), (5, 5), (3, 5)):
        experts = in_order(num_experts, num_ranks).experts
        assert [e for rank in experts for e in rank] == list(range(num_experts))
        assert max(map(len, experts)) - min(map(len, experts)) <= 1


def test_copies_take_turns() -> None:
    """Every row of every expert has one rank, which has that expert; padding has none."""
    for placement in (in_order(7, 3), in_order(7, 3, 5), Placement(((3, 0), (1, 2), (0, 2), (2, 0)))):
        num_experts = 1 + max(map(max, placement.experts))
        tables = placement.slots(num_experts, 64)
        for row in range(64):
            assert all(table[row][-1] == -1 for table in tables)
            for expert in range(num_experts):
                found = [(rank, table[row][expert]) for rank, table in enumerate(tables) if table[row][expert] >= 0]
                assert len(found) == 1 and placement.experts[found[0][0]][found[0][1]] == expert
        for expert, ranks in enumerate(placement.ranks_of(num_experts)):
            turns = [sum(table[row][expert] >= 0 for row in range(64)) for table in tables]
            assert max(turns) - min(turns[rank] for rank in ranks) <= 1


def loads_of(placement: Placement, load_E: list[float]) -> list[float]:
    """Of each rank, with an expert's load divided among its copies."""
    ranks_of = placement.ranks_of(len(load_E))
    return [sum(load_E[e] / len(ranks_of[e]) for e in experts) for experts in placement.experts]


def test_few_experts_move() -> None:
    old = Placement(((0, 1, 2), (3, 4, 5)))
    assert old.moved_to(Placement(((3, 4, 5), (0, 1, 2)))) == old, "only the order of ranks is another"
    assert old.moved_to(Placement(((5, 0, 1), (2, 3, 4)))).experts == ((0, 1, 5), (3, 4, 2))
    # The rank with 1 and 2 gets 3; the other has room left, in which 4 stays.
    assert old.moved_to(Placement(((0, 5), (1, 2, 3)))).experts == ((3, 1, 2), (0, 4, 5))
    draw = random.Random(1)
    for _ in range(100):
        num_experts, num_ranks = draw.randint(2, 20), draw.randint(2, 6)
        slots = min(num_experts, -(-num_experts // num_ranks) + draw.randint(0, 3))
        load_E = [draw.random() ** 4 for _ in range(num_experts)]
        before = in_order(num_experts, num_ranks, slots)
        wanted = balanced(load_E, num_ranks, slots)
        found = before.moved_to(wanted)
        assert all(len(set(experts)) == len(experts) == slots for experts in found.experts)
        assert {e for experts in found.experts for e in experts} == set(range(num_experts))
        assert found.loads(load_E) == pytest.approx(loads_of(found, load_E))
        if sum(map(len, wanted.experts)) == num_ranks * slots:
            assert sorted(map(sorted, found.experts)) == sorted(map(sorted, wanted.experts))


def test_by_load() -> None:
    assert balanced([4.0, 3.0, 2.0, 1.0], 2, 2).experts == ((0, 3), (1, 2))
    # Two spare places: a copy of expert 0, and then of expert 0 again or of none else that is as busy.
    assert sorted(e for rank in balanced([9.0, 1.0, 1.0, 1.0], 3, 2).experts for e in rank) == [0, 0, 0, 1, 2, 3]
    with pytest.raises(ValueError, match="5 experts do not fit on 2 ranks with room for 2 each"):
        balanced([1.0] * 5, 2, 2)


def test_by_load_of_any_size() -> None:
    draw = random.Random(0)
    for _ in range(200):
        num_experts, num_ranks = draw.randint(1, 40), draw.randint(1, 12)
        slots = -(-num_experts // num_ranks) + draw.randint(0, 3)
        load_E = [draw.random() ** 4 for _ in range(num_experts)]
        placement = balanced(load_E, num_ranks, slots)
        assert {e for experts in placement.experts for e in experts} == set(range(num_experts))
        assert all(len(set(experts)) == len(experts) <= slots for experts in placement.experts)
        mean = sum(load_E) / num_ranks
        # No rank is above the mean by more than its busiest copy.
        ranks_of = placement.ranks_of(num_experts)
        busiest = max(load / len(ranks) for load, ranks in zip(load_E, ranks_of, strict=True))
        if slots > -(-num_experts // num_ranks):
            assert max(loads_of(placement, load_E)) <= mean + 2 * busiest + 1e-9


def by_hand(expert_TK: list[list[int]], placement: Placement, num_experts: int) -> tuple[list[int], ...]:
    num_ranks, ranks_of = placement.num_ranks, placement.ranks_of(num_experts)
    rows, sent, received = Counter[int](), Counter[int](), Counter[int]()
    for token, experts in enumerate(expert_TK):
        own, visited = token * num_ranks // len(expert_TK), set()
        for expert in experts:
            ranks = ranks_of[expert]
            rank = own if own in ranks else ranks[(token // 7 + expert) % len(ranks)]
            rows[rank] += 1
            visited.add(rank)
        for rank in visited - {own}:
            sent[own] += 1
            received[rank] += 1
    return tuple([count[rank] for rank in range(num_ranks)] for count in (rows, sent, received))


def test_traffic_is_what_a_count_by_hand_gives() -> None:
    generator = torch.Generator().manual_seed(0)
    for num_experts, num_ranks, top_k, slots in (
        (16, 4, 2, 4),
        (16, 4, 4, 6),
        (12, 5, 3, 3),
        (8, 8, 8, 2),
        (6, 9, 2, 1),
    ):
        load_E = zipf(num_experts, 1.0, generator)
        expert_TK = draw_routing(load_E, 10 * num_ranks, top_k, generator)
        assert all(len(set(row)) == top_k for row in expert_TK.tolist())
        for placement in (balanced(load_E.tolist(), num_ranks, slots), in_order(num_experts, num_ranks)):
            found = count_traffic(expert_TK, placement, num_experts)
            expected = by_hand(expert_TK.tolist(), placement, num_experts)
            assert (found.rows_R.tolist(), found.sent_R.tolist(), found.received_R.tolist()) == expected
            assert found.imbalance == max(expected[0]) * num_ranks / sum(expected[0])


def test_routing_follows_the_loads() -> None:
    generator = torch.Generator().manual_seed(0)
    load_E = torch.tensor([8.0, 4.0, 2.0, 1.0, 1.0], dtype=torch.float64)
    share_E = draw_routing(load_E, 40_000, 1, generator).flatten().bincount(minlength=5) / 40_000
    torch.testing.assert_close(share_E.double(), load_E / 16, atol=0.01, rtol=0)


def simulate(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main.main(["simulate", *words])
    said = capsys.readouterr()
    return code, said.out, said.err


def test_the_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    load = tmp_path / "load.json"
    load.write_text(json.dumps({"total": [[1000] + [10] * 15] * 6}))
    file = tmp_path / "figures.json"
    options = ["--ranks", "4", "8", "32", "--tokens", "64", "--copies", "0", "1", "--json", str(file)]
    code, said, _ = simulate(capsys, *options, "--load", str(load), "--plot", str(tmp_path / "figures.png"))
    assert code == 0 and "16 experts, 2 per token" in said and "by load + 1" in said
    rows = {(row["ranks"], row["placement"]): row for row in json.loads(file.read_text())["rows"]}
    assert len(rows) == 3 + 3 + 2, "with more ranks than experts there is no placement in order"
    assert rows[8, "in order"]["imbalance"] > 3 > 1.5 > rows[8, "by load + 1"]["imbalance"]
    assert rows[8, "in order"]["all_gather_bytes"] == 4 * 256 * 64 * 7
    assert (tmp_path / "figures.png").stat().st_size > 10_000
    assert simulate(capsys, *options)[1] == simulate(capsys, *options)[1], "the seed decides"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--load", "nowhere.json"], "--load nowhere.json: not what GET /debug/experts returns"),
        (["--load", "{other}"], "is it of this model?"),
        (["--ranks", "512", "--tokens", "1000000"], "too many tokens to draw; take fewer"),
    ],
)
def test_bad_input(words: list[str], expected: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text(json.dumps({"total": [[1, 2, 3]]}))
    code, _, said = simulate(capsys, *(word.format(other=tmp_path / "other.json") for word in words))
    assert code == 1 and expected in said
