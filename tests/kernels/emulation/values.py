"""What is in registers when a kernel runs in Python: numbers of a Triton dtype, pointers, and operations on both.

Numbers have torch's dtype of the same name, so bf16 is rounded and int32 overflows as on a GPU; 16 and 32 bits without
a sign, for which torch has no arithmetic, are kept in int64 and cut off after every operation. Constants of Python take
the dtype of what they are combined with, as in Triton. Layouts say which thread has a number, which changes no result:
any object stands for any of them.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from triton import language as tl

FLOATS = {
    tl.float64: torch.float64,
    tl.float32: torch.float32,
    tl.float16: torch.float16,
    tl.bfloat16: torch.bfloat16,
    tl.float8e4nv: torch.float8_e4m3fn,
}
OF_TORCH = {torch_dtype: dtype for dtype, torch_dtype in FLOATS.items()} | {
    torch.bool: tl.int1,
    torch.int8: tl.int8,
    torch.int16: tl.int16,
    torch.int32: tl.int32,
    torch.int64: tl.int64,
    torch.uint8: tl.uint8,
    torch.uint16: tl.uint16,
    torch.uint32: tl.uint32,
}
SIGNED = {8: torch.int8, 16: torch.int16, 32: torch.int32, 64: torch.int64}
HOLDERS = {dtype.name: torch_dtype for torch_dtype, dtype in OF_TORCH.items()}
MASKS = {tl.uint16.name: (1 << 16) - 1, tl.uint32.name: (1 << 32) - 1}
HOLDERS |= dict.fromkeys(MASKS, torch.int64)
"""By name: Triton's dtypes take long to hash."""


class Layout:
    """Any layout: of any part of it, and made of any arguments."""

    def __call__(self, *args: Any, **kwargs: Any) -> Layout:
        return self

    def __getattr__(self, name: str) -> Layout:
        if name.startswith("__"):
            raise AttributeError(name)
        return self


LAYOUT = Layout()


def holder(dtype: tl.dtype) -> torch.dtype:
    """The torch dtype in which numbers of this dtype are kept."""
    return HOLDERS[dtype.name]


class Type:
    """What `x.type` and a pointer's dtype are asked for."""

    def __init__(self, scalar: tl.dtype, shape: tuple[int, ...] = ()) -> None:
        self.scalar, self.element_ty, self.shape, self.layout = scalar, scalar, shape, LAYOUT


class Numbers:
    """Of a dtype, wherever they are."""

    data: torch.Tensor
    dtype: tl.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.data.shape)

    @property
    def type(self) -> Type:
        return Type(self.dtype, self.shape)


class Value(Numbers):
    """Numbers in registers; without dimensions, one number."""

    def __init__(self, data: torch.Tensor, dtype: tl.dtype) -> None:
        kept, mask = HOLDERS[dtype.name], MASKS.get(dtype.name)
        data = data if data.dtype == kept else data.to(kept)
        self.data, self.dtype = data if mask is None else data & mask, dtype

    def __repr__(self) -> str:
        return f"Value({self.dtype}, {self.data})"

    def __bool__(self) -> bool:
        return bool(self.one())

    def __index__(self) -> int:
        assert self.dtype not in FLOATS, f"{self.dtype} as an index"
        return int(self.one())

    __int__ = __index__

    def one(self) -> Any:
        assert self.data.ndim == 0, f"a tensor of {list(self.data.shape)} where one number is needed"
        return self.data.item()

    def __getitem__(self, where: Any) -> Value:
        places = where if isinstance(where, tuple) else (where,)
        assert all(place is None or place == slice(None) for place in places)
        return Value(self.data[where], self.dtype)

    def to(self, dtype: tl.dtype, bitcast: bool = False) -> Value:
        if dtype is self.dtype:
            return self
        if bitcast:
            return from_bits(bits_of(self), dtype)
        data = self.data
        if dtype == tl.float8e4nv:  # nearest, saturating; NaN stays
            data = data.float().clamp(-448, 448)
        elif self.dtype == tl.float8e4nv:
            data = data.float()
        elif data.is_floating_point() and dtype not in FLOATS:
            data = data.double().trunc().to(torch.int64)
        return Value(data, dtype)

    __hash__ = None  # type: ignore[assignment]

    def __neg__(self) -> Value:
        return Value(-self.data, self.dtype)

    def __invert__(self) -> Value:
        return Value(~self.data, self.dtype)

    def reshape(self, *shape: Any) -> Value:
        return reshape(self, *shape)


