"""RMSNorm in Triton against its reference: in the interpreter, on a GPU, ahead of time."""

from typing import Any

import pytest
import torch

from anabranch import ops

pytest.importorskip("triton")
from anabranch.conformance.judge import copy, faults
from anabranch.kernels.triton import experts, split_rows
from anabranch.kernels.triton import norm as kernel
from anabranch.kernels.triton.launch import launch_options
from anabranch.kernels.triton.quantize_rows import ATTACHED, quantize_rows
from anabranch.ops.experts import ExpertsCall
from anabranch.ops.weight import Weight
from tests.kernels.triton import ahead_of_time
from tests.kernels.triton.ahead_of_time import compile_for, recorded
from tests.kernels.triton.places import dtypes, everywhere

WIDTHS = (1, 7, 24, 128, 300, 512, 2816)


def judge(op: Any, arguments: dict[str, Any], dtype: torch.dtype, device: str) -> None:
    found = op.kernels["triton"]
    arguments = copy(arguments, torch.device(device))
    assert found.accepts(**arguments)
    assert faults(op, found.function, arguments, dtype) == []


@everywhere
@pytest.mark.parametrize("name", ["rms_norm", "add_rms_norm", "sum_add_rms_norm", "norm_add"])
def test_samples(name: str, device: str) -> None:
    for dtype in dtypes(device):
        for _, arguments in ops.OPS[name].samples(dtype, torch.Generator().manual_seed(0)):
            judge(ops.OPS[name], arguments, dtype, device)


@everywhere
@pytest.mark.parametrize("width", [*WIDTHS, kernel.MAX_WIDTH])
def test_widths(width: int, device: str) -> None:
    for dtype in dtypes(device):
        for rows in (3,) if device == "cpu" else (1, 5, 64, 1000):
            x, residual = 3 * torch.randn(2, rows, width).to(dtype)
            weight_D = torch.rand(width).to(dtype)
            judge(ops.rms_norm, {"x": x, "weight_D": weight_D, "eps": 0.5}, dtype, device)
            both = {"x_TD": x, "residual_TD": residual, "weight_D": weight_D, "eps": 0.5}
            judge(ops.add_rms_norm, both, dtype, device)
            judge(ops.norm_add, {**both, "scale_1": torch.rand(1).to(dtype)}, dtype, device)
            expert_TK = torch.randint(-1, 4, (rows, 5), dtype=torch.int32)
            rows_TKD = torch.randn(rows, 5, width).to(dtype).masked_fill((expert_TK < 0)[..., None], float("nan"))
            del both["x_TD"]
            judge(ops.sum_add_rms_norm, {**both, "rows_TKD": rows_TKD, "expert_TK": expert_TK}, dtype, device)


@everywhere
def test_rows_that_do_not_lie_close(device: str) -> None:
    """Heads of a packed projection, and columns of a wider tensor; what lies between is not read."""
    for dtype in dtypes(device):
        packed = torch.full((5, 9, 48), float("nan"))
        packed[:, 6:8] = torch.randn(5, 2, 48)
        packed = packed.to(dtype)
        judge(ops.rms_norm, {"x": packed[:, 6:8], "weight_D": None, "eps": 1e-6}, dtype, device)
        wide, other = torch.randn(3, 200).to(dtype), torch.randn(3, 120).to(dtype)
        both = {"x_TD": wide[:, :96], "residual_TD": other[:, 20:116], "weight_D": torch.rand(96).to(dtype)}
        judge(ops.add_rms_norm, {**both, "eps": 1e-6}, dtype, device)


@everywhere
def test_what_is_normalised_is_the_rounded_sum(device: str) -> None:
    """As the next layer will find it: to the bit, but for the last one of a few."""
    for dtype in dtypes(device):
        x_TD, residual_TD = torch.randn(2, 4, 512, device=device).to(dtype)
        weight_D = torch.rand(512, device=device).to(dtype)
        y_TD, total_TD = kernel.add_rms_norm(x_TD, residual_TD, weight_D, 1e-6)
        assert torch.equal(total_TD, x_TD + residual_TD)
        same = y_TD == ops.rms_norm.reference(total_TD, weight_D, 1e-6)
        assert dtype == torch.float32 or same.float().mean() > 0.97


