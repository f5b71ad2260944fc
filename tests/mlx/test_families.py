"""Every tiny checkpoint of the catalogue in MLX: the tokens of our torch path and of mlx_lm itself, or refused by name.

mlx_lm passes over config keys that it has no code for. No checkpoint may run and answer wrongly, and none may be
refused that would run: a refusal is checked by doing what it refuses.
"""

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("mlx_lm", reason="needs an environment of its own: make test-mlx")

import mlx.core as mx
import numpy as np
from mlx_lm.generate import generate_step
from mlx_lm.utils import load_model

from anabranch.engine.engine import Engine
from anabranch.mlx import families
from anabranch.mlx.kv_cache import empty_caches
from anabranch.models.config import read_config
from anabranch.request import Update
from anabranch.sampling_params import SamplingParams
from tests.mlx.engines import engine, greedy, run, tokens
from tests.models import tiny

REFUSED = {
    "qwen2_moe_renormalised_tied_without_bias": "an attention without biases",
    "qwen2_moe_mlp_only_fused": "layers without experts",
    "qwen2_moe_sparse_step_top1_sharded": "layers without experts",
    "qwen2_moe_window_short": "layers that differ in their sliding window",
    "qwen3_moe_top1_tied_bias_without_head_dim": "biases of queries, keys and values; a bias of the attention's output",
    "qwen3_moe_window_long_linear_rope": "rope type 'linear'",
    "qwen3_moe_yarn": "rope type 'yarn'",
    "llama_yarn_mscale": "rope type 'yarn'",
    "mixtral_longrope": "rope type 'longrope'",
    "qwen3_moe_sparse_step_fused_sharded": "holds all experts of a layer",
    "gemma4_text_dense_bias_one_head_dim": "biases of queries, keys and values",
    "mixtral_top1_tied_head_dim_fused": "head_dim 12, which is not hidden_size / num_attention_heads",
    "olmoe_clip_qkv_renormalised": "clip_qkv 0.6",
    "olmoe_bias_tied_fused": "holds all experts of a layer",
    "qwen3_window_short_bias": "biases of queries, keys and values; .*; layers that differ in their sliding window",
}
CASES = {case.name: case for case in tiny.CASES if case.model_type in families.FAMILIES}
UNPROVEN = {case.model_type: case for case in tiny.CASES if case.model_type not in families.FAMILIES}
PUBLISHED = [f"{family}_published" for family in ("qwen2_moe", "qwen3_moe", "gemma4", "mixtral", "olmoe")]
LEAD = 1e-3
"""Greedy choices that are nearer than this say nothing about who is right."""


