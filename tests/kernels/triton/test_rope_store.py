"""Head norms, rope and KV write in one Triton kernel: in the interpreter, on a GPU, ahead of time."""

from typing import Any

import pytest
import torch

from anabranch import ops
from anabranch.ops import RopeStoreCall

pytest.importorskip("triton")
from anabranch.conformance.judge import copy, faults
from anabranch.kernels.triton import rope_store as kernel
from tests.kernels.triton import ahead_of_time
from tests.kernels.triton.ahead_of_time import compile_for, recorded
from tests.kernels.triton.places import dtypes, everywhere, interpreter

GEOMETRIES: dict[str, dict[str, Any]] = {
    "qwen3": {"H": 32, "G": 4, "D": 128, "F": 64, "norm": "head"},
    "qwen1.5": {"H": 16, "G": 16, "D": 128, "F": 64},
    "gemma, sliding": {"H": 16, "G": 8, "D": 256, "F": 128, "norm": "head", "v_norm": True},
    "gemma, full": {"H": 16, "G": 2, "D": 512, "F": 256, "norm": "head", "v_norm": True, "value_is_key": True},
    "olmoe": {"H": 16, "G": 16, "D": 128, "F": 64, "norm": "all"},
    "partial": {"H": 5, "G": 3, "D": 80, "F": 10, "norm": "head"},
    "partial, all": {"H": 6, "G": 3, "D": 40, "F": 12, "norm": "all"},
    "small": {"H": 3, "G": 1, "D": 64, "F": 32, "v_norm": True},
}
GROUPS = {
    "qwen3": (4, 10),
    "qwen1.5": (1, 3),
    "gemma, full": (2, 10),
    "olmoe": (1, 3),
    "partial": (4, 4),
    "small": (32, 6),
}
"""Many tokens: those of a group, and its programs."""
PAGES, PAGE_SIZE = 6, 16


def draw(
    tokens: int,
    dtype: torch.dtype,
    H: int,
    G: int,
    D: int,
    F: int,
    norm: str = "none",
    v_norm: bool = False,
    value_is_key: bool = False,
    pages: torch.dtype | None = None,
) -> dict[str, Any]:
    angle = 100 * torch.rand(tokens, F)
    qkv = torch.randn(tokens, H + 2 * G, D).to(dtype)
    k_TGD = qkv[:, H : H + G]
    width = {"none": (0, 0), "head": (D, D), "all": (H * D, G * D)}[norm]
    weights = [torch.rand(n).to(dtype) if n else None for n in width]
    slot_T = torch.randperm(max(tokens, PAGES * PAGE_SIZE))[:tokens]
    slot_T[slot_T >= PAGES * PAGE_SIZE] = -1
    slot_T[1::5] = -1
    return {
        "q_THD": qkv[:, :H],
        "k_TGD": k_TGD,
        "v_TGD": k_TGD if value_is_key else qkv[:, H + G :],
        "cos_TF": angle.cos(),
        "sin_TF": angle.sin(),
        "q_weight": weights[0],
        "k_weight": weights[1],
        "v_norm": v_norm,
        "eps": 0.1,
        "k_PSGD": torch.randn(PAGES, PAGE_SIZE, G, D).to(pages or dtype),
        "v_PSGD": torch.randn(PAGES, PAGE_SIZE, G, D).to(pages or dtype),
        "slot_T": slot_T,
        "k_scale": 1.0 if pages is None else 0.004,  # some are out of range
        "v_scale": 1.0 if pages is None else 0.3,
    }


def judge(arguments: dict[str, Any], dtype: torch.dtype, device: str) -> None:
    arguments = copy(arguments, torch.device(device))
    assert kernel.accepts(RopeStoreCall(**arguments))
    assert faults(ops.rope_store, kernel.rope_store, {"call": RopeStoreCall(**arguments)}, dtype) == []


@everywhere
def test_samples(device: str) -> None:
    for dtype in dtypes(device):
        for _, arguments in ops.rope_store.samples(dtype, torch.Generator().manual_seed(0)):
            judge(arguments["call"]._asdict(), dtype, device)


@everywhere
@pytest.mark.parametrize("pages", [None, torch.float8_e4m3fn])
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_geometries(geometry: str, pages: torch.dtype | None, device: str) -> None:
    # The interpreter takes milliseconds for each program.
    for dtype in (torch.float32,) if device == "cpu" else dtypes(device):
        for tokens in (2,) if device == "cpu" else (1, 3, 64, 65, 300):
            judge(draw(tokens, dtype, **GEOMETRIES[geometry], pages=pages), dtype, device)


