"""Every family, divided among ranks, computes what one rank computes; and each rank reads its share of the weights."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from anabranch.engine.single import SingleSequence
from anabranch.loader import names
from anabranch.loader.checkpoint import read_checkpoint
from anabranch.loader.load import load_model
from anabranch.models.decoder import Decoder
from anabranch.models.keys import ConfigError
from anabranch.parallel.group import Group, OneRank
from tests.models import tiny
from tests.parallel.ranks import run

FAMILIES = [
    "gemma4_text",
    "llama",
    "mixtral",
    "olmoe",
    "qwen2_moe",
    "qwen3",
    "qwen3_5_moe",
    "qwen3_moe",
    "qwen3_next",
]
CASES = {case.model_type: case for case in reversed(tiny.CASES) if case.model_type in FAMILIES}
PROMPT = [(7 * i * i + 5 * i + 3) % tiny.VOCAB_SIZE for i in range(40)]


def settings(model_type: str) -> dict[str, Any]:
    """Sizes that 4 ranks divide: 8 experts; two key-value heads, so that pairs of ranks have the same."""
    found: dict[str, Any] = {"vocab_size": 132, "num_key_value_heads": 2}
    if "moe" in model_type or model_type in ("mixtral", "gemma4_text", "qwen3_next"):
        found["num_local_experts" if model_type == "mixtral" else "num_experts"] = 8
    if model_type.startswith(("qwen3_5", "qwen3_next")):
        # The norm in a delta net may divide by numbers near 0, which multiplies roundings: see test_qwen3_5.
        found |= {"linear_num_key_heads": 4, "linear_num_value_heads": 8, "rms_norm_eps": 0.1}
    return found


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {}
    for model_type, case in CASES.items():
        sized = replace(case, settings=case.settings | settings(model_type))
        made[model_type] = tiny.save(sized, tmp_path_factory.mktemp(model_type) / "model")
    return made


def logits(group: Group, folders: dict[str, Path]) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """A prompt in two chunks, then two steps of one token: with a part of each expert, and with whole experts."""
    return {name: (_logits(group, folder, False), _logits(group, folder, True)) for name, folder in folders.items()}


def _logits(group: Group, folder: Path, expert_parallel: bool) -> torch.Tensor:
    sequence = SingleSequence(load_model(folder, dtype="float32", group=group, expert_parallel=expert_parallel), 64)
    return torch.cat([sequence.forward(chunk) for chunk in (PROMPT[:25], PROMPT[25:38], PROMPT[38:39], PROMPT[39:])])


@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_compute_what_one_computes(folders: dict[str, Path], num_ranks: int) -> None:
    expected = {name: _logits(OneRank(), folder, False) for name, folder in folders.items()}
    for found in run(num_ranks, logits, folders):
        for name, both in found.items():
            for one in both:
                assert (one - expected[name]).abs().max() < 1e-5, name


class Rank(OneRank):
    """One of several, which are not there."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


@pytest.mark.parametrize("expert_parallel", [False, True], ids=["tensor", "expert"])
def test_a_rank_has_its_share(folders: dict[str, Path], expert_parallel: bool) -> None:
    """Of every matrix, and reads no more than that, but for matrices whose columns are divided."""
    folder = folders["qwen3_moe"]
    whole = dict(load_model(folder).named_parameters())
    for rank in range(2):
        group = Rank(rank, 2)
        model = load_model(folder, group=group, expert_parallel=expert_parallel)
        for name, parameter in model.named_parameters():
            divided = "norm" not in name and "router" not in name
            assert parameter.numel() == whole[name].numel() // (2 if divided else 1), name
        for copy in names.match(model, read_checkpoint(folder)):
            columns = "o_proj" in copy.parameter or (not expert_parallel and "down" in copy.parameter)
            assert (copy.source.num_bytes == whole_bytes(model, copy)) != columns, copy


def whole_bytes(model: Decoder, copy: names.Copy) -> int:
    return model.get_parameter(copy.parameter)[copy.index].nbytes


@pytest.mark.parametrize(
    ("model_type", "num_ranks", "expert_parallel", "words"),
    [
        ("qwen3_moe", 3, False, "cannot be divided among 3 ranks"),
        ("qwen3_moe", 16, True, "num_experts = 8 cannot be divided among 16 ranks"),
        ("llama", 8, False, "4 attention heads cannot be divided among 8 ranks"),
        ("qwen3_5_moe", 8, True, "shared_width = 28 cannot be divided among 8 ranks"),
    ],
)
def test_what_cannot_be_divided_is_refused(
    folders: dict[str, Path], model_type: str, num_ranks: int, expert_parallel: bool, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        load_model(folders[model_type], group=Rank(0, num_ranks), expert_parallel=expert_parallel)
