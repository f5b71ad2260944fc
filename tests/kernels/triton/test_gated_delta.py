"""The gated delta net in Triton against its reference: in the interpreter, on a GPU, ahead of time."""

import itertools
from typing import Any

import pytest
import torch

from anabranch import ops

pytest.importorskip("triton")
from anabranch.conformance.judge import copy, faults, poisoned_memory, same_bits
from anabranch.kernels.triton import gated_delta as kernel
from anabranch.ops.gated_delta import DeltaAcceptCall, DeltaDraftsCall, GatedDeltaCall
from tests.kernels.triton import ahead_of_time
from tests.kernels.triton.ahead_of_time import compile_for, recorded, resources
from tests.kernels.triton.places import dtypes, everywhere, interpreter

KERNELS = ("step_heads", "convolve_chunks", "prepare_chunks", "scan_chunks", "norm_rows")
QWEN = {"key_heads": 16, "heads": 32, "K": 128, "V": 128}
"""Qwen3.6-35B-A3B."""


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def draw(
    requests: list[tuple[int, int]],
    dtype: torch.dtype = torch.float32,
    key_heads: int = 1,
    heads: int = 2,
    K: int = 16,
    V: int = 16,
    kept: int = 3,
    padding: int = 0,
    state: torch.dtype = torch.float32,
    max_query: int = 0,
) -> GatedDeltaCall:
    """Each request: (new tokens, context length after them). Pages of no request, of those without a token before, and
    of those without context hold NaN, and so do the places between pages. Decays are slow, so that states matter."""
    start = torch.tensor([0, *(n for n, _ in requests)]).cumsum(0).int()
    pages, channels = len(requests) + 2, 2 * key_heads * K + heads * V
    page_R = torch.randperm(pages)[: len(requests)].int()
    conv_PLC = torch.full((pages, kept + 1, channels), float("nan"), dtype=dtype)[:, :kept]
    state_PHKV = torch.full((pages, heads + 1, K, V), float("nan"), dtype=state)[:, :heads]
    for page, (n, length) in zip(page_R, requests):
        if n < length:
            conv_PLC[page].normal_()
            state_PHKV[page] = (torch.randn(heads, K, V) * 0.3).to(state)
    x_TX = torch.randn(int(start[-1]) + padding, channels + heads * V + 2 * heads + 16).to(dtype)
    return GatedDeltaCall(
        x_TX=x_TX[:, :-16],
        conv_PLC=conv_PLC,
        state_PHKV=state_PHKV,
        page_R=page_R,
        query_start_R=start,
        context_len_R=torch.tensor([length for _, length in requests], dtype=torch.int32),
        conv_weight_CW=(torch.randn(channels, kept + 1) * 0.5).to(dtype),
        decay_log_H=torch.randn(heads) * 0.5 - 3,
        dt_bias_H=torch.randn(heads),
        norm_weight_V=(1 + 0.1 * torch.randn(V)).to(dtype),
        eps=1e-6,
        num_key_heads=key_heads,
        max_query=max_query,
    )


def on(device: str, call: GatedDeltaCall) -> GatedDeltaCall:
    found: GatedDeltaCall = copy({"call": call}, torch.device(device))["call"]
    return found


def compute(call: GatedDeltaCall) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(result, inputs kept, state) on the CPU; the call is not changed."""
    assert kernel.accepts(call)
    given: GatedDeltaCall = copy({"call": call})["call"]
    with poisoned_memory():
        y_THV = kernel.gated_delta(given)
    return y_THV.cpu(), given.conv_PLC.cpu(), given.state_PHKV.cpu()


def judge(call: GatedDeltaCall, device: str, tolerance: float | None = None) -> None:
    """Against the reference in fp32; what is not a request's stays as it was."""
    dtype = call.x_TX.dtype
    exact: GatedDeltaCall = copy({"call": call})["call"]
    exact = GatedDeltaCall(*(x.float() if isinstance(x, torch.Tensor) and x.dtype == dtype else x for x in exact))
    expected_THV = ops.gated_delta.reference(exact)
    y_THV, conv_PLC, state_PHKV = compute(on(device, call))
    rows_R = call.query_start_R.diff() * (call.context_len_R > 0)
    used = call.page_R[rows_R > 0].tolist()
    for found, wanted in (
        (y_THV, expected_THV),
        (conv_PLC[used], exact.conv_PLC[used]),
        (state_PHKV[used], exact.state_PHKV[used]),
    ):
        assert distance(found, wanted) <= (tolerance or ops.gated_delta.tolerance[dtype])
    for page in set(range(call.conv_PLC.shape[0])) - set(used):
        assert same_bits(conv_PLC[page], call.conv_PLC[page]) and same_bits(state_PHKV[page], call.state_PHKV[page])
    assert not y_THV[call.query_start_R[-1] :].any()


