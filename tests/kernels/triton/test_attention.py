"""Paged attention in Triton against the op's reference: in the interpreter, on a GPU, ahead of time."""

import random
from typing import Any

import pytest
import torch

from anabranch import ops
from anabranch.ops import AttentionCall

pytest.importorskip("triton")
import triton
import triton.language as tl

from anabranch.conformance.judge import faults
from anabranch.kernels.compiling.precompile import precompile, recording
from anabranch.kernels.triton import attention as kernel
from anabranch.kernels.triton import attention_decode, attention_tiles
from anabranch.kernels.triton.attention_tiles import DecodeTile, HopperTile, Machine, PrefillTile
from tests.kernels.triton import ahead_of_time
from tests.kernels.triton.ahead_of_time import compile_for, recorded
from tests.kernels.triton.places import dtypes, everywhere, interpreter

Arguments = dict[str, Any]
NAN = float("nan")


def draw(
    requests: list[tuple[int, int]],
    heads: int = 4,
    kv_heads: int = 2,
    dim: int = 16,
    page_size: int = 4,
    window: int = 0,
    padding: int = 0,
    max_query: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    spare: int = 3,
    fp8: bool = False,
    sinks: bool = False,
) -> Arguments:
    """Each request: (tokens in this step, context after it). Slots and pages that no query sees hold NaN, queries are
    slices of a packed projection, and page-table entries that may not be read point nowhere. `fp8`: the pages are."""
    counts = [-(-length // page_size) for _, length in requests]
    free = list(range(sum(counts) + 5))
    random.Random(len(requests)).shuffle(free)
    cache = torch.full((2, len(free), page_size, kv_heads, dim), NAN, dtype=dtype, device=device)
    table = torch.full((len(requests), max(counts, default=0) + spare), 1 << 28, dtype=torch.int32)
    for r, (queries, length) in enumerate(requests):
        first_key = max(0, length - queries - window + 1) if window else 0
        for i in range(first_key // page_size, counts[r]):
            page = free.pop()
            table[r, i] = page
            begin, end = max(first_key - i * page_size, 0), min(length - i * page_size, page_size)
            cache[:, page, begin:end] = torch.randn(2, end - begin, kv_heads, dim, device=device).to(dtype)
    if fp8:
        cache = cache.to(torch.float8_e4m3fn)
    start = torch.tensor([0] + [n for n, _ in requests]).cumsum(0)
    tokens = int(start[-1]) + padding
    packed = torch.full((tokens, heads + 2, dim), NAN, dtype=dtype, device=device)
    packed[: int(start[-1]), :heads] = torch.randn(int(start[-1]), heads, dim, device=device).to(dtype)
    return {
        "q_THD": packed[:, :heads],
        "k_PSGD": cache[0],
        "v_PSGE": cache[1],
        "page_table_RM": table.to(device),
        "query_start_R": start.int().to(device),
        "context_len_R": torch.tensor([length for _, length in requests], dtype=torch.int32, device=device),
        "scale": dim**-0.5,
        "window": window,
        "max_query": max((n for n, _ in requests), default=1) if max_query is None else max_query,
        "v_scale": 0.3 if fp8 else 1.0,
        "sink_H": torch.linspace(-2, 3, heads, device=device).to(dtype) if sinks else None,
    }


def choose(monkeypatch: pytest.MonkeyPatch, tiles: tuple[Any, Any]) -> None:
    for name, tile in zip(("decode_override", "prefill_override"), tiles, strict=True):
        monkeypatch.setattr(attention_tiles, name, tile)


def judge(arguments: Arguments) -> None:
    assert kernel.accepts(AttentionCall(**arguments))
    assert faults(ops.attention, kernel.attention, {"call": AttentionCall(**arguments)}, arguments["q_THD"].dtype) == []


# ---------------------------------------------------------------------------------------------------------------------
# Meaning
# ---------------------------------------------------------------------------------------------------------------------

TILES = {  # so small that a short context has many blocks and a short prompt many rows
    "rows are heads": (DecodeTile(16, 4, 2), PrefillTile(16, 16, 4, 2)),
    "rows are keys": (DecodeTile(16, 4, 3, swap=True, programs=1), PrefillTile(32, 16, 4, 3)),
}
CASES: dict[str, Arguments] = {
    "decode": {"requests": [(1, 50), (1, 1), (1, 16), (1, 17)]},
    "decode, several cut": {"requests": [(1, 70), (1, 2), (1, 90), (1, 60)], "kv_heads": 1},
    "decode, nothing known": {"requests": [(1, 37), (1, 3)], "max_query": 0},
    "decode of one": {"requests": [(1, 61)], "heads": 8, "kv_heads": 1},
    "decode, padding requests and rows": {"requests": [(1, 33), (0, 0), (1, 0), (1, 5), (1, 0)], "padding": 3},
    "decode, window": {"requests": [(1, 70), (1, 19), (1, 20), (1, 3)], "window": 19},
    "decode, window inside a block": {"requests": [(1, 60), (1, 49)], "window": 5, "page_size": 16},
    "prefill": {"requests": [(39, 39)]},
    "prefill of a chunk": {"requests": [(19, 52)], "heads": 3, "kv_heads": 1},
    "mixed": {"requests": [(7, 40), (1, 45), (0, 0), (20, 20), (1, 1), (2, 2)], "padding": 5},
    "mixed, window": {"requests": [(9, 66), (1, 45), (33, 33), (1, 7)], "window": 20},
    "window of one": {"requests": [(5, 20), (1, 18)], "window": 1},
    "a head for each": {"requests": [(6, 11), (1, 30)], "heads": 3, "kv_heads": 3},
    "many heads for one": {"requests": [(3, 20), (1, 25)], "heads": 20, "kv_heads": 1},
    "too many heads for one": {"requests": [(1, 9), (2, 20)], "heads": 33, "kv_heads": 1, "dim": 130, "max_query": 0},
    "as many as are looked at together": {"requests": [(1, 60)] + [(1, 2)] * 31, "kv_heads": 1},
    "one more": {"requests": [(2, 40)] + [(1, 2)] * 31, "kv_heads": 1, "spare": 0},
    "many, some cut": {"requests": [(1, 1), (1, 260), (0, 0), (1, 170)] + [(1, 2)] * 29 + [(1, 70)], "kv_heads": 1},
    "many, window": {"requests": [(1, 295), (2, 9)] + [(1, 2)] * 30 + [(1, 40)] * 2, "kv_heads": 1, "window": 233},
    "odd head dim": {"requests": [(5, 21), (1, 33)], "dim": 24, "kv_heads": 4},
    "odd pages": {"requests": [(5, 40), (1, 51)], "page_size": 7},
    "large pages": {"requests": [(5, 40), (1, 51)], "page_size": 64},
    "sinks, decode": {"requests": [(1, 70), (1, 0), (1, 90), (1, 1)], "heads": 6, "sinks": True, "padding": 2},
    "sinks, many, some cut": {"requests": [(1, 1), (1, 260)] + [(1, 2)] * 32, "kv_heads": 1, "sinks": True},
    "sinks, mixed, window": {"requests": [(9, 66), (1, 45), (33, 33), (1, 7)], "window": 20, "sinks": True},
    "padding alone": {"requests": [], "padding": 3},
    "no tokens": {"requests": [(0, 0)], "spare": 1},
}


PAGES = {"plain": False, "fp8": True}


@interpreter
@pytest.mark.parametrize("pages", PAGES)
@pytest.mark.parametrize("tiles", TILES)
@pytest.mark.parametrize("case", CASES)
def test_meaning(case: str, tiles: str, pages: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # A small machine: the interpreter takes its time for programs without work too.
    monkeypatch.setattr(kernel, "machine_of", lambda device: Machine(processors=4))
    choose(monkeypatch, TILES[tiles])
    dtype = torch.float32 if tiles == "rows are heads" else torch.float16
    judge(draw(**CASES[case], dtype=dtype, fp8=PAGES[pages]))


@interpreter
def test_samples() -> None:
    for _, arguments in ops.attention.samples(torch.float16, torch.Generator().manual_seed(0)):
        judge(arguments["call"]._asdict())


@everywhere
def test_every_row_has_one_author(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = draw([(3, 20), (1, 18), (0, 0), (1, 0), (2, 2)], padding=2, dtype=torch.float16, device=device)
    choose(monkeypatch, TILES["rows are heads"])
    make_plan, empty, written = kernel.make_plan, torch.empty, []
    monkeypatch.setattr(torch, "empty", lambda *size, **options: empty(*size, **options).fill_(NAN))
    for other in ("single", "many"):  # is left out
        monkeypatch.setattr(
            kernel, "make_plan", lambda *given, other=other: make_plan(*given)._replace(**{other: None})
        )
        out_THD = kernel.attention(AttentionCall(**arguments))
        written.append((~out_THD.isnan()).all(-1).all(-1).tolist())
        assert (~out_THD.isnan()).any(-1).any(-1).tolist() == written[-1]
    assert written[1] == [False] * 3 + [True] * 2 + [False] * 4
    assert written[0] == [not single for single in written[1]]


@everywhere
def test_the_last_piece_adds_up_and_leaves_zeros(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls one after the other, with few and many requests, uncut, in two pieces, and in more than are added up at
    once (16) or weighed at once (32); what is read before it is written is NaN."""
    monkeypatch.setattr(kernel, "machine_of", lambda device: Machine(processors=32))
    choose(monkeypatch, TILES["rows are heads"])
    empty = torch.empty
    counts_RG = kernel.counts_of(1, empty(0, device=device).device)
    for lengths in ([1024], [3], [40, 0, 33], [2] * 17 + [900] + [40] * 15, [17]):
        arguments = draw([(1, length) for length in lengths], heads=3, kv_heads=1, device=device)
        with monkeypatch.context() as poisoned:
            poisoned.setattr(torch, "empty", lambda *size, **options: empty(*size, **options).fill_(NAN))
            out_THD = kernel.attention(AttentionCall(**arguments))
        assert (out_THD - ops.attention.reference(AttentionCall(**arguments))).abs().max() < 1e-4, lengths
        assert counts_RG.count_nonzero() == 0, lengths


@interpreter
def test_programs_may_end_in_any_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter runs them one after the other: here in other orders, so that any piece may be the last."""
    from triton.runtime.interpreter import interpreter_builder as builder

    monkeypatch.setattr(kernel, "machine_of", lambda device: Machine(processors=4))
    choose(monkeypatch, TILES["rows are heads"])
    in_turn = builder.set_grid_idx
    for lengths in ([100], [60, 3, 90], [5] * 20 + [100] + [2] * 15 + [80]):
        arguments = draw([(1, length) for length in lengths], heads=3, kv_heads=1)
        expected = kernel.attention(AttentionCall(**arguments))
        assert (expected - ops.attention.reference(AttentionCall(**arguments))).abs().max() < 1e-4, lengths
        for seed in range(3):

            def shuffled(x: int, y: int, z: int, seed: int = seed) -> None:
                order = list(range(builder.grid_dim[1]))
                random.Random(seed).shuffle(order)
                in_turn(x, order[y], z)

            with monkeypatch.context() as patch:
                patch.setattr(builder, "set_grid_idx", shuffled)
                assert torch.equal(kernel.attention(AttentionCall(**arguments)), expected), (lengths, seed)


@triton.jit
def pieces_kernel(starts, lengths, num_requests, most, window, pieces_R, RP: tl.constexpr, BN: tl.constexpr):
    blocks, size = attention_decode.share_out(starts, lengths, num_requests, most, window, RP, BN, True)
    tl.store(pieces_R + tl.arange(0, RP), 1 + attention_decode.further_pieces(blocks, size))


@everywhere
def test_work_is_shared_out_evenly(device: str) -> None:
    """However lengths are spread: pieces fit the programs there are, and none is larger than an even share."""
    seeded, tile = random.Random(0), DecodeTile(16, 4, 2)
    for trial in range(40):
        num_requests, window = 1, 10**6
        lengths, counts = [16 * trial], [1]
        if trial % 2:
            num_requests, window = seeded.choice((3, 17, 32)), seeded.choice((40, 300, 10**6))
            lengths = [seeded.choice((0, 1, 17, seeded.randrange(2000))) for _ in range(num_requests)]
            counts = [seeded.choice((1, 1, 1, 0, 2)) for _ in lengths]
        most = kernel.most_pieces(num_requests, 2, min(2000, window + 15), tile, Machine(processors=8))
        pieces_R = torch.full((32,), -1, dtype=torch.int32, device=device)
        start = torch.tensor([0, *counts]).cumsum(0).int().to(device)
        context = torch.tensor(lengths, dtype=torch.int32, device=device)
        pieces_kernel[(1,)](start, context, num_requests, most, window, pieces_R, RP=32, BN=16)
        blocks = [-(-length // 16) - max(0, length - window) // 16 for length in lengths]
        blocks = [n if count == 1 else 0 for n, count in zip(blocks, counts)]
        found = pieces_R.tolist()[:num_requests]
        assert sum(found) <= most
        for n, count, pieces in zip(blocks, counts, found):
            assert pieces == 1 or count == 1
            assert -(-n // pieces) <= max(1, -(-sum(blocks) // (most - num_requests)))


def test_what_it_does_not_accept() -> None:
    arguments = draw([(3, 9), (1, 12)])
    assert kernel.accepts(AttentionCall(**arguments))
    for name, value in (
        ("q_THD", arguments["q_THD"].double()),
        ("q_THD", arguments["q_THD"].half()),
        ("q_THD", torch.randn(16, 4, 4).transpose(0, 2)),
        ("q_THD", torch.randn(4, 4, 600)),
        ("v_PSGE", torch.randn(*arguments["v_PSGE"].shape[:3], 32)[..., ::2]),
        ("v_PSGE", arguments["v_PSGE"].transpose(1, 2).contiguous().transpose(1, 2)),
        ("context_len_R", arguments["context_len_R"].long()),
        ("page_table_RM", arguments["page_table_RM"].long()),
        ("page_table_RM", arguments["page_table_RM"].expand(1024, 2, -1).reshape(2048, -1)),
        ("scale", -1.0),
        ("v_PSGE", arguments["v_PSGE"].to(torch.float8_e4m3fn)),
    ):
        assert not kernel.accepts(AttentionCall(**arguments | {name: value})), name


# ---------------------------------------------------------------------------------------------------------------------
# On a GPU
# ---------------------------------------------------------------------------------------------------------------------

MODELS = {  # heads, kv heads, head dim, window
    "qwen3": (32, 4, 128, 0),
    "qwen1.5": (16, 16, 128, 0),
    "gemma, sliding": (16, 8, 256, 1024),
    "gemma, global": (16, 2, 512, 0),
    "one kv head": (24, 1, 64, 0),
    "80": (20, 4, 80, 300),
    "96": (12, 12, 96, 0),
    "gpt-oss": (64, 8, 64, 0),
    "gpt-oss, sliding": (64, 8, 64, 128),
}
any_model = pytest.mark.parametrize("model", MODELS)


def draw_model(model: str, requests: list[tuple[int, int]], **options: Any) -> Arguments:
    heads, kv_heads, dim, window = MODELS[model]
    shape = {"heads": heads, "kv_heads": kv_heads, "dim": dim, "window": window, "page_size": 16, "device": "cuda"}
    return draw(requests, **{**shape, "dtype": torch.bfloat16, **options})


def judge_all(monkeypatch: pytest.MonkeyPatch, cases: list[tuple[tuple[Any, Any], Arguments]]) -> None:
    """With these tiles (None: the choice). Kernels are compiled in parallel first: in turn it would take minutes."""
    with recording() as jobs:
        for tiles, arguments in cases:
            choose(monkeypatch, tiles)
            kernel.attention(AttentionCall(**arguments))
    precompile(jobs)
    for tiles, arguments in cases:
        choose(monkeypatch, tiles)
        try:
            judge(arguments)
        except Exception as error:
            error.add_note(f"tiles {tiles}")
            raise


@pytest.mark.gpu
@pytest.mark.parametrize("pages", PAGES)
def test_meaning_on_a_gpu(pages: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [(tiles, case, dtype) for tiles in TILES.values() for case in CASES.values() for dtype in dtypes("cuda")]
    place = {"device": "cuda", "fp8": PAGES[pages]}
    judge_all(monkeypatch, [(tiles, draw(**case, dtype=dtype, **place)) for tiles, case, dtype in cases])


@pytest.mark.gpu
@any_model
@pytest.mark.parametrize("pages", PAGES)
def test_models(pages: str, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    seeded = random.Random(1)
    cases = []

    def add(requests: list[tuple[int, int]], **options: Any) -> None:
        cases.append(draw_model(model, requests, fp8=PAGES[pages], **options))

    for dtype in dtypes("cuda"):
        add([(1, 129)], dtype=dtype)
        add([(1, seeded.randrange(1, 3000)) for _ in range(70)], dtype=dtype, padding=3)
        add([(1500, 1500), (1, 3000), (200, 2500), (1, 77), (17, 17)], dtype=dtype, padding=9)
    for page_size in (32, 64, 128):
        add([(1, 5000), (300, 1300), (1, 64), (1, 65)], page_size=page_size)
    add([(1, 9000)] + [(1, 20)] * 40)
    add([(1, 50)] * 300)
    add([(3, 50), (1, 40)] * 150)
    judge_all(monkeypatch, [((None, None), case) for case in cases])


@pytest.mark.gpu
@pytest.mark.parametrize("model", ["qwen3", "gemma, sliding", "gemma, global", "one kv head"])
def test_every_candidate(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks.attention_sweep import CANDIDATES

    machine, dim = kernel.machine_of(torch.device("cuda", 0)), MODELS[model][2]
    decode = draw_model(model, [(1, 700), (1, 1), (1, 2100)], padding=21)
    prefill = draw_model(model, [(300, 2500), (130, 130), (1, 55), (2, 2), (0, 0), (40, 1500)], padding=21)
    whole = draw_model(model, [(200, 333)], dtype=torch.float16)
    cases: list[tuple[tuple[Any, Any], Arguments]] = []
    for tile in CANDIDATES["decode"]:
        if attention_tiles.fits(tile, dim, torch.bfloat16, machine):
            cases.append(((tile, None), decode))
    for tile in CANDIDATES["prefill"]:
        if attention_tiles.fits(tile, dim, torch.bfloat16, machine):
            cases += [((None, tile), prefill), ((None, tile), whole)]
    judge_all(monkeypatch, cases)


@pytest.mark.gpu
@pytest.mark.parametrize("model", ["qwen3", "qwen1.5", "gemma, sliding", "gemma, global"])
def test_graph_follows_growing_contexts(model: str) -> None:
    """Captured with the shortest contexts, replayed while they grow, requests end and others begin."""
    for batch in (1, 3, 64):
        longest = [(1, 1 + 97 * r % 2500 + 600) for r in range(batch)]
        arguments = draw_model(model, longest, window=0, padding=2)
        arguments["window"] = MODELS[model][3]
        context_len_R = arguments["context_len_R"]
        final = context_len_R.clone()
        context_len_R.fill_(1)
        kernel.attention(AttentionCall(**arguments))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out_THD = kernel.attention(AttentionCall(**arguments))
        for step in range(6):
            context_len_R.copy_(torch.where(torch.arange(batch, device="cuda") % 5 == step, 0, final * (step + 1) // 6))
            arguments["q_THD"][:batch].normal_()
            out_THD.fill_(NAN)
            graph.replay()
            exact = {name: x.float() if name in ("q_THD", "k_PSGD", "v_PSGE") else x for name, x in arguments.items()}
            expected = ops.attention.reference(AttentionCall(**exact))
            assert (out_THD - expected).norm() <= 1e-2 * expected.norm(), f"batch {batch}, step {step}"


@pytest.mark.gpu
def test_a_chain_that_overlaps() -> None:
    """Each call's queries are the results of the one before. In a graph a kernel starts before its predecessor is done:
    the bits must be those of calls that wait for each other, every time."""
    for requests in ([(1, 300)], [(1, 40 * r + 1) for r in range(90)], [(64, 64), (1, 2000), (1, 9)]):
        arguments = draw_model("qwen3", requests)
        first = arguments["q_THD"].contiguous()
        arguments["scale"] = 1.0  # so that results depend much on queries

        def chain(calls: int, wait: bool, given: Arguments = arguments, first: torch.Tensor = first) -> torch.Tensor:
            x = first
            for _ in range(calls):
                x = kernel.attention(AttentionCall(**given | {"q_THD": x}))
                if wait:
                    torch.cuda.synchronize()
            return x

        expected = chain(12, wait=True)
        assert not torch.equal(expected, chain(11, wait=True))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out_THD = chain(12, wait=False)
        for _ in range(20):
            out_THD.fill_(NAN)
            graph.replay()
            assert torch.equal(out_THD, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("model", ["qwen3", "gemma, global"])
def test_bits_do_not_depend_on_who_is_last(model: str) -> None:
    counts_RG = kernel.counts_of(MODELS[model][1], torch.device("cuda", 0))
    for batch in (1, 4, 16, 64):
        arguments = draw_model(model, [(1, 300 if r % 8 else 9000 + r) for r in range(batch)])
        judge(arguments)
        expected = kernel.attention(AttentionCall(**arguments))
        for _ in range(200):
            assert torch.equal(kernel.attention(AttentionCall(**arguments)), expected), f"batch {batch}"
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outs = [kernel.attention(AttentionCall(**arguments)) for _ in range(20)]
        for _ in range(10):
            for out_THD in outs:
                out_THD.fill_(NAN)
            graph.replay()
            assert all(torch.equal(out_THD, expected) for out_THD in outs), f"batch {batch}, captured"
        assert counts_RG.count_nonzero() == 0


@pytest.mark.gpu
def test_counts_are_never_memory_of_a_graph() -> None:
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        torch.zeros(1, device="cuda")
        with pytest.raises(RuntimeError, match="call it once before the capture"):
            kernel.counts_of(12345, torch.device("cuda", 0))


@pytest.mark.gpu
def test_pools_of_more_than_2_to_the_31_elements() -> None:
    near = draw_model("qwen3", [(1, 900), (70, 200)])
    far = (1 << 31) // near["k_PSGD"][0].numel() + 10
    distant = near | {"page_table_RM": near["page_table_RM"] + far}
    for name in ("k_PSGD", "v_PSGE"):
        small = near[name]
        distant[name] = torch.empty(far + small.shape[0], *small.shape[1:], dtype=small.dtype, device="cuda")
        distant[name][far:] = small
    found = kernel.attention(AttentionCall(**distant))
    assert torch.equal(found, kernel.attention(AttentionCall(**near)))
    assert not found.isnan().any()


# ---------------------------------------------------------------------------------------------------------------------
# Ahead of time
# ---------------------------------------------------------------------------------------------------------------------

MACHINES = {
    "sm_80": Machine(ahead_of_time.SHARED["sm_80"], 108),
    "sm_90": Machine(ahead_of_time.SHARED["sm_90"], 132, wgmma=True, hopper=True),
    "sm_100": Machine(ahead_of_time.SHARED["sm_100"], 148),
    "gfx90a": Machine(ahead_of_time.SHARED["gfx90a"], 104),
    "gfx942": Machine(ahead_of_time.SHARED["gfx942"], 304),
    "gfx950": Machine(ahead_of_time.SHARED["gfx950"], 256),
}
LAUNCHES = ("attend_rows", "attend_pieces")


def launches_of(
    model: str,
    tokens: int,
    num_requests: int,
    dtype: torch.dtype,
    target: str,
    monkeypatch: pytest.MonkeyPatch,
    fp8: bool = False,
    sinks: bool = False,
) -> list[ahead_of_time.Launch]:
    heads, kv_heads, dim, window = MODELS[model]
    monkeypatch.setattr(kernel, "machine_of", lambda device: MACHINES[target])
    monkeypatch.setattr(kernel, "dependent_launch", lambda device: target in ahead_of_time.DEPENDENT)

    def empty(*size: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device="meta")

    pages = empty(4000, 16, kv_heads, dim, dtype=torch.float8_e4m3fn if fp8 else dtype)
    with recorded(kernel, *LAUNCHES) as launches:
        kernel.attention(
            AttentionCall(
                empty(tokens, heads, dim, dtype=dtype),
                pages,
                pages,
                empty(num_requests, 512),
                empty(num_requests + 1),
                empty(num_requests),
                dim**-0.5,
                window,
                1 if tokens == num_requests else 0,
                sink_H=empty(heads, dtype=dtype) if sinks else None,
            )
        )
    return launches


AHEAD = {  # model, dtype, tokens, requests
    "qwen3, decode": ("qwen3", torch.bfloat16, 64, 64),
    "qwen3, decode of few": ("qwen3", torch.bfloat16, 2, 2),
    "qwen3, prefill": ("qwen3", torch.bfloat16, 8192, 1),
    "gemma, sliding, mixed": ("gemma, sliding", torch.float16, 300, 4),
    "gemma, global, prefill": ("gemma, global", torch.bfloat16, 8192, 1),
    "gemma, global, decode in fp32": ("gemma, global", torch.float32, 4, 4),
}
FP8_AHEAD = {
    **{case: AHEAD[case] for case in ("qwen3, decode", "qwen3, decode of few", "qwen3, prefill")},
    "qwen3 in fp16, mixed": ("qwen3", torch.float16, 300, 4),
    "gemma, sliding, mixed": ("gemma, sliding", torch.bfloat16, 300, 4),
    "gemma, global, mixed": ("gemma, global", torch.bfloat16, 300, 4),
}


@pytest.mark.slow
@pytest.mark.parametrize("target", ahead_of_time.TARGETS)
@pytest.mark.parametrize("case", AHEAD)
def test_compiles_ahead_of_time(case: str, target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, dtype, tokens, num_requests = AHEAD[case]
    monkeypatch.setattr(attention_tiles, "HOPPER_ROWS", 0)  # its twin's test is the next one
    launches = launches_of(model, tokens, num_requests, dtype, target, monkeypatch)
    expected = {"attend_rows"} if num_requests < tokens else set()
    expected |= {"attend_pieces"} if num_requests > 1 else set()
    assert {launch.function.__name__ for launch in launches} == expected
    for launch in launches:
        compiled, name = compile_for(target, launch), launch.function.__name__
        assert compiled.metadata.shared <= MACHINES[target].shared_bytes, name
        if target != "sm_90":
            continue
        ptx, used = compiled.asm["ptx"], ahead_of_time.resources(compiled)
        assert used["STACK"] == used["LOCAL"] == 0, f"{name}: registers are spilled"
        before, wait, after = ptx.partition("griddepcontrol.wait")
        assert wait and before.count("ld.global.cg") >= 3, "lengths and starts are older than the kernel before"
        assert before.count("ld.global") == before.count("ld.global.cg"), "nothing else is, and L1 may hold old ones"
        assert "cp.async.cg" not in before, "keys are not"
        assert after.count("cp.async.cg.shared.global") >= 8, "keys come in pieces of 16 bytes"
        if name == "attend_rows":
            assert "wgmma.mma_async" in after
            continue
        _, counted, added = after.partition("atom.global.gpu.acq_rel.add")
        stored = compiled.asm["ttgir"].partition("tt.atomic_rmw")[0].rpartition("tt.store")[2]
        barrier = "gpu.barrier" in stored or "ttg.barrier all" in stored  # before and from Triton 3.7 on
        assert counted and barrier, "who counts a piece must know that all threads have stored it"
        assert added.count("ld.global") == added.count("ld.global.cg"), "L1 may hold what was there before"
        wide = added.count("ld.global.cg.v4") + added.count("ld.global.cg.v2.b64")
        assert wide >= 16, "64 registers full of pieces are asked for at once"


@pytest.mark.slow
@pytest.mark.parametrize("target", [target for target in ahead_of_time.TARGETS if target != "sm_80"])
@pytest.mark.parametrize("case", FP8_AHEAD)
def test_fp8_pages_compile_ahead_of_time(case: str, target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for sm_80, for which Triton does not convert. Prompts of any length have the portable kernel."""
    model, dtype, tokens, num_requests = FP8_AHEAD[case]
    launches = launches_of(model, tokens, num_requests, dtype, target, monkeypatch, fp8=True)
    assert len(launches) == (num_requests < tokens) + (num_requests > 1)
    for launch in launches:
        compiled, name = compile_for(target, launch), launch.function.__name__
        assert compiled.metadata.shared <= MACHINES[target].shared_bytes, name
        if target == "sm_90":
            used = ahead_of_time.resources(compiled)
            assert used["STACK"] == used["LOCAL"] == 0, f"{name}: registers are spilled"
            assert compiled.asm["ptx"].count("cp.async.c") >= 8, "keys are loaded ahead"


@pytest.mark.slow
@pytest.mark.parametrize("case", [(64, 64), (300, 4), (8192, 1)], ids=["decode", "mixed", "prefill"])
@pytest.mark.parametrize("model", ["gpt-oss", "gpt-oss, sliding"])
def test_sinks_compile_ahead_of_time(model: str, case: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of any length have the portable kernel."""
    launches = launches_of(model, *case, torch.bfloat16, "sm_90", monkeypatch, sinks=True)
    assert len(launches) == (case[1] < case[0]) + (case[1] > 1)
    for launch in launches:
        used = ahead_of_time.resources(compile_for("sm_90", launch))
        assert used["STACK"] == used["LOCAL"] == 0, "registers are spilled"


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [300, 8192])
@pytest.mark.parametrize(("heads", "dim", "narrow"), [(16, 192, 128), (20, 256, 256)], ids=["v2-lite", "glm-4.7-flash"])
def test_expanded_heads_compile_ahead_of_time(
    heads: int, dim: int, narrow: int, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As latent attention has them: keys and values are slices of one tensor."""
    monkeypatch.setattr(kernel, "machine_of", lambda device: MACHINES["sm_90"])
    monkeypatch.setattr(kernel, "dependent_launch", lambda device: True)
    q_THD = torch.empty(tokens, heads, dim, dtype=torch.bfloat16, device="meta")
    kv_PSHX = torch.empty(512, 16, heads, dim + narrow, dtype=torch.bfloat16, device="meta")
    integers = [torch.empty(*size, dtype=torch.int32, device="meta") for size in ((1, 512), (2,), (1,))]
    call = AttentionCall(q_THD, *kv_PSHX.tensor_split([dim], -1), *integers, 0.1, max_query=tokens)
    assert kernel.accepts(call)
    with recorded(kernel, *LAUNCHES) as launches:
        assert kernel.attention(call).shape == (tokens, heads, narrow)
    (launch,) = launches
    compiled = compile_for("sm_90", launch)
    assert compiled.metadata.shared <= MACHINES["sm_90"].shared_bytes
    assert compiled.asm["ptx"].count("wgmma.mma_async") and compiled.asm["ptx"].count("cp.async.cg") >= 8
    used = ahead_of_time.resources(compiled)
    assert used["STACK"] == used["LOCAL"] == 0, "registers are spilled"


@pytest.mark.slow
@pytest.mark.parametrize("model", ["qwen3", "gemma, sliding"])
def test_hopper_kernel_compiles_ahead_of_time(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.experimental.gluon._runtime import GluonASTSource

    from anabranch.kernels.triton import attention_hopper

    tile = HopperTile(128 if model == "qwen3" else 64, 2)
    assert attention_tiles.fits(tile, MODELS[model][2], torch.bfloat16, MACHINES["sm_90"])
    monkeypatch.setattr(attention_tiles, "prefill_override", tile)
    monkeypatch.setattr(ahead_of_time, "ASTSource", GluonASTSource)
    with recorded(attention_hopper, "attend_rows_hopper") as launches:
        launches_of(model, 8192, 1, torch.bfloat16, "sm_90", monkeypatch)
    compiled = compile_for("sm_90", launches[0])
    assert compiled.metadata.shared <= MACHINES["sm_90"].shared_bytes
    sass = compiled.asm["sass"]
    blocks, pages = 2, tile.keys // 16 * (MODELS[model][2] // 64)
    assert sass.count("UTMALDG.2D") == blocks * pages, "whole blocks come by the copy engine"
    assert sass.count("LDGSTS.E.BYPASS.128") >= 32, "others in pieces of 16 bytes"
    # The assembler gives up on overlap where it does not see that registers are enough: then a wait follows each.
    assert sass.count("HGMMA") >= 4 * sass.count("WARPGROUP.DEPBAR") > 0
    if model == "qwen3":
        used = ahead_of_time.resources(compiled)
        assert used["STACK"] == used["LOCAL"] == 0


def test_pages_that_the_copy_engine_cannot_take_have_another_kernel() -> None:
    for page in (0, 8, 12, 16, 128, 256):  # 0: not in one piece
        tile = attention_tiles.choose_prefill(10**6, 128, torch.bfloat16, MACHINES["sm_90"], page)
        assert isinstance(tile, HopperTile) == (page in (8, 16, 128)), page


@pytest.mark.parametrize("target", MACHINES)
def test_chosen_tiles_fit(target: str) -> None:
    machine = MACHINES[target]
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for dim in (16, 64, 80, 128, 256, 512):
            tiles: list[Any] = [
                attention_tiles.choose_decode(pairs, dim, dtype, machine, fp8)
                for pairs in (1, 1000)
                for fp8 in (False, True)
            ]
            tiles += [attention_tiles.choose_prefill(rows, dim, dtype, machine) for rows in (16, 10**6)]
            for tile in tiles:
                assert tile.stages == 1 or attention_tiles.fits(tile, dim, dtype, machine)
        narrow = attention_tiles.choose_prefill(10**6, 192, dtype, machine, 0, 128)
        assert narrow.stages == 1 or attention_tiles.fits(narrow, 192, dtype, machine, 0, 128)