def as_value(x: Any, dtype: tl.dtype | None = None) -> Value:
    """`dtype`: of a constant; without it, the one that a constant has by itself."""
    if isinstance(x, Value):
        return x
    assert isinstance(x, (bool, int, float)), f"{type(x).__name__} where numbers are needed"
    if dtype is None:
        own = tl.int32 if not isinstance(x, float) and -(1 << 31) <= x < 1 << 31 else tl.int64
        dtype = tl.int1 if isinstance(x, bool) else tl.float32 if isinstance(x, float) else own
    return Value(torch.tensor(x, dtype=torch.float64 if isinstance(x, float) else None), dtype)


def common(a: tl.dtype, b: tl.dtype) -> tl.dtype:
    """In which two numbers are combined."""
    if a is b or a == b:
        return a
    for dtype in (tl.float64, tl.float32, tl.float16):
        if dtype in (a, b):
            return dtype
    if tl.bfloat16 in (a, b):
        return tl.bfloat16 if not {a, b} <= FLOATS.keys() else tl.float32
    assert tl.float8e4nv not in (a, b), "FP8 and another dtype"
    if a.primitive_bitwidth != b.primitive_bitwidth:
        return a if a.primitive_bitwidth > b.primitive_bitwidth else b
    return a if a.is_int_unsigned() else b


def together(a: Any, b: Any) -> tuple[Value, Value]:
    """Both in the dtype in which they are combined."""
    if not isinstance(a, Value) and not isinstance(b, Value):
        a, b = as_value(a), as_value(b)
    elif not isinstance(a, Value):
        a = as_value(a, constant_dtype(a, b.dtype))
    elif not isinstance(b, Value):
        b = as_value(b, constant_dtype(b, a.dtype))
    if a.dtype is b.dtype:
        return a, b
    dtype = common(a.dtype, b.dtype)
    return a.to(dtype), b.to(dtype)


def constant_dtype(x: Any, beside: tl.dtype) -> tl.dtype | None:
    if isinstance(x, bool) or (isinstance(x, int) and beside == tl.int1):
        return None
    return None if isinstance(x, float) and beside not in FLOATS else beside


def combine(operation: Callable[[Any, Any], Any], a: Any, b: Any) -> Value:
    left, right = together(a, b)
    assert left.data.ndim == right.data.ndim or 0 in (left.data.ndim, right.data.ndim), (
        f"dimensions {left.shape} and {right.shape}"
    )
    return Value(operation(left.data, right.data), left.dtype)


def compare(operation: Callable[[Any, Any], Any], a: Any, b: Any) -> Value:
    left, right = together(a, b)
    return Value(operation(left.data, right.data), tl.int1)


def divide(a: Any, b: Any) -> Value:
    left, right = together(a, b)
    dtype = left.dtype if left.dtype in (tl.float32, tl.float64) else tl.float32
    left, right = left.to(dtype), right.to(dtype)
    return Value(left.data / right.data, dtype)


