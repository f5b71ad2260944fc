"""Rotary tables and rotation against transformers, for each kind of rope. Norms and writes: test_rope_store."""

import pytest
import torch

from anabranch.layers.config import RopeConfig
from anabranch.layers.rotary import Rotary, frequencies
from anabranch.ops.rope_store import rotate

HEADS, DIM = 4, 16
POSITIONS = torch.tensor([0, 1, 7, 100, 4095])

LLAMA_KINDS = {
    "default": {"rope_theta": 500_000.0},
    "linear": {"rope_theta": 10_000.0, "factor": 4.0},
    "llama3": {
        "rope_theta": 10_000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 256,
    },
}


@pytest.mark.parametrize("kind", LLAMA_KINDS)
def test_as_llama_does_it(kind: str) -> None:
    from transformers.models.llama.configuration_llama import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

    values = LLAMA_KINDS[kind]
    theirs = LlamaRotaryEmbedding(
        LlamaConfig(
            head_dim=DIM,
            hidden_size=HEADS * DIM,
            num_attention_heads=HEADS,
            max_position_embeddings=2048,
            rope_parameters={"rope_type": kind, **values},
        )
    )
    renamed = {"rope_theta": "theta", "original_max_position_embeddings": "original_max_position"}
    ours = RopeConfig(
        kind=kind, head_dim=DIM, rotary_dim=DIM, **{renamed.get(key, key): value for key, value in values.items()}
    )
    torch.testing.assert_close(frequencies(ours), theirs.inv_freq, rtol=1e-6, atol=0)

    x_THD = torch.randn(5, HEADS, DIM)
    cos, sin = theirs(x_THD, POSITIONS[None])
    expected, _ = apply_rotary_pos_emb(x_THD[None], x_THD[None], cos, sin, unsqueeze_dim=2)
    found = rotate(x_THD, *Rotary(ours)(POSITIONS))
    torch.testing.assert_close(found, expected[0], rtol=1e-4, atol=1e-4)  # 4095 radians in fp32


def test_llama3_blends_between_long_and_short_waves() -> None:
    """The sample above has all three bands, or it would prove little."""
    values = LLAMA_KINDS["llama3"]
    waves = 2 * torch.pi * values["rope_theta"] ** (torch.arange(0, DIM, 2) / DIM)
    long, short = (waves > 256 / values["low_freq_factor"]), (waves < 256 / values["high_freq_factor"])
    assert long.any() and short.any() and (~long & ~short).any()


@pytest.mark.parametrize("layer_type", ["sliding_attention", "full_attention"])
def test_as_gemma4_does_it(layer_type: str) -> None:
    from transformers.models.gemma4.configuration_gemma4 import Gemma4TextConfig
    from transformers.models.gemma4.modeling_gemma4 import Gemma4TextRotaryEmbedding, apply_rotary_pos_emb

    config = Gemma4TextConfig(
        head_dim=DIM,
        global_head_dim=2 * DIM,
        num_hidden_layers=2,
        layer_types=["sliding_attention", "full_attention"],
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
        },
    )
    if layer_type == "sliding_attention":
        ours = RopeConfig(head_dim=DIM, rotary_dim=DIM)
    else:
        ours = RopeConfig(kind="proportional", theta=1e6, head_dim=2 * DIM, rotary_dim=DIM // 2)
    theirs = Gemma4TextRotaryEmbedding(config)
    torch.testing.assert_close(frequencies(ours), getattr(theirs, f"{layer_type}_inv_freq"), rtol=1e-6, atol=0)

    x_THD = torch.randn(5, HEADS, ours.head_dim)
    cos, sin = theirs(x_THD, POSITIONS[None], layer_type)
    expected = apply_rotary_pos_emb(x_THD[None], cos, sin, unsqueeze_dim=2)[0]
    torch.testing.assert_close(rotate(x_THD, *Rotary(ours)(POSITIONS)), expected, rtol=1e-4, atol=1e-4)


def test_partial_rope_leaves_the_rest_as_it_is() -> None:
    x_THD = torch.randn(5, HEADS, DIM)
    rope = Rotary(RopeConfig(head_dim=DIM, rotary_dim=8))(POSITIONS)
    assert torch.equal(rotate(x_THD, *rope), torch.cat([rotate(x_THD[..., :8], *rope), x_THD[..., 8:]], -1))
