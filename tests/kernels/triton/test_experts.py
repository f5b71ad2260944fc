"""The experts' kernels against an exact reference: in Triton's interpreter, on a GPU, ahead of time."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from anabranch import ops
from anabranch.compile.sizes import decode_sizes, prefill_sizes

pytest.importorskip("triton")
from anabranch.kernels.triton import experts as kernel
from anabranch.kernels.triton import experts_plan
from anabranch.kernels.tuning import experts_tiles
from anabranch.kernels.tuning.experts_tiles import (
    SMALL_TOKENS,
    GroupedTiles,
    HopperTiles,
    Machine,
    Shape,
    SmallTiles,
    Tile,
    Tiles,
    padded_tokens,
)
from anabranch.ops.arguments import named_tensors
from anabranch.ops.experts import COMBINES, ExpertsCall
from anabranch.ops.weight import Weight
from tests.kernels.triton import ahead_of_time
from tests.kernels.triton.places import interpreter

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
Arguments = dict[str, Any]


# ---------------------------------------------------------------------------------------------------------------------
# The judge
# ---------------------------------------------------------------------------------------------------------------------


def draw(
    tokens: int,
    num_experts: int,
    top_k: int,
    width: int,
    inner: int,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    routing: str = "uniform",
    biased: bool = False,
    **options: Any,
) -> Arguments:
    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, device=device)

    score_TE = torch.rand(tokens, num_experts, device=device)
    if routing == "zipf":
        score_TE = score_TE.log() * torch.arange(1, num_experts + 1, device=device)
    expert_TK = score_TE.topk(top_k).indices.int()
    if routing == "one expert":
        expert_TK[:, 0] = num_experts - 1
        expert_TK[:, 1:] = -1
    elif routing == "few experts":  # and the others empty
        expert_TK %= top_k
    elif routing == "twice":  # a token that names an expert twice
        expert_TK[:, -1] = expert_TK[:, 0]
    elif routing == "nowhere":
        expert_TK.fill_(-1)
    elif tokens > 2:  # padding, and an expert that lives elsewhere
        expert_TK[1] = -1
        expert_TK[-1, 0] = -1
    return {
        "x_TD": normal(tokens, width).to(dtype),
        "weight_TK": torch.rand(tokens, top_k, device=device),
        "expert_TK": expert_TK,
        "gate_up_EFD": Weight.of((normal(num_experts, 2 * inner, width) * width**-0.5).to(dtype)),
        "down_EDI": Weight.of((normal(num_experts, width, inner) * inner**-0.5).to(dtype)),
        "activation": "silu",
        "gate_up_bias_EF": normal(num_experts, 2 * inner).to(dtype) if biased else None,
        "down_bias_ED": normal(num_experts, width).to(dtype) if biased else None,
        **options,
    }


def exact(arguments: Arguments, rounded: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.double) -> torch.Tensor:
    """fp64, expert by expert; `rounded`: inputs of both products."""
    given = ExpertsCall(**arguments)
    (tokens, top_k), width = given.expert_TK.shape, given.x_TD.shape[1]
    y_TKD = torch.zeros(tokens, top_k, width, dtype=torch.float64, device=given.x_TD.device)
    for e in range(given.down_EDI.shape[0]):
        token, slot = (given.expert_TK == e).nonzero(as_tuple=True)
        h = rounded(given.x_TD[token]) @ given.gate_up_EFD.data[e].double().T
        if given.gate_up_bias_EF is not None:
            h = h + given.gate_up_bias_EF[e].double()
        y = rounded(ops.gated_activation.reference(h, given.activation)) @ given.down_EDI.data[e].double().T
        if given.down_bias_ED is not None:
            y = y + given.down_bias_ED[e].double()
        y_TKD[token, slot] = y * given.weight_TK[token, slot, None].double() * given.scaling
    return y_TKD.sum(1) if given.combined else y_TKD


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    """‖found − expected‖ / ‖expected‖; NaN, and anything where nothing should be, are infinitely far."""
    error, scale = (found.double() - expected).norm().item(), expected.norm().item()
    return error / scale if scale and error == error else (0.0 if error == 0 else float("inf"))


@pytest.fixture
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that was not written holds NaN, or far indices that rise: between two of them something lies."""

    def poisoned(allocate: Any) -> Any:
        def empty(*args: Any, **kwargs: Any) -> torch.Tensor:
            tensor = allocate(*args, **kwargs)
            if tensor.is_floating_point():
                return tensor.fill_(float("nan"))
            return tensor.copy_((torch.arange(tensor.numel()) % (1 << 20) + (1 << 28)).view(tensor.shape))

        return empty

    monkeypatch.setattr(torch, "empty", poisoned(torch.empty))
    monkeypatch.setattr(torch, "empty_like", poisoned(torch.empty_like))
    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned(torch.Tensor.new_empty))


