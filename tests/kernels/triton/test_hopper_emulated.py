"""The kernels for Hopper on the CPU (see machine), against fp64 or references: what their GPU tests check, with small
shapes, several orders of events, memory that holds NaN until it is written, and no address outside of a tensor."""

import importlib
from dataclasses import replace
from typing import Any

import pytest
import torch

from anabranch import ops
from anabranch.formats import Grouped
from anabranch.ops.weight import BY_INPUT, Weight

pytest.importorskip("triton")
from triton.experimental import gluon

from anabranch.conformance.judge import copy, poisoned_memory, same_bits
from anabranch.kernels.triton import attention, attention_tiles, experts_ring, gated_delta
from anabranch.kernels.triton.attention_tiles import HopperTile
from anabranch.kernels.tuning.experts_tiles import HopperTiles, PackedTiles, Shape, Tile, Tiles, choose_few
from tests.kernels.emulation.h200 import hopper
from tests.kernels.emulation.machine import emulated
from tests.kernels.triton import test_attention, test_experts, test_gated_delta, test_linear, test_quantized_experts
from tests.kernels.triton.test_experts import TOLERANCE, distance, draw, exact, poison
from tests.kernels.triton.test_quantized_experts import FP8_TILES, MXFP4, in_fp8, quantized

__all__ = ["hopper", "poison"]
pytestmark = pytest.mark.usefixtures("hopper")
INT4 = Grouped("int4", 1, 128, "bfloat16")
INT4_ZERO = Grouped("int4", 1, 128, "float16", zero=True)
FP8 = Grouped("fp8", 128, 128)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


# ---------------------------------------------------------------------------------------------------------------------
# Experts
# ---------------------------------------------------------------------------------------------------------------------


def hopper_tiles(columns: int = 128, groups: int = 2, slabs: int = 2, **options: Any) -> HopperTiles:
    down = Tile(256 if options.get("extra") else 2 * columns, 64, 4, 4)
    return HopperTiles(groups, slabs, 1, Tile(columns, 64, 4, 3, group=2), down, **options)


DENSE: dict[str, tuple[HopperTiles, dict[str, Any]]] = {
    "two warpgroups": (hopper_tiles(), {}),
    "a warpgroup with two slabs": (hopper_tiles(groups=1), {"routing": "few experts"}),
    "two with two slabs each": (hopper_tiles(64, slabs=4), {"routing": "one expert", "tokens": 200}),
    "extra rows": (hopper_tiles(extra=16), {"routing": "one expert", "tokens": 140, "E": 2}),
    "extra rows, narrow blocks": (hopper_tiles(64, extra=16), {"tokens": 137, "E": 1, "K": 1}),
    "a narrow last block": (hopper_tiles(), {"inner": 192}),
    "columns that are not there": (hopper_tiles(), {"D": 320, "inner": 48}),
    "added": (hopper_tiles(add=True), {"dtype": torch.float16}),
    "no tokens for any expert": (hopper_tiles(), {"routing": "nowhere"}),
}


def arguments_of(
    tokens: int = 70, E: int = 3, K: int = 2, D: int = 128, inner: int = 64, dtype: Any = torch.bfloat16, **options: Any
) -> dict[str, Any]:
    return draw(tokens, E, K, D, inner, dtype, **options)


@pytest.mark.parametrize("case", DENSE)
def test_dense_experts(case: str, poison: None) -> None:
    tiles, options = DENSE[case]
    for seed in range(2):
        with emulated(seed):
            test_experts.check(arguments_of(**options), tiles)


def check_quantized(arguments: dict[str, Any], format: Grouped, tiles: Tiles, seed: int) -> None:
    with emulated(seed):
        test_quantized_experts.check(arguments, format, tiles)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("scale", ["float32", "bfloat16", "uint8"])
def test_fp8_experts(scale: str, groups: int, poison: None) -> None:
    assert isinstance(FP8_TILES, HopperTiles)
    tiles = replace(FP8_TILES, groups=groups, slabs=groups)
    check_quantized(arguments_of(D=384, inner=256), Grouped("fp8", 128, 128, scale), tiles, groups)


PACKED = [
    PackedTiles(32, 6),
    PackedTiles(64, 5, group=4),
    PackedTiles(16, 8, split=True),
    PackedTiles(32, 4, split=True),
]


@pytest.mark.parametrize("tiles", PACKED, ids=str)
@pytest.mark.parametrize("format", [INT4, INT4_ZERO], ids=["symmetric", "zero points"])
def test_int4_experts(format: Grouped, tiles: PackedTiles, poison: None) -> None:
    arguments = arguments_of(40, D=640, inner=128)
    check_quantized({**arguments, "x_TD": arguments["x_TD"] + 0.5}, format, tiles, tiles.rows)