@pytest.mark.parametrize("name", [name for name in CASES if name not in REFUSED])
def test_a_family_has_the_tokens_of_the_torch_path(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    folder = tiny.save(case, tmp_path)
    prompts, params = [tiny.prompt(case)], greedy(tiny.NUM_NEW_TOKENS, logprobs=2)
    with engine(folder, "cpu") as torch_engine, engine(folder, "mlx") as mlx_engine:
        expected, found = run(torch_engine, prompts, params)[0], run(mlx_engine, prompts, params)[0]
    assert found.token_ids == expected.token_ids and len(found.token_ids) == tiny.NUM_NEW_TOKENS
    for mine, other in zip(found.logprobs, expected.logprobs, strict=True):
        assert abs(mine.logprob - other.logprob) < 1e-4 and mine.rank == 1


@pytest.mark.parametrize("model_type", UNPROVEN)
def test_other_families_are_refused_by_name(model_type: str, tmp_path: Path) -> None:
    folder = tiny.save(UNPROVEN[model_type], tmp_path)
    with pytest.raises(ValueError, match=f"model_type '{model_type}' has not been proven"), engine(folder):
        pass


@pytest.mark.parametrize("name", REFUSED)
def test_what_mlx_lm_does_not_compute_is_refused_by_name(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    folder = tiny.save(case, tmp_path)
    with pytest.raises(ValueError, match=REFUSED[name]), engine(folder):
        pass
    model, prompt = read_config(folder), tiny.prompt(case)
    nested = "text_config" in json.loads((folder / "config.json").read_text())
    try:
        loaded, _ = load_model(folder, model_config=families.hub_keys(model, nested))
    except ValueError as error:
        assert "parameters" in str(error)  # left over, or missing
        return
    logits = loaded(mx.array([prompt]), cache=empty_caches(families.windows(model, 128)))[0]
    expected = tiny.Judge(folder, case.model_type).logits(prompt)
    assert np.abs(np.array(logits) - expected.numpy()).max() > 0.1, "mlx_lm computes it: refuse it no longer"


def clear_cases(engine: Engine, params: list[SamplingParams]) -> tuple[list[list[int]], list[Update]]:
    """For each of params a random prompt whose greedy tokens are no near thing, and what it gives alone."""
    rng = random.Random(0)
    prompts: list[list[int]] = []
    updates: list[Update] = []
    while len(prompts) < len(params):
        prompt = [rng.randrange(tiny.VOCAB_SIZE) for _ in range(rng.randrange(3, 60))]
        (update,) = run(engine, [prompt], params[len(prompts)])
        if min(each.top[0][1] - each.top[1][1] for each in update.logprobs) > LEAD:
            prompts.append(prompt)
            updates.append(update)
    return prompts, updates


@pytest.mark.parametrize("name", PUBLISHED)
def test_alone_and_joining_and_leaving_the_tokens_are_mlx_lms_own(name: str, tmp_path: Path) -> None:
    """Eight requests of 3 to 60 tokens that come one after another, end at different times, and one is aborted."""
    folder = tiny.save(CASES[name], tmp_path)
    params = [greedy(6 + 3 * i, logprobs=2) for i in range(8)]
    with engine(folder, "cpu") as torch_engine, engine(folder, "mlx") as mlx_engine:
        prompts, expected = clear_cases(torch_engine, params)
        alone = [run(mlx_engine, [prompt], one)[0] for prompt, one in zip(prompts, params, strict=True)]
        assert tokens(alone) == tokens(expected)
        joins = {i: 2 * i for i in range(8)}
        together = run(mlx_engine, prompts, params, joins=joins, leaves={5: 16})
    gone = together.pop(5).token_ids
    assert 0 < len(gone) < 21 and gone == expected[5].token_ids[: len(gone)]
    assert tokens(together) == [update.token_ids for i, update in enumerate(expected) if i != 5]

    # With the config as it lies there, not as we would write it; but for Gemma 4's vocabulary, whose published size
    # mlx_lm takes for granted.
    itself, _ = load_model(folder, model_config={"vocab_size": tiny.VOCAB_SIZE})
    for prompt, update in zip(prompts[:4], expected[:4], strict=True):
        steps = generate_step(mx.array(prompt), itself, max_tokens=len(update.token_ids))
        assert [int(token) for token, _ in steps] == update.token_ids


def test_a_window_no_request_can_fill_is_none(tmp_path: Path) -> None:
    """The file makes one mask for all layers; where no window is ever full, one mask is right."""
    case = CASES["qwen2_moe_window_long"]
    folder = tiny.save(case, tmp_path)
    assert {layer.attention.window for layer in read_config(folder).layers} == {0, 200}
    prompt = [tiny.prompt(case)]
    with engine(folder, "cpu") as torch_engine, engine(folder, "mlx") as mlx_engine:
        assert tokens(run(mlx_engine, prompt, greedy(20))) == tokens(run(torch_engine, prompt, greedy(20)))
    with pytest.raises(ValueError, match="layers that differ in their sliding window"):
        families.check(read_config(folder), max_model_len=201)


def test_an_unproven_family_is_refused(tmp_path: Path) -> None:
    model = read_config(tiny.save(CASES["llama_published"], tmp_path))
    with pytest.raises(ValueError, match="model_type 'odd' has not been proven with mlx_lm .*ANABRANCH_PLATFORM=cpu"):
        families.check(replace(model, model_type="odd"), 128)