def check(arguments: Arguments, tiles: Tiles) -> None:
    before = {name: x.clone() for name, x in named_tensors(arguments)}
    found = kernel.run(ExpertsCall(**arguments), tiles)
    assert found.dtype == arguments["x_TD"].dtype
    expected = exact(arguments)
    if not arguments.get("combined", True):  # rows without an expert are not defined
        there_TK = arguments["expert_TK"] >= 0
        found, expected = found[there_TK], expected[there_TK]
    error = distance(found, expected)
    assert error <= TOLERANCE[found.dtype], f"{tiles}: off by {error:.1e}"
    for name, value in named_tensors(arguments):
        assert torch.equal(before[name], value), f"writes over {name}"


# ---------------------------------------------------------------------------------------------------------------------
# In the interpreter
# ---------------------------------------------------------------------------------------------------------------------

TINY = Tile(16, 16, 4, 2)
SWAPPED = Tile(16, 16, 4, 2, swap=True, group=2)
INTERPRETED_TILES: dict[str, Tiles] = {
    "by token": SmallTiles(2, 4, 8, 4, ahead=1),
    "by pair": SmallTiles(4, 4, 16, 4, by_token=False),
    "by pair, shared": SmallTiles(8, 4, 16, 4, by_token=False, share=True),
    "by token, shared": SmallTiles(8, 4, 16, 4, share=True),
    "grouped": GroupedTiles(16, TINY, TINY),
    "grouped, swapped": GroupedTiles(16, SWAPPED, SWAPPED),
    "grouped, added": GroupedTiles(16, TINY, TINY, add=True),
    "matched": GroupedTiles(16, TINY, TINY, match=True),
    "matched, added": GroupedTiles(16, SWAPPED, TINY, match=True, add=True),
}
interpreted_tiles = pytest.mark.parametrize("tiles", INTERPRETED_TILES.values(), ids=INTERPRETED_TILES)


@interpreter
@interpreted_tiles
@pytest.mark.parametrize(
    "case",
    [
        {"tokens": 5, "num_experts": 6, "top_k": 3, "width": 40, "inner": 24},
        {"tokens": 4, "num_experts": 3, "top_k": 2, "width": 16, "inner": 16, "routing": "twice"},
        {
            "tokens": 3,
            "num_experts": 4,
            "top_k": 2,
            "width": 24,
            "inner": 20,
            "activation": "gelu_tanh",
            "biased": True,
            "scaling": 2.5,
        },
        {"tokens": 3, "num_experts": 4, "top_k": 2, "width": 16, "inner": 16, "combined": False, "scaling": 0.5},
        {"tokens": 4, "num_experts": 3, "top_k": 2, "width": 16, "inner": 16, "routing": "twice", "combined": False},
        {"tokens": 2, "num_experts": 4, "top_k": 1, "width": 16, "inner": 16, "routing": "nowhere"},
    ],
    ids=["plain", "an expert twice", "gelu, biased, scaled", "uncombined", "uncombined, an expert twice", "nowhere"],
)
def test_tiles_in_the_interpreter(tiles: Tiles, case: dict[str, Any], poison: None) -> None:
    check(draw(**case), tiles)


@interpreter
@interpreted_tiles
def test_fp16_in_the_interpreter(tiles: Tiles, poison: None) -> None:
    check(draw(3, 4, 2, 32, 16, torch.float16), tiles)


