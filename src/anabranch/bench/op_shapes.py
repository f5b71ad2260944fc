"""The models whose shapes ops are timed with: the bundled configs, with figures of targets.json, and a tiny one."""

from dataclasses import dataclass, field
from functools import cache

from anabranch.bench.records import CONFIGS, TARGETS
from anabranch.models.config import AttentionConfig, LayerConfig, ModelConfig, MoEConfig, read_config
from anabranch.models.rope import RopeConfig

TINY = "tiny"
"""The default without an accelerator: shows that everything runs, and what a call costs there."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    name: str
    config: ModelConfig
    moe: MoEConfig
    experts_us: dict[str, dict[str, float]] = field(default_factory=dict)
    """µs of the op `experts` by number of tokens, on an H200 in bf16: "target", and of vLLM 0.25.1's Triton path."""

    @property
    def heads(self) -> tuple[AttentionConfig, ...]:
        """Each kind of attention layer once."""
        return tuple(dict.fromkeys(layer.attention for layer in self.config.layers))


@cache
def shape(name: str) -> ModelShape:
    config = tiny() if name == TINY else read_config(CONFIGS / name)
    moe = config.layers[0].moe
    assert moe is not None
    return ModelShape(name, config, moe, TARGETS.get(name, {}).get("experts_us", {}))


def tiny() -> ModelConfig:
    rope = RopeConfig(head_dim=16, rotary_dim=16)
    attention = AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=16, scale=0.25, rope=rope)
    moe = MoEConfig(num_experts=8, top_k=2, width=32, renormalize=True)
    return ModelConfig(
        model_type="qwen3_moe",
        vocab_size=1000,
        hidden_size=64,
        layers=(LayerConfig(mixer=attention, moe=moe),),
        activation="silu",
        norm_eps=1e-6,
        tie_embeddings=True,
        max_position=4096,
    )
