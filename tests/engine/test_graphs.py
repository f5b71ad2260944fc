"""Captured decode steps give what uncaptured ones give, whoever joins and leaves. The fake platform captures by writing
down what to run again, so buffers that a replay reads and writes are the real ones."""

import gc
import random
import weakref
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from anabranch import platforms
from anabranch.compile import capture, prompt
from anabranch.compile.compiled import CompiledDecoder
from anabranch.compile.pieces import PiecesStep
from anabranch.config import CHOICES, EngineConfig
from anabranch.engine import engine as engine_module
from anabranch.engine import forward
from anabranch.engine.engine import Engine, make_engine
from anabranch.layers.config import LatentConfig
from anabranch.layers.norm import UnreducedRows
from anabranch.llm import LLM
from anabranch.moe import setup as moe_setup
from anabranch.platforms.fake import FakePlatform
from anabranch.request import Request, Update
from anabranch.sampling_params import SamplingParams
from tests.engine.test_speculation import Guesses
from tests.models import tiny

FAMILIES = {case.model_type: case for case in reversed(tiny.CASES)}
FAMILIES |= {case.name: case for case in tiny.CASES if "sliding" in case.name}
DEFAULTS = {"dtype": "float32", "num_pages": 256, "page_size": 4, "max_num_seqs": 16, "max_model_len": 128}

MODES: list[dict[str, Any]] = [
    {"graphs": "none"},
    {"graphs": "pieces"},
    {"graphs": "traced"},
    {"graphs": "decode"},
    {"graphs": "full"},
]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=24, ignore_eos=True),
    SamplingParams(temperature=0, max_tokens=9, ignore_eos=True),
    SamplingParams(temperature=1.2, seed=1, max_tokens=24, ignore_eos=True),
    SamplingParams(temperature=0.9, seed=2, top_k=20, top_p=0.9, min_p=0.01, max_tokens=17, ignore_eos=True),
    SamplingParams(temperature=0, max_tokens=13, logprobs=2, ignore_eos=True),
    SamplingParams(temperature=0.8, seed=3, repetition_penalty=1.3, frequency_penalty=0.4, max_tokens=21),
    SamplingParams(temperature=0, max_tokens=12, min_tokens=12, logit_bias={3: 4.0}),
    SamplingParams(temperature=0, max_tokens=6, prompt_logprobs=1, return_routed_experts=True, ignore_eos=True),
]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakePlatform]:
    platform = FakePlatform()
    monkeypatch.setattr(platforms, "current", lambda: platform)
    yield platform


def requests(kinds: list[int], seed: int) -> list[tuple[int, Request]]:
    """(the step before which it comes, request)"""
    rng = random.Random(seed)
    found = []
    for i, kind in enumerate(kinds):
        prompt = tuple(rng.randrange(tiny.VOCAB_SIZE) for _ in range(rng.randrange(1, 30)))
        found.append((rng.randrange(20), Request(id=str(i), prompt_ids=prompt, params=PARAMS[kind])))
    return found


def serve(engine: Engine, arrivals: list[tuple[int, Request]], aborted: dict[str, int]) -> dict[str, list[Update]]:
    updates: dict[str, list[Update]] = {request.id: [] for _, request in arrivals}
    waiting, step = sorted(arrivals, key=lambda one: one[0]), 0
    while waiting or engine.has_work:
        while waiting and waiting[0][0] <= step:
            engine.add(waiting.pop(0)[1])
        for id, when in aborted.items():
            if when == step:
                engine.abort(id)
        for update in engine.step():
            updates[update.id].append(update)
        step += 1
        engine.scheduler.check()
        engine.runner.sampler.check()
    return updates


def flat(updates: list[Update]) -> tuple[Any, ...]:
    return (
        [token for update in updates for token in update.token_ids],
        [round(one.logprob, 4) for update in updates for one in update.logprobs],
        [None if one is None else round(one.logprob, 4) for update in updates for one in update.prompt_logprobs or []],
        [update.routed_experts for update in updates if update.routed_experts],
        updates[-1].finish_reason if updates else None,
    )


