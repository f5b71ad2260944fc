"""The dispatcher: what may register, what is bound, what is called."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

from anabranch.ops import op as dispatcher
from anabranch.ops.op import Op, bind, op
from anabranch.platforms.fake import FakePlatform


class Machine(FakePlatform):
    name = "machine"
    providers: Mapping[str, str] = {"best": "", "second": ""}


@pytest.fixture(autouse=True)
def empty_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ops made here are seen by this file only."""
    monkeypatch.setattr(dispatcher, "OPS", {})


@pytest.fixture
def add() -> Op[..., Any]:
    @op(samples=lambda dtype, generator: iter(()))
    def add(x: int, y: int = 1) -> str:
        """x + y, in words."""
        return f"reference {x + y}"

    return add


def register(operator: Op[..., Any], provider: str, **options: Any) -> None:
    @operator.kernel(provider, **options)
    def kernel(x: int, y: int = 1) -> str:
        return f"{provider} {x + y}"


def test_an_op_is_its_reference_until_bound(add: Op[..., Any]) -> None:
    register(add, "best")
    assert add(1) == "reference 2"
    assert (add.name, add.__doc__) == ("add", "x + y, in words.")
    assert dispatcher.OPS["add"] is add


def test_two_ops_of_one_name(add: Op[..., Any]) -> None:
    with pytest.raises(ValueError, match="op 'add' is defined twice"):
        op(samples=add.samples)(add.reference)


def test_providers_in_the_platforms_order(add: Op[..., Any]) -> None:
    register(add, "second")
    register(add, "best")
    register(add, "stranger")  # no provider of the platform
    bind(Machine())
    assert [kernel.provider for kernel in add.bound] == ["best", "second"]
    assert add(1, y=2) == "best 3"


WRONG: dict[str, Callable[..., Any]] = {
    "name": lambda x, z=1: None,
    "order": lambda y, x=1: None,
    "default": lambda x, y=2: None,
    "no default": lambda x, y: None,
    "one more": lambda x, y=1, z=1: None,
    "one less": lambda x: None,
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_parameters_are_checked_at_registration(add: Op[..., Any], wrong: Callable[..., Any]) -> None:
    with pytest.raises(TypeError, match=r"op add: .*must take the reference's parameters \(x, y=1\)"):
        add.kernel("best")(wrong)
    with pytest.raises(TypeError, match=r"op add: .*must take the reference's parameters \(x, y=1\)"):
        register(add, "best", accepts=wrong)
    assert add.kernels == {}


def test_registered_twice(add: Op[..., Any]) -> None:
    register(add, "best")
    with pytest.raises(ValueError, match="op add: provider 'best' is registered twice"):
        register(add, "best")


@pytest.mark.parametrize("choice", ["", "add=best", "best"])
def test_needs_is_asked_once_when_bound(add: Op[..., Any], choice: str) -> None:
    asked = []
    register(add, "best", needs=lambda platform: asked.append(platform) or True)
    machine = Machine()
    bind(machine, choice)
    assert asked == [machine]
    assert [add(1), add(2)] == ["best 2", "best 3"]
    assert asked == [machine]


def test_what_the_machine_lacks_is_not_bound(add: Op[..., Any]) -> None:
    register(add, "best", needs=lambda platform: platform.has("sm90"))
    register(add, "second", on=("cuda", "hip"))
    bind(Machine())
    assert add.bound == ()
    assert add(1) == "reference 2"


def test_on_names_the_platform(add: Op[..., Any]) -> None:
    register(add, "best", on=("cuda", "machine"))
    bind(Machine())
    assert add(1) == "best 2"


def test_accepts_is_asked_at_each_call(add: Op[..., Any]) -> None:
    register(add, "best", accepts=lambda x, y=1: x < 10)
    register(add, "second", accepts=lambda x, y=1: y < 10)
    bind(Machine())
    assert [add(1), add(10), add(10, y=10), add(2)] == ["best 2", "second 11", "reference 20", "best 3"]


def test_forcing_the_reference(add: Op[..., Any]) -> None:
    register(add, "best")
    for choice in ("reference", "add=reference", "best, add=reference"):
        bind(Machine())
        assert add(1) == "best 2"
        bind(Machine(), choice)
        assert add(1) == "reference 2"


def test_forcing_a_provider(add: Op[..., Any]) -> None:
    @op(samples=add.samples)
    def subtract(x: int, y: int = 1) -> str:
        return f"reference {x - y}"

    register(add, "best")
    register(add, "second")
    register(subtract, "best")
    bind(Machine(), "second")
    assert add(1) == "second 2"
    assert subtract(1) == "best 2"  # "second" has no kernel for it, so the usual choice stands
    bind(Machine(), "add=second,subtract=reference")
    assert (add(1), subtract(1)) == ("second 2", "reference 0")


def test_a_forced_kernel_that_declines_raises(add: Op[..., Any]) -> None:
    register(add, "best", accepts=lambda x, y=1: x < 10)
    register(add, "second")
    bind(Machine(), "add=best")
    assert add(1) == "best 2"
    with pytest.raises(ValueError, match="op add: the forced kernel 'best' does not accept this call"):
        add(10)
    bind(Machine())
    assert add(10) == "second 11"


def test_forcing_what_is_not_there(add: Op[..., Any]) -> None:
    register(add, "best")
    register(add, "second", on=("cuda",))
    with pytest.raises(ValueError, match=r"unknown op 'ad' \(known: add\)"):
        bind(Machine(), "ad=best")
    for choice in ("bets", "add=bets"):
        with pytest.raises(ValueError, match=r"no provider 'bets' here \(known: best, reference, second\)"):
            bind(Machine(), choice)
    with pytest.raises(ValueError, match=r"no kernel 'second' on platform 'machine' \(registered: reference, best"):
        bind(Machine(), "add=second")


@pytest.mark.parametrize("choice", ["second", "add=second"])
def test_forcing_a_provider_that_can_do_nothing_here_raises(add: Op[..., Any], choice: str) -> None:
    register(add, "best")
    register(add, "second", needs=lambda platform: False)
    with pytest.raises(ValueError, match="second"):
        bind(Machine(), choice)


def test_mutates_and_tolerance_are_kept() -> None:
    @op(samples=lambda dtype, generator: iter(()), tolerance={torch.float32: 0.5}, mutates=("x",))
    def clear(x: torch.Tensor) -> None:
        x.zero_()

    assert (clear.tolerance, clear.mutates) == ({torch.float32: 0.5}, ("x",))
