"""`anabranch bench report`: every figure in its row, ratios against the best of the others, aims judged."""

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from anabranch.bench import report
from anabranch.bench.records import CONFIGS

ANCHORS = sorted(map(str, (Path(__file__).parents[2] / "benchmarks" / "anchors").glob("*.json")))


def write(folder: Path, **values: Any) -> str:
    file = folder / f"{len(list(folder.iterdir()))}.json"
    file.write_text(json.dumps({"engine": "anabranch", "model": "qwen3-30b-a3b", "version": "0", **values}))
    return str(file)


def lines(*files: str) -> list[list[str]]:
    """The printed table, cell by cell."""
    by_model = report.read(list(files))
    text = "\n".join(report.table(model, results) for model, results in by_model.items())
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]


def test_the_head_names_the_format_of_weights(tmp_path: Path) -> None:
    head, *_ = lines(write(tmp_path, commit="abc", quantization="fp8", decode_ms={"1": 2.0}))
    assert head[1] == "anabranch 0 (abc) fp8"


def test_ours_against_the_anchors(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        commit="abc",
        decode_ms={"1": 2.0, "256": 20.0},
        ttft_ms={"128": 17.0},
        thr_1024_128={"s": 1, "out_tok_s": 5, "total_tok_s": 96_983},
        import_s=5.0,
        startup_s=3.0,
        import_warm_s=2.0,
        startup_warm_s=1.5,
    )
    head, _, *rows = lines(*(name for name in ANCHORS if "qwen3-30b" in name), file)
    titles = ["sglang 0.5.13.post1", "vllm 0.26.0", "anabranch 0 (abc)", "ratio", "floor", "target", "moonshot"]
    assert head == ["qwen3-30b-a3b", *titles]
    found = {row[0]: row[1:] for row in rows}
    assert found["decode, batch 1 (ms)"] == ["3.93", "4.13", "2.00", "1.96×", "1.32", "≤ 2.6 ✓", "≤ 1.75"]
    assert found["decode, batch 256 (ms)"] == ["20.78", "20.99", "20.00", "1.04×", "14.2", "≤ 18.5", "≤ 16.5"]
    assert found["decode, batch 4 (ms)"] == ["6.30", "6.34", "", "", "3.4", "≤ 4.9", "≤ 4"]
    assert found["TTFT, 128 tokens (ms)"][2:] == ["17.0", "1.26×", "13.2", "≤ 17 ✓", "≤ 15"]
    thr = found["1024 in, 128 out, total tok/s"]
    assert thr == ["46,544", "49,320", "96,983", "1.97×", "", "≥ 60,000 ✓", "≥ 75,000 ✓"]
    assert found["256 in, 256 out, output tok/s"][:3] == ["15,064", "15,085", ""]
    assert found["import + start-up (s)"] == ["160.1", "134.0", "8.0", "16.75×", "", "≤ 20 ✓", "≤ 8 ✓"]
    assert found["the same, caches warm (s)"] == ["", "", "3.5", "", "", "", ""]
    order = list(found)
    assert order.index("decode, batch 64 (ms)") < order.index("decode, batch 128 (ms)") < order.index(thr_label(found))


def thr_label(found: dict[str, list[str]]) -> str:
    return next(label for label in found if "tok/s" in label)


def test_the_last_of_ours_is_the_one_that_counts(tmp_path: Path) -> None:
    old, new = (write(tmp_path, commit=c, decode_ms={"1": ms}) for c, ms in (("old", 4.0), ("new", 2.0)))
    other = write(tmp_path, engine="vllm", decode_ms={"1": 4.0})
    head, _, row = lines(old, new, other)
    assert head[1:4] == ["vllm 0", "anabranch 0 (old)", "anabranch 0 (new)"]
    assert row[1:6] == ["4.00", "4.00", "2.00", "2.00×", "1.32"]


def test_shrunk_figures_are_marked_and_not_compared(tmp_path: Path) -> None:
    small = write(tmp_path, shrink=64, decode_ms={"1": 0.1})
    other = write(tmp_path, engine="vllm", decode_ms={"1": 4.0})
    head, _, row = lines(small, other)
    assert head[1:] == ["vllm 0", "anabranch 0 SHRUNK 64×", "floor", "target", "moonshot"]
    assert row[1:] == ["4.00", "0.10", "1.32", "≤ 2.6", "≤ 1.75"]


def test_what_is_not_comparable_has_no_ratio(tmp_path: Path) -> None:
    mine = write(tmp_path, model="gemma4-26b-a4b", decode_ms={"1": 2.0, "64": 1.0})
    _, _, *rows = lines(mine, *(name for name in ANCHORS if "gemma4" in name))
    found = {row[0]: row[1:] for row in rows}
    assert found["decode, batch 1 (ms)"][2] == "2.04×"
    assert found["decode, batch 64 (ms)"] == ["7.52 ¹", "1.00", "", "", ""]


def test_files_that_are_no_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "kernels.json").write_text('{"mm_TFLOPs": 777}')
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(ValueError, match="none of the files is a result"):
        report.run(argparse.Namespace(files=[str(tmp_path / "kernels.json")], plot=None))
    assert "kernels.json: skipped, it names no engine and model" in capsys.readouterr().err
    with pytest.raises(ValueError, match="broken.json: not JSON"):
        report.run(argparse.Namespace(files=[str(tmp_path / "broken.json")], plot=None))


def test_targets_are_of_bundled_configs_and_reach_from_floor_to_target() -> None:
    assert set(report.TARGETS) == {path.name for path in CONFIGS.iterdir()}
    for aims in report.TARGETS.values():
        for part in ("decode_ms", "ttft_ms"):
            for size, floor in aims["floor"].get(part, {}).items():
                better = aims.get("moonshot", aims["target"])[part][size]
                assert floor < better <= aims["target"][part][size]


def test_a_plot_of_all_anchors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    mine = write(tmp_path, decode_ms={"1": 2.0, "4": 4.0})
    parser = argparse.ArgumentParser()
    report.add_options(parser)
    file = tmp_path / "plot.svg"
    assert report.run(parser.parse_args([*ANCHORS, mine, "--plot", str(file)])) == 0
    drawn = file.read_text()
    for words in ("qwen3-30b-a3b", "vllm 0.26.0", "anabranch 0", "moonshot"):
        assert f"<!-- {words}" in drawn, words  # matplotlib writes letters as curves, and the text beside them
    assert capsys.readouterr().out.count("| target |") == 3
