"""`deterministic`: what a request gets does not depend, to the bit, on what is computed with it."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from anabranch import bundled, kernels, ops, platforms
from anabranch.cli.main import main
from anabranch.config import EngineConfig
from anabranch.conformance import determinism, tiny
from anabranch.formats import named
from anabranch.kernels.c import library
from anabranch.kernels.invariant import attention, blocks, elementwise, experts, in_c, linear
from anabranch.llm import LLM, SamplingParams
from anabranch.loader.resolve import resolve
from anabranch.models.config import read_config
from anabranch.ops.activation import ACTIVATIONS
from anabranch.ops.attention import AttentionCall
from anabranch.ops.experts import ExpertsCall
from anabranch.ops.weight import Weight
from anabranch.platforms.fake import FakePlatform

FAMILIES = ("qwen2_moe", "qwen3_5_moe", "deepseek_v2", "gpt_oss", "gemma4_text")
DTYPES = ("float32", "bfloat16")
CASES = [pytest.param(family, dtype, marks=pytest.mark.slow) for family in FAMILIES for dtype in DTYPES]


def wrong(folder: Path, dtype: str, monkeypatch: pytest.MonkeyPatch, **options: bool) -> dict[str, tuple[str, ...]]:
    monkeypatch.setattr(determinism, "LENGTHS", (1, 40, 7, 19))
    monkeypatch.setattr(determinism, "ANSWER", 16)
    results = list(determinism.check_determinism(str(folder), dtype=dtype, **options))
    assert len(results) == 8
    return {f"{result.name}, {result.what}": result.faults for result in results if not result.passed}


@pytest.mark.parametrize(("family", "dtype"), CASES)
def test_same_bits_in_any_company(family: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny.write(family, tmp_path)
    assert wrong(tmp_path, dtype, monkeypatch) == {}


@pytest.mark.slow
def test_the_command_with_the_bundled_model(capsys: pytest.CaptureFixture[str]) -> None:
    """As it is given out, prompts included: preemptions and drafts must occur."""
    assert main(["selftest", "determinism"]) == 0
    said = capsys.readouterr().out
    assert said.count("same bits") == 8 and "\ndeterministic (" in said


@pytest.mark.gpu
@pytest.mark.parametrize(("family", "dtype"), CASES)
def test_same_bits_on_a_gpu_or_a_refusal(
    family: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny.write(family, tmp_path)
    if platforms.current().deterministic:
        assert wrong(tmp_path, dtype, monkeypatch) == {}
        return
    with pytest.raises(ValueError, match=r"deterministic: not yet .*platform"):
        LLM(tmp_path, deterministic=True)


@pytest.mark.slow
def test_differences_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the option a batch gives other bits than its requests alone."""
    tiny.write("qwen2_moe", tmp_path)
    found = wrong(tmp_path, "float32", monkeypatch, deterministic=False)
    assert any(name.startswith("in one batch") for name in found)
    assert not any(name.startswith("again") for name in found)


def test_what_is_not_covered_is_refused() -> None:
    with pytest.raises(ValueError, match="deterministic: not yet with 2 ranks"):
        LLM(deterministic=True, tensor_parallel_size=2)


def test_what_is_not_covered_on_a_gpu_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Gpu(FakePlatform):
        name = "cuda"
        deterministic = True

    config, model = EngineConfig(model="x", deterministic=True), read_config(bundled.folder())
    assert resolve(config, model, Gpu()).deterministic
    with pytest.raises(ValueError, match="deterministic: not with graphs compiled"):
        resolve(replace(config, graphs="compiled"), model, Gpu())
    assert resolve(replace(config, state_dtype="model"), model, Gpu()).deterministic  # it has no states
    tiny.write("qwen3_5_moe", tmp_path)
    with pytest.raises(ValueError, match="deterministic: on a GPU states must be kept in float32"):
        resolve(replace(config, state_dtype="model"), read_config(tmp_path), Gpu())
    monkeypatch.setattr(Gpu, "deterministic", False)
    with pytest.raises(ValueError, match="deterministic: not yet with platform 'cuda', only on one CPU or NVIDIA GPU"):
        resolve(config, model, Gpu())


def test_means_do_not_depend_on_chunks() -> None:
    """The sum of a prompt's rows is the same wherever it is cut."""
    prompt = list(range(3, 60))
    found = []
    for tokens in (7, 64):
        with LLM(deterministic=True, max_num_batched_tokens=tokens, prefix_cache=False, show_progress=False) as llm:
            found.append(llm.embed([prompt, prompt[:9]], pooling="mean"))
    assert found[0] == found[1] and len(found[0]) == 2


