"""The sampler against a model of its semantics in plain Python: one request, one token, one list of floats a time."""

import math
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from anabranch import ops
from anabranch.engine import sampling_plan
from anabranch.engine.sampler import Sampler, needs_host_tokens
from anabranch.engine.sampling_plan import token_logprobs
from anabranch.ops import SampleCall
from anabranch.ops.sample import gumbel
from anabranch.request import Request
from anabranch.sampling_params import Grammar, SamplingParams

V, EOS = 40, (3, 17)
CPU = torch.device("cpu")
INFINITY = float("inf")


def make_request(id: str = "r", prompt: Sequence[int] = (1, 2, 2), **params: Any) -> Request:
    return Request(id=id, prompt_ids=tuple(prompt), params=SamplingParams(**params))


# ---------------------------------------------------------------------------------------------------------------------
# The model: every rule as the documentation states it
# ---------------------------------------------------------------------------------------------------------------------


@dataclass
class Model:
    request: Request
    bad_words: list[list[int]] = field(default_factory=list)
    output: list[int] = field(default_factory=list)

    def changed(self, logits: list[float]) -> list[float]:
        """Masks and bias, then penalties."""
        p, x = self.request.params, list(logits)
        forbidden = {token for token in range(V) if p.allowed_token_ids and token not in p.allowed_token_ids}
        for *beginning, last in self.bad_words:
            if self.output[len(self.output) - len(beginning) :] == beginning:
                forbidden.add(last)
        if len(self.output) < p.min_tokens:
            forbidden |= {token for token in p.stop_token_ids if token < V}
            forbidden |= set() if p.ignore_eos else set(EOS)
        for token in range(V):
            x[token] = -INFINITY if token in forbidden else x[token] + p.logit_bias.get(token, 0)
            if token in self.output or token in self.request.prompt_ids:
                x[token] = x[token] / p.repetition_penalty if x[token] > 0 else x[token] * p.repetition_penalty
            x[token] -= p.frequency_penalty * self.output.count(token)
            x[token] -= p.presence_penalty * (token in self.output)
        return x

    def token(self, logits: list[float]) -> int:
        """Of a request with a seed."""
        p, x = self.request.params, self.changed(logits)
        if p.temperature == 0:
            return max(range(V), key=lambda token: (x[token], -token))
        x = [value / p.temperature for value in x]
        weight = [math.exp(value - max(x)) for value in x]
        probability = [w / sum(weight) for w in weight]
        ranked = sorted(range(V), key=lambda token: (-probability[token], token))
        ranked = ranked if p.top_k in (-1, 0) else ranked[: p.top_k]
        whole = sum(probability[token] for token in ranked)
        kept, reached = [], 0.0
        for token in ranked:
            in_min_p = probability[token] >= p.min_p * probability[ranked[0]]
            if not kept or (reached < p.top_p and in_min_p):
                kept.append(token)
            reached += probability[token] / whole
        assert p.seed is not None
        noise = gumbel(torch.tensor(p.seed), torch.tensor(len(self.output)), torch.tensor(kept)).tolist()
        return max(zip(kept, noise), key=lambda drawn: x[drawn[0]] + drawn[1])[0]

    @property
    def waits(self) -> bool:
        return needs_host_tokens(self.request.params, self.bad_words)


def draw_model(rng: random.Random, number: int) -> Model:
    """A request with some of the parameters, often several at once."""

    def tokens(low: int, high: int) -> tuple[int, ...]:
        return tuple(rng.sample(range(V), rng.randint(low, high)))

    menu: dict[str, Any] = {
        "top_k": lambda: rng.choice((-1, 0, 1, 3, 20, V, 1000)),
        "top_p": lambda: rng.choice((0.1, 0.6, 0.95)),
        "min_p": lambda: rng.choice((0.05, 0.3, 1.0)),
        "presence_penalty": lambda: rng.uniform(-2, 2),
        "frequency_penalty": lambda: rng.uniform(-2, 2),
        "repetition_penalty": lambda: rng.uniform(0.5, 2),
        "logit_bias": lambda: {token: rng.uniform(-5, 5) for token in tokens(1, 6)},
        "min_tokens": lambda: rng.randint(1, 12),
        "stop_token_ids": lambda: (*tokens(1, 3), V + 5),
        "ignore_eos": lambda: True,
        "allowed_token_ids": lambda: tokens(12, 30),
        "logprobs": lambda: rng.randint(0, 5),
    }
    chosen = rng.sample(sorted(menu), rng.choice((0, 1, 1, 2, 4, 8)))
    params = {name: menu[name]() for name in chosen}
    params["temperature"] = rng.choice((0, 0, 0.3, 1.0, 2.5))
    bad_words = [list(tokens(1, 3)) for _ in range(rng.choice((0, 0, 4)))]
    request = make_request(str(number), tokens(1, 8), seed=rng.randrange(-(2**63), 2**63), max_tokens=100, **params)
    return Model(request, bad_words)