def distance(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.cpu().double() - wanted.double()).norm() / wanted.double().norm())


@everywhere
def test_samples(device: str) -> None:
    for dtype in dtypes(device):
        for _, arguments in ops.gated_delta.samples(dtype, torch.Generator().manual_seed(0)):
            arguments = copy(arguments, torch.device(device))
            assert kernel.accepts(**arguments)
            assert faults(ops.gated_delta, kernel.gated_delta, arguments, dtype) == []


@everywhere
def test_samples_of_drafts(device: str) -> None:
    for op, function, accepts in (
        (ops.gated_delta_drafts, kernel.gated_delta_drafts, kernel.accepts_drafts),
        (ops.gated_delta_accept, kernel.gated_delta_accept, kernel.accepts_accept),
    ):
        for dtype in dtypes(device):
            for _, arguments in op.samples(dtype, torch.Generator().manual_seed(0)):
                arguments = copy(arguments, torch.device(device))
                assert accepts(**arguments)
                assert faults(op, function, arguments, dtype) == []


def drafted(call: GatedDeltaCall, num_layers: int = 1) -> tuple[DeltaDraftsCall, DeltaAcceptCall]:
    """The calls that verify all rows of a call's requests, and that accept them, in as many equal layers."""
    kept_MNX = torch.full((num_layers, call.x_TX.shape[0], call.x_TX.shape[1]), float("nan")).to(call.x_TX)
    count_R = call.query_start_R.diff()
    requests = call.page_R, call.query_start_R[:-1], count_R, call.context_len_R - count_R
    weights = call.conv_weight_CW, call.decay_log_H, call.dt_bias_H
    conv_MPLC, state_MPHKV, *stacked = (
        torch.stack([x] * num_layers) for x in (call.conv_PLC, call.state_PHKV, *weights)
    )
    first = DeltaDraftsCall(call.x_TX, kept_MNX[0], call.conv_PLC, call.state_PHKV, *requests, *weights, *call[9:12])
    return first, DeltaAcceptCall(kept_MNX, conv_MPLC, state_MPHKV, *requests, *stacked, call.num_key_heads)


@everywhere
@pytest.mark.parametrize("shape", ["three share", "two taps"])
def test_drafts_are_steps_of_one_token(shape: str, device: str) -> None:
    """Of each request, whatever number of its rows counts, the state is that of as many decode steps."""
    requests = [(4, 9), (1, 5), (3, 4), (2, 2)]
    for dtype in dtypes(device):
        call = on(device, draw(requests, dtype, **SHAPES[shape]))
        first, accept = drafted(call, num_layers=2)
        with poisoned_memory():
            y_THV = kernel.gated_delta_drafts(first)
        accept.kept_MNX[1] = accept.kept_MNX[0]
        for counts in ([1, 1, 1, 1], [4, 1, 3, 2], [2, 1, 0, 1]):
            given = copy({"call": call})["call"]
            found = copy({"call": accept})["call"]
            kernel.gated_delta_accept(found._replace(count_R=torch.tensor(counts, dtype=torch.int32, device=device)))
            for n in range(max(counts)):
                ending = [r for r, count in enumerate(counts) if n < count]
                rows = [int(call.query_start_R[r]) + n for r in ending]
                step = given._replace(
                    x_TX=call.x_TX[rows],
                    page_R=call.page_R[ending],
                    query_start_R=torch.arange(len(rows) + 1, dtype=torch.int32, device=device),
                    context_len_R=torch.tensor(
                        [length - rows + n + 1 for rows, length in (requests[r] for r in ending)],
                        dtype=torch.int32, device=device,
                    ),
                    max_query=1,
                )  # fmt: skip
                assert distance(y_THV[rows], kernel.gated_delta(step).cpu()) <= ops.gated_delta.tolerance[dtype]
            used = [page for page, count in zip(call.page_R.tolist(), counts) if count]
            for layer in range(2):
                assert same_bits(found.conv_MPLC[layer], given.conv_PLC)
                assert distance(found.state_MPHKV[layer, used], given.state_PHKV[used].cpu()) < 1e-6


