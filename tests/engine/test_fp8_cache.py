"""Keys and values in FP8: scales of checkpoints, the equalities of an engine, memory, and what is refused."""

import json
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.models.qwen3_moe import modeling_qwen3_moe

from anabranch import bundled, platforms
from anabranch.cli.main import main
from anabranch.config import EngineConfig
from anabranch.engine import plan
from anabranch.engine.engine import make_engine
from anabranch.engine.single import SingleSequence
from anabranch.loader.checkpoint import CheckpointError
from anabranch.loader.load import load_model
from anabranch.loader.resolve import resolve
from anabranch.models.config import read_config
from anabranch.models.keys import ConfigError
from anabranch.request import Update
from anabranch.text.tokenizer import Tokenizer
from tests.engine.test_engine import DEFAULTS, greedy, prompts
from tests.models import tiny

FP8 = "fp8_e4m3"
QWEN = next(case for case in tiny.CASES if case.model_type == "qwen3_moe" and case.experts == "split")
GEMMA = next(case for case in tiny.CASES if case.model_type == "gemma4_text")  # windows, two groups
SCALES = {layer: (0.003 * (layer + 1), 0.004 / (layer + 1)) for layer in range(3)}
"""Of keys and values in each layer; with these, some are out of range."""


FOLDERS = [
    pytest.param(QWEN, id="qwen3_moe"),
    pytest.param(GEMMA, id="gemma4_text", marks=pytest.mark.slow),  # test_engine.py has it, with a plain cache
]