def add(sampler: Sampler, slot: int, model: Model) -> None:
    sampler.add(slot, model.request, model.output, eos_ids=EOS, bad_word_ids=model.bad_words)


def walk(rng: random.Random, num_steps: int, rows: int = 12) -> Iterator[None]:
    """Requests come, go, are preempted and skip steps; every token must be the model's."""
    sampler, running, waiting = Sampler(rows, V, CPU), dict[int, Model](), list[Model]()
    sampler.by_slot = rows == 2
    for step in range(num_steps):
        for slot in [slot for slot in running if rng.random() < 0.05]:
            model = running.pop(slot)
            sampler.remove(slot)
            if rng.random() < 0.6:
                waiting.append(model)  # preempted: it comes back, most likely in another slot
        free = [slot for slot in range(rows) if slot not in running]
        for slot in rng.sample(free, rng.randint(0, len(free))):
            model = waiting.pop() if waiting and rng.random() < 0.7 else draw_model(rng, 100 * step + slot)
            running[slot] = model
            add(sampler, slot, model)
        slots = rng.sample(sorted(running), rng.randint(min(1, len(running)), len(running)))
        for _ in range(rng.choice((1, 1, 3))):
            if rng.random() < 0.3:  # some have several rows
                slots = [slot for slot in slots for _ in range(1 if running[slot].waits else rng.choice((1, 1, 2, 3)))]
            logits = 2 * torch.randn(len(slots), V)
            expected = []
            for slot, values in zip(slots, logits.tolist()):
                expected.append(running[slot].token(values))
                running[slot].output.append(expected[-1])
            result = sampler.sample(logits.clone(), slots)
            assert result.token_R.dtype == torch.int64
            assert result.token_R.tolist() == expected, [running[slot].request.params for slot in slots]
            for row, (slot, token) in enumerate(zip(slots, expected)):
                model = running[slot]
                if model.waits:
                    assert sampler.accept(slot, token)
                check_logprobs(model.request.params.logprobs, result, row, logits[row], token)
            sampler.check()
        yield


def check_logprobs(asked: int | None, result: Any, row: int, logits: torch.Tensor, token: int) -> None:
    if asked is None:
        with pytest.raises(AssertionError, match="asked for no"):
            result.token_logprobs(row, 0)
        return
    found, expected = result.token_logprobs(row, asked), logits.log_softmax(-1)
    assert found.token_id == token
    assert found.logprob == pytest.approx(expected[token].item(), abs=1e-5)
    assert found.rank == 1 + (expected > expected[token]).sum()
    best = expected.topk(asked)
    assert [id for id, _ in found.top] == best.indices.tolist()
    assert [logprob for _, logprob in found.top] == pytest.approx(best.values.tolist(), abs=1e-5)


@pytest.mark.parametrize("number", range(8))
def test_mixed_batches_as_the_model_says(number: int) -> None:
    for _ in walk(random.Random(number), num_steps=25):
        pass


def test_few_rows_at_a_time_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling_plan, "CHUNK", 2 * V + 1)
    for _ in walk(random.Random(100), num_steps=15):
        pass