SHAPES = {
    "square": {"K": 64, "V": 64},
    "published": {"K": 128, "V": 128, "key_heads": 2, "heads": 4},
    "wide values": {"K": 32, "V": 128},
    "wide keys": {"K": 128, "V": 32, "heads": 1},
    "three share": {"heads": 6, "key_heads": 2},
    "two taps": {"kept": 1},
    "three taps": {"kept": 2},
}


@everywhere
@pytest.mark.parametrize("shape", SHAPES)
def test_shapes(shape: str, device: str) -> None:
    """One chunk and several, to the row; continued and not; with padding, and requests that have no row."""
    many = [(64, 64), (0, 7), (65, 70), (1, 9), (63, 64), (130, 130), (2, 3), (0, 0), (3, 3), (1, 1)]
    few = [(3, 8), (65, 65), (1, 4), (0, 0)]
    for dtype in dtypes(device):
        requests = many if device == "cuda" or shape == "two taps" else few
        judge(draw(requests, dtype, padding=3, **SHAPES[shape]), device)
        if device == "cuda" and shape == "published":  # known to be several prompts, which has programs of its own
            judge(draw(requests, dtype, padding=3, max_query=130, **SHAPES[shape]), device)
        decode = [(1, 5), (0, 9), (1, 1), (1, 77), (0, 0)]
        judge(draw(decode, dtype, padding=4, max_query=1, **SHAPES[shape]), device)


@everywhere
def test_a_state_of_half_the_bytes(device: str) -> None:
    half = torch.float16 if device == "cpu" else torch.bfloat16
    for dtype in dtypes(device):
        for max_query, requests in ((1, [(1, 5), (1, 1)]), (0, [(70, 90), (1, 4)])):
            judge(draw(requests, dtype, state=half, max_query=max_query), device, 1e-2)


@everywhere
def test_requests_without_context_are_padding(device: str) -> None:
    """A step of a captured size: what is missing has a row each, no context, and any page, maybe one that is used."""
    for dtype in dtypes(device):
        for requests, max_query in ([(1, 5), (1, 0), (1, 1), (1, 0)], 1), ([(1, 0), (66, 70), (3, 0), (1, 3)], 0):
            call = draw(requests, dtype, max_query=max_query)
            real = [r for r, (_, length) in enumerate(requests) if length]
            y_THV, conv_PLC, state_PHKV = compute(on(device, call))
            call.page_R[[r for r in range(4) if r not in real]] = call.page_R[real[0]].clone()
            again = compute(on(device, call))
            assert all(map(same_bits, again, (y_THV, conv_PLC, state_PHKV)))
            start = call.query_start_R
            rows = torch.cat([torch.arange(int(start[r]), int(start[r + 1])) for r in real])
            alone = call._replace(
                x_TX=call.x_TX[rows],
                page_R=call.page_R[real],
                query_start_R=torch.tensor([0, *(requests[r][0] for r in real)]).cumsum(0).int(),
                context_len_R=call.context_len_R[real],
            )
            expected_THV, *pages = compute(on(device, alone))
            assert same_bits(y_THV[rows], expected_THV)
            assert same_bits(conv_PLC, pages[0]) and same_bits(state_PHKV, pages[1])
            y_THV[rows] = 0
            assert not y_THV.any()


