"""Models with delta nets: prompts of all lengths against transformers, several samples, aborts; norms that checkpoints
keep less 1, and tensors that the loader passes over. See also test_transformers and test_engine."""

import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import anabranch
from anabranch.config import EngineConfig
from anabranch.engine.engine import make_engine
from anabranch.engine.single import SingleSequence
from anabranch.layers.cache import OneState
from anabranch.layers.norm import RMSNorm
from anabranch.llm import LLM
from anabranch.loader.load import load_model
from anabranch.models.config import read_config
from anabranch.request import Request
from anabranch.sampling_params import SamplingParams
from tests.models import tiny
from tests.models.greedy import greedy

CASES = {case.name: case for case in tiny.CASES}
PUBLISHED = [
    "qwen3_5_moe_published",
    pytest.param("qwen3_5_published", marks=pytest.mark.slow),
    pytest.param("qwen3_next_published", marks=pytest.mark.slow),
]
LENGTHS = (1, 2, 3, 4, 63, 64, 65, 127, 130, 200)
"""Shorter than the convolution, and around multiples of the chunks in which prompts are computed."""


@pytest.fixture(params=PUBLISHED)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return tiny.save(CASES[request.param], tmp_path / "model")


def tokens(length: int) -> list[int]:
    return [(13 * i * i + 3 * i + 1) % tiny.VOCAB_SIZE for i in range(length)]


def test_prompts_of_all_lengths(folder: Path) -> None:
    judge = tiny.Judge(folder, read_config(folder).model_type)
    model = load_model(folder, dtype="float32")
    expected = judge.logits(tokens(max(LENGTHS)))
    for length in LENGTHS:
        found = SingleSequence(model, 256).forward(tokens(length))
        assert (found - expected[:length]).abs().max() < 1e-4, length


def test_decode_of_64_tokens(folder: Path) -> None:
    judge, length = tiny.Judge(folder, read_config(folder).model_type), 70
    expected = judge.logits(tokens(length + 64))
    sequence = SingleSequence(load_model(folder, dtype="float32"), 256)
    sequence.forward(tokens(length))
    for place in range(length, length + 64):
        found = sequence.forward(tokens(place + 1)[place:])
        assert (found - expected[place]).abs().max() < 1e-4, place


def test_many_requests_are_as_alone(folder: Path) -> None:
    """More than there is room for: they wait, are preempted, and take the states that others leave."""
    model = load_model(folder, dtype="float32")
    prompts = [tokens(length)[::-1] for length in (40, 1, 17, 64, 5, 33, 2, 50)]
    expected = [greedy(SingleSequence(model, 256), prompt, 20) for prompt in prompts]
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    for options in ({}, {"num_pages": 24, "page_size": 4, "max_model_len": 88}, {"max_num_batched_tokens": 8}):
        with LLM(str(folder), dtype="float32", max_num_seqs=8, **options) as llm:
            assert [output.token_ids for output in llm.generate(prompts, params)] == expected
            llm.engine.scheduler.check()


def test_samples_of_one_prompt_are_as_alone(folder: Path) -> None:
    with LLM(str(folder), dtype="float32", max_num_seqs=8) as llm:
        (together,) = llm.generate([tokens(30)], SamplingParams(n=3, seed=5, max_tokens=12, ignore_eos=True))
        one_by_one = [
            llm.generate([tokens(30)], SamplingParams(seed=5 + i, max_tokens=12, ignore_eos=True))[0].token_ids
            for i in range(3)
        ]
    assert [completion.token_ids for completion in together.completions] == one_by_one
    assert len({tuple(sample) for sample in one_by_one}) == 3


def test_an_abort_leaves_no_state(folder: Path) -> None:
    """The next request gets the page of the one that was aborted, and its answer is as alone."""
    config = EngineConfig(model=str(folder), dtype="float32", max_num_seqs=1, num_pages=64, page_size=4)
    engine = make_engine(config)
    params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
    engine.add(Request(id="aborted", prompt_ids=tuple(tokens(40)), params=params))
    for _ in range(4):
        engine.step()
    engine.abort("aborted")
    engine.add(Request(id="next", prompt_ids=tuple(tokens(9)), params=params))
    found: list[int] = []
    while engine.has_work:
        found += [token for update in engine.step() if update.id == "next" for token in update.token_ids]
    engine.close()
    assert engine.kv.usage() == 0
    assert found == greedy(SingleSequence(load_model(folder, dtype="float32"), 64), tokens(9), 10)


def test_norms_are_whole_and_in_fp32(tmp_path: Path) -> None:
    """In bf16, 1 + w would lose what a small w says."""
    folder = tiny.save(CASES["qwen3_5_text_linear_rope_bfloat16"], tmp_path)
    model, kept = load_model(folder, dtype="bfloat16"), load_file(folder / "model.safetensors")
    for name, norm in model.named_modules():
        if isinstance(norm, RMSNorm):
            stored = kept[f"model.{name}.weight"]
            assert stored.dtype == torch.bfloat16 and norm.weight.dtype == torch.float32
            assert torch.equal(norm.weight, 1 + stored.float())
    inner = model.layers[0].mixer
    assert torch.equal(inner.norm.weight, kept["model.layers.0.linear_attn.norm.weight"])  # kept as it is
    assert inner.norm.weight.dtype == torch.bfloat16 and inner.A_log.dtype == torch.float32
    assert SingleSequence(model, 64).forward(tokens(40)).isfinite().all()


def test_tensors_that_are_passed_over_are_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tiny.save(CASES["qwen3_5_moe_published"], tmp_path)
    with caplog.at_level(logging.INFO, "anabranch"):
        load_model(folder)
    (line,) = [message for message in caplog.messages if "not used" in message]
    assert "model.visual." in line and "2 of '*mtp.*'" in line


def test_the_cache_of_the_published_model() -> None:
    """A state of 63 MiB, and 20 KiB a token in bf16."""
    config = read_config(Path(anabranch.__file__).parent / "bench" / "configs" / "qwen3.6-35b-a3b")
    states, full = config.cache_groups
    assert states.policy == OneState() and len(states.layers) == 30 and len(full.layers) == 10
    assert states.num_values * 4 == 30 * (32 * 128 * 128 + 3 * 8192) * 4
    assert full.num_values * 2 == 20 << 10
