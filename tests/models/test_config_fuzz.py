"""Fuzzed configs against transformers: a key that changes its result is followed, or refused by name.

`config_fuzz` makes the variants and judges them. A few of each family are judged here, among them every fault that was
found once; the sweep over all single changes and many combinations is marked slow.
"""

import random
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from tests.models import config_fuzz
from tests.models.config_fuzz import DROP, FAMILIES, LLAMA3, NESTED_ROPES, Change, Variant, faults

NUM_COMBINATIONS = 100
LINEAR = {"type": "linear", "factor": 3.0}
NESTED_BASE = ("gemma4_text", "gemma4")

# Each was computed differently once, without a word.
FLAT_FAULTS: list[dict[str, Any]] = [
    {"rope_scaling": LINEAR},  # beside rope_parameters, in transformers' spelling
    {"rope_scaling": LINEAR | {"rope_theta": 500.0}, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    {"rope_scaling": LLAMA3},  # without original_max_position_embeddings
    {"rope_parameters": LLAMA3 | {"original_max_position_embeddings": 16}, "original_max_position_embeddings": 32},
    {"rope_parameters": {"rope_type": "linear"}},
    {"rope_parameters": NESTED_ROPES[0]},
    {"hidden_activation": "gelu_pytorch_tanh"},
    {"is_causal": False},
    {"max_position_embeddings": DROP, "rope_scaling": LLAMA3},
    {"num_key_value_heads": DROP},
]
GEMMA4_FAULTS: list[dict[str, Any]] = [
    {"rope_scaling": NESTED_ROPES[1]},
    {"rope_scaling": LINEAR},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 300.0}},
    {"rope_parameters": NESTED_ROPES[5]},
    {"hidden_activation": DROP},
    {"hidden_act": "silu"},
    {"is_causal": False},
    {"final_logit_softcapping": 0.0},
    {"per_layer_config": {"01": {"head_dim": 12}, "03": {"head_dim": 12}}},
    {"per_layer_config": None},
]
OUTER_FAULTS: list[dict[str, Any]] = [{"tie_word_embeddings": False}, {"text_config": DROP}, {"hidden_size": 24}]


def known_faults(family: str) -> Iterator[Variant]:
    for changes in GEMMA4_FAULTS if family in NESTED_BASE else FLAT_FAULTS:
        yield Variant(
            family=family,
            spelling="transformers",
            changes=tuple(Change(key=key, value=value) for key, value in changes.items()),
        )
    if family == "gemma4":
        for changes in OUTER_FAULTS:
            yield Variant(
                family=family,
                spelling="hub",
                changes=tuple(Change(key=key, value=value, outer=True) for key, value in changes.items()),
            )


SLOW = {"qwen3_5_text", "qwen3_5_moe_text"}  # qwen3_5 and qwen3_5_moe without the outer keys
SLOW |= {"deepseek_v2", "glm4_moe_lite"}  # read as deepseek_v3


@pytest.mark.parametrize("family", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in FAMILIES])
def test_known_faults_and_a_few_more(family: str, tmp_path: Path) -> None:
    sample = random.Random(family).sample(list(config_fuzz.singles(family)), 4)
    verdicts, found = faults(chain(known_faults(family), sample, config_fuzz.combinations(family, 3, seed=1)), tmp_path)
    assert not found, "\n".join(found)
    assert verdicts["equal"] and verdicts["refused"]  # or nothing was compared


@pytest.mark.parametrize("spelling", ["hub", "transformers"])
@pytest.mark.parametrize("family", FAMILIES)
def test_unchanged_config_is_followed(family: str, spelling: config_fuzz.Spelling, tmp_path: Path) -> None:
    unchanged = Variant(family=family, spelling=spelling, changes=())
    assert config_fuzz.judge(unchanged, tmp_path)[0] == "equal"


def test_judge_sees_a_difference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that takes no notice of a key is found out."""
    from anabranch.models import readers

    variant = Variant(family="llama", spelling="hub", changes=(Change(key="rope_theta", value=500.0),))
    assert config_fuzz.judge(variant, tmp_path)[0] == "equal"
    read = readers.read_rope
    monkeypatch.setattr(readers, "read_rope", lambda keys, *rest: read(readers.Keys({}, keys.path), *rest))
    assert config_fuzz.judge(variant, tmp_path)[0] == "different"


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_sweep(family: str, tmp_path: Path) -> None:
    """All single changes, and combinations of two to four."""
    combinations = config_fuzz.combinations(family, NUM_COMBINATIONS, seed=0)
    verdicts, found = faults(chain(config_fuzz.singles(family), combinations), tmp_path)
    print(f"{family}: {verdicts.total()} configs, {dict(verdicts)}")
    assert not found, "\n".join(found)
