"""Attention over latent rows in Triton against the op's reference: in the interpreter, on a GPU, ahead of time."""

import random
from typing import Any

import pytest
import torch

from anabranch import ops
from anabranch.ops import LatentAttentionCall

pytest.importorskip("triton")
import triton
import triton.language as tl

from anabranch.conformance.judge import copy, faults
from anabranch.kernels.triton import latent_attention as kernel
from anabranch.kernels.triton import latent_decode
from anabranch.kernels.triton.attention_tiles import DecodeTile, Machine, PrefillTile
from tests.kernels.triton import ahead_of_time
from tests.kernels.triton.ahead_of_time import compile_for, recorded
from tests.kernels.triton.places import dtypes, everywhere, interpreter

Arguments = dict[str, Any]
NAN = float("nan")
HEADS = {"v2-lite": 16, "glm-4.7-flash": 20, "v3": 128}


def draw(
    requests: list[tuple[int, int]],
    heads: int = 4,
    latent: int = 32,
    turned: int = 16,
    page_size: int = 4,
    padding: int = 0,
    max_query: int | None = None,
    dtype: torch.dtype = torch.float32,
    spare: int = 3,
) -> LatentAttentionCall:
    """Each request: (tokens in this step, context after it). Slots and pages that no query sees hold NaN, queries are
    transposed and slices, as the layer has them, and page-table entries that may not be read point nowhere."""
    counts = [-(-length // page_size) for _, length in requests]
    free = list(range(sum(counts) + 5))
    random.Random(len(requests)).shuffle(free)
    rows = torch.full((len(free), page_size, latent + turned), NAN, dtype=dtype)
    table = torch.full((len(requests), max(counts, default=0) + spare), 1 << 28, dtype=torch.int32)
    for r, (_, length) in enumerate(requests):
        for i in range(counts[r]):
            page = table[r, i] = free.pop()
            end = min(length - i * page_size, page_size)
            rows[page, :end] = torch.randn(end, latent + turned).to(dtype)
    start = torch.tensor([0] + [n for n, _ in requests]).cumsum(0)
    tokens = int(start[-1]) + padding
    q = torch.full((tokens, heads, 8 + turned), NAN, dtype=dtype)
    q_latent = torch.full((heads, tokens, latent), NAN, dtype=dtype)
    real = int(start[-1])
    q[:real, :, 8:] = torch.randn(real, heads, turned).to(dtype)
    q_latent[:, :real] = torch.randn(heads, real, latent).to(dtype)
    return LatentAttentionCall(
        q_THL=q_latent.transpose(0, 1),
        q_turned_THF=q[..., 8:],
        rows_PSC=rows,
        page_table_RM=table,
        query_start_R=start.int(),
        context_len_R=torch.tensor([length for _, length in requests], dtype=torch.int32),
        scale=(latent + turned) ** -0.5,
        max_query=max((n for n, _ in requests), default=1) if max_query is None else max_query,
    )


def judge(call: LatentAttentionCall, device: str = "cpu") -> None:
    call = LatentAttentionCall(**copy(call._asdict(), torch.device(device)))
    assert kernel.accepts(call)
    assert faults(ops.latent_attention, kernel.latent_attention, {"call": call}, call.q_THL.dtype) == []


CASES: dict[str, Arguments] = {
    "decode": {"requests": [(1, 50), (1, 1), (1, 16), (1, 17)]},
    "decode, nothing known": {"requests": [(1, 37), (1, 3)], "max_query": 0},
    "decode of one": {"requests": [(1, 61)], "heads": 8},
    "decode, padding requests and rows": {"requests": [(1, 33), (0, 0), (1, 0), (1, 5), (1, 0)], "padding": 3},
    "prefill": {"requests": [(39, 39)], "heads": 3},
    "prefill of a chunk": {"requests": [(19, 52)], "heads": 3},
    "mixed": {"requests": [(7, 40), (1, 45), (0, 0), (20, 20), (1, 1), (2, 2)], "padding": 5},
    "many heads": {"requests": [(3, 20), (1, 25)], "heads": 20},
    "heads of two programs": {"requests": [(1, 40), (1, 25)], "heads": 66},
    "as many as are looked at together": {"requests": [(1, 60)] + [(1, 2)] * 31},
    "many, some cut": {"requests": [(1, 1), (1, 160), (0, 0), (1, 90)] + [(1, 2)] * 29 + [(1, 70)]},
    "odd sizes": {"requests": [(5, 21), (1, 33)], "latent": 24, "turned": 6},
    "odd pages": {"requests": [(5, 40), (1, 51)], "page_size": 7},
    "large pages": {"requests": [(5, 40), (1, 51)], "page_size": 64},
    "padding alone": {"requests": [], "padding": 3},
    "no tokens": {"requests": [(0, 0)], "spare": 1},
}


def small(monkeypatch: pytest.MonkeyPatch, processors: int = 4) -> None:
    """Tiles so small that a short context has many blocks, and a machine so small that there are few programs."""
    monkeypatch.setattr(kernel, "machine_of", lambda device: Machine(processors=processors))
    monkeypatch.setattr(kernel, "decode_override", DecodeTile(16, 4, 2))
    monkeypatch.setattr(kernel, "prefill_override", PrefillTile(16, 16, 4, 2))


@everywhere
@pytest.mark.parametrize("case", CASES)
def test_meaning(case: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    small(monkeypatch)
    for dtype in (torch.float32,) if device == "cpu" else dtypes(device):
        judge(draw(**CASES[case], dtype=dtype), device)


@interpreter
def test_samples() -> None:
    for _, arguments in ops.latent_attention.samples(torch.float16, torch.Generator().manual_seed(0)):
        judge(arguments["call"])


@pytest.mark.gpu
@pytest.mark.parametrize("model", HEADS)
def test_sizes_of_models(model: str) -> None:
    sizes = {"heads": HEADS[model], "latent": 512, "turned": 64, "page_size": 16}
    for requests in ([(1, 5000)], [(1, n) for n in range(1, 600, 13)], [(300, 300)], [(70, 900), (1, 77), (2, 2)]):
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            judge(draw(requests, **sizes, dtype=dtype, padding=2), "cuda")


@everywhere
def test_the_last_piece_adds_up_and_leaves_zeros(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is read before it is written is NaN; counts are zero for the next launch."""
    small(monkeypatch, processors=32)
    empty = torch.empty
    counts_RG = kernel.counts_of(1, empty(0, device=device).device)
    for lengths in ([600], [40, 0, 33], [2] * 17 + [400] + [40] * 15):
        call = LatentAttentionCall(**copy(draw([(1, n) for n in lengths], heads=3)._asdict(), torch.device(device)))
        with monkeypatch.context() as poisoned:
            poisoned.setattr(torch, "empty", lambda *size, **options: empty(*size, **options).fill_(NAN))
            out_THL = kernel.latent_attention(call)
        assert (out_THL - ops.latent_attention.reference(call)).abs().max() < 1e-4, lengths
        assert counts_RG.count_nonzero() == 0, lengths


@triton.jit
def places_kernel(starts, lengths, num_requests, num_pieces, place_W3, RP: tl.constexpr, BN: tl.constexpr):
    w = tl.program_id(0)
    r, piece, pieces = latent_decode.find_piece(starts, lengths, num_requests, num_pieces, w, 16, RP, BN, True)
    tl.store(place_W3 + 3 * w, r)
    tl.store(place_W3 + 3 * w + 1, piece)
    tl.store(place_W3 + 3 * w + 2, pieces)


@everywhere
@pytest.mark.parametrize(
    ("lengths", "wanted"),
    [([8192] * 64, 4), ([32768] * 16, 16), ([1024] * 64, 4), ([8192] * 3, 22), ([300] * 30, 4), ([8192] * 200, 2)],
)
def test_pieces_run_at_a_time(lengths: list[int], wanted: int, device: str) -> None:
    """As many as the machine holds, where a little longer pieces make it possible; each is there once. 264 programs run
    at a time on an H200; of few requests, pieces are as long as summing them up is worth."""
    R, machine = len(lengths), Machine(227 << 10, 132, True, True)
    shape = kernel.Shape(R, R, max(lengths) // 16 + 1, 16, 512, 64, 16, torch.bfloat16, 1)
    plan = kernel.make_plan(shape, machine, True)
    assert plan.single is not None and plan.single["BN"] == 32
    place_W3 = torch.full((plan.num_pieces, 3), -1, dtype=torch.int32, device=device)
    starts, context = torch.arange(R + 1, device=device).int(), torch.tensor(lengths, device=device).int()
    places_kernel[(plan.num_pieces,)](starts, context, R, plan.num_pieces, place_W3, RP=plan.single["RP"], BN=32)
    found = [tuple(place) for place in place_W3.tolist() if place[0] < R]
    assert sorted(found) == [(r, piece, wanted) for r in range(R) for piece in range(wanted)]
    assert len(found) <= 264 or R > 132


@pytest.mark.gpu
def test_a_graph_follows_growing_contexts() -> None:
    call = draw([(1, 900), (1, 400)], 16, 512, 64, 16, dtype=torch.bfloat16)
    call = LatentAttentionCall(**copy(call._asdict(), torch.device("cuda")))
    kernel.latent_attention(call)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out_THL = kernel.latent_attention(call)
    for lengths in ([1, 2], [900, 3], [333, 400]):
        call.context_len_R.copy_(torch.tensor(lengths))
        graph.replay()
        expected = ops.latent_attention.reference(call)
        assert (out_THL.double() - expected.double()).norm() <= 1e-2 * expected.double().norm()


def test_what_it_does_not_accept() -> None:
    call = draw([(1, 5)])
    assert kernel.accepts(call)
    for name, value in (
        ("q_THL", call.q_THL.double()),
        ("q_turned_THF", call.q_turned_THF.half()),
        ("rows_PSC", call.rows_PSC.to(torch.float8_e4m3fn)),
        ("q_THL", torch.randn(1, 4, 1024)),
        ("context_len_R", call.context_len_R.long()),
        ("scale", -1.0),
    ):
        assert not kernel.accepts(call._replace(**{name: value})), name


@pytest.mark.slow
@pytest.mark.parametrize("target", ahead_of_time.TARGETS)
@pytest.mark.parametrize("model", HEADS)
def test_compiles_ahead_of_time(model: str, target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    dependent = target in ahead_of_time.DEPENDENT
    machine = Machine(ahead_of_time.SHARED[target], 132, wgmma=target == "sm_90")
    monkeypatch.setattr(kernel, "dependent_launch", lambda device: dependent)
    monkeypatch.setattr(kernel, "machine_of", lambda device: machine)
    sizes = {"heads": HEADS[model], "latent": 512, "turned": 64, "page_size": 16, "dtype": torch.bfloat16}
    names = "attend_latent_pieces", "attend_latent_rows"
    for requests in ([(1, 900)] * 3, [(1, 2)] * 40, [(40, 900), (1, 77)]):
        with recorded(kernel, *names) as launches:
            kernel.latent_attention(draw(requests, **sizes))
        assert [launch.function.fn.__name__ for launch in launches] == [*names[1:], *names[:1]][-len(launches) :]
        for launch in launches:
            compiled = compile_for(target, launch)
            assert compiled.metadata.shared <= ahead_of_time.SHARED[target]
            if target == "sm_90":
                assert ahead_of_time.resources(compiled)["STACK"] == 0, "registers are spilled"
                ahead_of_time.loads_around_wait(compiled)
