"""The promises of platforms/platform.py, one at a time: values, copies, side streams, captures, layouts.

T rows, D width.
"""

import importlib
from collections.abc import Callable, Iterator
from functools import partial
from operator import itemgetter

import torch

from anabranch.conformance import Result, attempt
from anabranch.platforms import Graph, Platform, SideStream

WIDTH = 256


def check_contract(platform: Platform) -> Iterator[Result]:
    promises: dict[str, Callable[[Platform], Iterator[str]]] = {
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


def values(platform: Platform) -> Iterator[str]:
    if not platform.describe():
        yield "describe() is empty"
    if platform.page_size < 1 or platform.page_size & (platform.page_size - 1):
        yield f"page_size {platform.page_size} is no power of two"
    if not 0 < platform.memory_fraction <= 1:
        yield f"memory_fraction {platform.memory_fraction} is not in (0, 1]"
    if platform.graph_mode != "none" and not platform.has("graphs"):
        yield f"graph_mode is {platform.graph_mode}, but has('graphs') is false"
    if platform.has("no such capability"):
        yield "has() is true of a capability that does not exist"
    for wanted in (torch.float32, torch.float16, torch.bfloat16):
        dtype = platform.compute_dtype(wanted)
        if not dtype.is_floating_point or platform.compute_dtype(dtype) != dtype:
            yield f"compute_dtype({wanted}) is {dtype}, in which it does not compute"
    with platform.step(1):
        pass


def providers(platform: Platform) -> Iterator[str]:
    """The engine continues without a provider that cannot be imported; here that is a fault."""
    for provider, module in platform.providers.items():
        try:
            importlib.import_module(module)
        except ImportError as error:
            yield f"kernels of {provider!r} cannot be imported: {error}"


def memory(platform: Platform) -> Iterator[str]:
    found = platform.memory()
    if not 0 < found.free <= found.total:
        yield f"{found.free} bytes free of {found.total}"
    x_TD = _numbers().to(platform.device)
    platform.synchronize()
    yield from _differs("a copy to the device and back", x_TD.cpu(), _numbers())


def fetch(platform: Platform) -> Iterator[str]:
    """A fetch gives what the tensor held when it was called, whatever is enqueued later."""
    doubled_TD = _numbers().to(platform.device) * 2
    fetched = platform.fetch(doubled_TD)
    doubled_TD.zero_()
    found = fetched.wait()
    if found.device.type != "cpu":
        yield f"fetch() brings it to {found.device}, not to the host"
    yield from _differs("what was fetched", found.cpu(), 2 * _numbers())


def staging(platform: Platform) -> Iterator[str]:
    """A plain copy, a part of one, and one into another dtype."""
    source_TD = _numbers(16, 8)
    made = platform.make_staging(source_TD.nbytes)
    assert made is not None
    view_TD = made.buffer[: source_TD.nbytes].view(torch.float32).view(16, 8)
    for label, dtype, part in (
        ("plain", torch.float32, ()),
        ("a part", torch.float32, (slice(None), slice(2, 5))),
        ("half precision", platform.compute_dtype(torch.float16), ()),
    ):
        view_TD.copy_(source_TD)
        expected = source_TD[part].to(dtype)
        target = torch.zeros(expected.shape, dtype=dtype, device=platform.device)
        platform.synchronize()
        made.put(view_TD, [(target, itemgetter(part) if part else None)])
        made.wait()
        view_TD.zero_()
        yield from _differs(f"what was staged ({label})", target.cpu(), expected)


def side_stream(platform: Platform) -> Iterator[str]:
    """The side stream sees what came before the fork; after the join, the main stream sees what the side computed."""
    stream = platform.make_side_stream()
    for turn in range(4):
        found = _forked(stream, _numbers().to(platform.device) + turn).cpu()
        yield from _differs(f"fork and join, turn {turn}", found, _in_line(_numbers() + turn))
    if platform.make_side_stream() is stream:
        yield "two models would share one side stream"


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


def layout(platform: Platform) -> Iterator[str]:
    """lay_out() keeps the values of a weight."""
    dtype = platform.compute_dtype(torch.bfloat16)
    for shape in ((32, 48), (3, 32, 48), (5, 7)):
        weight = _numbers(*shape).to(dtype)
        found = platform.lay_out(weight.to(platform.device))
        yield from _differs(f"a weight {list(shape)} after lay_out", found.cpu(), weight)


def captured(platform: Platform) -> Iterator[str]:
    """Replays read and write the buffers of the capture, two graphs share a pool, and a reset leaves the buffers."""
    x_TD, y_TD, z_TD = (torch.zeros(8, WIDTH, device=platform.device) for _ in range(3))
    graphs = _capture(platform, lambda: y_TD.copy_(_long_work(x_TD)), lambda: z_TD.copy_(y_TD + x_TD))
    for turn in range(3):
        given_TD = _numbers(8, WIDTH) + turn
        x_TD.copy_(given_TD)
        for graph in graphs:
            graph.replay()
        yield from _differs(f"replay {turn}", z_TD.cpu(), _long_work(given_TD) + given_TD)
    for graph in graphs:
        graph.reset()
    yield from _differs("what was there before reset()", z_TD.cpu(), _long_work(given_TD) + given_TD)


def captured_fork(platform: Platform) -> Iterator[str]:
    stream = platform.make_side_stream()
    x_TD, y_TD = (torch.zeros(8, WIDTH, device=platform.device) for _ in range(2))
    (graph,) = _capture(platform, lambda: y_TD.copy_(_forked(stream, x_TD)))
    x_TD.copy_(_numbers(8, WIDTH))
    graph.replay()
    yield from _differs("a captured fork", y_TD.cpu(), _in_line(_numbers(8, WIDTH)))


def _capture(platform: Platform, *work: Callable[[], object]) -> list[Graph]:
    for function in work:  # libraries allocate their workspace when first used
        function()
    pool = platform.make_graph_pool()
    graphs = [graph for function in work if (graph := platform.capture(function, pool)) is not None]
    if len(graphs) < len(work):
        raise ValueError(f"graph_mode is {platform.graph_mode}, but capture() gives None")
    return graphs


def _numbers(*shape: int) -> torch.Tensor:
    return torch.randn(shape or (64, WIDTH), generator=torch.Generator().manual_seed(0))


def _long_work(x_TD: torch.Tensor) -> torch.Tensor:
    """Many small kernels whose result depends on all of them."""
    for _ in range(20):
        x_TD = torch.tanh(x_TD * 0.9 + 0.1)
    return x_TD


def _differs(what: str, found: torch.Tensor, expected: torch.Tensor) -> Iterator[str]:
    if found.shape != expected.shape or found.dtype != expected.dtype:
        yield f"{what} is {found.dtype} {list(found.shape)}, not {expected.dtype} {list(expected.shape)}"
    elif not (error := (found.double() - expected.double()).abs().max().item()) <= 1e-4:
        yield f"{what} differs by {error:.3g}"
