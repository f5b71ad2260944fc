"""DeepSeek-V2 and V2-Lite: latent attention; experts chosen by softmax, perhaps from the groups with the best expert,
and their weights not renormalised; shared experts without a gate; the first layers dense."""

from dataclasses import replace

from anabranch.models.config import ModelConfig
from anabranch.models.families.deepseek_v3 import (
    RENAMES,
    TINY_LATENT,
    one_layer,
    read_latent,
    read_shared_moe,
    with_groups,
)
from anabranch.models.family import Family
from anabranch.models.keys import Keys
from anabranch.models.readers import read_model, uniform


def read(keys: Keys) -> ModelConfig:
    keys = uniform(keys, max_position=2048)
    keys.refuse_unless("rope_interleave", (True,), "in this family pairs that turn are neighbours")
    keys.refuse_unless("mlp_bias", (False,), "shared experts with a bias are not supported")
    keys.refuse_unless("norm_topk_prob", (False,), "weights are not renormalised in this family")
    keys.refuse_unless("scoring_func", ("softmax",), "only softmax is supported in this family")
    latent = replace(read_latent(keys, kv_heads=0), interleaved=True)
    moe = read_shared_moe(keys, renormalize=False, num_shared=2, scaling=1.0)
    method = keys.get("topk_method", default="greedy")
    if method == "group_limited_greedy":
        if keys.get("n_group") is None or keys.get("topk_group") is None:
            raise keys.fail(f"'topk_method' = {method!r} needs 'n_group' and 'topk_group'")
        moe = with_groups(keys, moe, 1, 1)
    elif method != "greedy":
        raise keys.fail(f"'topk_method' = {method!r} is not supported (supported: greedy, group_limited_greedy)")
    dense = keys.integer("first_k_dense_replace", default=0, minimum=0)
    number = keys.integer("num_hidden_layers")
    return read_model(keys, [one_layer(keys, latent, None if layer_id < dense else moe) for layer_id in range(number)])


FAMILY = Family(
    model_types=("deepseek_v2",),
    read=read,
    renames=RENAMES,
    tiny={
        "deepseek_v2": TINY_LATENT | {"q_lora_rank": None, "first_k_dense_replace": 1, "norm_topk_prob": False},
    },
)
