"""The sum over experts computed by the norm after the layer: the same result, and only where it is faster."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from anabranch import ops
from anabranch.engine.single import SingleSequence
from anabranch.layers.norm import RMSNorm, UnreducedRows
from anabranch.loader.load import load_model
from anabranch.models.decoder import Decoder
from anabranch.moe.layer import MoELayer
from anabranch.moe.setup import REDUCE_IN_NORM_TOKENS, MoESetup, make_setup
from anabranch.ops.experts import COMBINES
from anabranch.platforms.fake import FakePlatform
from tests.models import tiny
from tests.moe.test_layer import GATED, ROUTED, WIDTH, make_layer, platform

__all__ = ["platform"]  # a fixture

CASES = {
    "qwen3_moe": next(case for case in tiny.CASES if case.model_type == "qwen3_moe"),
    "mixtral": next(case for case in tiny.CASES if case.model_type == "mixtral"),
}
WITH_TRAITS = (SimpleNamespace(traits=("unreduced_rows", "sums_rows")),)


def layers_of(model: Decoder) -> list[MoELayer]:
    return [module for module in model.modules() if isinstance(module, MoELayer)]


@pytest.mark.parametrize("name", CASES)
def test_a_model_gives_the_same_logits(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the bit, because here both sum a token's rows in their order (but for a single token)."""
    case = CASES[name]
    model = load_model(tiny.save(case, tmp_path / "model"), dtype="float32", moe_combine="unfused")
    monkeypatch.setattr(ops.add_rms_norm, "bound", ())  # torch's differs in the last bits
    monkeypatch.setattr(ops.experts, "bound", tuple(one for one in ops.experts.bound if one.provider == "torch"))
    seen: list[UnreducedRows] = []
    take = UnreducedRows.take
    monkeypatch.setattr(UnreducedRows, "take", lambda self: [seen.append(self), take(self)][1])
    logits = []
    for reduce_in_norm in (None, 0, 5):
        for layer in layers_of(model):
            layer.reduce_in_norm = reduce_in_norm
        sequence = SingleSequence(model, 64)
        prompt = tiny.prompt(case)
        logits.append(torch.cat([sequence.forward(prompt), sequence.forward([7, 8]), sequence.forward([9, 1])]))
        assert len(seen) == len(layers_of(model)) * {None: 0, 0: 3, 5: 1}[reduce_in_norm]
        assert all(rows.rows_TKD is None for rows in seen), "they are large and must not be kept"
        seen.clear()
    assert torch.equal(logits[0], logits[1]) and torch.equal(logits[0], logits[2])


def test_padding_adds_nothing_whatever_its_rows_hold(platform: FakePlatform, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, norm = make_layer(ROUTED, platform), RMSNorm(WIDTH, 1e-6)
    norm.weight.data.normal_()
    monkeypatch.setattr(ops.add_rms_norm, "bound", ())  # torch's differs in the last bits
    real = ops.experts.bound[0].function

    def undefined(call: ops.ExpertsCall) -> torch.Tensor:
        y = real(call)
        return y if call.combined else y.masked_fill((call.expert_TK < 0)[..., None], float("nan"))

    monkeypatch.setattr(ops.experts, "bound", (dataclasses.replace(ops.experts.bound[0], function=undefined),))
    x_TD, residual_TD = torch.randn(2, 9, WIDTH)
    num_tokens = torch.tensor(6, dtype=torch.int32)
    layer.experts.combine = "unfused"
    expected = norm.add(layer(x_TD, num_tokens), residual_TD)
    layer.reduce_in_norm = 8
    rows = layer.forward_to_norm(x_TD, num_tokens)
    assert isinstance(rows, UnreducedRows) and rows.rows_TKD is not None
    assert rows.rows_TKD[6:].isnan().all() and rows.rows_TKD.shape == (9, ROUTED.top_k, WIDTH)
    found = norm.add(rows, residual_TD)
    assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])
    with pytest.raises(AssertionError, match="taken already"):
        norm.add(rows, residual_TD)


def test_the_layer_sums_where_the_norm_cannot(platform: FakePlatform) -> None:
    x_TD = torch.randn(9, WIDTH)
    layer = make_layer(ROUTED, platform)
    assert isinstance(layer.forward_to_norm(x_TD, None), torch.Tensor), "the default"
    layer.reduce_in_norm = 8
    assert isinstance(layer(x_TD), torch.Tensor) and isinstance(layer.forward_to_norm(x_TD[:8], None), torch.Tensor)
    assert isinstance(layer.forward_to_norm(x_TD, None), UnreducedRows)
    remote = SimpleNamespace(is_local=False)
    distributed = make_layer(ROUTED, platform, MoESetup(dispatcher=remote, reduce_in_norm=8))
    assert distributed.reduce_in_norm is None, "rows of other ranks are still missing"
    shared = make_layer(GATED, platform, MoESetup(reduce_in_norm=8))
    assert shared.reduce_in_norm is None and torch.equal(shared.forward_to_norm(x_TD, None), shared(x_TD))


@pytest.mark.parametrize("combine", COMBINES)
def test_only_kernels_that_write_rows_leave_the_sum(
    combine: str, platform: FakePlatform, monkeypatch: pytest.MonkeyPatch
) -> None:
    def chosen() -> int | None:
        return make_layer(ROUTED, platform, make_setup(platform, combine=combine)).reduce_in_norm

    assert chosen() is None
    monkeypatch.setattr(ops.experts, "bound", WITH_TRAITS)
    assert chosen() is None, "the norm's kernel has to be there too"
    monkeypatch.setattr(ops.sum_add_rms_norm, "bound", WITH_TRAITS)
    assert chosen() == (REDUCE_IN_NORM_TOKENS if combine in ("fastest", "unfused") else None)
    monkeypatch.setattr(ops.experts, "bound", ())
    assert chosen() is None


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_on_a_gpu_gives_the_same_logits(dtype: str, tmp_path: Path) -> None:
    case = CASES["qwen3_moe"]
    model = load_model(tiny.save(case, tmp_path / "model"), dtype=dtype)
    assert {layer.reduce_in_norm for layer in layers_of(model)} == {REDUCE_IN_NORM_TOKENS}
    logits = []
    for reduce_in_norm in (None, 0):
        for layer in layers_of(model):
            layer.reduce_in_norm = reduce_in_norm
        logits.append(SingleSequence(model, 128).forward([*tiny.prompt(case), *tiny.prompt(case)]).double())
    assert (logits[0] - logits[1]).norm() <= {"float32": 1e-4, "bfloat16": 3e-2}[dtype] * logits[0].norm()
