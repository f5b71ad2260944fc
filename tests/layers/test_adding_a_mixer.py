"""The mixer that docs/adding_a_mixer.md adds, as the page shows it: one state per request, in the engine as it is."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from anabranch.conformance import tiny
from anabranch.engine import plan
from anabranch.engine.single import SingleSequence
from anabranch.llm import LLM
from anabranch.loader.load import load_model
from anabranch.models import family
from anabranch.models.decoder import Decoder
from anabranch.sampling_params import SamplingParams
from tests.models.greedy import greedy

PAGE = Path(__file__).parents[2] / "docs" / "adding_a_mixer.md"
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = [[(7 * i + j * j) % tiny.VOCAB_SIZE for j in range(length)] for i, length in enumerate((5, 33, 1, 18, 47, 9))]


def add_module(name: str) -> ModuleType:
    file = f"src/{name.replace('.', '/')}.py"
    found = re.search(rf"^\*\*{re.escape(file)}\*\*\n\n```python\n(.*?)^```$", PAGE.read_text(), re.M | re.S)
    assert found is not None, file
    module = sys.modules[name] = ModuleType(name)
    exec(found[1], vars(module))
    return module


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(family, "_registered", {})
    added = "anabranch.layers.leaky", "anabranch.models.families.leaky"
    try:
        modules = [add_module(name) for name in added]
        family.register(modules[1].FAMILY)
        tiny.write("leaky", tmp_path)
        yield tmp_path
    finally:
        for name in added:
            sys.modules.pop(name, None)


def by_definition(model: Decoder, tokens: list[int]) -> torch.Tensor:
    """Logits of the whole sequence with the leaky sums as one product: y = L · v, L[t, s] = decay^(t − s)."""
    leaky = sys.modules["anabranch.layers.leaky"]

    def mix(self: torch.nn.Module, written: torch.Tensor, step: object, cache: object) -> torch.Tensor:
        age = torch.arange(len(written))[:, None] - torch.arange(len(written))
        return torch.where(age >= 0, leaky.DECAY ** age.clamp_min(0).float(), 0.0) @ written

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(leaky.LeakySum, "mix", mix)
        return SingleSequence(model, 128).forward(tokens)


def test_chunked_is_whole(folder: Path) -> None:
    model = load_model(folder, dtype="float32")
    tokens = PROMPTS[4]
    expected = by_definition(model, tokens)
    assert expected.std() > 0.1
    for chunks in ((47,), (1, 16, 30), (20, *([1] * 27))):
        sequence, rest, parts = SingleSequence(model, 128), tokens, []
        for length in chunks:
            parts.append(sequence.forward(rest[:length]))
            rest = rest[length:]
        torch.testing.assert_close(torch.cat(parts), expected, rtol=0, atol=1e-4)


def test_the_memory_plan_counts_states_per_request(folder: Path) -> None:
    config = load_model(folder).config
    groups = config.cache_groups
    assert [group.policy.per_token for group in groups] == [False, True]
    one, many = (plan.request_bytes(config, tokens, 16, "float32") for tokens in (16, 1600))
    state = len(groups[0].layers) * config.hidden_size * 4
    assert (many - state) == 100 * (one - state)
    model = load_model(folder)
    assert sum(plan.count_weights(config).values()) == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_seqs": 2},
        {"max_num_batched_tokens": 8, "max_num_seqs": 3},
        {"num_pages": 5, "page_size": 16, "max_model_len": 64},
        {"async_scheduling": False},
    ],
    ids=["batched", "few slots", "chunked", "preempted", "synchronous"],
)
def test_in_the_engine_as_alone(folder: Path, options: dict[str, int]) -> None:
    model = load_model(folder, dtype="float32")
    expected = [greedy(SingleSequence(model, 128), prompt, 12) for prompt in PROMPTS]
    assert len({tuple(tokens) for tokens in expected}) > 3
    with LLM(str(folder), dtype="float32", **options) as llm:
        found = llm.generate(PROMPTS, GREEDY)
        again = llm.generate(PROMPTS, GREEDY)
        llm.engine.scheduler.check()
        preemptions = llm.engine.scheduler.num_preemptions
    assert [output.token_ids for output in found] == [output.token_ids for output in again] == expected
    assert (preemptions > 0) == ("num_pages" in options)
    cached = [output.num_cached for output in again]
    if not options:
        assert cached == [0, 32, 0, 16, 32, 0], "from checkpoints of the states, where a page ends"
    assert all(n % 16 == 0 and n < len(prompt) for n, prompt in zip(cached, PROMPTS, strict=True))
