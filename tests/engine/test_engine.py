"""The equalities an engine must keep, for every family: who else is in the batch, how a prompt is cut, what was cached
and who was preempted never changes an answer."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from anabranch.config import EngineConfig
from anabranch.engine.engine import Engine, make_engine
from anabranch.request import Request, Update
from anabranch.sampling_params import SamplingParams
from tests.models import tiny

# One case a family, and the odd ones: sliding windows shorter than the prompts, several KV groups.
CASES = {case.model_type: case for case in reversed(tiny.CASES)}
CASES |= {case.name: case for case in tiny.CASES if "sliding" in case.name or "window" in case.name}
# To the engine, families with the same kinds of cache groups are alike: one full group, states, latent rows, a window
# shorter than requests, two groups.
USUAL = {"qwen3_moe", "qwen3_5_moe", "deepseek_v3", "qwen2_moe_window_short", "gemma4_text"}


def folders(usual: set[str]) -> list[Any]:
    return [pytest.param(name, marks=[pytest.mark.slow] * (name not in usual), id=name) for name in CASES]


DEFAULTS = {"dtype": "float32", "num_pages": 256, "page_size": 4, "max_num_seqs": 16, "max_model_len": 128}
GREEDY = SamplingParams(temperature=0, max_tokens=12, logprobs=2, ignore_eos=True)


@pytest.fixture(scope="module", params=folders(USUAL))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(CASES[request.param], tmp_path_factory.mktemp("model") / "model")


@pytest.fixture
def engine(folder: Path) -> Iterator[Callable[..., Engine]]:
    made: list[Engine] = []

    def make(**options: Any) -> Engine:
        made.append(make_engine(EngineConfig(model=str(folder), **(DEFAULTS | options))))
        return made[-1]

    yield make
    for one in made:
        one.close()
        one.scheduler.check()
        assert one.kv.usage() == 0


def prompts(count: int) -> list[tuple[int, ...]]:
    rng = random.Random(0)
    return [tuple(rng.randrange(tiny.VOCAB_SIZE) for _ in range(rng.randrange(3, 45))) for _ in range(count)]


def run(engine: Engine, params: list[SamplingParams], prompts: list[tuple[int, ...]]) -> list[Update]:
    """All at once; each request's updates merged into one."""
    total = {str(i): Update(id=str(i)) for i in range(len(prompts))}
    for i, (prompt, one) in enumerate(zip(prompts, params, strict=True)):
        engine.add(Request(id=str(i), prompt_ids=prompt, params=one))
    while engine.has_work:
        for update in engine.step():
            mine = total[update.id]
            mine.token_ids += update.token_ids
            mine.logprobs += update.logprobs
            mine.num_cached = update.num_cached
            mine.finish_reason = update.finish_reason
            mine.prompt_logprobs = update.prompt_logprobs or mine.prompt_logprobs
            mine.routed_experts = update.routed_experts or mine.routed_experts
        if engine.metrics.steps % 5 == 0:
            engine.scheduler.check()
            engine.runner.sampler.check()
    return list(total.values())


def greedy(engine: Engine, prompts: list[tuple[int, ...]]) -> list[Update]:
    return run(engine, [GREEDY] * len(prompts), prompts)


def assert_same(found: list[Update], expected: list[Update]) -> None:
    for mine, other in zip(found, expected, strict=True):
        assert mine.token_ids == other.token_ids
        assert mine.finish_reason == other.finish_reason
        for a, b in zip(mine.logprobs, other.logprobs, strict=True):
            assert abs(a.logprob - b.logprob) < 1e-4 and a.rank == b.rank


@pytest.fixture(scope="module")
def alone(folder: Path) -> Iterator[Callable[[list[tuple[int, ...]]], list[Update]]]:
    """Each prompt by itself, whole, cold, one step at a time."""
    config = EngineConfig(model=str(folder), async_scheduling=False, prefix_cache=False, **DEFAULTS)
    one, known = make_engine(config), {}

    def compute(prompts: list[tuple[int, ...]]) -> list[Update]:
        for prompt in prompts:
            if prompt not in known:
                known[prompt] = greedy(one, [prompt])[0]
        return [known[prompt] for prompt in prompts]

    yield compute
    one.close()


def test_batched_is_alone(engine, alone) -> None:
    batch = prompts(9)
    assert_same(greedy(engine(), batch), alone(batch))


def test_any_chunking_is_the_whole_prompt(engine, alone) -> None:
    for budget, count in ((1, 2), (7, 4), (16, 4)):
        batch = prompts(count)
        assert_same(greedy(engine(max_num_batched_tokens=budget), batch), alone(batch))


def test_warm_prefix_is_cold(engine, alone) -> None:
    stem = prompts(1)[0] + tuple(range(30))
    batch = [stem[:n] + (n,) for n in (31, 30, 9, 17)] + [stem]
    expected = alone(batch)
    warm = engine(max_num_seqs=1)  # one after another
    found = greedy(warm, batch)
    assert_same(found, expected)
    again = greedy(warm, batch)
    assert_same(again, expected)
    assert all(update.num_cached >= len(prompt) - 8 for update, prompt in zip(again, batch, strict=True))
    assert warm.stats()["prefix_hits"] > 0


