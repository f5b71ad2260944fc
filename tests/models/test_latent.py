"""Families with latent attention: published configs, what is refused, and requests long enough for keys and values of
heads. test_transformers judges their logits."""

import itertools
import json
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from anabranch.engine import kv_tensors
from anabranch.engine.batch import StepMaker
from anabranch.engine.plan import count_active, count_weights
from anabranch.engine.scheduler import Sequence, Share
from anabranch.engine.single import SingleSequence
from anabranch.layers import latent
from anabranch.layers.config import LatentConfig
from anabranch.layers.step import Span
from anabranch.loader.load import load_model
from anabranch.models.config import read_config
from anabranch.models.keys import ConfigError
from anabranch.request import Request
from anabranch.sampling_params import SamplingParams
from tests.models import tiny

# The keys of the files that model authors publish.
DEEPSEEK_V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "v_head_dim": 128,
    "vocab_size": 129280,
}
KIMI_K2 = DEEPSEEK_V3 | {
    "model_type": "kimi_k2",
    "first_k_dense_replace": 1,
    "max_position_embeddings": 131072,
    "n_group": 1,
    "n_routed_experts": 384,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "num_nextn_predict_layers": 0,
    "rope_theta": 50000.0,
    "routed_scaling_factor": 2.827,
    "topk_group": 1,
    "vocab_size": 163840,
}
GLM_4_7_FLASH: dict[str, Any] = {
    "architectures": ["Glm4MoeLiteForCausalLM"],
    "model_type": "glm4_moe_lite",
    "hidden_size": 2048,
    "intermediate_size": 10240,
    "max_position_embeddings": 202752,
    "moe_intermediate_size": 1536,
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "num_attention_heads": 20,
    "n_group": 1,
    "topk_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 1,
    "routed_scaling_factor": 1.8,
    "num_experts_per_tok": 4,
    "first_k_dense_replace": 1,
    "num_hidden_layers": 47,
    "num_key_value_heads": 20,
    "num_nextn_predict_layers": 1,
    "partial_rotary_factor": 1.0,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
    "q_lora_rank": 768,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "v_head_dim": 256,
    "vocab_size": 154880,
}
PUBLISHED = {"deepseek-v3": (DEEPSEEK_V3, 671, 37), "kimi-k2": (KIMI_K2, 1026, 32), "flash": (GLM_4_7_FLASH, 30, 3.6)}
"""Config, billions of parameters, and of those that a token passes through."""


def write(folder: Path, config: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("model", PUBLISHED)
def test_published_configs_are_read(model: str, tmp_path: Path) -> None:
    raw, total, active = PUBLISHED[model]
    config = read_config(write(tmp_path, raw))
    assert sum(count_weights(config).values()) / 1e9 == pytest.approx(total, rel=0.01)
    assert count_active(config) / 1e9 == pytest.approx(active, rel=0.05)
    assert [group.num_values for group in config.cache_groups] == [576 * raw["num_hidden_layers"]]


def test_yarn_scales_the_scores(tmp_path: Path) -> None:
    mixer: Any = read_config(write(tmp_path, DEEPSEEK_V3)).layers[0].mixer
    assert mixer.scale == pytest.approx(192**-0.5 * 1.3688879454113936**2)  # 1 + 0.1 ln 40
    assert mixer.rope.attention_factor == 1.0  # of two that cancel


def test_kimi_k2_is_deepseek_v3(tmp_path: Path) -> None:
    folder = tiny.save(next(case for case in tiny.CASES if case.name == "deepseek_v3_published"), tmp_path)
    prompt = list(range(20))
    expected = SingleSequence(load_model(folder, dtype="float32"), 32).forward(prompt)
    write(folder, json.loads((folder / "config.json").read_text()) | {"model_type": "kimi_k2"})
    assert torch.equal(SingleSequence(load_model(folder, dtype="float32"), 32).forward(prompt), expected)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"attention_bias": True, "q_lora_rank": None}, "'attention_bias' = true is supported only with a 'q_lora_r"),
        ({"num_key_value_heads": 8}, "'num_key_value_heads' = 8"),
        ({"n_group": 7}, "'n_group' = 7"),
        ({"topk_group": 9}, "'topk_group' = 9"),
        ({"scoring_func": "softmax"}, "'scoring_func'"),
        ({"moe_layer_freq": 2}, "'moe_layer_freq'"),
        ({"qk_rope_head_dim": 63}, "'qk_rope_head_dim' = 63 must be even"),
        ({"head_dim": 128}, "'head_dim' = 128"),
    ],
)
def test_refused_by_name(change: dict[str, Any], named: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        read_config(write(tmp_path, DEEPSEEK_V3 | change))
    assert named in str(error.value)


def test_an_fp8_cache_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="latent rows, which are not supported in FP8; use kv_cache_dtype auto"):
        read_config(write(tmp_path, DEEPSEEK_V3), kv_cache_dtype="fp8_e4m3")


