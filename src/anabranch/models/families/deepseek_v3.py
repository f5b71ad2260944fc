"""DeepSeek-V3 and R1, and Kimi-K2, which has other sizes: latent attention; experts chosen by sigmoid and a bias, from
the groups whose best two are best; a shared expert without a gate; the first layers dense."""

import math
from dataclasses import replace

from anabranch.layers.config import LatentConfig
from anabranch.models.config import LayerConfig, ModelConfig
from anabranch.models.family import Family
from anabranch.models.keys import Keys
from anabranch.models.readers import read_model, read_moe, uniform
from anabranch.models.rope import read_rope
from anabranch.moe.config import MoEConfig


def read(keys: Keys) -> ModelConfig:
    keys = uniform(keys, max_position=4096)
    latent, moe = read_latent(keys), read_sigmoid_moe(keys, scaling=2.5, groups=(8, 4))
    number = keys.integer("num_hidden_layers")
    dense = keys.integer("first_k_dense_replace", default=3, minimum=0)
    layers = [one_layer(keys, latent, None if layer_id < dense else moe) for layer_id in range(number)]
    return read_model(keys, layers)


def read_latent(
    keys: Keys,
    *,
    plain_dim: int = 128,
    value_dim: int = 128,
    query_rank: int = 1536,
    kv_heads: int = 128,
    rotary: float | None = None,
) -> LatentConfig:
    """Also of other families. The rest are defaults; `rotary`: of a family that reads 'partial_rotary_factor'."""
    num_heads, rope_dim = keys.integer("num_attention_heads"), keys.integer("qk_rope_head_dim", default=64)
    given = "num_key_value_heads" in keys.raw
    kv_heads = keys.integer("num_key_value_heads", default=num_heads if given or not kv_heads else kv_heads)
    if kv_heads != num_heads:
        raise keys.fail(
            f"'num_key_value_heads' = {kv_heads}: latent attention makes keys and values of all "
            f"'num_attention_heads' = {num_heads}"
        )
    keys.refuse_unless("head_dim", (rope_dim,), f"here it stands for 'qk_rope_head_dim', which is {rope_dim}")
    if rope_dim % 2:
        raise keys.fail(f"'qk_rope_head_dim' = {rope_dim} must be even")
    rope = read_rope(keys, rope_dim, 10_000.0, rotary)
    if rope.rotary_dim != rope_dim:
        raise keys.fail(f"'partial_rotary_factor': all of 'qk_rope_head_dim' = {rope_dim} must turn")
    rank = keys.integer("q_lora_rank", default=query_rank) if keys.raw.get("q_lora_rank", query_rank) is not None else 0
    bias = keys.flag("attention_bias", False)
    if bias and not rank:
        raise keys.fail("'attention_bias' = true is supported only with a 'q_lora_rank'")
    plain_dim = keys.integer("qk_nope_head_dim", default=plain_dim)
    scale: float = (plain_dim + rope_dim) ** -0.5
    magnitude = (keys.mapping("rope_scaling") or keys.mapping("rope_parameters")).get("mscale_all_dim")
    if rope.kind != "default" and magnitude:
        if isinstance(magnitude, bool) or not isinstance(magnitude, int | float):
            raise keys.fail(f"rope: 'mscale_all_dim' must be a number, not {magnitude!r}")
        scale *= (1 + 0.1 * magnitude * math.log(max(rope.factor, 1.0))) ** 2
    return LatentConfig(
        num_heads=num_heads,
        latent_dim=keys.integer("kv_lora_rank", default=512),
        plain_dim=plain_dim,
        value_dim=keys.integer("v_head_dim", default=value_dim),
        scale=scale,
        rope=rope,
        # Here, as in other keys of these families, a null is false and a missing key true.
        interleaved="rope_interleave" not in keys.raw or keys.flag("rope_interleave", False),
        query_rank=rank,
        bias=bias,
    )


def read_sigmoid_moe(keys: Keys, *, scaling: float, groups: tuple[int, int] = (1, 1)) -> MoEConfig:
    """Also of other families; `scaling` and `groups` are defaults."""
    keys.refuse_unless("scoring_func", ("sigmoid",), "only sigmoid is supported in this family")
    keys.refuse_unless("topk_method", ("noaux_tc",), "only noaux_tc is supported in this family")
    renormalize = "norm_topk_prob" not in keys.raw or keys.flag("norm_topk_prob", False)
    moe = read_shared_moe(keys, renormalize=renormalize, num_shared=1, scaling=scaling)
    moe = replace(moe, score="sigmoid", selection_bias=True)
    return with_groups(keys, moe, *groups, smallest=2)


def read_shared_moe(keys: Keys, *, renormalize: bool, num_shared: int, scaling: float) -> MoEConfig:
    """Experts with shared ones, which are one that is as wide as all of them; `num_shared`, `scaling` are defaults."""
    keys.refuse_unless("moe_layer_freq", (1,), "experts in some layers only are not supported in this family")
    return read_moe(
        keys,
        count=("n_routed_experts", "num_local_experts", "num_experts"),
        renormalize=renormalize,
        shared_width=keys.integer("moe_intermediate_size") * keys.integer("n_shared_experts", default=num_shared),
        shared_gate=False,
        scaling=keys.number("routed_scaling_factor", default=scaling),
    )


def with_groups(keys: Keys, moe: MoEConfig, num_groups: int, top_groups: int, smallest: int = 1) -> MoEConfig:
    """Numbers of groups are defaults; a group has at least the `smallest` number of experts."""
    num_groups = keys.integer("n_group", default=num_groups)
    top_groups = keys.integer("topk_group", default=top_groups)
    size, rest = divmod(moe.num_experts, num_groups)
    if rest or size < smallest or top_groups > num_groups or moe.top_k > top_groups * size:
        raise keys.fail(
            f"'n_group' = {num_groups} and 'topk_group' = {top_groups} do not fit 'n_routed_experts' = "
            f"{moe.num_experts} and 'num_experts_per_tok' = {moe.top_k}"
        )
    return replace(moe, num_groups=num_groups, top_groups=top_groups)


def one_layer(keys: Keys, latent: LatentConfig, moe: MoEConfig | None) -> LayerConfig:
    """With experts or, if there are none, dense."""
    if moe is not None:
        return LayerConfig(mixer=latent, moe=moe)
    return LayerConfig(mixer=latent, mlp_width=keys.integer("intermediate_size"))


RENAMES = ((".mlp.router.", ".mlp.gate."), (".mlp.shared_expert.", ".mlp.shared_experts."))
TINY_LATENT = {
    "num_key_value_heads": 2,
    "q_lora_rank": 48,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "n_routed_experts": 6,
    "n_shared_experts": 1,
}
TINY = TINY_LATENT | {"first_k_dense_replace": 1, "n_group": 2, "topk_group": 1}
FAMILY = Family(
    model_types=("deepseek_v3", "kimi_k2"),
    read=read,
    renames=RENAMES,
    has_further_layers=True,
    tiny={"deepseek_v3": TINY, "kimi_k2": TINY | {"n_group": 1}},
)
