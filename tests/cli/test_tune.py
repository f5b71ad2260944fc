"""`anabranch tune`, and the flags that say how experts are computed, as a person meets them."""

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from anabranch import platforms
from anabranch.cli import generate, main, serve, tune
from anabranch.config import CHOICES, EngineConfig
from anabranch.moe import tuning as moe_tuning
from anabranch.ops.weight import Weight
from tests.models import tiny

pytest.importorskip("triton")
from anabranch.kernels.tuning import experts_tables, experts_tuner
from anabranch.kernels.tuning import table as tables
from anabranch.kernels.tuning.experts_tiles import FewTiles, Machine, PackedTiles
from tests.kernels.tuning.test_experts_tuner import FakeBench, OnH200, fake, h200

__all__ = ["fake", "h200"]  # fixtures
draw = tune.draw


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny.save(next(case for case in tiny.CASES if case.model_type == "qwen2_moe"), tmp_path / "model")


def test_a_platform_without_tiles_says_so(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["tune", str(folder)]) == 1
    said = capsys.readouterr().err
    assert "platform 'cpu' has no kernels with tiles to choose" in said and said.count("\n") == 1


@pytest.fixture
def on_h200(fake: type[FakeBench], monkeypatch: pytest.MonkeyPatch) -> type[FakeBench]:
    monkeypatch.setattr(platforms, "current", OnH200)
    monkeypatch.setattr(moe_tuning, "find_tuner", lambda: experts_tuner)
    monkeypatch.setattr(tune, "draw", lambda shape, device: None)
    return fake


def test_quantised_experts(
    on_h200: type[FakeBench], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Their table is found by their format."""
    monkeypatch.setattr(on_h200, "machine", lambda self: Machine(227 << 10, 132, True, True))
    words = ["tune", "qwen3-30b-a3b", "--quantization", "int4", "--tokens", "1", "16", "--out", str(tmp_path / "table")]
    assert main.main([*words, "--dtype", "bfloat16"]) == 0
    assert "128 experts of 2048 × 768, 8 per token, torch.bfloat16" in capsys.readouterr().out
    shape = experts_tuner.Shape(128, 2048, 768, 8, torch.bfloat16, "int4_1x128_bf16")
    good_for = experts_tables.good_for(shape, OnH200().device)
    shipped = tables.read(tmp_path / "table", experts_tables.CODEC, good_for, {"version": experts_tables.TILES_VERSION})
    assert shipped is not None and sorted(shipped.times) == [1, 16]
    assert any(isinstance(tiles, FewTiles) for tiles in shipped.times[1])
    assert any(isinstance(tiles, PackedTiles) for tiles in shipped.times[16])


def test_the_table_is_printed_kept_and_written(
    on_h200: type[FakeBench], folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "table.json"
    assert (
        main.main(["tune", str(folder), "--tune", "fast", "--max-num-batched-tokens", "100", "--out", str(file)]) == 0
    )
    printed = capsys.readouterr().out
    assert "60 experts of 32 × 12, 4 per token" in printed
    for words in ("tokens", "small gate", "grouped 16", "4 token counts measured", f"written to {file}"):
        assert words in printed, printed
    shape = experts_tuner.Shape(60, 32, 12, 4, torch.float32)
    good_for = experts_tables.good_for(shape, OnH200().device)
    kept = tables.find(experts_tables.CODEC, good_for, experts_tables.made_with(), experts_tables.TILES_VERSION)
    assert kept is not None and sorted(kept.times) == [1, 8, 16, 64]
    shipped = tables.read(file, experts_tables.CODEC, good_for, {"version": experts_tables.TILES_VERSION})
    assert shipped is not None and shipped.times == kept.times
    assert json.loads(file.read_text())["for"]["arch"] == "sm_90"


@pytest.mark.parametrize(
    ("given", "more", "format"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, [], "fp8_128x128"),
        ({"quant_method": "awq", "bits": 4, "group_size": 64}, [], "int4_1x64_f16_zero"),
        (None, ["--quantization", "int4"], "int4_1x128_bf16"),
    ],
)
def test_experts_of_quantised_models(
    on_h200: type[FakeBench],
    given: dict[str, Any] | None,
    more: list[str],
    format: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Weights are drawn in the format that config.json names, or --quantization."""
    base = next(case for case in tiny.CASES if case.model_type == "qwen3_moe")
    sizes = {"hidden_size": 256, "moe_intermediate_size": 128, "num_hidden_layers": 1}
    folder = tiny.save(dataclasses.replace(base, settings=base.settings | sizes), tmp_path)
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | ({"quantization_config": given} if given else {})))
    drawn: list[Weight] = []
    monkeypatch.setattr(tune, "draw", lambda shape, device: drawn.extend(draw(shape, torch.device("cpu"))))
    assert main.main(["tune", str(folder), "--tune", "fast", "--tokens", "8", *more]) == 0
    assert f"experts of 256 × 128, 2 per token, torch.float32, {format}\n" in capsys.readouterr().out
    assert {weight.format.name for weight in drawn} == {format}
    assert drawn[1].dense().std().item() == pytest.approx(128**-0.5, rel=0.1)


def test_by_hand_it_measures_again_unless_told_to_keep(on_h200: type[FakeBench], folder: Path) -> None:
    arguments = ["tune", str(folder), "--tune", "fast"]
    for more, benches in (([], 1), ([], 2), (["--keep"], 2), (["--keep", "--tokens", "48"], 3)):
        assert main.main([*arguments, *more]) == 0
        assert len(on_h200.made) == benches
    assert {size for size, _ in on_h200.made[-1].asked} == {48}


def test_mistakes_are_one_line(
    on_h200: type[FakeBench], folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dense = tiny.save(next(case for case in tiny.CASES if case.model_type == "llama"), tmp_path / "dense")
    for arguments, message in (
        ([str(dense)], "a model without experts"),
        ([str(folder), "--tokens", "0"], "at least 1 token"),
        ([str(folder), "--out", "/dev/null/x"], "cannot be written"),
    ):
        assert main.main(["tune", *arguments]) == 1
        said = capsys.readouterr().err
        assert message in said, said


@pytest.mark.parametrize("command", [generate, serve])
def test_choices_are_flags(command: Any, capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    command.add_options(parser)
    words = ["model", "x"] if command is generate else ["model"]
    for name, values in CHOICES.items():
        flag = f"--{name.replace('_', '-')}"
        assert getattr(parser.parse_args(words), name) == EngineConfig.__dataclass_fields__[name].default
        for value in values:
            assert getattr(parser.parse_args([*words, flag, value]), name) == value
        with pytest.raises(SystemExit):
            parser.parse_args([*words, flag, "maybe"])
        assert "maybe" in capsys.readouterr().err


def test_flags_reach_the_engine(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, Any]] = []

    class Opened:
        def __init__(self, model: str, **options: Any) -> None:
            seen.append(options)

    monkeypatch.setattr(generate, "LLM", Opened)
    parser = argparse.ArgumentParser()
    generate.add_options(parser)
    flags = ["--moe-combine", "ordered", "--tune", "off", "--shared-expert", "inline"]
    generate.open_model(parser.parse_args([str(folder), "x", *flags]))
    generate.open_model(parser.parse_args([str(folder), "x"]))
    names = ("moe_combine", "tune", "shared_expert")
    assert set(names) <= set(CHOICES)
    chosen = [{name: options[name] for name in names} for options in seen]
    assert chosen[0] == {"moe_combine": "ordered", "tune": "off", "shared_expert": "inline"}
    assert chosen[1] == {"moe_combine": "auto", "tune": "fast", "shared_expert": "auto"}
