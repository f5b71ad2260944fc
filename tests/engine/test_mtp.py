"""Drafts of a checkpoint's own draft layer: they are what transformers' modules give for it, however requests are
batched, split, preempted or captured, and they change no answer."""

import copy
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from anabranch import platforms
from anabranch.config import EngineConfig
from anabranch.engine.drafts import StepDrafter
from anabranch.engine.engine import Engine, make_engine
from anabranch.loader.checkpoint import CheckpointError
from anabranch.loader.resolve import resolve
from anabranch.models.config import read_config
from anabranch.models.keys import ConfigError
from anabranch.request import Request, Update
from anabranch.sampling_params import SamplingParams
from tests.engine.test_graphs import fake  # noqa: F401
from tests.engine.test_speculation import CASES, DEFAULTS, PARAMS, Batch, answers, assert_same, requests, run
from tests.models import tiny
from tests.parallel.ranks import forked  # noqa: F401

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
OPTIONS = DEFAULTS | {"speculative": "mtp", "speculative_tokens": 3}


class Draft(nn.Module):
    """The layer in transformers' modules."""

    def __init__(self, text: nn.Module) -> None:
        super().__init__()
        width = text.config.hidden_size
        self.layers = nn.ModuleList([copy.deepcopy([m for m in text.layers if hasattr(m, "self_attn")][-1])])
        self.fc = nn.Linear(2 * width, width, bias=False)
        self.norm, self.pre_fc_norm_embedding, self.pre_fc_norm_hidden = (copy.deepcopy(text.norm) for _ in range(3))


class Reference:
    """A model of transformers with a draft layer of random weights; with `mapping`, a model whose next token depends on
    the last one alone, and a draft layer that knows this."""

    def __init__(self, name: str, folder: Path, mapping: bool = False) -> None:
        self.folder = tiny.save(CASES[name], folder)
        self.model = tiny.build(CASES[name])
        inner = self.model.model
        self.text = getattr(inner, "language_model", inner)
        self.draft = Draft(self.text).eval()
        tiny.randomise(self.draft, 7)
        if mapping:
            with torch.no_grad():
                self._make_mapping()
        tensors = {f"mtp.{name}": tensor.clone() for name, tensor in self.draft.state_dict().items()}
        path = self.folder / "model.safetensors"
        stored = load_file(path)
        if mapping:
            stored = {name: tensor * 0 if name.endswith(RESULTS) else tensor for name, tensor in stored.items()}
        save_file(stored | tensors, path, metadata={"format": "pt"})

    def _make_mapping(self) -> None:
        width = self.text.config.hidden_size
        for name, tensor in self.draft.state_dict().items():
            if name.endswith(RESULTS):
                tensor.zero_()
        self.draft.fc.weight.copy_(torch.eye(width, 2 * width))
        self.draft.pre_fc_norm_embedding.weight.zero_()
        self.draft.norm.load_state_dict(self.text.norm.state_dict())

    @torch.inference_mode()
    def drafts(self, tokens: list[int], most: int) -> list[int]:
        """The first `most` after these tokens; from the second on the layer's own rows are its input."""
        ids, draft = torch.tensor([tokens]), self.draft
        hidden = self.text(input_ids=ids).last_hidden_state[:, :-1]
        token, found = ids[:, 1:], []
        while True:
            parts = draft.pre_fc_norm_embedding(self.text.embed_tokens(token)), draft.pre_fc_norm_hidden(hidden)
            x, length = draft.fc(torch.cat(parts, -1)), token.shape[1]
            position = torch.arange(length)[None]
            if self.text.config.model_type != "qwen3_next":
                position = position.expand(3, 1, -1)
            mask = torch.full((length, length), float("-inf")).triu(1)[None, None]
            rope = self.text.rotary_emb(x, position)
            x = draft.norm(draft.layers[0](x, position_embeddings=rope, attention_mask=mask))[:, -1:]
            found.append(int(self.model.lm_head(x).argmax()))
            if len(found) == most:
                return found
            token, hidden = torch.cat([token, torch.tensor([found[-1:]])], 1), torch.cat([hidden, x], 1)