def test_draws_by_slot_as_the_model_says(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn, sample_slots = [], Sampler.sample_slots
    monkeypatch.setattr(Sampler, "sample_slots", lambda *given: drawn.append(given) or sample_slots(*given))
    for number in range(40):
        for _ in walk(random.Random(number), num_steps=6, rows=2):
            pass
    assert len(drawn) > 20


@pytest.mark.parametrize("by_slot", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_short_logits_give_what_their_fp32_gives(dtype: torch.dtype, by_slot: bool) -> None:
    """Tokens and log probabilities, whatever the requests want; and nobody writes over them."""
    rng, kinds = random.Random(0), set()
    for _ in range(60):
        rows = rng.choice((1, 2, 6))
        models = [draw_model(rng, slot) for slot in range(rows)]
        samplers = [Sampler(rows, V, CPU) for _ in range(2)]
        for sampler in samplers:
            sampler.by_slot = by_slot
            for slot, model in enumerate(models):
                add(sampler, slot, model)
        for _ in range(3):
            short = (2 * torch.randn(rows, V)).to(dtype)
            before = short.clone()
            one, other = (s.sample(x, list(range(rows))) for s, x in zip(samplers, (short, short.float())))
            assert torch.equal(short, before)
            assert torch.equal(one.token_R, other.token_R), [model.request.params for model in models]
            assert list(one.logprobs) == list(other.logprobs)
            for (mine, place), (theirs, same_place) in zip(one.logprobs.values(), other.logprobs.values()):
                assert place == same_place
                for name in ("token_T", "logprob_T", "rank_T", "top_id_TN", "top_logprob_TN"):
                    assert torch.equal(getattr(mine, name), getattr(theirs, name)), name
            for sampler in samplers:
                kinds.add((sampler.mode(list(range(rows))), bool(one.logprobs)))
                for slot, token in enumerate(one.token_R.tolist()):
                    sampler.accept(slot, token)
    assert kinds == {("greedy", False), ("drawn", False), ("any", False), ("any", True)}


# ---------------------------------------------------------------------------------------------------------------------
# What a request draws depends on nothing else
# ---------------------------------------------------------------------------------------------------------------------


def logits_of(name: str, position: int) -> torch.Tensor:
    """What the model would say to a request at a position."""
    generator = torch.Generator().manual_seed(sum(name.encode()) * 1000 + position)
    return torch.randn(V, generator=generator)


def generate(sampler: Sampler, placed: dict[int, Request], num_tokens: int) -> dict[str, list[int]]:
    """All requests side by side; the slots' order changes from step to step."""
    output: dict[str, list[int]] = {request.id: [] for request in placed.values()}
    slots = list(placed)
    for position in range(num_tokens):
        slots = slots[1:] + slots[:1]
        logits = torch.stack([logits_of(placed[slot].id, position) for slot in slots])
        tokens = sampler.sample(logits, slots).token_R.tolist()
        for slot, token in zip(slots, tokens):
            output[placed[slot].id].append(token)
    return output


SEEDED = {
    "drawn": {"seed": 7},
    "cut": {"seed": 7, "top_p": 0.8, "top_k": 20, "min_p": 0.01},
    "penalized": {"seed": 8, "frequency_penalty": 1.0, "repetition_penalty": 1.3},
    "held back": {"seed": 9, "min_tokens": 9, "logit_bias": {5: 3.0}},
}


@pytest.mark.parametrize("name", SEEDED)
def test_a_seeded_request_draws_the_same_alone_in_any_batch_and_slot_and_after_preemption(name: str) -> None:
    request = make_request("me", **SEEDED[name])

    def place(sampler: Sampler, placed: dict[int, Request], output: Sequence[int] = ()) -> dict[int, Request]:
        for slot, other in placed.items():
            sampler.add(slot, other, output if other is request else (), eos_ids=EOS)
        return placed

    sampler = Sampler(8, V, CPU)
    alone = generate(sampler, place(sampler, {0: request}), 20)["me"]
    assert len(set(alone)) > 4  # else equality means little

    others = [make_request(f"{i}", **params) for i, params in enumerate([*SEEDED.values(), {"temperature": 0}, {}])]
    for slot in (0, 5):
        sampler = Sampler(8, V, CPU, seed=99)
        placed = {slot: request} | {(slot + 1 + i) % 8: other for i, other in enumerate(others)}
        assert generate(sampler, place(sampler, placed), 20)["me"] == alone

    sampler = Sampler(8, V, CPU)
    place(sampler, {2: request})
    first = [sampler.sample(logits_of("me", i)[None], [2]).token_R.item() for i in range(6)]
    sampler.remove(2)
    place(sampler, {2: others[1], 4: request}, first)
    rest = [sampler.sample(logits_of("me", i)[None], [4]).token_R.item() for i in range(6, 20)]
    assert first + rest == alone


def test_without_a_seed_the_id_and_the_engines_seed_decide() -> None:
    def drawn(id: str, engine_seed: int) -> list[int]:
        sampler = Sampler(2, V, CPU, engine_seed)
        sampler.add(1, make_request(id))
        return [sampler.sample(torch.zeros(1, V), [1]).token_R.item() for _ in range(10)]

    assert drawn("a", 0) == drawn("a", 0)
    assert len({tuple(drawn(id, seed)) for id in "abc" for seed in (0, 1)}) == 6


def test_greedy_alone_and_among_others() -> None:
    """The way without random rows and the one with them; equal logits everywhere, so that ties are seen."""
    logits = torch.randint(3, (6, V)).float()
    expected = [row.index(max(row)) for row in logits.tolist()]
    sampler = Sampler(8, V, CPU)
    for slot in range(6):
        sampler.add(slot, make_request(str(slot), temperature=(0, 1e-6)[slot % 2]))
    assert sampler.sample(logits.clone(), list(range(6))).token_R.tolist() == expected
    sampler.add(6, make_request("drawn", top_p=0.9))
    sampler.add(7, make_request("best of one", top_k=1, temperature=2.0))
    together = sampler.sample(torch.cat([logits, logits[:2]]), [*range(6), 6, 7]).token_R.tolist()
    assert together[:6] == expected and together[7] == expected[1]


def test_nothing_cut_draws_as_sample_does() -> None:
    rows = 300
    logits, seed, position = 3 * torch.randn(rows, V), torch.arange(rows), torch.arange(rows) % 7
    temperature, one, none = torch.full((rows,), 0.8), torch.ones(rows), torch.zeros(rows)
    drawn = ops.sample(SampleCall(logits, temperature, seed, position))
    assert torch.equal(
        drawn, ops.sample.reference(SampleCall(logits, temperature, seed, position, none.int(), one, none))
    )
    assert drawn.unique().numel() > V // 2


# ---------------------------------------------------------------------------------------------------------------------
# Cost
# ---------------------------------------------------------------------------------------------------------------------


def test_a_repeated_batch_uploads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = Sampler(8, V, CPU)
    for slot in range(6):
        options = [*SEEDED.values(), {"logprobs": 2}, {"allowed_token_ids": [1, 2], "temperature": 0}][slot]
        sampler.add(slot, make_request(str(slot), **options), eos_ids=EOS)
    batches = [[0, 1, 2, 3, 4, 5], [5, 3, 1]]
    for slots in batches:
        sampler.sample(torch.randn(len(slots), V), slots)

    def refuse(*_: object) -> torch.Tensor:
        raise AssertionError("an upload")

    monkeypatch.setattr(sampler, "_upload", refuse)
    for slots in batches * 2:
        sampler.sample(torch.randn(len(slots), V), slots)
    sampler.add(6, make_request("new"))
    with pytest.raises(AssertionError, match="an upload"):
        sampler.sample(torch.randn(1, V), [6])


@pytest.mark.gpu
def test_the_device_is_never_waited_for() -> None:
    device = torch.device("cuda")
    sampler = Sampler(16, V, device)
    rng = random.Random(5)
    models = {slot: draw_model(rng, slot) for slot in range(16)}
    models = {slot: model for slot, model in models.items() if not model.waits}
    assert len(models) > 6
    logits = torch.randn(40, len(models), V, device=device)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for slot, model in models.items():
            add(sampler, slot, model)
        tokens = [sampler.sample(step.clone(), list(models)).token_R for step in logits]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for step, token_R in zip(logits.tolist(), tokens):
        expected = [model.token(row) for model, row in zip(models.values(), step)]
        assert token_R.tolist() == expected
        for model, token in zip(models.values(), expected):
            model.output.append(token)


def test_penalty_rows_are_made_when_needed_and_used_again() -> None:
    sampler = Sampler(64, V, CPU)
    rows = sampler._penalties
    for slot in range(32):
        sampler.add(slot, make_request(str(slot), seed=slot))
    sampler.sample(torch.randn(32, V), list(range(32)))
    assert rows.count_PV.shape[0] == 0
    for turn in range(5):
        for slot in range(32, 37):
            sampler.add(slot, make_request(f"{turn} {slot}", prompt=[turn], presence_penalty=1.0), [7, 7, turn])
        sampler.sample(torch.randn(5, V), list(range(32, 37)))
        sampler.check()
        for slot in range(32, 37):
            sampler.remove(slot)
    assert rows.count_PV.shape[0] == 8
    sampler.check()


def test_counts_over_many_steps_are_the_hosts() -> None:
    sampler = Sampler(4, V, CPU)
    output: dict[int, list[int]] = {1: [4, 4, 9], 3: []}
    prompt = {1: [5, 6], 3: [0, V - 1]}
    for slot in output:
        request = make_request(str(slot), prompt[slot], seed=slot, frequency_penalty=0.1)
        sampler.add(slot, request, output[slot])
    for step in range(200):
        slots = [[1, 3], [3, 1], [1], [3]][step % 4]
        for slot, token in zip(slots, sampler.sample(torch.randn(len(slots), V), slots).token_R.tolist()):
            output[slot].append(token)
    for slot, tokens in output.items():
        occupant = sampler.slots[slot]
        assert occupant is not None
        counts = Counter(tokens)
        row = occupant.penalty_row
        assert sampler._penalties.count_PV[row].tolist() == [counts[token] for token in range(V)]
        assert sampler._penalties.prompt_PV[row].nonzero()[:, 0].tolist() == sorted(prompt[slot])


@pytest.mark.parametrize("inference_first", [False, True])
def test_in_and_out_of_inference_mode(inference_first: bool) -> None:
    sampler = Sampler(4, V, CPU)
    for slot in range(2):
        options = {"min_tokens": 2, "frequency_penalty": 0.5, "logit_bias": {1: 1.0}}
        with torch.inference_mode(inference_first):
            sampler.add(slot, make_request(str(slot), **options), [1, 2], eos_ids=EOS)
            sampler.sample(torch.randn(1, V), [slot])
        with torch.inference_mode(not inference_first):
            sampler.sample(torch.randn(1, V), [slot])
            sampler.sample(torch.randn(slot + 1, V), list(range(slot + 1)))


# ---------------------------------------------------------------------------------------------------------------------
# Log probabilities
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [1, 3 * V, 1 << 22])
def test_token_logprobs(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling_plan, "CHUNK", chunk)
    logits, token = 3 * torch.randn(10, V), torch.randint(V, (10,))
    token[4] = logits[4].argmax()
    found = token_logprobs(logits, token, 5).to_host().all(5)
    expected = logits.log_softmax(-1)
    for t, one in enumerate(found):
        assert one.token_id == token[t] and len(one.top) == 5
        assert one.logprob == pytest.approx(expected[t, token[t]].item(), abs=1e-6)
        assert one.rank == 1 + (logits[t] > logits[t, token[t]]).sum()
        assert [id for id, _ in one.top] == logits[t].topk(5).indices.tolist()
        assert dict(one.top).get(one.token_id, one.logprob) == one.logprob  # the same float, not nearly so
        assert sorted([logprob for _, logprob in one.top], reverse=True) == [logprob for _, logprob in one.top]
    assert (found[4].rank, found[4].top[0]) == (1, (found[4].token_id, found[4].logprob))


def test_equal_alternatives_come_in_the_order_of_their_ids() -> None:
    logits = torch.zeros(2, V)
    logits[0, [9, 30]] = 2
    logits[1] = -0.0
    found = token_logprobs(logits, torch.tensor([30, 30]), 4).all(4)
    assert [[id for id, _ in one.top] for one in found] == [[9, 30, 0, 1], [0, 1, 2, 3]]
    assert [one.rank for one in found] == [1, 1]


def test_more_alternatives_than_tokens() -> None:
    sampler = Sampler(1, 7, CPU)
    sampler.add(0, make_request(logprobs=20))
    assert len(sampler.sample(torch.randn(1, 7), [0]).token_logprobs(0, 20).top) == 7


def test_no_rows() -> None:
    assert token_logprobs(torch.zeros(0, V), torch.zeros(0, dtype=torch.int64), 3).all(3) == []


def test_logprobs_are_the_models_own() -> None:
    """Bias and penalties decide what is taken, not how probable it is called."""
    sampler = Sampler(2, V, CPU)
    sampler.add(1, make_request(temperature=0, logprobs=1, logit_bias={9: 100.0}, repetition_penalty=2.0))
    logits = torch.zeros(1, V)
    logits[0, 4] = 5
    found = sampler.sample(logits.clone(), [1]).token_logprobs(0, 1)
    expected = logits[0].log_softmax(-1)
    assert (found.token_id, found.rank, found.top[0][0]) == (9, 2, 4)
    assert [found.logprob, found.top[0][1]] == [expected[9].item(), expected[4].item()]


# ---------------------------------------------------------------------------------------------------------------------
# What the host must know
# ---------------------------------------------------------------------------------------------------------------------


def test_who_needs_host_tokens() -> None:
    plain, grammar = SamplingParams(min_tokens=2, seed=1), SamplingParams(grammar=Grammar(regex="a"))
    worded = SamplingParams(bad_words=("a b",))
    assert not needs_host_tokens(plain) and not needs_host_tokens(worded, [[1], [2]])
    assert needs_host_tokens(grammar) and needs_host_tokens(grammar, [])
    assert needs_host_tokens(worded, [[1], [2, 3]])


def test_a_token_must_be_accepted_before_the_next_where_it_matters() -> None:
    sampler = Sampler(2, V, CPU)
    sampler.add(0, make_request("free"), bad_word_ids=[[4]])
    sampler.add(1, make_request("watched"), bad_word_ids=[[4, 5]])
    sampler.sample(torch.randn(2, V), [0, 1])
    sampler.sample(torch.randn(1, V), [0])
    with pytest.raises(AssertionError, match="watched: its last token has not been accepted"):
        sampler.sample(torch.randn(2, V), [0, 1])
    assert sampler.accept(1, 4)
    logits = torch.zeros(1, V)
    logits[0, 5] = 50
    assert sampler.sample(logits, [1]).token_R.item() != 5


def test_a_bad_word_of_several_tokens_is_forbidden_only_where_it_would_be_complete() -> None:
    def next_token(output: list[int], accepted: list[int]) -> int:
        sampler = Sampler(1, V, CPU)
        sampler.add(0, make_request(temperature=0), output, bad_word_ids=[[4, 5, 6]])
        for token in accepted:
            sampler.sample(torch.zeros(1, V), [0])
            sampler.accept(0, token)
        logits = torch.zeros(1, V)
        logits[0, 6] = 1
        return int(sampler.sample(logits, [0]).token_R)

    for output, accepted in (([4, 5], []), ([9, 4], [5]), ([], [4, 5]), ([4], [4, 5])):
        assert next_token(output, accepted) == 0
    for output, accepted in (([9, 5], []), ([4, 5], [5]), ([5], []), ([], []), ([4], [9, 5])):
        assert next_token(output, accepted) == 6


def test_misuse_is_seen() -> None:
    sampler = Sampler(2, V, CPU)
    sampler.add(0, make_request())
    with pytest.raises(AssertionError, match="taken"):
        sampler.add(0, make_request())
    for wrong in (
        lambda: sampler.remove(1),
        lambda: sampler.accept(1, 4),
        lambda: sampler.sample(torch.zeros(1, V), [1]),
    ):
        with pytest.raises(AssertionError, match="slot 1 is empty"):
            wrong()
    with pytest.raises(AssertionError, match="of 1 slots"):
        sampler.sample(torch.zeros(1, V + 1), [0])


def test_numbers_too_large_for_the_device() -> None:
    sampler = Sampler(1, V, CPU)
    huge = 2**63 - 1  # the largest that SamplingParams takes
    sampler.add(0, make_request(top_k=huge, min_tokens=huge, max_tokens=huge, logit_bias={EOS[0]: 100}), eos_ids=EOS)
    assert sampler.sample(torch.zeros(1, V), [0]).token_R.item() not in EOS
