"""Is a function a kernel of an op? Judged on one sample, by the op's reference in fp32 on the CPU."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from anabranch.ops.arguments import map_tensors, named_tensors
from anabranch.ops.op import Op

Arguments = dict[str, Any]
FP8_CHANGES = 0.05
"""Share of a result's numbers in FP8 that may be neighbours of those that the reference gives in the same dtype."""


def faults(
    op: Op[..., Any],
    function: Callable[..., Any],
    arguments: Arguments,
    dtype: torch.dtype,
    device: torch.device | None = None,
) -> list[str]:
    """What is wrong with `function` as a kernel of `op`, called on the device (default: where the arguments are).
    The judge is on the CPU: a reference computed by the device would share its mistakes."""
    given = copy(arguments, device)
    arguments = copy(arguments, torch.device("cpu"))
    exact = map_tensors(lambda tensor: tensor.float() if tensor.dtype == dtype else tensor, copy(arguments))
    like = copy(arguments)
    expected = outputs(op, op.reference(**exact), exact)
    form = outputs(op, op.reference(**like), like)
    with poisoned_memory():
        result = function(**given)
    found = outputs(op, result, given)

    wrong = []
    after = dict(named_tensors(given))
    for name, value in named_tensors(arguments):
        if name not in op.mutates and not same_bits(value, after[name].cpu()):
            wrong.append(f"writes over its input {name}")
    if found.keys() != expected.keys():
        return [*wrong, f"gives {len(found)} outputs, not {len(expected)}"]
    for name in expected:
        wrong += differences(name, found[name].cpu(), expected[name], form[name], op.tolerance[dtype])
    return wrong


def differences(
    name: str, found: torch.Tensor, expected: torch.Tensor, form: torch.Tensor, tolerance: float
) -> Iterator[str]:
    if (found.shape, found.dtype) != (form.shape, form.dtype):
        yield f"{name} is {found.dtype} {list(found.shape)}, not {form.dtype} {list(form.shape)}"
    elif found.dtype == torch.float8_e4m3fn:
        # What lies between two numbers of few digits may go to either, after rounding in another order.
        a, b = found.float(), form.float()
        if not ((a - b).abs() <= a.abs().minimum(b.abs()) / 8 + 2**-9).all():
            yield f"{name} is {a.tolist()}, more than a step of FP8 from {b.tolist()}"
        elif (changed := (a != b).double().mean().item()) > FP8_CHANGES:
            yield f"{name} differs in {changed:.0%} of its numbers, more than {FP8_CHANGES:.0%}"
    elif not found.is_floating_point():
        if not torch.equal(found, expected):
            yield f"{name} is {found.tolist()}, not {expected.tolist()}"
    else:
        error, scale = (found.double() - expected.double()).norm().item(), expected.double().norm().item()
        if not error <= tolerance * scale:  # so that NaN never passes
            yield f"{name} differs by {error:.3g} of {scale:.3g}, more than {tolerance:g} times it"


def outputs(op: Op[..., Any], result: Any, arguments: Arguments) -> Mapping[str, torch.Tensor]:
    """What a call gave: its results and the arguments it may write to."""
    results = () if result is None else (result,) if isinstance(result, torch.Tensor) else result
    written = {name: tensor for name, tensor in named_tensors(arguments) if name in op.mutates}
    return {f"result {i}": tensor for i, tensor in enumerate(results)} | written


def copy(arguments: Arguments, device: torch.device | None = None) -> Arguments:
    """Fresh tensors with the same strides."""

    def duplicate(tensor: torch.Tensor) -> torch.Tensor:
        where = device or tensor.device
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=where).copy_(tensor)

    return map_tensors(duplicate, arguments)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """New tensors start as NaN (integers: the largest), so that what a kernel forgets to write is seen."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
