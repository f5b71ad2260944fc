"""`anabranch bench offline`: the contract's workloads, figures computed as it says, and nothing measured is lost."""

import argparse
import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from anabranch.bench import offline
from anabranch.bench.offline import Bench, Result, Workloads
from anabranch.bench.records import CONFIGS, bundled
from anabranch.models.config import read_config
from tools import tiny_model


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bench") / "tiny"
    tiny_model.write(folder)
    return folder


def parse(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    offline.add_options(parser)
    return parser.parse_args(arguments)


def test_workloads_are_the_contract() -> None:
    workloads = offline.chosen_workloads(parse("x"))
    assert workloads == Workloads()
    assert workloads.lengths == (128, 1024, 4096, 8192)
    assert workloads.batches == (1, 4, 16, 64, 128, 256)
    assert workloads.throughput == ((512, 1024, 128), (512, 256, 256))
    options = parse("x")
    assert (options.max_model_len, options.memory_fraction, options.tune) == (16384, 0.85, "off")
    assert offline.chosen_workloads(parse("x", "--batches", "4,64")).batches == (4, 64)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


class Timed:
    """An LLM that takes a known time: so much for the prompts, so much for every token behind the first."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.calls: list[tuple[int, int, int]] = []
        self.prompts: list[list[int]] = []
        self.engine = SimpleNamespace(
            model=SimpleNamespace(vocab_size=150_000),
            config=SimpleNamespace(max_model_len=4200),
            metrics=SimpleNamespace(draft_tokens=10, accepted_tokens=0),
        )
        self.drafting = False

    def generate(self, prompts: list[list[int]], params: Any) -> list[Any]:
        count, length, tokens = len(prompts), len(prompts[0]), params.max_tokens
        self.calls.append((count, length, tokens))
        self.prompts += prompts
        assert params.temperature == 0 and params.ignore_eos and not params.detokenize
        slow = 3.0 if len(self.calls) % 2 else 1.0  # every second run is disturbed
        if self.drafting:
            slow /= 2.5
            self.engine.metrics.draft_tokens += 4 * count * (tokens - 1)
            self.engine.metrics.accepted_tokens += 3 * count * (tokens - 1)
        self.clock.now += slow * (1e-6 * count * length + 1e-3 * count * (tokens - 1))
        return [SimpleNamespace(token_ids=[0] * tokens) for _ in prompts]


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> Timed:
    clock = Clock()
    monkeypatch.setattr(offline.time, "perf_counter", clock.perf_counter)
    return Timed(clock)


def bench_of(timed: Timed) -> Bench:
    return Bench(timed, Workloads(), Result({}, None))  # type: ignore[arg-type]


def test_prompts_are_distinct_and_drawn_as_said(timed: Timed) -> None:
    bench = bench_of(timed)
    bench.seconds(3, 5, 1)
    bench.seconds(1, 5, 1)
    rng = random.Random(0)
    assert timed.prompts == [[rng.randrange(1000, 100_000) for _ in range(5)] for _ in range(4)]


def test_ttft_is_the_median_of_five_after_a_warm_up(timed: Timed) -> None:
    bench = bench_of(timed)
    bench.measure(["ttft"])
    assert timed.calls == [(1, length, 1) for length in (128, 1024, 4096) for _ in range(6)]  # 8192 do not fit
    # Of five runs after the first, two or three are disturbed: the second of the list is not, so 1, 3, 1, 3, 1.
    assert bench.result.values["ttft_ms"] == {
        "128": pytest.approx(0.128),
        "1024": pytest.approx(1.024),
        "4096": pytest.approx(4.096),
    }


def test_decode_is_the_best_of_two_without_the_first_token(timed: Timed) -> None:
    bench = bench_of(timed)
    bench.measure(["decode"])
    expected = []
    for batch, tokens in ((1, 129), (4, 129), (16, 129), (64, 129), (128, 65), (256, 65)):
        expected += [(batch, 128, 2), *2 * [(batch, 128, 1)], *2 * [(batch, 128, tokens)]]
    assert timed.calls == expected
    found = bench.result.values["decode_ms"]
    assert found == {str(batch): pytest.approx(batch) for batch in (1, 4, 16, 64, 128, 256)}


def test_speculation_is_decode_of_repetitive_prompts_with_drafts_and_without(timed: Timed) -> None:
    bench, timed.drafting = bench_of(timed), True
    bench.measure(["speculation"])
    calls, prompts = list(timed.calls), list(timed.prompts)
    assert calls[:5] == [(1, 128, 2), *2 * [(1, 128, 1)], *2 * [(1, 128, 129)]]
    assert all(prompt == prompt[:16] * 8 and len(set(prompt)) > 10 for prompt in prompts)
    timed.calls, timed.prompts, timed.drafting = [], [], False
    Bench(timed, Workloads(), bench.result).measure(["without drafts"])  # type: ignore[arg-type]
    assert (timed.calls, timed.prompts) == (calls, prompts)
    found = bench.result.values["speculation"]
    assert list(found) == ["1", "4", "16", "64", "128", "256"]
    times = {"ms": pytest.approx(4 / 2.5), "ms_without": pytest.approx(4), "speed_up": pytest.approx(2.5)}
    assert found["4"] == {**times, "draft_tokens": 4 * 4 * (1 + 2 * 128), "acceptance": 0.75}


def test_throughput_counts_all_tokens_and_those_that_came_out(timed: Timed) -> None:
    bench = bench_of(timed)
    bench.measure(["throughput"])
    found = bench.result.values
    assert timed.calls == [(512, 1024, 128), (512, 256, 256)] and set(found) == {"thr_1024_128", "thr_256_256"}
    seconds = 3 * (0.512 * 1.024 + 0.512 * 127)
    assert found["thr_1024_128"] == {
        "s": pytest.approx(seconds),
        "out_tok_s": pytest.approx(512 * 128 / seconds),
        "total_tok_s": pytest.approx(512 * 1152 / seconds),
    }


def test_all_of_it_on_a_tiny_model(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both starts, every workload, every key; then more batches into the same file."""
    for name in offline.CACHES:
        monkeypatch.setenv(name, "/nowhere")  # to be put back
    file = tmp_path / "result.json"
    arguments = (str(tiny), "--load-format", "dummy", "--json", str(file), "--shrink", "128", "--quantization", "fp8")
    assert offline.run(parse(*arguments)) == 0
    assert "           model  tiny, float32, quantization fp8\n" in capsys.readouterr().out
    found = json.loads(file.read_text())
    about = {"engine", "model", "version", "commit", "machine", "import_s", "startup_s"}
    assert about | {"import_warm_s", "startup_warm_s", "stages", "stages_warm"} <= set(found)
    assert found["engine"] == "anabranch" and found["model"] == "tiny" and found["shrink"] == 128
    assert found["quantization"] == "fp8"
    assert set(found["ttft_ms"]) == {"1", "8", "32", "64"}
    assert set(found["decode_ms"]) == {"1", "2"}
    assert set(found["thr_8_1"]) == {"s", "out_tok_s", "total_tok_s"}
    assert found["import_s"] > 0 and found["startup_s"] > 0 and found["stages"]["seconds"]["weights"] > 0
    # The warm start began after the first one had ended, and its own imports count.
    assert 0 < found["import_warm_s"] < sum(found["stages_warm"]["seconds"].values())

    assert offline.run(parse(*arguments, "--only", "decode", "--batches", "3")) == 0
    again = json.loads(file.read_text())
    assert set(again.pop("decode_ms")) == {"1", "2", "3"}
    del found["decode_ms"]
    assert again == found


def test_two_engines_show_what_drafts_gain(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "result.json"
    drafting = ("--only", "speculation", "--speculative", "ngram", "--batches", "1")
    arguments = (str(tiny), "--load-format", "dummy", "--json", str(file), "--shrink", "4", *drafting)
    assert offline.run(parse(*arguments)) == 0
    (figures,) = json.loads(file.read_text())["speculation"].values()
    assert figures["ms_without"] == pytest.approx(figures["ms"] * figures["speed_up"]) and figures["draft_tokens"] > 0
    assert f"no drafts 1  {figures['ms_without']:.3f} ms a token: drafts make it" in capsys.readouterr().out


def test_what_was_measured_survives_an_interruption(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = Bench.seconds

    def interrupted(self: Bench, count: int, length: int, num_tokens: int, phrase: int = 0) -> float:
        if (count, num_tokens) == (2, 3):
            raise KeyboardInterrupt
        return seconds(self, count, length, num_tokens)

    monkeypatch.setattr(Bench, "seconds", interrupted)
    file = tmp_path / "result.json"
    arguments = (str(tiny), "--load-format", "dummy", "--json", str(file), "--shrink", "64", "--batches", "1,2")
    with pytest.raises(KeyboardInterrupt):
        offline.run(parse(*arguments, "--only", "decode"))
    found = json.loads(file.read_text())
    assert list(found["decode_ms"]) == ["1"] and "startup_s" in found and "startup_warm_s" not in found


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"engine": "vllm"}', "its figures are of engine 'vllm', these are of 'anabranch'"),
        ("not JSON", "holds something else"),
        ("[1]", "holds something else"),
    ],
)
def test_figures_of_two_kinds_are_not_mixed(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "result.json"
    file.write_text(content)
    with pytest.raises(ValueError, match=f"{message}.*; give another file, or remove it"):
        Result({"engine": "anabranch"}, str(file))
    assert file.read_text() == content


def test_two_machines_are_not_mixed(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    Result({"engine": "anabranch", "machine": "one"}, str(file)).save()
    result = Result({"engine": "anabranch"}, str(file))
    with pytest.raises(ValueError, match="of machine 'one', these are of 'two'"):
        result.set_machine("two")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--only", "latency"), "--only: 'latency' is none of startup, ttft, decode, throughput, speculation"),
        (("--only", "decode,speculation"), "--only speculation: needs --speculative"),
        (("--batches", "1,x"), "--batches: '1,x' is no list of numbers"),
        (("--batches", "0"), "--batches: at least 1"),
        (("--shrink", "0"), "--shrink: at least 1"),
    ],
)
def test_mistakes_are_refused_before_anything_is_loaded(arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        offline.run(parse("/no/such/model", *arguments))


def test_a_first_start_that_fails_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offline.sys, "executable", "/bin/false")
    with pytest.raises(ValueError, match="the first start failed with exit code 1"):
        offline.first_start(parse(str(tmp_path), "--load-format", "dummy"), str(tmp_path))


def test_bundled_configs_by_name() -> None:
    layers = {"qwen3-30b-a3b": 48, "qwen1.5-moe-a2.7b": 24, "gemma4-26b-a4b": 30, "qwen3.6-35b-a3b": 40}
    layers |= {"deepseek-v2-lite": 27, "gpt-oss-20b": 24}
    for name, number in layers.items():
        folder = bundled(name, "dummy")
        assert Path(folder).name == name and len(read_config(folder).layers) == number
    assert {path.name for path in CONFIGS.iterdir()} == set(layers)
    assert bundled("Qwen3-30B-A3B", "dummy") == bundled("qwen3-30b-a3b", "dummy")
    assert bundled("owner/name", "dummy") == "owner/name"
    assert bundled("/some/folder", "safetensors") == "/some/folder"
    with pytest.raises(ValueError, match="is a config without weights: add --load-format dummy"):
        bundled("qwen3-30b-a3b", "safetensors")