@pytest.fixture(scope="module", params=FOLDERS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(request.param, tmp_path_factory.mktemp("model") / "model")


@pytest.fixture
def qwen(tmp_path: Path) -> Path:
    return tiny.save(QWEN, tmp_path / "model")


def logits(folder: Path, kv_cache_dtype: str) -> torch.Tensor:
    model = load_model(folder, dtype="float32", kv_cache_dtype=kv_cache_dtype)
    return SingleSequence(model, 64).forward(tiny.prompt(QWEN))


# ---------------------------------------------------------------------------------------------------------------------
# An engine
# ---------------------------------------------------------------------------------------------------------------------


def test_the_bundled_model_hardly_notices() -> None:
    """Each key and value is off by up to 1/16 of it. Random models are too sensitive to judge by."""
    text = "Once upon a time there was a little girl who lived in a house near the forest. Every day she went to the"
    tokens = Tokenizer(bundled.folder()).encode(text)
    plain, found = (
        SingleSequence(load_model(bundled.folder(), dtype="float32", kv_cache_dtype=dtype), 64).forward(tokens)
        for dtype in ("auto", FP8)
    )
    assert 1e-3 < (found - plain).norm() / plain.norm() < 0.05
    assert (found.argmax(-1) == plain.argmax(-1)).float().mean() > 0.9
    divergence = torch.nn.functional.kl_div(
        found.log_softmax(-1), plain.log_softmax(-1), log_target=True, reduction="batchmean"
    )
    assert divergence < 0.01


@pytest.fixture(scope="module")
def alone(folder: Path) -> Iterator[Callable[[list[tuple[int, ...]]], list[Update]]]:
    """Each prompt by itself, whole, cold."""
    options = DEFAULTS | {"kv_cache_dtype": FP8, "async_scheduling": False, "prefix_cache": False}
    with closing(make_engine(EngineConfig(model=str(folder), **options))) as one:
        yield lambda batch: [greedy(one, [prompt])[0] for prompt in batch]


@pytest.mark.parametrize(
    "options",
    [{}, {"max_num_batched_tokens": 7}, {"num_pages": 32, "max_model_len": 72}],
    ids=["batched", "chunked", "preempted"],
)
def test_an_answer_does_not_depend_on_others(options: dict[str, Any], folder: Path, alone: Any) -> None:
    batch = prompts(12)
    with closing(make_engine(EngineConfig(model=str(folder), **DEFAULTS | {"kv_cache_dtype": FP8} | options))) as one:
        found = greedy(one, batch)
        assert one.scheduler.num_preemptions > 0 or "num_pages" not in options
    same_answers(found, alone(batch))


def test_a_warm_prefix_is_a_cold_one(folder: Path, alone: Any) -> None:
    stem = prompts(1)[0] + tuple(range(30))
    batch = [stem[:n] + (n,) for n in (31, 30, 9, 17)] + [stem]
    options = DEFAULTS | {"kv_cache_dtype": FP8, "max_num_seqs": 1}
    with closing(make_engine(EngineConfig(model=str(folder), **options))) as one:
        greedy(one, batch)
        again = greedy(one, batch)
    assert all(update.num_cached >= len(prompt) - 8 for update, prompt in zip(again, batch, strict=True))
    same_answers(again, alone(batch))


def same_answers(found: list[Update], expected: list[Update]) -> None:
    """A key that lies between two numbers of FP8 may be rounded to either, with all that follows from it."""
    for mine, other in zip(found, expected, strict=True):
        assert mine.token_ids == other.token_ids
        assert all(abs(a.logprob - b.logprob) < 0.05 for a, b in zip(mine.logprobs, other.logprobs, strict=True))


def test_a_page_takes_a_quarter_of_the_memory(folder: Path) -> None:
    options = DEFAULTS | {"num_pages": 0, "memory_fraction": 0.05, "max_num_seqs": 10**6}
    pages, tokens = [], []
    for kv_cache_dtype in ("auto", FP8):
        config = read_config(folder, kv_cache_dtype=kv_cache_dtype)
        found = plan.plan_memory(config, 10**9, fraction=0.5, dtype="float32", page_size=4)
        tokens.append(found.concurrency(64))
        with closing(make_engine(EngineConfig(model=str(folder), **options, kv_cache_dtype=kv_cache_dtype))) as one:
            kv = one.runner.kv  # type: ignore[attr-defined]
            assert {x.dtype for layer in kv for x in layer} == {torch.float32 if not pages else torch.float8_e4m3fn}
            num_pages = [kv[group.layers[0]][0].shape[0] for group in config.cache_groups]
            held = sum(x.nbytes for layer in kv for x in layer)
            assert plan.pages_bytes(config, num_pages, 4, "float32") == held
            pages.append(num_pages)
    assert tokens[1] // 4 == tokens[0] or tokens[1] // 4 == tokens[0] + 1
    assert all(3.9 < fp8 / plain < 4.1 for plain, fp8 in zip(*pages, strict=True))


def test_plan_counts_bytes_of_fp8(qwen: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = []
    for flags in ([], ["--kv-cache-dtype", FP8]):
        assert main(["plan", str(qwen), "--json", "--dtype", "bfloat16", *flags]) == 0
        found.append(json.loads(capsys.readouterr().out)["kv_bytes_per_token"][0]["bytes"])
    assert found[0] == 2 * found[1]
    main(["plan", str(qwen), "--kv-cache-dtype", FP8])
    assert ", float8_e4m3fn" in capsys.readouterr().out


# ---------------------------------------------------------------------------------------------------------------------
# The scales of a checkpoint
# ---------------------------------------------------------------------------------------------------------------------


def add_scales(folder: Path, key: str, value: str, shape: tuple[int, ...] = (1,), **changed: float) -> None:
    tensors = load_file(folder / "model.safetensors")
    for layer, (k_scale, v_scale) in SCALES.items():
        for name, scale in ((key, changed.get("k", k_scale)), (value, changed.get("v", v_scale))):
            tensors[f"model.layers.{layer}.self_attn.{name}"] = torch.full(shape, scale)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def by_transformers(folder: Path, monkeypatch: pytest.MonkeyPatch, scales: dict[int, tuple[float, float]]) -> Any:
    """The logits with keys and values, as attention gets them, rounded to FP8 after division by their scale."""
    attend = modeling_qwen3_moe.eager_attention_forward

    def rounded(x: torch.Tensor, scale: float) -> torch.Tensor:
        return (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale

    def attend_rounded(module: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        k_scale, v_scale = scales[module.layer_idx]
        return attend(module, query, rounded(key, k_scale), rounded(value, v_scale), *args, **kwargs)

    judge = tiny.Judge(folder, QWEN.model_type)
    with monkeypatch.context() as patch:
        patch.setattr(modeling_qwen3_moe, "eager_attention_forward", attend_rounded)
        return judge.logits(tiny.prompt(QWEN))


def test_without_scales_they_are_one(qwen: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = by_transformers(qwen, monkeypatch, dict.fromkeys(SCALES, (1.0, 1.0)))
    torch.testing.assert_close(logits(qwen, FP8), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("shape", [(), (1,)])
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("k_scale", "v_scale"),
        ("attn.k_scale", "attn.v_scale"),
        ("k_proj.k_scale", "v_proj.v_scale"),
        ("k_proj.output_scale", "v_proj.output_scale"),
    ],
)
def test_scales_are_applied(
    key: str, value: str, shape: tuple[int, ...], qwen: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = logits(qwen, "auto")
    expected = by_transformers(qwen, monkeypatch, SCALES)
    assert (expected - plain).norm() > 0.05 * plain.norm(), "numbers out of range make a difference"
    add_scales(qwen, key, value, shape)
    torch.testing.assert_close(logits(qwen, FP8), expected, rtol=0, atol=1e-4)
    assert torch.equal(logits(qwen, "auto"), plain), "another cache does not need them"


def test_one_scale_for_both(qwen: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = by_transformers(qwen, monkeypatch, dict.fromkeys(SCALES, (0.003, 0.003)))
    add_scales(qwen, "kv_scale", "kv_scale", k=0.003, v=0.003)
    torch.testing.assert_close(logits(qwen, FP8), expected, rtol=0, atol=1e-4)


def test_a_checkpoint_whose_cache_alone_is_quantised(qwen: Path) -> None:
    add_scales(qwen, "k_scale", "v_scale")
    expected = logits(qwen, FP8)
    scheme = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": False}
    write_scheme(qwen, scheme)
    assert torch.equal(logits(qwen, FP8), expected)
    write_scheme(qwen, scheme | {"type": "int"})
    with pytest.raises(ConfigError, match="'kv_cache_scheme' = .* is not FP8, so .* use kv_cache_dtype auto"):
        logits(qwen, FP8)
    logits(qwen, "auto")


def write_scheme(folder: Path, scheme: dict[str, Any]) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "config_groups": {},
        "kv_cache_scheme": scheme,
    }
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("names", "options", "message"),
    [
        (("k_scale", "v_scale"), {"shape": (2,)}, "one floating-point number for a layer; use kv_cache_dtype auto"),
        (("k_scale", "v_scale"), {"k": float("nan")}, "is nan, but a cache scale must be a number above 0"),
        (("k_scale", "v_scale"), {"v": 0.0}, "is 0.0, but a cache scale must be a number above 0"),
        (("k_scale", "odd.v_scale"), {}, "'.*k_scale' is the only cache scale of its layer"),
        (("odd.k_scale", "odd.v_scale"), {}, "tensor '.*odd.k_scale' .* has no place in a qwen3_moe model"),
    ],
)
def test_scales_that_are_refused(names: tuple[str, str], options: dict[str, Any], message: str, qwen: Path) -> None:
    add_scales(qwen, *names, **options)
    logits(qwen, "auto")
    with pytest.raises(CheckpointError, match=message):
        logits(qwen, FP8)


# ---------------------------------------------------------------------------------------------------------------------
# Options
# ---------------------------------------------------------------------------------------------------------------------


def test_unknown_dtypes_are_refused(qwen: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="kv_cache_dtype must be one of auto, model, fp8_e4m3, not 'fp8'"):
        EngineConfig(model=str(qwen), kv_cache_dtype="fp8")
    with pytest.raises(SystemExit):
        main(["generate", "--model", str(qwen), "--kv-cache-dtype", "int8", "x"])
    assert "invalid choice: 'int8' (choose from" in capsys.readouterr().err


def test_platforms_without_fp8_refuse_it(qwen: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    platform, model = platforms.make("cpu"), read_config(qwen)
    assert resolve(EngineConfig(model=str(qwen)), model, platform).kv_cache_dtype == "model"
    assert resolve(EngineConfig(model=str(qwen), kv_cache_dtype=FP8), model, platform).kv_cache_dtype == FP8
    assert not platforms.load("mlx").fp8_cache and not platforms.load("npu").fp8_cache
    monkeypatch.setattr(type(platform), "fp8_cache", False)
    with pytest.raises(ValueError, match=r"kv_cache_dtype fp8_e4m3: platform 'cpu' \(.*\) keeps keys .*; use auto"):
        resolve(EngineConfig(model=str(qwen), kv_cache_dtype=FP8), model, platform)
