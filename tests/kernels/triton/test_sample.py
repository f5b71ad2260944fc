"""Sampling in Triton against its reference, token by token: nothing is left to rounding, so none may differ. In the
interpreter, on a GPU, ahead of time."""

import functools
from typing import Any

import pytest
import torch

from anabranch import ops, platforms
from anabranch.ops import SampleCall

pytest.importorskip("triton")
import triton
import triton.language as tl

from anabranch.conformance.judge import copy, poisoned_memory
from anabranch.kernels.triton import exact as kernel_exact
from anabranch.kernels.triton import sample as kernel
from anabranch.ops import exact
from anabranch.ops.sample import NOT_FINITE
from tests.kernels.triton import ahead_of_time
from tests.kernels.triton.ahead_of_time import compile_for, recorded
from tests.kernels.triton.places import dtypes, everywhere, interpreter
from tests.ops.sampling_rows import sampling_rows
from tests.ops.test_sample import allowed

SETTINGS: dict[str, dict[str, int]] = {
    "as shipped": {},
    "several tiles and chunks": {"TILE": 256, "GATHER_TILE": 128, "NUM_SCANNING": 10, "NUM_GATHERING": 20, "STEP": 256},
    "no lists": {"LIST": 0, "PLACES": 0},
}
settings = pytest.mark.parametrize("setting", SETTINGS)


@pytest.fixture
def set_constants(monkeypatch: pytest.MonkeyPatch, setting: str) -> None:
    for name, value in SETTINGS[setting].items():
        monkeypatch.setattr(kernel, name, value)


def check(arguments: dict[str, Any], device: str) -> None:
    given = copy(arguments, torch.device(device))
    assert kernel.accepts(SampleCall(**given))
    with poisoned_memory():
        found = kernel.sample(SampleCall(**given))
    assert found.dtype == torch.int64
    expected = ops.sample.reference(SampleCall(**copy(arguments) | {"logits_RV": arguments["logits_RV"].float()}))
    wrong = (found.cpu() != expected).nonzero()[:, 0].tolist()
    assert not wrong, (len(wrong), [only(arguments, [r]) for r in wrong[:2]])


def only(arguments: dict[str, Any], rows: list[int]) -> dict[str, Any]:
    return {name: x if x is None else x[rows] for name, x in arguments.items()}


@everywhere
def test_samples(device: str) -> None:
    for label, arguments in ops.sample.samples(torch.float32, torch.Generator().manual_seed(0)):
        few = label.endswith("no truncation") and not label.startswith(("V8200", "not finite,"))
        if device == "cuda" or label == "no requests" or few:  # the interpreter takes half a second for other rows
            check(arguments["call"]._asdict(), device)


HARD: dict[str, dict[str, float]] = {
    "top_k": {"top_k": 3},
    "top_k just beyond all stretches": {"top_k": 5},
    "top_k in ties": {"top_k": 60},
    "top_k beyond all stretches": {"top_k": 200},
    "top_p": {"top_p": 0.4},
    "a little top_p": {"top_p": 0.01},
    "top_p, half of the mass far below": {"top_p": 0.7},
    "top_p, min_p": {"top_p": 0.9, "min_p": 0.3},
    "min_p, top_p": {"top_p": 0.3, "min_p": 0.05},
    "min_p": {"min_p": 0.2},
    "top_k, top_p": {"top_k": 60, "top_p": 0.5},
    "top_k beyond all stretches, top_p, min_p": {"top_k": 250, "top_p": 0.95, "min_p": 0.05},
}
TEMPERATURE = 1.5