@everywhere
def test_a_few_rows_at_a_time_give_the_same_sum(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the bit that of row after row, and what is then rounded: the norm of the two ops, one after the other."""
    for dtype in dtypes(device):
        rows_TKD = torch.randn(6, 7, 300, device=device).to(dtype)
        expert_TK = torch.randint(-1, 3, (6, 7), dtype=torch.int32, device=device)
        residual_TD, weight_D = torch.randn(6, 300, device=device).to(dtype), torch.rand(300, device=device).to(dtype)
        x_TD = torch.zeros(6, 300, device=device)
        for k in range(7):
            x_TD += rows_TKD[:, k].float().masked_fill((expert_TK[:, k] < 0)[:, None], 0.0)
        expected = kernel.add_rms_norm(x_TD.to(dtype), residual_TD, weight_D, 1e-6)
        for ahead in (1, 3, 7):
            monkeypatch.setattr(kernel, "AHEAD_BYTES", ahead * 512 * dtype.itemsize)
            found = kernel.sum_add_rms_norm(rows_TKD, expert_TK, residual_TD, weight_D, 1e-6)
            assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])


@pytest.mark.gpu
def test_the_sum_is_that_of_the_experts_kernels() -> None:
    """Qwen3-30B-A3B's shape, to the bit; each call starts before its predecessor is done."""
    for tokens in (65, 512, 8192):
        rows_TKD = torch.randn(tokens, 8, 2048, device="cuda").bfloat16()
        expert_TK = torch.randint(-1, 128, (tokens, 8), dtype=torch.int32, device="cuda")
        rows_TKD[expert_TK < 0] = float("nan")
        residual_TD, weight_D = torch.randn(tokens, 2048, device="cuda").bfloat16(), torch.rand(2048, device="cuda")
        weight_D = weight_D.bfloat16()
        given = {"rows_TKD": rows_TKD, "expert_TK": expert_TK, "residual_TD": residual_TD, "weight_D": weight_D}
        if tokens <= 512:
            judge(ops.sum_add_rms_norm, {**given, "eps": 1e-6}, torch.bfloat16, "cuda")
        unused = Weight.of(rows_TKD)
        call = ExpertsCall(residual_TD, weight_D, expert_TK, unused, unused, "silu")
        x_TD = experts.sum_into(call, rows_TKD, torch.empty_like(residual_TD), False, launch_options(rows_TKD.device))
        expected = kernel.add_rms_norm(x_TD, residual_TD, weight_D, 1e-6)
        for _ in range(10):
            found = kernel.sum_add_rms_norm(**given, eps=1e-6)
            assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])


