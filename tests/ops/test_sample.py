"""Sampling: the allowed sets by brute force, the drawn distribution by chi-square, and draws that depend on nothing but
(seed, position)."""

import math
from itertools import product

import pytest
import torch

from anabranch import ops
from anabranch.ops.arguments import map_tensors

# Chi-square exceeds this with probability 1e-4. The draws are a pure function of fixed seeds, so no test flickers.
CRITICAL = {7: 29.9, 63: 115.0}


def sample(logits: torch.Tensor, seed: torch.Tensor, position: torch.Tensor, **options: float) -> torch.Tensor:
    """One draw for each (seed, position), all from the same logits and with the same options."""
    rows = seed.shape[0]

    def fill(name: str, default: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.full((rows,), options.get(name, default), dtype=dtype)

    call = ops.SampleCall(
        logits.expand(rows, -1),
        fill("temperature", 1.0),
        seed,
        position,
        fill("top_k", 0, torch.int32),
        fill("top_p", 1.0),
        fill("min_p", 0.0),
    )
    return ops.sample.reference(call)


def allowed(logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float) -> set[int]:
    """The definition, token by token."""
    powers = [math.exp(logit / temperature) for logit in logits]
    probability = [power / sum(powers) for power in powers]
    ranked = sorted(range(len(logits)), key=lambda token: (-probability[token], token))
    ranked = ranked[: top_k or len(ranked)]
    among = sum(probability[token] for token in ranked)
    kept, reached = set(), 0.0
    for rank, token in enumerate(ranked):
        in_top_p = reached < top_p * among
        in_min_p = probability[token] >= min_p * probability[ranked[0]]
        if rank == 0 or (in_top_p and in_min_p):
            kept.add(token)
        reached += probability[token]
    return kept


GRID = list(product((0.5, 1.0, 2.0), (0, 1, 4), (1.0, 0.6, 0.05), (0.0, 0.3)))


@pytest.mark.parametrize("logits", [[1.0, 0.2, 1.5, -0.5, 0.9, 0.1], [1.0, 0.0, 1.0, 0.5, 1.0, 0.5]])
def test_exactly_the_allowed_tokens_are_drawn(logits: list[float]) -> None:
    seed = torch.arange(3000)
    for temperature, top_k, top_p, min_p in GRID:
        options = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
        drawn = sample(torch.tensor(logits), seed, torch.zeros_like(seed), **options)
        assert set(drawn.tolist()) == allowed(logits, temperature, top_k, top_p, min_p), options


def test_greedy_takes_the_lowest_id_among_equals() -> None:
    logits = torch.tensor([0.0, 4.0, 1.0, 4.0, -1.0])
    seed = torch.arange(50)
    assert sample(logits, seed, seed, temperature=0.0, top_k=3, top_p=0.5).unique().tolist() == [1]


def test_a_forbidden_token_is_never_drawn() -> None:
    logits = torch.tensor([float("-inf"), -50.0, float("-inf"), -50.0])
    seed = torch.arange(1000)
    assert sample(logits, seed, seed, temperature=2.0).unique().tolist() == [1, 3]


@pytest.mark.parametrize("varying", ["seed", "high half of the seed", "position", "both"])
def test_draws_follow_the_distribution(varying: str) -> None:
    num_draws, temperature = 20_000, 0.8
    logits = torch.tensor([1.0, 0.2, 1.5, -0.5, 0.9, 0.1, 0.0, -1.0])
    count, fixed = torch.arange(num_draws), torch.full((num_draws,), 1234)
    seed, position = {
        "seed": (count, fixed),
        "high half of the seed": (count << 32, fixed),
        "position": (fixed, count),
        "both": (count, count),
    }[varying]
    expected = num_draws * (logits / temperature).softmax(-1)
    found = torch.bincount(sample(logits, seed, position, temperature=temperature), minlength=8)
    assert ((found - expected) ** 2 / expected).sum() < CRITICAL[7]


@pytest.mark.parametrize("step", ["position", "seed"])
def test_neighbouring_draws_are_independent(step: str) -> None:
    seed, position = torch.arange(20_000) // 200, torch.arange(20_000) % 200
    logits = torch.zeros(8)
    first = sample(logits, seed, position)
    second = sample(logits, seed + (step == "seed") * 1000, position + (step == "position"))
    found = torch.bincount(8 * first + second, minlength=64)
    expected = 20_000 / 64
    assert ((found - expected) ** 2 / expected).sum() < CRITICAL[63]


def test_a_request_draws_the_same_whatever_is_in_the_batch() -> None:
    call = dict(ops.sample.samples(torch.float32, torch.Generator().manual_seed(3)))["mixed"]["call"]
    rows = call.logits_RV.shape[0]
    together = ops.sample.reference(call)
    order = torch.randperm(rows)
    assert torch.equal(ops.sample.reference(map_tensors(lambda x: x[order], call)), together[order])
    for r in range(rows):
        alone = ops.sample.reference(map_tensors(lambda x, r=r: x[r : r + 1], call))
        assert alone.item() == together[r].item()


def test_another_position_or_seed_draws_another_token() -> None:
    logits, count, same = torch.zeros(1000), torch.arange(64), torch.full((64,), 5)
    for seed, position in ((same, count), (count, same), (count << 32, same), (-count, same)):
        assert sample(logits, seed, position).unique().numel() > 50
    assert sample(logits, same, same).unique().numel() == 1


def test_no_requests() -> None:
    none = torch.zeros(0, dtype=torch.int64)
    assert (sample(torch.zeros(8), none, none).shape, sample(torch.zeros(8), none, none).dtype) == ((0,), torch.int64)