@functools.cache
def edge_rows(vocabulary: int = 300) -> tuple[dict[str, Any], list[tuple[int, bool]]]:
    """Rows with many ties, three for each of HARD, with seeds that show where the cut is: the last token that is
    allowed wins among those; the first that is not would win with them, or even wins among all. Also these tokens, and
    whether they are allowed."""
    generator = torch.Generator().manual_seed(0)
    rows: list[tuple[torch.Tensor, int, float, float, int]] = []
    tokens: list[tuple[int, bool]] = []
    for label, case in HARD.items():
        asked = int(case.get("top_k", 0)), case.get("top_p", 1.0), case.get("min_p", 0.0)
        logits = (4 * torch.randn(vocabulary, generator=generator)).round() / 2
        if label == "top_k just beyond all stretches":
            logits[[0, 140, 280]] = logits.max() + 2  # one in each, and the others below all three
        elif label == "top_p, half of the mass far below":
            logits = torch.full((vocabulary,), -6 * TEMPERATURE)
            logits[0] = 0
        else:
            logits[:64] += 5  # the best in one stretch, some mass in the others
        number = len(allowed(logits.tolist(), TEMPERATURE, *asked))
        ranked = torch.sort(logits, descending=True, stable=True).indices
        for winner, among in ((number - 1, number), (number, number + 1), (number, vocabulary)):
            if winner < 100 or among < vocabulary:  # else the token is too improbable
                rows.append((logits, *asked, seed_for(logits, ranked[:among], winner)))
                tokens.append((int(ranked[winner]), winner < number))
    logits, top_k, top_p, min_p, seed = zip(*rows)
    arguments = {
        "logits_RV": torch.stack(logits),
        "temperature_R": torch.full((len(rows),), TEMPERATURE),
        "top_k_R": torch.tensor(top_k).int(),
        "top_p_R": torch.tensor(top_p),
        "min_p_R": torch.tensor(min_p),
        "seed_R": torch.tensor(seed),
        "position_R": torch.full((len(rows),), 5),
    }
    return arguments, tokens


def seed_for(logits: torch.Tensor, token_N: torch.Tensor, winner: int) -> int:
    """With which one of these tokens wins among them."""
    for begin in range(0, 400_000, 2000):
        seed = torch.arange(begin, begin + 2000)
        noisy = logits[token_N] / TEMPERATURE + exact.gumbel(seed[:, None], torch.tensor(5), token_N)
        found = (noisy.argmax(1) == winner).nonzero()
        if found.numel():
            return begin + int(found[0])
    raise AssertionError("no seed lets this token win")


@everywhere
@settings
def test_where_the_cut_is(setting: str, device: str, set_constants: None) -> None:
    arguments, tokens = edge_rows()
    for r, (found, (token, is_allowed)) in enumerate(
        zip(ops.sample.reference(SampleCall(**arguments)).tolist(), tokens)
    ):
        assert (found == token) == is_allowed, f"the reference, row {r}"
    check(arguments, device)


@everywhere
@settings
def test_random_rows(setting: str, device: str, set_constants: None) -> None:
    generator = torch.Generator().manual_seed(1)
    if device == "cpu":  # half a second for a row
        check(sampling_rows(8, 700, generator), device)
        return
    for vocabulary, rows in ((50, 6000), (1003, 4000), (8200, 1000), (32000, 200)):
        check(sampling_rows(rows, vocabulary, generator), device)


@everywhere
@settings
def test_short_logits_draw_what_their_fp32_draws(setting: str, device: str, set_constants: None) -> None:
    """bf16 and fp16 hold the hard rows' logits exactly; others are rounded before both."""
    arguments, _ = edge_rows()
    hard = only(arguments, list(range(0, len(arguments["seed_R"]), 8 if device == "cpu" else 1)))
    greedy = only(arguments, [3]) | {"temperature_R": torch.zeros(1)}
    others = sampling_rows(2, 300, torch.Generator().manual_seed(3))
    if device == "cuda":
        others = sampling_rows(200, 151936, torch.Generator().manual_seed(3))
    for dtype in dtypes(device)[1:]:
        for given in (hard, greedy, others):
            given = given | {"logits_RV": given["logits_RV"].to(dtype)}
            check(given, device)
            drawn = {name: given[name] for name in ("logits_RV", "temperature_R", "seed_R", "position_R")}
            assert kernel.accepts(SampleCall(**drawn))
            found = kernel.sample(SampleCall(**copy(drawn, torch.device(device)))).cpu()
            assert torch.equal(
                found, ops.sample.reference(SampleCall(**drawn | {"logits_RV": drawn["logits_RV"].float()}))
            )


@pytest.mark.gpu
@pytest.mark.parametrize("vocabulary", [49152, 151936, 262144, 262400])
def test_large_vocabularies(vocabulary: int) -> None:
    generator = torch.Generator().manual_seed(vocabulary)
    for rows in (1, 3, 16, 80):
        check(sampling_rows(rows, vocabulary, generator), "cuda")