def compare(
    folder: Path,
    fake: FakePlatform,
    arrivals: list[tuple[int, Request]],
    kinds: Collection[str] = CHOICES["graphs"],
    made: dict[str, list[tuple[str, int]]] | None = None,
    **options: Any,
) -> Engine:
    """`made`: gets the kinds and sizes that the last engine has captured."""
    aborted = {"1": 12, "4": 25}
    found = []
    for modes in [modes for modes in MODES if modes["graphs"] in kinds]:
        engine = make_engine(EngineConfig(model=str(folder), **(DEFAULTS | options | modes)))
        fake.log.clear()
        found.append(serve(engine, arrivals, aborted))
        assert ("replay" in fake.log) == (modes is not MODES[0])
        load = engine.runner.expert_load()
        if made is not None:
            for name in ("decodes", "prefills"):
                made[name] = list(getattr(getattr(engine.runner.forward, name), "made", ()))
        engine.close()
        assert engine.kv.usage() == 0
    for other in found[1:]:
        for id in found[0]:
            if id not in aborted:
                tokens, *logprobs, experts, reason = flat(other[id])
                near = (pytest.approx(one, abs=2e-4) for one in logprobs)
                assert flat(found[0][id]) == (tokens, *near, experts, reason), id
    assert bool(load) == any(layer.moe is not None for layer in engine.model.layers)
    for _, request in arrivals:
        updates = found[1][request.id]
        if request.params.prompt_logprobs is not None:
            assert any(update.prompt_logprobs for update in updates)
            assert any(update.routed_experts for update in updates) == bool(load)
    return engine


# The others have their ops and their kinds of cache groups.
USUAL = {"qwen3_moe", "qwen2_moe", "qwen3_5_moe", "deepseek_v3", "gemma4_text"}
EVERY_KIND = {"qwen3_moe", "qwen3_5_moe"}  # of graphs; without `thorough`, the others have those of a server alone


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=[pytest.mark.slow] * (name not in USUAL)) for name in FAMILIES]
)
def test_captured_is_uncaptured(family: str, tmp_path: Path, fake: FakePlatform, thorough: bool) -> None:
    folder = tiny.save(FAMILIES[family], tmp_path)
    every_kind = [*range(len(PARAMS)), 0, 2, 3, 0]
    graphs = CHOICES["graphs"] if thorough or family in EVERY_KIND else ("none", "full")
    made: dict[str, list[tuple[str, int]]] = {}
    compare(folder, fake, requests(every_kind, 0), graphs, made)
    assert {kind for kind, _ in made["decodes"]} == {"greedy", "drawn"} and len(made["prefills"]) > 1


def test_graphs_end_with_the_engine(tmp_path: Path, fake: FakePlatform) -> None:
    """Those of a device would make the end of the group wait, whose collectives they hold."""
    engine = make_engine(EngineConfig(model=str(tiny.save(FAMILIES["qwen3_moe"], tmp_path)), **DEFAULTS))
    serve(engine, requests([0, 1], 0), {})
    captured = fake.log.count("capture")
    engine.close()
    assert captured == fake.log.count("reset") > 0


