"""Projections of few tokens in Triton against an exact product: in the interpreter, on a GPU, ahead of time."""

from functools import partial
from typing import Any

import pytest
import torch

from anabranch import ops

pytest.importorskip("triton")
from anabranch.conformance.judge import copy, faults, poisoned_memory
from anabranch.kernels.triton import launch
from anabranch.kernels.triton import linear as kernel
from anabranch.kernels.triton.linear import MultiplyTiles, StreamTiles, Tiles
from anabranch.ops.weight import Weight
from tests.kernels.triton import ahead_of_time
from tests.kernels.triton.ahead_of_time import compile_for, recorded
from tests.kernels.triton.places import dtypes, everywhere

TILES: dict[str, Tiles] = {
    "stream": StreamTiles(2, 4),
    "stream, one warp": StreamTiles(4, 1),
    "stream, across": StreamTiles(1, 2, 2),
    "stream, an output": StreamTiles(1, 1, 8),
    "multiply": MultiplyTiles(16, 4, 64, 4),
    "multiply, more outputs": MultiplyTiles(32, 8, 32, 3),
}
SHAPES = {  # tokens, inputs, outputs, biased; few outputs, since the interpreter takes milliseconds for each program
    "even": (2, 256, 16, False),
    "odd": (3, 300, 19, True),
    "narrow": (1, 24, 5, False),
    "an output": (4, 600, 1, True),
    "more tokens": (7, 136, 9, True),
}


