"""What platforms/platform.py promises, one promise at a time: values, copies, side streams, captures, layouts.

T rows, D width, F outputs.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from functools import partial

import torch

from anabranch.conformance.result import Result, attempt
from anabranch.platforms import Platform, SideStream

WIDTH = 256


def check_contract(platform: Platform) -> Iterator[Result]:
    promises: dict[str, Callable[[Platform], list[str]]] = {
        "values": values,
        "providers": providers,
        "memory": memory,
        "fetch": fetch,
        "staging": staging,
        "side stream": side_stream,
        "weight layout": layout,
        "captured graphs": captured,
        "a fork in a graph": captured_fork,
    }
    for name, check in promises.items():
        if name == "staging" and platform.make_staging(1 << 12) is None:
            yield Result("contract", name, "weights are read to their place", absent=True)
        elif name in ("captured graphs", "a fork in a graph") and platform.graph_mode == "none":
            yield Result("contract", name, "nothing is captured", absent=True)
        else:
            yield attempt("contract", name, "", partial(check, platform))


def values(platform: Platform) -> list[str]:
    wrong = []
    if not platform.describe():
        wrong.append("describe() says nothing")
    if platform.page_size < 1 or platform.page_size & (platform.page_size - 1):
        wrong.append(f"page_size {platform.page_size} is no power of two")
    if not 0 < platform.memory_fraction <= 1:
        wrong.append(f"memory_fraction {platform.memory_fraction} is not in (0, 1]")
    if platform.graph_mode != "none" and not platform.has("graphs"):
        wrong.append(f"graph_mode is {platform.graph_mode}, but has('graphs') is false")
    if platform.has("no such capability"):
        wrong.append("has() is true of a capability that does not exist")
    for wanted in (torch.float32, torch.float16, torch.bfloat16):
        dtype = platform.compute_dtype(wanted)
        if not dtype.is_floating_point or platform.compute_dtype(dtype) != dtype:
            wrong.append(f"compute_dtype({wanted}) is {dtype}, in which it does not compute")
    with platform.step(1):
        pass
    return wrong


def providers(platform: Platform) -> list[str]:
    """Imports errors of all: the engine goes on without a provider, but whoever names one wants it."""
    wrong = []
    for provider, module in platform.providers.items():
        try:
            importlib.import_module(module)
        except ImportError as error:
            wrong.append(f"kernels of {provider!r} cannot be imported: {error}")
    return wrong


def memory(platform: Platform) -> list[str]:
    found = platform.memory()
    wrong = [] if 0 < found.free <= found.total else [f"{found.free} bytes free of {found.total}"]
    x_TD = _numbers().to(platform.device)
    platform.synchronize()
    return wrong + _differs("a copy to the device and back", x_TD.cpu(), _numbers())


def fetch(platform: Platform) -> list[str]:
    """What a tensor held when it was asked for, whatever is enqueued behind."""
    x_TD = _numbers().to(platform.device)
    doubled_TD = x_TD * 2
    asked = platform.fetch(doubled_TD)
    doubled_TD.zero_()
    found = asked.wait()
    if found.device.type != "cpu":
        return [f"fetch() brings it to {found.device}, not to the host"]
    return _differs("what was fetched", found, 2 * _numbers())


def staging(platform: Platform) -> list[str]:
    """A plain copy, a part of one, and one into another dtype."""
    source_TD = _numbers(16, 8)
    made = platform.make_staging(source_TD.nbytes)
    assert made is not None
    view_TD = made.buffer[: source_TD.nbytes].view(torch.float32).view(16, 8)
    wrong = []
    for label, dtype, part in (
        ("plain", torch.float32, ()),
        ("a part", torch.float32, (slice(None), slice(2, 5))),
        ("half precision", platform.compute_dtype(torch.float16), ()),
    ):
        view_TD.copy_(source_TD)
        expected = source_TD[part].to(dtype)
        target = torch.zeros(expected.shape, dtype=dtype, device=platform.device)
        platform.synchronize()
        made.put(view_TD, [(target, part)])
        made.wait()
        view_TD.zero_()
        wrong += _differs(f"what was staged ({label})", target.cpu(), expected)
    return wrong


def side_stream(platform: Platform) -> list[str]:
    """Side work sees what came before the fork; after the join, the main stream sees what the side made."""
    stream, wrong = platform.make_side_stream(), []
    for turn in range(4):
        found = _forked(stream, _numbers().to(platform.device) + turn).cpu()
        wrong += _differs(f"fork and join, turn {turn}", found, _in_line(_numbers() + turn))
    if platform.make_side_stream() is stream:
        wrong.append("two models would share one side stream")
    return wrong[:1]


def _forked(stream: SideStream, x_TD: torch.Tensor) -> torch.Tensor:
    fork = stream.fork(x_TD)
    main_TD = _long_work(x_TD)
    with fork.side():
        side_TD = _long_work(x_TD + 1)
    fork.join(side_TD)
    return main_TD - side_TD


def _in_line(x_TD: torch.Tensor) -> torch.Tensor:
    """What `_forked` should give."""
    return _long_work(x_TD) - _long_work(x_TD + 1)


def layout(platform: Platform) -> list[str]:
    """A weight that was laid out anew still is the same weight."""
    wrong = []
    dtype = platform.compute_dtype(torch.bfloat16)
    for shape in ((32, 48), (3, 32, 48), (5, 7)):
        weight = _numbers(*shape).to(dtype)
        found = platform.lay_out(weight.to(platform.device))
        wrong += _differs(f"a weight {list(shape)} after lay_out", found.cpu(), weight)
    return wrong


def captured(platform: Platform) -> list[str]:
    """Replays read and write the buffers of the capture; two graphs share a pool; capturing runs nothing twice."""
    pool, device = platform.make_graph_pool(), platform.device
    x_TD, y_TD, z_TD = (torch.zeros(8, WIDTH, device=device) for _ in range(3))

    def first() -> None:
        y_TD.copy_(_long_work(x_TD))

    def second() -> None:
        z_TD.copy_(y_TD + x_TD)

    for work in (first, second):  # libraries take their workspace when first used
        work()
    graphs = [platform.capture(work, pool) for work in (first, second)]
    if None in graphs:
        return [f"graph_mode is {platform.graph_mode}, but capture() gives None"]
    wrong = []
    for turn in range(3):
        x_TD.copy_(_numbers(8, WIDTH) + turn)
        for graph in graphs:
            assert graph is not None
            graph.replay()
        given = _numbers(8, WIDTH) + turn
        wrong += _differs(f"replay {turn}", z_TD.cpu(), _long_work(given) + given)
    return wrong[:1]


def captured_fork(platform: Platform) -> list[str]:
    stream, device = platform.make_side_stream(), platform.device
    x_TD, y_TD = torch.zeros(8, WIDTH, device=device), torch.zeros(8, WIDTH, device=device)

    def work() -> None:
        y_TD.copy_(_forked(stream, x_TD))

    work()
    graph = platform.capture(work, platform.make_graph_pool())
    if graph is None:
        return [f"graph_mode is {platform.graph_mode}, but capture() gives None"]
    x_TD.copy_(_numbers(8, WIDTH))
    graph.replay()
    return _differs("a captured fork", y_TD.cpu(), _in_line(_numbers(8, WIDTH)))


def _numbers(*shape: int) -> torch.Tensor:
    return torch.randn(shape or (64, WIDTH), generator=torch.Generator().manual_seed(0))


def _long_work(x_TD: torch.Tensor) -> torch.Tensor:
    """Many small kernels whose result depends on all of them."""
    for _ in range(20):
        x_TD = torch.tanh(x_TD * 0.9 + 0.1)
    return x_TD


def _differs(what: str, found: torch.Tensor, expected: torch.Tensor) -> list[str]:
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return [f"{what} is {found.dtype} {list(found.shape)}, not {expected.dtype} {list(expected.shape)}"]
    error = (found.double() - expected.double()).abs().max().item()
    return [] if error <= 1e-4 else [f"{what} differs by {error:.3g}"]