@pytest.mark.parametrize("tiles", [*PACKED, PackedTiles(128, 4, group=4)], ids=str)
def test_mxfp4_experts(tiles: PackedTiles, poison: None) -> None:
    """Widths of gpt-oss are like these: the last stage and the last columns are not whole."""
    biased: dict[str, Any] = {"biased": True, "activation": "clamped_swiglu"}
    check_quantized(arguments_of(40, D=192, inner=320, **biased), MXFP4, tiles, 0)
    check_quantized(arguments_of(3, D=64, inner=192), MXFP4, tiles, 1)


@pytest.mark.parametrize("format", [INT4, MXFP4], ids=["int4", "mxfp4"])
def test_experts_that_move(format: Grouped, poison: None) -> None:
    """All tensors of the weights, scales in another order too: as ranks exchange experts (moe/rebalance)."""
    arguments, _ = test_quantized_experts.quantize(arguments_of(40, E=4, D=256, inner=128), format)
    call = ops.ExpertsCall(**arguments)
    order = torch.tensor([2, 0, 3, 1])
    for weight in (call.gate_up_EFD, call.down_EDI):
        assert BY_INPUT in weight.tensors
        for tensor in weight.tensors.values():
            tensor.copy_(tensor[order])
    dense = {name: Weight.of(arguments[name].dense(torch.float32)) for name in ("gate_up_EFD", "down_EDI")}
    with emulated(0):
        found = test_quantized_experts.kernel.run(call, PackedTiles(16, 8, split=True))
    assert distance(found, exact(arguments | dense)) <= TOLERANCE[found.dtype]


FEW = [
    (INT4, 8, 128, 128, 1),
    (replace(INT4, scale="float16"), 3, 384, 128, 2),
    (MXFP4, 4, 160, 96, 2),
    (MXFP4, 1, 96, 320, 3),
    (FP8, 6, 272, 144, 1),
    (replace(FP8, scale="bfloat16"), 2, 528, 80, 3),
]


@pytest.mark.parametrize(("format", "top_k", "D", "inner", "tokens"), FEW)
def test_experts_of_a_few_tokens(format: Grouped, top_k: int, D: int, inner: int, tokens: int, poison: None) -> None:
    tiles = choose_few(Shape(8, D, inner, top_k, torch.bfloat16, format.name))
    assert tiles is not None
    biased = tokens == 1
    options = {"biased": biased, "activation": "clamped_swiglu" if biased else "silu", "scaling": 1.7}
    check_quantized(arguments_of(tokens, 8, top_k, D, inner, **options), format, tiles, tokens)


def test_a_kernel_without_its_wait_is_found(monkeypatch: pytest.MonkeyPatch, poison: None) -> None:
    """The emulation has to show what a GPU may hide: here products that do not wait for their stage."""

    @gluon.jit
    def no_wait(full, step, GATHERED):
        return step % full.shape[0]

    monkeypatch.setattr(experts_ring, "wait_for_stage", no_wait)

    def fails(seed: int) -> bool:
        try:
            with emulated(seed):
                test_experts.check(arguments_of(D=320), hopper_tiles())
        except (AssertionError, RuntimeError):
            return True
        return False

    assert any(fails(seed) for seed in range(5))


# ---------------------------------------------------------------------------------------------------------------------
# Projections
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "D", "F", "dtype", "out_dtype"),
    [
        (5, 1000, 130, torch.bfloat16, torch.float32),
        (17, 520, 72, torch.float16, torch.bfloat16),
        (32, 264, 64, torch.bfloat16, torch.bfloat16),
    ],
)
def test_dense_linear(tokens: int, D: int, F: int, dtype: torch.dtype, out_dtype: torch.dtype) -> None:
    kernel = importlib.import_module("anabranch.kernels.triton.linear_hopper")
    x_TD, weight_FD, bias_F = test_linear.draw(tokens, D, F, True, dtype, "cpu")
    assert kernel.takes(x_TD, weight_FD)
    found = []
    for seed in range(2):
        with emulated(seed), poisoned_memory():
            found.append(kernel.run(x_TD, weight_FD, bias_F, out_dtype))
        assert not kernel.counts(x_TD.device).any(), "the next launch counts from zero"
    limit = 3e-5 if out_dtype == torch.float32 else ops.linear.tolerance[out_dtype]
    assert test_linear.distance(found[0], x_TD, weight_FD, bias_F) <= limit
    assert torch.equal(*found), "sums depend on who is last"