RESULTS = ("out_proj.weight", "o_proj.weight", "down_proj.weight", "experts.down_proj")
"""Weights without which a layer changes nothing."""
NAMES = ["qwen3_5_moe", *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen3_5", "qwen3_next"))]


@pytest.fixture(scope="module", params=NAMES)
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return Reference(request.param, tmp_path_factory.mktemp("model") / "model")


@pytest.fixture(scope="module")
def alone(reference: Reference) -> Iterator[Callable[[Batch], list[Update]]]:
    """Each request by itself, cold, without speculation."""
    one = make_engine(EngineConfig(model=str(reference.folder), prefix_cache=False, **DEFAULTS))
    known: dict[str, Update] = {}

    def compute(batch: Batch) -> list[Update]:
        for request in batch:
            if request.id not in known:
                known[request.id] = run(one, [request])[0]
        return [known[request.id] for request in batch]

    yield compute
    one.close()


@pytest.fixture
def proposed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[int], list[int]]]:
    """(tokens, drafts after them)"""
    found: list[tuple[list[int], list[int]]] = []
    propose = StepDrafter.propose

    def noted(self: StepDrafter, tokens: list[int], most: int) -> list[int]:
        drafts = propose(self, tokens, most)
        if drafts:
            found.append((list(tokens), drafts))
        return drafts

    monkeypatch.setattr(StepDrafter, "propose", noted)
    return found


@pytest.fixture
def engine(reference: Reference) -> Iterator[Callable[..., Engine]]:
    made: list[Engine] = []

    def make(**options: Any) -> Engine:
        made.append(make_engine(EngineConfig(model=str(reference.folder), **(OPTIONS | options))))
        return made[-1]

    yield make
    for one in made:
        assert one.metrics.draft_tokens > 50
        one.close()
        one.scheduler.check()
        assert one.kv.usage() == 0


def assert_drafts(reference: Reference, proposed: list[tuple[list[int], list[int]]]) -> None:
    """As transformers gives them."""
    assert len(proposed) > 50
    for tokens, drafts in random.Random(0).sample(proposed, 50):
        assert reference.drafts(tokens, len(drafts)) == drafts
    assert max(len(drafts) for _, drafts in proposed) > 1


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, marks=pytest.mark.slow),
        pytest.param({"max_num_batched_tokens": 7, "max_num_seqs": 4}, marks=pytest.mark.slow),
        {"num_pages": 32, "max_model_len": 72, "prefix_cache": True},
        pytest.param({"max_num_seqs": 1, "prefix_cache": True}, marks=pytest.mark.slow),
    ],
    ids=["batched", "chunked", "preempted", "warm"],
)
def test_drafts_are_transformers(options, reference, engine, alone, proposed) -> None:
    """And they change no answer: greedy, drawn, with all that is asked of the sampler."""
    batch = requests(8 if "max_num_seqs" in options else 16)
    expected = alone(batch)
    one = engine(**({"prefix_cache": False} | options))
    for _ in range(2 if options.get("max_num_seqs") == 1 else 1):
        assert_same(run(one, batch), expected)
    assert (one.scheduler.num_preemptions > 0) == ("num_pages" in options)
    num_drafts = sum(len(drafts) for _, drafts in proposed)
    assert one.stats()["spec_decode_draft_tokens"] == one.metrics.draft_tokens <= num_drafts
    assert_drafts(reference, proposed)


