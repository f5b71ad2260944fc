"""The CPU's sampling against the reference, token by token: nothing is left to rounding, so none may differ."""

import pytest
import torch

from anabranch import ops
from anabranch.kernels.torch import sample as kernel
from anabranch.ops import exact
from anabranch.ops.sample import NONE_ALLOWED
from tests.ops.sampling_rows import sampling_rows


@pytest.mark.parametrize(("vocabulary", "rows"), [(60, 2000), (700, 1000), (9000, 100)])
def test_every_token_is_the_reference_s(vocabulary: int, rows: int, thorough: bool) -> None:
    rows = rows if thorough else rows // 2
    arguments = sampling_rows(rows, vocabulary, torch.Generator().manual_seed(vocabulary))
    expected = ops.sample.reference(ops.SampleCall(**arguments))
    wrong = (kernel.sample(ops.SampleCall(**arguments)) != expected).nonzero()[:, 0].tolist()
    assert not wrong, [{name: x[r] for name, x in arguments.items()} for r in wrong[:3]]
    drawn = {name: arguments[name] for name in ("logits_RV", "temperature_R", "seed_R", "position_R")}
    assert torch.equal(kernel.sample(ops.SampleCall(**drawn)), ops.sample.reference(ops.SampleCall(**drawn)))


def test_a_strided_row_and_nothing_allowed() -> None:
    arguments = sampling_rows(6, 400, torch.Generator().manual_seed(1))
    arguments["logits_RV"][3] = float("-inf")
    wide = torch.full((6, 900), float("nan"))
    wide[:, 100:500] = arguments["logits_RV"]
    found = kernel.sample(ops.SampleCall(**arguments | {"logits_RV": wide[:, 100:500]}))
    assert torch.equal(found, ops.sample.reference(ops.SampleCall(**arguments))) and found[3] == NONE_ALLOWED


def test_its_hash_and_mass_are_the_exact_ones() -> None:
    ids = torch.arange(-50, 5000, dtype=torch.int32)
    for state in (0, 12345, 0xDEADBEEF):
        expected = exact.mix((ids.long() & 0xFFFFFFFF) ^ state)
        assert torch.equal(kernel.hashes(state, ids).long() & 0xFFFFFFFF, expected)
    relative = -25 * torch.rand(10_000)
    assert torch.equal(kernel.mass(relative).long(), exact.mass(relative))


def test_bounds_hold_the_noise() -> None:
    """What `candidates` leaves out could not have won."""
    state = torch.cat([torch.randint(2**32, (200_000,)), torch.arange(3000), 2**32 - 1 - torch.arange(3000)])
    bits = ((state >> 1).float() + 0.25).view(torch.int32).float()
    bound, noise = bits * kernel.BOUND_STEP + kernel.BOUND_AT_0, exact.noise(state)
    assert (noise <= bound).all() and (noise >= bound - kernel.GAP).all()
    assert noise.max() - noise.min() < kernel.SPREAD


def test_what_it_does_not_accept() -> None:
    arguments = sampling_rows(2, kernel.MIN_VOCABULARY, torch.Generator())
    assert kernel.accepts(ops.SampleCall(**arguments))
    assert not kernel.accepts(ops.SampleCall(**arguments | {"logits_RV": arguments["logits_RV"][:, 1:]}))
    assert not kernel.accepts(ops.SampleCall(**arguments | {"logits_RV": torch.zeros(kernel.MIN_VOCABULARY, 2).T}))
    for dtype in (torch.bfloat16, torch.float16):  # taken as they are
        assert kernel.accepts(ops.SampleCall(**arguments | {"logits_RV": arguments["logits_RV"].to(dtype)}))
