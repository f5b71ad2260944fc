"""Quantised checkpoints, divided among ranks: what one rank computes, or refused by name."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from anabranch.engine.single import SingleSequence
from anabranch.loader import load
from anabranch.loader.load import load_model
from anabranch.parallel.group import Group, OneRank
from tests.models import tiny
from tests.parallel.ranks import run
from tests.parallel.test_models import Rank

pytest.importorskip("compressed_tensors")
from tests.formats import writers
from tests.formats.test_checkpoints import BASES

CASES = {case.name: case for case in writers.CASES}
USUAL = ["fp8 blocks", "awq"]
SIZES = {"hidden_size": 256, "moe_intermediate_size": 256, "head_dim": 64, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 4, "num_hidden_layers": 2, "vocab_size": 132, "num_experts": 8}
"""A half of every matrix is whole blocks."""
MOST = 0.51
"""Of all bytes: what one of two ranks reads at most, a half and what all ranks hold. In docs/many_devices.md too."""
PROMPT = list(range(40, 80))
"""No row makes more of roundings than `compare` allows: weights changed by a unit in their last place move each by 0.8
of that at most, in any format. (One of 0 to 39 is moved by 1.1 of it.)"""


def save(name: str, folder: Path, **sizes: int) -> Path:
    case = CASES[name]
    base, sizes = BASES[case.family], SIZES | sizes
    if case.family == "gpt_oss":
        sizes["intermediate_size"], sizes["num_local_experts"] = (
            sizes.pop("moe_intermediate_size"),
            sizes.pop("num_experts"),
        )
    model = dataclasses.replace(base, settings=base.settings | sizes, experts="fused" if case.fused else "split")
    writers.quantize(tiny.save(model, folder / "plain"), folder / "quantized", case)
    return folder / "quantized"


def logits(group: Group, folders: dict[str, Path]) -> dict[tuple[str, bool], torch.Tensor | str]:
    """Or why a checkpoint was refused, with a part of each expert and with whole experts."""
    found: dict[tuple[str, bool], torch.Tensor | str] = {}
    for name, folder in folders.items():
        for expert_parallel in (False, True):
            try:
                model = load_model(folder, dtype="float32", group=group, expert_parallel=expert_parallel)
            except ValueError as error:
                found[name, expert_parallel] = str(error)
            else:
                found[name, expert_parallel] = SingleSequence(model, 64).forward(PROMPT)
    return found


def num_read(folder: Path, group: Group, expert_parallel: bool, quantization: str = "none") -> int:
    """Bytes of weights that one rank reads."""
    found: list[int] = []
    read = load.read_weights

    def counted(*args: Any) -> int:
        found.append(read(*args))
        return found[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(load, "read_weights", counted)
        load_model(folder, dtype="float32", group=group, expert_parallel=expert_parallel, quantization=quantization)
    (count,) = found
    return count


def check_shares(folder: Path, quantization: str = "none") -> None:
    whole = num_read(folder, OneRank(), False, quantization)
    for expert_parallel in (False, True):
        for rank in range(2):
            count = num_read(folder, Rank(rank, 2), expert_parallel, quantization)
            assert 0.5 * whole <= count <= MOST * whole, (folder, expert_parallel, count / whole)


def compare(names: list[str], folder: Path) -> None:
    folders = {name: save(name, folder / name) for name in names}
    for name in names:
        check_shares(folders[name])
    expected = {name: one for (name, whole), one in logits(OneRank(), folders).items() if not whole}
    for found in run(2, logits, folders):
        for (name, expert_parallel), one in found.items():
            assert isinstance(one, torch.Tensor), f"{name}: {one}"
            assert (one - expected[name]).abs().max() < 1e-5 * expected[name].abs().max(), (name, expert_parallel)


def test_two_ranks_compute_what_one_computes(tmp_path: Path) -> None:
    compare(USUAL, tmp_path)


@pytest.mark.slow
def test_other_formats(tmp_path: Path) -> None:
    compare([name for name in CASES if name not in USUAL and "704" not in name], tmp_path)


def test_matrices_that_are_kept_in_bf16(tmp_path: Path) -> None:
    """Embeddings, which ranks divide, and experts among them."""
    model = dataclasses.replace(BASES["qwen3_moe"], settings=BASES["qwen3_moe"].settings | SIZES)
    folder = tiny.save(model, tmp_path)
    for file in folder.glob("*.safetensors"):
        save_file({name: x.bfloat16() for name, x in load_file(file).items()}, file, {"format": "pt"})
    check_shares(folder)
    folders = {"bf16": folder}
    expected = logits(OneRank(), folders)["bf16", False]
    assert isinstance(expected, torch.Tensor)
    for found in run(2, logits, folders):
        for one in found.values():
            assert isinstance(one, torch.Tensor) and (one - expected).abs().max() < 1e-5 * expected.abs().max()


@pytest.mark.parametrize("quantization", ["fp8", "int4"])
def test_a_rank_reads_its_share_of_what_it_quantises(tmp_path: Path, quantization: str) -> None:
    base = BASES["qwen3_moe"]
    for experts in ("split", "fused"):
        model = dataclasses.replace(base, settings=base.settings | SIZES, experts=experts)
        check_shares(tiny.save(model, tmp_path / experts), quantization)


def test_shares_are_those_of_the_document() -> None:
    text = Path(__file__).parents[2].joinpath("docs/many_devices.md").read_text()
    assert f"at most {MOST:.2f} of all bytes" in text


def test_blocks_that_cannot_be_divided_are_refused(tmp_path: Path) -> None:
    """Half of 384 rows is a block and a half: whole experts are shared out, but not a part of each."""
    folders = {"fp8 blocks": save("fp8 blocks", tmp_path, moe_intermediate_size=384)}
    for found in run(2, logits, folders):
        refused = found["fp8 blocks", False]
        assert isinstance(refused, str) and "192" in refused and "experts" in refused, refused
        assert isinstance(found["fp8 blocks", True], torch.Tensor)
