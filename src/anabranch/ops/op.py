"""The dispatcher: one meaning, many kernels.

An op is a plain-torch reference function. Kernels register on it from other files (`ops` imports none of them):

    @route.kernel("triton", on=("cuda", "hip"), needs=..., accepts=...)
    def route_triton(call: RouteCall): ...

An op with many parameters takes one record instead, a NamedTuple as its only parameter `call`, so that they are written
down once. `needs(platform)` is called once, when ops are bound to a platform; `accepts` with the arguments of each
call, and may look at formats, shapes and dtypes only. What no kernel accepts, the reference computes. `prepare(weight)`
is called once with each weight of the op's modules when a model has been loaded.

ANABRANCH_KERNELS chooses by hand: `reference` (bisect: is it a kernel?), `PROVIDER` (that provider wherever it
has a kernel), or `OP=PROVIDER,OP=reference,...`. Forcing a provider that is not there raises.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, ParamSpec, TypeVar

import torch

from anabranch.platforms import Platform

P = ParamSpec("P")
R = TypeVar("R")

# ‖out − reference‖ / ‖reference‖ that a kernel may differ by; bf16 and fp16 are judged against an fp32 reference.
TOLERANCE: Mapping[torch.dtype, float] = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}

Sample = tuple[str, dict[str, Any]]
"""A label and the keyword arguments of one call."""
Samples = Iterator[Sample]


@dataclass(frozen=True, slots=True)
class Kernel(Generic[P, R]):
    provider: str
    function: Callable[P, R]
    on: tuple[str, ...] | None
    """Platform names; None: any."""
    needs: Callable[[Platform], bool] | None
    accepts: Callable[P, bool] | None
    tuner: str = ""
    """The module that can tune this kernel; "": none."""
    traits: tuple[str, ...] = ()
    """Properties that a caller may rely on; the op's callers define their names."""
    prepare: Callable[[Any], None] | None = None
    """Gives a weight that has been loaded what the kernel wants beside its tensors."""


@dataclass(eq=False, repr=False)
class Op(Generic[P, R]):
    """A reference function that knows its kernels, its samples and how exact it must be."""

    reference: Callable[P, R]
    samples: Callable[[torch.dtype, torch.Generator], Samples]
    tolerance: Mapping[torch.dtype, float]
    mutates: tuple[str, ...]
    fake: Callable[..., R] | None
    traced: Callable[P, R] | None = None
    """What a compiler is shown instead of the dispatch; see `ops.opaque`."""
    kernels: dict[str, Kernel[P, R]] = field(default_factory=dict)
    bound: tuple[Kernel[P, R], ...] = ()
    forced: bool = False

    def __post_init__(self) -> None:
        self.name = self.reference.__name__
        self.__doc__ = self.reference.__doc__
        if self.fake is not None:
            self._check_parameters(self.fake)
        if self.name in OPS:
            raise ValueError(f"op {self.name!r} is defined twice")
        OPS[self.name] = self

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        if self.traced is not None and torch.compiler.is_compiling():
            return self.traced(*args, **kwargs)
        for kernel in self.bound:
            if kernel.accepts is None or kernel.accepts(*args, **kwargs):
                return kernel.function(*args, **kwargs)
        if self.forced:
            raise ValueError(f"op {self.name}: the forced kernel {self.bound[0].provider!r} does not accept this call")
        return self.reference(*args, **kwargs)

    def kernel(
        self,
        provider: str,
        *,
        on: tuple[str, ...] | None = None,
        needs: Callable[[Platform], bool] | None = None,
        accepts: Callable[P, bool] | None = None,
        tuner: str = "",
        traits: tuple[str, ...] = (),
        prepare: Callable[[Any], None] | None = None,
    ) -> Callable[[Callable[P, R]], Callable[P, R]]:
        """Register a kernel. Its parameters must be the reference's, checked here, at import."""

        def register(function: Callable[P, R]) -> Callable[P, R]:
            if provider in self.kernels:
                raise ValueError(f"op {self.name}: provider {provider!r} is registered twice")
            self._check_parameters(function)
            if accepts is not None:
                self._check_parameters(accepts)
            self.kernels[provider] = Kernel(provider, function, on, needs, accepts, tuner, traits, prepare)
            return function

        return register

    @property
    def tuner(self) -> str:
        """The module that can tune the first bound kernel; "" if it has none."""
        return self.bound[0].tuner if self.bound else ""

    def has_trait(self, trait: str) -> bool:
        """Whether the first bound kernel has this property."""
        return bool(self.bound) and trait in self.bound[0].traits

    def prepare(self, weight: Any) -> None:
        """A weight of a module that has been loaded, for the kernels that are bound."""
        for kernel in self.bound:
            if kernel.prepare is not None:
                kernel.prepare(weight)

    def _check_parameters(self, function: Callable[..., object]) -> None:
        expected, given = _parameters(self.reference), _parameters(function)
        if expected != given:
            raise TypeError(
                f"op {self.name}: {function.__qualname__}({', '.join(map(str, given))}) must take the "
                f"reference's parameters ({', '.join(map(str, expected))})"
            )

    def usable(self, platform: Platform, providers: Iterable[str] = ()) -> tuple[Kernel[P, R], ...]:
        """The kernels to try on this platform, best provider first; `providers`: instead of the platform's."""
        known = [self.kernels[provider] for provider in providers or platform.providers if provider in self.kernels]
        return tuple(
            kernel
            for kernel in known
            if (kernel.on is None or platform.name in kernel.on) and (kernel.needs is None or kernel.needs(platform))
        )