@everywhere
def test_a_request_does_not_depend_on_the_others(device: str) -> None:
    """To the bit, wherever it is in the batch and whatever the others do."""
    for dtype in dtypes(device):
        requests = [(1, 6), (65, 65), (1, 1), (70, 75), (2, 9)]
        call = draw(requests, dtype, K=32, V=64)
        y_THV, conv_PLC, state_PHKV = compute(on(device, call))
        for r, (n, _) in enumerate(requests):
            rows, page = slice(*call.query_start_R[r : r + 2].tolist()), int(call.page_R[r])
            for max_query in (0, n):
                alone = call._replace(
                    x_TX=call.x_TX[rows],
                    page_R=call.page_R[r : r + 1],
                    query_start_R=torch.tensor([0, n], dtype=torch.int32),
                    context_len_R=call.context_len_R[r : r + 1],
                    max_query=max_query,
                )
                y, conv, state = compute(on(device, alone))
                assert same_bits(y, y_THV[rows])
                assert same_bits(conv[page], conv_PLC[page]) and same_bits(state[page], state_PHKV[page])


@everywhere
@pytest.mark.parametrize("steps", [[150], [64, 64, 22], [1, 2, 1, 80, 1, 65], [149, 1]])
def test_in_several_steps(steps: list[int], device: str) -> None:
    """Whatever tokens of a request come in a step, the results are those of all at once."""
    for dtype in dtypes(device):
        call = draw([(150, 150)], dtype, K=32, V=32, heads=4, key_heads=2)
        exact = GatedDeltaCall(*(x.float() if isinstance(x, torch.Tensor) and x.dtype == dtype else x for x in call))
        expected: GatedDeltaCall = copy({"call": exact})["call"]
        expected_THV = ops.gated_delta.reference(expected)
        given, done, results = on(device, call), 0, []
        for n in steps:
            step = given._replace(
                x_TX=given.x_TX[done : done + n],
                query_start_R=torch.tensor([0, n], dtype=torch.int32, device=device),
                context_len_R=torch.tensor([done + n], dtype=torch.int32, device=device),
                max_query=n,
            )
            results.append(kernel.gated_delta(step).cpu())
            done += n
        page, allowed = int(call.page_R[0]), 2 * ops.gated_delta.tolerance[dtype]
        for found, wanted in (
            (torch.cat(results), expected_THV),
            (given.conv_PLC[page], expected.conv_PLC[page]),
            (given.state_PHKV[page], expected.state_PHKV[page]),
        ):
            assert distance(found, wanted) <= allowed


def cut(call: GatedDeltaCall, cuts: list[int]) -> GatedDeltaCall:
    """With pages for the cuts, after those of the call."""
    pages = call.conv_PLC.shape[0]
    conv_PLC, state_PHKV = (
        torch.full((pages + len(cuts), *x.shape[1:]), float("nan"), dtype=x.dtype)
        for x in (call.conv_PLC, call.state_PHKV)
    )
    conv_PLC[:pages], state_PHKV[:pages] = call.conv_PLC, call.state_PHKV
    cut_R, cut_page_R = torch.tensor(cuts, dtype=torch.int32), pages + torch.randperm(len(cuts)).int()
    return call._replace(conv_PLC=conv_PLC, state_PHKV=state_PHKV, cut_R=cut_R, cut_page_R=cut_page_R)


CUTS = [
    ([(70, 70)], [16]),
    ([(70, 75)], [64]),
    ([(150, 150), (1, 9), (67, 69)], [130, 0, 2]),
    ([(0, 0), (64, 70), (20, 20), (5, 0), (3, 5)], [0, 62, 0, 0, 2]),
    ([(65, 66), (2, 4)], [1, 1]),
]