@interpreter
def test_many_rows_for_one_expert_in_the_interpreter(poison: None) -> None:
    for routing in ("one expert", "few experts"):
        check(draw(40, 3, 2, 16, 16, routing=routing), GroupedTiles(16, TINY, SWAPPED))
    check(draw(6, 3, 2, 16, 16, routing="one expert"), SmallTiles(8, 4, 16, 4, by_token=False, share=True))


@interpreter
def test_rows_of_a_wider_tensor_in_the_interpreter(poison: None) -> None:
    arguments = draw(5, 4, 2, 16, 16)
    arguments["x_TD"] = torch.cat([torch.full((5, 7), float("nan")), arguments["x_TD"]], dim=1)[:, 7:]
    check(arguments, SmallTiles(8, 4, 16, 4))
    check(arguments, GroupedTiles(16, TINY, TINY))


@interpreter
@pytest.mark.parametrize("mode", COMBINES)
def test_the_op_in_the_interpreter(mode: str, poison: None) -> None:
    for tokens in (0, 2, 9):
        arguments = draw(tokens, 4, 2, 16, 8)
        assert kernel.accepts(ExpertsCall(**arguments))
        assert distance(kernel.experts(ExpertsCall(**arguments, combine=mode)), exact(arguments)) <= 1e-5


def test_calls_are_planned_for_few_sizes() -> None:
    """Those of captured steps, among which a start goes through all."""
    captured = {*decode_sizes(512), *prefill_sizes(16384), *range(1, SMALL_TOKENS + 1)}
    planned = {tokens: padded_tokens(tokens) for tokens in range(1, 16385)}
    assert all(tokens <= size <= max(tokens + 7, 1.25 * tokens) for tokens, size in planned.items())
    assert set(planned.values()) <= captured and all(padded_tokens(size) == size for size in planned.values())