OPS: dict[str, Op[Any, Any]] = {}
"""Every op by name, in order of definition."""


def op(
    *,
    samples: Callable[[torch.dtype, torch.Generator], Samples],
    tolerance: Mapping[torch.dtype, float] = TOLERANCE,
    mutates: tuple[str, ...] = (),
    fake: Callable[..., Any] | None = None,
) -> Callable[[Callable[P, R]], Op[P, R]]:
    """Make a reference function an op. `mutates` names the parameters that it writes to. `fake` makes an empty result
    of the right shape: for ops that a compiler must not look into, because their kernels are better than what it would
    make of the reference."""
    return lambda reference: Op(reference, samples, tolerance, mutates, fake)


def bind(platform: Platform, kernels: str = "", providers: Iterable[str] = ()) -> None:
    """Bind every op to a platform; `kernels` as in ANABRANCH_KERNELS; `providers`: instead of the platform's."""
    everywhere, by_op = _parse_choice(kernels)
    usable = {name: operator.usable(platform, providers) for name, operator in OPS.items()}
    has_it = {name for name, found in usable.items() if any(kernel.provider == everywhere for kernel in found)}
    if everywhere not in (None, "reference") and not has_it:
        raise ValueError(f"ANABRANCH_KERNELS: {everywhere!r} has no kernel that runs on platform {platform.name!r}")
    for name, operator in OPS.items():
        choice = by_op.get(name, everywhere if everywhere == "reference" or name in has_it else None)
        operator.forced = choice not in (None, "reference")
        operator.bound = usable[name]
        if choice is not None:
            operator.bound = tuple(kernel for kernel in usable[name] if kernel.provider == choice)
        if operator.forced and not operator.bound:
            raise ValueError(
                f"op {name}: no kernel {choice!r} on platform {platform.name!r} "
                f"(registered: {', '.join(['reference', *operator.kernels])})"
            )


def _parse_choice(kernels: str) -> tuple[str | None, dict[str, str]]:
    everywhere: str | None = None
    by_op: dict[str, str] = {}
    known = {provider for operator in OPS.values() for provider in operator.kernels} | {"reference"}
    for item in filter(None, (part.strip() for part in kernels.split(","))):
        name, equals, provider = item.partition("=")
        if not equals:
            everywhere, provider = name, name
        elif name not in OPS:
            raise ValueError(f"ANABRANCH_KERNELS: unknown op {name!r} (known: {', '.join(OPS)})")
        else:
            by_op[name] = provider
        if provider not in known:
            raise ValueError(f"ANABRANCH_KERNELS: no provider {provider!r} here (known: {', '.join(sorted(known))})")
    return everywhere, by_op


def _parameters(function: Callable[..., object]) -> list[inspect.Parameter]:
    """Without their types."""
    return [p.replace(annotation=p.empty) for p in inspect.signature(function).parameters.values()]