@pytest.mark.slow
def test_aborted_and_warm_prefixes_that_go_on_otherwise(engine, alone) -> None:
    """The last entry of a shared page has seen another next token: a guess may differ, an answer not."""
    batch = requests(6)
    expected = alone(batch)
    one = engine()
    found = run(one, batch, ("1", "4"))
    assert_same([found[i] for i in (0, 2, 3, 5)], [expected[i] for i in (0, 2, 3, 5)])
    longer = [
        Request(id=f"longer {i}", prompt_ids=(*tokens[: len(tokens) - cut], 3, i), params=PARAMS[i])
        for i, (tokens, cut) in enumerate(zip(answers(batch, expected), (0, 3, 9, 12, 1, 2), strict=True))
    ]
    warm = run(one, longer)
    assert_same(warm, alone(longer))
    assert any(update.num_cached for update in warm)
    one.set_drafting(False)
    assert_same(run(one, longer), warm)
    one.set_drafting(True)


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_two_ranks(reference: Reference, engine, alone, proposed) -> None:
    """Prompts in several steps, of which only the last samples; every rank runs the draft layer."""
    batch = requests(12)
    expected = alone(batch)
    one = engine(tensor_parallel_size=2, max_num_batched_tokens=24, max_num_seqs=6)
    assert_same(run(one, batch), expected)
    assert one.runner.model.group.size == 2
    assert_drafts(reference, proposed)


@pytest.mark.parametrize("graphs", ["full", pytest.param("pieces", marks=pytest.mark.slow)])
def test_captured(graphs: str, reference: Reference, fake, alone, proposed) -> None:  # noqa: F811
    batch = requests(10)
    expected = alone(batch)
    proposed.clear()
    one = make_engine(
        EngineConfig(model=str(reference.folder), **(OPTIONS | {"graphs": graphs, "prefix_cache": False}))
    )
    assert_same(run(one, batch), expected)
    one.close()
    assert_drafts(reference, proposed)


def test_a_layer_that_knows_the_model(tmp_path: Path) -> None:
    """All drafts are right where answers are greedy: three of four steps are saved."""
    folder = Reference("qwen3_5_moe", tmp_path, mapping=True).folder
    rng = random.Random(0)
    prompts = [tuple(rng.randrange(tiny.VOCAB_SIZE) for _ in range(rng.randrange(3, 30))) for _ in range(5)]
    batch = [Request(id=str(i), prompt_ids=prompt, params=GREEDY) for i, prompt in enumerate(prompts)]
    drawn = SamplingParams(temperature=1, top_k=2, seed=3, max_tokens=24, ignore_eos=True)
    some = [Request(id=f"drawn {i}", prompt_ids=prompt, params=drawn) for i, prompt in enumerate(prompts)]
    plain = make_engine(EngineConfig(model=str(folder), **DEFAULTS))
    expected, expected_drawn, steps = run(plain, batch), run(plain, some), plain.metrics.steps
    one = make_engine(EngineConfig(model=str(folder), **OPTIONS))
    assert_same(run(one, batch), expected)
    stats = one.stats()
    assert stats["spec_decode_acceptance"] > 0.97
    assert one.metrics.steps <= 8 < steps / 4
    assert_same(run(one, some), expected_drawn)
    assert (
        0.3
        < (one.metrics.accepted_tokens - stats["spec_decode_accepted_tokens"])
        / (one.metrics.draft_tokens - stats["spec_decode_draft_tokens"])
        < 0.95
    )
    one.close()
    plain.close()


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="speculative mtp: qwen3_moe models have no draft layer; use ngram or none"):
        read_config(tiny.save(CASES["qwen3_moe"], tmp_path / "none"), speculative="mtp")
    without = tiny.save(CASES["qwen3_5"], tmp_path / "without")
    config = EngineConfig(model=str(without), **OPTIONS)
    with pytest.raises(CheckpointError, match="speculative mtp: the checkpoint has no tensors 'mtp..'; use ngram"):
        make_engine(config)
    model = read_config(tiny.save(CASES["qwen3_5_moe"], tmp_path / "experts"), speculative="mtp")
    divided = EngineConfig(model="x", data_parallel_size=2, expert_parallel=True, speculative="mtp")
    with pytest.raises(ValueError, match="speculative mtp: not yet with data_parallel_size"):
        resolve(divided, model, platforms.current())
    assert (config.max_drafts, config.num_ahead, config.max_samples) == (3, 2, 64)