def test_a_salt_keeps_prefixes_apart(engine) -> None:
    one = engine()
    prompt = prompts(1)[0] + tuple(range(20))
    for salt, cached in (("a", False), ("b", False), ("a", True)):
        one.add(Request(id="x", prompt_ids=prompt, params=GREEDY, cache_salt=salt))
        updates = []
        while one.has_work:
            updates += one.step()
        assert bool(updates[-1].num_cached) == cached, salt


def test_abort_leaves_others_unchanged(engine, alone) -> None:
    batch = prompts(6)
    one = engine()
    rng = random.Random(1)
    tokens: dict[str, list[int]] = {str(i): [] for i in range(6)}
    for i, prompt in enumerate(batch):
        one.add(Request(id=str(i), prompt_ids=prompt, params=GREEDY))
    gone = set()
    while one.has_work:
        for update in one.step():
            assert update.id not in gone
            tokens[update.id] += update.token_ids
        if rng.random() < 0.2 and len(gone) < 3:
            gone.add(victim := str(len(gone) * 2))
            one.abort(victim)
        one.scheduler.check()
    for i, expected in enumerate(alone(batch)):
        if str(i) not in gone:
            assert tokens[str(i)] == expected.token_ids


def test_seeded_requests_do_not_depend_on_the_batch(engine) -> None:
    batch = prompts(8)
    params = [
        SamplingParams(
            temperature=0.8 + 0.1 * i, top_k=20 * (i % 3), top_p=0.95, seed=i, max_tokens=20, ignore_eos=True
        )
        for i in range(8)
    ]
    together = run(engine(), params, batch)
    one = engine(prefix_cache=False)
    for i in (0, 3, 7):
        assert run(one, [params[i]], [batch[i]])[0].token_ids == together[i].token_ids
    tight = engine(num_pages=24, max_model_len=72)
    assert [update.token_ids for update in run(tight, params, batch)] == [update.token_ids for update in together]
    assert tight.scheduler.num_preemptions > 0
    assert len({tuple(update.token_ids) for update in together}) == 8


def test_synchronous_is_asynchronous(engine) -> None:
    batch = prompts(5)
    assert_same(greedy(engine(async_scheduling=False), batch), greedy(engine(), batch))


# Of several KV groups one always runs; test_seeded_requests_do_not_depend_on_the_batch preempts in all.
@pytest.mark.parametrize("folder", folders(USUAL - {"gemma4_text", "qwen2_moe_window_short"}), indirect=True)
def test_overload_of_eight_times_the_pool(engine) -> None:
    """Preempted is undisturbed: as with room for all at once, where each is as alone (test_batched_is_alone)."""
    batch = prompts(30)
    large = engine(num_pages=1024, max_num_seqs=30)
    small = engine(num_pages=32, max_model_len=72)
    assert sum(-(-(len(p) + GREEDY.max_tokens) // 4) for p in batch) > 8 * 32
    assert_same(greedy(small, batch), greedy(large, batch))
    assert small.scheduler.num_preemptions > 0 and large.scheduler.num_preemptions == 0


def test_prompt_logprobs_and_routed_experts(engine, folder: Path) -> None:
    """Prompt logprobs against a plain softmax of the whole prompt's logits; expert ids the same however it is cut."""
    from anabranch.engine.single import SingleSequence
    from anabranch.loader.load import load_model

    prompt = prompts(1)[0] + (5, 4, 3)
    params = SamplingParams(
        temperature=0, max_tokens=4, prompt_logprobs=3, ignore_eos=True, return_routed_experts=True, logprobs=0
    )
    whole = run(engine(), [params], [prompt])[0]
    cut = run(engine(max_num_batched_tokens=5), [params, GREEDY], [prompt, prompts(1)[0]])[0]
    model = load_model(folder, dtype="float32")
    expected = SingleSequence(model, 128).forward(prompt).log_softmax(-1)
    assert whole.prompt_logprobs is not None and whole.prompt_logprobs[0] is None
    assert len(whole.prompt_logprobs) == len(prompt)
    for i, (a, b) in enumerate(zip(whole.prompt_logprobs[1:], cut.prompt_logprobs[1:], strict=True)):
        assert a.token_id == prompt[i + 1]
        assert abs(a.logprob - expected[i, a.token_id].item()) < 1e-4 and abs(a.logprob - b.logprob) < 1e-4
        best = torch.topk(expected[i], 3)
        assert [token for token, _ in a.top] == best.indices.tolist()
    num_moe = sum(layer.moe is not None for layer in model.config.layers)
    if num_moe:
        top_k = next(layer.moe.top_k for layer in model.config.layers if layer.moe)
        assert torch.tensor(whole.routed_experts).shape == (len(prompt) + 4 - 1, num_moe, top_k)
        assert whole.routed_experts == cut.routed_experts
