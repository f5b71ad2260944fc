"""Matrices that a model which computes in fp32 keeps in bf16: products are those of the same numbers in fp32, to the
bit where both are computed in C without matrix units."""

import dataclasses
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from anabranch import kernels, ops, platforms
from anabranch.engine.single import SingleSequence
from anabranch.formats import BF16, PLAIN
from anabranch.kernels.c.library import matrix_units, problem
from anabranch.loader.load import load_model
from anabranch.models.decoder import Decoder
from anabranch.ops.weight import Weight
from tests.models import tiny

pytestmark = pytest.mark.skipif(bool(problem), reason=f"no kernels in C: {problem}")


def both(*shape: int, seed: int) -> tuple[Weight, Weight]:
    """A weight in bf16, and the same numbers in fp32."""
    data = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()
    return Weight.view(BF16, tuple(data.shape), {"data": data}), Weight.of(data.float())


@pytest.fixture
def vectors() -> Iterator[None]:
    """Matrix units are not used."""
    assert not matrix_units(0)
    yield
    matrix_units(1)


@pytest.fixture
def units() -> None:
    if not matrix_units(1):
        pytest.skip("this CPU has no matrix units (AMX)")


@pytest.mark.usefixtures("vectors")
@pytest.mark.parametrize("inputs", [1, 7, 16, 31, 64, 100, 576])
@pytest.mark.parametrize("outputs", [1, 6, 8, 259])
def test_products_are_those_of_fp32_to_the_bit(inputs: int, outputs: int) -> None:
    from anabranch.kernels.c import linear

    half, full = both(outputs, inputs, seed=inputs)
    bias = torch.randn(outputs, generator=torch.Generator().manual_seed(2))
    for tokens in (1, 2, 5, 33, 130):
        x = torch.randn(tokens, inputs, generator=torch.Generator().manual_seed(tokens))
        assert linear.accepts(x, half) and linear.accepts(x, full) == (tokens <= 32)
        for given in (None, bias):
            assert torch.equal(linear.linear(x, half, given), linear.product(x, full.data, given)), tokens


@pytest.mark.usefixtures("units")
@pytest.mark.parametrize("inputs", [32, 96, 576])
@pytest.mark.parametrize("outputs", [1, 16, 40, 259])
def test_matrix_units_are_as_exact_and_each_row_is_by_itself(inputs: int, outputs: int) -> None:
    from anabranch.kernels.c import linear

    half, _ = both(outputs, inputs, seed=inputs)
    generator = torch.Generator().manual_seed(outputs)
    x, bias = torch.randn(530, inputs, generator=generator), torch.randn(outputs, generator=generator)
    x *= 2.0 ** torch.randint(-60, 60, (530, 1), generator=generator)
    whole = linear.product(x, half.data, None)
    exact, size = x.double() @ half.data.double().T, x.double().abs() @ half.data.double().abs().T
    assert ((whole.double() - exact).abs() <= 1e-6 * size).all()
    for tokens in (1, 2, 5, 6, 16, 17, 33, 512):
        for begin in (0, 11):
            part = x[begin : begin + tokens].contiguous()
            assert torch.equal(linear.product(part, half.data, None), whole[begin : begin + tokens]), tokens
            assert torch.equal(linear.product(part, half.data, bias), whole[begin : begin + tokens] + bias), tokens


@pytest.mark.usefixtures("units")
def test_matrix_units_keep_what_is_not_finite_in_its_row() -> None:
    from anabranch.kernels.c import linear

    half, full = both(40, 64, seed=1)
    x = torch.randn(9, 64)
    expected = linear.product(x, half.data, None)
    x[2, 7], x[4, 1], x[5] = torch.inf, torch.nan, torch.finfo(torch.float32).max
    x[6, 3] = torch.tensor([0x7F800001], dtype=torch.int32).view(torch.float32)  # a NaN by its last bit alone
    y, plain = linear.product(x, half.data, None), x @ full.data.T
    good = [0, 1, 3, 7, 8]
    assert torch.equal(y[good], expected[good])
    assert torch.equal(y[2], plain[2]) and y[2].isinf().all()
    assert y[4].isnan().all() and y[6].isnan().all() and not y[5].isfinite().all()


@pytest.mark.usefixtures("units")
@pytest.mark.parametrize("width", [64, 96])
def test_experts_by_matrix_units_are_as_exact_and_each_token_is_by_itself(width: int) -> None:
    from anabranch.kernels.c import experts

    generator = torch.Generator().manual_seed(width)
    (gate_up, full_gate_up), (down, full_down) = both(6, 2 * 32, width, seed=1), both(6, width, 32, seed=2)
    expert = torch.rand(300, 6, generator=generator).argsort(-1)[:, :2].int()
    expert[7] = -1
    x, weight = torch.randn(300, width, generator=generator), torch.rand(300, 2, generator=generator)
    call = ops.ExpertsCall(x, weight, expert, gate_up, down, "silu", scaling=1.5)
    whole = experts.experts(call)
    doubles = [Weight.of(matrix.data.double()) for matrix in (full_gate_up, full_down)]
    exact = ops.experts.reference(call._replace(x_TD=x.double(), gate_up_EFD=doubles[0], down_EDI=doubles[1]))
    assert ((whole - exact).norm(dim=1) <= 1e-6 * exact.norm(dim=1)).all()
    for tokens in (1, 5, 40):
        part = call._replace(x_TD=x[:tokens], weight_TK=weight[:tokens], expert_TK=expert[:tokens])
        assert torch.equal(experts.experts(part), whole[:tokens]), tokens
    nobody = call._replace(x_TD=x[7:8], weight_TK=weight[7:8], expert_TK=expert[7:8])
    assert not experts.experts(nobody).any()