@everywhere
def test_rows_that_are_not_finite_give_no_token(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """NaN or infinity anywhere in a row, whatever it asks for; the rows between them draw what they draw without."""
    kinds = [(0.0, 0, 1.0, 0.0), (0.8, 0, 1.0, 0.0), (0.8, 9, 0.5, 0.1), (0.8, 0, 0.5, 0.0), (0.8, 5, 1.0, 0.0)]
    if device == "cpu":  # the interpreter is slow
        kinds = kinds[:3]
        for name, value in SETTINGS["several tiles and chunks"].items():
            monkeypatch.setattr(kernel, name, value)
    spoiled = [(0, float("nan")), (699, float("nan")), (slice(None), float("nan")), (300, float("inf")), None]
    temperature, top_k, top_p, min_p = zip(*(kind for kind in kinds for _ in spoiled))
    generator = torch.Generator().manual_seed(4)
    logits_RV = torch.randn(len(temperature), 700, generator=generator)
    for r in range(logits_RV.shape[0]):
        if (where := spoiled[r % len(spoiled)]) is not None:
            logits_RV[r, where[0]] = where[1]
    arguments = sampling_rows(len(temperature), 700, generator) | {
        "logits_RV": logits_RV,
        "temperature_R": torch.tensor(temperature),
        "top_k_R": torch.tensor(top_k).int(),
        "top_p_R": torch.tensor(top_p),
        "min_p_R": torch.tensor(min_p),
    }
    expected = ops.sample.reference(SampleCall(**arguments)).view(len(kinds), -1)
    assert (expected[:, :4] == NOT_FINITE).all() and (expected[:, 4] >= 0).all()
    for dtype in dtypes(device)[: 1 if device == "cpu" else None]:
        check(arguments | {"logits_RV": logits_RV.to(dtype)}, device)
        drawn = {name: arguments[name] for name in ("temperature_R", "seed_R", "position_R")}
        drawn["logits_RV"] = logits_RV.to(dtype)
        found = kernel.sample(SampleCall(**copy(drawn, torch.device(device))))
        assert torch.equal(found.cpu(), ops.sample.reference(SampleCall(**drawn)))


@everywhere
def test_rows_of_a_wider_tensor_and_nothing_allowed(device: str) -> None:
    arguments = only(edge_rows()[0], [0, 6, 14])
    arguments["logits_RV"][1] = float("-inf")
    wide = torch.full((3, 501), float("nan"))
    wide[:, 100:400] = arguments["logits_RV"]
    check(arguments | {"logits_RV": wide[:, 100:400]}, device)


def test_what_it_does_not_accept() -> None:
    arguments = sampling_rows(4, 60, torch.Generator())
    assert kernel.accepts(SampleCall(**arguments))
    assert not kernel.accepts(SampleCall(**arguments | {"logits_RV": arguments["logits_RV"].double()}))
    assert not kernel.accepts(SampleCall(**arguments | {"logits_RV": torch.zeros(60, 4).T}))
    assert not kernel.accepts(
        SampleCall(**arguments | {"logits_RV": torch.zeros(1, 1).expand(4, kernel.MAX_VOCABULARY + 1)})
    )
    assert not kernel.accepts(SampleCall(**arguments | {"seed_R": torch.zeros(8, dtype=torch.int64)[::2]}))


# ---------------------------------------------------------------------------------------------------------------------
# The functions themselves
# ---------------------------------------------------------------------------------------------------------------------


@triton.jit
def exact_kernel(x, relative, state, log_x, mass, noise, bound, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(log_x + i, kernel_exact.log(tl.load(x + i)))
    tl.store(mass + i, kernel_exact.mass(tl.load(relative + i)))
    mixed = kernel_exact.mix(tl.load(state + i).to(tl.uint32))
    tl.store(noise + i, kernel_exact.noise(mixed))
    tl.store(bound + i, kernel_exact.noise_bound(mixed))


@everywhere
def test_the_functions_have_the_same_bits(device: str) -> None:
    number = 1 << (13 if device == "cpu" else 22)
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(number, generator=generator).mul_(160).sub_(80).exp_()
    relative = -25 * torch.rand(number, generator=generator)
    relative[:2] = torch.tensor([0.0, -float("inf")])
    state = torch.randint(2**32, (number,), generator=generator)
    log_x, noise, bound = (torch.empty(number, device=device) for _ in range(3))
    mass = torch.empty(number, dtype=torch.int32, device=device)
    inputs = x.to(device), relative.to(device), state.to(device)
    exact_kernel[(number // 1024,)](*inputs, log_x, mass, noise, bound, BLOCK=1024, **kernel_exact.EXACT)
    expected = exact.noise(exact.mix(state))
    assert torch.equal(noise.cpu(), expected)
    assert torch.equal(log_x.cpu(), exact.log(x))
    assert torch.equal(mass.cpu().long(), exact.mass(relative))
    assert (bound.cpu() >= expected).all() and expected.max() < kernel_exact.MOST_NOISE.value


@pytest.mark.gpu
def test_the_reference_has_the_same_bits_on_a_gpu() -> None:
    arguments = sampling_rows(500, 1003, torch.Generator().manual_seed(2))
    on_gpu = ops.sample.reference(SampleCall(**copy(arguments, torch.device("cuda"))))
    assert torch.equal(on_gpu.cpu(), ops.sample.reference(SampleCall(**arguments)))


@interpreter
def test_the_benchmark_checks_and_times(capsys: pytest.CaptureFixture[str]) -> None:
    from benchmarks import sample_sweep

    platform = platforms.make("cpu")
    assert sample_sweep.check() == [{"rows": 2, "vocabulary": 300, "differing": 0}]
    assert {entry["rows"] for entry in sample_sweep.time_all(platform)} == {1}
    assert len(sample_sweep.time_others(platform)) == 6
    assert "differ, V 300" in capsys.readouterr().out


# ---------------------------------------------------------------------------------------------------------------------
# Graphs and compilers
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 7, 64])
def test_in_a_graph(rows: int) -> None:
    """Parameters, seeds and logits may all change between replays."""
    generator = torch.Generator().manual_seed(rows)
    static = copy(sampling_rows(rows, 32000, generator), torch.device("cuda"))
    kernel.sample(SampleCall(**static))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        token_R = kernel.sample(SampleCall(**static))
    for _ in range(10):
        arguments = sampling_rows(rows, 32000, generator)
        for name, x in arguments.items():
            static[name].copy_(x)
        token_R.fill_(-7)
        graph.replay()
        assert torch.equal(token_R.cpu(), ops.sample.reference(SampleCall(**arguments)))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("target", ahead_of_time.TARGETS)
def test_compiles_ahead_of_time(target: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead_of_time.DEPENDENT_LAUNCH, lambda device: target in ahead_of_time.DEPENDENT)
    arguments = sampling_rows(2, 151936, torch.Generator())
    arguments["logits_RV"] = arguments["logits_RV"].to(dtype)
    drawn = {name: arguments[name] for name in ("logits_RV", "temperature_R", "seed_R", "position_R")}
    with recorded(kernel, "scan_kernel", "gather_kernel", "choose_kernel") as launches:
        kernel.sample(SampleCall(**arguments))
        kernel.sample(SampleCall(**drawn))
    assert len(launches) == 5
    for launch in launches:
        compiled = compile_for(target, launch)
        assert compiled.metadata.shared <= 48 * 1024
        if not target.startswith("sm_"):
            continue
        ptx = compiled.asm["ptx"]
        assert ahead_of_time.resources(compiled)["LOCAL"] == 0
        # Only the bound of the noise is fused, once for each element of a thread.
        fused = {kernel.scan_kernel: kernel.TILE // (32 * kernel.SCAN_WARPS)}
        fused[kernel.choose_kernel] = kernel.STEP // (32 * kernel.CHOOSE_WARPS)
        assert ptx.count("fma.rn.f32") <= fused.get(launch.function, 0)
        assert "add.f32" not in ptx and "mul.f32" not in ptx  # without .rn, the assembler might fuse them
        if launch.function is kernel.scan_kernel:
            assert ahead_of_time.loads(compiled)["wide"] >= 2 * dtype.itemsize
