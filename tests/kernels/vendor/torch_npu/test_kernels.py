"""Ascend's operators as we call them: taken by torch_npu's schemas and Meta kernels, and right if they compute what
their documentation says (tests/npu). How the chip itself computes is not seen here."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.npu import rig

rig.needed()

from anabranch import kernels, ops  # noqa: E402
from anabranch.conformance import models, tiny  # noqa: E402
from anabranch.conformance.ops import check_ops  # noqa: E402
from anabranch.loader.load import load_model  # noqa: E402
from anabranch.models.family import known  # noqa: E402
from anabranch.ops.arguments import map_tensors  # noqa: E402
from anabranch.platforms.cpu import CpuPlatform  # noqa: E402
from tests.npu.executor import OnCpu  # noqa: E402
from tests.npu.machine import Npu, machine  # noqa: E402

OPERATORS = {
    "npu_rms_norm",
    "npu_add_rms_norm",
    "npu_rotary_mul",
    "npu_swiglu",
    "npu_geglu",
    "npu_scatter_pa_kv_cache",
    "npu_fused_infer_attention_score",
    "npu_moe_gating_top_k_softmax",
    "npu_moe_init_routing_v2",
    "npu_grouped_matmul",
    "npu_moe_finalize_routing",
}
OF_MODEL = {
    "npu_rms_norm",
    "npu_add_rms_norm",
    "npu_rotary_mul",
    "npu_scatter_pa_kv_cache",
    "npu_fused_infer_attention_score",
}
OF_MOE = {
    "npu_moe_gating_top_k_softmax",
    "npu_moe_init_routing_v2",
    "npu_grouped_matmul",
    "npu_moe_finalize_routing",
}
LATENT = {"deepseek_v2", "deepseek_v3", "kimi_k2", "glm4_moe_lite"}
"""Attention to latent rows has no operator."""
OTHER_ROUTERS = {"deepseek_v3", "kimi_k2", "glm4_moe_lite", "glm4_moe", "minimax_m2", "ernie4_5_moe"}
"""With sigmoids, groups or biases, which the operator does not take."""


@pytest.fixture
def npu() -> Iterator[tuple[Npu, OnCpu]]:
    with machine() as found:
        yield found


def test_every_op_and_every_kernel_of_it(npu: tuple[Npu, OnCpu]) -> None:
    platform, mode = npu
    results = list(check_ops(platform))
    assert not [result for result in results if not result.passed]
    ours = {result.name for result in results if result.what.startswith("torch_npu")}
    assert ours == {name for name, op in ops.OPS.items() if "torch_npu" in op.kernels}
    assert set(mode.calls) >= OPERATORS


@pytest.mark.parametrize("family", known())
def test_a_model_in_half_precision_runs_on_ascends_operators(
    family: str, npu: tuple[Npu, OnCpu], tmp_path: Path
) -> None:
    platform, mode = npu
    tiny.write(family, tmp_path)
    expected = models.logits(tmp_path, CpuPlatform(), "float32", reference=True)
    assert models.far(expected, tmp_path, platform, "bfloat16") == []
    assert models.far(expected, tmp_path, platform, "float16") == []
    wanted = OF_MODEL | (OF_MOE if family not in ("llama", "qwen3", "qwen3_5", "qwen3_5_text") else set())
    wanted |= {"npu_geglu" if family.startswith("gemma") else "npu_swiglu", "npu_format_cast"}
    if family.startswith("gemma"):
        wanted -= {"npu_add_rms_norm"}
    if family.startswith(("qwen3_5", "qwen3_next")):  # their norms' weights are fp32, which the operators do not take
        wanted -= {"npu_add_rms_norm", "npu_rms_norm"}
    if family in LATENT:
        wanted -= {"npu_rotary_mul", "npu_scatter_pa_kv_cache", "npu_fused_infer_attention_score"}
    if family in OTHER_ROUTERS:
        wanted -= {"npu_moe_gating_top_k_softmax"}
    if family == "gpt_oss":  # sinks, and experts with biases and a clamped activation
        wanted -= OF_MOE - {"npu_moe_gating_top_k_softmax"} | {"npu_fused_infer_attention_score", "npu_swiglu"}
    assert wanted <= set(mode.calls), wanted - set(mode.calls)


def test_the_engine_on_an_npu_gives_the_cpus_answers(npu: tuple[Npu, OnCpu], tmp_path: Path) -> None:
    """Steps in captured pieces, padded, with a shared expert on its side stream; requests join and leave."""
    platform, _ = npu
    tiny.write("qwen2_moe", tmp_path)
    assert models.other_answers(tmp_path, platform) == []


def test_a_step_asks_the_device_for_its_lengths_once(npu: tuple[Npu, OnCpu], tmp_path: Path) -> None:
    platform, _ = npu
    tiny.write("gemma4_text", tmp_path)
    asked = []

    class Counting(OnCpu):
        def _to_copy(self, source: torch.Tensor, kwargs: dict[str, object]) -> torch.Tensor:
            if source.dtype == torch.int32 and str(kwargs.get("device")) == "cpu":
                asked.append(source.shape)
            return super()._to_copy(source, kwargs)

    with Counting():
        models.logits(tmp_path, platform, "bfloat16")
    assert len(asked) == 2 * len(models.STEPS)  # query_start and context_len


def test_padding_rows_are_written_nowhere(npu: tuple[Npu, OnCpu]) -> None:
    platform, _ = npu
    kernels.bind(platform)
    store = ops.rope_store.kernels["torch_npu"].function
    rope = torch.ones(4, 8), torch.zeros(4, 8)  # keys are stored as they are
    for slots in ([-1, 5, -1, 0], [-1, -1, -1, -1], [3, 2, 1, 0]):
        k, v = (torch.randn(4, 2, 16, dtype=torch.float16) for _ in range(2))
        pages = torch.randn(2, 3, 4, 2, 16, dtype=torch.float16)
        call = ops.RopeStoreCall(k, k, v, *rope, None, None, False, 1e-6, pages[0], pages[1], torch.tensor(slots))
        found = map_tensors(lambda tensor: tensor.npu(), call)
        store(found)
        ops.rope_store.reference(call)
        assert torch.equal(found.k_PSGD.cpu(), pages[0]) and torch.equal(found.v_PSGD.cpu(), pages[1])


def test_weights_lie_in_blocks_and_experts_the_way_the_grouped_product_takes_them(
    npu: tuple[Npu, OnCpu], tmp_path: Path
) -> None:
    platform, mode = npu
    tiny.write("qwen3_moe", tmp_path)
    model = load_model(tmp_path, platform=platform, dtype="bfloat16")
    # Each layer: qkv, output, and two stacks of experts. Not embeddings, routers and norms, nor a head of 97 rows.
    assert mode.calls.count("npu_format_cast") == 2 * 4
    experts = model.layers[0].mlp.experts
    assert all(weight.data.transpose(1, 2).is_contiguous() for weight in (experts.gate_up_EFD, experts.down_EDI))
    on_cpu = load_model(tmp_path, platform=CpuPlatform(), dtype="bfloat16")
    for (name, found), expected in zip(model.named_parameters(), on_cpu.parameters(), strict=True):
        assert found.shape == expected.shape and torch.equal(found.cpu(), expected), name