@pytest.mark.usefixtures("vectors")
@pytest.mark.parametrize("tokens", [1, 3, 40, 300])
def test_experts_are_those_of_fp32_to_the_bit(tokens: int) -> None:
    from anabranch.kernels.c import experts

    generator = torch.Generator().manual_seed(tokens)
    (gate_up, full_gate_up), (down, full_down) = both(6, 2 * 24, 40, seed=1), both(6, 40, 24, seed=2)
    expert = torch.rand(tokens, 6, generator=generator).argsort(-1)[:, :2].int()
    expert[-1, 0] = -1
    call = ops.ExpertsCall(
        torch.randn(tokens, 40, generator=generator),
        torch.rand(tokens, 2, generator=generator),
        expert,
        gate_up,
        down,
        "silu",
        scaling=1.5,
    )
    full = call._replace(gate_up_EFD=full_gate_up, down_EDI=full_down)
    assert experts.accepts(call) and experts.accepts(full) == (tokens <= 32)
    y = experts.experts(call)
    assert torch.equal(y, experts.experts(full))
    torch.testing.assert_close(y, ops.experts.reference(full), rtol=1e-4, atol=1e-4)
    kernels.bind(platforms.make("cpu"))
    rows = ops.experts(call._replace(combined=False))  # torch's kernel
    known = expert >= 0
    torch.testing.assert_close(rows[known], ops.experts(full._replace(combined=False))[known], rtol=1e-4, atol=1e-4)


def as_bf16(folder: Path, *, but: str = "nothing") -> Path:
    """The checkpoint in bf16, but for tensors with such a name."""
    for file in folder.glob("*.safetensors"):
        tensors = {name: x if but in name else x.bfloat16() for name, x in load_file(file).items()}
        save_file(tensors, file, {"format": "pt"})
    return folder


def formats(model: Decoder) -> dict[str, str]:
    return {name: weight.format.name for name, weight in model.named_modules() if isinstance(weight, Weight)}


@pytest.mark.parametrize("model_type", ["qwen3_moe", "qwen3_5_moe", "deepseek_v3", "gpt_oss", "gemma4_text"])
@pytest.mark.parametrize("deterministic", [False, True], ids=["fastest", "deterministic"])
def test_a_checkpoint_in_bf16_is_kept(
    tmp_path: Path, model_type: str, deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And gives the logits of its numbers in fp32; convolutions, and experts that no kernel has are fp32."""
    case = next(case for case in tiny.CASES if case.model_type == model_type)
    folder = as_bf16(tiny.save(dataclasses.replace(case, sharded=False), tmp_path))
    model = load_model(folder, dtype="float32", deterministic=deterministic)
    found = formats(model)
    silu = model.config.activation == "silu"
    for name, format in found.items():
        if ".experts." in name and "bias" not in name:
            assert (format == "bf16") == silu, name
        elif name.endswith(("_proj.weight", "lm_head.weight")) and "kv_b_proj" not in name:
            assert format == "bf16", name
        elif "conv1d" in name:
            assert format == "plain", name
    assert found["embed_tokens.weight"] == "bf16"
    with monkeypatch.context() as patch:
        patch.setenv("ANABRANCH_KERNELS", "reference")
        plain_model = load_model(folder, dtype="float32", platform=platforms.make("cpu"))
        assert set(formats(plain_model).values()) == {"plain"}
        expected = SingleSequence(plain_model, 128).forward(list(range(70)))
    kernels.bind(platforms.make("cpu"), deterministic)
    logits = SingleSequence(model, 128).forward(list(range(70)))
    assert logits.dtype == torch.float32 and (logits - expected).abs().max() < 1e-4 * expected.abs().max()
    kernels.bind(platforms.make("cpu"))


def test_other_checkpoints_are_loaded_as_before(tmp_path: Path) -> None:
    case = next(case for case in tiny.CASES if case.model_type == "qwen3_moe" and case.experts != "fused")
    whole = tiny.save(dataclasses.replace(case, sharded=False), tmp_path / "fp32")
    assert set(formats(load_model(whole)).values()) == {"plain"}
    mixed = as_bf16(tiny.save(dataclasses.replace(case, sharded=False), tmp_path / "mixed"), but="k_proj")
    found = Counter(formats(load_model(mixed, dtype="float32")).items())
    assert found["layers.0.self_attn.qkv_proj.weight", "plain"] and found["layers.0.self_attn.o_proj.weight", "bf16"]
    bf16 = as_bf16(tiny.save(dataclasses.replace(case, sharded=False), tmp_path / "bf16"))
    assert set(formats(load_model(bf16, dtype="bfloat16")).values()) == {PLAIN.name}
