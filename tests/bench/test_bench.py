"""The benchmarks run and write what they promise; the workloads are shrunk, the code is not."""

import argparse
import json
from pathlib import Path

import pytest

from anabranch.bench import host, offline
from tools import tiny_model


def test_offline_writes_the_keys_engines_are_compared_by(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_model.write(tmp_path / "tiny")
    monkeypatch.setattr(offline, "PROMPT_LENGTHS", (16, 4096))
    monkeypatch.setattr(offline, "BATCHES", (1, 2))
    monkeypatch.setattr(offline, "THROUGHPUT", {"thr_1024_128": (3, 20, 5)})
    parser = argparse.ArgumentParser()
    offline.add_options(parser)
    file = tmp_path / "result.json"
    options = parser.parse_args([str(tmp_path / "tiny"), "--load-format", "dummy", "--json", str(file)])
    assert offline.run(options) == 0
    found = json.loads(file.read_text())
    assert {"engine", "model", "version", "commit", "import_s", "startup_s"} <= set(found)
    assert list(found["ttft_ms"]) == ["16"]  # 4096 tokens are more than the model takes
    assert list(found["decode_ms"]) == ["1", "2"]
    assert set(found["thr_1024_128"]) == {"s", "out_tok_s", "total_tok_s"}
    thr = found["thr_1024_128"]
    assert thr["total_tok_s"] / thr["out_tok_s"] == pytest.approx(25 / 5)


def test_offline_refuses_an_unknown_kind(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'latency' is none of ttft, decode, throughput"):
        offline.run(argparse.Namespace(only="latency"))


def test_host_measures_every_request_in_every_step() -> None:
    assert 0 < host.measure(3, 5) < 1e6