def test_captured_is_uncaptured_when_preempted(tmp_path: Path, fake: FakePlatform) -> None:
    folder = tiny.save(FAMILIES["qwen3_moe"], tmp_path)
    engine = compare(
        folder, fake, requests([0, 1, 2, 3] * 4, 1), ("none", "pieces", "full"), num_pages=36, max_model_len=72
    )
    assert engine.scheduler.num_preemptions > 0


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_5_moe", pytest.param("gemma4_text", marks=pytest.mark.slow)])
def test_captured_is_uncaptured_with_drafts(
    family: str, tmp_path: Path, fake: FakePlatform, monkeypatch: pytest.MonkeyPatch, thorough: bool
) -> None:
    """And without drafts. Steps that verify drafts are captured as decode steps are, each row like a request."""
    folder, arrivals = tiny.save(FAMILIES[family], tmp_path), requests([*range(len(PARAMS)), 0, 2, 3, 0], 0)
    plain = make_engine(EngineConfig(model=str(folder), **DEFAULTS))
    expected = {id: flat(updates) for id, updates in serve(plain, arrivals, {}).items()}
    plain.close()
    known = [[*request.prompt_ids, *expected[request.id][0]] for _, request in arrivals]
    monkeypatch.setattr(engine_module, "NgramDrafter", Guesses(known))
    num_verifying = 0
    replay = capture.Captured.replay

    def noted(self: capture.Captured[Any], input: torch.Tensor) -> Any:
        nonlocal num_verifying
        slots = [slot for slot in input[0].tolist() if slot >= 0]
        num_verifying += len(set(slots)) < len(slots)
        return replay(self, input)

    monkeypatch.setattr(capture.Captured, "replay", noted)
    for modes in MODES if thorough or family == "qwen3_moe" else MODES[-1:]:
        num_verifying = 0
        engine = make_engine(EngineConfig(model=str(folder), speculative="ngram", **(DEFAULTS | modes)))
        found = serve(engine, arrivals, {})
        assert 0 < engine.metrics.accepted_tokens < engine.metrics.draft_tokens
        assert (num_verifying > 10) == (modes["graphs"] not in ("none", "pieces"))
        engine.close()
        assert engine.kv.usage() == 0
        for id in expected:
            tokens, *logprobs, experts, reason = flat(found[id])
            near = (pytest.approx(one, abs=2e-4) for one in logprobs)
            assert expected[id] == (tokens, *near, experts, reason), id


def test_captured_is_uncaptured_where_norms_sum_the_experts(
    tmp_path: Path, fake: FakePlatform, monkeypatch: pytest.MonkeyPatch
) -> None:
    """UnreducedRows cross the borders of prompts' graphs; who is compiled is handed their sum."""
    taken = 0
    take = UnreducedRows.take

    def counted(self: UnreducedRows) -> Any:
        nonlocal taken
        taken += 1
        return take(self)

    monkeypatch.setattr(UnreducedRows, "take", counted)
    monkeypatch.setattr(moe_setup, "kernels_write_rows", lambda: True)
    monkeypatch.setattr(moe_setup, "REDUCE_IN_NORM_TOKENS", 4)
    monkeypatch.setattr(prompt, "FIRST_LAYERS", 1)
    compare(tiny.save(FAMILIES["qwen3_moe"], tmp_path), fake, requests([*range(len(PARAMS)), 0, 2], 0))
    assert taken > 100


