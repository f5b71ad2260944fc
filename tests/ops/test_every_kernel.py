"""Every op × kernel × dtype × sample, judged by the op's reference in fp32 on the CPU. The reference is judged too, and
so is the judge (anabranch.conformance.judge).

A new kernel needs no test of its own to be judged here: registering it is enough.
"""

import importlib
import importlib.util
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from anabranch import kernels, ops, platforms
from anabranch.conformance.judge import copy, differences, faults
from anabranch.kernels.c.library import problem as library_problem
from anabranch.ops import op as dispatcher
from anabranch.ops.op import Op

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


LIBRARIES = {"c": "ctypes", "torch": "torch", "invariant": "torch", "triton": "triton", "torch_npu": "torch_npu"}
"""What a provider's kernels are made with; without it they cannot be imported, and with it they must."""


def import_providers() -> dict[str, ImportError | None]:
    """Register the kernels of every built-in platform: providers, and why one cannot be imported here."""
    found: dict[str, ImportError | None] = {}
    for platform in map(platforms.load, platforms.BUILT_IN):
        for provider, module in (platform.providers | kernels.INVARIANT).items():
            if provider in found:
                continue
            try:
                importlib.import_module(module)
                found[provider] = None
            except ImportError as error:
                found[provider] = error
    return found


PROVIDERS = import_providers()
KERNELS = [(op.name, provider) for op in ops.OPS.values() for provider in ("reference", *op.kernels)]
PLACES = ("cpu", pytest.param("gpu", marks=pytest.mark.gpu))


@pytest.fixture(params=PLACES)
def platform(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[platforms.Platform]:
    """The CPU, or the accelerator of this machine, with the ops bound to it as in the engine."""
    chosen = platforms.make("cpu") if request.param == "cpu" else platforms.current()
    before = {name: (op.bound, op.forced) for name, op in ops.OPS.items()}
    monkeypatch.delenv("ANABRANCH_KERNELS", raising=False)
    kernels.bind(chosen)
    yield chosen
    for name, (bound, forced) in before.items():
        ops.OPS[name].bound, ops.OPS[name].forced = bound, forced


@pytest.mark.parametrize("provider", PROVIDERS)
def test_provider_can_be_imported(provider: str) -> None:
    """Wherever its library is installed; its kernels, once imported, are there to be judged."""
    error, library = PROVIDERS[provider], LIBRARIES[provider]
    if importlib.util.find_spec(library) is None:
        assert isinstance(error, ModuleNotFoundError) and error.name == library, f"without {library}: {error!r}"
        pytest.skip(f"kernels of {provider!r} need {library}, which is not installed")
    if error is not None:
        raise error
    if provider == "c" and library_problem:
        pytest.skip(library_problem)
    assert any(provider in op.kernels for op in ops.OPS.values())


@pytest.mark.parametrize(("name", "provider"), KERNELS, ids=[f"{name}-{provider}" for name, provider in KERNELS])
def test_kernel_agrees_with_reference(name: str, provider: str, platform: platforms.Platform) -> None:
    op = ops.OPS[name]
    function, accepts = op.reference, None
    if provider != "reference":
        kernel = next(iter(op.usable(platform, [provider])), None)
        if kernel is None:
            on = op.kernels[provider].on
            runs_here = on is None or platform.name in on
            why = "its `needs` says no" if runs_here else f"it is for {', '.join(on)}"
            pytest.skip(f"not on {platform.name}: {why}")
        function, accepts = kernel.function, kernel.accepts

    num_judged, wrong = 0, []
    for dtype in DTYPES:
        # The CPU computes in any dtype, if slowly; an accelerator may not know bf16.
        if dtype not in op.tolerance or (platform.name != "cpu" and platform.compute_dtype(dtype) != dtype):
            continue
        for label, arguments in op.samples(dtype, torch.Generator().manual_seed(0)):
            if accepts is not None and not accepts(**copy(arguments, device=platform.device)):
                continue
            num_judged += 1
            try:
                found = faults(op, function, arguments, dtype, platform.device)
                wrong += [f"{dtype}, {label}: {fault}" for fault in found]
            except Exception as error:
                error.add_note(f"sample: {dtype}, {label}")
                raise
    assert not wrong, f"{name} by {provider} on {platform.name}:\n" + "\n".join(wrong)
    assert num_judged, f"{name} by {provider} accepts none of the op's samples, so nothing was judged"


# ---------------------------------------------------------------------------------------------------------------------
# The judge judged: each of these kernels is wrong in one way
# ---------------------------------------------------------------------------------------------------------------------


def half_written(x_TD: torch.Tensor) -> torch.Tensor:
    y_TD = torch.empty_like(x_TD)
    y_TD[:1] = 2 * x_TD[:1]
    return y_TD


WRONG = {
    "differs by": lambda x_TD: 2.1 * x_TD,
    "differs by nan": half_written,
    "writes over its input x_TD": lambda x_TD: x_TD.mul_(2),
    "is torch.float64": lambda x_TD: 2 * x_TD.double(),
    "[1, 3, 4], not": lambda x_TD: 2 * x_TD[None],
    "gives 2 outputs": lambda x_TD: (2 * x_TD, x_TD),
}


@pytest.fixture
def double(monkeypatch: pytest.MonkeyPatch) -> Op[..., Any]:
    monkeypatch.setattr(dispatcher, "OPS", {})

    @dispatcher.op(samples=lambda dtype, generator: iter(()))
    def double(x_TD: torch.Tensor) -> torch.Tensor:
        return 2 * x_TD

    return double


@pytest.mark.parametrize("fault", WRONG)
def test_judge_sees(fault: str, double: Op[..., Any]) -> None:
    for dtype in DTYPES:
        arguments = {"x_TD": torch.randn(3, 4).to(dtype)}
        assert faults(double, double.reference, arguments, dtype) == []
        found = faults(double, WRONG[fault], arguments, dtype)
        assert len(found) == 1 and fault in found[0]


def test_judge_sees_wrong_integers_and_wrong_writes() -> None:
    assert not list(differences("n", torch.tensor([1, 2]), torch.tensor([1, 2]), torch.tensor([1, 2]), 1.0))
    assert list(differences("n", torch.tensor([1, 2]), torch.tensor([1, 3]), torch.tensor([1, 3]), 1.0))
    numbers = torch.linspace(-440, 440, 200).to(torch.float8_e4m3fn)
    for changed, step, good in ((0, 0, True), (1, 1, True), (1, 2, False), (100, 1, False)):
        found = numbers.clone()
        found.view(torch.uint8)[:changed] -= step
        assert (not list(differences("x", found, numbers, numbers, 1.0))) == good
    _, arguments = next(ops.rope_store.samples(torch.float32, torch.Generator().manual_seed(0)))
    on_a_copy = faults(
        ops.rope_store, lambda **given: ops.rope_store.reference(**copy(given)), arguments, torch.float32
    )
    assert ["k_PSGD" in on_a_copy[0], "v_PSGD" in on_a_copy[1]] == [True, True]
