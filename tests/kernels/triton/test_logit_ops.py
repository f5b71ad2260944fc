"""Log probabilities, penalties and masks in Triton against their references: in the interpreter, on a GPU, ahead of
time."""

from typing import Any

import pytest
import torch

from anabranch import ops

pytest.importorskip("triton")
from anabranch.conformance.judge import copy, faults
from anabranch.kernels.triton import logprobs, mask_logits, penalize
from anabranch.ops.mask_logits import pack_mask
from anabranch.ops.penalize import PenalizeCall
from tests.kernels.triton import ahead_of_time
from tests.kernels.triton.ahead_of_time import compile_for, recorded
from tests.kernels.triton.places import everywhere


def judge(op: Any, arguments: dict[str, Any], device: str) -> None:
    found = op.kernels["triton"]
    arguments = copy(arguments, torch.device(device))
    assert found.accepts(**arguments)
    assert faults(op, found.function, arguments, torch.float32) == []


@everywhere
@pytest.mark.parametrize("name", ["logprobs", "penalize", "mask_logits"])
def test_samples(name: str, device: str) -> None:
    for _, arguments in ops.OPS[name].samples(torch.float32, torch.Generator().manual_seed(0)):
        judge(ops.OPS[name], arguments, device)


# -- Log probabilities -------------------------------------------------------------------------------------------------


@everywhere
def test_alternatives_among_ties_and_forbidden_tokens(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """More alternatives than tokens that are allowed, equal logits in and across stretches, −0.0."""
    monkeypatch.setattr(logprobs, "TILE", 256)  # several chunks
    logits_TV = torch.randint(-1, 2, (4, 700)).float()
    logits_TV[1] = -logits_TV[1]
    logits_TV[2, 1:] = torch.where(torch.arange(1, 700) % 97 < 1, logits_TV[2, 1:], float("-inf"))
    logits_TV[3] = 1.0
    token_T = torch.tensor([5, 699, 97, 300])
    given = {"logits_TV": logits_TV, "token_T": token_T, "top_n": 9}
    results = logprobs.logprobs(**copy(given, torch.device(device)))
    for found, expected in zip(results, ops.logprobs.reference(**given)):
        assert torch.equal(found.cpu().isinf(), expected.isinf())
        torch.testing.assert_close(found.cpu(), expected, rtol=1e-6, atol=1e-6)


@everywhere
def test_alternatives_of_long_rows(device: str) -> None:
    for rows, vocabulary, top_n in ((1, 5000, 20),) if device == "cpu" else ((1, 151936, 20), (70, 262144, 5)):
        logits_TV = 3 * torch.randn(rows, vocabulary)
        token_T = torch.randint(vocabulary, (rows,))
        judge(ops.logprobs, {"logits_TV": logits_TV, "token_T": token_T, "top_n": top_n}, device)
        id_TN, logprob_TN = logprobs.logprobs(logits_TV.to(device), token_T.to(device), top_n)[2:]
        chosen_T = id_TN[:, top_n - 1].contiguous()
        same_T, rank_T, _, _ = logprobs.logprobs(logits_TV.to(device), chosen_T, 0)
        assert torch.equal(same_T, logprob_TN[:, top_n - 1])  # the same float as chosen and as alternative
        assert (rank_T == top_n).all()


def test_what_logprobs_does_not_accept() -> None:
    logits_TV, token_T = torch.zeros(2, 30), torch.zeros(2, dtype=torch.int64)
    assert logprobs.accepts(logits_TV, token_T, 30)
    assert not logprobs.accepts(logits_TV, token_T, 31)
    assert not logprobs.accepts(torch.zeros(2, 300), token_T, logprobs.MAX_TOP_N + 1)
    assert not logprobs.accepts(logits_TV.half(), token_T, 3)


# -- Penalties and masks -----------------------------------------------------------------------------------------------


def penalties(rows: int, vocabulary: int) -> PenalizeCall:
    table = torch.randperm(rows + 3)[:rows]
    return PenalizeCall(
        logits_RV=5 * torch.randn(rows + 1, vocabulary),
        row_N=torch.randperm(rows + 1)[:rows],
        count_PV=torch.randint(-4, 5, (rows + 3, vocabulary), dtype=torch.int32).clamp(min=0),
        prompt_PV=torch.rand(rows + 3, vocabulary) < 0.2,
        table_row_N=table,
        presence_N=torch.randn(rows),
        frequency_N=torch.randn(rows),
        repetition_N=0.5 + torch.rand(rows),
    )


@everywhere
def test_penalties_have_the_reference_s_bits(device: str) -> None:
    for rows, vocabulary in ((3, 2500),) if device == "cpu" else ((3, 2500), (64, 151936)):
        arguments = {"call": penalties(rows, vocabulary)}
        found, expected = copy(arguments, torch.device(device)), copy(arguments)
        penalize.penalize(**found)
        ops.penalize.reference(**expected)
        assert torch.equal(found["call"].logits_RV.cpu(), expected["call"].logits_RV)


@everywhere
def test_masks_with_minus_infinity(device: str) -> None:
    for rows, vocabulary in ((2, 3000),) if device == "cpu" else ((2, 3000), (64, 151936)):
        logits_RV, allowed = torch.randn(rows + 1, vocabulary), torch.rand(rows, vocabulary) < 0.5
        row_N, words = torch.randperm(rows + 1)[:rows], pack_mask(allowed)
        for allowed_NM in (words, words[:, :-2], torch.nn.functional.pad(words, (0, 3), value=-1)):
            found, expected = logits_RV.to(device), logits_RV.clone()
            mask_logits.mask_logits(found, row_N.to(device), allowed_NM.to(device))
            ops.mask_logits.reference(expected, row_N, allowed_NM)
            assert torch.equal(found.cpu(), expected) and expected.isinf().any()


# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("target", ahead_of_time.TARGETS)
def test_compiles_ahead_of_time(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead_of_time.DEPENDENT_LAUNCH, lambda device: target in ahead_of_time.DEPENDENT)
    logits, token = torch.zeros(2, 151936), torch.zeros(2, dtype=torch.int64)
    with recorded(logprobs, "measure_kernel", "list_kernel") as launches:
        logprobs.logprobs(logits, token, 20)
        logprobs.logprobs(logits, token, 0)
    with recorded(penalize, "penalize_kernel") as more:
        penalize.penalize(penalties(2, 151936))
    with recorded(mask_logits, "mask_kernel") as masks:
        mask_logits.mask_logits(logits, token[:1], torch.zeros(1, 4748, dtype=torch.int32))
    assert len([*launches, *more, *masks]) == 6
    for launch in (*launches, *more, *masks):
        compiled = compile_for(target, launch)
        assert compiled.metadata.shared <= 48 * 1024
        if target.startswith("sm_"):
            assert ahead_of_time.resources(compiled)["LOCAL"] == 0
            if launch.function is penalize.penalize_kernel:
                assert "fma.rn.f32" not in compiled.asm["ptx"].partition("div.rn")[0]