@pytest.mark.parametrize(("tokens", "D", "F"), [(5, 640, 200), (17, 384, 72), (60, 1280, 72), (100, 256, 130)])
def test_fp8_linear(tokens: int, D: int, F: int) -> None:
    kernel = importlib.import_module("anabranch.kernels.triton.linear_hopper_fp8")
    weight, bias_F = quantized(Weight.of(torch.randn(F, D) * D**-0.5), FP8), torch.randn(F).bfloat16()
    x_TD = torch.randn(tokens, D).bfloat16()
    assert kernel.takes(x_TD, weight)
    wanted = in_fp8(x_TD) @ weight.dense(torch.float64).T + bias_F.double()
    with emulated(tokens), poisoned_memory():
        assert distance(kernel.run(x_TD, weight, bias_F, torch.bfloat16), wanted) <= TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("format", [INT4, replace(INT4, zero=True)], ids=["symmetric", "zero points"])
def test_int4_linear(format: Grouped) -> None:
    kernel = importlib.import_module("anabranch.kernels.triton.linear_hopper_packed")
    for tokens, D, F, tile in ((5, 640, 100, (16, 4)), (40, 1280, 72, (32, 2)), (70, 256, 64, (64, 4))):
        weight, bias_F = quantized(Weight.of(torch.randn(F, D) * D**-0.5), format), torch.randn(F).bfloat16()
        x_TD = (torch.randn(tokens, D) + 0.5).bfloat16()
        wanted = x_TD.double() @ weight.dense(torch.float64).T + bias_F.double()
        with emulated(tokens), poisoned_memory():
            found = kernel.run(x_TD, weight, bias_F, x_TD.new_empty(tokens, F), tile)
        assert distance(found, wanted) <= TOLERANCE[torch.bfloat16], (tokens, D, F, tile)


# ---------------------------------------------------------------------------------------------------------------------
# Mixers
# ---------------------------------------------------------------------------------------------------------------------

ATTENTION: dict[str, dict[str, Any]] = {
    "a prompt": {"requests": [(150, 150)], "dim": 64, "page_size": 16},
    "chunks": {"requests": [(70, 300), (3, 3), (0, 0), (40, 40)], "dim": 128, "page_size": 16, "padding": 3},
    "a window": {"requests": [(90, 290), (40, 41)], "dim": 64, "page_size": 8, "window": 50, "max_query": 0},
    "large pages": {"requests": [(20, 200)], "dim": 128, "page_size": 64, "heads": 3, "kv_heads": 1},
}


@pytest.mark.parametrize("case", ATTENTION)
def test_prompt_attention(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_tiles, "prefill_override", HopperTile(64, 2))
    monkeypatch.setattr(attention, "counts_of", lambda G, device: torch.zeros(64, G, dtype=torch.int32))
    with emulated(len(case)):
        test_attention.judge(test_attention.draw(dtype=torch.bfloat16, **ATTENTION[case]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("cut", [False, True])
def test_delta_net(dtype: torch.dtype, cut: bool) -> None:
    """Rows, columns, pages, cuts and masks are those of the portable kernel, and nothing is read that others left."""
    requests = [(70, 80), (1, 5), (65, 65), (3, 3)]
    call = test_gated_delta.draw(requests, dtype, K=128, V=64, key_heads=1, heads=1, padding=2)
    spare = call.page_R.max() + 1 + torch.arange(4, dtype=torch.int32)
    pages = {}
    for name in ("conv_PLC", "state_PHKV"):
        given = getattr(call, name)
        pages[name] = torch.full((int(spare[-1]) + 1, *given.shape[1:]), float("nan"), dtype=given.dtype)
        pages[name][: len(given)] = given[: len(pages[name])]
    cuts = torch.tensor([66, 0, 0, 1], dtype=torch.int32)
    call = call._replace(**pages, cut_R=cuts if cut else None, cut_page_R=spare)
    with emulated(1):
        found = test_gated_delta.compute(call)
    with emulated(1), pytest.MonkeyPatch.context() as patched:
        patched.setattr(gated_delta, "gluon_kernels", lambda name, device: None)
        wanted = test_gated_delta.compute(call)
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one.isnan(), other.isnan())
        assert distance(one.nan_to_num(), other.nan_to_num().double()) <= 1e-2


@pytest.mark.parametrize("name", ["attention", "latent_attention", "linear", "logprobs", "route"])
def test_results_do_not_depend_on_the_order_of_programs(name: str) -> None:
    """Programs that share a sum: whoever is last adds up the same."""
    op = ops.OPS[name]
    for label, arguments in op.samples(torch.bfloat16, torch.Generator().manual_seed(0)):
        accepts = op.kernels["triton"].accepts
        if accepts is not None and not accepts(**arguments):
            continue
        found = []
        for seed in range(3):
            with emulated(seed), poisoned_memory():
                y = op.kernels["triton"].function(**copy(arguments))
            found.append([one for one in (y if isinstance(y, tuple) else (y,)) if one is not None])
        for others in found[1:]:
            assert all(map(same_bits, found[0], others)), label