# ---------------------------------------------------------------------------------------------------------------------
# Queries in the latent space, or keys and values of heads
# ---------------------------------------------------------------------------------------------------------------------

EXPANDED = ("deepseek_v2_published", "deepseek_v3_published", "glm4_moe_lite_published")


@pytest.mark.parametrize(("raw", "most"), [(DEEPSEEK_V3, 170), (KIMI_K2, 170), (GLM_4_7_FLASH, 398)])
def test_expanded_where_that_is_less_work(raw: dict[str, Any], most: int, tmp_path: Path) -> None:
    config: Any = read_config(write(tmp_path, raw)).layers[0].mixer
    assert config.most_absorbed == most
    expansion = config.latent_dim * (config.plain_dim + config.value_dim)
    for new, context in itertools.product((2, most - 30, most + 1, 4 * most), (0, 20_000, 160_000)):
        pairs = new * context + new * (new + 1) // 2
        absorbed = pairs * (config.row + config.latent_dim) + new * expansion
        expanded = pairs * (config.key_dim + config.value_dim) + (new + context) * expansion
        assert (expanded < absorbed) == (new > most or context == 0), (new, context)


@pytest.fixture(scope="module", params=EXPANDED)
def judged(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, list[int], Any]:
    """(model, tokens, transformers' logits)."""
    case = next(case for case in tiny.CASES if case.name == request.param)
    folder = tiny.save(case, tmp_path_factory.mktemp(case.name))
    tokens = torch.randint(0, tiny.VOCAB_SIZE, (120,), generator=torch.Generator().manual_seed(1)).tolist()
    return load_model(folder, dtype="float32"), tokens, tiny.Judge(folder, case.model_type).logits(tokens)


