"""The sum over experts left to the norm behind the layer: the same result, asked for only where it is faster."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from anabranch import ops
from anabranch.engine.single import SingleSequence
from anabranch.layers.norm import RMSNorm, Rows
from anabranch.loader.load import load_model
from anabranch.models.decoder import Decoder
from anabranch.moe.layer import SUM_LATER, MoELayer
from anabranch.moe.options import MoEOptions, apply
from anabranch.ops.experts import COMBINES
from anabranch.platforms.fake import FakePlatform
from tests.models import tiny
from tests.moe.test_layer import GATED, ROUTED, WIDTH, make_layer, platform

__all__ = ["platform"]  # a fixture

PACKED = tiny.QWEN2_MOE | {"shared_expert_intermediate_size": 4 * 24}
CASES = {
    "qwen3_moe": next(case for case in tiny.CASES if case.model_type == "qwen3_moe"),
    "mixtral": next(case for case in tiny.CASES if case.model_type == "mixtral"),
    "packed": tiny.Case(name="packed", model_type="qwen2_moe", seed=3, settings=PACKED),
}
BY_TRITON = (SimpleNamespace(provider="triton"),)


def layers_of(model: Decoder) -> list[MoELayer]:
    return [module for module in model.modules() if isinstance(module, MoELayer)]


@pytest.mark.parametrize("name", CASES)
def test_a_model_gives_the_same_logits(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the bit, because here both sum a token's rows in their order (but for a single token)."""
    case = CASES[name]
    moe = MoEOptions(combine="unfused", shared_expert="packed" if name == "packed" else "stream")
    model = load_model(tiny.save(case, tmp_path / "model"), dtype="float32", moe=moe)
    monkeypatch.setattr(ops.add_rms_norm, "bound", ())  # torch's differs in the last bits
    seen: list[Rows] = []
    take = Rows.take
    monkeypatch.setattr(Rows, "take", lambda self: [seen.append(self), take(self)][1])
    logits = []
    for sum_later in (None, 0, 5):
        for layer in layers_of(model):
            layer.sum_later = sum_later
        sequence = SingleSequence(model, 64)
        prompt = tiny.prompt(case)
        logits.append(torch.cat([sequence.forward(prompt), sequence.forward([7, 8]), sequence.forward([9, 1])]))
        assert len(seen) == len(layers_of(model)) * {None: 0, 0: 3, 5: 1}[sum_later]
        assert all(rows.rows_TKD is None for rows in seen), "they are large, and nobody keeps them"
        seen.clear()
    assert torch.equal(logits[0], logits[1]) and torch.equal(logits[0], logits[2])


def test_padding_adds_nothing_whatever_its_rows_hold(platform: FakePlatform, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, norm = make_layer(ROUTED, platform), RMSNorm(WIDTH, 1e-6)
    norm.weight.data.normal_()
    monkeypatch.setattr(ops.add_rms_norm, "bound", ())  # torch's differs in the last bits
    real = ops.experts.bound[0].function

    def undefined(*args: Any, **kwargs: Any) -> torch.Tensor:
        y = real(*args, **kwargs)
        return y if kwargs["combined"] else y.masked_fill((args[2] < 0)[..., None], float("nan"))

    monkeypatch.setattr(ops.experts, "bound", (dataclasses.replace(ops.experts.bound[0], function=undefined),))
    x_TD, residual_TD = torch.randn(2, 9, WIDTH)
    num_tokens = torch.tensor(6, dtype=torch.int32)
    layer.experts.combine = "unfused"
    expected = norm.add(layer(x_TD, num_tokens), residual_TD)
    layer.sum_later = 8
    rows = layer.hand_on(x_TD, num_tokens)
    assert isinstance(rows, Rows) and rows.rows_TKD is not None
    assert rows.rows_TKD[6:].isnan().all() and rows.rows_TKD.shape == (9, ROUTED.top_k, WIDTH)
    found = norm.add(rows, residual_TD)
    assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])
    with pytest.raises(AssertionError, match="taken already"):
        norm.add(rows, residual_TD)


def test_who_is_not_asked_or_cannot_gives_the_sum(platform: FakePlatform) -> None:
    x_TD = torch.randn(9, WIDTH)
    layer = make_layer(ROUTED, platform)
    assert isinstance(layer.hand_on(x_TD, None), torch.Tensor), "by default nobody is asked"
    layer.sum_later = 8
    assert isinstance(layer(x_TD), torch.Tensor) and isinstance(layer.hand_on(x_TD[:8], None), torch.Tensor)
    assert isinstance(layer.hand_on(x_TD, None), Rows)
    layer.dispatcher = SimpleNamespace(dispatch=layer.dispatcher.dispatch, combine=lambda rows_MD, plan: rows_MD)
    assert isinstance(layer.hand_on(x_TD, None), torch.Tensor), "rows of other ranks are still to come"
    beside = make_layer(GATED, platform)
    beside.sum_later = 8
    assert torch.equal(beside.hand_on(x_TD, None), beside(x_TD))


@pytest.mark.parametrize("combine", COMBINES)
def test_it_is_asked_of_triton_alone(combine: str, platform: FakePlatform, monkeypatch: pytest.MonkeyPatch) -> None:
    def chosen() -> int | None:
        layer = make_layer(ROUTED, platform)
        apply(MoEOptions(combine=combine), layer)
        return layer.sum_later

    assert chosen() is None
    monkeypatch.setattr(ops.experts, "bound", BY_TRITON)
    assert chosen() is None, "the norm's kernel has to be there too"
    monkeypatch.setattr(ops.sum_add_rms_norm, "bound", BY_TRITON)
    assert chosen() == (SUM_LATER if combine in ("fastest", "unfused") else None)
    monkeypatch.setattr(ops.experts, "bound", ())
    assert chosen() is None


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_on_a_gpu_gives_the_same_logits(dtype: str, tmp_path: Path) -> None:
    case = CASES["qwen3_moe"]
    model = load_model(tiny.save(case, tmp_path / "model"), dtype=dtype)
    assert {layer.sum_later for layer in layers_of(model)} == {SUM_LATER}
    logits = []
    for sum_later in (None, 0):
        for layer in layers_of(model):
            layer.sum_later = sum_later
        logits.append(SingleSequence(model, 128).forward([*tiny.prompt(case), *tiny.prompt(case)]).double())
    assert (logits[0] - logits[1]).norm() <= {"float32": 1e-4, "bfloat16": 3e-2}[dtype] * logits[0].norm()