def test_on_a_gpu_tiles_are_fixed_and_libraries_are_not_called(monkeypatch: pytest.MonkeyPatch) -> None:
    launch = pytest.importorskip("anabranch.kernels.triton.launch")

    class Gpu(FakePlatform):
        name = "cuda"
        providers = {"triton": "anabranch.kernels.triton", "torch": "anabranch.kernels.torch"}

    monkeypatch.setenv("ANABRANCH_KERNELS", "")
    try:
        for deterministic in (True, False):
            kernels.bind(Gpu(), deterministic)
            assert launch.fixed_tiles is kernels.deterministic_bound() is deterministic
            for name in kernels.ROWS_TOGETHER:
                bound = [kernel.provider for kernel in ops.OPS[name].bound]
                assert (bound == ["triton"] and ops.OPS[name].forced) is deterministic, name
    finally:
        kernels.bind(platforms.current())


@pytest.mark.slow
def test_same_bits_without_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_c, "problem", "there is no C compiler")
    tiny.write("qwen2_moe", tmp_path)
    assert wrong(tmp_path, "float32", monkeypatch) == {}


@pytest.mark.skipif(bool(library.problem), reason=library.problem)
def test_decode_steps_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANABRANCH_PLATFORM", "cpu")
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    with LLM(bundled.folder(), dtype="float32", max_num_seqs=2, num_pages=16, deterministic=True) as llm:
        llm.generate([[5, 6, 7], [300, 20]], params)
        assert list(llm.engine.runner.forward.recorded.by_rows) == [2]  # type: ignore[attr-defined]


