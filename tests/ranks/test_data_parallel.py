"""Ranks with requests of their own, among which experts are divided, give the answers of one process."""

import os
import pickle
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from anabranch.engine.engine import Engine
from anabranch.llm import LLM, SamplingParams
from anabranch.moe.dispatch import ExchangingDispatcher
from anabranch.platforms.fake import FakePlatform
from anabranch.ranks.data_parallel import DataParallelEngine
from anabranch.request import Request
from anabranch.sampling_params import Grammar
from tests.models import tiny
from tests.parallel.ranks import fake, forked  # noqa: F401
from tests.ranks.test_engine import CASES, DRAWN, GREEDY, HYBRID, PENALTY, PROMPTS, THREE, check_stats, gone, rounds

MANY = [[(5 * i + j * j + i * j) % tiny.VOCAB_SIZE for j in range(40)] for i in range(30)]
"""More rows than go to all ranks."""
GROWING = [prompt[:27] for prompt in MANY[:4]]
"""Two have room in the pages of a rank that has few, until they have grown."""
SHORT = replace(GREEDY, max_tokens=2)

pytestmark = pytest.mark.usefixtures("forked")  # those of a server: test_watch


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {}
    for name, more in (("qwen3_moe_published", {}), ("qwen3_5_moe_published", HYBRID), ("gemma4_text_published", {})):
        case = CASES[name]
        made[name] = tiny.save(replace(case, settings=case.settings | more), tmp_path_factory.mktemp(name) / "model")
    return made


def engine(folder: Path, num_ranks: int, **options: Any) -> LLM:
    options |= {"data_parallel_size": num_ranks, "expert_parallel": num_ranks > 1}
    return LLM(str(folder), dtype="float32", **options)


def answers(llm: LLM, **options: Any) -> list[Any]:
    """Of batches that are divided equally and not; of one request, for which other ranks have none; and once more, when
    prefixes are cached."""
    params, again = rounds(options)
    batches = [llm.generate(prompts, params[: len(prompts)]) for prompts in (PROMPTS, PROMPTS[:1], PROMPTS[1:4])]
    batches += [llm.generate(PROMPTS, again), llm.generate(GROWING, GREEDY), llm.generate(MANY, SHORT)]
    llm.engine.scheduler.check()
    check_stats(options, *stats_of_ranks(llm))
    return [[output.token_ids for output in outputs] for outputs in batches]


def stats_of_ranks(llm: LLM) -> list[dict[str, Any]]:
    """Of each engine."""
    engine = llm.engine
    if not isinstance(engine, DataParallelEngine):
        return [engine.stats()]
    engine.runner.tell("stats")
    return [Engine.stats(engine), *engine.runner.replies()]


