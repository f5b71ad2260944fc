"""The arguments of an op as a tree: records (NamedTuples) that an op may take as its only parameter, weights, tensors.

Moving samples to a device, changing their dtype and comparing them look into records and weights here, and only here.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch

from anabranch.ops.weight import Weight


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """`value` with function(tensor) in the place of each tensor in it."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, Weight):
        return Weight.view(value.format, value.shape, map_tensors(function, value.tensors))
    if isinstance(value, dict):
        return {name: map_tensors(function, one) for name, one in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(function, one) for one in value))
    return value


def named_tensors(arguments: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Each tensor with its name: the parameter's or the record's field; of a weight `NAME.data` and the like."""
    for name, value in arguments.items():
        if isinstance(value, torch.Tensor):
            yield name, value
        elif isinstance(value, Weight):
            yield from ((f"{name}.{part}", tensor) for part, tensor in value.tensors.items())
        elif hasattr(value, "_asdict"):
            yield from named_tensors(value._asdict())