@pytest.mark.parametrize("in_c_too", (True, False))
def test_rows_of_attention_do_not_depend_on_their_number(in_c_too: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not in_c_too:
        monkeypatch.setattr(in_c, "problem", "there is no C compiler")
    generator, tokens = torch.Generator().manual_seed(4), 70
    for heads, kv_heads, dim, window in ((4, 2, 64, 0), (3, 1, 24, 9), (7, 1, 40, 33)):
        q_THD = torch.randn(tokens, heads + 1, dim, generator=generator)[:, :heads]
        k_PSGD, v_PSGD = torch.randn(2, 18, 4, kv_heads, dim, generator=generator)
        table_RM = torch.randperm(18, generator=generator)[None].int()

        def rows(begin: int, end: int) -> torch.Tensor:
            starts, length = torch.tensor([0, end - begin]).int(), torch.tensor([end]).int()
            pages = k_PSGD, v_PSGD, table_RM  # noqa: B023
            return attention.attention(
                AttentionCall(q_THD[begin:end], *pages, starts, length, dim**-0.5, window, end - begin)  # noqa: B023
            )

        expected = rows(0, tokens)
        for number in (1, 2, 3, 5, 8, 33):
            assert torch.equal(rows(tokens - number, tokens), expected[-number:]), (heads, number)
            assert torch.equal(rows(10, 10 + number), expected[10 : 10 + number]), (heads, number)


@pytest.mark.parametrize("in_c_too", (True, False))
def test_rows_of_slices_do_not_depend_on_their_number(in_c_too: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One row of a slice is contiguous, several are not; the kernels in C are called for all or for none."""
    if not in_c_too:
        monkeypatch.setattr(in_c, "problem", "there is no C compiler")
    generator, (tokens, width, num_experts) = torch.Generator().manual_seed(5), (300, 50, 6)
    x_TD, y_TD = torch.randn(2, tokens, 3 * width, generator=generator)[..., width : 2 * width]
    norm_D, gate_T1 = torch.rand(width, generator=generator), torch.randn(tokens, 3, generator=generator)[:, 1:2]
    gate_up_EFD = Weight.of(torch.randn(num_experts, 40, width, generator=generator))
    down_EDI = Weight.of(torch.randn(num_experts, width, 20, generator=generator))
    logits_TE = torch.randn(tokens, 2 * num_experts, generator=generator)[:, :num_experts]

    def compute(rows: slice) -> list[torch.Tensor]:
        weight_TK, expert_TK = in_c.choose(ops.RouteCall(logits_TE[rows], 2))
        call = ops.ExpertsCall(x_TD[rows], weight_TK, expert_TK, gate_up_EFD, down_EDI, activation="silu")
        return [
            weight_TK,
            experts.experts(call),
            elementwise.gated_activation(x_TD[rows], "silu"),
            elementwise.add_gated(x_TD[rows], y_TD[rows], gate_T1[rows]),
            in_c.rms_norm(x_TD[rows], norm_D, 1e-6),
            *in_c.add_rms_norm(x_TD[rows], y_TD[rows], norm_D, 1e-6),
        ]

    expected = compute(slice(0, tokens))
    for number in (1, 2, 3, 5, 33, 100):
        rows = slice(tokens - number, tokens)
        assert [torch.equal(x, y[rows]) for x, y in zip(compute(rows), expected, strict=True)] == [True] * 7, number


def test_rows_of_products_do_not_depend_on_their_number() -> None:
    kernels.bind(platforms.make("cpu"), deterministic=True)
    generator = torch.Generator().manual_seed(1)
    # Of these sums some libraries change the order with the rows.
    for outputs, inputs in ((33, 48), (7, 41), (256, 640)):
        weight_FD = Weight.of(torch.randn(outputs, inputs, generator=generator))
        x_TD = torch.randn(300, inputs, generator=generator)
        expected = ops.linear(x_TD, weight_FD)
        for rows in (1, 2, 3, 5, 17, 40, 255):
            assert torch.equal(ops.linear(x_TD[7 : 7 + rows], weight_FD), expected[7 : 7 + rows]), (inputs, rows)
    kernels.bind(platforms.current())


@pytest.mark.parametrize("name", ["fp8_128x128", "int8_1x0", "int4_1x32_f16", "fp4_1x32_e8m0"])
@pytest.mark.parametrize("in_c_too", (True, False))
def test_rows_of_quantised_weights_do_not_depend_on_their_number(
    name: str, in_c_too: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that are dequantised in every step, because there is no memory for them otherwise."""
    if not in_c_too:
        monkeypatch.setattr(in_c, "problem", "there is no C compiler")
    generator, format = torch.Generator().manual_seed(4), named(name)
    E, D, inner, tokens = 4, 128, 64, 100

    def weight(*shape: int) -> Weight:
        return Weight.view(format, shape, format.quantize(torch.randn(shape, generator=generator)))

    one, gate_up, down = weight(96, D), weight(E, 2 * inner, D), weight(E, D, inner)
    x_TD, weight_TK = (torch.randn(tokens, n, generator=generator) for n in (D, 2))
    expert_TK = torch.stack([torch.randperm(E, generator=generator)[:2] for _ in range(tokens)]).int()

    def compute(rows: slice) -> list[torch.Tensor]:
        call = ExpertsCall(x_TD[rows], weight_TK[rows], expert_TK[rows], gate_up, down, "silu")
        return [ops.linear(x_TD[rows], one), ops.experts(call)]

    kernels.bind(platforms.make("cpu"), deterministic=True)
    try:
        expected = compute(slice(0, tokens))
        for number in (1, 2, 5, 33):
            rows = slice(tokens - number, tokens)
            assert [torch.equal(x, y[rows]) for x, y in zip(compute(rows), expected, strict=True)] == [True] * 2, number
    finally:
        kernels.bind(platforms.current())


def test_elements_do_not_depend_on_their_number() -> None:
    x_TD = 3 * torch.randn(700, 50, generator=torch.Generator().manual_seed(2))
    for function in (torch.nn.functional.silu, torch.sigmoid, torch.tanh):
        expected = torch.cat([elementwise.in_vectors(function, row) for row in x_TD.split(1)])
        assert torch.equal(elementwise.in_vectors(function, x_TD), expected)


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_gates_do_not_depend_on_the_number_of_rows(kind: str) -> None:
    """A gate is a slice of its row: contiguous if there is one row, and not if there are more."""
    for width in (50, 96, 704):
        x_T2I = 3 * torch.randn(67, 2 * width, generator=torch.Generator().manual_seed(3))
        expected = torch.cat([elementwise.gated_activation(row, kind) for row in x_T2I.split(1)])
        assert torch.equal(elementwise.gated_activation(x_T2I, kind), expected), width


def test_sizes_that_do_not_agree_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    assert blocks.agreeing(lambda size: size != 2, (1, 2, 16), 16) == (1, 16)
    assert blocks.agreeing(lambda size: torch.get_num_threads() == 1, (1, 16), 16) in ((), (1, 16))
    assert blocks.cover(300, (16, 256)) == ((0, 256, 256), (256, 16, 16), (272, 16, 16), (288, 12, 16))
    assert blocks.cover(0, (16,)) == ()
    monkeypatch.setattr(linear, "_agreeing", lambda weight: ())
    monkeypatch.setattr(linear, "_known", {})
    x_TD, weight_DF = torch.randn(5, 8), torch.randn(8, 3)
    torch.testing.assert_close(linear.product(x_TD, weight_DF), x_TD @ weight_DF)


@pytest.mark.parametrize("shape", [(32, 64), (64, 131), (2, 33, 300)])
def test_bf16_does_not_hide_another_order_of_sums(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """A library that adds from the other end where there is one row: products are rounded to few bits after that."""
    weight_XDF = torch.randn(*shape).bfloat16()

    def matmul(x_XTD: torch.Tensor, weight_XDF: torch.Tensor) -> torch.Tensor:
        terms = x_XTD.float()[..., None] * weight_XDF.float()[..., None, :, :]
        terms = terms.flip(-2) if x_XTD.shape[-2] == 1 else terms
        return sum(terms.unbind(-2), torch.zeros(())).to(x_XTD.dtype)

    monkeypatch.setattr(torch, "matmul", matmul)
    monkeypatch.setattr(linear, "SIZES", (1, 2, 16, 24))
    assert linear._agreeing(weight_XDF) == (2, 16, 24)