def draw(
    tokens: int, width: int, out: int, biased: bool, dtype: torch.dtype, device: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    x_TD = torch.randn(tokens, width, device=device).to(dtype)
    weight_FD = (torch.randn(out, width, device=device) * width**-0.5).to(dtype)
    return x_TD, weight_FD, torch.randn(out, device=device).to(dtype) if biased else None


def distance(found: torch.Tensor, x_TD: torch.Tensor, weight_FD: torch.Tensor, bias_F: torch.Tensor | None) -> float:
    """‖found − exact‖ / ‖exact‖; NaN is infinitely far."""
    exact = x_TD.double() @ weight_FD.double().T
    if bias_F is not None:
        exact += bias_F.double()
    error = ((found.double() - exact).norm() / exact.norm()).item()
    return error if error == error else float("inf")


@everywhere
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("tiles", TILES)
def test_tiles(tiles: str, shape: str, device: str) -> None:
    chosen = TILES[tiles]
    for dtype in dtypes(device):
        if device == "cuda" and dtype == torch.float32 and isinstance(chosen, MultiplyTiles):
            continue  # exact products have no matrix unit
        x_TD, weight_FD, bias_F = draw(*SHAPES[shape], dtype, device)
        for out_dtype in {dtype, torch.float32} if shape == "odd" else {dtype}:
            with poisoned_memory():
                y_TF = kernel.run(x_TD, weight_FD, bias_F, out_dtype, chosen)
            assert y_TF.dtype == out_dtype
            # A sum that is not rounded is exact to fp32, whatever its operands are.
            limit = ops.linear.tolerance[out_dtype]
            assert distance(y_TF, x_TD, weight_FD, bias_F) <= limit, (dtype, out_dtype)


@everywhere
def test_samples(device: str) -> None:
    judged = 0
    for dtype in dtypes(device):
        for _, arguments in ops.linear.samples(dtype, torch.Generator().manual_seed(0)):
            arguments = copy(arguments, torch.device(device))
            if kernel.accepts(**arguments):
                assert faults(ops.linear, kernel.linear, arguments, dtype) == []
                judged += 1
    assert judged >= 7


@everywhere
def test_rows_of_wider_tensors(device: str) -> None:
    """x and the weight are columns of something wider; what lies beside them is not read."""
    x_TD, weight_FD, _ = draw(3, 96, 20, False, torch.float32, device)
    wide_x, wide_weight = (
        torch.full((3, 200), torch.nan, device=device),
        torch.full((20, 100), torch.nan, device=device),
    )
    wide_x[:, 64:160], wide_weight[:, 4:] = x_TD, weight_FD
    for tiles in (StreamTiles(2, 2), MultiplyTiles(16, 4, 64, 2)):
        if device == "cpu" or isinstance(tiles, StreamTiles):
            y_TF = kernel.run(wide_x[:, 64:160], wide_weight[:, 4:], None, torch.float32, tiles)
            assert distance(y_TF, x_TD, weight_FD, None) <= 1e-5


def test_what_it_does_not_accept() -> None:
    x_TD, weight_FD, bias_F = draw(4, 64, 8, True, torch.float32, "cpu")
    assert kernel.accepts(x_TD, Weight.of(weight_FD), bias_F)
    assert not kernel.accepts(x_TD.double(), Weight.of(weight_FD.double()))
    assert not kernel.accepts(x_TD, Weight.of(weight_FD.half()))
    assert not kernel.accepts(x_TD, Weight.of(weight_FD), None, torch.float16)
    assert not kernel.accepts(x_TD, Weight.of(torch.randn(64, 8).T))
    assert not kernel.accepts(torch.randn(64, 4).T, Weight.of(weight_FD))
    many = torch.randn(kernel.ROUTER_TOKENS + 1, 64).half()
    assert not kernel.accepts(many, Weight.of(weight_FD.half()))
    assert kernel.accepts(many[1:], Weight.of(weight_FD.half()))
    outputs = torch.randn(1024, 64).half()
    assert not kernel.accepts(many[: kernel.MULTIPLY_TOKENS + 1], Weight.of(outputs))
    assert kernel.accepts(many[: kernel.MULTIPLY_TOKENS], Weight.of(outputs))


@pytest.mark.parametrize("itemsize", [2, 4])
def test_chosen_tiles_fit(itemsize: int) -> None:
    for tokens in (*range(1, kernel.MULTIPLY_TOKENS + 1), 64, kernel.ROUTER_TOKENS):
        for D in (64, 2048, 2112, 2816, 4096, 5632, 8192, 14336):
            for F in (1, 60, 128, 2048, 5120, 151936):
                tiles = kernel.choose(tokens, D, F, itemsize)
                if isinstance(tiles, StreamTiles):
                    loads = -(-D * itemsize // (16 * kernel.NUM_LANES * tiles.across))
                    assert loads <= kernel.MAX_LOADS and tiles.rows * loads <= 24
                    assert tiles.warps * tiles.across <= 8
                elif isinstance(tiles, MultiplyTiles):
                    assert itemsize == 2
                    padded = max(8, min(kernel.MULTIPLY_TOKENS, 1 << (tokens - 1).bit_length()))
                    stage = tiles.warps * tiles.depth * itemsize * (tiles.rows + padded)
                    # A buffer less than stages: what is multiplied now has left its own.
                    assert stage * (tiles.stages - 1) <= 100 << 10, "two programs on a multiprocessor"
                else:
                    large = D * F > kernel.MULTIPLY_WEIGHTS or (tokens > kernel.MULTIPLY_TOKENS and F > 512)
                    assert (itemsize == 4 or large) and (tokens > kernel.STREAM_TOKENS or D > 8192)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> Any:
    """linear_hopper as on an H200 that is not there."""
    from anabranch.kernels.triton import linear_hopper

    monkeypatch.setattr(kernel, "hopper_kernels", lambda device: linear_hopper)
    monkeypatch.setattr(linear_hopper, "num_processors", lambda device: 132)
    return linear_hopper


def on_paper(tokens: int, D: int, F: int, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty(tokens, D, dtype=dtype, device="meta"), torch.empty(F, D, dtype=dtype, device="meta")


def test_what_hopper_takes(hopper: Any) -> None:
    for tokens in range(1, 65):
        taken = 3 <= tokens <= 32
        for D, F in ((4096, 2048), (2048, 2048), (2112, 2816)):
            x_TD, weight_FD = on_paper(tokens, D, F)
            assert (kernel.hopper_for(x_TD, weight_FD) is hopper) == taken, tokens
            assert kernel.accepts(x_TD, Weight.of(weight_FD)) == (tokens <= 32)
        for D, F in ((2048, 5120), (2048, 6144), (2048, 2040), (8200, 512), (8192, 512), (256, 32768)):
            assert kernel.hopper_for(*on_paper(tokens, D, F)) is None, (D, F)
    x_TD, weight_FD = on_paper(16, 4096, 2048, torch.float32)
    assert kernel.hopper_for(x_TD, weight_FD) is None and not kernel.accepts(x_TD, Weight.of(weight_FD))
    x_TD, weight_FD = on_paper(16, 2049, 2048)
    assert kernel.hopper_for(x_TD, weight_FD) is None and kernel.accepts(x_TD, Weight.of(weight_FD))
    wide, weight_FD = torch.empty(16, 4104, dtype=torch.bfloat16), torch.empty(2048, 4096, dtype=torch.bfloat16)
    assert kernel.hopper_for(wide[:, 8:], weight_FD) is hopper
    assert kernel.hopper_for(wide[:, 1:-7], weight_FD) is None, "rows begin at 16 bytes"
    assert kernel.hopper_for(wide[:1, 8:].expand(16, -1), weight_FD) is None, "rows lie apart"


def test_only_hopper_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    found, device = partial(launch.gluon_kernels.__wrapped__, "linear_hopper"), torch.device("cuda", 0)
    for capability in ((8, 0), (9, 0), (10, 0)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, said=capability: said)
        monkeypatch.setattr(launch, "dependent_launch", lambda device, said=capability: said >= (9, 0))
        assert (found(device) is not None) == (capability == (9, 0))
    monkeypatch.undo()
    assert found(torch.device("cpu")) is None


@pytest.mark.parametrize("processors", [78, 114, 132])
def test_items_are_shared_out(processors: int, hopper: Any) -> None:
    taken = 0
    for D in range(8, 9000, 248):
        for F in range(1, 9000, 233):
            items = hopper.items_of_program(D, F, processors)
            if items is not None:
                programs = -(-F // hopper.TILE) * -(-D // (hopper.DEPTH * items))
                assert 1 <= items <= hopper.MOST_ITEMS and programs <= processors
                taken += 1
    assert taken > 100
    assert hopper.items_of_program(4096, 2048, 132) == 4 and hopper.items_of_program(2048, 2048, 132) == 2
    assert hopper.items_of_program(4096, 2048, 114) is None
    largest = (hopper.TILE + max(hopper.BLOCKS)) * hopper.DEPTH * 2 * hopper.MOST_ITEMS
    assert largest + 1024 <= 227 << 10, "all that a program may have lies in shared memory at once"


# ---------------------------------------------------------------------------------------------------------------------
# On a GPU
# ---------------------------------------------------------------------------------------------------------------------

REAL = {  # inputs, outputs, biased
    "qwen3 qkv": (2048, 5120, False),
    "qwen1.5 qkv": (2048, 6144, True),
    "qwen3 o": (4096, 2048, False),
    "gemma o": (8192, 2816, False),
    "gemma down": (2112, 2816, False),
    "router": (2048, 128, False),
    "gate": (2048, 1, False),
    "head": (2816, 30011, False),
}


@pytest.mark.gpu
@pytest.mark.parametrize("shape", REAL)
def test_real_shapes_on_a_gpu(shape: str) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        for tokens in (1, 2, 3, 4, 5, 8, 13, 16, 17, 32, 33, 100, 256):
            x_TD, weight_FD, bias_F = draw(tokens, *REAL[shape], dtype, "cuda")
            for out_dtype in (dtype, torch.float32):
                if not kernel.accepts(x_TD, Weight.of(weight_FD), bias_F, out_dtype):
                    assert tokens > 16 or weight_FD.numel() > kernel.MULTIPLY_WEIGHTS
                    continue
                with poisoned_memory():
                    y_TF = kernel.linear(x_TD, Weight.of(weight_FD), bias_F, out_dtype)
                # Matrix units cut off where they add; over 8,192 inputs that shows in fp32.
                limit = 3e-5 if out_dtype == torch.float32 else ops.linear.tolerance[out_dtype]
                assert distance(y_TF, x_TD, weight_FD, bias_F) <= limit, tokens


ON_HOPPER: dict[str, tuple[int, int, bool, torch.dtype, torch.dtype]] = {
    # inputs, outputs, biased, dtype, dtype of the result
    "qwen3 o": (4096, 2048, False, torch.bfloat16, torch.bfloat16),
    "qwen1.5 o": (2048, 2048, True, torch.float16, torch.float32),
    "gemma down": (2112, 2816, False, torch.bfloat16, torch.float32),
    "odd, an item beyond": (2744, 2001, True, torch.bfloat16, torch.bfloat16),
    "a part for a tile": (1000, 8200, True, torch.bfloat16, torch.bfloat16),
}


def needs_hopper() -> Any:
    found = kernel.hopper_kernels(torch.device("cuda", 0))
    if found is None:
        pytest.skip("not for this machine")
    return found


@pytest.mark.gpu
@pytest.mark.parametrize("shape", ON_HOPPER)
def test_shapes_on_hopper(shape: str) -> None:
    """Many times: the next launch is to find everything as the first did, and to give the same bits."""
    hopper, (D, F, biased, dtype, out_dtype) = needs_hopper(), ON_HOPPER[shape]
    for tokens in (3, 4, 5, 16, 17, 32):
        x_TD, weight_FD, bias_F = draw(tokens, D, F, biased, dtype, "cuda")
        assert kernel.hopper_for(x_TD, weight_FD) is hopper
        with poisoned_memory():
            y_TF = kernel.linear(x_TD, Weight.of(weight_FD), bias_F, out_dtype)
        limit = 3e-5 if out_dtype == torch.float32 else ops.linear.tolerance[out_dtype]
        assert y_TF.dtype == out_dtype and distance(y_TF, x_TD, weight_FD, bias_F) <= limit, tokens
        for _ in range(50):
            assert torch.equal(kernel.linear(x_TD, Weight.of(weight_FD), bias_F, out_dtype), y_TF)
        assert not hopper.counts(y_TF.device).any(), "the next launch counts from zero"


@pytest.mark.gpu
def test_rows_of_wider_tensors_on_hopper() -> None:
    hopper = needs_hopper()
    x_TD, weight_FD, _ = draw(17, 2112, 2048, False, torch.bfloat16, "cuda")
    wide_x, wide_weight = (torch.full((rows, 2200), torch.nan, device="cuda").bfloat16() for rows in (17, 2048))
    wide_x[:, 64:2176], wide_weight[:, 8:2120] = x_TD, weight_FD
    assert kernel.hopper_for(wide_x[:, 64:2176], wide_weight[:, 8:2120]) is hopper
    y_TF = kernel.linear(wide_x[:, 64:2176], Weight.of(wide_weight[:, 8:2120]))
    assert distance(y_TF, x_TD, weight_FD, None) <= ops.linear.tolerance[torch.bfloat16]


@pytest.mark.gpu
def test_a_chain_that_overlaps_on_hopper() -> None:
    """Weights are read before the wait, x is not: each product reads what its predecessor writes."""
    hopper = needs_hopper()
    for tokens in (4, 16, 32):
        x_TD = torch.randn(tokens, 2048, device="cuda").bfloat16()
        weights = [(torch.randn(2048, 2048, device="cuda") / 45).bfloat16() for _ in range(12)]
        expected = x_TD.double()
        for weight in weights:
            expected = (expected @ weight.double().T).bfloat16().double()
        hopper.run(x_TD, weights[0], None, torch.bfloat16)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y_TD = x_TD
            for weight in weights:
                y_TD = hopper.run(y_TD, weight, None, torch.bfloat16)
        for _ in range(5):
            y_TD.fill_(float("nan"))
            graph.replay()
            assert ((y_TD.double() - expected).norm() / expected.norm()).item() <= 3e-2, tokens
        assert not hopper.counts(y_TD.device).any()


@pytest.mark.gpu
@pytest.mark.parametrize("early", [False, True])
def test_a_chain_that_overlaps(early: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each product starts before its predecessor is done, and reads what that one writes."""
    monkeypatch.setattr(kernel, "EARLY", early)
    for tokens in (1, 4, 8, 16):
        x_TD = torch.randn(tokens, 1024, device="cuda").bfloat16()
        weights = [(torch.randn(1024, 1024, device="cuda") / 32).bfloat16() for _ in range(12)]
        expected = x_TD.double()
        for weight in weights:
            expected = (expected @ weight.double().T).bfloat16().double()
        y_TD = kernel.linear(x_TD, Weight.of(weights[0]))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y_TD = x_TD
            for weight in weights:
                y_TD = kernel.linear(y_TD, Weight.of(weight))
        for _ in range(5):
            y_TD.fill_(float("nan"))
            graph.replay()
            assert ((y_TD.double() - expected).norm() / expected.norm()).item() <= 3e-2, tokens


@pytest.mark.gpu
def test_same_bits_every_time() -> None:
    for tokens in (1, 2, 4, 16):
        x_TD, weight_FD, _ = draw(tokens, 4096, 2048, False, torch.bfloat16, "cuda")
        first = kernel.linear(x_TD, Weight.of(weight_FD))
        for _ in range(10):
            assert torch.equal(kernel.linear(x_TD, Weight.of(weight_FD)), first)


# ---------------------------------------------------------------------------------------------------------------------
# Ahead of time
# ---------------------------------------------------------------------------------------------------------------------

AHEAD: dict[str, tuple[int, int, int, bool]] = {
    "qwen3 qkv, 1": (1, 2048, 5120, False),
    "qwen1.5 qkv, 2": (2, 2048, 6144, True),
    "qwen1.5 o, 4": (4, 2048, 2048, False),
    "qwen3 o, 1": (1, 4096, 2048, False),
    "gemma o, 2": (2, 8192, 2816, False),
    "router, 1": (1, 2048, 128, False),
    "gemma down, 8": (8, 2112, 2816, False),
    "qwen3 o, 16": (16, 4096, 2048, False),
}


@pytest.mark.slow
@pytest.mark.parametrize("target", ahead_of_time.TARGETS)
@pytest.mark.parametrize("case", AHEAD)
def test_compiles_ahead_of_time(case: str, target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    dependent = target in ahead_of_time.DEPENDENT
    monkeypatch.setattr(ahead_of_time.DEPENDENT_LAUNCH, lambda device: dependent)
    if target in ahead_of_time.AMD:
        for name, value in {"NUM_LANES": 64, "NUM_STAGES": 2, "LEAST_COLUMNS": 16}.items():
            monkeypatch.setattr(kernel, name, value)
    tokens, D, F, biased = AHEAD[case]
    x_TD, weight_FD = torch.empty(tokens, D, dtype=torch.bfloat16), torch.empty(F, D, dtype=torch.bfloat16)
    bias_F = torch.empty(F, dtype=torch.bfloat16) if biased else None
    tiles: Any = kernel.choose.__wrapped__(tokens, D, F, 2)
    with recorded(kernel, "stream_rows", "multiply_rows") as launches:
        kernel.run(x_TD, weight_FD, bias_F, torch.bfloat16, tiles)
    (launch,) = launches
    assert launch.grid[0] >= 120, "a program for nearly every multiprocessor"
    compiled = compile_for(target, launch)
    assert compiled.metadata.shared <= (64 if target in ahead_of_time.AMD else 100) << 10
    if target in ahead_of_time.AMD and isinstance(tiles, MultiplyTiles):
        assert "v_mfma" in compiled.asm["amdgcn"]
    if target == "sm_90":
        found = ahead_of_time.resources(compiled)
        assert found["LOCAL"] == 0 and found["REG"] <= 168
    if not dependent:
        return
    before, after = ahead_of_time.loads_around_wait(compiled)
    if isinstance(tiles, StreamTiles):
        loads = -(-D // (8 * 32 * tiles.across))
        assert before == loads * tiles.rows + biased * tiles.rows, "all weights, and no x"
        assert after == loads * tokens
        assert ahead_of_time.loads(compiled)["wide"] == loads * (tiles.rows + tokens)
    else:
        assert before == 0 and "prefetch.global.L2" in compiled.asm["ptx"].split("griddepcontrol.wait")[0]
        assert "cp.async.cg.shared.global [ " in compiled.asm["ptx"] and "mma.sync" in compiled.asm["ptx"]


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [16, 32])
@pytest.mark.parametrize("shape", ON_HOPPER)
def test_hopper_compiles_ahead_of_time(shape: str, tokens: int, hopper: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import triton
    from triton.runtime.driver import driver

    from anabranch.kernels.compiling import precompile

    monkeypatch.setattr(driver, "_active", ahead_of_time.NoDevice())
    D, F, biased, dtype, out_dtype = ON_HOPPER[shape]
    x_TD, weight_FD = torch.empty(tokens, D, dtype=dtype), torch.empty(F, D, dtype=dtype)
    bias_F = torch.empty(F, dtype=dtype) if biased else None
    with precompile.recording() as jobs:
        for few in (3, 4, 5, 16) if tokens == 16 else (17, 24, 32):
            kernel.linear(x_TD[:few], Weight.of(weight_FD), bias_F, out_dtype)
    (job,) = jobs
    compiled: Any = triton.compile(job.source(), target=job.target, options=job.options)
    assert compiled.metadata.shared <= 227 << 10
    found = ahead_of_time.resources(compiled)
    assert found["LOCAL"] == 0 and found["STACK"] == 0
    before, after = compiled.asm["ptx"].split("griddepcontrol.wait")
    items = hopper.items_of_program(D, F, 132)
    assert before.count("cp.async.bulk.tensor") == after.count("cp.async.bulk.tensor") == items, "weights, x"
    assert "ld.global" not in before and "griddepcontrol.launch_dependents" in after and "wgmma.mma_async" in after
