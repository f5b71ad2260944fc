"""MiniMax-M2: RMSNorm over all query heads and over all key heads, a part of each head turns (`rotary_dim`). The
router's scores are sigmoids, with a bias for the selection; no shared expert. On disk as Mixtral."""

from dataclasses import replace

from anabranch.models.config import LayerConfig, ModelConfig
from anabranch.models.families.mixtral import published_name
from anabranch.models.family import Family
from anabranch.models.keys import Keys
from anabranch.models.readers import read_attention, read_model, read_moe, uniform


def read(keys: Keys) -> ModelConfig:
    keys = uniform(keys, max_position=196_608)
    for name, allowed, what in (
        ("use_qk_norm", True, "only models with norms of queries and keys are supported"),
        ("qk_norm_type", "per_layer", "only norms over all heads of a layer are supported"),
        ("scoring_func", "sigmoid", "only sigmoid is supported"),
        ("use_routing_bias", True, "only routers with a bias for the selection are supported"),
        ("shared_intermediate_size", 0, "shared experts are not supported in this family"),
        ("attn_type_list", [1] * keys.integer("num_hidden_layers"), "only full attention in all layers is supported"),
    ):
        keys.refuse_unless(name, (allowed,), what)
    rotary_dim = keys.get("rotary_dim")
    if rotary_dim is not None:
        share = keys.integer("rotary_dim") / keys.integer("head_dim", default=128)
        keys.raw["partial_rotary_factor"] = keys.get("partial_rotary_factor", default=share)
    attention = read_attention(keys, default_theta=5e6, default_head_dim=128, default_kv_heads=8, default_rotary=1.0)
    if rotary_dim not in (None, attention.rope.rotary_dim):
        raise keys.fail(
            f"'rotary_dim' = {rotary_dim} contradicts 'partial_rotary_factor', by which {attention.rope.rotary_dim} of "
            f"'head_dim' = {attention.head_dim} turn"
        )
    layer = LayerConfig(
        mixer=replace(attention, qk_norm="all", qkv_bias=False, output_bias=False),
        moe=read_moe(
            keys,
            count=("num_local_experts", "num_experts"),
            width="intermediate_size",
            renormalize=True,
            score="sigmoid",
            selection_bias=True,
        ),
    )
    # Published without a dtype; what is not in FP8 is in bfloat16.
    return read_model(keys, [layer] * keys.integer("num_hidden_layers"), default_dtype="bfloat16")


FAMILY = Family(
    model_types=("minimax_m2",),
    read=read,
    renames=((".mlp.router.e_score", ".mlp.e_score"), (".mlp.router.", ".mlp.gate.")),
    published_name=published_name,
    tiny={"minimax_m2": {"num_local_experts": 6, "intermediate_size": 32, "head_dim": 64, "rotary_dim": 32}},
)