def count_expanded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows with the contexts that are expanded."""
    contexts: list[int] = []
    expanded = latent.LatentAttention._expanded
    monkeypatch.setattr(
        latent.LatentAttention,
        "_expanded",
        lambda self, q, spans, *rest: (
            contexts.extend(span.context for span in spans) or expanded(self, q, spans, *rest)
        ),
    )
    return contexts


@pytest.mark.parametrize("rows", [latent.EXPANDED_ROWS, 64], ids=["all heads", "few heads at once"])
@pytest.mark.parametrize("chunks", [(120,), (50, 1, 40, 29), (5, 115)], ids=["whole", "chunks", "warm prefix"])
def test_expanded_heads(
    chunks: tuple[int, ...], rows: int, judged: tuple[Any, list[int], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokens, expected = judged
    monkeypatch.setattr(latent, "EXPANDED_ROWS", rows)
    contexts = count_expanded(monkeypatch)
    sequence, rest = SingleSequence(model, 128), iter(tokens)
    logits = torch.cat([sequence.forward(list(itertools.islice(rest, count))) for count in chunks])
    most = model.config.layers[0].mixer.most_absorbed
    ends = [end for count, end in zip(chunks, itertools.accumulate(chunks)) if count > most]
    assert sorted({*contexts}) == ends and len(contexts) == len(ends) * len(model.layers)
    assert (logits - expected).abs().max() <= 1e-4
    monkeypatch.setattr(LatentConfig, "most_absorbed", sys.maxsize)
    assert (SingleSequence(model, 128).forward(tokens) - logits).abs().max() <= 1e-4


def test_one_part_of_the_heads_is_in_memory(
    judged: tuple[Any, list[int], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is made for heads that are done is gone before others are made, and is no larger than it may be."""
    model, tokens, _ = judged
    config = model.config.layers[0].mixer
    monkeypatch.setattr(latent, "EXPANDED_ROWS", 80)
    made: list[weakref.ref[torch.Tensor]] = []
    new_empty = torch.Tensor.new_empty

    def noted(x: torch.Tensor, *shape: Any, **options: Any) -> torch.Tensor:
        result = new_empty(x, *shape, **options)
        if result.dim() == 4:
            assert not any(one() is not None for one in made)
            assert result.numel() <= 80 * config.num_heads * (config.key_dim + config.value_dim)
            made.append(weakref.ref(result))
        return result

    monkeypatch.setattr(torch.Tensor, "new_empty", noted)
    with torch.inference_mode():
        SingleSequence(model, 128).forward(tokens)
    assert len(made) > len(model.layers)


def test_which_spans_are_expanded_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latent, "EXPANDED_ROWS", 64)
    spans = [Span(1, 3, 20, 17), Span(2, 20, 36, 30), Span(3, 36, 40, 4), Span(5, 50, 60, 90), Span(6, 60, 61, 1)]
    for most, expected in ((8, [[1, 2], [3], [5], [6]]), (1, [[1], [2], [3], [5], [6]])):
        found = latent.consecutive(spans, 16, most)
        assert [[span.request for span in some] for some in found] == expected
    table_RM, start_R, context_R = latent.pages_in_order(((17, 17), (16, 30), (2, 40)), 16, torch.device("cpu"))
    assert [row[:n].tolist() for row, n in zip(table_RM, (2, 2, 3))] == [[0, 1], [2, 3], [4, 5, 6]]
    assert table_RM.max() == 6 and start_R.tolist() == [0, 17, 33, 35] and context_R.tolist() == [17, 30, 40]


@pytest.mark.parametrize("order", [(0, 1, 2, 3, 4), (0, 4, 1, 3, 2)], ids=["long ones last", "any order"])
def test_long_and_short_requests_in_a_step(
    order: tuple[int, ...], judged: tuple[Any, list[int], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """(tokens before, tokens in the step) of each: one that decodes, short ones and long ones."""
    model, tokens, expected = judged
    shares = [[(60, 1), (0, 7), (40, 20), (0, 50), (16, 60)][i] for i in order]
    steps = StepMaker(1, len(shares), 128, 16, torch.device("cpu"))
    kv = kv_tensors.allocate(model.config, [8 * len(shares)], 16, torch.float32, torch.device("cpu"))
    sequences, pages = [], {}
    for slot, (before, _) in enumerate(shares):
        request = Request(id=str(slot), prompt_ids=tuple(tokens), params=SamplingParams())
        sequence = Sequence(request, slot)
        sequence.slot, pages[sequence.id] = slot, [list(range(8 * slot, 8 * slot + 8))]
        steps.join(slot)
        if before:
            with torch.inference_mode():
                model(steps.make([Share(sequence, 0, before, 0)], pages.__getitem__), kv)
        sequences.append(sequence)
    contexts = count_expanded(monkeypatch)
    with torch.inference_mode():
        given = [Share(s, before, before + n, 1) for s, (before, n) in zip(sequences, shares, strict=True)]
        logits = model.logits(model(steps.make(given, pages.__getitem__), kv))
    assert {*contexts} == {50, 76}
    for found, (before, count) in zip(logits.split([n for _, n in shares]), shares, strict=True):
        assert (found - expected[before : before + count]).abs().max() <= 1e-4
