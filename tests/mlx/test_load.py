"""From a folder to a model in MLX: packed weights, dtypes, and what is refused before a weight is read."""

import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mlx_lm", reason="needs an environment of its own: make test-mlx")

import mlx.core as mx
import torch
from mlx_lm import convert
from mlx_lm.generate import generate_step
from mlx_lm.utils import load_model
from transformers import PreTrainedTokenizerFast

from anabranch import platforms
from anabranch.cli.main import main
from anabranch.platforms import Memory
from anabranch.platforms.mlx import MlxPlatform
from tests.mlx.engines import engine, greedy, on_platform, run, tokens
from tests.models import tiny
from tools import tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("load") / "tiny"
    tiny_model.write(folder)
    return folder


@pytest.fixture(scope="module")
def packed(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same weights in 4 bits, as mlx_lm.convert writes them."""
    source, target = tmp_path_factory.mktemp("source") / "tiny", tmp_path_factory.mktemp("packed") / "tiny"
    shutil.copytree(folder, source)
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), eos_token="<|end|>")
    tokenizer.save_pretrained(source)  # convert wants one that transformers can load
    convert(str(source), str(target), quantize=True, q_group_size=32, q_bits=4)
    return target


def test_packed_weights_run_together_as_they_do_in_mlx_lm(folder: Path, packed: Path) -> None:
    prompts = [[1, 2, 3], [5, 6, 7, 8] * 4, [9] * 11]
    itself, _ = load_model(packed)
    expected = [
        [int(token) for token, _ in generate_step(mx.array(prompt), itself, max_tokens=12)] for prompt in prompts
    ]
    with engine(packed, dtype="auto") as one, engine(folder) as whole:
        assert one.runner.loaded.num_bytes < whole.runner.loaded.num_bytes / 3
        assert tokens(run(one, prompts, greedy(12))) == expected
        assert tokens(run(whole, prompts, greedy(12))) != expected  # 4 bits are not 32


def test_packed_weights_are_for_mlx_alone(packed: Path) -> None:
    with pytest.raises(ValueError, match="'quantization_config': it has no quant_method; weights that mlx_lm packed"):
        with engine(packed, "cpu"):
            pass


def test_weights_and_caches_have_the_dtype_that_is_asked_for(tmp_path: Path) -> None:
    """A dense model: MLX's CPU backend has no experts in 16 bits."""
    folder = tiny.save(next(case for case in tiny.CASES if case.name == "llama_published"), tmp_path)  # in float16
    for dtype, expected in (("bfloat16", mx.bfloat16), ("float16", mx.float16), ("auto", mx.float32)):
        with engine(folder, dtype=dtype) as one:
            (update,) = run(one, [[1, 2, 3]], greedy(4))
            assert len(update.token_ids) == 4 and one.runner.dtype == getattr(torch, str(expected)[9:])
            assert one.runner.working.pool.k[0].dtype == expected
            assert one.runner.loaded.model.model.layers[0].mlp.gate_proj.weight.dtype == expected


def test_packed_weights_keep_their_16_bits(packed: Path) -> None:
    raw = json.loads((packed / "config.json").read_text())
    (packed / "config.json").write_text(json.dumps(raw | {"torch_dtype": "bfloat16"}))
    try:
        with engine(packed, dtype="auto") as one:
            assert one.runner.loaded.dtype == "bfloat16" and len(run(one, [[1, 2]], greedy(4))[0].token_ids) == 4
    finally:
        (packed / "config.json").write_text(json.dumps(raw))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"load_format": "dummy"}, "load_format dummy: MLX reads safetensors alone; use safetensors"),
        ({"moe_combine": "ordered"}, "moe_combine ordered: mlx_lm sums experts in its own way; use auto or fastest"),
        ({"shared_expert": "stream"}, "shared_expert stream: mlx_lm runs a shared expert after .*; use auto or inline"),
        ({"tune": "full"}, "tune full: none of our kernels run in MLX"),
        ({"graphs": "full"}, "graphs full: platform 'mlx' captures no graphs"),
        ({"kv_cache_dtype": "fp8_e4m3"}, "kv_cache_dtype fp8_e4m3: platform 'mlx' .* use auto"),
        ({"dtype": "bfloat16"}, "dtype bfloat16: MLX's CPU backend multiplies experts in float32 alone"),
        ({"dtype": "int8"}, "dtype 'int8' is not one of auto, float32, float16, bfloat16"),
        ({"max_model_len": 4096}, "more than the model's own limit of 2048"),
    ],
)
def test_options_that_mlx_does_not_serve_are_refused_by_name(
    folder: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message), engine(folder, **options):
        pass


def test_somebody_elses_packing_is_refused(folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    raw = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(raw | {"quantization_config": {"quant_method": "gptq", "bits": 4}}))
    with (
        pytest.raises(ValueError, match=r"'quantization_config' is not MLX's own packing.*mlx_lm.convert -q"),
        engine(copy),
    ):
        pass


def test_a_tensor_that_is_missing_is_named_in_one_line(folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    (file,) = copy.glob("*.safetensors")
    weights = mx.load(str(file))
    mx.eval(weights)
    del weights["model.norm.weight"]
    mx.save_safetensors(str(file), weights)
    with pytest.raises(ValueError, match=r"mlx_lm does not load it: Missing 1 parameters: model.norm.weight") as caught:
        with engine(copy):
            pass
    assert "\n" not in str(caught.value)


def test_the_guard_speaks_before_a_weight_is_read(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights are cut off: whoever read them would fail otherwise."""
    small = 200_000
    monkeypatch.setattr(MlxPlatform, "memory", lambda self: Memory(free=small, total=small))
    import anabranch.mlx.load as module

    def read(*_: Any, **__: Any) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr(module, "load_model", read)
    with pytest.raises(ValueError, match=r"does not fit: 0.00 GB of weights.* may be used \(memory_fraction 0.8"):
        with engine(folder):
            pass
    monkeypatch.setattr(MlxPlatform, "memory", lambda self: Memory(free=10**9, total=10**9))
    with pytest.raises(AssertionError, match="weights were read"), engine(folder):
        pass


def test_loading_tells_how_far_it_is(folder: Path) -> None:
    from anabranch.config import EngineConfig
    from anabranch.engine.engine import make_engine

    heard: list[tuple[int, int]] = []
    with on_platform("mlx"):
        one = make_engine(EngineConfig(model=str(folder), num_pages=16), lambda *far: heard.append(far))
    one.close()
    assert heard[-1] == (one.runner.loaded.num_bytes,) * 2
    assert heard == sorted(heard) and len(heard) > 10


def test_without_the_packages_the_platform_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == "mlx_lm" else real(name, *more)
    )
    assert not platforms.load("mlx").available()
    with pytest.raises(ValueError, match=r"platform 'mlx' needs the package mlx-lm; pip install 'anabranch\[mlx\]'"):
        platforms.make("mlx")


def test_the_doctor_says_what_is_proven(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--platform", "mlx"]) == 0
    said = capsys.readouterr().out
    assert "never run on Apple silicon" in said and "mlx: " in said and "GB free of" in said