def test_steps_larger_than_any_captured_one(
    tmp_path: Path, fake: FakePlatform, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With compiled pieces they take the pieces as they are; smaller ones are padded to the captured one."""
    monkeypatch.setattr(forward, "LARGEST_PREFILL", 16)
    folder = tiny.save(FAMILIES["qwen2_moe"], tmp_path)
    sizes: list[int] = []
    start = CompiledDecoder.start

    def noted(self: CompiledDecoder, token_T: torch.Tensor, *rest: Any) -> Any:
        sizes.append(token_T.shape[0])
        return start(self, token_T, *rest)

    monkeypatch.setattr(CompiledDecoder, "start", noted)
    compare(folder, fake, requests([0, 1, 2, 4, 7, 0], 4), ("none", "traced", "full"), max_num_seqs=4)
    assert min(sizes) == 16 < max(sizes)


@pytest.mark.parametrize(("family", "largest"), [("qwen3_moe", 16), ("deepseek_v3", 32)])
def test_long_prompts_of_latent_models_run_in_pieces(
    family: str, largest: int, tmp_path: Path, fake: FakePlatform, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are not captured whole, and launching each kernel takes longer than most of their kernels."""
    monkeypatch.setattr(forward, "LARGEST_PREFILL", 16)
    monkeypatch.setattr(LatentConfig, "most_absorbed", 8)
    sizes: list[int] = []
    run = PiecesStep.run
    monkeypatch.setattr(PiecesStep, "run", lambda self, step: (sizes.append(self.size), run(self, step))[1])
    found = []
    for mode in ("full", "none"):
        with LLM(
            str(tiny.save(FAMILIES[family], tmp_path / mode)), **(DEFAULTS | {"graphs": mode, "max_num_seqs": 4})
        ) as llm:
            params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
            found.append([one.token_ids for one in llm.generate([[*range(1, 31)], [*range(2, 60)]], params)])
            if mode == "full":
                prefills = llm.engine.runner.forward.prefills
                assert prefills is not None and prefills.sizes[-1] == largest
                assert {size for size in prefills.sizes if size > 16} <= {size for _, size in prefills.made}
                llm.generate([[*range(3, 33)]], params)
    assert found[0] == found[1]
    assert (32 in sizes) == (largest == 32)


@pytest.mark.slow  # `compare` has the same pieces without a compiler, and tests/compile compiles some
@pytest.mark.compiler
@pytest.mark.parametrize("family", ["qwen3_moe", "gemma4_text"])
def test_compiled_is_uncompiled(
    family: str, tmp_path: Path, fake: FakePlatform, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ANABRANCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(MODES[2], "graphs", "compiled")
    compare(tiny.save(FAMILIES[family], tmp_path), fake, requests([*range(len(PARAMS)), 0, 2], 0))


def test_every_graph_is_captured_before_ready_or_when_nobody_waits(tmp_path: Path, fake: FakePlatform) -> None:
    folder = tiny.save(FAMILIES["qwen2_moe"], tmp_path)
    engine = make_engine(EngineConfig(model=str(folder), **(DEFAULTS | {"max_num_seqs": 40})))
    assert engine.config.graphs == "full" and fake.log.count("pool") == 1
    decodes = engine.runner.forward.decodes
    assert decodes is not None
    assert [size for kind, size in decodes.made if kind == "greedy"] == [40, 32, 16, 8, 4, 2, 1]
    prompts = engine.runner.forward.prompts
    assert prompts is not None and [size for _, size in prompts.made] == [128, 64, 32, 16], (
        "as long as a request can be"
    )
    before = fake.log.count("capture")
    for kinds in ([0] * 20, [4] * 3):  # the second want log probabilities
        serve(engine, [(0, request) for _, request in requests(kinds, 2)], {})
    assert fake.log.count("capture") == before, "32 rows stand in for 20"
    assert fake.log.count("replay") > 40
    engine.idle()
    assert fake.log.count("capture") == before + 1 and ("greedy", 24) in decodes.made
    for _ in range(100):
        engine.idle()
    again = fake.log.count("capture")
    engine.idle()
    assert fake.log.count("capture") == again
    engine.close()


def test_a_batch_makes_one_size_that_earlier_ones_missed(
    tmp_path: Path, fake: FakePlatform, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny.save(FAMILIES["llama"], tmp_path)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    with LLM(str(folder), **(DEFAULTS | {"max_num_seqs": 40})) as llm:
        decodes = llm.engine.runner.forward.decodes
        assert decodes is not None

        def generate(num_prompts: int) -> set[int]:
            llm.generate([[1, 2, 3]] * num_prompts, params)
            return {size for kind, size in decodes.made if kind == "greedy"}

        assert generate(20) == {1, 2, 4, 8, 16, 32, 40}
        assert generate(3) == {1, 2, 4, 8, 16, 32, 40}, "a few prompts do not wait for it"
        assert generate(20) == {1, 2, 4, 8, 16, 32, 40}, "nor do many for what was missed a few times"
        monkeypatch.setattr(capture, "BUSY_MISSES", 16)
        assert generate(20) == {1, 2, 4, 8, 16, 24, 32, 40}


def test_captured_steps_have_memory_beside_the_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny.save(FAMILIES["mixtral"], tmp_path)
    platform = FakePlatform(memory=24 << 20)
    monkeypatch.setattr(platforms, "current", lambda: platform)
    monkeypatch.setattr(forward, "LARGEST_PREFILL", 256)
    options = DEFAULTS | {"num_pages": 0, "max_num_seqs": 64, "max_num_batched_tokens": 4096, "max_model_len": 512}
    tokens, pages = [], []
    for modes in ({"graphs": "none"}, {"graphs": "decode"}, {"graphs": "pieces"}, {}):
        engine = make_engine(EngineConfig(model=str(folder), **(options | modes)))
        tokens.append(forward.captured_tokens(engine.config, platform))
        pages.append(engine.runner.num_pages()[0])
        engine.close()
    assert tokens == [0, 64, 256, 512]
    assert pages == sorted(pages, reverse=True) and len(set(pages)) == 4


def test_an_llm_that_is_gone_leaves_no_memory(tmp_path: Path, fake: FakePlatform) -> None:
    """Though nobody looks for garbage among what was there when it was ready."""
    before = gc.get_freeze_count()
    llm = LLM(str(tiny.save(FAMILIES["llama"], tmp_path)), **DEFAULTS)
    assert gc.get_freeze_count() > before
    model = weakref.ref(llm.engine.runner.model)
    llm.close()
    del llm
    gc.collect()
    assert model() is None


@pytest.mark.slow  # test_expert_counter.py counts every token, in all of these
def test_the_histogram_leaves_padding_out(tmp_path: Path, fake: FakePlatform) -> None:
    folder = tiny.save(FAMILIES["mixtral"], tmp_path)
    loads = []
    for modes in MODES:
        options = DEFAULTS | modes | {"expert_load_interval": 1, "async_scheduling": False}
        engine = make_engine(EngineConfig(model=str(folder), **options))
        serve(engine, [(0, request) for _, request in requests([0, 0, 0], 3)], {})
        loads.append(engine.runner.expert_load())
        engine.close()
    assert all(load == loads[0] for load in loads) and sum(map(sum, loads[0])) > 0


def test_full_graphs_where_there_are_none_are_refused(tmp_path: Path) -> None:
    folder = tiny.save(FAMILIES["llama"], tmp_path)
    for graphs in CHOICES["graphs"][1:-1]:
        with pytest.raises(ValueError, match=f"graphs {graphs}: platform 'cpu' captures no graphs; use auto or none"):
            make_engine(EngineConfig(model=str(folder), graphs=graphs, **DEFAULTS))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("family", "combine"),
    [
        ("qwen2_moe", "ordered"),
        ("qwen3_moe", "ordered"),
        ("gemma4_text", "ordered"),
        ("mixtral", "ordered"),
        ("qwen3_moe", "unfused"),
    ],
)
def test_captured_logits_are_those_of_an_eager_run_bit_for_bit(
    family: str, combine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the same padded sizes, over a long run with requests that join and leave. Unfused: norms sum the experts, and
    rows cross the borders of prompts' graphs."""
    import torch

    from anabranch.compile.capture import Captured
    from anabranch.platforms.fake import FakeGraph

    made = platforms.make("cuda")
    folder = tiny.save(FAMILIES[family], tmp_path)
    monkeypatch.setattr(prompt, "FIRST_LAYERS", 1)
    monkeypatch.setattr(moe_setup, "REDUCE_IN_NORM_TOKENS", 4)
    logits: list[torch.Tensor] = []
    replay = Captured.replay

    def kept(self: Captured[Any], input: torch.Tensor) -> Any:
        output = replay(self, input)
        logits.append(output.logits_RV[: int((input[0] >= 0).sum())].clone())
        return output

    monkeypatch.setattr(Captured, "replay", kept)
    monkeypatch.setattr(platforms, "current", lambda: made)
    found: list[tuple[dict[str, Any], list[torch.Tensor]]] = []
    for captured in (True, False):
        if not captured:  # the same work, launched kernel by kernel
            monkeypatch.setattr(type(made), "capture", lambda self, function, pool=None: FakeGraph(function, []))
        options = DEFAULTS | {
            "dtype": "bfloat16",
            "moe_combine": combine,
            "graphs": "full",
            "page_size": 16,
            "tune": "off",
        }
        engine = make_engine(EngineConfig(model=str(folder), **options))
        logits = []
        updates = serve(engine, requests([0, 0, 4, 2, 3, 0, 1, 0] * 12, 5), {"3": 9, "8": 14})
        engine.close()
        found.append(({id: flat(one) for id, one in updates.items()}, logits))
    assert found[0][0] == found[1][0]
    assert len(found[0][1]) == len(found[1][1]) > 50
    assert all(torch.equal(a, b) for a, b in zip(found[0][1], found[1][1], strict=True))