@interpreter
@pytest.mark.parametrize("one_kernel", [(256, 8192), (16,)], ids=["one kernel", "two kernels"])
@pytest.mark.parametrize("extra", [0, 4])
@pytest.mark.parametrize("routing", ["uniform", "few experts", "nowhere"])
def test_plan(
    one_kernel: tuple[int, ...], extra: int, routing: str, poison: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every pair that has an expert is in exactly one tile, with its weight, among pairs of the same expert."""
    monkeypatch.setattr(experts_plan, "ONE_KERNEL", one_kernel)
    rows, merged = 16, 0
    for tokens in (1, 33, 120):  # the last needs two programs
        arguments = draw(tokens, 9, 3, 4, 4, routing=routing)
        expert_N, weight_N = arguments["expert_TK"].flatten(), arguments["weight_TK"].flatten()
        call = ExpertsCall(**arguments, scaling=2.0)
        zeros = torch.empty(tokens, 301)
        plan = experts_plan.order_rows(call, rows, extra, {"DEPENDENT": False}, zeros)
        assert not zeros.any()
        num_tiles = int(plan.head[0])
        assert plan.head[1:].tolist() == [0, 0]
        assert plan.tile_3M[0, num_tiles:].tolist() == [-1] * (plan.max_tiles - num_tiles)
        seen: list[int] = []
        for expert, begin, end in plan.tile_3M[:, :num_tiles].T.tolist():
            assert 0 < end - begin <= rows + extra
            merged += end - begin > rows
            for row in range(begin, end):
                pair = int(plan.order_N[row])
                assert expert_N[pair] == expert
                assert plan.weight_N[row] == 2 * weight_N[pair]
                seen.append(pair)
        assert sorted(seen) == (expert_N >= 0).nonzero().flatten().tolist()
        least = sum(-(-int(count) // (rows + extra)) for count in torch.bincount(expert_N[expert_N >= 0]))
        assert least <= num_tiles <= plan.max_tiles
    assert bool(merged) == (extra > 0 and routing != "nowhere")


# ---------------------------------------------------------------------------------------------------------------------
# The choice
# ---------------------------------------------------------------------------------------------------------------------


def test_the_number_of_tiles_is_bounded() -> None:
    for num_pairs, num_experts, rows in ((1, 128, 16), (100, 4, 16), (512, 128, 16), (4096, 60, 128)):
        worst = 0
        for hit in range(1, min(num_pairs, num_experts) + 1):  # one row each, and the rest to the last
            worst = max(worst, hit - 1 + -(-(num_pairs - hit + 1) // rows))
        assert worst <= experts_plan.max_tiles(num_pairs, num_experts, rows)


MACHINES = {
    target: Machine(shared_bytes=shared, hopper=target == "sm_90") for target, shared in ahead_of_time.SHARED.items()
}


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_chosen_tiles_fit(machine: str, dtype: str) -> None:
    for tokens in (1, 7, 8, 9, 16, 17, 64, 65, 300, 2048, 100_000):
        for num_experts, width, inner, top_k in ((128, 2048, 768, 8), (60, 2048, 1408, 4), (8, 4096, 14336, 2)):
            shape = Shape(num_experts, width, inner, top_k, DTYPES[dtype])
            for combine in COMBINES:
                tiles = experts_tiles.choose(tokens, shape, combine, MACHINES[machine])
                if isinstance(tiles, SmallTiles):
                    assert tokens <= experts_tiles.SMALL_TOKENS
                    assert not (combine == "unfused" and tiles.by_token)
                elif isinstance(tiles, GroupedTiles):
                    assert tiles.add == (combine == "fused")
                    assert not tiles.match or tokens <= tiles.rows
                    for tile, operands in ((tiles.gate_up, 2), (tiles.down, 1)):
                        stage = (tiles.rows + operands * tile.columns) * tile.depth * DTYPES[dtype].itemsize
                        assert tile.stages >= 2
                        assert stage * tile.stages <= MACHINES[machine].shared_bytes
                else:
                    assert MACHINES[machine].hopper
                    assert isinstance(tiles, HopperTiles) and tiles.add == (combine == "fused")


def test_what_it_does_not_accept() -> None:
    arguments = draw(4, 4, 2, 16, 8)
    assert kernel.accepts(ExpertsCall(**arguments))
    for name, value in (
        ("x_TD", arguments["x_TD"].double()),
        ("x_TD", arguments["x_TD"].half()),
        ("x_TD", torch.randn(16, 4).T),
        ("expert_TK", arguments["expert_TK"].long()),
        ("weight_TK", arguments["weight_TK"].half()),
        ("gate_up_EFD", Weight.of(arguments["gate_up_EFD"].data.transpose(1, 2).contiguous().transpose(1, 2))),
    ):
        assert not kernel.accepts(ExpertsCall(**arguments | {name: value})), name


@pytest.mark.parametrize("function", [kernel.experts, ops.experts.reference])
def test_an_unknown_combine_mode_is_refused(function: Any) -> None:
    with pytest.raises(ValueError, match="'fussed' is none of fastest, fused"):
        function(ExpertsCall(**draw(4, 4, 2, 16, 8), combine="fussed"))


# ---------------------------------------------------------------------------------------------------------------------
# On a GPU
# ---------------------------------------------------------------------------------------------------------------------

GPU_TILES: dict[str, Tiles] = {
    "by token": SmallTiles(4, 8, 4, 4, ahead=3),
    "by pair, shared": SmallTiles(2, 4, 16, 8, by_token=False, share=True),
    "matched": GroupedTiles(64, Tile(64, 64, 4, 3, swap=True), Tile(64, 64, 4, 4, swap=True), match=True),
    "grouped 16, swapped": GroupedTiles(16, Tile(64, 64, 4, 5, swap=True), Tile(128, 64, 4, 5, swap=True)),
    "grouped 32": GroupedTiles(32, Tile(64, 64, 4, 4), Tile(128, 64, 4, 4)),
    "grouped 128, added": GroupedTiles(128, Tile(128, 64, 8, 3, group=8), Tile(256, 64, 8, 3, group=8), add=True),
    "hopper 64": HopperTiles(1, 1, 1, Tile(64, 64, 4, 8), Tile(128, 64, 4, 8)),
    "hopper 64, two programs": HopperTiles(1, 1, 2, Tile(64, 64, 4, 4), Tile(128, 64, 4, 4)),
    "hopper 128": HopperTiles(2, 2, 1, Tile(128, 64, 4, 4, group=4), Tile(256, 64, 4, 4, group=4)),
    "hopper 128+16": HopperTiles(2, 2, 1, Tile(128, 64, 4, 4, group=2), Tile(256, 64, 4, 4, group=2), extra=16),
    "hopper 64, added": HopperTiles(1, 1, 1, Tile(64, 64, 4, 8), Tile(128, 64, 4, 8), add=True),
    "hopper 128+16, added": HopperTiles(
        2, 2, 1, Tile(128, 64, 4, 4, group=2), Tile(256, 64, 4, 4, group=2), extra=16, add=True
    ),
    "hopper 256": HopperTiles(2, 4, 1, Tile(64, 64, 4, 4, group=2), Tile(128, 64, 4, 4, group=2)),
}
gpu_tiles = pytest.mark.parametrize("tiles", GPU_TILES.values(), ids=GPU_TILES)
ODD = {  # experts, top k, width, inner
    "E60": (60, 4, 256, 1408),
    "narrow": (16, 8, 704, 704),
    "small": (7, 2, 192, 48),
}


def usable(tiles: Tiles, arguments: Arguments) -> bool:
    """Whether these tiles can do this call here."""
    call = ExpertsCall(**arguments)
    if isinstance(tiles, HopperTiles):
        return kernel.machine_for(call).hopper
    return not isinstance(tiles, SmallTiles) or call.x_TD.shape[0] <= 64


@pytest.mark.gpu
@gpu_tiles
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("shape", ODD)
def test_odd_shapes_on_a_gpu(tiles: Tiles, dtype: str, shape: str, poison: None) -> None:
    num_experts, top_k, width, inner = ODD[shape]
    num_judged = 0
    for tokens in (1, 33, 222, 1500):
        for routing in ("uniform", "zipf", "one expert", "few experts", "nowhere"):
            activation = "gelu_tanh" if tokens == 33 else "silu"
            case = (tokens, num_experts, top_k, width, inner, DTYPES[dtype], "cuda", routing)
            arguments = draw(*case, activation=activation, scaling=1.5)
            if usable(tiles, arguments):
                check(arguments, tiles)
                num_judged += 1
    if not num_judged:
        pytest.skip("not for this machine or shape")


@pytest.mark.gpu
@gpu_tiles
def test_uncombined_on_a_gpu(tiles: Tiles, poison: None) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        for routing in ("uniform", "twice"):
            arguments = draw(40, 60, 4, 256, 704, dtype, "cuda", routing, combined=False, scaling=0.5)
            if not usable(tiles, arguments):
                pytest.skip("not for this machine")
            check(arguments, tiles)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", COMBINES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_op_on_a_gpu(mode: str, dtype: str, poison: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    for tokens in (0, 1, 8, 12, 50, 222, 1100):
        for biased in (False, True):
            arguments = draw(tokens, 60, 4, 256, 704, DTYPES[dtype], "cuda", biased=biased, scaling=2.0)
            wide = torch.full((tokens, 512), float("nan"), dtype=DTYPES[dtype], device="cuda")
            wide[:, 128:384] = arguments["x_TD"]
            for x_TD in (arguments["x_TD"], wide[:, 128:384], wide[:, 127:383]):
                given = (
                    arguments | {"x_TD": x_TD}
                    if x_TD is arguments["x_TD"]
                    else arguments | {"x_TD": x_TD.nan_to_num_()}
                )
                error = distance(kernel.experts(ExpertsCall(**given, combine=mode)), exact(given))
                assert error <= TOLERANCE[DTYPES[dtype]], f"{tokens} tokens, biased {biased}: off by {error:.1e}"


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["ordered", "unfused", "fastest"])
def test_same_bits_every_time(mode: str) -> None:
    for tokens in (1, 6, 14, 40, 200, 1500):
        arguments = draw(tokens, 60, 4, 512, 704, torch.bfloat16, "cuda")
        first = kernel.experts(ExpertsCall(**arguments, combine=mode))
        for _ in range(10):
            assert torch.equal(kernel.experts(ExpertsCall(**arguments, combine=mode)), first), f"{tokens} tokens"


@pytest.mark.gpu
def test_fused_is_no_less_exact() -> None:
    for tokens in (4, 40, 600):
        arguments = draw(tokens, 60, 8, 512, 704, torch.bfloat16, "cuda")
        error = {}
        for mode in ("fused", "unfused"):
            error[mode] = distance(kernel.experts(ExpertsCall(**arguments, combine=mode)), exact(arguments))
        assert error["fused"] <= error["unfused"] * 1.01


@pytest.mark.gpu
def test_graph_follows_its_inputs() -> None:
    for tokens in (1, 8, 16, 60, 130, 2000):
        arguments = draw(tokens, 60, 4, 512, 704, torch.bfloat16, "cuda")
        kernel.experts(ExpertsCall(**arguments))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = kernel.experts(ExpertsCall(**arguments))
        for routing in ("uniform", "zipf", "few experts", "nowhere"):
            changed = draw(tokens, 60, 4, 512, 704, torch.bfloat16, "cuda", routing)
            for name in ("x_TD", "weight_TK", "expert_TK"):
                arguments[name].copy_(changed[name])
            y.fill_(float("nan"))
            graph.replay()
            assert distance(y, exact(arguments)) <= 1e-2, f"{tokens} tokens, {routing}"


@pytest.mark.gpu
def test_calls_that_overlap() -> None:
    """A kernel starts before its predecessor has finished: results must not depend on what runs around it."""
    for tokens in (1, 7, 16, 60, 130, 700):
        calls = [draw(tokens, 60, 4, 512, 704, torch.bfloat16, "cuda") for _ in range(8)]
        expected = [exact(arguments) for arguments in calls]
        torch.cuda.synchronize()
        for _ in range(5):
            found = [kernel.experts(ExpertsCall(**arguments)) for arguments in calls for _ in range(3)]
            for i, y in enumerate(found):
                assert distance(y, expected[i // 3]) <= 1e-2, f"{tokens} tokens, call {i}"


# ---------------------------------------------------------------------------------------------------------------------
# Ahead of time
# ---------------------------------------------------------------------------------------------------------------------

TYPES = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.int32: "*i32",
    torch.int16: "*i16",
    torch.uint16: "*u16",
    torch.uint8: "*u8",
    torch.float8_e4m3fn: "*fp8e4nv",
}
OPTIONS = ("num_warps", "num_stages", "launch_pdl", "maxnreg")


class Recorder:
    """Stands in for a kernel and keeps its launches."""

    def __init__(self, function: Any, launches: list[tuple[Any, tuple[Any, ...], dict[str, Any]]]) -> None:
        self.function, self.launches = function, launches

    def __getitem__(self, grid: Any) -> Any:
        return lambda *args, **kwargs: self.launches.append((self.function, args, kwargs))


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    found: list[Any] = []
    for module, names in (
        (kernel, ("gate_up_small", "down_token", "down_pair", "gate_up_grouped", "down_grouped", "sum_rows")),
        (experts_plan, ("count_pairs", "place_pairs")),
    ):
        for name in names:
            monkeypatch.setattr(module, name, Recorder(getattr(module, name), found))
    return found


def compile_launch(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], target: str) -> Any:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    names = function.arg_names
    values = dict(zip(names, args)) | {name: x for name, x in kwargs.items() if name not in OPTIONS}
    plain = {param.name for param in function.params if param.do_not_specialize}
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    aligned: dict[tuple[int], Any] = {}
    for place, name in enumerate(names):
        value = values[name]
        if value is None or function.params[place].is_constexpr:
            signature[name], constants[name] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[name] = TYPES[value.dtype]
        elif isinstance(value, float):
            signature[name] = "fp32"
        elif isinstance(value, int):
            signature[name] = "i32"
        else:
            shape = ", ".join(map(str, value.block_shape))
            signature[name] = f"tensordesc<{TYPES[value.base.dtype][1:]}[{shape}],{value.layout!r}>"
        whole = isinstance(value, int) and value % 16 == 0 and name not in plain
        if signature[name].startswith("*") or (signature[name] == "i32" and whole):
            aligned[(place,)] = [["tt.divisibility", 16]]
    source = GluonASTSource if function.is_gluon() else ASTSource
    options = {name: x for name, x in kwargs.items() if name in OPTIONS}
    return triton.compile(
        source(function, signature, constants, aligned),
        target=GPUTarget(*ahead_of_time.TARGETS[target]),
        options=options,
    )


def call_of(tokens: int, dtype: torch.dtype, **options: Any) -> ExpertsCall:
    """Qwen3's widths with a few experts; nothing reads the values."""
    E, K, D, inner = 16, 8, 2048, 768
    bias = {}
    if options.pop("biased", False):
        bias = {
            "gate_up_bias_EF": torch.empty(E, 2 * inner, dtype=dtype),
            "down_bias_ED": torch.empty(E, D, dtype=dtype),
        }
    return ExpertsCall(
        torch.empty(tokens, D, dtype=dtype),
        torch.empty(tokens, K),
        torch.empty(tokens, K, dtype=torch.int32),
        Weight.of(torch.empty(E, 2 * inner, D, dtype=dtype)),
        Weight.of(torch.empty(E, D, inner, dtype=dtype)),
        "silu",
        **bias,
        **options,
    )


AHEAD: dict[str, tuple[int, str, str, bool]] = {
    "1 token": (1, "bf16", "fastest", False),
    "5 tokens, unfused, biased": (5, "fp16", "unfused", True),
    "3 tokens, fp32": (3, "fp32", "fastest", False),
    "12 tokens": (12, "bf16", "fastest", False),
    "13 tokens, fp32": (13, "fp32", "fastest", False),
    "40 tokens, fused, biased": (40, "bf16", "fused", True),
    "70 tokens": (70, "fp16", "fastest", False),
    "3000 tokens, fused": (3000, "bf16", "fused", False),
    "3000 tokens": (3000, "bf16", "fastest", False),
}


@pytest.mark.slow
@pytest.mark.parametrize("target", ahead_of_time.TARGETS)
@pytest.mark.parametrize("case", AHEAD)
def test_portable_kernels_compile_ahead_of_time(
    case: str, target: str, launches: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens, dtype, combine, biased = AHEAD[case]
    machine = Machine(shared_bytes=MACHINES[target].shared_bytes)
    monkeypatch.setattr(ahead_of_time.DEPENDENT_LAUNCH, lambda device: target in ("sm_90", "sm_100"))
    call = call_of(tokens, DTYPES[dtype], biased=biased)
    kernel.run(call, experts_tiles.choose(tokens, Shape(16, 2048, 768, 8, DTYPES[dtype]), combine, machine))
    assert len(launches) >= 2
    for function, args, kwargs in launches:
        compiled = compile_launch(function, args, kwargs, target)
        assert compiled.metadata.shared <= machine.shared_bytes, function.__name__


def hopper_tiles() -> Iterator[Any]:
    found = {
        "chosen": experts_tiles.choose(3000, Shape(128, 2048, 768, 8, torch.bfloat16), "fastest", MACHINES["sm_90"])
    }
    found |= {name: tiles for name, tiles in GPU_TILES.items() if isinstance(tiles, HopperTiles)}
    for name, tiles in found.items():
        yield pytest.param(tiles, id=name)


@pytest.mark.slow
@pytest.mark.parametrize("tiles", list(hopper_tiles()))
def test_hopper_kernels_compile_ahead_of_time(
    tiles: HopperTiles, launches: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from anabranch.kernels.triton import experts_hopper

    for name in ("gate_up_hopper", "down_hopper"):
        monkeypatch.setattr(experts_hopper, name, Recorder(getattr(experts_hopper, name), launches))
    monkeypatch.setattr(kernel, "hopper_kernels", lambda device: experts_hopper)
    monkeypatch.setattr(kernel, "num_processors", lambda device: 132)
    kernel.run_hopper(call_of(3000, torch.bfloat16), tiles)
    products = [launch for launch in launches if "hopper" in launch[0].__name__]
    assert len(products) == 2
    for function, args, kwargs in (launch for launch in launches if "pairs" in launch[0].__name__):
        compile_launch(function, args, kwargs, "sm_90")
    for function, args, kwargs in products:
        compiled = compile_launch(function, args, kwargs, "sm_90")
        assert compiled.metadata.shared <= 227 << 10
        assert "wgmma.mma_async" in compiled.asm["ptx"]
        assert "cp.async.bulk.tensor" in compiled.asm["ptx"]
