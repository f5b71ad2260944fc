"""Scripts of benchmarks/ that are meant for a GPU run on this machine with a tiny model, and give their figures."""

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from anabranch import ops, platforms
from anabranch.engine.single import SingleSequence
from anabranch.llm import LLM
from anabranch.loader.load import load_model
from anabranch.platforms.fake import FakePlatform
from anabranch.sampling_params import SamplingParams
from benchmarks import (
    combine,
    compare_answers,
    expert_skew,
    make_checkpoint,
    quantized_experts,
    serve_load,
    state_error,
)
from tests.models import tiny
from tools import tiny_model

FAMILIES = {case.model_type: case for case in reversed(tiny.CASES)}

pytestmark = pytest.mark.slow


def run(
    script: ModuleType, *arguments: str, folder: Path, capsys: pytest.CaptureFixture[str], patch: pytest.MonkeyPatch
) -> tuple[str, dict[str, Any]]:
    """(what it prints, what it writes)"""
    file = folder / "figures.json"
    patch.setattr(sys, "argv", [str(script.__file__), *arguments, "--json", str(file)])
    script.main()
    return capsys.readouterr().out, json.loads(file.read_text())


@pytest.mark.parametrize("share, num_drafts", [(1.0, 2), (0.75, 2), (0.0, 1)])
def test_make_checkpoint_with_known_drafts(
    share: float, num_drafts: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy answers count upwards, with drafts and without; as many drafts are right as was asked for."""
    config, made = write_config(tmp_path / "config", HYBRID), tmp_path / "made"
    monkeypatch.setattr(sys, "argv", ["make_checkpoint.py", str(config), str(made), "--drafts", str(share)])
    make_checkpoint.main()
    prompts = [[17 * i % 256, (90 * i + 5) % 256] for i in range(16)]
    params = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True, detokenize=False)
    options: Any = {"num_pages": 200, "max_model_len": 128, "dtype": "float32", "show_progress": False}
    for speculative in ("none", "mtp"):
        llm = LLM(str(made), speculative=speculative, speculative_tokens=num_drafts, **options)
        answers = [output.token_ids for output in llm.generate(prompts, params)]  # type: ignore[arg-type]
        metrics = llm.engine.metrics
        llm.close()
        assert answers == [[(last + 1 + i) % 256 for i in range(48)] for _, last in prompts], speculative
    assert metrics.draft_tokens > 300
    right = sum(share ** (i + 1) for i in range(num_drafts)) / num_drafts
    allowed = {1.0: 0, 0.75: 0.05, 0.0: 0.01}[share]  # what wrong drafts say is right after one of the 256 tokens
    assert metrics.accepted_tokens / metrics.draft_tokens == pytest.approx(right, abs=allowed)


@pytest.fixture
def closed_loops() -> ModuleType:
    pytest.importorskip("msgspec")  # a server is started: its packages are not on every machine with a GPU
    from benchmarks import closed_loops

    return closed_loops


def test_compare_answers(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """With itself in another dtype, and with answers of which one was changed."""
    given: Any = {"folder": tmp_path, "capsys": capsys, "patch": monkeypatch}
    model = tiny.save(FAMILIES["qwen3_moe"], tmp_path / "model")
    _, found = run(compare_answers, str(model), "--prompts", "3", "--tokens", "6", **given)
    assert found["prompts"] == 3 and 0 <= found["same_first_tokens"] <= 3
    answers = [list(one) for one in found["ours"]]
    answers[1][2] += 1 if answers[1][2] == 0 else -1
    (tmp_path / "other.json").write_text(json.dumps({"answers": answers}))
    shown, found = run(compare_answers, str(model), str(tmp_path / "other.json"), **given)
    assert found["same_first_tokens"] == 3 and found["same_tokens"] == 17
    (one,) = found["differences"]
    assert (one["prompt"], one["place"]) == (1, 2) and one["theirs"] == answers[1][2]
    assert set(one["margins"]) == {"kernels", "reference bf16", "reference fp32"}
    assert all(margin > 0 for margin in one["margins"].values()), "ours is the best token"
    assert "first tokens: 3 of 3" in shown and "reference fp32: margins of 1 differences" in shown


def test_compare_answers_cut(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was known when the run was cut is in the file."""
    given: Any = {"folder": tmp_path, "capsys": capsys, "patch": monkeypatch}
    model, known = tiny.save(FAMILIES["qwen3_moe"], tmp_path / "model"), []

    def cut(model: str, dtype: str, provider: str, contexts: list[Any], pairs: list[Any]) -> list[tuple[float, int]]:
        known.append(json.loads((tmp_path / "figures.json").read_text()))
        if dtype == "float32":
            raise KeyboardInterrupt
        return [(0.5, 0)] * len(contexts)

    monkeypatch.setattr(compare_answers, "margins", cut)
    (tmp_path / "other.json").write_text(json.dumps({"answers": [[200] * 3] * 2}))
    with pytest.raises(KeyboardInterrupt):
        run(compare_answers, str(model), str(tmp_path / "other.json"), **given)
    assert [[one["margins"] for one in found["differences"]] for found in known] == [
        [{}] * 2,
        [{"kernels": 0.5}] * 2,
        [{"kernels": 0.5, "reference bf16": 0.5}] * 2,
    ]
    assert len(known[0]["ours"]) == 2 and known[0]["same_tokens"] == 0


def test_the_reference_by_expert() -> None:
    for label, given in ops.experts.samples(torch.float32, torch.Generator().manual_seed(0)):
        torch.testing.assert_close(
            compare_answers.by_expert(**given), ops.experts.reference(**given), rtol=1e-4, atol=1e-5, msg=label
        )


@pytest.mark.parametrize("batch", [4096, 64])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "gemma4_text", "deepseek_v3", "qwen3_5_moe_text"])
def test_margins_of_contexts_together(family: str, batch: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are those of each context alone: with sliding windows, latent rows and states too."""
    monkeypatch.setattr(compare_answers, "BATCH", batch)
    model = tiny.save(FAMILIES[family], tmp_path / "model")
    contexts = [[(31 * i * i + 7 * n) % tiny.VOCAB_SIZE for i in range(n)] for n in (33, 2, 65, 16, 47)]
    pairs = [(3 * n, 100 - n) for n in range(len(contexts))]
    assert [len(some) for some in compare_answers.batches(contexts)] == ([5] if batch == 4096 else [2, 1, 2])
    for provider in ("", "reference"):
        found = compare_answers.margins(str(model), "float32", provider, contexts, pairs)
        decoder = load_model(model, dtype="float32")
        for context, (a, b), (margin, best) in zip(contexts, pairs, found, strict=True):
            logits_V = SingleSequence(decoder, len(context)).forward(context, all_logits=False)[-1]
            assert margin == pytest.approx(float(logits_V[a] - logits_V[b]), abs=1e-4)
            assert best == int(logits_V.argmax())


HYBRID = {
    "model_type": "qwen3_5_moe_text",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 256,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "eos_token_id": 0,
}


def write_config(folder: Path, config: dict[str, Any]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("captured", [False, True])
def test_state_error(
    captured: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With weights that it draws. The platform that captures steps computes in fp32: there no state is rounded."""
    given: Any = {"folder": tmp_path, "capsys": capsys, "patch": monkeypatch}
    monkeypatch.setitem(sys.modules, "make_checkpoint", make_checkpoint)
    if captured:
        platform = FakePlatform()
        monkeypatch.setattr(platforms, "current", lambda: platform)
    config = write_config(tmp_path / "config", HYBRID)
    options = "--tokens", "24", "--every", "12", "--sequences", "2", "--dtype", "float32" if captured else "bfloat16"
    _, found = run(state_error, str(config), *options, **given)
    rounded = [row for row in found["rows"] if row["states"] == "model"]
    others = [row for row in found["rows"] if row["states"] == "other sums"]
    assert [row["tokens"] for row in rounded] == [row["tokens"] for row in others] == [12, 24]
    if captured:
        assert any("replay" in call for call in platform.log)
        assert all(row["logits"] < 1e-5 and row["state"] < 1e-5 and row["same_best"] == 1 for row in found["rows"])
        return
    assert all(1e-3 < row["state"] < 0.1 for row in rounded), "states are rounded, and no more than that"
    assert all(1e-3 < row["logits"] < 0.1 and 1e-7 < row["kl"] < 1e-2 for row in rounded), "and logits depend on them"
    assert all(row["state"] < 0.1 for row in others)


def test_quantized_experts(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    given: Any = {"folder": tmp_path, "capsys": capsys, "patch": monkeypatch}
    _, found = run(quantized_experts, "--models", "tiny", "tiny-int4", "--tokens", "1", "3", **given)
    assert [row["tokens"] for row in found["rows"]] == [1, 3] * 2 and all(row["us"] > 0 for row in found["rows"])


def test_combine(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    given: Any = {"folder": tmp_path, "capsys": capsys, "patch": monkeypatch}
    _, found = run(combine, "--models", "tiny", "--tokens", "1", "40", **given)
    assert [row["tokens"] for row in found["rows"]] == [1, 40]
    assert all(set(row["us"]) == set(combine.MODES) and min(row["us"].values()) > 0 for row in found["rows"])


def test_make_checkpoint_and_expert_skew(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loader takes what was made, and no expert gets far more of a prompt than others, in any layer."""
    given: Any = {"folder": tmp_path, "capsys": capsys, "patch": monkeypatch}
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "config.json").write_text(json.dumps(tiny_model.CONFIG))
    monkeypatch.setattr(sys, "argv", ["make_checkpoint.py", str(tmp_path / "config"), str(tmp_path / "made")])
    make_checkpoint.main()
    _, found = run(expert_skew, str(tmp_path / "made"), "--tokens", "32", "64", "--dtype", "float32", **given)
    assert [(row["tokens"], row["layer"]) for row in found["rows"]] == [(n, i) for n in (32, 64) for i in range(4)]
    for row in found["rows"][4:]:
        assert row["largest"] == row["busiest"] * 64 * 4 and 12 <= row["tiles"] <= 14
        assert row["busiest"] < 0.15 and row["experts_with_half"] >= 4, "twelve experts, of which a token visits four"


def test_closed_loops(
    closed_loops: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    given: Any = {"folder": tmp_path, "capsys": capsys, "patch": monkeypatch}
    tiny_model.write(tmp_path / "model")
    load = ("--loops", "1", "2", "--rounds", "2", "--input", "8", "--output", "4")
    varied = ("--vary", "speculative", "none", "ngram", "--serve", "--num-pages 500 --max-model-len 128")
    shown, found = run(closed_loops, str(tmp_path / "model"), *varied, *load, **given)
    assert list(found["rows"]) == ["none", "ngram"]
    for value, rows in found["rows"].items():
        for at_once, figures in rows.items():
            assert figures["completed"] == 2 * int(at_once) and figures["failed"] == 0, (value, at_once)
            assert figures["seed"] == int(at_once) - 1, "a seed for each loop"
    assert len(shown.splitlines()) == 5


@pytest.mark.slow
def test_rates_and_a_variable_of_the_environment(
    closed_loops: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server is told: a value that it refuses ends the run with its words."""
    given: Any = {"folder": tmp_path, "capsys": capsys, "patch": monkeypatch}
    tiny_model.write(tmp_path / "model")
    load = ("--loops", "--rates", "50", "--requests", "6", "--input", "8", "--output", "4")
    more = ("--serve", "--num-pages 500 --max-model-len 128")
    _, found = run(closed_loops, str(tmp_path / "model"), "--vary", "ANABRANCH_KERNELS", "", *load, *more, **given)
    figures = found["rows"][""]["50/s"]
    assert (figures["completed"], figures["request_rate"], figures["max_concurrency"]) == (6, 50, None)
    with pytest.raises(SystemExit, match="no provider 'nobody' here"):
        run(closed_loops, str(tmp_path / "model"), "--vary", "ANABRANCH_KERNELS", "route=nobody", *load, *more, **given)


def test_closed_loops_find_no_prompt_in_the_prefix_cache(
    closed_loops: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the tokenizer of a config without one; a seed that is given counts for all loops."""
    given: Any = {"folder": tmp_path, "capsys": capsys, "patch": monkeypatch}
    config = tmp_path / "configs" / "tiny" / "config.json"
    config.parent.mkdir(parents=True)
    config.write_text(json.dumps(tiny_model.CONFIG))
    monkeypatch.setattr(closed_loops, "CONFIGS", tmp_path / "configs")
    monkeypatch.setitem(sys.modules, "serve_load", serve_load)
    load = ("--loops", "2", "1", "--rounds", "2", "--input", "40", "--output", "2")
    varied = ("--vary", "speculative", "none", "--serve", "--num-pages 500 --max-model-len 128")
    for more, hits in (((), [0, 0]), (("--load", "--seed 0"), [0, 4 * 32])):
        _, found = run(closed_loops, "tiny", *varied, *load, *more, **given)
        assert [figures["prefix_hits"] for figures in found["rows"]["none"].values()] == hits, "two pages of each"