def test_two_ranks_answer_as_one(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    folder = folders["qwen3_moe_published"]
    sent: list[int] = []
    to_some = ExchangingDispatcher._to_some

    def counted(self: ExchangingDispatcher, *args: Any) -> Any:
        sent.append(len(args[0]))
        return to_some(self, *args)

    monkeypatch.setattr(ExchangingDispatcher, "_to_some", counted)
    with engine(folder, 1) as one, engine(folder, 2) as two:
        assert answers(two) == answers(one)
        assert sent and min(sent) > 512, "the large batch went to those ranks that have its experts, and no other"
        assert isinstance(two.engine, DataParallelEngine)
        ours, theirs = two.stats(), one.stats()
        for name in ("prompt_tokens", "generation_tokens", "finished"):
            assert ours[name] == theirs[name], name
        counts = [sum(layer) for layer in ours["expert_load"]]  # more: a prefix is not found by another rank
        assert len(counts) == 3 and len(set(counts)) == 1 and counts[0] >= sum(theirs["expert_load"][0])
        (output,) = two.generate([PROMPTS[1]], DRAWN)
        (expected,) = one.generate([PROMPTS[1]], DRAWN)
        for found, wanted in zip(output.prompt_logprobs[1:], expected.prompt_logprobs[1:], strict=True):
            assert abs(found.logprob - wanted.logprob) < 1e-5
        vectors = [torch.tensor(llm.embed(PROMPTS, pooling="mean")) for llm in (one, two)]
        assert (vectors[0] - vectors[1]).abs().max() < 1e-5
        check_requests(two.engine)
        check_end(two)


def check_requests(two: DataParallelEngine) -> None:
    """Each goes to the rank with the fewest; an id is used once; one that is aborted leaves its rank."""
    for number in range(4):
        two.add(Request(id=str(number), prompt_ids=(1, 2, 3), params=GREEDY))
    assert two.rank_of == {"0": 0, "1": 1, "2": 0, "3": 1}
    with pytest.raises(ValueError, match="request id '1' is in use"):
        two.add(Request(id="1", prompt_ids=(1, 2, 3), params=GREEDY))
    with pytest.raises(ValueError, match="not in the vocabulary"):
        two.add(Request(id="new", prompt_ids=(10**6,), params=GREEDY))
    two.step()
    for id in ("1", "2", "3"):
        two.abort(id)
    assert two.num_requests == [1, 0]
    tokens: list[int] = []
    while two.has_work:
        for update in two.step():
            assert update.id == "0"
            tokens += update.token_ids
    assert len(tokens) >= GREEDY.max_tokens - 1 and two.num_requests == [0, 0]
    assert two.stats()["running"] == 0 and two.stats()["kv_usage"] == 0


def check_end(two: LLM) -> None:
    """A rank that ends is named, and the others end too."""
    (follower,) = two.engine.runner.followers  # type: ignore[attr-defined]
    os.kill(follower.process.pid, signal.SIGKILL)
    with pytest.raises(RuntimeError, match="rank 1 of the model was ended by SIGKILL during a step"):
        two.generate(PROMPTS[:2], GREEDY)
    for use in (two.engine.step, two.stats):
        with pytest.raises(RuntimeError, match="ranks are not in step; make a new engine"):
            use()
    two.close()
    assert gone(follower.process.pid)


class Statement:
    """Unpickled by a rank as the arguments of `abort`, after it was executed there."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return eval, (f"exec({self.text!r}, {{}}) or ('nothing',)",)


SLOW = """
import time
from anabranch.models.decoder import Decoder
embed, end = Decoder._embed, []
def slow(self, token_T):
    if not end:
        end.append(time.monotonic() + {seconds})
    while time.monotonic() < end[0]:
        pass
    return embed(self, token_T)
Decoder._embed = slow
"""


@pytest.mark.slow
def test_a_slow_first_step_is_no_hang(folders: dict[str, Path]) -> None:
    """Of a rank for which another waits in the first collective; in a later step of this size it is."""
    with engine(folders["qwen3_moe_published"], 2) as two:

        def compute_for(seconds: float) -> None:
            (follower,) = two.engine.runner.followers  # type: ignore[attr-defined]
            follower.num_told += 1
            follower.pipe.send_bytes(pickle.dumps(("abort", Statement(SLOW.format(seconds=seconds)))))

        compute_for(9)
        began = time.monotonic()
        assert len(two.generate(PROMPTS[:2], GREEDY)) == 2
        assert time.monotonic() - began > 9
        compute_for(600)
        began = time.monotonic()
        with pytest.raises(RuntimeError, match="rank 1 of the model hangs: others have waited for it for [78] s"):
            two.generate(PROMPTS[:2], GREEDY)
        assert time.monotonic() - began < 10


@pytest.mark.slow
def test_a_rank_that_hangs_or_fails_is_named(folders: dict[str, Path]) -> None:
    folder = folders["qwen3_moe_published"]
    with engine(folder, 2) as two:
        runner = two.engine.runner
        os.kill(runner.followers[0].process.pid, signal.SIGSTOP)  # type: ignore[attr-defined]
        began = time.monotonic()
        with pytest.raises(RuntimeError, match="rank 1 of the model hangs: no heartbeat for 7 s during a step"):
            two.generate(PROMPTS[:2], GREEDY)
        assert time.monotonic() - began < 10
    with engine(folder, 2) as two:
        two.engine.runner.send(1, "add", None)  # type: ignore[attr-defined]
        with pytest.raises(RuntimeError, match="rank 1 of the model failed: AttributeError"):
            two.generate(PROMPTS[:2], GREEDY)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "num_ranks", "options"),
    [
        pytest.param("qwen3_moe_published", 4, {}, id="four ranks, 6 experts"),
        pytest.param("qwen3_moe_published", 2, {"max_num_batched_tokens": 8, "max_num_seqs": 3}, id="chunked"),
        pytest.param("qwen3_moe_published", 2, {"num_pages": 5, "page_size": 16, "max_model_len": 64}, id="preempted"),
        pytest.param("qwen3_moe_published", 2, {"speculative": "ngram"}, id="drafts"),
        pytest.param("qwen3_moe_published", 2, {"async_scheduling": False}, id="read at once"),
        pytest.param("qwen3_5_moe_published", 2, {}, id="states"),
        pytest.param("qwen3_5_moe_published", 2, {"speculative": "ngram"}, id="states and drafts"),
        pytest.param("gemma4_text_published", 2, {}, id="two cache groups"),
    ],
)
def test_other_engines(folders: dict[str, Path], name: str, num_ranks: int, options: dict[str, Any]) -> None:
    with engine(folders[name], 1, **options) as one, engine(folders[name], num_ranks, **options) as several:
        assert answers(several, **options) == answers(one, **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options"),
    [
        pytest.param("qwen3_moe_published", {}, id="six experts on four ranks"),
        pytest.param("qwen3_moe_published", {"max_num_batched_tokens": 8, "max_num_seqs": 3}, id="chunked"),
        pytest.param("qwen3_moe_published", {"num_pages": 5, "page_size": 16, "max_model_len": 64}, id="preempted"),
        pytest.param("qwen3_5_moe_published", {"speculative": "ngram"}, id="states, drafts, a shared expert"),
    ],
)
def test_engines_of_two_ranks_each(folders: dict[str, Path], name: str, options: dict[str, Any]) -> None:
    """Data and tensor parallelism together: four ranks."""
    with engine(folders[name], 1, **options) as one:
        expected = answers(one, **options)
    with engine(folders[name], 2, tensor_parallel_size=2, **options) as four:
        assert answers(four, **options) == expected
        assert four.engine.config.num_ranks == 4
        counts = [[len(experts) for experts in layer] for layer in placements(four)]
        assert all(sum(layer) == sum(counts[0]) and len(layer) == 4 for layer in counts)
        check_requests(four.engine)


@pytest.mark.slow
@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_each_rank_of_two_engines(folders: dict[str, Path], rank: int, sent: signal.Signals) -> None:
    """Rank 3 was started by rank 2, and is named all the same."""
    psutil = pytest.importorskip("psutil")
    with engine(folders["qwen3_moe_published"], 2, tensor_parallel_size=2) as four:
        first, second = (follower.process.pid for follower in four.engine.runner.followers)  # type: ignore[attr-defined]
        siblings = psutil.Process(second).parent().children()
        (third,) = (one.pid for one in siblings if one.pid not in (first, second) and not gone(one.pid))
        four.generate(PROMPTS[:2], GREEDY)
        os.kill((first, second, third)[rank - 1], sent)
        began = time.monotonic()
        said = "was ended by SIGKILL" if sent == signal.SIGKILL else "hangs: no heartbeat for 7 s"
        with pytest.raises(RuntimeError, match=f"rank {rank} of the model {said} during a step$"):
            while True:
                four.generate(PROMPTS[:2], GREEDY)
        while not all(map(gone, (first, second, third))):
            assert time.monotonic() - began < 10
            time.sleep(0.05)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"expert_parallel": False}, "data_parallel_size divides experts among ranks: it needs expert_parallel"),
        ({"tensor_parallel_size": 4}, "num_experts = 6 cannot be divided among 8 ranks"),
        ({"nodes": 3, "tensor_parallel_size": 3}, "each must have whole groups of tensor_parallel_size 3 ranks"),
        ({"data_parallel_size": 8}, "num_experts = 6 cannot be divided among 8 ranks"),
        ({"graphs": "pieces"}, "graphs pieces"),
        ({"data_parallel_size": 0}, "data_parallel_size must be an integer of at least 1"),
    ],
)
def test_what_cannot_work_is_refused(folders: dict[str, Path], options: dict[str, Any], words: str) -> None:
    given: dict[str, Any] = {"data_parallel_size": 2, "expert_parallel": True} | options
    with pytest.raises(ValueError, match=words):
        LLM(str(folders["qwen3_moe_published"]), **given)


def test_a_model_without_experts_is_refused(tmp_path: Path) -> None:
    folder = tiny.save(next(case for case in tiny.CASES if case.model_type == "llama"), tmp_path / "model")
    with pytest.raises(ValueError, match="llama has none; start an engine for each device"):
        LLM(str(folder), data_parallel_size=2, expert_parallel=True)


@pytest.mark.slow
def test_captured_steps_contain_the_exchange(
    folders: dict[str, Path],
    fake: FakePlatform,  # noqa: F811
) -> None:
    """And experts move beneath them."""
    moving = {"expert_parallel": True, "expert_copies": 1, "rebalance_interval": 3, "expert_load_interval": 1}
    every: list[dict[str, Any]] = [
        {},
        {"data_parallel_size": 2, "expert_parallel": True},
        {"data_parallel_size": 2, **moving},
        {"tensor_parallel_size": 2, **moving},
        {"data_parallel_size": 2, "tensor_parallel_size": 2, **moving},
        {"tensor_parallel_size": 2, "graphs": "traced", "max_num_batched_tokens": 64, **moving},
    ]
    found, moved, graphs = [], [], []
    for options in every:
        fake.log.clear()
        with LLM(str(folders["qwen3_moe_published"]), dtype="float32", max_num_seqs=8, **options) as llm:
            before = str(placements(llm))
            batches = [PROMPTS, PROMPTS[:1], PROMPTS[:3]]
            found.append([[one.token_ids for one in llm.generate(some, THREE[: len(some)])] for some in batches])
            assert "replay" in fake.log
            moved.append(str(placements(llm)) != before)
            graphs.append(llm.engine.config.graphs)
    assert graphs == ["full", "decode", "decode", "full", "decode", "traced"]
    assert moved == [False, False, True, True, True, True]
    assert all(tokens == found[0] for tokens in found)


@pytest.mark.slow
def test_grammars_and_drafts_on_every_rank() -> None:
    """Of the packaged model, which has a tokenizer. What cannot be compiled is refused by the rank that has it."""
    options: dict[str, Any] = {"speculative": "ngram", "dtype": "float32"}
    drafts: list[int] = []
    repeating = replace(GREEDY, allowed_token_ids=(5,))
    params = SamplingParams(max_tokens=20, grammar=Grammar(regex="[ab]{3}-(yes|no)"), seed=1)
    with LLM(data_parallel_size=2, expert_parallel=True, **options) as two, LLM(**options) as one:
        for drafting in (True, False):
            two.engine.set_drafting(drafting)
            for prompts, wanted in ((["x", "y", "z"], params), (["x", "y", "z"], repeating)):
                ours, theirs = two.generate(prompts, wanted), one.generate(prompts, wanted)
                assert [output.token_ids for output in ours] == [output.token_ids for output in theirs]
            drafts.append(two.stats()["spec_decode_drafts"])
        assert drafts[0] == drafts[1] > 0, "none where they are switched off, on either rank"
        wrong = replace(params, grammar=Grammar(regex="("))
        with pytest.raises(ValueError, match="prompt 1: grammar: regex cannot be used"):
            two.generate(["x", "y"], [params, wrong])
        assert not two.engine.has_work or two.engine.step() == []


def placements(llm: LLM) -> list[Any]:
    found: list[Any] = llm.stats()["expert_ranks"]
    return found


MOVING = [
    pytest.param({"data_parallel_size": 2, "expert_copies": 1}, id="data"),
    pytest.param({"tensor_parallel_size": 2, "expert_copies": 1}, id="tensor", marks=pytest.mark.slow),
    pytest.param({"data_parallel_size": 2}, id="without copies", marks=pytest.mark.slow),
    pytest.param({"data_parallel_size": 4, "expert_copies": 1}, id="four ranks", marks=pytest.mark.slow),
    pytest.param(
        {"data_parallel_size": 2, "tensor_parallel_size": 2, "expert_copies": 1}, id="both", marks=pytest.mark.slow
    ),
]


@pytest.mark.parametrize("options", MOVING)
def test_experts_move_between_steps(folders: dict[str, Path], options: dict[str, Any]) -> None:
    """Answers stay the same, and every expert is somewhere."""
    folder = folders["qwen3_moe_published"]
    more = options | {"expert_parallel": True, "rebalance_interval": 3, "expert_load_interval": 1}
    with engine(folder, 1) as one, LLM(str(folder), dtype="float32", **more) as several:
        first = placements(several)
        seen = {str(first)}
        for prompts in (PROMPTS, PROMPTS[:2], MANY[:5], PROMPTS):
            params = GREEDY if len(prompts) == 5 else [GREEDY, DRAWN, PENALTY, GREEDY, DRAWN, PENALTY][: len(prompts)]
            ours, theirs = several.generate(prompts, params), one.generate(prompts, params)
            assert [output.token_ids for output in ours] == [output.token_ids for output in theirs]
            seen.add(str(placements(several)))
        assert len(seen) > 1, "experts have moved"
        several.engine.rebalance()
        for layer in placements(several):
            assert {expert for experts in layer for expert in experts} == set(range(6))
            room = -(-6 // len(layer)) + options.get("expert_copies", 0)
            assert all(len(set(experts)) == len(experts) == room for experts in layer)
        with pytest.raises(ValueError, match="experts do not move here: start with expert_parallel"):
            one.engine.rebalance()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rebalance_interval": 5}, "rebalance_interval is about experts on several ranks"),
        ({"expert_copies": 1, "tensor_parallel_size": 2}, "expert_copies is about experts on several ranks"),
        (
            {"rebalance_interval": 5, "data_parallel_size": 2, "expert_parallel": True, "expert_load_interval": 0},
            "rebalance_interval needs the tokens of experts",
        ),
    ],
)
def test_moving_that_cannot_work_is_refused(folders: dict[str, Path], options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        LLM(str(folders["qwen3_moe_published"]), **options)