def quotient(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.div(a, b, rounding_mode="trunc")


def give_operators() -> None:
    """+ and all others of a value and what it is combined with."""
    both: dict[str, Callable[[Any, Any], Value]] = {"truediv": divide}
    for name, operation in (("floordiv", quotient), ("mod", torch.fmod)):
        both[name] = partial(combine, operation)
    for name in ("add", "sub", "mul", "and", "or", "xor", "lshift", "rshift"):
        both[name] = partial(combine, getattr(operator, f"__{name}__"))

    def straight(apply: Any) -> Any:
        return lambda self, other: NotImplemented if isinstance(other, Pointer) else apply(self, other)

    for name, apply in both.items():
        setattr(Value, f"__{name}__", straight(apply))
        setattr(Value, f"__r{name}__", lambda self, other, apply=apply: apply(other, self))
    for name in ("lt", "le", "gt", "ge", "eq", "ne"):
        setattr(Value, f"__{name}__", straight(partial(compare, getattr(operator, name))))


give_operators()


def bits_of(x: Value) -> torch.Tensor:
    """As numbers without sign, in int64."""
    width = x.dtype.primitive_bitwidth
    data = x.data.view(SIGNED[width]).to(torch.int64) if x.dtype in FLOATS else x.data.to(torch.int64)
    return data if width == 64 else data & ((1 << width) - 1)


def from_bits(bits: torch.Tensor, dtype: tl.dtype) -> Value:
    if dtype not in FLOATS:
        return Value(bits, dtype)
    whole = SIGNED[dtype.primitive_bitwidth]
    width = dtype.primitive_bitwidth
    signed = bits - ((bits >> (width - 1) & 1) << width) if width < 64 else bits
    return Value(signed.to(whole).view(FLOATS[dtype]), dtype)


class Pointer:
    """Places in a tensor's memory, counted in elements."""

    def __init__(self, memory: torch.Tensor, offset: Value) -> None:
        self.memory, self.offset = memory, offset

    @classmethod
    def to_tensor(cls, tensor: torch.Tensor) -> Pointer:
        storage = tensor.untyped_storage()
        memory = torch.zeros(0, dtype=tensor.dtype).set_(  # type: ignore[call-overload]
            storage, 0, (storage.nbytes() // tensor.element_size(),)
        )
        return cls(memory, as_value(tensor.storage_offset(), tl.int64))

    @property
    def element(self) -> tl.dtype:
        return OF_TORCH[self.memory.dtype]

    @property
    def dtype(self) -> Type:
        found = Type(self.element)
        found.scalar = found  # type: ignore[assignment]  the dtype of one is that of a pointer
        return found

    @property
    def type(self) -> Type:
        return Type(self.element, self.offset.shape)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.offset.shape

    def to(self, dtype: tl.dtype) -> Value:
        """An address, good for prefetches only."""
        return self.offset.to(dtype)

    def __add__(self, other: Any) -> Pointer:
        return Pointer(self.memory, self.offset + as_value(other).to(tl.int64))

    __radd__ = __add__

    def __sub__(self, other: Any) -> Pointer:
        return self + -as_value(other)

    def __getitem__(self, where: Any) -> Pointer:
        return Pointer(self.memory, self.offset[where])

    def places(self, mask: Any, *others: Any) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
        """(offsets, which of them are meant, the others), all of one shape; those that are meant are in the memory."""
        tensors = [self.offset.data, as_value(True if mask is None else mask).data.bool()]
        offset, real, *rest = torch.broadcast_tensors(*tensors, *(other.data for other in others))
        inside = (offset >= 0) & (offset < self.memory.numel())
        if not bool((inside | ~real).all()):
            raise IndexError(
                f"address {offset[real & ~inside][0].item()} of {self.memory.numel()} in {self.memory.dtype}"
            )
        return offset, real, rest


def load(pointer: Pointer, mask: Any = None, other: Any = None, **_: Any) -> Value:
    watch(pointer, mask, False)
    return gather(pointer, mask, other)


def no_watch(pointer: Pointer, mask: Any, writes: bool) -> None:
    pass


watch: Callable[[Pointer, Any, bool], None] = no_watch
"""Is called before every access to memory: with a pointer, which of its places are meant, and whether it writes."""


def gather(pointer: Pointer, mask: Any = None, other: Any = None) -> Value:
    """Without `other`, numbers that are not loaded are NaN or far off."""
    if mask is None:
        offset, _real, _rest = pointer.places(None)
        return Value(pointer.memory[offset].to(holder(pointer.element)), pointer.element)
    nothing = math.nan if pointer.element in FLOATS else 0x5A5A5A5A
    default = as_value(nothing if other is None else other).to(pointer.element)
    offset, real, (default_data,) = pointer.places(mask, default)
    found = pointer.memory[torch.where(real, offset, 0)] if pointer.memory.numel() else default_data
    if pointer.element == tl.float8e4nv:
        kept = torch.where(real, found.view(torch.int8), default_data.contiguous().view(torch.int8))
        return Value(kept.view(torch.float8_e4m3fn), pointer.element)
    return Value(torch.where(real, found.to(holder(pointer.element)), default_data), pointer.element)


def store(pointer: Pointer, value: Any, mask: Any = None, **_: Any) -> None:
    watch(pointer, mask, True)
    converted = as_value(value, constant_dtype(value, pointer.element)).to(pointer.element)
    offset, real, (data,) = pointer.places(mask, converted)
    if pointer.element == tl.float8e4nv:
        pointer.memory.view(torch.int8)[offset[real]] = data.contiguous().view(torch.int8)[real]
    else:
        pointer.memory[offset[real]] = data[real].to(pointer.memory.dtype)


def atomic_add(pointer: Pointer, value: Any, mask: Any = None, sem: str = "", **_: Any) -> Value:
    """Returns what was there before; elements follow each other, so equal addresses get different numbers."""
    watch(pointer, mask, False)
    watch(pointer, mask, True)
    converted = as_value(value, constant_dtype(value, pointer.element)).to(pointer.element)
    offset, real, (data,) = pointer.places(mask, converted)
    before = torch.zeros(offset.shape, dtype=pointer.memory.dtype)
    if pointer.element in FLOATS:  # nothing asks what was there before
        pointer.memory.index_add_(0, offset[real], data[real].to(pointer.memory.dtype))
        return Value(before, pointer.element)
    flat, flat_data, flat_before = offset.reshape(-1), data.reshape(-1), before.view(-1)
    for place in real.reshape(-1).nonzero().flatten().tolist():
        at = int(flat[place])
        flat_before[place] = pointer.memory[at]
        pointer.memory[at] += flat_data[place].to(pointer.memory.dtype)
    return Value(before, pointer.element)


# ---------------------------------------------------------------------------------------------------------------------
# Functions of the language, by the names that they have there
# ---------------------------------------------------------------------------------------------------------------------


def where(condition: Any, x: Any, y: Any) -> Value:
    left, right = together(x, y)
    return Value(torch.where(as_value(condition).data, left.data, right.data), left.dtype)


def minimum(x: Any, y: Any, propagate_nan: Any = tl.PropagateNan.NONE, **_: Any) -> Value:
    every = propagate_nan == tl.PropagateNan.ALL
    return combine(lambda a, b: torch.minimum(a, b) if every or not a.is_floating_point() else torch.fmin(a, b), x, y)


def maximum(x: Any, y: Any, propagate_nan: Any = tl.PropagateNan.NONE, **_: Any) -> Value:
    every = propagate_nan == tl.PropagateNan.ALL
    return combine(lambda a, b: torch.maximum(a, b) if every or not a.is_floating_point() else torch.fmax(a, b), x, y)


def elementwise(operation: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Any], Value]:
    def apply(x: Any) -> Value:
        value = as_value(x)
        return Value(operation(value.data), value.dtype)

    return apply


def sum_(x: Value, axis: int | None = None, keep_dims: bool = False, dtype: tl.dtype | None = None) -> Value:
    narrow = x.dtype in (tl.bfloat16, tl.float16) or (x.dtype not in FLOATS and x.dtype.primitive_bitwidth < 32)
    wide = tl.float32 if x.dtype in FLOATS else tl.int32
    value = x.to(dtype or (wide if narrow else x.dtype))
    return Value(value.data.sum() if axis is None else value.data.sum(axis, keepdim=keep_dims), value.dtype)


def max_(x: Value, axis: int | None = None, keep_dims: bool = False) -> Value:
    return Value(x.data.amax() if axis is None else x.data.amax(axis, keepdim=keep_dims), x.dtype)


def min_(x: Value, axis: int | None = None, keep_dims: bool = False) -> Value:
    return Value(x.data.amin() if axis is None else x.data.amin(axis, keepdim=keep_dims), x.dtype)


def reduce(x: Any, axis: int | None, combine_fn: Callable[..., Any], keep_dims: bool = False) -> Any:
    """Neighbours are combined until one is left; of several tensors at once, if `x` is a tuple."""
    several = isinstance(x, tuple)
    parts: list[Value] = list(x) if several else [x]
    if axis is None:
        parts = [Value(one.data.reshape(-1), one.dtype) for one in parts]
    along = axis or 0

    def every_other(one: Value, first: int) -> Value:
        return Value(one.data.unflatten(along, (-1, 2)).select(along + 1, first), one.dtype)

    while (size := parts[0].shape[along]) > 1:
        assert size % 2 == 0, "a dimension of 2ⁿ"
        found = combine_fn(*(every_other(one, 0) for one in parts), *(every_other(one, 1) for one in parts))
        parts = list(found) if several else [found]
    done = tuple(one if keep_dims else Value(one.data.squeeze(along), one.dtype) for one in parts)
    return done if several else done[0]


def fma(x: Any, y: Any, z: Any) -> Value:
    a, b = together(x, y)
    exact = a.data.double() * b.data.double() + as_value(z, a.dtype).data.double()
    return Value(exact, a.dtype)


def clamp(x: Value, low: Any, high: Any, propagate_nan: Any = tl.PropagateNan.NONE) -> Value:
    return minimum(maximum(x, low, propagate_nan), high, propagate_nan)


def cumsum(x: Value, axis: int = 0) -> Value:
    return Value(x.data.cumsum(axis), x.dtype)


def histogram(x: Value, num_bins: int, mask: Any = None) -> Value:
    real = torch.ones_like(x.data, dtype=torch.bool) if mask is None else mask.data
    return Value(torch.bincount(x.data[real], minlength=num_bins), tl.int32)


def zeros(shape: Any, dtype: tl.dtype, layout: Any = None) -> Value:
    return full(shape, 0, dtype)


def full(shape: Any, value: Any, dtype: tl.dtype, layout: Any = None) -> Value:
    number = as_value(value).to(dtype)
    return Value(number.data.expand(tuple(shape)), dtype)


def zeros_like(x: Value) -> Value:
    return Value(torch.zeros_like(x.data), x.dtype)


def arange(start: int, end: int, layout: Any = None) -> Value:
    assert end > start and (end - start) & (end - start - 1) == 0, f"arange({start}, {end})"
    return Value(torch.arange(start, end), tl.int32)


def reshape(x: Value, *shape: Any, **_: Any) -> Value:
    return Value(x.data.reshape(tuple(shape[0]) if isinstance(shape[0], (list, tuple)) else shape), x.dtype)


def permute(x: Value, *order: Any) -> Value:
    return Value(x.data.permute(tuple(order[0]) if isinstance(order[0], (list, tuple)) else order), x.dtype)


def trans(x: Value, *order: Any) -> Value:
    return permute(x, *order) if order else Value(x.data.mT, x.dtype)


def expand_dims(x: Value, axis: int) -> Value:
    return Value(x.data.unsqueeze(axis), x.dtype)


def join(a: Value, b: Value) -> Value:
    left, right = together(a, b)
    return Value(torch.stack(torch.broadcast_tensors(left.data, right.data), -1), left.dtype)


def split(x: Value) -> tuple[Value, Value]:
    assert x.shape[-1] == 2
    return Value(x.data[..., 0], x.dtype), Value(x.data[..., 1], x.dtype)


def broadcast_to(x: Value, *shape: Any) -> Value:
    return Value(x.data.expand(tuple(shape[0]) if isinstance(shape[0], (list, tuple)) else shape), x.dtype)


def convert_layout(x: Value, layout: Any, assert_trivial: bool = False) -> Value:
    return x


def cdiv(x: Any, y: Any) -> Any:
    return (x + y - 1) // y


def dot(a: Value, b: Value, acc: Any = None, **_: Any) -> Value:
    product = a.data.float() @ b.data.float()
    return Value(product if acc is None else acc.data + product, tl.float32)


def mma_v2(a: Value, b: Value, acc: Value, **_: Any) -> Value:
    return dot(a, b, acc)


def static_assert(condition: Any, message: str = "") -> None:
    assert condition, message


def loop(start: Any, stop: Any = None, step: Any = 1, **_: Any) -> Iterator[Any]:
    """`range`, whose numbers are int32 in the language."""
    first, last = (0, start) if stop is None else (start, stop)
    return (as_value(number) for number in range(int(first), int(last), int(step)))


NAMES: dict[str, Callable[..., Any]] = {
    "load": load, "store": store, "atomic_add": atomic_add, "where": where, "minimum": minimum, "maximum": maximum,
    "reduce": reduce, "fma": fma, "clamp": clamp, "div_rn": lambda x, y: divide(x, y),
    "floor": elementwise(torch.floor), "ceil": elementwise(torch.ceil), "log2": elementwise(torch.log2),
    "exp": elementwise(torch.exp), "exp2": elementwise(torch.exp2), "log": elementwise(torch.log),
    "abs": elementwise(torch.abs), "sqrt": elementwise(torch.sqrt), "rsqrt": elementwise(torch.rsqrt),
    "sigmoid": elementwise(torch.sigmoid), "sum": sum_, "max": max_, "min": min_, "cumsum": cumsum,
    "histogram": histogram, "zeros": zeros, "full": full, "zeros_like": zeros_like, "arange": arange,
    "reshape": reshape, "permute": permute, "trans": trans, "expand_dims": expand_dims, "join": join, "split": split,
    "broadcast_to": broadcast_to, "convert_layout": convert_layout, "cdiv": cdiv, "dot": dot,
    "cast": lambda x, dtype, bitcast=False: as_value(x).to(dtype, bitcast),
    "static_assert": static_assert, "static_range": range, "range": loop, "constexpr": lambda value: value,
}  # fmt: skip
"""By the name that they have in triton.language and Gluon's."""
