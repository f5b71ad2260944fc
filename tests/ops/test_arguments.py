"""Records and weights as arguments: mapped, named, and flattened into the schema of an opaque op and back."""

from collections.abc import Iterator, Mapping

import pytest
import torch

from anabranch import kernels, ops
from anabranch.formats import Format, Shape, TensorSpec, format, register
from anabranch.ops.arguments import map_tensors, named_tensors
from anabranch.ops.opaque import flatten, opaque_op, unflatten
from anabranch.ops.weight import BY_INPUT, Weight
from anabranch.platforms.fake import FakePlatform


class Scaled(Format):
    """int8 with one scale for each row."""

    name = "scaled for a test"

    def tensors(self, shape: Shape) -> dict[str, TensorSpec]:
        return {"data": TensorSpec(shape, "int8"), "scale": TensorSpec(shape[:-1], "float32")}

    def dequantize(self, tensors: Mapping[str, torch.Tensor], shape: Shape, dtype: torch.dtype) -> torch.Tensor:
        return (tensors["data"] * tensors["scale"][..., None]).to(dtype)


@pytest.fixture
def scaled() -> Iterator[Format]:
    made = Scaled()
    register(made)
    yield made
    del format._registered[Scaled.name]


def draw(format: Format, *shape: int) -> Weight:
    data = torch.randint(-100, 100, shape, dtype=torch.int8)
    return Weight.view(format, shape, {"data": data, "scale": torch.rand(shape[:-1])})


def test_a_format_that_no_kernel_knows_is_computed_by_the_reference(scaled: Format) -> None:
    kernels.bind(FakePlatform())
    x_TD, weight = torch.randn(3, 8), draw(scaled, 6, 8)
    expected_TF = x_TD @ weight.dense(torch.float32).T
    torch.testing.assert_close(ops.linear(x_TD, weight), expected_TF)
    torch.testing.assert_close(opaque_op(ops.linear)(x_TD, weight), expected_TF)
    expert_TK = torch.tensor([[0, 2], [1, 0], [2, 1]], dtype=torch.int32)
    call = ops.ExpertsCall(x_TD, torch.rand(3, 2), expert_TK, draw(scaled, 3, 10, 8), draw(scaled, 3, 8, 5), "silu")
    dense = [Weight.of(weight.dense(torch.float32)) for weight in (call.gate_up_EFD, call.down_EDI)]
    expected_TD = ops.experts(call._replace(gate_up_EFD=dense[0], down_EDI=dense[1]))
    for experts in (ops.experts, opaque_op(ops.experts)):
        torch.testing.assert_close(experts(call), expected_TD)


@pytest.mark.parametrize("more", [(), (BY_INPUT,)], ids=["as loaded", "prepared for a kernel"])
def test_a_weight_goes_through_a_schema_without_a_copy(more: tuple[str, ...], scaled: Format) -> None:
    weight = draw(scaled, 6, 8)
    for name in more:
        weight.register_parameter(name, torch.nn.Parameter(torch.rand(1, 6), requires_grad=False))
    tensors, name, shape = flatten([weight])
    (found,) = unflatten([Weight], [tensors, name, shape])
    assert (name, shape, found.format, found.shape) == (scaled.name, [6, 8], scaled, (6, 8))
    assert found.tensors.keys() == weight.tensors.keys()
    assert all(found.tensors[part] is tensor for part, tensor in weight.tensors.items())


def test_map_and_names_look_into_records_and_weights(scaled: Format) -> None:
    call = ops.RouteCall(torch.randn(2, 4), 2, select_bias_E=torch.zeros(4))
    arguments = {"call": call, "weight": draw(scaled, 6, 8), "x": torch.ones(1), "k": 3, "none": None}
    assert [name for name, _ in named_tensors(arguments)] == [
        "logits_TE", "select_bias_E", "weight.data", "weight.scale", "x",
    ]  # fmt: skip
    mapped = map_tensors(lambda tensor: tensor.double(), arguments)
    assert {tensor.dtype for _, tensor in named_tensors(mapped)} == {torch.float64}
    assert mapped["call"].top_k == 2 and mapped["k"] == 3 and mapped["weight"].format is scaled
    assert call.logits_TE.dtype == torch.float32
