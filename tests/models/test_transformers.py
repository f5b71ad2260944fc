"""Our models against Hugging Face transformers: same logits, same greedy tokens, however the tokens are fed.

The checkpoints and the judge stand in `tiny.py`. All in float32 on the CPU, where both sides round alike: what is
left between them is the order of additions. A wrong model is off by 0.1 and more.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models import tiny

TOLERANCE = 1e-4  # largest absolute difference of a logit; logits have a standard deviation of 1 to 2
CHUNKS = (1, 7, 16, 3)  # then the rest: crosses page borders, ends on none, begins chunks inside a window


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What transformers says: `logits` of the prompt and the continuation together, [len(token_ids), vocab]."""

    prompt: list[int]
    continuation: list[int]
    logits: torch.Tensor

    @property
    def token_ids(self) -> list[int]:
        return self.prompt + self.continuation


@pytest.fixture(scope="session", params=tiny.CASES, ids=lambda case: case.name)
def case(request: pytest.FixtureRequest) -> tiny.Case:
    return request.param


@pytest.fixture(scope="session")
def folder(case: tiny.Case, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(case, tmp_path_factory.mktemp(case.name))


@pytest.fixture(scope="session")
def verdict(case: tiny.Case, folder: Path) -> Verdict:
    judge = tiny.Judge(folder, case.model_type)
    prompt = tiny.prompt(case)
    continuation = judge.greedy(prompt)
    logits = judge.logits(prompt + continuation)
    lead = tiny.smallest_lead(logits[len(prompt) - 1 : -1])
    assert lead > 20 * TOLERANCE, f"greedy tokens of {case.name} are decided by {lead:.1e}: choose another seed"
    return Verdict(prompt=prompt, continuation=continuation, logits=logits)


@pytest.fixture(scope="session")
def model(folder: Path) -> Any:
    from anabranch.loader.load import load_model

    return load_model(folder, dtype="float32")


def new_sequence(model: Any) -> Any:
    from anabranch.engine.single import SingleSequence

    return SingleSequence(model, max_length=256, page_size=16)


def assert_close(logits: torch.Tensor, expected: torch.Tensor) -> None:
    assert logits.shape == expected.shape
    assert logits.dtype == torch.float32
    difference = (logits - expected).abs().amax(dim=-1)
    worst = int(difference.argmax())
    assert difference[worst] <= TOLERANCE, (
        f"token {worst} of {len(expected)} is off by {difference[worst]:.1e}, "
        f"where logits have a standard deviation of {expected.std():.2f}; "
        f"first token off: {int((difference > TOLERANCE).nonzero()[0])}"
    )


def test_prefill(model: Any, verdict: Verdict) -> None:
    assert_close(new_sequence(model).forward(verdict.token_ids), verdict.logits)


def test_token_by_token(model: Any, verdict: Verdict, thorough: bool) -> None:
    """All of them only if `thorough`: test_greedy goes on token by token where the prompt ends."""
    sequence = new_sequence(model)
    singles = verdict.token_ids if thorough else verdict.prompt
    logits = torch.cat([sequence.forward([token_id]) for token_id in singles])
    assert_close(logits, verdict.logits[: len(singles)])


def test_chunks(model: Any, verdict: Verdict) -> None:
    sequence = new_sequence(model)
    rest = list(verdict.token_ids)
    parts = []
    for length in (*CHUNKS, len(rest) - sum(CHUNKS)):
        chunk, rest = rest[:length], rest[length:]
        parts.append(sequence.forward(chunk))
    assert_close(torch.cat(parts), verdict.logits)


def test_greedy(model: Any, verdict: Verdict) -> None:
    from anabranch.engine.single import SingleSequence
    from tests.models.greedy import greedy

    tokens = greedy(SingleSequence(model, 256), verdict.prompt, tiny.NUM_NEW_TOKENS)
    assert tokens == verdict.continuation