@everywhere
@pytest.mark.parametrize("state", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(("requests", "cuts"), CUTS)
def test_a_cut_is_the_end_of_a_step(
    requests: list[tuple[int, int]], cuts: list[int], state: torch.dtype, device: str
) -> None:
    """Results, states, and what the page of the cut holds: to the bit those of two steps with a copy between them, but
    where a step has one token. And the reference's."""
    for dtype in dtypes(device):
        call = on(device, cut(draw(requests, dtype, key_heads=2, heads=4, state=state, padding=2), cuts))
        y_THV, conv_PLC, state_PHKV = compute(call)
        exact: GatedDeltaCall = copy({"call": call}, torch.device("cpu"))["call"]
        exact = GatedDeltaCall(*(x.float() if isinstance(x, torch.Tensor) and x.dtype == dtype else x for x in exact))
        expected_THV = ops.gated_delta.reference(exact)
        tolerance = 1e-2 if state == torch.float16 else ops.gated_delta.tolerance[dtype]
        assert distance(y_THV, expected_THV) <= tolerance
        given: GatedDeltaCall = copy({"call": call})["call"]
        used: set[int] = set()
        for r, ((n, length), first) in enumerate(zip(requests, cuts)):
            begin, page, kept = int(call.query_start_R[r]), int(call.page_R[r]), int(call.cut_page_R[r])
            for start, end in ((0, first), (first, n)) if n and length else ():
                if start == end:
                    continue
                step = given._replace(
                    x_TX=call.x_TX[begin + start : begin + end],
                    page_R=call.page_R[r : r + 1],
                    query_start_R=torch.tensor([0, end - start], dtype=torch.int32, device=device),
                    context_len_R=torch.tensor([length - n + end], dtype=torch.int32, device=device),
                    cut_R=None,
                    cut_page_R=None,
                )
                found_THV, where = kernel.gated_delta(step).cpu(), page if end == n else kept
                used.add(where)
                if end < n:
                    given.conv_PLC[kept], given.state_PHKV[kept] = given.conv_PLC[page], given.state_PHKV[page]
                assert same_bits(conv_PLC[where], given.conv_PLC[where].cpu())
                pairs = (y_THV[begin + start : begin + end], found_THV), (state_PHKV[where], given.state_PHKV[where])
                for one, other in pairs:
                    if min(first or n, n - first) > 1 or n == 1:
                        assert same_bits(one, other.cpu())
                    assert distance(one, other.cpu()) <= 2 * tolerance
                assert distance(state_PHKV[where], exact.state_PHKV[where]) <= 2 * tolerance
        for page in set(range(len(conv_PLC))) - used:
            assert same_bits(conv_PLC[page], call.conv_PLC[page].cpu())
            assert same_bits(state_PHKV[page], call.state_PHKV[page].cpu())


@everywhere
def test_keys_that_are_all_alike(device: str) -> None:
    """The matrix that is inverted is then as bad as it can be: all ones below the diagonal, with β = 1 and no decay.
    Updates cancel, but not what they are rounded by: in bf16 6 % of the state in an emulation of the products."""
    for dtype, K in itertools.product(dtypes(device), (16, 64)):  # whose chunks differ on a GPU
        call = draw([(128, 128)], dtype, K=K, V=K, heads=1)
        call.x_TX[:, : 2 * K] = call.x_TX[:1, : 2 * K].abs() + 1
        call.x_TX[:, 4 * K] = 30.0
        call.decay_log_H.fill_(-30.0)
        # What fp16 rounds by grows with the chunk (in the interpreter always 64), and is an eighth of bf16's.
        chunk = 64 if K == 64 or device == "cpu" else 16
        judge(call, device, {torch.bfloat16: 0.1, torch.float16: 0.1 / 8 * chunk / 64}.get(dtype))


@interpreter
def test_chunks_of_another_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """The size that fp32 has on GPUs, in the interpreter."""
    monkeypatch.setattr(kernel, "CHUNK", kernel.SMALL_CHUNK)
    judge(draw([(17, 17), (1, 9), (16, 20), (33, 40)], padding=2), "cpu")


def test_what_it_does_not_accept() -> None:
    call = draw([(3, 3), (1, 4)])
    assert kernel.accepts(call)
    for name, value in (
        ("x_TX", call.x_TX.double()),
        ("x_TX", torch.randn(call.x_TX.shape[::-1]).T),
        ("state_PHKV", torch.zeros(4, 2, 256, 16)),
        ("state_PHKV", torch.zeros(4, 2, 16, 24)),
        ("state_PHKV", torch.zeros(4, 2, 16, 16).transpose(2, 3)),
        ("conv_PLC", torch.zeros(4, call.conv_PLC.shape[2], 3).transpose(1, 2)),
        ("page_R", call.page_R.long()),
    ):
        assert not kernel.accepts(call._replace(**{name: value})), name


def test_few_specialisations() -> None:
    """However many tokens and requests a step has, its kernels are those that a start has compiled."""
    seen: dict[str, set[Any]] = {name: set() for name in KERNELS}
    with recorded(kernel, *KERNELS) as launches:
        for requests, max_query in (
            ([(1, 5)], 1),
            ([(1, 5)] * 16, 1),
            ([(1, 5)] * 31, 1),
            ([(17, 17)], 17),
            ([(160, 160), (1, 9)], 0),
            ([(5, 9)] * 30, 5),
        ):
            kernel.gated_delta(draw(requests, torch.bfloat16, max_query=max_query))
    for launch in launches:
        plain = {param.name for param in launch.function.params if param.do_not_specialize}
        values = dict(zip(launch.function.arg_names, launch.args)) | launch.kwargs
        chosen = {name: x for name, x in values.items() if name not in plain and not isinstance(x, torch.Tensor)}
        seen[launch.function.__name__].add(tuple(sorted(chosen.items())))
    assert {name: len(found) for name, found in seen.items()} == dict.fromkeys(KERNELS, 1)


@pytest.mark.gpu
@pytest.mark.parametrize("requests", [1, 7, 64])
def test_published_shape(requests: int) -> None:
    """Decode steps one after the other: each starts before its predecessor is done, and needs what that has written."""
    call = draw([(1, 5)] * requests, torch.bfloat16, **QWEN, max_query=1)
    exact = GatedDeltaCall(*(x.float() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in call))
    given = on("cuda", call)
    for _ in range(5):
        expected_THV = ops.gated_delta.reference(exact)
    for _ in range(5):
        y_THV = kernel.gated_delta(given)
    for found, wanted in (
        (y_THV, expected_THV),
        (given.conv_PLC[call.page_R.cuda()], exact.conv_PLC[call.page_R]),
        (given.state_PHKV[call.page_R.cuda()], exact.state_PHKV[call.page_R]),
    ):
        assert distance(found, wanted) <= 1e-2


@pytest.mark.gpu
def test_a_graph_follows_its_inputs() -> None:
    for requests, max_query in ([(1, 5)] * 4, 1), ([(100, 120), (1, 5), (64, 64)], 0):
        call = on("cuda", draw(requests, torch.bfloat16, K=128, V=128, max_query=max_query))
        kernel.gated_delta(on("cuda", call))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y_THV = kernel.gated_delta(call)
        for _ in range(3):
            changed = draw(requests, torch.bfloat16, K=128, V=128, max_query=max_query)
            for name in ("x_TX", "conv_PLC", "state_PHKV", "page_R"):
                getattr(call, name).copy_(getattr(changed, name))
            expected = compute(on("cuda", call))
            y_THV.fill_(float("nan"))
            graph.replay()
            assert all(map(same_bits, expected, (y_THV.cpu(), call.conv_PLC.cpu(), call.state_PHKV.cpu())))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_hopper_kernel(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bits as scan_chunks, whatever the columns of a program."""
    requests = [(700, 700), (63, 100), (1, 9), (64, 64), (0, 3), (129, 190), (3, 3)]
    call = draw(requests * 2, dtype, **QWEN)
    half = 1 + len(requests)  # its pages are for cuts
    start = call.query_start_R[:half]
    call = call._replace(
        x_TX=call.x_TX[: start[-1]], query_start_R=start, context_len_R=call.context_len_R[: half - 1],
        page_R=call.page_R[: half - 1], cut_page_R=call.page_R[half - 1 :].clone(),
    )  # fmt: skip
    cuts = torch.tensor([390, 0, 0, 1, 0, 128, 2], dtype=torch.int32)  # chunks before and after fill the ring again
    for cut_R in (None, cuts):
        given = call._replace(cut_R=cut_R)
        found = [compute(on("cuda", given._replace(max_query=max_query))) for max_query in (0, 400)]
        with monkeypatch.context() as patched:
            patched.setattr(kernel, "gluon_kernels", lambda name, device: None)
            expected = compute(on("cuda", given))
        for one in found:
            assert all(map(same_bits, one, expected))


@pytest.mark.slow
@pytest.mark.parametrize("columns", kernel.HOPPER_STAGES)
def test_hopper_kernel_compiles_ahead_of_time(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.experimental.gluon._runtime import GluonASTSource

    from anabranch.kernels.triton import gated_delta_hopper

    monkeypatch.setattr(ahead_of_time.DEPENDENT_LAUNCH, lambda device: True)
    monkeypatch.setattr(ahead_of_time, "ASTSource", GluonASTSource)
    monkeypatch.setattr(kernel, "gluon_kernels", lambda name, device: gated_delta_hopper)
    requests = [(65, 65)] * (kernel.HOPPER_MANY if columns == 64 else 1)
    with recorded(kernel, *KERNELS), recorded(gated_delta_hopper, "scan_chunks_hopper") as launches:
        kernel.gated_delta(draw(requests, torch.bfloat16, **QWEN, max_query=65))
    assert launches[0].kwargs["BV"] == columns
    compiled = compile_for("sm_90", launches[0])
    assert compiled.metadata.shared <= ahead_of_time.SHARED["sm_90"]
    used = resources(compiled)
    assert used["STACK"] == used["LOCAL"] == 0
    # The assembler gives up on overlap where it does not see that registers are enough: then a wait follows each.
    sass = compiled.asm["sass"]
    assert sass.count("HGMMA") >= 4 * sass.count("WARPGROUP.DEPBAR") > 0


@pytest.mark.slow
@pytest.mark.parametrize("target", ahead_of_time.TARGETS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_compiles_ahead_of_time(dtype: torch.dtype, target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    dependent = target in ahead_of_time.DEPENDENT
    monkeypatch.setattr(ahead_of_time.DEPENDENT_LAUNCH, lambda device: dependent)
    if dtype == torch.float32:
        monkeypatch.setattr(kernel, "CHUNK", kernel.SMALL_CHUNK)
    if target.startswith("gfx"):
        monkeypatch.setattr(kernel, "precision", lambda x_TX: "ieee")
    with recorded(kernel, *KERNELS) as launches:
        kernel.gated_delta(draw([(200, 200), (1, 7)], dtype, **QWEN))
    compiled: dict[str, Any] = {launch.function.__name__: compile_for(target, launch) for launch in launches}
    assert list(compiled) == ["convolve_chunks", "prepare_chunks", "scan_chunks", "norm_rows", "step_heads"]
    with recorded(kernel, "try_rows", "accept_rows", "keep_inputs") as launches:
        first, accept = drafted(draw([(5, 9), (1, 7)], dtype, **QWEN), num_layers=2)
        kernel.gated_delta_drafts(first)
        kernel.gated_delta_accept(accept)
    compiled |= {launch.function.__name__: compile_for(target, launch) for launch in launches}
    assert len(compiled) == 8
    for name, found in compiled.items():
        assert found.metadata.shared <= ahead_of_time.SHARED[target], name
        if dependent:
            assert "griddepcontrol.wait" in found.asm["ptx"]
    if target == "sm_90":
        step = resources(compiled["step_heads"])
        assert step["STACK"] == 0
        assert ahead_of_time.loads(compiled["step_heads"])["wide"] >= 32, "128 numbers of the state for each thread"
        assert resources(compiled["scan_chunks"])["STACK"] == 0 or dtype == torch.float32