def test_what_it_does_not_accept() -> None:
    x, weight_D = torch.randn(4, 16), torch.rand(16)
    assert kernel.accepts(x, weight_D, 1e-6) and kernel.accepts(x, None, 1e-6)
    assert not kernel.accepts(x.double(), weight_D, 1e-6)
    assert not kernel.accepts(x.T, weight_D, 1e-6)
    assert not kernel.accepts(torch.empty(1, kernel.MAX_WIDTH + 1), None, 1e-6)
    assert kernel.accepts_add(x, x, weight_D, 1e-6)
    assert not kernel.accepts_add(x, x.half(), weight_D, 1e-6)
    assert not kernel.accepts_add(x, x[:1], weight_D, 1e-6)
    rows_TKD, expert_TK = torch.randn(4, 3, 16), torch.zeros(4, 3, dtype=torch.int32)
    assert kernel.accepts_sum(rows_TKD, expert_TK, x, weight_D, 1e-6)
    assert not kernel.accepts_sum(rows_TKD, expert_TK.long(), x, weight_D, 1e-6)
    assert not kernel.accepts_sum(rows_TKD, expert_TK[:, :2], x, weight_D, 1e-6)
    assert not kernel.accepts_sum(rows_TKD, expert_TK, x.half(), weight_D, 1e-6)
    assert not kernel.accepts_sum(rows_TKD[:, :0], expert_TK[:, :0], x, weight_D, 1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("early", [False, True])
def test_a_chain_that_overlaps(early: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each kernel starts before its predecessor is done; the last result must be that of one after the other."""
    monkeypatch.setattr(kernel, "EARLY_TOKENS", 500 if early else 0)
    for tokens in (1, 7, 64, 500):
        x_TD, total_TD = torch.randn(2, tokens, 2048, device="cuda").bfloat16()
        weight_D = torch.rand(2048, device="cuda").bfloat16()
        expected_TD, expected_total_TD = x_TD, total_TD
        for _ in range(30):
            expected_TD, expected_total_TD = ops.add_rms_norm.reference(expected_TD, expected_total_TD, weight_D, 1e-6)
        kernel.add_rms_norm(x_TD, total_TD, weight_D, 1e-6)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y_TD, y_total_TD = x_TD, total_TD
            for _ in range(30):
                y_TD, y_total_TD = kernel.add_rms_norm(y_TD, y_total_TD, weight_D, 1e-6)
        for _ in range(5):
            y_TD.fill_(float("nan"))
            graph.replay()
            for found, wanted in ((y_TD, expected_TD), (y_total_TD, expected_total_TD)):
                assert (found.double() - wanted.double()).norm() <= 1e-2 * wanted.double().norm()


CASES = {  # shape of x, with the addition, with the sum of experts' rows
    "one token": ((1, 2048), True, False),
    "gemma": ((64, 2816), True, False),
    "heads": ((64, 8, 128), False, False),
    "widest": ((3, kernel.MAX_WIDTH), True, False),
    "experts": ((512, 8, 2048), True, True),
    "odd experts": ((512, 6, 2816), True, True),
    "widest experts": ((3, 9, kernel.MAX_WIDTH), True, True),
}


@pytest.mark.slow
@pytest.mark.parametrize("target", ahead_of_time.TARGETS)
@pytest.mark.parametrize("case", CASES)
def test_compiles_ahead_of_time(case: str, target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    dependent = target in ahead_of_time.DEPENDENT
    monkeypatch.setattr(ahead_of_time.DEPENDENT_LAUNCH, lambda device: dependent)
    shape, add, summed = CASES[case]
    x = torch.empty(shape, dtype=torch.bfloat16)
    with recorded(kernel, "norm_kernel") as launches:
        kernel.launch(
            x,
            torch.empty(shape[0], *shape[2:] if summed else shape[1:], dtype=torch.bfloat16) if add else None,
            torch.empty(shape[-1], dtype=torch.bfloat16),
            1e-6,
            expert_TK=torch.empty(shape[:2], dtype=torch.int32) if summed else None,
        )
    compiled = compile_for(target, launches[0])
    num_rows = shape[1] if summed else 1
    if target == "sm_90":
        assert ahead_of_time.loads(compiled)["wide"] >= 1 + num_rows
        assert ahead_of_time.resources(compiled)["LOCAL"] == 0
    if dependent:
        before, after = ahead_of_time.loads_around_wait(compiled)
        assert before >= 1, "the weight is a parameter"
        assert after >= num_rows + add


@everywhere
def test_rows_in_fp8(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that a norm attaches are those of a kernel of their own; the result is the same as without."""
    monkeypatch.setattr(kernel, "is_hopper", lambda device: True)
    for dtype in dtypes(device):
        for tokens, D in ((5, 128), (6, 384), (17, 2048)):
            rows_TKD = torch.randn(tokens, 3, D, device=device).to(dtype)
            expert_TK = torch.zeros(tokens, 3, dtype=torch.int32, device=device)
            x_TD, weight_D = torch.randn(tokens, D, device=device).to(dtype), torch.rand(D, device=device).to(dtype)
            for norm, given in (
                (kernel.add_rms_norm, (x_TD, rows_TKD[:, 0].contiguous())),
                (kernel.sum_add_rms_norm, (rows_TKD, expert_TK, x_TD)),
            ):
                (y_TD, _), (plain_TD, _) = norm(*given, weight_D, 1e-6, "groups"), norm(*given, weight_D, 1e-6)
                assert torch.equal(y_TD, plain_TD)
                q_TD, scale_GT = quantize_rows(y_TD.clone())
                attached_q_TD, attached_scale_GT = quantize_rows(y_TD)
                assert attached_q_TD is getattr(y_TD, ATTACHED)[0]
                assert torch.equal(attached_q_TD[:tokens].float(), q_TD[:tokens].float())
                assert torch.equal(attached_scale_GT[:, :tokens], scale_GT[:, :tokens])
                if device == "cuda":  # the interpreter's conversion to FP8 is wrong
                    judged = q_TD[:tokens].double().unflatten(1, (-1, 128)) * scale_GT.T[:tokens, :, None].double()
                    least = 2.0**-9 * scale_GT[:, :tokens].max().item()  # the others are not written
                    torch.testing.assert_close(judged.flatten(1), y_TD.double(), rtol=2.0**-4 * 1.001, atol=least)


@everywhere
def test_rows_in_two_parts(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that a norm attaches are those of a kernel of their own; the result is the same as without."""
    monkeypatch.setattr(kernel, "is_hopper", lambda device: True)
    for tokens, D in ((5, 512), (6, 2880), (64, 2048)):
        rows_TKD = torch.randn(tokens, 3, D, device=device).to(torch.bfloat16)
        expert_TK = torch.zeros(tokens, 3, dtype=torch.int32, device=device)
        x_TD, weight_D = rows_TKD[:, 1].contiguous(), torch.rand(D, device=device).to(torch.bfloat16)
        for norm, given in (
            (kernel.add_rms_norm, (x_TD, rows_TKD[:, 0].contiguous())),
            (kernel.sum_add_rms_norm, (rows_TKD, expert_TK, x_TD)),
        ):
            (y_TD, _), (plain_TD, _) = norm(*given, weight_D, 1e-6, "parts"), norm(*given, weight_D, 1e-6)
            assert torch.equal(y_TD, plain_TD)
            attached = split_rows.split_rows(y_TD)
            assert attached is getattr(y_TD, split_rows.ATTACHED)
            made = split_rows.split_rows(y_TD.clone())
            assert torch.equal(attached[0].float(), made[0].float()) and torch.equal(attached[1], made[1])
            torch.testing.assert_close(attached[2], made[2])  # sums are in another order


@pytest.mark.parametrize(("tokens", "dtype"), [(4, torch.bfloat16), (65, torch.bfloat16), (16, torch.float16)])
def test_no_parts_where_nobody_reads_them(tokens: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "is_hopper", lambda device: True)
    assert kernel.attach_rows(torch.zeros(tokens, 512, dtype=dtype), "parts") == (None, None, None)
    assert kernel.attach_rows(torch.zeros(16, 512, dtype=torch.bfloat16), "") == (None, None, None)
