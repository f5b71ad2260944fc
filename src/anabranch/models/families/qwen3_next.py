"""Qwen3-Next: as Qwen3.5 with experts, but its delta nets' projections are kept key head by key head."""

from anabranch.models.config import ModelConfig
from anabranch.models.families.qwen3_5 import TINY_DELTA, read_mixers
from anabranch.models.family import Family
from anabranch.models.keys import Keys
from anabranch.models.readers import qwen_layers, read_model, read_moe, uniform


def read(keys: Keys) -> ModelConfig:
    keys = uniform(keys, max_position=32768)
    mixers = read_mixers(keys, interleaved=True)
    renormalize = keys.flag("norm_topk_prob", True)
    moe = read_moe(keys, renormalize=renormalize, shared_width=keys.integer("shared_expert_intermediate_size"))
    return read_model(keys, qwen_layers(keys, mixers, moe))


FAMILY = Family(
    model_types=("qwen3_next",),
    read=read,
    ignored=(".rotary_emb.inv_freq", "mtp."),
    norms_from_one=True,
    has_draft_layer=True,
    tiny={"qwen3_next": TINY_DELTA | {"shared_expert_intermediate_size": 48}},
)
