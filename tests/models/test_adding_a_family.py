"""The family that docs/adding_a_model.md adds, as the page shows it: transformers judges it, the rest finds it."""

import copy
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from anabranch.conformance import tiny as conformance
from anabranch.engine import plan
from anabranch.engine.single import SingleSequence
from anabranch.loader.load import load_model
from anabranch.models import family
from anabranch.models.config import read_config
from anabranch.models.keys import ConfigError
from tests.models import tiny
from tests.models.greedy import greedy

PAGE = Path(__file__).parents[2] / "docs" / "adding_a_model.md"
CHUNKS = (1, 7, 16, 3)


def block(file: str) -> str:
    """The code that follows a file's name on the page."""
    found = re.search(rf"^\*\*{re.escape(file)}\*\*\n\n```python\n(.*?)^```$", PAGE.read_text(), re.M | re.S)
    assert found is not None, file
    return found[1]


@pytest.fixture
def cases(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tiny.Case]]:
    """Those that the page adds, with its family registered."""
    monkeypatch.setattr(family, "_registered", {})
    module: dict[str, Any] = {}
    exec(block("src/anabranch/models/families/mistral.py"), module)
    family.register(module["FAMILY"])
    for name in ("ARCHITECTURES", "BASES", "CASES"):
        monkeypatch.setattr(tiny, name, copy.copy(getattr(tiny, name)))
    num_before = len(tiny.CASES)
    exec(block("tests/models/tiny.py"), vars(tiny))
    yield tiny.CASES[num_before:]


def test_it_is_like_transformers(cases: list[tiny.Case], tmp_path: Path) -> None:
    for case in cases:
        folder = tiny.save(case, tmp_path / case.name)
        judge, prompt = tiny.Judge(folder, case.model_type), tiny.prompt(case)
        continuation = judge.greedy(prompt)
        expected = judge.logits(prompt + continuation)
        assert tiny.smallest_lead(expected[len(prompt) - 1 : -1]) > 2e-3, f"{case.name}: choose another seed"
        model = load_model(folder, dtype="float32")
        sequence, rest, parts = SingleSequence(model, max_length=256), prompt + continuation, []
        for length in (*CHUNKS, len(rest)):
            parts.append(sequence.forward(rest[:length]))
            rest = rest[length:]
            if not rest:
                break
        torch.testing.assert_close(torch.cat(parts), expected, rtol=0, atol=1e-4)
        assert greedy(SingleSequence(model, 256), prompt, tiny.NUM_NEW_TOKENS) == continuation
        counted = sum(plan.count_weights(model.config).values())
        assert counted == sum(parameter.numel() for parameter in model.parameters())


def test_the_rest_finds_it(cases: list[tiny.Case], tmp_path: Path) -> None:
    conformance.write("mistral", tmp_path)
    config = load_model(tmp_path).config
    assert config.model_type == "mistral" and {layer.attention.window for layer in config.layers} == {32}
    (tmp_path / "config.json").write_text('{"model_type": "mistrel"}')
    with pytest.raises(ConfigError, match=r"'mistrel' is not supported .* did you mean 'mistral'\?"):
        read_config(tmp_path)


def test_without_it_the_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "mistral"}')
    with pytest.raises(ConfigError, match=r"'mistral' is not supported \(supported: .*\); did you mean 'mixtral'\?"):
        read_config(tmp_path)