def draw_many(tokens: int, dtype: torch.dtype, geometry: str) -> dict[str, Any]:
    """There are more tokens behind, with slots of their own: what is done for one of them is seen."""
    arguments = draw(tokens + 8, dtype, **GEOMETRIES[geometry])
    arguments["slot_T"] = torch.randperm(PAGES * PAGE_SIZE)[: tokens + 8]
    arguments["slot_T"][2:tokens:3] = -1
    return {name: value[:tokens] if "_T" in name else value for name, value in arguments.items()}


@everywhere
@pytest.mark.parametrize("geometry", GROUPS)
def test_many_tokens_share_programs(geometry: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "FEW_TOKENS", 0)
    group = GROUPS[geometry][0]
    for tokens in {1, group + group // 2, 2 * group, 2 * group + 1}:
        judge(draw_many(tokens, torch.float32, geometry), torch.float32, device)


@pytest.mark.parametrize("geometry", GROUPS)
def test_a_group_leaves_no_program_half_empty(geometry: str) -> None:
    H, G, D, F = (GEOMETRIES[geometry][name] for name in "HGDF")
    norm = GEOMETRIES[geometry].get("norm", "none")
    group, programs, constants = kernel.choose_constants(kernel.MANY_ELEMENTS, True, H, G, D, F, norm)
    assert (group, programs) == GROUPS[geometry]
    assert 2 * group * (H + 2 * G) > programs * constants["B"]
    _, few_programs, few = kernel.choose_constants(kernel.FEW_ELEMENTS, False, H, G, D, F, norm)
    assert few_programs == -(-H // few["B"]) + 2 * -(-G // few["B"])


@interpreter
@pytest.mark.parametrize("geometry", GROUPS)
def test_bits_do_not_depend_on_the_group(geometry: str, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = draw_many(5, torch.float16, geometry)
    found = []
    for few in (0, 5):
        monkeypatch.setattr(kernel, "FEW_TOKENS", few)
        given = copy(arguments)
        found.append((kernel.rope_store(RopeStoreCall(**given)), given["k_PSGD"], given["v_PSGD"]))
    assert all(torch.equal(many, few) for many, few in zip(*found, strict=True))


@everywhere
def test_padding_alone_writes_nothing(device: str) -> None:
    arguments = copy(draw(3, torch.float32, **GEOMETRIES["partial"]), torch.device(device))
    arguments["slot_T"].fill_(-1)
    before = arguments["k_PSGD"].clone(), arguments["v_PSGD"].clone()
    kernel.rope_store(RopeStoreCall(**arguments))
    assert torch.equal(arguments["k_PSGD"], before[0]) and torch.equal(arguments["v_PSGD"], before[1])


@everywhere
def test_heads_are_rounded_before_they_turn(device: str) -> None:
    """As the reference does it: to the bit, but for the last one of a few."""
    arguments = copy(draw(2, torch.float16, **GEOMETRIES["partial"]), torch.device(device))
    same = kernel.rope_store(RopeStoreCall(**arguments)) == ops.rope_store.reference(RopeStoreCall(**copy(arguments)))
    assert same.float().mean() > 0.97


@everywhere
def test_what_fp8_cannot_hold(device: str) -> None:
    """Infinities and what is out of range become ±448; NaN stays, so that the request ends with an error."""
    arguments = draw(2, torch.float32, **GEOMETRIES["small"] | {"v_norm": False}, pages=torch.float8_e4m3fn)
    arguments["v_TGD"][0, 0, :6] = torch.tensor([float("inf"), -float("inf"), 448 * 0.3, 1e10, float("nan"), -135.0])
    arguments["slot_T"][0] = 0
    arguments = copy(arguments, torch.device(device))
    kernel.rope_store(RopeStoreCall(**arguments))
    found = arguments["v_PSGD"][0, 0, 0, :6].float().tolist()
    assert found[:4] + found[5:] == [448, -448, 448, 448, -448] and found[4] != found[4]
    assert arguments["k_PSGD"].float().isfinite().all()


def test_what_it_does_not_accept() -> None:
    arguments = draw(4, torch.float32, **GEOMETRIES["qwen3"])
    assert kernel.accepts(RopeStoreCall(**arguments))
    for name, value in (
        ("q_THD", arguments["q_THD"].double()),
        ("k_TGD", arguments["k_TGD"].half()),
        ("q_THD", torch.randn(4, 128, 32).transpose(1, 2)),
        ("cos_TF", arguments["cos_TF"].half()),
        ("k_weight", None),
        ("k_PSGD", arguments["k_PSGD"].half()),
        ("k_PSGD", arguments["k_PSGD"].to(torch.float8_e4m3fn)),
        ("v_PSGD", torch.zeros(PAGES, 2, PAGE_SIZE, 4, 128)[:, 0]),
    ):
        assert not kernel.accepts(RopeStoreCall(**arguments | {name: value})), name


@pytest.mark.gpu
def test_pages_beyond_two_gigabytes() -> None:
    """Offsets have 64 bits: 3 · 2^30 elements lie before the page that is written."""
    arguments = copy(draw(2, torch.bfloat16, 4, 1, 128, 64), torch.device("cuda"))
    num_pages = (3 << 30) // (PAGE_SIZE * 128) + 2
    k_PSGD, v_PSGD = torch.empty(2, num_pages, PAGE_SIZE, 1, 128, dtype=torch.bfloat16, device="cuda")
    k_PSGD[-2:].zero_(), v_PSGD[-2:].zero_()
    arguments["slot_T"].copy_(torch.tensor([num_pages * PAGE_SIZE - 1, -1]))
    kernel.rope_store(RopeStoreCall(**arguments | {"k_PSGD": k_PSGD, "v_PSGD": v_PSGD}))
    arguments["slot_T"].copy_(torch.tensor([PAGES * PAGE_SIZE - 1, -1]))
    ops.rope_store.reference(RopeStoreCall(**arguments))
    assert torch.equal(v_PSGD[-1, -1], arguments["v_PSGD"][-1, -1])
    torch.testing.assert_close(k_PSGD[-1, -1], arguments["k_PSGD"][-1, -1])
    for pages in (k_PSGD, v_PSGD):
        assert not pages[-2].any() and not pages[-1, :-1].any()


@pytest.mark.gpu
def test_a_graph_follows_its_inputs() -> None:
    for tokens in (1, 40):
        arguments = copy(draw(tokens, torch.bfloat16, **GEOMETRIES["qwen3"]), torch.device("cuda"))
        kernel.rope_store(RopeStoreCall(**arguments))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            q_THD = kernel.rope_store(RopeStoreCall(**arguments))
        for _ in range(3):
            changed = draw(tokens, torch.bfloat16, **GEOMETRIES["qwen3"])
            for name in ("q_THD", "k_TGD", "v_TGD", "cos_TF", "sin_TF", "slot_T"):
                arguments[name].copy_(changed[name])
            expected = copy(arguments)
            expected_q_THD = ops.rope_store.reference(RopeStoreCall(**expected))
            q_THD.fill_(float("nan"))
            graph.replay()
            for found, wanted in (
                (q_THD, expected_q_THD),
                (arguments["k_PSGD"], expected["k_PSGD"]),
                (arguments["v_PSGD"], expected["v_PSGD"]),
            ):
                assert (found.double() - wanted.double()).norm() <= 1e-2 * wanted.double().norm()


@pytest.mark.slow
@pytest.mark.parametrize("geometry", ["qwen3", "gemma, full", "partial"])
def test_fp8_pages_compile_ahead_of_time(geometry: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead_of_time.DEPENDENT_LAUNCH, lambda device: True)
    for tokens in (1, 100):
        with recorded(kernel, "rope_store_kernel") as launches:
            drawn = draw(tokens, torch.bfloat16, **GEOMETRIES[geometry], pages=torch.float8_e4m3fn)
            kernel.rope_store(RopeStoreCall(**drawn))
        compiled = compile_for("sm_90", launches[0])
        assert ahead_of_time.resources(compiled)["LOCAL"] == 0
        assert "cvt.rn.satfinite.e4m3x2.f32" in compiled.asm["ptx"]


@pytest.mark.slow
@pytest.mark.parametrize("target", ahead_of_time.TARGETS)
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_compiles_ahead_of_time(geometry: str, target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    dependent = target in ahead_of_time.DEPENDENT
    monkeypatch.setattr(ahead_of_time.DEPENDENT_LAUNCH, lambda device: dependent)
    for tokens in (1, 100):
        with recorded(kernel, "rope_store_kernel") as launches:
            kernel.rope_store(RopeStoreCall(**draw(tokens, torch.bfloat16, **GEOMETRIES[geometry])))
        compiled = compile_for(target, launches[0])
        if target == "sm_90":
            assert ahead_of_time.resources(compiled)["LOCAL"] == 0
            if not geometry.startswith(("partial", "small")):
                assert ahead_of_time.loads(compiled)["wide"] >= 5, "two halves of q and k, and v"
            if (geometry, tokens) == ("qwen3", 100):
                assert ahead_of_time.loads(compiled)["narrow"] == 3, "slots of a row of keys and two of values, once"
        if dependent:
            # Every kind of program waits before it lets the next kernel in: attention relies on it.
            order = [part.split(";")[0] for part in compiled.asm["ptx"].split("griddepcontrol.")[1:]]
            assert order in (["wait", "launch_dependents"] * 2, ["wait", "launch_dependents"] * 3)
